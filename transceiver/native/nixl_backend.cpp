#include "nixl_backend.h"

#include <cstdlib>
#include <utility>

namespace kvferry {

namespace {

// Owns one of NIXL's lists for the length of a call.
class Scoped {
 public:
  Scoped(nixl::Handle handle, nixl::Status (*destroy)(nixl::Handle)) : handle_(handle), destroy_(destroy) {}
  ~Scoped() { destroy_(handle_); }
  Scoped(const Scoped&) = delete;
  Scoped& operator=(const Scoped&) = delete;

 private:
  nixl::Handle handle_;
  nixl::Status (*destroy_)(nixl::Handle);
};

std::string incarnation_of(const std::string& agent_name) { return agent_name.substr(0, agent_name.rfind('/')); }

}  // namespace

// Outlives its backend harmlessly: `detach` is called when the NIXL agent goes.
class NixlOperation : public Operation {
 public:
  NixlOperation(NixlBackend& backend, nixl::Handle request) : backend_(&backend), request_(request) {
    backend_->operations_.insert(this);
  }
  ~NixlOperation() override { release(); }
  NixlOperation(const NixlOperation&) = delete;
  NixlOperation& operator=(const NixlOperation&) = delete;

  void post() { observe(backend_->api_.post_xfer_req(backend_->agent_, request_, nullptr)); }

  OpState poll() override {
    if (state_ == OpState::Submitted && backend_ != nullptr) {
      observe(backend_->api_.get_xfer_status(backend_->agent_, request_));
    }
    return state_;
  }

  std::string error() const override { return error_; }

  void detach() {
    release();
    if (state_ != OpState::Done) state_ = OpState::NotSubmitted;
  }

 private:
  void observe(nixl::Status status) {
    if (status == nixl::kSuccess) {
      state_ = OpState::Done;
    } else if (status == nixl::kInProgress) {
      state_ = OpState::Submitted;
    } else {
      state_ = OpState::InDoubt;
      error_ = "NIXL reports status " + std::to_string(status) + " (the peer is gone, or its memory)";
    }
  }

  void release() {
    if (backend_ == nullptr) return;
    // One in progress is not released by NIXL; it goes when the agent is destroyed, which a fence does.
    if (backend_->api_.release_xfer_req(backend_->agent_, request_) == nixl::kSuccess) {
      backend_->api_.destroy_xfer_req(request_);
    }
    backend_->operations_.erase(this);
    backend_ = nullptr;
  }

