#include "cache.h"

#include <algorithm>
#include <utility>

#include "checks.h"

namespace kvferry {

Cache::Cache(Ledger& ledger, Node* root, const std::vector<Node*>& path, Priority priority,
             std::optional<std::int64_t> late_until)
    : ledger_(ledger),
      priority_(priority),
      published_(static_cast<std::int64_t>(path.size())),
      late_(late_until.has_value()),
      tip_(path.empty() ? root : path.back()),
      tables_(ledger.groups_.size()) {
  const std::int64_t history = late_until.value_or(published_ * ledger_.tokens_per_block_);
  for (std::size_t group = 0; group < tables_.size(); ++group) {
    LayerGroup& rule = ledger_.groups_[group];
    first_.push_back(rule.first_live_block(history, ledger_.tokens_per_block_));
    if (late_ && !rule.keeps_all()) continue;
    for (auto index = static_cast<std::size_t>(first_[group]); index < path.size(); ++index) {
      const Slot slot = path[index]->slots[group];
      ensure(slot != kNone, "the prefix found has a gap");
      rule.store.hold(slot);
      tables_[group].push_back(slot);
    }
  }
  for (std::size_t group = 0; group < tables_.size(); ++group) {
    if (ledger_.groups_[group].is_state()) first_[group] = 0;  // its slot is no block's
  }
  for (Node* node : path) node->priority = std::max(node->priority, priority);
  ledger_.tree_.lock(tip_);
}

std::vector<Slot> Cache::needs(std::int64_t blocks, std::int64_t near, std::int64_t loaded) const {
  std::vector<Slot> needs;
  for (std::size_t group = 0; group < tables_.size(); ++group) {
    if (ledger_.groups_[group].is_state()) {
      needs.push_back(blocks > 0 && (tables_[group].empty() || has_snapshot_only(group)) ? 1 : 0);
      continue;
    }
    const LayerGroup& rule = ledger_.groups_[group];
    std::int64_t end = first_[group] + static_cast<std::int64_t>(tables_[group].size());
    if (rule.is_window()) end = std::max(end, rule.first_live_block(loaded, ledger_.tokens_per_block_));
    const std::int64_t missing = (rule.is_window() ? near : blocks) - end;
    needs.push_back(static_cast<Slot>(std::max<std::int64_t>(0, missing)));
  }
  return needs;
}

bool Cache::has_snapshot_only(std::size_t group) const {
  const auto& table = tables_[group];
  return !table.empty() && ledger_.groups_[group].store.publication(table.front()) != nullptr;
}

std::optional<Shortage> Cache::shortage(std::int64_t blocks, std::int64_t near, std::int64_t loaded) const {
  return ledger_.shortage(needs(blocks, near, loaded));
}

Slots Cache::grow(std::int64_t blocks, std::int64_t near) {
  std::vector<std::optional<Slot>> after;
  for (const auto& table : tables_) after.push_back(table.empty() ? std::nullopt : std::optional(table.back()));
  Slots taken = ledger_.allocate(needs(blocks, near, 0), after);
  for (std::size_t group = 0; group < tables_.size(); ++group) {
    LayerGroup& rule = ledger_.groups_[group];
    if (rule.is_state() && !taken[group].empty() && !tables_[group].empty()) {
      rule.store.drop(tables_[group].front());  // the snapshot: its bytes stay until somebody else claims it
      tables_[group].clear();
    }
    tables_[group].insert(tables_[group].end(), taken[group].begin(), taken[group].end());
  }
  return taken;
}

// A window's blocks that filled and went stale in this very step stay until they could be committed: another request
// may fork off in the middle of this prompt and needs the window as it was there.
void Cache::advance(std::int64_t before, std::int64_t history) {
  for (std::size_t group = 0; group < tables_.size(); ++group) {
    const LayerGroup& rule = ledger_.groups_[group];
    if (!rule.is_window()) continue;
    std::int64_t live = rule.first_live_block(history, ledger_.tokens_per_block_);
    if (ledger_.reuse_) {
      live = std::max(rule.first_live_block(before, ledger_.tokens_per_block_), std::min(live, published_));
    }
    drop_before(group, live);
  }
}

void Cache::publish(Tokens tokens, std::int64_t blocks, std::int64_t history) {
  const auto size = static_cast<std::size_t>(ledger_.tokens_per_block_);
  if (late_) fill_in();
  ensure(tokens.size() == size * static_cast<std::size_t>(blocks - published_), "the tokens do not fit the blocks");
  Node* tip = tip_;
  std::vector<Slot> mine(tables_.size());
  for (std::int64_t index = published_; index < blocks; ++index, tokens = tokens.subspan(size)) {
    for (std::size_t group = 0; group < tables_.size(); ++group) {
      const bool has_block = !ledger_.groups_[group].is_state() && index >= first_[group];
      mine[group] = has_block ? tables_[group].at(index - first_[group]) : kNone;
    }
    tip = ledger_.tree_.publish(tip, tokens.first(size), mine, priority_);
    swap(index, mine, tip);
  }
  ledger_.tree_.lock(tip);
  ledger_.tree_.unlock(tip_);
  tip_ = tip;
  published_ = blocks;
  for (std::size_t group = 0; group < tables_.size(); ++group) {
    const LayerGroup& rule = ledger_.groups_[group];
    if (rule.is_window()) drop_before(group, rule.first_live_block(history, ledger_.tokens_per_block_));
  }
}

// What was loaded of windows becomes part of the published blocks the cache started with.
void Cache::fill_in() {
  late_ = false;
  const auto reaches = [&](std::size_t group, std::int64_t index) {
    return ledger_.groups_[group].is_window() && first_[group] <= index;
  };
  Node* node = tip_;
  for (std::int64_t index = published_ - 1; !ledger_.tree_.is_root(node); --index, node = node->parent) {
    std::vector<Slot> mine(tables_.size(), kNone);
    bool any = false;
    for (std::size_t group = 0; group < tables_.size(); ++group) {
      if (!reaches(group, index)) continue;
      any = true;
      mine[group] = tables_[group].at(index - first_[group]);
      if (node->slots[group] == kNone) ledger_.tree_.attach(node, group, mine[group]);
    }
    if (!any) return;
    swap(index, mine, node);
  }
}

// Where another request published this block first: uses its copy, gives ours back (a pin may still keep it).
void Cache::swap(std::int64_t index, const std::vector<Slot>& mine, const Node* node) {
  for (std::size_t group = 0; group < tables_.size(); ++group) {
    const Slot theirs = node->slots[group];
    if (mine[group] == kNone || theirs == kNone || mine[group] == theirs) continue;
    SlotStore& store = ledger_.groups_[group].store;
    store.hold(theirs);
    tables_[group][index - first_[group]] = theirs;
    store.drop(mine[group]);
  }
}

void Cache::drop_before(std::size_t group, std::int64_t live) {
  const std::int64_t stale = live - first_[group];
  if (stale <= 0) return;
  auto& table = tables_[group];
  const auto gone = static_cast<std::size_t>(std::min<std::int64_t>(stale, static_cast<std::int64_t>(table.size())));
  for (std::size_t index = gone; index-- > 0;) ledger_.groups_[group].store.drop(table[index]);
  table.erase(table.begin(), table.begin() + static_cast<std::ptrdiff_t>(gone));
  first_[group] = live;
}

std::vector<SlotCopy> Cache::snapshot() {
  std::vector<Slot> needs(tables_.size(), 0);
  for (std::size_t group = 0; group < tables_.size(); ++group) {
    const bool live = ledger_.groups_[group].is_state() && !tables_[group].empty() && !has_snapshot_only(group);
    needs[group] = live && tip_->slots[group] == kNone ? 1 : 0;
  }
  std::vector<SlotCopy> copies;
  if (ledger_.shortage(needs)) return copies;
  const Slots taken = ledger_.allocate(needs, std::vector<std::optional<Slot>>(tables_.size()));
  for (std::size_t group = 0; group < tables_.size(); ++group) {
    if (needs[group] == 0) continue;
    const Slot slot = taken[group].front();
    ledger_.tree_.attach(tip_, group, slot);
    ledger_.groups_[group].store.drop(slot);
    copies.push_back({group, tables_[group].front(), slot});
  }
  return copies;
}

std::pair<std::size_t, std::vector<SlotCopy>> Cache::begin_block(Tokens tokens, std::size_t least) {
  const auto [source, shared] = ledger_.tree_.closest_child(tip_, tokens);
  if (source == nullptr || shared < least) return {};
  // A state cannot be cut in the middle of a block.
  for (const LayerGroup& rule : ledger_.groups_) {
    if (rule.is_state()) return {};
  }
  const std::vector<Slot> slots = source->slots;
  for (std::size_t group = 0; group < slots.size(); ++group) ledger_.groups_[group].store.hold(slots[group]);
  std::vector<SlotCopy> copies;
  if (!shortage(published_ + 1, published_ + 1, 0)) {
    source->priority = std::max(source->priority, priority_);
    const Slots taken = grow(published_ + 1, published_ + 1);
    for (std::size_t group = 0; group < slots.size(); ++group) copies.push_back({group, slots[group], taken[group][0]});
  }
  for (std::size_t group = 0; group < slots.size(); ++group) ledger_.groups_[group].store.drop(slots[group]);
  return {copies.empty() ? 0 : shared, copies};
}

std::shared_ptr<Hold> Cache::pin(std::int64_t blocks) {
  Slots kept;
  for (std::size_t group = 0; group < tables_.size(); ++group) {
    const auto& table = tables_[group];
    const auto size = static_cast<std::int64_t>(table.size());
    if (ledger_.groups_[group].is_state()) {
      kept.push_back(blocks > 0 ? table : std::vector<Slot>{});
      continue;
    }
    const std::int64_t count = std::clamp<std::int64_t>(blocks - first_[group], 0, size);
    kept.emplace_back(table.begin(), table.begin() + count);
  }
  auto hold = std::make_shared<Hold>(ledger_, Hold::Kind::kPinned, std::move(kept), first_);
  ledger_.holds_.insert(hold);
  return hold;
}

std::shared_ptr<Hold> Cache::quarantine() {
  Slots kept;
  std::vector<std::int64_t> starts;
  for (std::size_t group = 0; group < tables_.size(); ++group) {
    auto& table = tables_[group];
    if (ledger_.groups_[group].is_state()) {
      starts.push_back(0);
      kept.push_back(has_snapshot_only(group) ? std::vector<Slot>{} : std::exchange(table, {}));
      continue;
    }
    const bool own = late_ && ledger_.groups_[group].is_window();
    starts.push_back(own ? first_[group] : std::max(first_[group], published_));
    const auto cut = table.begin() + std::min(starts[group] - first_[group], static_cast<std::int64_t>(table.size()));
    kept.emplace_back(cut, table.end());
    table.erase(cut, table.end());
  }
  auto hold = std::make_shared<Hold>(ledger_, Hold::Kind::kQuarantined, std::move(kept), std::move(starts));
  ledger_.holds_.insert(hold);
  close();
  return hold;
}

void Cache::close() {
  for (std::size_t group = 0; group < tables_.size(); ++group) {
    auto& table = tables_[group];
    for (auto slot = table.rbegin(); slot != table.rend(); ++slot) ledger_.groups_[group].store.drop(*slot);
    table.clear();
  }
  ledger_.tree_.unlock(tip_);
  ensure(ledger_.caches_.erase(shared_from_this()) == 1, "a cache was closed twice");
}

void Cache::check_integrity(std::int64_t history, std::int64_t blocks, std::int64_t near) const {
  std::vector<const Node*> path;
  for (const Node* node = tip_; !ledger_.tree_.is_root(node); node = node->parent) path.push_back(node);
  std::reverse(path.begin(), path.end());
  ensure(static_cast<std::int64_t>(path.size()) == published_, "the published path has another length");
  for (std::size_t group = 0; group < tables_.size(); ++group) {
    const LayerGroup& rule = ledger_.groups_[group];
    const auto& table = tables_[group];
    if (rule.is_state()) {
      check_state(group);
      continue;
    }
    const auto first = static_cast<std::size_t>(first_[group]);
    const auto held = static_cast<std::size_t>(rule.is_window() ? near : blocks);
    ensure(first + table.size() == std::max(held, first),
           "a group holds too many or too few blocks");
    ensure(first_[group] <= rule.first_live_block(history, ledger_.tokens_per_block_),
           "a block that is still needed was dropped");
    ensure(first == 0 || !rule.keeps_all(), "a group that keeps all blocks dropped one");
    const bool own = late_ && rule.is_window();
    for (std::size_t index = 0; index < table.size(); ++index) {
      if (!own && first + index < path.size()) {
        ensure(path[first + index]->slots[group] == table[index], "a committed block is not the published one");
      } else {
        ensure(rule.store.publication(table[index]) == nullptr, "an uncommitted block is published");
      }
    }
  }
}

void Cache::check_state(std::size_t group) const {
  const auto& table = tables_[group];
  ensure(table.size() <= 1, "a state group holds more than one slot");
  ensure(!has_snapshot_only(group) || tip_->slots[group] == table.front(), "a snapshot held is not the newest block's");
}

}  // namespace kvferry
