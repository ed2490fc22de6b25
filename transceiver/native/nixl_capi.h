// The part of NIXL's C API that is used here, in declarations of our own, bound when the library is loaded.
// Written for nixl-cu12 1.5: the caller checks the installed version before it loads the library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvferry::nixl {

struct Opaque;
using Handle = Opaque*;
using Status = int;

constexpr Status kSuccess = 0;
constexpr Status kInProgress = 1;
constexpr int kHostMemory = 0;

struct AgentConfig {
  bool progress_thread;
  bool listen_thread;
  std::uint16_t listen_port;
  int thread_sync;
  unsigned int workers;
  std::uint64_t progress_delay_us;
  std::uint64_t listen_delay_us;
  bool telemetry;
};

// Every function returns a Status. Named as in the library, without its prefix `nixl_capi_`.
struct Library {
  explicit Library(const std::string& path);
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  Status (*create_configured_agent)(const char* name, const AgentConfig* config, Handle* agent) = nullptr;
  Status (*destroy_agent)(Handle agent) = nullptr;
  Status (*get_local_md)(Handle agent, void** data, std::size_t* nbytes) = nullptr;
  Status (*load_remote_md)(Handle agent, const void* data, std::size_t nbytes, char** name) = nullptr;
  Status (*invalidate_remote_md)(Handle agent, const char* name) = nullptr;
  Status (*get_plugin_params)(Handle agent, const char* plugin, Handle* memories, Handle* params) = nullptr;
  Status (*destroy_mem_list)(Handle memories) = nullptr;
  Status (*destroy_params)(Handle params) = nullptr;
  Status (*create_backend)(Handle agent, const char* plugin, Handle params, Handle* backend) = nullptr;
  Status (*destroy_backend)(Handle backend) = nullptr;
  Status (*create_opt_args)(Handle* args) = nullptr;
  Status (*destroy_opt_args)(Handle args) = nullptr;
  Status (*create_reg_dlist)(int memory, Handle* list, bool sorted) = nullptr;
  Status (*destroy_reg_dlist)(Handle list) = nullptr;
  Status (*reg_dlist_add_desc)(Handle list, std::uintptr_t addr, std::size_t nbytes, std::uint64_t device,
                               const void* metadata, std::size_t metadata_nbytes) = nullptr;
  Status (*register_mem)(Handle agent, Handle list, Handle args) = nullptr;
  Status (*deregister_mem)(Handle agent, Handle list, Handle args) = nullptr;
  Status (*create_xfer_dlist)(int memory, Handle* list, bool sorted) = nullptr;
  Status (*destroy_xfer_dlist)(Handle list) = nullptr;
  Status (*xfer_dlist_add_desc)(Handle list, std::uintptr_t addr, std::size_t nbytes, std::uint64_t device) = nullptr;
  Status (*create_xfer_req)(Handle agent, int direction, Handle local, Handle remote, const char* peer,
                            Handle* request, Handle args) = nullptr;
  Status (*post_xfer_req)(Handle agent, Handle request, Handle args) = nullptr;
  Status (*get_xfer_status)(Handle agent, Handle request) = nullptr;
  Status (*release_xfer_req)(Handle agent, Handle request) = nullptr;
  Status (*destroy_xfer_req)(Handle request) = nullptr;
  Status (*gen_notif)(Handle agent, const char* peer, const void* data, std::size_t nbytes, Handle args) = nullptr;
  Status (*get_notifs)(Handle agent, Handle map, Handle args) = nullptr;
  Status (*create_notif_map)(Handle* map) = nullptr;
  Status (*destroy_notif_map)(Handle map) = nullptr;
  Status (*notif_map_size)(Handle map, std::size_t* size) = nullptr;
  Status (*notif_map_get_agent_at)(Handle map, std::size_t index, const char** name) = nullptr;
  Status (*notif_map_get_notifs_size)(Handle map, const char* name, std::size_t* size) = nullptr;
  Status (*notif_map_get_notif)(Handle map, const char* name, std::size_t index, const void** data,
                                std::size_t* nbytes) = nullptr;
};

// Loaded once per process and never unloaded: NIXL's plug-ins leave threads and exit handlers behind.
const Library& library(const std::string& path);

}  // namespace kvferry::nixl
