#include <algorithm>
#include <cstring>
#include <memory>

#include "dispatch.h"

namespace kvferry::native {

namespace {

// Rows a panel serves before the next one is taken: a multiple of every tile height, and so many that they fit into the
// second-level cache.
int row_block(int columns) { return columns <= 640 ? 144 : 72; }

constexpr int kFewRows = 4;     // taken from x itself: so few fit into registers and cache as they lie

// The caller's buffer for copies of x; it grows to the largest step and stays.
float* scratch(std::size_t floats) {
  thread_local std::unique_ptr<float[]> buffer;
  thread_local std::size_t size = 0;
  if (size < floats) {
    buffer.reset();
    buffer = std::make_unique_for_overwrite<float[]>(floats);
    size = floats;
  }
  return buffer.get();
}

// Row by row into kSpreadStride; any thread may do any row.
void spread_row(const LinearArgs& args, float* copy, int row) {
  for (int column = 0; column < args.columns; column += kDepth)
    std::memcpy(copy + (static_cast<std::ptrdiff_t>(column / kDepth) * args.spread_rows + row) * kSpreadStride,
                args.x + row * args.x_stride + column, std::min(kDepth, args.columns - column) * sizeof(float));
}

}  // namespace

std::size_t packed_floats(std::int64_t outputs, std::int64_t columns) {
  return static_cast<std::size_t>((outputs + kPanel - 1) / kPanel) * kPanel * columns;
}

void pack(const float* weight, std::int64_t outputs, std::int64_t columns, float* packed, int threads) {
  const std::int64_t panels = (outputs + kPanel - 1) / kPanel;
#pragma omp parallel for num_threads(threads)
  for (std::int64_t panel = 0; panel < panels; ++panel) {
    float* to = packed + panel * columns * kPanel;
    for (std::int64_t column = 0; column < columns; ++column)
      for (int i = 0; i < kPanel; ++i) {
        const std::int64_t row = panel * kPanel + i;
        to[column * kPanel + i] = row < outputs ? weight[row * columns + column] : 0.0f;
      }
  }
}

void linear(const LinearArgs& given, int rows, int threads) {
  LinearArgs args = given;
  float* copy = nullptr;
  if (rows > kFewRows) {
    copy = scratch(static_cast<std::size_t>((args.columns + kDepth - 1) / kDepth) * rows * kSpreadStride);
    args.spread = copy, args.spread_rows = rows;
  }
  const int panels = (args.outputs + kPanel - 1) / kPanel;
  const int height = row_block(args.columns);
  const int row_blocks = (rows + height - 1) / height;
  // Few panels at a time, taken by whoever is free: another process may hold one of the cores.
  const int grain = rows > height ? 1 : std::clamp(panels / (threads * 8), 1, 8);
  const int grains = (panels + grain - 1) / grain;
  const KernelSet& set = kernels();
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    if (copy) {
#pragma omp for schedule(static)
      for (int row = 0; row < rows; ++row) spread_row(args, copy, row);
    }
#pragma omp for schedule(dynamic, 1)
    for (int task = 0; task < grains * row_blocks; ++task) {
      const int first_row = task % row_blocks * height, first = task / row_blocks * grain;
      set.linear(args, first_row, std::min(rows, first_row + height), first, std::min(panels, first + grain));
    }
  }
}

}  // namespace kvferry::native
