#include "dispatch.h"

#include <atomic>

namespace kvferry::native {

namespace {

#ifdef KVFERRY_X86
const KernelSet& with_byte_products() {
  static const KernelSet set = [] {
    KernelSet both = kAvx512;
    both.name = "avx512vnni", both.int8 = kInt8Avx512Vnni;
    return both;
  }();
  return set;
}
#endif

std::vector<const KernelSet*> supported() {
  std::vector<const KernelSet*> sets;
#ifdef KVFERRY_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    if (__builtin_cpu_supports("avx512vnni")) sets.push_back(&with_byte_products());
    sets.push_back(&kAvx512);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets.push_back(&kAvx2);
#endif
  sets.push_back(&kPortable);
  return sets;
}

std::atomic<const KernelSet*>& current() {
  static std::atomic<const KernelSet*> set{supported().front()};
  return set;
}

}  // namespace

const KernelSet& kernels() { return *current().load(std::memory_order_relaxed); }

std::vector<std::string> available() {
  std::vector<std::string> names;
  for (const KernelSet* set : supported()) names.emplace_back(set->name);
  return names;
}

bool use(const std::string& name) {
  for (const KernelSet* set : supported())
    if (name == set->name) {
      current().store(set, std::memory_order_relaxed);
      return true;
    }
  return false;
}

}  // namespace kvferry::native
