// What a kernel set computes. Everything here is plain data: translation units built for different instruction
// sets share this header, so it must not hold code that the linker could pick from the wrong one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry::native {

// Outputs of a linear that lie side by side in its packed weight: [panel][column][kPanel], zero-padded.
constexpr int kPanel = 32;

// Columns summed in one go; then the sums go back to memory. So much of a panel stays in the second-level cache.
constexpr int kDepth = 2048;
// The distance of rows in a copy of x made for the kernels: a constant costs no registers, and an odd number of cache
// lines keeps the rows from evicting each other.
constexpr int kSpreadStride = kDepth + 16;

// y[rows, outputs] (+)= x[rows, columns] W^T + bias. Strides in elements.
struct LinearArgs {
  const float* x;
  std::ptrdiff_t x_stride;
  const float* spread;  // or null: x as [depth block][row][kSpreadStride]
  int spread_rows;
  const float* packed;
  const float* bias;  // or null
  float* y;
  std::ptrdiff_t y_stride;
  int columns;
  int outputs;
  bool add;  // to what y holds
};

// Where a layer's K and V lie in a pool: element offsets from `base`.
struct PoolView {
  float* base;  // of this layer's K in slot 0
  std::ptrdiff_t slot_stride;
  std::ptrdiff_t plane_stride;  // from K to V
  std::ptrdiff_t head_stride;
  std::ptrdiff_t token_stride;
  int tokens_per_block;
  int window;  // 0: none
};

// The tokens of one sequence in a step. Positions count from the first block's first token.
struct Span {
  std::int64_t row;     // first row in the step
  std::int64_t start;   // position of the first computed token
  std::int64_t length;  // computed tokens
  std::int64_t lowest;  // first position the first token attends to
  const std::int64_t* blocks;
};

// One step's q, k, v: [tokens, heads, dim], each with its own row stride; heads of a row are contiguous.
struct AttentionArgs {
  const float* q;
  std::ptrdiff_t q_stride;
  const float* k;
  std::ptrdiff_t k_stride;
  const float* v;
  std::ptrdiff_t v_stride;
  const float* turn;  // [tokens, dim]: cos and sin of each pair side by side; null: nothing rotates
  float* out;         // [tokens, heads, dim], contiguous
  PoolView pool;
  int heads;
  int kv_heads;
  int dim;
  float scale;
};

// A long context is cut into stretches of so many positions, whatever the number of threads and of sequences, so
// that a sequence's results depend on nothing else in the batch.
constexpr int kStretch = 512;

// A query tile of one span and one KV head against positions [from, to).
struct AttentionTile {
  const Span* span;
  int kv_head;
  std::int64_t first_token;  // of the span
  std::int64_t tokens;
  std::int64_t from;  // of one token alone: at most kStretch before `to`
  std::int64_t to;
  float* partial;  // null: the result goes to `out`; else [heads per KV head][dim + 2]: sums, maximum, weight
};

struct KernelSet {
  const char* name;
  // Rows [first_row, last_row) of panels [first_panel, last_panel).
  void (*linear)(const LinearArgs&, int first_row, int last_row, int first_panel, int last_panel);
  void (*store_kv)(const AttentionArgs&, const Span&, std::int64_t token);
  void (*attend)(const AttentionArgs&, const AttentionTile&, float* scratch);
  std::size_t (*attend_scratch)(const AttentionArgs&, std::int64_t tokens);  // floats
  void (*rms_norm)(const float* x, const float* weight, float eps, float* y, int columns);
  void (*silu_mul)(const float* gate, const float* up, float* y, int columns);
};

extern const KernelSet kPortable;
#ifdef KVFERRY_X86
extern const KernelSet kAvx2;
extern const KernelSet kAvx512;
#endif

// The widest set this CPU can run, unless `use` named another one.
const KernelSet& kernels();

}  // namespace kvferry::native
