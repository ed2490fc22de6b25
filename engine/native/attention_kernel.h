// Attention straight over the pool's blocks, with a running softmax (Milakov and Gimelshein, arXiv:1805.02867).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kv_row.h"
#include "matmul.h"

namespace {

using kvferry::native::AttentionArgs;
using kvferry::native::AttentionTile;
using kvferry::native::kStretch;
using kvferry::native::PoolView;
using kvferry::native::Span;

constexpr int kKeys = 128;  // positions taken in one go: scores, keys and values of a tile stay in the cache
constexpr int kKeysAhead = 16;  // fetched before use: a block is a page at most, too short for the hardware to notice
constexpr int kKeysAtOnce = 4;  // then as many are fetched: more would have to wait for each other
constexpr int kDotRows = kLanes == 16 ? 4 : 3;  // queries whose sums with four keys fit into the registers
constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline const std::byte* key_row(const PoolView& pool, const Span& span, int head, std::int64_t position) {
  const std::int64_t block = position / pool.tokens_per_block, token = position % pool.tokens_per_block;
  return pool.base + span.blocks[block] * pool.slot_stride + head * pool.head_stride + token * pool.token_stride;
}

// y = scale * x, its pairs turned. turn: null, or cos and sin of each pair.
inline void rotate(const float* x, const float* turn, float scale, float* y, int dim) {
  if (!turn) {
    for (int i = 0; i < dim; ++i) y[i] = x[i] * scale;
    return;
  }
  for (int i = 0; i < dim; i += 2) {
    const float a = x[i], b = x[i + 1], cosine = turn[i], sine = turn[i + 1];
    y[i] = (a * cosine - b * sine) * scale;
    y[i + 1] = (a * sine + b * cosine) * scale;
  }
}

template <class T>
void store_kv(const AttentionArgs& args, const Span& span, std::int64_t token) {
  const std::int64_t row = span.row + token;
  const float* turn = args.turn ? args.turn + row * args.dim : nullptr;
  for (int head = 0; head < args.kv_heads; ++head) {
    std::byte* key = const_cast<std::byte*>(key_row(args.pool, span, head, span.start + token));
    const float* k = args.k + row * args.k_stride + head * args.dim;
    const float* v = args.v + row * args.v_stride + head * args.dim;
    store_row<T>(key, args.dim, [=](int first, int n, float* to) {
      rotate(k + first, turn ? turn + first : nullptr, 1.0f, to, n);
    });
    store_row<T>(key + args.pool.plane_stride, args.dim,
                 [=](int first, int n, float* to) { std::memcpy(to, v + first, n * sizeof(float)); });
  }
}

// The tile's queries, turned and scaled: [token][heads of this KV head][dim].
inline void load_queries(const AttentionArgs& args, const AttentionTile& tile, float* queries) {
  const int share = args.heads / args.kv_heads;
  for (std::int64_t token = 0; token < tile.tokens; ++token) {
    const std::int64_t row = tile.span->row + tile.first_token + token;
    const float* turn = args.turn ? args.turn + row * args.dim : nullptr;
    const float* q = args.q + row * args.q_stride + static_cast<std::ptrdiff_t>(tile.kv_head) * share * args.dim;
    for (int head = 0; head < share; ++head, queries += args.dim)
      rotate(q + head * args.dim, turn, args.scale, queries, args.dim);
  }
}

// The rows of K and V that the next turns of the loop need.
inline void fetch(const std::byte* key, std::ptrdiff_t plane, std::ptrdiff_t nbytes) {
  for (std::ptrdiff_t i = 0; i < nbytes; i += 64) {
    __builtin_prefetch(key + i);
    __builtin_prefetch(key + plane + i, 0, 2);
  }
}

// scores[row][key] of kRows queries of kVecs whole vectors, which stay in registers.
template <class T, int kRows, int kVecs>
void dots_whole(const float* queries, const std::byte* const* keys, int n, float* scores) {
  Vec q[kRows][kVecs];
  for (int row = 0; row < kRows; ++row)
    for (int vec = 0; vec < kVecs; ++vec) q[row][vec] = load(queries + (row * kVecs + vec) * kLanes);
  for (int key = 0; key < n; ++key) {
    Vec sums[kRows] = {};
#pragma GCC unroll 8
    for (int vec = 0; vec < kVecs; ++vec) {
      const Vec k = load(elements<T>(keys[key]) + vec * kLanes);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) sums[row] += k * q[row][vec];
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) scores[row * kKeys + key] = sum(sums[row]);
  }
}

