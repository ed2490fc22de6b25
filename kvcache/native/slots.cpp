#include "slots.h"

#include "checks.h"
#include "prefix_tree.h"

namespace kvferry {

SlotStore::SlotStore(Slot num_slots, Slot per_slab)
    : free_(num_slots), cached_(num_slots), holders_(num_slots, 0), published_(num_slots, nullptr) {
  if (per_slab > 0) slabs_.emplace(num_slots, per_slab);
}

const SlabIndex& SlotStore::slabs() const {
  ensure(slabs_.has_value(), "this group shares its memory with none");
  return *slabs_;
}

bool SlotStore::used_by_cache(Slot slot) const {
  const auto pins = pins_.find(slot);
  return holders_[slot] > (pins == pins_.end() ? 0 : pins->second);
}

void SlotStore::take(Slot count, std::optional<Slot> after, std::vector<Slot>& slots) {
  const std::size_t before = slots.size();
  free_.take(count, after, slots);
  for (std::size_t index = before; index < slots.size(); ++index) {
    holders_[slots[index]] = 1;
    if (slabs_) slabs_->take(slots[index]);
  }
}

void SlotStore::hold(Slot slot) {
  if (holders_[slot]++ > 0) return;
  cached_.remove(slot);
  if (slabs_) slabs_->hold(slot);
}

void SlotStore::drop(Slot slot) {
  ensure(holders_[slot] > 0, "a slot is given back twice");
  if (--holders_[slot] == 0) idle(slot, published_[slot]);
}

void SlotStore::idle(Slot slot, const Node* node) {
  if (node != nullptr) {
    cached_.push(slot, node->priority);
    if (slabs_) slabs_->cache(slot, node->priority);
  } else {
    free_.put(slot);
    if (slabs_) slabs_->free(slot);
  }
}

void SlotStore::publish(Slot slot, Node* node) {
  ensure(holders_[slot] > 0, "a slot is published by nobody");
  ensure(published_[slot] == nullptr, "a slot is published twice");
  published_[slot] = node;
  ++num_published_;
}

void SlotStore::unpublish(Slot slot) {
  published_[slot] = nullptr;
  --num_published_;
  if (holders_[slot] == 0) {
    cached_.remove(slot);
    free_.put(slot);
    if (slabs_) slabs_->evict(slot);
  }
}

std::vector<Slot> SlotStore::idle() const {
  std::vector<Slot> slots = free_.list();
  const std::vector<Slot> cached = cached_.list(cached_.size());
  slots.insert(slots.end(), cached.begin(), cached.end());
  return slots;
}

void SlotStore::withhold(Slot slot) {
  free_.remove(slot);
  withheld_.insert(slot);
  if (slabs_) slabs_->take(slot);
}

void SlotStore::give_back(Slot slot) {
  ensure(withheld_.erase(slot) == 1, "a slot is given back that was not withheld");
  idle(slot, nullptr);
}

void SlotStore::pin(const std::vector<Slot>& slots) {
  for (const Slot slot : slots) {
    hold(slot);
    ++pins_[slot];
  }
}

void SlotStore::unpin(const std::vector<Slot>& slots) {
  for (auto slot = slots.rbegin(); slot != slots.rend(); ++slot) {
    const auto pins = pins_.find(*slot);
    ensure(pins != pins_.end(), "a slot is unpinned that was not pinned");
    if (--pins->second == 0) pins_.erase(pins);
    drop(*slot);
  }
}

void SlotStore::quarantine(const std::vector<Slot>& slots) {
  for (const Slot slot : slots) {
    ensure(published_[slot] == nullptr, "a published slot is quarantined: nobody may be writing it");
    quarantined_.insert(slot);
  }
}

void SlotStore::end_quarantine(const std::vector<Slot>& slots) {
  for (auto slot = slots.rbegin(); slot != slots.rend(); ++slot) {
    ensure(quarantined_.erase(*slot) == 1, "a slot leaves a quarantine it was not in");
    drop(*slot);
  }
}

void SlotStore::check_integrity(const std::vector<std::int32_t>& holders) const {
  std::vector<bool> seen(holders_.size(), false);
  free_.check_integrity(seen);
  std::vector<bool> busy(holders_.size(), false);
  std::vector<bool> queue(holders_.size(), false);
  Slot cached = 0;
  Slot published = 0;
  for (Slot slot = 0; slot < num_slots(); ++slot) {
    const bool queued = cached_.contains(slot);
    cached += queued;
    published += published_[slot] != nullptr;
    ensure(!seen[slot] || published_[slot] == nullptr, "a free slot is still published");
    ensure(!queued || published_[slot] != nullptr, "a cached slot is not published");
    const bool withheld = withheld_.contains(slot);
    ensure(!withheld || published_[slot] == nullptr, "a withheld slot is published");
    ensure(int{seen[slot]} + int{queued} + int{holders_[slot] > 0} + int{withheld} == 1,
           "a slot is lost or stands twice");
    ensure(holders_[slot] == holders[slot], "holders do not add up");
    busy[slot] = withheld || holders_[slot] > 0;
    queue[slot] = queued;
  }
  ensure(cached == cached_.size(), "the cached slots do not add up");
  ensure(published == num_published_, "the published slots do not add up");
  for (const auto& [slot, count] : pins_) ensure(count > 0 && count <= holders_[slot], "pins do not add up");
  for (const Slot slot : quarantined_) ensure(holders_[slot] > 0, "a quarantined slot is held by nobody");
  if (slabs_) slabs_->check_integrity(busy, queue);
}

}  // namespace kvferry
