// NIXL over its C API, for host memory. No progress thread: an idle one costs, and the engine polls when it must.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "backend.h"
#include "nixl_capi.h"

namespace kvferry {

class NixlOperation;

// A plug-in of NIXL is missing, or does not start.
class PluginError : public LibraryError {
 public:
  using LibraryError::LibraryError;
};

// The NIXL agent is named `<incarnation>/<epoch>`. A fence destroys it and makes the next epoch's: only that keeps the
// bytes of an abandoned read from landing later.
class NixlBackend : public Backend {
 public:
  NixlBackend(const std::string& library_path, std::string incarnation, std::vector<std::string> plugins);
  ~NixlBackend() override;

  void register_memory(std::uint64_t addr, std::uint64_t nbytes) override;
  void deregister_memory(std::uint64_t addr, std::uint64_t nbytes) override;
  std::string metadata() override;
  void load_peer(const std::string& peer, const std::string& metadata) override;
  void forget_peer(const std::string& peer) override;
  std::unique_ptr<Operation> submit(Direction direction, const std::string& peer,
                                    const std::vector<Copy>& copies) override;
  void notify(const std::string& peer, const std::string& message) override;
  Notifications drain() override;
  void fence(const std::string& peer) override;
  void close() override;

 private:
  friend class NixlOperation;
  struct Peer {
    std::string name;
    std::string metadata;
  };

  void create();
  void destroy();
  void check(const char* what, nixl::Status status) const;
  nixl::Handle agent() const;
  const Peer& known(const std::string& peer) const;
  std::string add(const std::string& metadata);
  void change_registration(std::uint64_t addr, std::uint64_t nbytes, bool add);
  nixl::Handle request(Direction direction, const std::string& name, const std::vector<Copy>& copies);

  const nixl::Library& api_;
  const std::string incarnation_;
  const std::vector<std::string> plugins_;
  nixl::Handle agent_ = nullptr;
  std::vector<nixl::Handle> backends_;
  unsigned epoch_ = 0;
  std::multiset<std::pair<std::uint64_t, std::uint64_t>> regions_;
  std::map<std::string, Peer> peers_;
  std::set<NixlOperation*> operations_;
};

}  // namespace kvferry
