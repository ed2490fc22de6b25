// Linears over int8: weights and activations are integers of one byte, with a scale for every kGroup columns. Sums
// within a group are exact, so only the last step of a group rounds.
#pragma once

#include "quantise.h"
#include "vector.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using kvferry::native::first_row_of;
using kvferry::native::groups_of;
using kvferry::native::Int8Args;
using kvferry::native::kGroupNbytes;
using kvferry::native::kPanel;
using kvferry::native::kScaleNbytes;
using kvferry::native::kSharingTiles;
using kvferry::native::kStrip;

constexpr int kQuads = kGroup / 4;             // columns are taken four at a time
constexpr int kStripVecs = kStrip / kLanes;
constexpr int kInt8TileRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 2;

// -- products of four columns ------------------------------------------------------------------------------
// A vector of weights holds four columns of kLanes outputs. Where the instruction set multiplies bytes, they are one
// part, biased to be unsigned (and a group starts from what takes the bias away again); elsewhere columns 0 and 2,
// then 1 and 3, are widened to 16 bits, which once per tile costs less than it would per row.

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr int kParts = 2;
using Activation = std::int16_t;
#if KVFERRY_LANES == 16
using Bits = __m512i;
inline Bits shift_left(Bits v) { return _mm512_slli_epi16(v, 8); }
inline Bits shift_right(Bits v) { return _mm512_srai_epi16(v, 8); }
inline Bits pairs(Bits a, Bits b) { return _mm512_madd_epi16(a, b); }
#else
using Bits = __m256i;
inline Bits shift_left(Bits v) { return _mm256_slli_epi16(v, 8); }
inline Bits shift_right(Bits v) { return _mm256_srai_epi16(v, 8); }
inline Bits pairs(Bits a, Bits b) { return _mm256_madd_epi16(a, b); }
#endif
template <int kPart>
inline IntVec weights_part(const std::int8_t* p) {
  Bits v;
  std::memcpy(&v, p, sizeof v);
  return (IntVec)shift_right(kPart == 0 ? shift_left(v) : v);
}
inline IntVec add_products(IntVec sums, IntVec weights, IntVec x) {
  return sums + (IntVec)pairs((Bits)weights, (Bits)x);
}
#else
constexpr int kParts = 1;
using Activation = std::int8_t;
template <int kPart>
inline IntVec weights_part(const std::int8_t* p) {
  IntVec v;
  std::memcpy(&v, p, sizeof v);
  return v ^ static_cast<std::int32_t>(0x80808080u);
}
inline IntVec add_products(IntVec sums, IntVec weights, IntVec x) {
#if defined(__AVX512VNNI__)
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
#else
  for (int byte = 0; byte < 32; byte += 8) sums += ((weights >> byte) & 0xFF) * ((x << (24 - byte)) >> 24);
  return sums;
#endif
}
#endif
constexpr int kBias = kParts == 1 ? 128 : 0;
constexpr std::ptrdiff_t kQuadNbytes = 4 * sizeof(Activation);

inline IntVec repeat(std::int32_t x) {
#if KVFERRY_LANES == 16
  return IntVec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#elif KVFERRY_LANES == 8
  return IntVec{x, x, x, x, x, x, x, x};
#else
  return IntVec{x, x, x, x};
#endif
}

// The value as it is. Keeps the compiler from computing the products of many rows ahead of their sums, for which there
// are not enough registers.
inline IntVec in_order(IntVec v) {
#if defined(__AVX2__)
  asm volatile("" : "+v"(v));
#endif
  return v;
}

// -- activations -------------------------------------------------------------------------------------------

// One row's share of a group: its scale, and what its sums start from.
struct RowGroup {
  float scale;
  std::int32_t start;
};

// The copy of x: [tile][quad][row of the tile], then as many RowGroups.
struct Quantised {
  std::int8_t* quads;
  RowGroup* scales;

  Quantised(const Int8Args& args, int first_row) {
    const std::ptrdiff_t groups = groups_of(args.columns);
    quads = args.quantised + first_row * groups * kQuads * kQuadNbytes;
    scales = reinterpret_cast<RowGroup*>(args.quantised + args.rows * groups * kQuads * kQuadNbytes) + first_row * groups;
  }
};

std::size_t quantised_nbytes(int rows, int columns) {
  return static_cast<std::size_t>(rows) * groups_of(columns) * (kQuads * kQuadNbytes + sizeof(RowGroup));
}