// The same for any head size, a few keys at once: what is left of the last few are taken twice.
template <class T, int kRows>
void dots(const float* queries, const std::byte* const* keys, int n, int dim, float* scores) {
  for (int first = 0; first < n; first += 4) {
    const T* k[4];
    for (int key = 0; key < 4; ++key) k[key] = elements<T>(keys[std::min(first + key, n - 1)]);
    Vec sums[kRows][4];
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int key = 0; key < 4; ++key) sums[row][key] = Vec{};
    int i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      Vec q[kRows];
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) q[row] = load(queries + row * dim + i);
#pragma GCC unroll 4
      for (int key = 0; key < 4; ++key) {
        const Vec part = load(k[key] + i);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) sums[row][key] += part * q[row];
      }
    }
    if (const int left = dim - i)
#pragma GCC unroll 4
      for (int key = 0; key < 4; ++key) {
        const Vec part = load_part(k[key] + i, left);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) sums[row][key] += part * load_part(queries + row * dim + i, left);
      }
    const int some = std::min(4, n - first);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const Four four = sums_of(sums[row][0], sums[row][1], sums[row][2], sums[row][3]);
      std::memcpy(scores + row * kKeys + first, &four, some * sizeof(float));
    }
  }
}

// out[row][dim] += weights[row][key] * values[key][dim], four vectors at a time.
template <class T, int kRows>
void mix(const float* weights, const std::byte* const* keys, std::ptrdiff_t plane, int n, int dim, float* out) {
  int i = 0;
  for (; i + 4 * kLanes <= dim; i += 4 * kLanes) {
    Vec sums[kRows][4];
    for (int row = 0; row < kRows; ++row)
      for (int vec = 0; vec < 4; ++vec) sums[row][vec] = load(out + row * dim + i + vec * kLanes);
    for (int key = 0; key < n; ++key) {
      const T* value = elements<T>(keys[key] + plane) + i;
#pragma GCC unroll 4
      for (int vec = 0; vec < 4; ++vec) {
        const Vec v = load(value + vec * kLanes);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) sums[row][vec] += v * weights[row * kKeys + key];
      }
    }
    for (int row = 0; row < kRows; ++row)
      for (int vec = 0; vec < 4; ++vec) store(out + row * dim + i + vec * kLanes, sums[row][vec]);
  }
  for (; i < dim; i += kLanes) {
    const int left = std::min(kLanes, dim - i);
    for (int row = 0; row < kRows; ++row) {
      Vec total = load_part(out + row * dim + i, left);
      for (int key = 0; key < n; ++key)
        total += load_part(elements<T>(keys[key] + plane) + i, left) * weights[row * kKeys + key];
      store_part(out + row * dim + i, total, left);
    }
  }
}

// Turns scores[first, last) of n into weights against the running maximum; all others become 0. Returns the factor
// by which what was summed so far shrinks.
inline float soften(float* scores, int first, int last, int n, float& top, float& weight) {
  std::fill(scores, scores + std::min(first, n), 0.0f);
  std::fill(scores + std::max(last, 0), scores + n, 0.0f);
  if (first >= last) return 1.0f;
  float best = top;
  int i = first;
  if (last - first >= kLanes) {
    Vec bests = load(scores + i);
    for (i += kLanes; i + kLanes <= last; i += kLanes) bests = maximum(bests, load(scores + i));
    best = std::max(best, largest(bests));
  }
  for (; i < last; ++i) best = std::max(best, scores[i]);
  Vec total = {};
  for (i = first; i + kLanes <= last; i += kLanes) {
    const Vec w = exponential(load(scores + i) - best);
    store(scores + i, w);
    total += w;
  }
  float rest = 0.0f;
  if (const int left = last - i; left > 0) {
    store_part(scores + i, exponential(load_part(scores + i, left) - best), left);
    for (; i < last; ++i) rest += scores[i];
  }
  const float shrink = top == kNothing ? 0.0f : std::exp(top - best);
  top = best;
  weight = weight * shrink + sum(total) + rest;
  return shrink;
}

inline void scale(float* values, int n, float factor) {
  for (int i = 0; i < n; ++i) values[i] *= factor;
}

template <class T, int kRows>
void dots_of(const float* q, const std::byte* const* keys, int n, int dim, float* scores, int rows) {
  constexpr int kVecs = 64 / kLanes;
  for (; rows >= kRows; rows -= kRows, q += kRows * dim, scores += kRows * kKeys)
    if (kLanes == 16 && dim == 64)
      dots_whole<T, kRows, kVecs>(q, keys, n, scores);
    else
      dots<T, kRows>(q, keys, n, dim, scores);
  if constexpr (kRows > 1)
    if (rows) dots_of<T, kRows - 1>(q, keys, n, dim, scores, rows);
}

