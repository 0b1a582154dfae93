// What happens to one row between the matrix products: norm, rotation, embedding, choice of the best token.
//
// A row is a few hundred to a few thousand floats and stays in the first-level cache; sums are float32 in 16 lanes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvist/isa.h"

namespace kvist {

struct BestToken {
  float logit;         // NaN when any element of the row is
  std::int32_t token;  // the first of equals
};

inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxOddPart = kMaxHeadDim / 8 - 1;  // head dimensions are multiples of 8

// The rotation of kvist.kernels.rotation for heads of power * odd values: what sticks out in one value is spread over all.
struct HeadTurn {
  int power;                                 // the largest power of two that divides the head dimension
  int odd;                                   // the rest
  float signs[kMaxHeadDim];                  // -1 or 1, over sqrt(power * odd)
  float cosines[kMaxOddPart * kMaxOddPart];  // (odd, odd) cosine transform, rows of length sqrt(odd)
};

HeadTurn head_turn(int head_dim);

struct RowwiseKernels {
  // out = table[token] * scale, table row-major (V, n) bfloat16.
  void (*embed)(const std::uint16_t* table, std::int64_t token, int n, float scale, float* out);
  // out = x / sqrt(mean(x^2) + eps) * weight; out may be x.
  void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* out);
  // out += x / sqrt(mean(x^2) + eps) * weight.
  void (*add_rms_norm)(const float* x, const float* weight, int n, float eps, float* out);
  // Rotates a head in place; dimension i pairs with i + half. cos and sin: (half,).
  void (*rope)(float* head, const float* cos, const float* sin, int half);
  // Turns a head in place: signs, Walsh-Hadamard within each run of `power` values, cosines across the runs.
  void (*turn)(float* head, const HeadTurn& turn);
  // The way back: cosines across the runs, Walsh-Hadamard, signs.
  void (*turn_back)(float* head, const HeadTurn& turn);
  BestToken (*best_token)(const float* logits, int n);
  // out = x matrix. x: `rows` rows of n values, a stride apart; matrix: (n, m) row-major; out: (rows, m), apart from x.
  // A row's result does not depend on the others.
  void (*project)(const float* x, std::ptrdiff_t stride, int rows, const float* matrix, int n, int m, float* out);
};

const RowwiseKernels& rowwise_kernels(Isa isa);

}  // namespace kvist
