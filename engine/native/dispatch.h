// Which kernel set runs, and the entry points that spread it over threads. All of them block until done.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "kernels.h"

namespace kvferry::native {

// Names of the sets this CPU can run, widest first.
std::vector<std::string> available();
// Process-wide; false when this CPU cannot run it.
bool use(const std::string& name);

// [outputs, columns] row by row into panels; `packed` holds packed_floats of them.
std::size_t packed_floats(std::int64_t outputs, std::int64_t columns);
void pack(const float* weight, std::int64_t outputs, std::int64_t columns, float* packed, int threads);

void linear(const LinearArgs& args, int rows, int threads);

// Weights of one byte: values int8 [outputs, columns], scales bfloat16 [outputs, groups], into panels.
std::size_t packed_int8_nbytes(std::int64_t outputs, std::int64_t columns);
void pack_int8(const std::int8_t* values, const std::uint16_t* scales, std::int64_t outputs, std::int64_t columns,
               std::int8_t* packed, int threads);
// args.quantised is filled in here.
void linear_int8(const Int8Args& args, int threads);

// Stores the step's K and V, then attends.
void attention(const AttentionArgs& args, std::span<const Span> spans, int threads);
void rms_norm(const float* x, std::ptrdiff_t x_stride, const float* weight, float eps, float* y, int rows, int columns,
              int threads);
// both: [rows, 2 * columns], gate beside up.
void silu_mul(const float* both, float* y, int rows, int columns, int threads);

}  // namespace kvferry::native
