#include <algorithm>
#include <memory>

#include "dispatch.h"

namespace kvferry::native {

namespace {

// What a layer makes on its way, each [rows, its widest]. The caller's thread keeps the memory for its next step.
struct Buffers {
  float* normed;
  float* wide;   // q, k and v, then gate and up
  float* mixed;  // of attention, then of the two
};

Buffers buffers(std::span<const DecoderLayer> layers, int hidden, int rows) {
  thread_local std::unique_ptr<float[]> memory;
  thread_local std::size_t size = 0;
  std::size_t wide = 0, mixed = 0;
  for (const DecoderLayer& layer : layers) {
    wide = std::max<std::size_t>(wide, std::max(layer.qkv.outputs, layer.gate_up.outputs));
    mixed = std::max<std::size_t>(mixed, std::max(layer.out.columns, layer.down.columns));
  }
  const std::size_t wanted = rows * (hidden + wide + mixed);
  if (size < wanted) {
    memory.reset();
    memory = std::make_unique_for_overwrite<float[]>(wanted);
    size = wanted;
  }
  float* const first = memory.get();
  return {first, first + static_cast<std::size_t>(rows) * hidden, first + rows * (hidden + wide)};
}

void apply(const PackedLinear& weight, const float* x, float* y, bool add, int rows, int threads) {
  if (weight.is_int8)
    linear_int8({x, weight.columns, nullptr, static_cast<const std::int8_t*>(weight.packed), weight.bias, y,
                 weight.outputs, rows, weight.columns, weight.outputs, add},
                threads);
  else
    linear({x, weight.columns, nullptr, 0, static_cast<const float*>(weight.packed), weight.bias, y, weight.outputs,
            weight.columns, weight.outputs, add},
           rows, threads);
}

}  // namespace

void decoder_layers(std::span<const DecoderLayer> layers, std::span<const LayerPlace> places, float* x, int hidden,
                    int rows, const float* turn, int threads) {
  const Buffers b = buffers(layers, hidden, rows);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const DecoderLayer& layer = layers[i];
    const std::ptrdiff_t stride = layer.qkv.outputs, k = layer.heads * layer.dim, v = k + layer.kv_heads * layer.dim;
    rms_norm(x, hidden, layer.attention_norm, layer.attention_eps, b.normed, rows, hidden, threads);
    apply(layer.qkv, b.normed, b.wide, false, rows, threads);
    attention({b.wide, stride, b.wide + k, stride, b.wide + v, stride, turn, b.mixed, places[i].pool, layer.heads,
               layer.kv_heads, layer.dim, layer.scale},
              places[i].spans, threads);
    apply(layer.out, b.mixed, x, true, rows, threads);
    rms_norm(x, hidden, layer.mlp_norm, layer.mlp_eps, b.normed, rows, hidden, threads);
    apply(layer.gate_up, b.normed, b.wide, false, rows, threads);
    silu_mul(b.wide, b.mixed, rows, layer.down.columns, threads);
    apply(layer.down, b.mixed, x, true, rows, threads);
  }
}

}  // namespace kvferry::native
