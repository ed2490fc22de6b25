// The free slots of one pool, kept as runs so that a request's blocks end up beside each other.
#pragma once

#include <optional>
#include <vector>

#include "slot_set.h"

namespace kvferry {

// Maximal runs of free slots, filed by the bit length of their size, each size class a stack. The same choices as
// FreeSlots in Python: cut from the start of the newest run of the smallest class whose runs all fit.
class FreeSlots {
 public:
  explicit FreeSlots(Slot num_slots);

  Slot size() const { return count_; }
  // Adds a slot that is not in here.
  void put(Slot slot);
  // Appends `count` slots (at most size()) to `slots`, continuing right behind `after` if that is free.
  void take(Slot count, std::optional<Slot> after, std::vector<Slot>& slots);
  // Removes a slot that is in here.
  void remove(Slot slot);
  // Every free slot, in ascending order.
  std::vector<Slot> list() const;
  // Marks every free slot in `seen`, which must not be marked yet.
  void check_integrity(std::vector<bool>& seen) const;

 private:
  Slot pick(Slot count) const;
  Slot cut(Slot start, Slot count, std::vector<Slot>& slots);
  void file(Slot start, Slot length);
  Slot unfile(Slot start);

  Slot count_ = 0;
  std::vector<Slot> length_;   // start of a run -> its length; 0 elsewhere
  std::vector<Slot> start_;    // end of a run -> its start; kNone elsewhere
  std::vector<Slot> older_;    // start of a run -> the one filed before it in its class
  std::vector<Slot> newer_;
  std::vector<Slot> newest_;   // per class
  SlotSet starts_;
};

}  // namespace kvferry
