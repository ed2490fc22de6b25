// Vectors of KVFERRY_LANES floats, as compiler extensions. Included once per instruction set; everything is in an
// unnamed namespace, so that no copy built for a wider set can be linked into another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = KVFERRY_LANES;

using Vec = float __attribute__((vector_size(kLanes * 4)));
using IntVec = std::int32_t __attribute__((vector_size(kLanes * 4)));

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// The first n lanes; the rest is zero.
inline Vec load_part(const float* p, int n) {
  Vec v = {};
  std::memcpy(&v, p, n * sizeof(float));
  return v;
}

inline void store_part(float* p, Vec v, int n) { std::memcpy(p, &v, n * sizeof(float)); }

// Storage types beside float; arithmetic is in float.
struct BFloat16 {
  std::uint16_t bits;
};

inline Vec load(const BFloat16* p) {
  using Half = std::uint16_t __attribute__((vector_size(kLanes * 2)));
  Half half;
  std::memcpy(&half, p, sizeof half);
  const IntVec bits = __builtin_convertvector(half, IntVec) << 16;
  Vec v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

inline Vec load(const std::int8_t* p) {
  using Bytes = std::int8_t __attribute__((vector_size(kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
}

template <class T>
inline Vec load_part(const T* p, int n) {
  T whole[kLanes] = {};
  std::memcpy(whole, p, n * sizeof(T));
  return load(whole);
}

// Spelled out: from anything shorter the compiler makes more than one instruction.
inline Vec broadcast(float x) {
#if KVFERRY_LANES == 16
  return Vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#elif KVFERRY_LANES == 8
  return Vec{x, x, x, x, x, x, x, x};
#else
  return Vec{x, x, x, x};
#endif
}

inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }
inline Vec minimum(Vec a, Vec b) { return a < b ? a : b; }

// All lanes into one: halves onto halves.
template <class Operator>
inline float reduce(Vec v, Operator combine) {
#if KVFERRY_LANES == 16
  const auto eight = combine(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                             __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
#elif KVFERRY_LANES == 8
  const Vec eight = v;
#endif
#if KVFERRY_LANES >= 8
  const auto four = combine(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
                            __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
#else
  const Vec four = v;
#endif
  const auto two = combine(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
  return combine(two, __builtin_shufflevector(two, two, 1, 0, 3, 2))[0];
}

inline float sum(Vec v) {
  return reduce(v, [](auto a, auto b) { return a + b; });
}

// The sums of four vectors, side by side.
using Four = float __attribute__((vector_size(16)));

inline Four sums_of(Vec a, Vec b, Vec c, Vec d) {
#if KVFERRY_LANES == 16
  const auto halves = [](Vec v) {
    return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  };
  const auto e = halves(a), f = halves(b), g = halves(c), h = halves(d);
#else
  const auto e = a, f = b, g = c, h = d;
#endif
#if KVFERRY_LANES >= 8
  const auto pairs = [](auto x, auto y) {
    return __builtin_shufflevector(x, y, 0, 2, 8, 10, 4, 6, 12, 14) +
           __builtin_shufflevector(x, y, 1, 3, 9, 11, 5, 7, 13, 15);
  };
  const auto both = pairs(pairs(e, f), pairs(g, h));
  return __builtin_shufflevector(both, both, 0, 1, 2, 3) + __builtin_shufflevector(both, both, 4, 5, 6, 7);
#else
  const auto pairs = [](auto x, auto y) {
    return __builtin_shufflevector(x, y, 0, 2, 4, 6) + __builtin_shufflevector(x, y, 1, 3, 5, 7);
  };
  return pairs(pairs(e, f), pairs(g, h));
#endif
}

inline float largest(Vec v) {
  return reduce(v, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x within 2 ulp; 0 below -87.3 and about 2^127 above 88, never infinite. Range reduction after Cody and Waite.
inline Vec exponential(Vec x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f, kRound = 12582912.0f;
  x = minimum(maximum(x, broadcast(-88.02969f)), broadcast(88.02969f));
  const Vec n = (x * kLog2E + kRound) - kRound;
  const Vec r = (x - n * kLn2High) - n * kLn2Low;
  Vec p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec factor;
  std::memcpy(&factor, &power, sizeof factor);
  return p * factor;
}

}  // namespace