  NixlBackend* backend_;
  nixl::Handle request_;
  OpState state_ = OpState::NotSubmitted;
  std::string error_;
};

NixlBackend::NixlBackend(const std::string& library_path, std::string incarnation, std::vector<std::string> plugins)
    : api_(nixl::library(library_path)), incarnation_(std::move(incarnation)), plugins_(std::move(plugins)) {
  create();
}

NixlBackend::~NixlBackend() { destroy(); }

void NixlBackend::register_memory(std::uint64_t addr, std::uint64_t nbytes) {
  change_registration(addr, nbytes, true);
  regions_.emplace(addr, nbytes);
}

void NixlBackend::deregister_memory(std::uint64_t addr, std::uint64_t nbytes) {
  const auto found = regions_.find({addr, nbytes});
  if (found == regions_.end()) throw BackendError("that memory is not registered");
  regions_.erase(found);
  change_registration(addr, nbytes, false);
}

std::string NixlBackend::metadata() {
  void* data = nullptr;
  std::size_t nbytes = 0;
  check("describe itself", api_.get_local_md(agent(), &data, &nbytes));
  std::string copied(static_cast<const char*>(data), nbytes);
  std::free(data);
  return copied;
}

void NixlBackend::load_peer(const std::string& peer, const std::string& metadata) {
  forget_peer(peer);
  const std::string name = add(metadata);
  if (incarnation_of(name) != peer) {
    api_.invalidate_remote_md(agent(), name.c_str());
    throw BackendError("the agent metadata of " + peer + " describes '" + name + "'");
  }
  peers_[peer] = {name, metadata};
}

void NixlBackend::forget_peer(const std::string& peer) {
  const auto found = peers_.find(peer);
  if (found == peers_.end()) return;
  const std::string name = found->second.name;
  peers_.erase(found);
  check("forget a peer", api_.invalidate_remote_md(agent(), name.c_str()));
}

std::unique_ptr<Operation> NixlBackend::submit(Direction direction, const std::string& peer,
                                               const std::vector<Copy>& copies) {
  auto operation = std::make_unique<NixlOperation>(*this, request(direction, known(peer).name, copies));
  operation->post();
  return operation;
}

nixl::Handle NixlBackend::request(Direction direction, const std::string& name, const std::vector<Copy>& copies) {
  nixl::Handle local = nullptr;
  nixl::Handle remote = nullptr;
  check("prepare a transfer", api_.create_xfer_dlist(nixl::kHostMemory, &local, false));
  const Scoped own_local(local, api_.destroy_xfer_dlist);
  check("prepare a transfer", api_.create_xfer_dlist(nixl::kHostMemory, &remote, false));
  const Scoped own_remote(remote, api_.destroy_xfer_dlist);
  for (const Copy& copy : copies) {
    check("prepare a transfer", api_.xfer_dlist_add_desc(local, copy.local, copy.nbytes, 0));
    check("prepare a transfer", api_.xfer_dlist_add_desc(remote, copy.remote, copy.nbytes, 0));
  }
  nixl::Handle request = nullptr;
  const int read_or_write = direction == Direction::Read ? 0 : 1;
  check("prepare a transfer (is its memory registered on both sides?)",
        api_.create_xfer_req(agent(), read_or_write, local, remote, name.c_str(), &request, nullptr));
  return request;
}

void NixlBackend::notify(const std::string& peer, const std::string& message) {
  check("notify", api_.gen_notif(agent(), known(peer).name.c_str(), message.data(), message.size(), nullptr));
}

Backend::Notifications NixlBackend::drain() {
  nixl::Handle map = nullptr;
  check("receive notifications", api_.create_notif_map(&map));
  const Scoped own_map(map, api_.destroy_notif_map);
  check("receive notifications", api_.get_notifs(agent(), map, nullptr));
  std::size_t agents = 0;
  api_.notif_map_size(map, &agents);
  Notifications arrived;
  for (std::size_t index = 0; index < agents; ++index) {
    const char* name = nullptr;
    std::size_t count = 0;
    api_.notif_map_get_agent_at(map, index, &name);
    api_.notif_map_get_notifs_size(map, name, &count);
    for (std::size_t number = 0; number < count; ++number) {
      const void* data = nullptr;
      std::size_t nbytes = 0;
      api_.notif_map_get_notif(map, name, number, &data, &nbytes);
      arrived.emplace_back(incarnation_of(name), std::string(static_cast<const char*>(data), nbytes));
    }
  }
  return arrived;
}

void NixlBackend::fence(const std::string& peer) {
  peers_.erase(peer);
  destroy();
  create();
  for (const auto& [addr, nbytes] : regions_) change_registration(addr, nbytes, true);
  for (auto entry = peers_.begin(); entry != peers_.end();) {
    try {
      entry->second.name = add(entry->second.metadata);
      ++entry;
    } catch (const BackendError&) {
      entry = peers_.erase(entry);  // its next operation says so
    }
  }
}

void NixlBackend::close() {
  peers_.clear();
  destroy();
  regions_.clear();
}

void NixlBackend::create() {
  nixl::AgentConfig config{};
  config.progress_thread = false;
  const std::string name = incarnation_ + "/" + std::to_string(++epoch_);
  check("start", api_.create_configured_agent(name.c_str(), &config, &agent_));
  for (const std::string& plugin : plugins_) {
    nixl::Handle memories = nullptr;
    nixl::Handle params = nullptr;
    nixl::Handle backend = nullptr;
    if (api_.get_plugin_params(agent_, plugin.c_str(), &memories, &params) != nixl::kSuccess) {
      throw PluginError("NIXL has no plug-in " + plugin);
    }
    const Scoped own_memories(memories, api_.destroy_mem_list);
    const Scoped own_params(params, api_.destroy_params);
    if (api_.create_backend(agent_, plugin.c_str(), params, &backend) != nixl::kSuccess) {
      throw PluginError("NIXL's plug-in " + plugin + " does not start on this machine");
    }
    backends_.push_back(backend);
  }
}

void NixlBackend::destroy() {
  while (!operations_.empty()) (*operations_.begin())->detach();
  for (nixl::Handle backend : backends_) api_.destroy_backend(backend);
  backends_.clear();
  if (agent_ != nullptr) api_.destroy_agent(std::exchange(agent_, nullptr));
}

void NixlBackend::check(const char* what, nixl::Status status) const {
  if (status != nixl::kSuccess) {
    throw BackendError(std::string("NIXL could not ") + what + ": status " + std::to_string(status));
  }
}

nixl::Handle NixlBackend::agent() const {
  if (agent_ == nullptr) throw BackendError("the NIXL agent is not running");
  return agent_;
}

const NixlBackend::Peer& NixlBackend::known(const std::string& peer) const {
  const auto found = peers_.find(peer);
  if (found == peers_.end()) throw BackendError("peer " + peer + " is not known to the NIXL agent");
  return found->second;
}

std::string NixlBackend::add(const std::string& metadata) {
  char* name = nullptr;
  check("load a peer", api_.load_remote_md(agent(), metadata.data(), metadata.size(), &name));
  std::string copied(name);
  std::free(name);
  return copied;
}

void NixlBackend::change_registration(std::uint64_t addr, std::uint64_t nbytes, bool add) {
  nixl::Handle list = nullptr;
  check("register memory", api_.create_reg_dlist(nixl::kHostMemory, &list, false));
  const Scoped own_list(list, api_.destroy_reg_dlist);
  check("register memory", api_.reg_dlist_add_desc(list, addr, nbytes, 0, nullptr, 0));
  if (add) {
    check("register memory", api_.register_mem(agent(), list, nullptr));
  } else {
    check("deregister memory", api_.deregister_mem(agent(), list, nullptr));
  }
}

}  // namespace kvferry
