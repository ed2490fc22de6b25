// One token of one head in a pool: float, bfloat16, or bytes with their scale behind them.
#pragma once

#include "quantise.h"
#include "vector.h"

namespace {

template <class T>
constexpr bool kScaled = sizeof(T) == 1;

template <class T>
inline std::ptrdiff_t row_nbytes(int dim) {
  return dim * static_cast<std::ptrdiff_t>(sizeof(T)) + (kScaled<T> ? sizeof(float) : 0);
}

template <class T>
inline const T* elements(const std::byte* row) {
  return reinterpret_cast<const T*>(row);
}

inline float row_scale(const std::byte* row, int dim) {
  float scale;
  std::memcpy(&scale, row + dim, sizeof scale);
  return scale;
}

// A row as floats: itself, or in `wide`.
template <class T>
inline const float* widened(const std::byte* row, int dim, float* wide) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return elements<float>(row);
  } else {
    const Vec scale = broadcast(kScaled<T> ? row_scale(row, dim) : 1.0f);
    int i = 0;
    for (; i + kLanes <= dim; i += kLanes) store(wide + i, load(elements<T>(row) + i) * scale);
    if (const int left = dim - i) store_part(wide + i, load_part(elements<T>(row) + i, left) * scale, left);
    return wide;
  }
}

inline BFloat16 nearest(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return {0x7FC0};
  return {static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}

// Writes a row. piece(first, n, floats) gives its elements [first, first + n): n is even, and kGroup at most.
template <class T, class Piece>
inline void store_row(std::byte* row, int dim, Piece piece) {
  float floats[kGroup];
  std::int32_t largest = 0;
  if constexpr (kScaled<T>)
    for (int first = 0; first < dim; first += kGroup) {
      const int n = std::min(kGroup, dim - first);
      piece(first, n, floats);
      largest = std::max(largest, largest_bits(floats, n));
    }
  const float scale = scale_of(largest);
  for (int first = 0; first < dim; first += kGroup) {
    const int n = std::min(kGroup, dim - first);
    T* to = reinterpret_cast<T*>(row) + first;
    if constexpr (sizeof(T) == sizeof(float)) {
      piece(first, n, to);
      continue;
    }
    piece(first, n, floats);
    if constexpr (kScaled<T>) {
      std::int32_t q[kGroup];
      quantise(floats, n, scale, q);
      for (int i = 0; i < n; ++i) to[i] = static_cast<std::int8_t>(q[i]);
    } else if constexpr (sizeof(T) == sizeof(BFloat16)) {
      for (int i = 0; i < n; ++i) to[i] = nearest(floats[i]);
    }
  }
  if constexpr (kScaled<T>) std::memcpy(row + dim, &scale, sizeof scale);
}

}  // namespace
