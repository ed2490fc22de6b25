// The bookkeeping core of manager V2: who owns which blocks. No memory in here; the same decisions as the Python core.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_set>
#include <vector>

#include "prefix_tree.h"

namespace kvferry {

class Cache;
class Hold;
using Slots = std::vector<std::vector<Slot>>;  // per layer group

// One pool's rule and size.
struct GroupSpec {
  LayerGroup::Keeps keeps;
  std::int64_t window;
  Slot num_slots;
  Slot per_slab = 0;  // slots of a slab, where the group shares its memory
};

struct Counts {
  std::size_t total = 0, free = 0, cached = 0, pinned = 0, quarantined = 0;
};

// The first layer group that cannot give what is asked of it.
struct Shortage {
  std::size_t group;
  Slot needed;
  Slot available;
};

class Ledger {
 public:
  Ledger(const std::vector<GroupSpec>& specs, std::int64_t tokens_per_block, bool reuse, bool journal);
  Ledger(const Ledger&) = delete;

  // loaded: the position up to which the cache will be loaded next; 0 where it will not be.
  std::shared_ptr<Cache> open(const Digest& scope, Tokens tokens, Priority priority, std::int64_t loaded);
  std::size_t match(const Digest& scope, Tokens tokens) { return tree_.find(scope, tokens).size(); }
  Slot available(std::size_t group) const { return groups_.at(group).store.available(); }
  Counts counts() const;
  Counts counts(std::size_t group) const;
  std::vector<Slot> idle(std::size_t group) const { return groups_.at(group).store.idle(); }
  // The first `most` cached slots in the order of their eviction, and the blocks they hold.
  std::vector<std::pair<Digest, Slot>> coldest(std::size_t group, Slot most) const;
  Slot idle_slabs(std::size_t group) const { return groups_.at(group).store.slabs().size(); }
  std::vector<std::pair<bool, Slot>> first_idle_slabs(std::size_t group, Slot most) const {
    return groups_.at(group).store.slabs().first(most);
  }
  // Keeps idle slots from everybody; what was cached in them is evicted.
  void withhold(std::size_t group, const std::vector<Slot>& slots);
  void give_back(std::size_t group, const std::vector<Slot>& slots);
  std::int64_t evicted() const { return tree_.evicted(); }
  void clear() { tree_.clear(); }
  Journal drain() { return tree_.drain(); }
  void check_integrity() const;

 private:
  friend class Cache;
  friend class Hold;

  std::optional<Shortage> shortage(const std::vector<Slot>& needs) const;
  Slots allocate(const std::vector<Slot>& needs, const std::vector<std::optional<Slot>>& after);

  std::vector<LayerGroup> groups_;
  std::int64_t tokens_per_block_;
  bool reuse_;
  PrefixTree tree_;
  std::unordered_set<std::shared_ptr<Cache>> caches_;
  std::unordered_set<std::shared_ptr<Hold>> holds_;
};

// Slots kept beyond their cache's life.
class Hold : public std::enable_shared_from_this<Hold> {
 public:
  enum class Kind { kPinned, kQuarantined };

  Hold(Ledger& ledger, Kind kind, Slots slots, std::vector<std::int64_t> first_blocks);
  const Slots& slots() const { return slots_; }
  const std::vector<std::int64_t>& first_blocks() const { return first_blocks_; }
  void release();

 private:
  Ledger& ledger_;
  Kind kind_;
  Slots slots_;
  std::vector<std::int64_t> first_blocks_;
};

}  // namespace kvferry
