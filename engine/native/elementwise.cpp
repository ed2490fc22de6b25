#include "dispatch.h"

namespace kvferry::native {

namespace {

// Below this many elements waking the other threads costs more than they save.
constexpr std::int64_t kWorthThreads = 1 << 15;

}  // namespace

void rms_norm(const float* x, std::ptrdiff_t x_stride, const float* weight, float eps, float* y, int rows, int columns,
              int threads) {
  const KernelSet& set = kernels();
#pragma omp parallel for num_threads(threads) if (threads > 1 && std::int64_t{rows} * columns > kWorthThreads)
  for (int row = 0; row < rows; ++row)
    set.rms_norm(x + row * x_stride, weight, eps, y + static_cast<std::ptrdiff_t>(row) * columns, columns);
}

void silu_mul(const float* both, float* y, int rows, int columns, int threads) {
  const KernelSet& set = kernels();
#pragma omp parallel for num_threads(threads) if (threads > 1 && std::int64_t{rows} * columns > kWorthThreads)
  for (int row = 0; row < rows; ++row) {
    const float* gate = both + static_cast<std::ptrdiff_t>(row) * 2 * columns;
    set.silu_mul(gate, gate + columns, y + static_cast<std::ptrdiff_t>(row) * columns, columns);
  }
}

}  // namespace kvferry::native
