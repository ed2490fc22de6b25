// Libraries that are bound when a transceiver first needs them: nothing of them is needed to build.
#pragma once

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "backend.h"

namespace kvferry {

// Throws LibraryError. product: as users know the library.
inline void* open_library(const std::string& path, const std::string& product) {
  void* loaded = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) throw LibraryError(product + " cannot be loaded: " + dlerror());
  return loaded;
}

// Throws LibraryError naming the symbol that is missing.
template <typename Function>
void bind_symbol(void* loaded, Function& function, const std::string& symbol, const std::string& product) {
  function = reinterpret_cast<Function>(dlsym(loaded, symbol.c_str()));
  if (function == nullptr) throw LibraryError("the installed " + product + " lacks " + symbol);
}

// The one Library of each path in this process. Never destroyed, since nothing says when its last user is gone.
template <typename Library>
const Library& load_once(const std::string& path) {
  static std::mutex mutex;
  static auto* const loaded = new std::map<std::string, std::unique_ptr<Library>>();
  const std::scoped_lock lock(mutex);
  auto& entry = (*loaded)[path];
  if (!entry) entry = std::make_unique<Library>(path);
  return *entry;
}

}  // namespace kvferry
