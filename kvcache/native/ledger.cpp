#include "ledger.h"

#include "cache.h"
#include "checks.h"

namespace kvferry {
namespace {

std::vector<LayerGroup> build_groups(const std::vector<GroupSpec>& specs) {
  std::vector<LayerGroup> groups;
  for (const GroupSpec& spec : specs) {
    groups.push_back({spec.keeps, spec.window, SlotStore(spec.num_slots, spec.per_slab)});
  }
  return groups;
}

void count(std::vector<std::vector<std::int32_t>>& holders, std::size_t group, const std::vector<Slot>& slots) {
  for (const Slot slot : slots) ++holders[group][slot];
}

}  // namespace

Ledger::Ledger(const std::vector<GroupSpec>& specs, std::int64_t tokens_per_block, bool reuse, bool journal)
    : groups_(build_groups(specs)),
      tokens_per_block_(tokens_per_block),
      reuse_(reuse),
      tree_(groups_, tokens_per_block, journal) {}

std::shared_ptr<Cache> Ledger::open(const Digest& scope, Tokens tokens, Priority priority, std::int64_t loaded) {
  Node* root = tree_.root(scope);
  const auto [path, late] =
      loaded > 0 ? tree_.find_to_load(scope, tokens, loaded) : std::pair(tree_.find(scope, tokens), false);
  auto cache = std::make_shared<Cache>(*this, root, path, priority, late ? std::optional(loaded) : std::nullopt);
  caches_.insert(cache);
  return cache;
}

std::optional<Shortage> Ledger::shortage(const std::vector<Slot>& needs) const {
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    const Slot available = groups_[group].store.available();
    if (needs[group] > available) return Shortage{group, needs[group], available};
  }
  return std::nullopt;
}

// Evicting for one group never costs another one availability: what it takes along there was not in use either.
Slots Ledger::allocate(const std::vector<Slot>& needs, const std::vector<std::optional<Slot>>& after) {
  Slots taken(groups_.size());
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    SlotStore& store = groups_[group].store;
    while (store.free() < needs[group]) tree_.evict(group);
    taken[group].reserve(needs[group]);
    store.take(needs[group], after[group], taken[group]);
  }
  return taken;
}

Counts Ledger::counts() const {
  Counts all;
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    const Counts some = counts(group);
    all.total += some.total;
    all.free += some.free;
    all.cached += some.cached;
    all.pinned += some.pinned;
    all.quarantined += some.quarantined;
  }
  return all;
}

Counts Ledger::counts(std::size_t group) const {
  const SlotStore& store = groups_.at(group).store;
  Counts counts;
  counts.total = store.num_slots() - store.withheld();
  counts.free = store.available();
  counts.cached = store.cached();
  counts.pinned = store.pinned();
  counts.quarantined = store.quarantined();
  return counts;
}

std::vector<std::pair<Digest, Slot>> Ledger::coldest(std::size_t group, Slot most) const {
  const SlotStore& store = groups_.at(group).store;
  std::vector<std::pair<Digest, Slot>> blocks;
  for (const Slot slot : store.coldest(most)) blocks.emplace_back(store.publication(slot)->digest, slot);
  return blocks;
}

void Ledger::withhold(std::size_t group, const std::vector<Slot>& slots) {
  SlotStore& store = groups_.at(group).store;
  for (const Slot slot : slots) {
    if (store.publication(slot) != nullptr) tree_.evict(group, slot);
    store.withhold(slot);
  }
}

void Ledger::give_back(std::size_t group, const std::vector<Slot>& slots) {
  for (const Slot slot : slots) groups_.at(group).store.give_back(slot);
}

void Ledger::check_integrity() const {
  std::vector<std::vector<std::int32_t>> holders;
  for (const LayerGroup& group : groups_) holders.emplace_back(group.store.num_slots(), 0);
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    for (const auto& cache : caches_) count(holders, group, cache->table(group));
    for (const auto& hold : holds_) count(holders, group, hold->slots()[group]);
    groups_[group].store.check_integrity(holders[group]);
  }
  tree_.check_integrity();
}

Hold::Hold(Ledger& ledger, Kind kind, Slots slots, std::vector<std::int64_t> first_blocks)
    : ledger_(ledger), kind_(kind), slots_(std::move(slots)), first_blocks_(std::move(first_blocks)) {
  for (std::size_t group = 0; group < slots_.size(); ++group) {
    SlotStore& store = ledger_.groups_[group].store;
    kind_ == Kind::kPinned ? store.pin(slots_[group]) : store.quarantine(slots_[group]);
  }
}

void Hold::release() {
  ensure(ledger_.holds_.erase(shared_from_this()) == 1, "a hold was released twice");
  for (std::size_t group = 0; group < slots_.size(); ++group) {
    SlotStore& store = ledger_.groups_[group].store;
    kind_ == Kind::kPinned ? store.unpin(slots_[group]) : store.end_quarantine(slots_[group]);
  }
}

}  // namespace kvferry
