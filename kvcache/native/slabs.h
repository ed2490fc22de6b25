// Which stretches of a shared pool could change hands: kept up to date with every slot, never looked for.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "checks.h"
#include "eviction.h"

namespace kvferry {

// The slabs of one pool, `per_slab` slots each, in which nobody holds a slot. Slots are free, cached or busy (held, or
// withheld); a slab is idle while none of its slots is busy. The same choices as SlabIndex in Python.
class SlabIndex {
 public:
  // All slots are free.
  SlabIndex(Slot num_slots, Slot per_slab)
      : per_slab_(per_slab),
        slabs_(num_slots / per_slab),
        empty_(num_slots / per_slab),
        full_(num_slots / per_slab) {
    ensure(num_slots % per_slab == 0, "the slots are no whole number of slabs");
    for (Slot slab = 0; slab < num_slots / per_slab; ++slab) empty_.push(slab, 0);
  }

  // How many slabs are idle.
  Slot size() const { return empty_.size() + full_.size(); }

  // Up to `most` idle slabs as (whether something is cached there, slab): empty ones first, then in the order in which
  // eviction would have come to them: lowest priority, then idle for longest.
  std::vector<std::pair<bool, Slot>> first(Slot most) const {
    std::vector<std::pair<bool, Slot>> chosen;
    for (const Slot slab : empty_.list(most)) chosen.emplace_back(false, slab);
    for (const Slot slab : full_.list(most - static_cast<Slot>(chosen.size()))) chosen.emplace_back(true, slab);
    return chosen;
  }

  // A free slot becomes busy.
  void take(Slot slot) { ++leave(slot / per_slab_).busy; }

  // A cached slot becomes busy.
  void hold(Slot slot) {
    Slab& slab = leave(slot / per_slab_);
    ++slab.busy;
    --slab.cached;
  }

  // A busy slot becomes free.
  void free(Slot slot) {
    --slabs_[slot / per_slab_].busy;
    enter(slot / per_slab_);
  }

  // A busy slot becomes cached.
  void cache(Slot slot, Priority priority) {
    Slab& slab = slabs_[slot / per_slab_];
    slab.priority = slab.cached > 0 ? std::max(slab.priority, priority) : priority;
    --slab.busy;
    ++slab.cached;
    enter(slot / per_slab_);
  }

  // A cached slot becomes free.
  void evict(Slot slot) {
    const Slot at = slot / per_slab_;
    if (--slabs_[at].cached > 0 || slabs_[at].busy > 0) return;
    full_.remove(at);
    empty_.push(at, 0);
  }

  // busy, cached: of each slot.
  void check_integrity(const std::vector<bool>& busy, const std::vector<bool>& cached) const {
    for (Slot at = 0; at < static_cast<Slot>(slabs_.size()); ++at) {
      const auto first = at * per_slab_;
      const auto count = [&](const std::vector<bool>& which) {
        return std::count(which.begin() + first, which.begin() + first + per_slab_, true);
      };
      ensure(slabs_[at].busy == count(busy), "busy slots of a slab do not add up");
      ensure(slabs_[at].cached == count(cached), "cached slots of a slab do not add up");
      ensure(empty_.contains(at) == (slabs_[at].busy == 0 && slabs_[at].cached == 0), "an empty slab is not listed");
      ensure(full_.contains(at) == (slabs_[at].busy == 0 && slabs_[at].cached > 0), "a cached slab is not listed");
    }
  }

 private:
  struct Slab {
    Slot busy = 0;
    Slot cached = 0;
    Priority priority = 0;  // the highest of those cached since it had none
  };

  void enter(Slot at) {
    const Slab& slab = slabs_[at];
    if (slab.busy > 0) return;
    if (slab.cached > 0) {
      full_.push(at, slab.priority);
    } else {
      empty_.push(at, 0);
    }
  }

  Slab& leave(Slot at) {
    if (slabs_[at].busy == 0) (slabs_[at].cached > 0 ? full_ : empty_).remove(at);
    return slabs_[at];
  }

  Slot per_slab_;
  std::vector<Slab> slabs_;
  EvictionQueue empty_;  // idle, with nothing cached
  EvictionQueue full_;   // idle, with something cached
};

}  // namespace kvferry
