// The part of UCX's UCP interface that is used here, in declarations of our own, bound when the library is loaded.
// UCP stays compatible within a major version: structures only grow at their end, and a mask says which fields are set.
// tests/transceiver/native/ucp_layout.cpp compares these with the headers that libucx installs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvferry::ucp {

constexpr unsigned kMajor = 1, kOldestMinor = 15;

struct Opaque;
using Handle = Opaque*;
using Status = std::int8_t;   // UCX packs the enum into a byte
using StatusPointer = void*;  // null: done; a small negative number: an error; anything else: a request

constexpr Status kOk = 0, kInProgress = 1, kLastError = -100;

inline bool is_error(StatusPointer pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) >= static_cast<std::uintptr_t>(std::intptr_t{kLastError});
}
inline Status error_of(StatusPointer pointer) { return static_cast<Status>(reinterpret_cast<std::intptr_t>(pointer)); }

struct Params {
  static constexpr std::uint64_t kFeatures = 1 << 0;
  static constexpr std::uint64_t kRemoteMemory = 1 << 1, kActiveMessages = 1 << 6;  // features

  std::uint64_t field_mask;
  std::uint64_t features;
  std::size_t request_size;
  void* request_init;
  void* request_cleanup;
  std::uint64_t tag_sender_mask;
  int mt_workers_shared;
  std::size_t estimated_num_eps;
  std::size_t estimated_num_ppn;
  const char* name;
  std::size_t node_local_id;
};

struct WorkerParams {
  static constexpr std::uint64_t kThreadMode = 1 << 0;
  static constexpr int kSerialized = 1;  // many threads, one at a time

  std::uint64_t field_mask;
  int thread_mode;
  unsigned long cpu_mask[16];
  unsigned events;
  void* user_data;
  int event_fd;
  std::uint64_t flags;
  const char* name;
  std::size_t am_alignment;
  std::uint64_t client_id;
};

struct WorkerAttributes {
  static constexpr std::uint64_t kAddress = 1 << 1;

  std::uint64_t field_mask;
  int thread_mode;
  std::uint32_t address_flags;
  Handle address;
  std::size_t address_nbytes;
  std::size_t max_am_header;
  char name[32];
  std::size_t max_debug_string;
};

struct SocketAddress {
  const void* addr;
  unsigned addrlen;
};

struct EndpointParams {
  static constexpr std::uint64_t kAddress = 1 << 0, kErrorMode = 1 << 1, kErrorHandler = 1 << 2;
  static constexpr int kPeer = 1;  // a peer that dies becomes an error

  std::uint64_t field_mask;
  const void* address;
  int error_mode;
  struct {
    void (*callback)(void* argument, Handle endpoint, Status status);
    void* argument;
  } error_handler;
  void* user_data;
  unsigned flags;
  SocketAddress socket_address;
  Handle connection_request;
  const char* name;
  SocketAddress local_socket_address;
};

struct MapParams {
  static constexpr std::uint64_t kAddress = 1 << 0, kNbytes = 1 << 1;

  std::uint64_t field_mask;
  void* address;
  std::size_t nbytes;
  unsigned flags;
  unsigned protection;
  int memory_type;
  const void* exported;
};

struct RequestParams {
  static constexpr std::uint32_t kCallback = 1 << 1, kUserData = 1 << 2, kFlags = 1 << 4, kMemory = 1 << 8;
  static constexpr std::uint32_t kForceClose = 1 << 0;                  // flags of closing an endpoint
  static constexpr std::uint32_t kEager = 1 << 1, kCopyHeader = 1 << 3;  // flags of an active message

  std::uint32_t op_attr_mask;
  std::uint32_t flags;
  void* request;
  void (*callback)(void* request, Status status, void* user_data);
  std::uint64_t datatype;
  void* user_data;
  void* reply_buffer;
  int memory_type;
  void* recv_info;
  Handle memory;
};

struct MessageHandlerParams {
  static constexpr std::uint64_t kId = 1 << 0, kFlags = 1 << 1, kCallback = 1 << 2, kArgument = 1 << 3;
  static constexpr std::uint32_t kWholeMessage = 1 << 0;  // flags
  static constexpr std::uint64_t kRendezvous = 1 << 17;   // attributes of a message: its data has not come along

  std::uint64_t field_mask;
  unsigned id;
  std::uint32_t flags;
  Status (*callback)(void* argument, const void* header, std::size_t header_nbytes, void* data, std::size_t nbytes,
                     const std::uint64_t* attributes);
  void* argument;
};

// Named as in the library, without its prefix `ucp_`.
struct Library {
  // Throws LibraryError when the library is missing, or of a version that was not declared for.
  explicit Library(const std::string& path);
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  void (*get_version)(unsigned* major, unsigned* minor, unsigned* release) = nullptr;
  Status (*config_read)(const char* prefix, const char* file, Handle* config) = nullptr;
  Status (*config_modify)(Handle config, const char* name, const char* value) = nullptr;
  void (*config_release)(Handle config) = nullptr;
  Status (*init_version)(unsigned major, unsigned minor, const Params* params, Handle config,
                         Handle* context) = nullptr;
  void (*cleanup)(Handle context) = nullptr;
  Status (*worker_create)(Handle context, const WorkerParams* params, Handle* worker) = nullptr;
  void (*worker_destroy)(Handle worker) = nullptr;
  Status (*worker_query)(Handle worker, WorkerAttributes* attributes) = nullptr;
  void (*worker_release_address)(Handle worker, Handle address) = nullptr;
  unsigned (*worker_progress)(Handle worker) = nullptr;
  Status (*worker_set_am_recv_handler)(Handle worker, const MessageHandlerParams* params) = nullptr;
  Status (*ep_create)(Handle worker, const EndpointParams* params, Handle* endpoint) = nullptr;
  StatusPointer (*ep_close_nbx)(Handle endpoint, const RequestParams* params) = nullptr;
  StatusPointer (*ep_flush_nbx)(Handle endpoint, const RequestParams* params) = nullptr;
  Status (*ep_rkey_unpack)(Handle endpoint, const void* packed, Handle* key) = nullptr;
  void (*rkey_destroy)(Handle key) = nullptr;
  Status (*mem_map)(Handle context, const MapParams* params, Handle* memory) = nullptr;
  Status (*mem_unmap)(Handle context, Handle memory) = nullptr;
  Status (*rkey_pack)(Handle context, Handle memory, void** packed, std::size_t* nbytes) = nullptr;
  void (*rkey_buffer_release)(void* packed) = nullptr;
  StatusPointer (*get_nbx)(Handle endpoint, void* buffer, std::size_t nbytes, std::uint64_t remote, Handle key,
                           const RequestParams* params) = nullptr;
  StatusPointer (*put_nbx)(Handle endpoint, const void* buffer, std::size_t nbytes, std::uint64_t remote, Handle key,
                           const RequestParams* params) = nullptr;
  StatusPointer (*am_send_nbx)(Handle endpoint, unsigned id, const void* header, std::size_t header_nbytes,
                               const void* data, std::size_t nbytes, const RequestParams* params) = nullptr;
  Status (*request_check_status)(void* request) = nullptr;
  void (*request_free)(void* request) = nullptr;
};

// Loaded once per process and never unloaded: UCX leaves handlers behind.
const Library& library(const std::string& path);

}  // namespace kvferry::ucp
