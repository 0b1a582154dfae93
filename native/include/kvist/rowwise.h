// What happens to one row between the matrix products: norm, rotation, embedding, choice of the best token.
//
// A row is a few hundred to a few thousand floats and stays in the first-level cache; sums are float32 in 16 lanes.
#pragma once

#include <cstdint>

#include "kvist/isa.h"

namespace kvist {

struct BestToken {
  float logit;         // NaN when any element of the row is
  std::int32_t token;  // the first of equals
};

struct RowwiseKernels {
  // out = table[token] * scale, table row-major (V, n) bfloat16.
  void (*embed)(const std::uint16_t* table, std::int64_t token, int n, float scale, float* out);
  // out = x / sqrt(mean(x^2) + eps) * weight; out may be x.
  void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* out);
  // out += x / sqrt(mean(x^2) + eps) * weight.
  void (*add_rms_norm)(const float* x, const float* weight, int n, float eps, float* out);
  // Rotates a head in place; dimension i pairs with i + half. cos and sin: (half,).
  void (*rope)(float* head, const float* cos, const float* sin, int half);
  BestToken (*best_token)(const float* logits, int n);
};

const RowwiseKernels& rowwise_kernels(Isa isa);

}  // namespace kvist
