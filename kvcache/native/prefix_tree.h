// The prefix index: a tree of published blocks whose roots are the scopes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sha256.h"
#include "slots.h"

namespace kvferry {

using Tokens = std::span<const std::uint32_t>;

// A layer group's rule of what it still needs, and the books of its pool.
struct LayerGroup {
  enum class Keeps { kAll, kWindow, kChunk, kState };

  Keeps keeps;
  std::int64_t window;  // tokens; unused where everything is kept
  SlotStore store;

  bool keeps_all() const { return keeps == Keeps::kAll; }
  // One live slot per cache and, in the tree, snapshots of it at the ends of some blocks.
  bool is_state() const { return keeps == Keeps::kState; }
  bool is_window() const { return keeps == Keeps::kWindow || keeps == Keeps::kChunk; }
  // Index of the first block that the token at position `history`, or a later one, can look at.
  std::int64_t first_live_block(std::int64_t history, std::int64_t tokens_per_block) const;
};

// One published block of every layer group, under the digest of the whole prefix that ends with it.
// slots: per group, kNone where that group holds it no more. locks: caches whose newest committed block this is.
// Children are a list in order of arrival, because the order in which they are forgotten decides which slots are
// taken next.
struct Node {
  Digest digest;
  Node* parent = nullptr;
  Node* first_child = nullptr;
  Node* last_child = nullptr;
  Node* before = nullptr;
  Node* behind = nullptr;
  std::vector<Slot> slots;
  std::vector<std::uint32_t> tokens;
  Priority priority = 0;
  std::int32_t locks = 0;

  bool empty() const;
};

// What happened to the tree since it was last asked.
struct Journal {
  // A block that was linked under `parent`, or unlinked.
  struct Link {
    Digest digest;
    std::optional<Digest> parent;
  };
  // A slot that eviction emptied of a block; its bytes are whole until its next owner writes.
  struct Eviction {
    Digest digest;
    std::size_t group;
    Slot slot;
  };
  std::vector<Link> links;
  std::vector<Eviction> evictions;
};

// Finds, publishes and forgets blocks; the same decisions as PrefixTree in Python.
class PrefixTree {
 public:
  // journal: whether to keep one.
  PrefixTree(std::vector<LayerGroup>& groups, std::int64_t tokens_per_block, bool journal);
  PrefixTree(const PrefixTree&) = delete;

  // The scope's root, made where there is none; it is dropped again with its last block.
  Node* root(const Digest& scope);
  // The longest published prefix of at most tokens.size() that every group can serve, first block first.
  std::vector<Node*> find(const Digest& scope, Tokens tokens);
  // A prefix of `tokens` for a cache that will be loaded up to position `loaded`, and whether what windows and states
  // lack of it must be loaded too (late): then it goes as far as the groups that keep all blocks can serve it. Only
  // where every window must be loaded whole in either case, and something is left to load besides.
  std::pair<std::vector<Node*>, bool> find_to_load(const Digest& scope, Tokens tokens, std::int64_t loaded);
  // The child of `parent` that holds `tokens`, made of `slots` as far as it lacks any.
  Node* publish(Node* parent, Tokens tokens, const std::vector<Slot>& slots, Priority priority);
  // The child of `node` that begins with most of `tokens`, and how many those are, among its newest children; of
  // equals the newest. Only one that has a slot in every group, and null where none shares a token.
  std::pair<Node*, std::size_t> closest_child(const Node* node, Tokens tokens) const;
  // Adds slots to a block that is there already, held by the caller.
  void attach(Node* node, std::size_t group, Slot slot);
  void lock(Node* node) { ++node->locks; }
  void unlock(Node* node);
  // Frees the slot of `group` that is next in turn.
  void evict(std::size_t group);
  // Frees one cached slot, whatever its turn.
  void evict(std::size_t group, Slot slot);
  // Forgets every block that no cache uses, and what only pins keep.
  void clear();
  // What happened since the last call.
  Journal drain() { return std::exchange(journal_, {}); }
  // Slots evicted, ever.
  std::int64_t evicted() const { return evicted_; }
  bool is_root(const Node* node) const { return node->parent == &top_; }
  void check_integrity() const;

 private:
  // The longest prefix that is published at all, which is what groups that keep all blocks have.
  std::vector<Node*> published(const Digest& scope, Tokens tokens);
  std::size_t usable(const std::vector<Node*>& path) const;
  void forget_subtree(Node* top);
  void evict_slot(Node* node, std::size_t group);
  void forget_slot(Node* node, std::size_t group);
  void note_unlinked(const Node* node);
  void prune(Node* node);
  Node* insert(Node* parent, const Digest& digest, Priority priority);
  void erase(Node* node);
  std::vector<Node*> walk() const;  // parents before children

  std::vector<LayerGroup>& groups_;
  std::vector<std::size_t> windows_;
  std::int64_t tokens_per_block_;
  bool keeps_journal_;
  Journal journal_;
  std::int64_t evicted_ = 0;
  Node top_;  // its children are the roots
  // Digests name whole prefixes, scope included, so one table serves all parents.
  std::unordered_map<Digest, Node, DigestHash> nodes_;
};

Digest block_digest(const Digest& parent, Tokens tokens);

}  // namespace kvferry
