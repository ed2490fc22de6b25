#include "free_slots.h"

#include <algorithm>
#include <bit>

#include "checks.h"

namespace kvferry {
namespace {

std::size_t size_class(Slot length) { return std::bit_width(static_cast<std::uint32_t>(length)); }

}  // namespace

FreeSlots::FreeSlots(Slot num_slots)
    : length_(num_slots + 1, 0),
      start_(num_slots + 1, kNone),
      older_(num_slots + 1, kNone),
      newer_(num_slots + 1, kNone),
      newest_(size_class(num_slots) + 1, kNone),
      starts_(num_slots) {
  if (num_slots > 0) file(0, num_slots);
}

void FreeSlots::put(Slot slot) {
  Slot start = slot;
  Slot stop = slot + 1;
  if (const Slot before = start_[slot]; before != kNone) {
    unfile(before);
    start = before;
  }
  if (length_[stop] > 0) stop += unfile(stop);
  file(start, stop - start);
}

void FreeSlots::take(Slot count, std::optional<Slot> after, std::vector<Slot>& slots) {
  ensure(count >= 0 && count <= count_, "more slots were asked for than are free");
  if (after && count > 0 && length_[*after + 1] > 0) count -= cut(*after + 1, count, slots);
  while (count > 0) count -= cut(pick(count), count, slots);
}

void FreeSlots::remove(Slot slot) {
  const Slot start = starts_.last_up_to(slot);
  ensure(start != kNone && slot < start + length_[start], "a slot is removed that is not free");
  const Slot length = unfile(start);
  if (slot > start) file(start, slot - start);
  if (slot + 1 < start + length) file(slot + 1, start + length - slot - 1);
}

std::vector<Slot> FreeSlots::list() const {
  std::vector<Slot> slots;
  slots.reserve(count_);
  for (Slot start = 0; start < static_cast<Slot>(length_.size()); ++start) {
    for (Slot slot = start; slot < start + length_[start]; ++slot) slots.push_back(slot);
  }
  return slots;
}

Slot FreeSlots::pick(Slot count) const {
  const std::size_t fitting = std::bit_width(static_cast<std::uint32_t>(count - 1)) + 1u;
  for (std::size_t size = fitting; size < newest_.size(); ++size) {
    if (newest_[size] != kNone) return newest_[size];
  }
  for (std::size_t size = std::min(fitting, newest_.size()); size-- > 1;) {
    if (newest_[size] != kNone) return newest_[size];
  }
  throw BrokenInvariant("no free run, though the count says so");
}

Slot FreeSlots::cut(Slot start, Slot count, std::vector<Slot>& slots) {
  const Slot length = unfile(start);
  const Slot used = std::min(count, length);
  for (Slot slot = start; slot < start + used; ++slot) slots.push_back(slot);
  if (used < length) file(start + used, length - used);
  return used;
}

void FreeSlots::file(Slot start, Slot length) {
  length_[start] = length;
  start_[start + length] = start;
  Slot& newest = newest_[size_class(length)];
  older_[start] = newest;
  newer_[start] = kNone;
  if (newest != kNone) newer_[newest] = start;
  newest = start;
  starts_.add(start);
  count_ += length;
}

Slot FreeSlots::unfile(Slot start) {
  const Slot length = length_[start];
  starts_.remove(start);
  length_[start] = 0;
  start_[start + length] = kNone;
  const Slot older = older_[start];
  const Slot newer = newer_[start];
  if (older != kNone) newer_[older] = newer;
  if (newer != kNone) {
    older_[newer] = older;
  } else {
    newest_[size_class(length)] = older;
  }
  count_ -= length;
  return length;
}

void FreeSlots::check_integrity(std::vector<bool>& seen) const {
  Slot counted = 0;
  std::size_t runs = 0;
  for (Slot start = 0; start < static_cast<Slot>(length_.size()); ++start) {
    const Slot length = length_[start];
    if (length == 0) continue;
    ++runs;
    counted += length;
    ensure(starts_.last_up_to(start + length - 1) == start, "a run's start is not found");
    ensure(start_[start + length] == start, "a run's end does not know its start");
    ensure(length_[start + length] == 0, "two runs touch and were not joined");
    for (Slot slot = start; slot < start + length; ++slot) {
      ensure(!seen[slot], "a slot stands twice");
      seen[slot] = true;
    }
  }
  ensure(counted == count_, "the free slots do not add up");
  std::size_t filed = 0;
  for (std::size_t size = 0; size < newest_.size(); ++size) {
    for (Slot start = newest_[size]; start != kNone; start = older_[start], ++filed) {
      ensure(length_[start] > 0 && size_class(length_[start]) == size, "a run is filed in the wrong class");
    }
  }
  ensure(filed == runs, "a run is not filed");
}

}  // namespace kvferry
