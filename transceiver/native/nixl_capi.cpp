#include "nixl_capi.h"

#include "dynamic_library.h"

namespace kvferry::nixl {

Library::Library(const std::string& path) {
  void* loaded = open_library(path, "NIXL");
#define KVFERRY_BIND(name) bind_symbol(loaded, name, "nixl_capi_" #name, "NIXL")
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

const Library& library(const std::string& path) { return load_once<Library>(path); }

}  // namespace kvferry::nixl