// One row of a tile of `height` rows. Every row is done once, by any thread.
void quantise_row(const Int8Args& args, int row, int tile, int height) {
  const int groups = groups_of(args.columns), place = row - first_row_of(tile, args.rows, kInt8TileRows);
  const Quantised to(args, row - place);
  const float* x = args.x + row * args.x_stride;
  for (int group = 0; group < groups; ++group) {
    const int n = std::min(kGroup, args.columns - group * kGroup);
    const float scale = scale_of(largest_bits(x + group * kGroup, n));
    std::int32_t q[kGroup], total = 0;
    quantise(x + group * kGroup, n, scale, q);
    for (int i = 0; i < kGroup; ++i) total += q[i];
    to.scales[static_cast<std::ptrdiff_t>(group) * height + place] = {scale, -kBias * total};
    std::int8_t* quad = to.quads + (static_cast<std::ptrdiff_t>(group) * kQuads * height + place) * kQuadNbytes;
    for (int i = 0; i < kGroup; i += 4, quad += height * kQuadNbytes) {
      Activation four[4];
      for (int j = 0; j < 4; ++j) four[kParts == 1 ? j : j % 2 * 2 + j / 2] = static_cast<Activation>(q[i + j]);
      std::memcpy(quad, four, sizeof four);
    }
  }
}

// -- a tile ------------------------------------------------------------------------------------------------

// A row's results of a panel.
using Totals = Vec[kPanel / kLanes];

// Exact sums of one group: kRows rows by the outputs of a strip.
#if defined(__AVX2__) && KVFERRY_LANES == 8
// Six rows leave no register to spare. An array of sums would be kept in memory, and so would what a compiler takes out
// of a product and its sum: every sum has a name, and a row's share of a part is one instruction to the compiler.
template <int kRows>
struct StripSums {
  IntVec low, high;  // of the last row
  StripSums<kRows - 1> others;

  __attribute__((always_inline)) void start(const RowGroup* rows) {
    low = high = repeat(rows[kRows - 1].start);
    others.start(rows);
  }
  template <int kPart>
  __attribute__((always_inline)) void add(IntVec low_weights, IntVec high_weights, const std::int8_t* quads) {
    IntVec x, product;
    asm("vpbroadcastd %[from], %[x]\n\t"
        "vpmaddwd %[x], %[low_weights], %[product]\n\t"
        "vpmaddwd %[x], %[high_weights], %[x]\n\t"
        "vpaddd %[product], %[low], %[low]\n\t"
        "vpaddd %[x], %[high], %[high]"
        : [low] "+x"(low), [high] "+x"(high), [x] "=&x"(x), [product] "=&x"(product)
        : [low_weights] "x"(low_weights), [high_weights] "x"(high_weights),
          [from] "m"(*reinterpret_cast<const std::int32_t*>(quads + (kRows - 1) * kQuadNbytes + kPart * 4)));
    others.template add<kPart>(low_weights, high_weights, quads);
  }
  template <int kPart>
  __attribute__((always_inline)) void add(const std::int8_t* weights, const std::int8_t* quads) {
    add<kPart>(weights_part<kPart>(weights), weights_part<kPart>(weights + 4 * kLanes), quads);
  }
  __attribute__((always_inline)) void scale_into(Totals* totals, int place, Vec low_scales, Vec high_scales,
                                                 const RowGroup* rows) {
    totals[kRows - 1][place] += __builtin_convertvector(low, Vec) * low_scales * rows[kRows - 1].scale;
    totals[kRows - 1][place + 1] += __builtin_convertvector(high, Vec) * high_scales * rows[kRows - 1].scale;
    others.scale_into(totals, place, low_scales, high_scales, rows);
  }
  __attribute__((always_inline)) void scale_into(Totals* totals, int place, const BFloat16* scales,
                                                 const RowGroup* rows) {
    scale_into(totals, place, load(scales), load(scales + kLanes), rows);
  }
};

template <>
struct StripSums<0> {
  void start(const RowGroup*) {}
  template <int kPart>
  void add(IntVec, IntVec, const std::int8_t*) {}
  void scale_into(Totals*, int, Vec, Vec, const RowGroup*) {}
};
#else
template <int kRows>
struct StripSums {
  IntVec sums[kRows][kStripVecs];

  void start(const RowGroup* rows) {
    for (int row = 0; row < kRows; ++row)
      for (int vec = 0; vec < kStripVecs; ++vec) sums[row][vec] = repeat(rows[row].start);
  }
  template <int kPart>
  void add(const std::int8_t* weights, const std::int8_t* quads) {
    IntVec w[kStripVecs];
#pragma GCC unroll 4
    for (int vec = 0; vec < kStripVecs; ++vec) w[vec] = weights_part<kPart>(weights + vec * 4 * kLanes);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      std::int32_t bits;
      std::memcpy(&bits, quads + row * kQuadNbytes + kPart * 4, sizeof bits);
      const IntVec x = in_order(repeat(bits));
#pragma GCC unroll 4
      for (int vec = 0; vec < kStripVecs; ++vec) sums[row][vec] = in_order(add_products(sums[row][vec], w[vec], x));
    }
  }
  void scale_into(Totals* totals, int place, const BFloat16* scales, const RowGroup* rows) {
#pragma GCC unroll 4
    for (int vec = 0; vec < kStripVecs; ++vec) {
      const Vec scale = load(scales + vec * kLanes);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row)
        totals[row][place + vec] += __builtin_convertvector(sums[row][vec], Vec) * scale * rows[row].scale;
    }
  }
};
#endif

