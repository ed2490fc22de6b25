// A set of slots in which the nearest one below another is found without looking at those between.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace kvferry {

using Slot = std::int32_t;
inline constexpr Slot kNone = -1;

// One bit per slot, and on every level above one bit per word of the level below that is not zero.
class SlotSet {
 public:
  explicit SlotSet(Slot num_slots) {
    auto size = static_cast<std::size_t>(num_slots);
    do {
      size = (size + 63) / 64;
      levels_.emplace_back(size, 0);
    } while (size > 1);
  }

  void add(Slot slot) {
    auto at = static_cast<std::size_t>(slot);
    for (auto& level : levels_) {
      std::uint64_t& word = level[at / 64];
      const std::uint64_t before = std::exchange(word, word | std::uint64_t{1} << at % 64);
      if (before != 0) return;
      at /= 64;
    }
  }

  // `slot` must be in here.
  void remove(Slot slot) {
    auto at = static_cast<std::size_t>(slot);
    for (auto& level : levels_) {
      if ((level[at / 64] &= ~(std::uint64_t{1} << at % 64)) != 0) return;
      at /= 64;
    }
  }

  // The highest slot in here that is not above `slot`; kNone where there is none.
  Slot last_up_to(Slot slot) const {
    std::int64_t at = slot;
    for (std::size_t depth = 0; depth < levels_.size() && at >= 0; ++depth, --at) {
      const std::uint64_t below = levels_[depth][at / 64] & ~std::uint64_t{0} >> (63 - at % 64);
      at /= 64;
      if (below == 0) continue;
      at = at * 64 + highest(below);
      while (depth-- > 0) at = at * 64 + highest(levels_[depth][at]);
      return static_cast<Slot>(at);
    }
    return kNone;
  }

 private:
  static std::int64_t highest(std::uint64_t word) { return std::bit_width(word) - 1; }

  std::vector<std::vector<std::uint64_t>> levels_;
};

}  // namespace kvferry
