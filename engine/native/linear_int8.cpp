#include <algorithm>
#include <cstring>
#include <memory>

#include "dispatch.h"

namespace kvferry::native {

namespace {

// Rows a panel serves before the next one is taken: so many that their copies and two panels stay in the second-level
// cache.
int row_block(int columns) { return columns <= 1024 ? 144 : 48; }

std::int64_t panels_of(std::int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

// The caller's buffer for the copies of x; it grows to the largest step and stays.
std::int8_t* scratch(std::size_t nbytes) {
  thread_local std::unique_ptr<std::int8_t[]> buffer;
  thread_local std::size_t size = 0;
  if (size < nbytes) {
    buffer.reset();
    buffer = std::make_unique_for_overwrite<std::int8_t[]>(nbytes);
    size = nbytes;
  }
  return buffer.get();
}

// One group of one panel; `scales` and `values` are the panel's first output's.
void pack_group(const std::int8_t* values, const std::uint16_t* scales, int outputs, std::int64_t columns,
                std::int64_t group, std::int8_t* to) {
  const std::int64_t groups = groups_of(static_cast<int>(columns)), first = group * kGroup;
  std::memset(to, 0, kGroupNbytes);
  for (int output = 0; output < outputs; ++output) {
    std::memcpy(to + 2 * output, scales + output * groups + group, 2);
    std::int8_t* strip = to + kScaleNbytes + output / kStrip * kStrip * kGroup + output % kStrip * 4;
    const int n = static_cast<int>(std::min<std::int64_t>(kGroup, columns - first));
    for (int i = 0; i < n; ++i) strip[i / 4 * 4 * kStrip + i % 4] = values[output * columns + first + i];
  }
}

}  // namespace

std::size_t packed_int8_nbytes(std::int64_t outputs, std::int64_t columns) {
  return static_cast<std::size_t>(panels_of(outputs)) * groups_of(static_cast<int>(columns)) * kGroupNbytes;
}

void pack_int8(const std::int8_t* values, const std::uint16_t* scales, std::int64_t outputs, std::int64_t columns,
               std::int8_t* packed, int threads) {
  const std::int64_t panels = panels_of(outputs), groups = groups_of(static_cast<int>(columns));
#pragma omp parallel for num_threads(threads)
  for (std::int64_t panel = 0; panel < panels; ++panel)
    for (std::int64_t group = 0; group < groups; ++group) {
      const std::int64_t first = panel * kPanel;
      pack_group(values + first * columns, scales + first * groups,
                 static_cast<int>(std::min<std::int64_t>(kPanel, outputs - first)), columns, group,
                 packed + (panel * groups + group) * kGroupNbytes);
    }
}

void linear_int8(const Int8Args& given, int threads) {
  const Int8Kernels& set = kernels().int8;
  Int8Args args = given;
  args.quantised = scratch(set.quantised_nbytes(args.rows, args.columns));
  const int tiles = tiles_of(args.rows, set.tile_rows), panels = static_cast<int>(panels_of(args.outputs));
  const int block = row_block(args.columns) / set.tile_rows, blocks = (tiles + block - 1) / block;
  // Few panels at a time, taken by whoever is free: another process may hold one of the cores.
  const int grain = blocks > 1 ? 1 : std::clamp(panels / (threads * 8), 1, 8);
  const int grains = (panels + grain - 1) / grain;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(static)
    for (int tile = 0; tile < tiles; ++tile) {
      const int first = first_row_of(tile, args.rows, set.tile_rows);
      const int last = first_row_of(tile + 1, args.rows, set.tile_rows);
      for (int row = first; row < last; ++row) set.quantise_row(args, row, tile, last - first);
    }
#pragma omp for schedule(dynamic, 1)
    for (int task = 0; task < grains * blocks; ++task) {
      const int tile = task % blocks * block, panel = task / blocks * grain;
      set.linear(args, tile, std::min(tiles, tile + block), panel, std::min(panels, panel + grain));
    }
  }
}

}  // namespace kvferry::native
