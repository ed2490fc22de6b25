#include <algorithm>
#include <cmath>
#include <vector>

#include "dispatch.h"

namespace kvferry::native {

namespace {

constexpr std::int64_t kTileRows = 144;  // queries that share one pass over the keys

struct Merge {
  std::size_t first_tile;
  std::int64_t count;
};

struct Work {
  std::vector<AttentionTile> tiles;
  std::vector<Merge> merges;  // tiles whose partial results become one
  std::vector<float> partials;
  std::int64_t most_tokens = 1;
};

std::int64_t lowest_of(const AttentionArgs& args, const Span& span, std::int64_t token) {
  return args.pool.window ? std::max(span.lowest, span.start + token + 1 - args.pool.window) : span.lowest;
}

void add_single(const AttentionArgs& args, const Span& span, Work& work) {
  const std::int64_t to = span.start + 1, stretches = (to - span.lowest + kStretch - 1) / kStretch;
  for (int head = 0; head < args.kv_heads; ++head) {
    if (stretches > 1) work.merges.push_back({work.tiles.size(), stretches});
    for (std::int64_t from = span.lowest; from < to; from += kStretch)
      work.tiles.push_back({&span, head, 0, 1, from, std::min<std::int64_t>(to, from + kStretch), nullptr});
  }
}

void add_chunk(const AttentionArgs& args, const Span& span, Work& work) {
  const std::int64_t height = std::max<std::int64_t>(2, kTileRows / (args.heads / args.kv_heads));
  for (std::int64_t token = 0; token < span.length; token += height) {
    const std::int64_t tokens = std::min(height, span.length - token);
    work.most_tokens = std::max(work.most_tokens, tokens);
    for (int head = 0; head < args.kv_heads; ++head)
      work.tiles.push_back({&span, head, token, tokens, lowest_of(args, span, token),
                            span.start + token + tokens, nullptr});
  }
}

Work plan(const AttentionArgs& args, std::span<const Span> spans) {
  Work work;
  for (const Span& span : spans)
    if (span.length == 1)
      add_single(args, span, work);
    else
      add_chunk(args, span, work);
  const std::size_t size = static_cast<std::size_t>(args.heads / args.kv_heads) * (args.dim + 2);
  std::size_t parts = 0;
  for (const Merge& merge : work.merges) parts += merge.count;
  work.partials.resize(parts * size);
  float* partial = work.partials.data();
  for (const Merge& merge : work.merges)
    for (std::int64_t i = 0; i < merge.count; ++i, partial += size) work.tiles[merge.first_tile + i].partial = partial;
  return work;
}

void merge_parts(const AttentionArgs& args, const AttentionTile* tiles, std::int64_t count) {
  const int share = args.heads / args.kv_heads, dim = args.dim;
  for (int head = 0; head < share; ++head) {
    const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(head) * (dim + 2);
    float top = tiles[0].partial[at + dim], weight = 0.0f;
    for (std::int64_t i = 1; i < count; ++i) top = std::max(top, tiles[i].partial[at + dim]);
    float* out = args.out + (tiles[0].span->row * args.heads + tiles[0].kv_head * share + head) * dim;
    std::fill(out, out + dim, 0.0f);
    for (std::int64_t i = 0; i < count; ++i) {
      const float* part = tiles[i].partial + at;
      const float factor = std::exp(part[dim] - top);
      weight += factor * part[dim + 1];
      for (int d = 0; d < dim; ++d) out[d] += factor * part[d];
    }
    for (int d = 0; d < dim; ++d) out[d] /= weight;
  }
}

}  // namespace

void attention(const AttentionArgs& args, std::span<const Span> spans, int threads) {
  const KernelSet& set = kernels();
  const int storage = static_cast<int>(args.pool.storage);
  const Work work = plan(args, spans);
  const std::int64_t sequences = static_cast<std::int64_t>(spans.size());
  const std::int64_t tiles = static_cast<std::int64_t>(work.tiles.size());
  const std::int64_t merges = static_cast<std::int64_t>(work.merges.size());
  const std::size_t scratch_floats = set.attend_scratch(args, work.most_tokens);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> scratch(scratch_floats);
    for (std::int64_t sequence = 0; sequence < sequences; ++sequence)
#pragma omp for schedule(static) nowait
      for (std::int64_t token = 0; token < spans[sequence].length; ++token)
        set.store_kv[storage](args, spans[sequence], token);
#pragma omp barrier
    // Backwards: the last tiles of a prompt see the most keys, and shall not be waited for at the end.
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t tile = tiles - 1; tile >= 0; --tile) set.attend[storage](args, work.tiles[tile], scratch.data());
#pragma omp for schedule(static)
    for (std::int64_t i = 0; i < merges; ++i)
      merge_parts(args, &work.tiles[work.merges[i].first_tile], work.merges[i].count);
  }
}

}  // namespace kvferry::native
