// In which order cached slots are given up.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "checks.h"
#include "free_slots.h"

namespace kvferry {

using Priority = std::int64_t;

// Slots that hold a published block nobody uses: lowest priority first, then least recently used. Whoever releases
// a prefix pushes its deepest block first, so the head is never a block that another one depends on.
class EvictionQueue {
 public:
  explicit EvictionQueue(Slot num_slots) : links_(num_slots) {}

  Slot size() const { return count_; }
  bool contains(Slot slot) const { return links_[slot].queued; }

  void push(Slot slot, Priority priority) {
    Link& link = links_[slot];
    ensure(!link.queued, "a slot is queued for eviction twice");
    Bucket& bucket = buckets_[priority];
    link = {bucket.newest, kNone, priority, true};
    (bucket.newest == kNone ? bucket.oldest : links_[bucket.newest].newer) = slot;
    bucket.newest = slot;
    ++count_;
  }

  void remove(Slot slot) {
    Link& link = links_[slot];
    ensure(link.queued, "a slot is not queued for eviction");
    const auto entry = buckets_.find(link.priority);
    Bucket& bucket = entry->second;
    (link.older == kNone ? bucket.oldest : links_[link.older].newer) = link.newer;
    (link.newer == kNone ? bucket.newest : links_[link.newer].older) = link.older;
    link.queued = false;
    if (bucket.oldest == kNone) buckets_.erase(entry);
    --count_;
  }

  // The first `most` slots, in the order of eviction.
  std::vector<Slot> list(Slot most) const {
    std::vector<Slot> slots;
    slots.reserve(std::min(most, count_));
    for (const auto& [priority, bucket] : buckets_) {
      for (Slot slot = bucket.oldest; slot != kNone; slot = links_[slot].newer) {
        if (static_cast<Slot>(slots.size()) == most) return slots;
        slots.push_back(slot);
      }
    }
    return slots;
  }

  // The slot to evict next; it stays in the queue.
  Slot oldest() const {
    ensure(!buckets_.empty(), "nothing is cached that could be evicted");
    return buckets_.begin()->second.oldest;
  }

 private:
  struct Link {
    Slot older = kNone;
    Slot newer = kNone;
    Priority priority = 0;
    bool queued = false;
  };
  struct Bucket {
    Slot oldest = kNone;
    Slot newest = kNone;
  };

  Slot count_ = 0;
  std::vector<Link> links_;
  std::map<Priority, Bucket> buckets_;
};

}  // namespace kvferry
