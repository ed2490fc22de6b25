// Attention straight over the pool's blocks, with a running softmax (Milakov and Gimelshein, arXiv:1805.02867).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "matmul.h"

namespace {

using kvferry::native::AttentionArgs;
using kvferry::native::AttentionTile;
using kvferry::native::kStretch;
using kvferry::native::PoolView;
using kvferry::native::Span;

constexpr int kKeys = 128;  // positions taken in one go: scores, keys and values of a tile stay in the cache
constexpr int kKeysAhead = 16;  // fetched before use: a block is a page at most, too short for the hardware to notice
constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline const float* key_row(const PoolView& pool, const Span& span, int head, std::int64_t position) {
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

void store_kv(const AttentionArgs& args, const Span& span, std::int64_t token) {
  const std::int64_t row = span.row + token;
  const float* turn = args.turn ? args.turn + row * args.dim : nullptr;
  for (int head = 0; head < args.kv_heads; ++head) {
    float* key = const_cast<float*>(key_row(args.pool, span, head, span.start + token));
    rotate(args.k + row * args.k_stride + head * args.dim, turn, 1.0f, key, args.dim);
    std::memcpy(key + args.pool.plane_stride, args.v + row * args.v_stride + head * args.dim,
                args.dim * sizeof(float));
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
inline void fetch(const float* key, std::ptrdiff_t plane, int dim) {
  for (int i = 0; i < dim; i += 16) {
    __builtin_prefetch(key + i);
    __builtin_prefetch(key + plane + i, 0, 2);
  }
}

// scores[row][key] of kRows queries of kVecs whole vectors, which stay in registers.
template <int kRows, int kVecs>
void dots_whole(const float* queries, const float* const* keys, int n, float* scores) {
  Vec q[kRows][kVecs];
  for (int row = 0; row < kRows; ++row)
    for (int vec = 0; vec < kVecs; ++vec) q[row][vec] = load(queries + (row * kVecs + vec) * kLanes);
  for (int key = 0; key < n; ++key) {
    Vec sums[kRows] = {};
#pragma GCC unroll 8
    for (int vec = 0; vec < kVecs; ++vec) {
      const Vec k = load(keys[key] + vec * kLanes);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) sums[row] += k * q[row][vec];
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) scores[row * kKeys + key] = sum(sums[row]);
  }
}

// The same for any head size.
template <int kRows>
void dots(const float* queries, const float* const* keys, int n, int dim, float* scores) {
  for (int key = 0; key < n; ++key) {
    Vec sums[kRows] = {};
    int i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      const Vec k = load(keys[key] + i);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) sums[row] += k * load(queries + row * dim + i);
    }
    if (const int left = dim - i) {
      const Vec k = load_part(keys[key] + i, left);
      for (int row = 0; row < kRows; ++row) sums[row] += k * load_part(queries + row * dim + i, left);
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) scores[row * kKeys + key] = sum(sums[row]);
  }
}

// out[row][dim] += weights[row][key] * values[key][dim], four vectors at a time.
template <int kRows>
void mix(const float* weights, const float* const* keys, std::ptrdiff_t plane, int n, int dim, float* out) {
  int i = 0;
  for (; i + 4 * kLanes <= dim; i += 4 * kLanes) {
    Vec sums[kRows][4];
    for (int row = 0; row < kRows; ++row)
      for (int vec = 0; vec < 4; ++vec) sums[row][vec] = load(out + row * dim + i + vec * kLanes);
    for (int key = 0; key < n; ++key) {
      const float* value = keys[key] + plane + i;
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
      for (int key = 0; key < n; ++key) total += load_part(keys[key] + plane + i, left) * weights[row * kKeys + key];
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

template <int kRows>
void dots_of(const float* q, const float* const* keys, int n, int dim, float* scores, int rows) {
  constexpr int kVecs = 64 / kLanes;
  for (; rows >= kRows; rows -= kRows, q += kRows * dim, scores += kRows * kKeys)
    if (kLanes == 16 && dim == 64)
      dots_whole<kRows, kVecs>(q, keys, n, scores);
    else
      dots<kRows>(q, keys, n, dim, scores);
  if constexpr (kRows > 1)
    if (rows) dots_of<kRows - 1>(q, keys, n, dim, scores, rows);
}

template <int kRows>
void mix_of(const float* w, const float* const* keys, std::ptrdiff_t plane, int n, int dim, float* out, int rows) {
  for (; rows >= kRows; rows -= kRows, w += kRows * kKeys, out += kRows * dim)
    mix<kRows>(w, keys, plane, n, dim, out);
  if constexpr (kRows > 1)
    if (rows) mix_of<kRows - 1>(w, keys, plane, n, dim, out, rows);
}

// Keys as panels [kKeys / kPanel][dim][kPanel], so that scores are a product of the common kind.
inline void transpose_keys(const float* const* keys, int n, int dim, float* panels) {
  for (int key = 0; key < n; ++key) {
    float* column = panels + static_cast<std::ptrdiff_t>(key / kPanel) * dim * kPanel + key % kPanel;
    for (int i = 0; i < dim; ++i) column[i * kPanel] = keys[key][i];
  }
  for (int key = n; key % kPanel; ++key) {  // what lies there may be NaN, and would slow or spoil the tile
    float* column = panels + static_cast<std::ptrdiff_t>(key / kPanel) * dim * kPanel + key % kPanel;
    for (int i = 0; i < dim; ++i) column[i * kPanel] = 0.0f;
  }
}

// Values as panels [dim / kPanel][n][kPanel], zero-padded.
inline void panel_values(const float* const* keys, std::ptrdiff_t plane, int n, int dim, float* panels) {
  for (int first = 0; first < dim; first += kPanel) {
    const int width = std::min(kPanel, dim - first);
    for (int key = 0; key < n; ++key, panels += kPanel) {
      std::memcpy(panels, keys[key] + plane + first, width * sizeof(float));
      std::fill(panels + width, panels + kPanel, 0.0f);
    }
  }
}

struct Scratch {
  float* queries;  // [rows][dim]
  float* out;      // [rows][dim]
  float* scores;   // [rows][kKeys]
  float* tops;     // [rows]
  float* weights;  // [rows]
  float* keys;     // panels; many tokens only
  float* values;

  Scratch(float* p, std::int64_t rows, int dim) {
    queries = p, p += rows * dim;
    out = p, p += rows * dim;
    scores = p, p += rows * kKeys;
    tops = p, p += rows;
    weights = p, p += rows;
    keys = p, p += static_cast<std::ptrdiff_t>(dim) * kKeys;
    values = p;
  }
};

std::size_t attend_scratch(const AttentionArgs& args, std::int64_t tokens) {
  const std::size_t rows = tokens * (args.heads / args.kv_heads), dim = args.dim;
  return rows * (2 * dim + kKeys + 2) + dim * kKeys + (dim + kPanel) * kKeys;
}

// Scores and mixing of up to kKeys of `left` keys, by dot products: each key serves a few rows only.
inline void few_rows(const AttentionArgs& args, const Scratch& s, const float* const* keys, int left, int rows) {
  const int n = std::min(kKeys, left), dim = args.dim;
  for (int first = 0; first < n; first += kKeysAhead) {
    const int some = std::min(kKeysAhead, n - first);
    for (int key = first + kKeysAhead; key < std::min(first + 2 * kKeysAhead, left); ++key)
      fetch(keys[key], args.pool.plane_stride, dim);
    dots_of<4>(s.queries, keys + first, some, dim, s.scores + first, rows);
  }
  for (int row = 0; row < rows; ++row)
    scale(s.out + row * dim, dim, soften(s.scores + row * kKeys, 0, n, n, s.tops[row], s.weights[row]));
  mix_of<4>(s.scores, keys, args.pool.plane_stride, n, dim, s.out, rows);
}

// The same by products of panels, each token with its own limits.
inline void many_rows(const AttentionArgs& args, const AttentionTile& tile, const Scratch& s,
                      const float* const* keys, std::int64_t from, int n) {
  const int share = args.heads / args.kv_heads, dim = args.dim, rows = static_cast<int>(tile.tokens) * share;
  transpose_keys(keys, n, dim, s.keys);
  panel_values(keys, args.pool.plane_stride, n, dim, s.values);
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

inline void attend_one(const AttentionArgs& args, const AttentionTile& tile, const Scratch& s, int rows) {
  const int total = static_cast<int>(tile.to - tile.from);
  const float* keys[kStretch];
  for (int key = 0; key < total; ++key) keys[key] = key_row(args.pool, *tile.span, tile.kv_head, tile.from + key);
  for (int key = 0; key < std::min(kKeysAhead, total); ++key) fetch(keys[key], args.pool.plane_stride, args.dim);
  for (int first = 0; first < total; first += kKeys) few_rows(args, s, keys + first, total - first, rows);
}

inline void attend_many(const AttentionArgs& args, const AttentionTile& tile, const Scratch& s) {
  const float* keys[kKeys];
  for (std::int64_t from = tile.from; from < tile.to; from += kKeys) {
    const int n = static_cast<int>(std::min<std::int64_t>(kKeys, tile.to - from));
    for (int key = 0; key < n; ++key) keys[key] = key_row(args.pool, *tile.span, tile.kv_head, from + key);
    many_rows(args, tile, s, keys, from, n);
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

void attend(const AttentionArgs& args, const AttentionTile& tile, float* scratch) {
  const int rows = static_cast<int>(tile.tokens) * (args.heads / args.kv_heads);
  const Scratch s(scratch, rows, args.dim);
  load_queries(args, tile, s.queries);
  std::fill(s.out, s.out + static_cast<std::ptrdiff_t>(rows) * args.dim, 0.0f);
  std::fill(s.tops, s.tops + rows, kNothing);
  std::fill(s.weights, s.weights + rows, 0.0f);
  // The rest of a prompt's chunk may be one token too, and see more than one stretch.
  if (tile.tokens == 1 && tile.to - tile.from <= kStretch)
    attend_one(args, tile, s, rows);
  else
    attend_many(args, tile, s);
  finish(args, tile, s, rows);
}

}  // namespace
