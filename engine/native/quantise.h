// Rounding to one byte: a group of values and the scale that makes its largest magnitude 127.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

using kvferry::native::kGroup;

// The bits of the largest magnitude: magnitudes order as their bits do, and NaN above all.
inline std::int32_t largest_bits(const float* x, int n) {
  std::int32_t largest = 0;
  for (int i = 0; i < n; ++i) {
    std::int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    largest = std::max(largest, bits & 0x7FFFFFFF);
  }
  return largest;
}

// What is not finite makes the scale so, and with it all that is computed from the group.
inline float scale_of(std::int32_t largest) {
  float magnitude;
  std::memcpy(&magnitude, &largest, sizeof magnitude);
  return magnitude / 127.0f;
}

// x / scale to the nearest integer, ties to even: n of them, at most kGroup; q is filled up with zeros.
inline void quantise(const float* x, int n, float scale, std::int32_t (&q)[kGroup]) {
  constexpr float kRound = 12582912.0f, kTiny = 1e-37f, kHuge = 3e38f;
  const float inverse = scale > kTiny && scale <= kHuge ? 1.0f / scale : 0.0f;
  float products[kGroup] = {};
  for (int i = 0; i < n; ++i) products[i] = x[i] * inverse;
  asm("" : "+m"(products));  // so that every instruction set rounds the product by itself
  for (int i = 0; i < kGroup; ++i) q[i] = static_cast<std::int32_t>((products[i] + kRound) - kRound);
}

}  // namespace
