#pragma once

#include <cmath>

#include "vector.h"

namespace {

void rms_norm(const float* x, const float* weight, float eps, float* y, int columns) {
  Vec squares[2] = {};
  int column = 0;
  for (; column + 2 * kLanes <= columns; column += 2 * kLanes)
    for (int half = 0; half < 2; ++half) {
      const Vec v = load(x + column + half * kLanes);
      squares[half] += v * v;
    }
  float total = sum(squares[0] + squares[1]);
  for (int rest = column; rest < columns; ++rest) total += x[rest] * x[rest];
  const float inverse = 1.0f / std::sqrt(total / static_cast<float>(columns) + eps);
  for (column = 0; column + kLanes <= columns; column += kLanes)
    store(y + column, load(x + column) * inverse * load(weight + column));
  for (; column < columns; ++column) y[column] = x[column] * inverse * weight[column];
}

inline Vec silu(Vec x) { return x / (1.0f + exponential(-x)); }

void silu_mul(const float* gate, const float* up, float* y, int columns) {
  int column = 0;
  for (; column + kLanes <= columns; column += kLanes)
    store(y + column, silu(load(gate + column)) * load(up + column));
  if (const int left = columns - column)
    store_part(y + column, silu(load_part(gate + column, left)) * load_part(up + column, left), left);
}

}  // namespace
