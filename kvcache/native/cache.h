// One request's block tables.
#pragma once

#include "ledger.h"

namespace kvferry {

struct SlotCopy {
  std::size_t group;
  Slot from;
  Slot to;
};

// Blocks below index published() are in the tree under tip_ and its ancestors, and are only read; those behind belong
// to this cache alone. A window's table starts at first_block(group), which rises as blocks go stale. The table of a
// state group holds one slot at most: the live one, or the snapshot to start from until `grow` gets a live one.
class Cache : public std::enable_shared_from_this<Cache> {
 public:
  // path: the published prefix to start with. Its blocks are held from here on. late_until: the position up to which
  // windows and states will be loaded; none where they hold their part of the path.
  Cache(Ledger& ledger, Node* root, const std::vector<Node*>& path, Priority priority,
        std::optional<std::int64_t> late_until);

  std::int64_t published() const { return published_; }
  // Whether windows and states hold nothing published: all of theirs is this cache's own, until the next `publish`.
  bool late() const { return late_; }
  std::int64_t first_block(std::size_t group) const { return first_.at(group); }
  const std::vector<Slot>& table(std::size_t group) const { return tables_.at(group); }

  // Slots each group lacks to have `blocks` blocks; a window has them up to index `near` only, from where the token at
  // position `loaded` needs it.
  std::vector<Slot> needs(std::int64_t blocks, std::int64_t near, std::int64_t loaded) const;
  // What stands in the way of growing to that, if anything does.
  std::optional<Shortage> shortage(std::int64_t blocks, std::int64_t near, std::int64_t loaded) const;
  // Gets the missing blocks (check `shortage` first), evicting what it must; returns the new slots.
  Slots grow(std::int64_t blocks, std::int64_t near);
  // History rose from `before`: lets go of what no later token needs and nobody can publish any more.
  void advance(std::int64_t before, std::int64_t history);
  // Publishes the blocks [published(), blocks); `tokens` are theirs.
  void publish(Tokens tokens, std::int64_t blocks, std::int64_t history);
  // A snapshot of the state after the last published block, for every state group that has none there: what to copy
  // where. Nothing where there is no room.
  std::vector<SlotCopy> snapshot();
  // Gets one more block, to be filled with a copy of the published block that begins with most of `tokens`, at least
  // `least` of them; how many those are, and what to copy where. Nothing where there is no such block or no room.
  std::pair<std::size_t, std::vector<SlotCopy>> begin_block(Tokens tokens, std::size_t least);
  // Keeps the first `blocks` blocks for readers.
  std::shared_ptr<Hold> pin(std::int64_t blocks);
  // Ends the cache and keeps its unpublished blocks from everybody.
  std::shared_ptr<Hold> quarantine();
  void close();

  // near: blocks a window has room for; the other groups have `blocks`.
  void check_integrity(std::int64_t history, std::int64_t blocks, std::int64_t near) const;

 private:
  void fill_in();
  void swap(std::int64_t index, const std::vector<Slot>& mine, const Node* node);
  bool has_snapshot_only(std::size_t group) const;
  void check_state(std::size_t group) const;
  void drop_before(std::size_t group, std::int64_t live);

  Ledger& ledger_;
  Priority priority_;
  std::int64_t published_;
  bool late_;
  Node* tip_;
  std::vector<std::int64_t> first_;
  Slots tables_;
};

}  // namespace kvferry