template <class T, int kRows>
void mix_of(const float* w, const std::byte* const* keys, std::ptrdiff_t plane, int n, int dim, float* out, int rows) {
  for (; rows >= kRows; rows -= kRows, w += kRows * kKeys, out += kRows * dim)
    mix<T, kRows>(w, keys, plane, n, dim, out);
  if constexpr (kRows > 1)
    if (rows) mix_of<T, kRows - 1>(w, keys, plane, n, dim, out, rows);
}

// Keys as panels [kKeys / kPanel][dim][kPanel], so that scores are a product of the common kind.
template <class T>
inline void transpose_keys(const std::byte* const* keys, int n, int dim, float* wide, float* panels) {
  for (int key = 0; key < n; ++key) {
    float* column = panels + static_cast<std::ptrdiff_t>(key / kPanel) * dim * kPanel + key % kPanel;
    const float* row = widened<T>(keys[key], dim, wide);
    for (int i = 0; i < dim; ++i) column[i * kPanel] = row[i];
  }
  for (int key = n; key % kPanel; ++key) {  // what lies there may be NaN, and would slow or spoil the tile
    float* column = panels + static_cast<std::ptrdiff_t>(key / kPanel) * dim * kPanel + key % kPanel;
    for (int i = 0; i < dim; ++i) column[i * kPanel] = 0.0f;
  }
}

// Values as panels [dim / kPanel][n][kPanel], zero-padded.
template <class T>
inline void panel_values(const std::byte* const* keys, std::ptrdiff_t plane, int n, int dim, float* wide,
                         float* panels) {
  for (int key = 0; key < n; ++key) {
    const float* row = widened<T>(keys[key] + plane, dim, wide);
    float* to = panels + static_cast<std::ptrdiff_t>(key) * kPanel;
    for (int first = 0; first < dim; first += kPanel, to += static_cast<std::ptrdiff_t>(n) * kPanel) {
      const int width = std::min(kPanel, dim - first);
      std::memcpy(to, row + first, width * sizeof(float));
      std::fill(to + width, to + kPanel, 0.0f);
    }
  }
}

struct Scratch {
  float* queries;  // [rows][dim]
  float* out;      // [rows][dim]
  float* scores;   // [rows][kKeys]
  float* tops;     // [rows]
  float* weights;  // [rows]
  float* wide;     // [dim]: a row of another type than float; many tokens only, like all below
  float* keys;     // panels
  float* values;

  Scratch(float* p, std::int64_t rows, int dim) {
    queries = p, p += rows * dim;
    out = p, p += rows * dim;
    scores = p, p += rows * kKeys;
    tops = p, p += rows;
    weights = p, p += rows;
    wide = p, p += dim;
    keys = p, p += static_cast<std::ptrdiff_t>(dim) * kKeys;
    values = p;
  }
};

std::size_t attend_scratch(const AttentionArgs& args, std::int64_t tokens) {
  const std::size_t rows = tokens * (args.heads / args.kv_heads), dim = args.dim;
  return rows * (2 * dim + kKeys + 2) + dim + dim * kKeys + (dim + kPanel) * kKeys;
}

// Multiplies each key's column of scores [rows][kKeys] by the scale of its row in that plane.
inline void apply_scales(const std::byte* const* keys, std::ptrdiff_t plane, int n, int dim, int rows, float* scores) {
  float scales[kKeys];
  for (int key = 0; key < n; ++key) scales[key] = row_scale(keys[key] + plane, dim);
  for (int row = 0; row < rows; ++row)
    for (int key = 0; key < n; ++key) scores[row * kKeys + key] *= scales[key];
}

// Scores and mixing of up to kKeys of `left` keys, by dot products: each key serves a few rows only.
template <class T>
inline void few_rows(const AttentionArgs& args, const Scratch& s, const std::byte* const* keys, int left, int rows) {
  const int n = std::min(kKeys, left), dim = args.dim;
  const std::ptrdiff_t plane = args.pool.plane_stride;
  for (int first = 0; first < n; first += kKeysAtOnce) {
    const int some = std::min(kKeysAtOnce, n - first), next = first + kKeysAhead;
    for (int key = next; key < std::min(next + kKeysAtOnce, left); ++key) fetch(keys[key], plane, row_nbytes<T>(dim));
    dots_of<T, kDotRows>(s.queries, keys + first, some, dim, s.scores + first, rows);
  }
  if constexpr (kScaled<T>) apply_scales(keys, 0, n, dim, rows, s.scores);
  for (int row = 0; row < rows; ++row)
    scale(s.out + row * dim, dim, soften(s.scores + row * kKeys, 0, n, n, s.tops[row], s.weights[row]));
  if constexpr (kScaled<T>) apply_scales(keys, plane, n, dim, rows, s.scores);
  mix_of<T, 4>(s.scores, keys, plane, n, dim, s.out, rows);
}

