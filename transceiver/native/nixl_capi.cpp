#include "nixl_capi.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

#include "backend.h"

namespace kvferry::nixl {

namespace {

template <typename Function>
void bind(void* loaded, Function& function, const char* name) {
  const std::string symbol = std::string("nixl_capi_") + name;
  function = reinterpret_cast<Function>(dlsym(loaded, symbol.c_str()));
  if (function == nullptr) throw LibraryError("the installed NIXL lacks " + symbol);
}

}  // namespace

Library::Library(const std::string& path) {
  void* loaded = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) throw LibraryError(std::string("NIXL cannot be loaded: ") + dlerror());
#define KVFERRY_BIND(name) bind(loaded, name, #name)
  KVFERRY_BIND(create_configured_agent);
  KVFERRY_BIND(destroy_agent);
  KVFERRY_BIND(get_local_md);
  KVFERRY_BIND(load_remote_md);
  KVFERRY_BIND(invalidate_remote_md);
  KVFERRY_BIND(get_plugin_params);
  KVFERRY_BIND(destroy_mem_list);
  KVFERRY_BIND(destroy_params);
  KVFERRY_BIND(create_backend);
  KVFERRY_BIND(destroy_backend);
  KVFERRY_BIND(create_opt_args);
  KVFERRY_BIND(destroy_opt_args);
  KVFERRY_BIND(create_reg_dlist);
  KVFERRY_BIND(destroy_reg_dlist);
  KVFERRY_BIND(reg_dlist_add_desc);
  KVFERRY_BIND(register_mem);
  KVFERRY_BIND(deregister_mem);
  KVFERRY_BIND(create_xfer_dlist);
  KVFERRY_BIND(destroy_xfer_dlist);
  KVFERRY_BIND(xfer_dlist_add_desc);
  KVFERRY_BIND(create_xfer_req);
  KVFERRY_BIND(post_xfer_req);
  KVFERRY_BIND(get_xfer_status);
  KVFERRY_BIND(release_xfer_req);
  KVFERRY_BIND(destroy_xfer_req);
  KVFERRY_BIND(gen_notif);
  KVFERRY_BIND(get_notifs);
  KVFERRY_BIND(create_notif_map);
  KVFERRY_BIND(destroy_notif_map);
  KVFERRY_BIND(notif_map_size);
  KVFERRY_BIND(notif_map_get_agent_at);
  KVFERRY_BIND(notif_map_get_notifs_size);
  KVFERRY_BIND(notif_map_get_notif);
#undef KVFERRY_BIND
}

const Library& library(const std::string& path) {
  static std::mutex mutex;
  static auto* const loaded = new std::map<std::string, std::unique_ptr<Library>>();
  const std::scoped_lock lock(mutex);
  auto& entry = (*loaded)[path];
  if (!entry) entry = std::make_unique<Library>(path);
  return *entry;
}

}  // namespace kvferry::nixl
