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

// A packed weight: of bytes where `is_int8`, else of floats.
struct PackedLinear {
  const void* packed;
  const float* bias;  // or null
  int outputs;
  int columns;
  bool is_int8;
};

// x += attention(norm(x)); x += down(silu(gate(norm(x))) * up(norm(x))). qkv: q beside k beside v.
struct DecoderLayer {
  const float* attention_norm;
  float attention_eps;
  PackedLinear qkv;
  PackedLinear out;
  int heads;
  int kv_heads;
  int dim;
  float scale;  // of scores
  const float* mlp_norm;
  float mlp_eps;
  PackedLinear gate_up;
  PackedLinear down;
};

// Where a layer's K and V are in this step.
struct LayerPlace {
  PoolView pool;
  std::span<const Span> spans;
};

// One layer after the other over x, [rows, hidden], in place. turn: see AttentionArgs.
void decoder_layers(std::span<const DecoderLayer> layers, std::span<const LayerPlace> places, float* x, int hidden,
                    int rows, const float* turn, int threads);

}  // namespace kvferry::native
