#include "prefix_tree.h"

#include <algorithm>
#include <bit>

#include "checks.h"

namespace kvferry {

// A scope's root has a child for every first block there is: looking at all of them would cost more than it finds.
constexpr int kChildrenLookedAt = 32;

static_assert(std::endian::native == std::endian::little, "digests are taken over little-endian token ids");

Digest block_digest(const Digest& parent, Tokens tokens) {
  return sha256(parent, {reinterpret_cast<const std::uint8_t*>(tokens.data()), tokens.size_bytes()});
}

std::int64_t LayerGroup::first_live_block(std::int64_t history, std::int64_t tokens_per_block) const {
  switch (keeps) {
    case Keeps::kWindow:
      return std::max<std::int64_t>(0, history + 1 - window) / tokens_per_block;
    case Keeps::kChunk:
      return history / window * window / tokens_per_block;
    case Keeps::kState:  // the state after block n is all that block n + 1 needs
      return std::max<std::int64_t>(0, (history + tokens_per_block - 1) / tokens_per_block - 1);
    case Keeps::kAll:
      break;
  }
  return 0;
}

bool Node::empty() const {
  return first_child == nullptr && locks == 0 &&
         std::all_of(slots.begin(), slots.end(), [](Slot slot) { return slot == kNone; });
}

PrefixTree::PrefixTree(std::vector<LayerGroup>& groups, std::int64_t tokens_per_block, bool journal)
    : groups_(groups), tokens_per_block_(tokens_per_block), keeps_journal_(journal) {
  Slot most = 0;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    most = std::max(most, groups[group].store.num_slots());
    if (!groups[group].keeps_all()) windows_.push_back(group);
  }
  nodes_.reserve(most);  // a table that grows while serving would stall the step it grows in
}

Node* PrefixTree::root(const Digest& scope) {
  const auto found = nodes_.find(scope);
  return found != nodes_.end() ? &found->second : insert(&top_, scope, 0);
}

std::vector<Node*> PrefixTree::find(const Digest& scope, Tokens tokens) {
  std::vector<Node*> path = published(scope, tokens);
  path.resize(usable(path));
  return path;
}

std::pair<std::vector<Node*>, bool> PrefixTree::find_to_load(const Digest& scope, Tokens tokens, std::int64_t loaded) {
  std::vector<Node*> path = published(scope, tokens);
  const std::size_t served = usable(path);
  const std::size_t far = std::min(path.size(), static_cast<std::size_t>((loaded - 1) / tokens_per_block_));
  const bool late = far > served && std::all_of(windows_.begin(), windows_.end(), [&](std::size_t group) {
    const LayerGroup& rule = groups_[group];
    return !rule.is_window() || static_cast<std::int64_t>(served) <= rule.first_live_block(loaded, tokens_per_block_);
  });
  path.resize(late ? far : served);
  return {std::move(path), late};
}

std::vector<Node*> PrefixTree::published(const Digest& scope, Tokens tokens) {
  std::vector<Node*> path;
  auto found = nodes_.find(scope);
  const std::size_t size = tokens_per_block_;
  for (std::size_t start = 0; found != nodes_.end() && start + size <= tokens.size(); start += size) {
    found = nodes_.find(block_digest(found->first, tokens.subspan(start, size)));
    if (found != nodes_.end()) path.push_back(&found->second);
  }
  return path;
}

// How many blocks of `path` all groups can serve: a window must have the last few without a gap.
std::size_t PrefixTree::usable(const std::vector<Node*>& path) const {
  if (windows_.empty()) return path.size();
  std::size_t usable = 0;
  std::vector<std::int64_t> unbroken(windows_.size(), 0);
  for (std::size_t length = 1; length <= path.size(); ++length) {
    bool served = true;
    for (std::size_t which = 0; which < windows_.size(); ++which) {
      const std::size_t group = windows_[which];
      unbroken[which] = path[length - 1]->slots[group] == kNone ? 0 : unbroken[which] + 1;
      const auto blocks = static_cast<std::int64_t>(length);
      const std::int64_t first = groups_[group].first_live_block(blocks * tokens_per_block_, tokens_per_block_);
      served = served && unbroken[which] >= blocks - first;
    }
    if (served) usable = length;
  }
  return usable;
}

Node* PrefixTree::publish(Node* parent, Tokens tokens, const std::vector<Slot>& slots, Priority priority) {
  const Digest digest = block_digest(parent->digest, tokens);
  const auto found = nodes_.find(digest);
  Node* node = found != nodes_.end() ? &found->second : insert(parent, digest, priority);
  if (node->tokens.empty()) node->tokens.assign(tokens.begin(), tokens.end());
  node->priority = std::max(node->priority, priority);
  for (std::size_t group = 0; group < slots.size(); ++group) {
    if (slots[group] != kNone && node->slots[group] == kNone) attach(node, group, slots[group]);
  }
  return node;
}

std::pair<Node*, std::size_t> PrefixTree::closest_child(const Node* node, Tokens tokens) const {
  Node* closest = nullptr;
  std::size_t most = 0;
  int looked_at = 0;
  for (Node* child = node->last_child; child != nullptr && looked_at < kChildrenLookedAt; child = child->before) {
    ++looked_at;
    if (std::any_of(child->slots.begin(), child->slots.end(), [](Slot slot) { return slot == kNone; })) continue;
    const std::size_t length = std::min(tokens.size(), child->tokens.size());
    const auto differs = std::mismatch(tokens.begin(), tokens.begin() + length, child->tokens.begin()).first;
    const auto shared = static_cast<std::size_t>(differs - tokens.begin());
    if (shared > most) closest = child, most = shared;
  }
  return {closest, most};
}

