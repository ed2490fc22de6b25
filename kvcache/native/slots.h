// Who holds which slot of one pool. No memory here, only the books.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "eviction.h"
#include "free_slots.h"
#include "slabs.h"

namespace kvferry {

struct Node;

// Every slot is exactly one of: free, held (by caches and holds, counted), cached (published, unheld). Dropping the
// last holder makes a slot cached if it is published, else free.
class SlotStore {
 public:
  // per_slab: slots of a slab, where the pool shares its memory with others; else 0.
  explicit SlotStore(Slot num_slots, Slot per_slab = 0);

  Slot num_slots() const { return static_cast<Slot>(holders_.size()); }
  Slot free() const { return free_.size(); }
  Slot cached() const { return cached_.size(); }
  // How many slots could be taken now, evicting what is cached.
  Slot available() const { return free_.size() + cached_.size(); }
  std::size_t pinned() const { return pins_.size(); }
  std::size_t quarantined() const { return quarantined_.size(); }
  Slot withheld() const { return static_cast<Slot>(withheld_.size()); }
  Slot num_published() const { return num_published_; }
  Slot oldest_cached() const { return cached_.oldest(); }
  Node* publication(Slot slot) const { return published_[slot]; }
  // Whether anybody but pins holds it.
  bool used_by_cache(Slot slot) const;

  // Appends free slots to `slots`; the caller is their one holder.
  void take(Slot count, std::optional<Slot> after, std::vector<Slot>& slots);
  void hold(Slot slot);
  void drop(Slot slot);
  // A held slot becomes findable: from now on it is read only.
  void publish(Slot slot, Node* node);
  // Forgets the content; an unheld slot becomes free.
  void unpublish(Slot slot);

  // Raises where the pool shares its memory with none.
  const SlabIndex& slabs() const;
  // Slots nobody holds: the free ones, ascending, then the cached ones in the order of their eviction.
  std::vector<Slot> idle() const;
  // The first `most` cached slots in the order of their eviction.
  std::vector<Slot> coldest(Slot most) const { return cached_.list(most); }
  // Keeps a free slot from everybody until it is given back.
  void withhold(Slot slot);
  void give_back(Slot slot);

  void pin(const std::vector<Slot>& slots);
  void unpin(const std::vector<Slot>& slots);  // deepest first
  // The caller's hold on unpublished slots becomes a quarantine's.
  void quarantine(const std::vector<Slot>& slots);
  void end_quarantine(const std::vector<Slot>& slots);  // deepest first

  // `holders`: how many caches and holds list each slot.
  void check_integrity(const std::vector<std::int32_t>& holders) const;

 private:
  // Nobody holds it any more.
  void idle(Slot slot, const Node* node);

  FreeSlots free_;
  EvictionQueue cached_;
  Slot num_published_ = 0;
  std::vector<std::int32_t> holders_;
  std::vector<Node*> published_;
  std::unordered_map<Slot, std::int32_t> pins_;
  std::unordered_set<Slot> quarantined_;
  std::unordered_set<Slot> withheld_;
  std::optional<SlabIndex> slabs_;
};

}  // namespace kvferry
