// The one inner loop: a few rows of A times a panel of B. Linears, scores and mixing of values are made of it.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace {

using kvferry::native::kPanel;

// Rows whose sums fit into the registers beside the panel's vectors.
constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;

// What is fetched while tiles are computed.
enum class Fetch {
  kNothing,
  kNext,  // what of B lies behind it in memory, as much again: the next columns of the panel, or the next panel
};

struct Tile {
  const float* a;
  std::ptrdiff_t a_stride;
  const float* b;  // [depth][kPanel]
  float* c;
  std::ptrdiff_t c_stride;
  int depth;
  bool add;           // to what c holds
  const float* bias;  // of this panel's outputs, or null
  int width;          // columns of c, at most kPanel
  const float* fetch = nullptr;  // kNext: this tile's share of it
  int sharing = 1;               // how many tiles fetch it
};

template <int kVecs>
inline Vec initial(const Tile& t, int row, int vec) {
  const int offset = vec * kLanes, left = t.width - offset;
  Vec v = {};
  if (left <= 0) return v;
  const bool whole = left >= kLanes;
  if (t.bias) v = whole ? load(t.bias + offset) : load_part(t.bias + offset, left);
  const float* c = t.c + row * t.c_stride + offset;
  if (t.add) v += whole ? load(c) : load_part(c, left);
  return v;
}

// kRows rows by kVecs vectors of the panel, from its column `first`.
// kStride: the distance of a's rows, or 0: as t says.
template <int kRows, int kVecs, Fetch kFetch, int kStride>
void tile_part(const Tile& t, int first) {
  Tile part = t;
  part.b += first, part.c += first, part.width -= first;
  if (part.bias) part.bias += first;
  Vec sums[kRows][kVecs];
  for (int row = 0; row < kRows; ++row)
    for (int vec = 0; vec < kVecs; ++vec) sums[row][vec] = initial<kVecs>(part, row, vec);
  const float* b = part.b;
  const std::ptrdiff_t a_stride = kStride ? kStride : t.a_stride;
  [[maybe_unused]] const float* fetch = t.fetch;
  [[maybe_unused]] std::ptrdiff_t step = 0;
  if constexpr (kFetch == Fetch::kNext) {
    step = (kVecs * kLanes + t.sharing - 1) / t.sharing;
    fetch += static_cast<std::ptrdiff_t>(first) * t.depth / t.sharing;
  }
  for (int k = 0; k < t.depth; ++k, b += kPanel) {
    if constexpr (kFetch == Fetch::kNext) {
      for (int line = 0; line < kVecs * kLanes; line += 16) __builtin_prefetch(fetch + line, 0, 2);
      fetch += step;
    }
    Vec panel[kVecs];
#pragma GCC unroll 8
    for (int vec = 0; vec < kVecs; ++vec) panel[vec] = load(b + vec * kLanes);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const Vec a = broadcast(t.a[row * a_stride + k]);
#pragma GCC unroll 8
      for (int vec = 0; vec < kVecs; ++vec) sums[row][vec] += a * panel[vec];
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int vec = 0; vec < kVecs; ++vec) {
      const int offset = vec * kLanes, left = part.width - offset;
      float* c = part.c + row * t.c_stride + offset;
      if (left >= kLanes)
        store(c, sums[row][vec]);
      else if (left > 0)
        store_part(c, sums[row][vec], left);
    }
}

template <int kRows, Fetch kFetch, int kStride>
void tile_rows(const Tile& t) {
  constexpr int kFit = kTileRows * 2 / kRows;  // vectors beside which the sums still fit
  constexpr int kWhole = kPanel / kLanes;
  constexpr int kVecs = kFit >= kWhole ? kWhole : kFit >= 4 && kWhole > 4 ? 4 : 2;
  for (int first = 0; first < kPanel; first += kVecs * kLanes) tile_part<kRows, kVecs, kFetch, kStride>(t, first);
}

template <Fetch kFetch, int kStride, int kRows = kTileRows>
inline void tile_of(const Tile& t, int rows) {
  if (rows == kRows)
    tile_rows<kRows, kFetch, kStride>(t);
  else if constexpr (kRows > 1)
    tile_of<kFetch, kStride, kRows - 1>(t, rows);
}

// Any number of rows, in tiles of even height. What is fetched is fetched by all of them, each its share: one alone would
// have to wait for memory, which would be idle while the others compute.
template <Fetch kFetch, int kStride = 0>
inline void multiply(Tile t, int rows) {
  int tiles = (rows + kTileRows - 1) / kTileRows;
  const std::ptrdiff_t whole = static_cast<std::ptrdiff_t>(t.depth) * kPanel;
  t.sharing = tiles, t.fetch = t.b + whole;
  for (; tiles > 0; --tiles) {
    const int height = (rows + tiles - 1) / tiles;
    tile_of<kFetch, kStride>(t, height);
    t.fetch += whole / t.sharing;
    t.a += height * (kStride ? kStride : t.a_stride), t.c += height * t.c_stride, rows -= height;
  }
}

}  // namespace