// The same by products of panels, each token with its own limits.
template <class T>
inline void many_rows(const AttentionArgs& args, const AttentionTile& tile, const Scratch& s,
                      const std::byte* const* keys, std::int64_t from, int n) {
  const int share = args.heads / args.kv_heads, dim = args.dim, rows = static_cast<int>(tile.tokens) * share;
  transpose_keys<T>(keys, n, dim, s.wide, s.keys);
  panel_values<T>(keys, args.pool.plane_stride, n, dim, s.wide, s.values);
  for (int first = 0; first < n; first += kPanel)
    multiply<Fetch::kNothing>({s.queries, dim, s.keys + static_cast<std::ptrdiff_t>(first) * dim, s.scores + first, kKeys, dim,
                     false, nullptr, std::min(kPanel, n - first)},
                    rows);
  for (int row = 0; row < rows; ++row) {
    const std::int64_t position = tile.span->start + tile.first_token + row / share;
    const std::int64_t window = args.pool.window ? position + 1 - args.pool.window : 0;
    const int first = static_cast<int>(std::clamp<std::int64_t>(std::max(window, tile.span->lowest) - from, 0, n));
    const int last = static_cast<int>(std::clamp<std::int64_t>(position + 1 - from, 0, n));
    scale(s.out + row * dim, dim, soften(s.scores + row * kKeys, first, last, n, s.tops[row], s.weights[row]));
  }
  for (int first = 0; first < dim; first += kPanel)
    multiply<Fetch::kNothing>({s.scores, kKeys, s.values + static_cast<std::ptrdiff_t>(first) * n, s.out + first, dim, n, true,
                     nullptr, std::min(kPanel, dim - first)},
                    rows);
}

template <class T>
inline void attend_one(const AttentionArgs& args, const AttentionTile& tile, const Scratch& s, int rows) {
  const int total = static_cast<int>(tile.to - tile.from);
  const std::byte* keys[kStretch];
  for (int key = 0; key < total; ++key) keys[key] = key_row(args.pool, *tile.span, tile.kv_head, tile.from + key);
  for (int key = 0; key < std::min(kKeysAhead, total); ++key)
    fetch(keys[key], args.pool.plane_stride, row_nbytes<T>(args.dim));
  for (int first = 0; first < total; first += kKeys) few_rows<T>(args, s, keys + first, total - first, rows);
}

template <class T>
inline void attend_many(const AttentionArgs& args, const AttentionTile& tile, const Scratch& s) {
  const std::byte* keys[kKeys];
  for (std::int64_t from = tile.from; from < tile.to; from += kKeys) {
    const int n = static_cast<int>(std::min<std::int64_t>(kKeys, tile.to - from));
    for (int key = 0; key < n; ++key) keys[key] = key_row(args.pool, *tile.span, tile.kv_head, from + key);
    many_rows<T>(args, tile, s, keys, from, n);
  }
}

inline void finish(const AttentionArgs& args, const AttentionTile& tile, const Scratch& s, int rows) {
  const int share = args.heads / args.kv_heads, dim = args.dim;
  for (int row = 0; row < rows; ++row) {
    const float* from = s.out + row * dim;
    if (tile.partial) {
      float* to = tile.partial + static_cast<std::ptrdiff_t>(row) * (dim + 2);
      std::memcpy(to, from, dim * sizeof(float));
      to[dim] = s.tops[row], to[dim + 1] = s.weights[row];
      continue;
    }
    const std::int64_t token = tile.span->row + tile.first_token + row / share;
    float* to = args.out + (token * args.heads + tile.kv_head * share + row % share) * dim;
    const float inverse = 1.0f / s.weights[row];
    for (int i = 0; i < dim; ++i) to[i] = from[i] * inverse;
  }
}

template <class T>
void attend(const AttentionArgs& args, const AttentionTile& tile, float* scratch) {
  const int rows = static_cast<int>(tile.tokens) * (args.heads / args.kv_heads);
  const Scratch s(scratch, rows, args.dim);
  load_queries(args, tile, s.queries);
  std::fill(s.out, s.out + static_cast<std::ptrdiff_t>(rows) * args.dim, 0.0f);
  std::fill(s.tops, s.tops + rows, kNothing);
  std::fill(s.weights, s.weights + rows, 0.0f);
  // The rest of a prompt's chunk may be one token too, and see more than one stretch.
  if (tile.tokens == 1 && tile.to - tile.from <= kStretch)
    attend_one<T>(args, tile, s, rows);
  else
    attend_many<T>(args, tile, s);
  finish(args, tile, s, rows);
}

}  // namespace