// Weights on their way into the cache, some for every line of the panel that is computed with.
struct Stream {
  const std::int8_t* next;
  std::ptrdiff_t step;

  void fetch() {
    __builtin_prefetch(next);
    next += step;
  }
};

template <int kRows>
inline void add_strip(const std::int8_t* weights, const BFloat16* scales, const std::int8_t* quads,
                      const RowGroup* rows, Stream& stream, Totals* totals, int place) {
  StripSums<kRows> sums;
  sums.start(rows);
  for (int quad = 0; quad < kQuads; ++quad, weights += 4 * kStrip, quads += kRows * kQuadNbytes) {
    stream.fetch();
    sums.template add<0>(weights, quads);
    if constexpr (kParts == 2) sums.template add<1>(weights, quads);
  }
  sums.scale_into(totals, place, scales, rows);
}

inline void write_row(const Int8Args& args, int row, int panel, const Vec* sums) {
  float* y = args.y + row * args.y_stride + static_cast<std::ptrdiff_t>(panel) * kPanel;
  const float* bias = args.bias ? args.bias + static_cast<std::ptrdiff_t>(panel) * kPanel : nullptr;
  const int width = std::min(kPanel, args.outputs - panel * kPanel);
  for (int first = 0; first < width; first += kLanes, ++sums) {
    const int n = std::min(kLanes, width - first);
    const bool whole = n == kLanes;
    Vec v = *sums;
    if (bias) v += whole ? load(bias + first) : load_part(bias + first, n);
    if (args.add) v += whole ? load(y + first) : load_part(y + first, n);
    if (whole)
      store(y + first, v);
    else
      store_part(y + first, v, n);
  }
}

// kRows rows from first_row on, by one panel.
template <int kRows>
void int8_tile(const Int8Args& args, int first_row, int panel, Stream stream) {
  const int groups = groups_of(args.columns);
  const Quantised x(args, first_row);
  const std::int8_t* block = args.packed + static_cast<std::ptrdiff_t>(panel) * groups * kGroupNbytes;
  Totals totals[kRows] = {};
  for (int group = 0; group < groups; ++group, block += kGroupNbytes) {
    const std::int8_t* quads = x.quads + static_cast<std::ptrdiff_t>(group) * kQuads * kRows * kQuadNbytes;
    const RowGroup* rows = x.scales + static_cast<std::ptrdiff_t>(group) * kRows;
    stream.fetch();
    for (int strip = 0; strip < kPanel / kStrip; ++strip)
      add_strip<kRows>(block + kScaleNbytes + strip * kGroup * kStrip,
                       reinterpret_cast<const BFloat16*>(block) + strip * kStrip, quads, rows, stream, totals,
                       strip * kStripVecs);
  }
  for (int row = 0; row < kRows; ++row) write_row(args, first_row + row, panel, totals[row]);
}

template <int kRows = kInt8TileRows>
inline void int8_tile_of(const Int8Args& args, int rows, int first_row, int panel, Stream stream) {
  if (rows == kRows)
    int8_tile<kRows>(args, first_row, panel, stream);
  else if constexpr (kRows > 1)
    int8_tile_of<kRows - 1>(args, rows, first_row, panel, stream);
}

// What the tile `left` tiles before the last one of `tiles` fetches.
inline Stream stream_of(const std::int8_t* panel, std::ptrdiff_t panel_nbytes, int tiles, int left) {
  constexpr std::ptrdiff_t kLine = 64, kPage = 4096;  // a page is where the hardware's own streams end
  if (tiles == 1) return {panel + kPage, kLine};
  const int sharing = tiles <= kSharingTiles ? tiles : 1;
  if (left >= sharing) return {panel, kLine};
  return {panel + panel_nbytes + panel_nbytes / sharing * (sharing - 1 - left), (kLine + sharing - 1) / sharing};
}

// Tiles [first_tile, last_tile) of panels [first_panel, last_panel).
void linear_int8(const Int8Args& args, int first_tile, int last_tile, int first_panel, int last_panel) {
  const std::ptrdiff_t panel_nbytes = static_cast<std::ptrdiff_t>(groups_of(args.columns)) * kGroupNbytes;
  for (int panel = first_panel; panel < last_panel; ++panel)
    for (int tile = first_tile; tile < last_tile; ++tile) {
      const int row = first_row_of(tile, args.rows, kInt8TileRows);
      int8_tile_of(args, first_row_of(tile + 1, args.rows, kInt8TileRows) - row, row, panel,
                   stream_of(args.packed + panel * panel_nbytes, panel_nbytes, last_tile - first_tile,
                             last_tile - 1 - tile));
    }
}

}  // namespace