void PrefixTree::attach(Node* node, std::size_t group, Slot slot) {
  groups_[group].store.publish(slot, node);
  node->slots[group] = slot;
}

void PrefixTree::unlock(Node* node) {
  --node->locks;
  prune(node);
}

void PrefixTree::evict(std::size_t group) {
  evict(group, groups_[group].store.oldest_cached());
}

void PrefixTree::evict(std::size_t group, Slot slot) {
  Node* node = groups_[group].store.publication(slot);
  ensure(node != nullptr, "a cached slot is not published");
  if (groups_[group].keeps_all()) {
    forget_subtree(node);
  } else {
    evict_slot(node, group);
  }
  prune(node);
}

void PrefixTree::clear() {
  const std::vector<Node*> nodes = walk();
  for (auto at = nodes.rbegin(); at != nodes.rend(); ++at) {
    Node* node = *at;
    const auto in_use = [&](std::size_t group) {
      return node->slots[group] != kNone && groups_[group].store.used_by_cache(node->slots[group]);
    };
    bool used = false;
    for (std::size_t group = 0; group < groups_.size(); ++group) used = used || in_use(group);
    for (std::size_t group = 0; group < groups_.size(); ++group) {
      if (node->slots[group] == kNone) continue;
      const bool drop_window = !groups_[group].keeps_all() && !in_use(group);
      if (drop_window || !used) forget_slot(node, group);
    }
    // Only this node is unlinked here: its ancestors come later in the walk, and are looked at themselves.
    if (node->empty()) erase(node);
  }
}

void PrefixTree::forget_subtree(Node* top) {
  std::vector<Node*> pending{top};
  while (!pending.empty()) {
    Node* node = pending.back();
    pending.pop_back();
    ensure(node->locks == 0, "a block before a live cache's newest one was evicted");
    for (Node* child = node->first_child; child != nullptr; child = child->behind) pending.push_back(child);
    node->first_child = node->last_child = nullptr;
    for (std::size_t group = 0; group < groups_.size(); ++group) {
      if (node->slots[group] != kNone) evict_slot(node, group);
    }
    if (node == top) continue;  // pruned by the caller
    note_unlinked(node);
    const Digest digest = node->digest;
    nodes_.erase(digest);
  }
}

void PrefixTree::evict_slot(Node* node, std::size_t group) {
  ++evicted_;
  if (keeps_journal_) journal_.evictions.push_back({node->digest, group, node->slots[group]});
  forget_slot(node, group);
}

void PrefixTree::forget_slot(Node* node, std::size_t group) {
  const Slot slot = node->slots[group];
  node->slots[group] = kNone;
  groups_[group].store.unpublish(slot);
}

// Unlinks `node` and then its ancestors, as long as they are empty.
void PrefixTree::prune(Node* node) {
  while (node != &top_ && node->empty()) {
    Node* parent = node->parent;
    erase(node);
    node = parent;
  }
}

Node* PrefixTree::insert(Node* parent, const Digest& digest, Priority priority) {
  Node& node = nodes_[digest];
  node.digest = digest;
  node.parent = parent;
  node.slots.assign(groups_.size(), kNone);
  node.priority = priority;
  node.before = parent->last_child;
  (parent->last_child == nullptr ? parent->first_child : parent->last_child->behind) = &node;
  parent->last_child = &node;
  if (keeps_journal_ && parent != &top_) journal_.links.push_back({digest, parent->digest});
  return &node;
}

void PrefixTree::note_unlinked(const Node* node) {
  if (keeps_journal_ && !is_root(node)) journal_.links.push_back({node->digest, std::nullopt});
}

void PrefixTree::erase(Node* node) {
  note_unlinked(node);
  Node* parent = node->parent;
  (node->before == nullptr ? parent->first_child : node->before->behind) = node->behind;
  (node->behind == nullptr ? parent->last_child : node->behind->before) = node->before;
  const Digest digest = node->digest;  // the node dies with its entry
  nodes_.erase(digest);
}

std::vector<Node*> PrefixTree::walk() const {
  std::vector<Node*> pending;
  std::vector<Node*> nodes;
  for (Node* root = top_.first_child; root != nullptr; root = root->behind) pending.push_back(root);
  while (!pending.empty()) {
    Node* node = pending.back();
    pending.pop_back();
    nodes.push_back(node);
    for (Node* child = node->first_child; child != nullptr; child = child->behind) pending.push_back(child);
  }
  return nodes;
}

void PrefixTree::check_integrity() const {
  std::vector<Slot> published(groups_.size(), 0);
  const std::vector<Node*> nodes = walk();
  ensure(nodes.size() == nodes_.size(), "a node is not linked");
  for (const Node* node : nodes) {
    ensure(!node->empty(), "an empty node was left behind");
    ensure(nodes_.at(node->digest).parent == node->parent, "a node is filed under another digest");
    ensure(is_root(node) || is_root(node->parent) || node->priority <= node->parent->priority,
           "a leaf outlives its parent");
    for (std::size_t group = 0; group < groups_.size(); ++group) {
      const Slot slot = node->slots[group];
      published[group] += slot != kNone;
      ensure(slot == kNone || groups_[group].store.publication(slot) == node, "slot and node disagree");
      ensure(slot != kNone || !groups_[group].keeps_all() || is_root(node), "a block lost one of its slots");
    }
  }
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    ensure(published[group] == groups_[group].store.num_published(), "a published slot is in no node");
  }
}

}  // namespace kvferry
