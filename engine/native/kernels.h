// What a kernel set computes. Everything here is plain data: translation units built for different instruction
// sets share this header, so it must not hold code that the linker could pick from the wrong one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry::native {

// Outputs of a linear that lie side by side in its packed weight: [panel][column][kPanel], zero-padded.
constexpr int kPanel = 32;

// Columns summed in one go; then the sums go back to memory. So much of a panel, 24 KB, stays in the first-level cache
// until the last tile of rows has read it, while the next so much is being fetched.
constexpr int kDepth = 192;
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

// Weights of one byte: for every panel [group of columns][scales | two strips], where scales are kPanel bfloat16 and a
// strip holds its kStrip outputs as [four columns][output][column]. Columns are padded to whole groups with zeros.
constexpr int kGroup = 32;
constexpr int kStrip = 16;
constexpr int kScaleNbytes = 2 * kPanel;
constexpr int kGroupNbytes = kScaleNbytes + kGroup * kPanel;

constexpr int groups_of(int columns) { return (columns + kGroup - 1) / kGroup; }

// So few tiles of rows fetch the next panel together, each its share: one alone would have to wait for memory, which would be
// idle while the others compute. Of more, the last one fetches it.
constexpr int kSharingTiles = 4;

// Rows are cut into tiles as even as can be, none higher than `highest`.
constexpr int tiles_of(int rows, int highest) { return (rows + highest - 1) / highest; }
constexpr int first_row_of(int tile, int rows, int highest) {
  return static_cast<int>(std::int64_t{tile} * rows / tiles_of(rows, highest));
}

// y[rows, outputs] (+)= x[rows, columns] W^T + bias, where x is rounded to one byte too, group by group.
struct Int8Args {
  const float* x;
  std::ptrdiff_t x_stride;
  std::int8_t* quantised;  // the kernels' copy of x, in an order of their own
  const std::int8_t* packed;
  const float* bias;  // or null
  float* y;
  std::ptrdiff_t y_stride;
  int rows;
  int columns;
  int outputs;
  bool add;  // to what y holds
};

// What an element of K and V is stored as. Bytes have a float behind each row, its scale.
enum class Storage { kFloat32, kBFloat16, kInt8 };
constexpr int kStorages = 3;

// Where a layer's K and V lie in a pool: strides in bytes. A row is one token of one head.
struct PoolView {
  std::byte* base;  // of this layer's K in slot 0
  Storage storage;
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

struct Int8Kernels {
  int tile_rows;
  std::size_t (*quantised_nbytes)(int rows, int columns);
  void (*quantise_row)(const Int8Args&, int row, int tile, int height);
  // Tiles [first_tile, last_tile) of panels [first_panel, last_panel).
  void (*linear)(const Int8Args&, int first_tile, int last_tile, int first_panel, int last_panel);
};

struct KernelSet {
  const char* name;
  // Rows [first_row, last_row) of panels [first_panel, last_panel).
  void (*linear)(const LinearArgs&, int first_row, int last_row, int first_panel, int last_panel);
  Int8Kernels int8;
  // By what the pool stores.
  void (*store_kv[kStorages])(const AttentionArgs&, const Span&, std::int64_t token);
  void (*attend[kStorages])(const AttentionArgs&, const AttentionTile&, float* scratch);
  std::size_t (*attend_scratch)(const AttentionArgs&, std::int64_t tokens);  // floats
  void (*rms_norm)(const float* x, const float* weight, float eps, float* y, int columns);
  void (*silu_mul)(const float* gate, const float* up, float* y, int columns);
};

extern const KernelSet kPortable;
#ifdef KVFERRY_X86
extern const KernelSet kAvx2;
extern const KernelSet kAvx512;
extern const Int8Kernels kInt8Avx512Vnni;  // all else as in kAvx512
#endif

// The widest set this CPU can run, unless `use` named another one.
const KernelSet& kernels();

}  // namespace kvferry::native
