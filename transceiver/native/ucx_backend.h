// UCX's UCP, for host memory: one worker, one endpoint per peer. No thread of its own: the engine's makes progress.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "backend.h"
#include "ucp_api.h"
#include "ucx_metadata.h"

namespace kvferry {

// A fence destroys the worker and makes another: only that keeps the bytes of an abandoned read from landing later.
class UcxBackend : public Backend {
 public:
  UcxBackend(const std::string& library_path, std::string incarnation);
  ~UcxBackend() override;

  void register_memory(std::uint64_t addr, std::uint64_t nbytes) override;
  void deregister_memory(std::uint64_t addr, std::uint64_t nbytes) override;
  std::string metadata() override;
  void load_peer(const std::string& peer, const std::string& metadata) override;
  void forget_peer(const std::string& peer) override;
  std::unique_ptr<Operation> submit(Direction direction, const std::string& peer,
                                    const std::vector<Copy>& copies) override;
  void notify(const std::string& peer, const std::string& message) override;
  Notifications drain() override;
  bool sending() const override { return !sending_.empty(); }
  void fence(const std::string& peer) override;
  void close() override;

  // The copies of one operation. UCX's callbacks point at it, so it stays until the last of them, or the worker, is gone.
  struct Batch {
    UcxBackend* owner;  // null once the worker is gone
    std::size_t pending = 0;
    ucp::Status failure = ucp::kOk;
  };
  // Makes progress while there is some to make; whether there was any.
  bool progress();

 private:
  struct Region {
    std::uint64_t nbytes;
    ucp::Handle memory;
  };
  struct Reachable {
    std::uint64_t nbytes;
    ucp::Handle key;
  };
  struct Peer {
    std::string metadata;
    ucp::Handle endpoint = nullptr;
    ucp::Status failure = ucp::kOk;
    std::map<std::uint64_t, Reachable> regions;  // by address
  };
  struct Closing {
    std::unique_ptr<Peer> peer;
    ucp::StatusPointer request;
  };
  struct Sending {
    const ucp::Library& api;
    std::string data;
    bool ended = false;
  };

  void create_context();
  void create_worker();
  void destroy_worker();
  void connect(const std::string& peer, const UcxMetadata& found, const std::string& metadata);
  void close_endpoint(std::unique_ptr<Peer> peer);
  void reap();
  void check(const char* what, ucp::Status status) const;
  ucp::Handle worker() const;
  Peer& reach(const std::string& peer);
  void post(Direction direction, const Peer& peer, const std::vector<Copy>& copies, Batch& batch);
  void took(Batch& batch, ucp::StatusPointer posted);

  static void copied(void* request, ucp::Status status, void* batch);
  static void sent(void* request, ucp::Status status, void* sending);
  static void failed(void* peer, ucp::Handle endpoint, ucp::Status status);
  static ucp::Status arrived(void* self, const void* header, std::size_t header_nbytes, void* data, std::size_t nbytes,
                             const std::uint64_t* attributes);

  const ucp::Library& api_;
  const std::string incarnation_;
  ucp::Handle context_ = nullptr;
  ucp::Handle worker_ = nullptr;
  std::map<std::uint64_t, Region> regions_;  // by address
  std::map<std::string, std::unique_ptr<Peer>> peers_;
  std::list<Closing> closing_;
  std::list<Sending> sending_;
  std::set<std::shared_ptr<Batch>> batches_;
  Notifications arrived_;
};

}  // namespace kvferry
