#include "ucp_api.h"

#include "dynamic_library.h"

namespace kvferry::ucp {

Library::Library(const std::string& path) {
  void* loaded = open_library(path, "UCX");
#define KVFERRY_BIND(name) bind_symbol(loaded, name, "ucp_" #name, "UCX")
  KVFERRY_BIND(get_version);
  unsigned major = 0, minor = 0, release = 0;
  get_version(&major, &minor, &release);
  if (major != kMajor || minor < kOldestMinor) {
    throw LibraryError("UCX " + std::to_string(major) + "." + std::to_string(minor) + " is installed, but " +
                       std::to_string(kMajor) + "." + std::to_string(kOldestMinor) + " or a later 1.x is needed");
  }
  KVFERRY_BIND(config_read);
  KVFERRY_BIND(config_modify);
  KVFERRY_BIND(config_release);
  KVFERRY_BIND(init_version);
  KVFERRY_BIND(cleanup);
  KVFERRY_BIND(worker_create);
  KVFERRY_BIND(worker_destroy);
  KVFERRY_BIND(worker_query);
  KVFERRY_BIND(worker_release_address);
  KVFERRY_BIND(worker_progress);
  KVFERRY_BIND(worker_set_am_recv_handler);
  KVFERRY_BIND(ep_create);
  KVFERRY_BIND(ep_close_nbx);
  KVFERRY_BIND(ep_flush_nbx);
  KVFERRY_BIND(ep_rkey_unpack);
  KVFERRY_BIND(rkey_destroy);
  KVFERRY_BIND(mem_map);
  KVFERRY_BIND(mem_unmap);
  KVFERRY_BIND(rkey_pack);
  KVFERRY_BIND(rkey_buffer_release);
  KVFERRY_BIND(get_nbx);
  KVFERRY_BIND(put_nbx);
  KVFERRY_BIND(am_send_nbx);
  KVFERRY_BIND(request_check_status);
  KVFERRY_BIND(request_free);
#undef KVFERRY_BIND
}

const Library& library(const std::string& path) { return load_once<Library>(path); }

}  // namespace kvferry::ucp
