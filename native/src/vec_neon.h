// Vector functions for NEON. Only for files compiled for it; static, so that none leaks elsewhere.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "intrinsics_neon.h"

#define KVIST_INLINE inline __attribute__((always_inline))
#define KVIST_LAMBDA __attribute__((always_inline))

namespace kvist::neon {

// Calls f(integral_constant 0), ..., f(integral_constant N - 1): indices known at compile time keep arrays of vectors in
// registers.
template <int N, typename F>
static KVIST_INLINE void unroll(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>)
      KVIST_LAMBDA { (f(std::integral_constant<int, I>{}), ...); }(std::make_integer_sequence<int, N>{});
}

// Four bytes, whatever they are, in every lane.
static KVIST_INLINE int8x16_t broadcast_bytes4(const void* p) {
  std::int32_t bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return vreinterpretq_s8_s32(vdupq_n_s32(bytes));
}

static KVIST_INLINE float32x4_t widen_bf16(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }

// The functions below are for loops over arrays, which the compiler turns into vectors.

// e^x within 2 ulp; 0 below the smallest normal result, 2.4e38 above 88.37; a NaN stays one.
static KVIST_INLINE float exp(float x) {
  constexpr float kLow = -87.3365f;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  float clamped = x < 88.3762f ? x : 88.3762f;
  clamped = clamped > kLow ? clamped : kLow;
  const float shifted = __builtin_fmaf(clamped, 1.44269504f, kMagic);
  const float n = shifted - kMagic;
  float r = __builtin_fmaf(n, -0.693359375f, clamped);
  r = __builtin_fmaf(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = __builtin_fmaf(p, r, 1.3981999507e-3f);
  p = __builtin_fmaf(p, r, 8.3334519073e-3f);
  p = __builtin_fmaf(p, r, 4.1665795894e-2f);
  p = __builtin_fmaf(p, r, 1.6666665459e-1f);
  p = __builtin_fmaf(p, r, 5.0000001201e-1f);
  p = __builtin_fmaf(r * r, p, r + 1.0f);
  const std::uint32_t power = (std::bit_cast<std::uint32_t>(shifted) + 127U) << 23;
  const float result = p * std::bit_cast<float>(power);
  return x < kLow ? 0.0f : x == x ? result : x;
}

// 2^x for x <= 126, relative error 1e-7; at or below -126 it is 2^-126.
static KVIST_INLINE float exp2(float x) {
  constexpr float kMagic = 12582912.0f;
  x = x < -126.0f ? -126.0f : x;  // a NaN stays one
  const float shifted = x + kMagic;
  const float f = x - (shifted - kMagic);
  float p = 0.001326472731307149f;
  p = __builtin_fmaf(p, f, 0.009671512991189957f);
  p = __builtin_fmaf(p, f, 0.05550733581185341f);
  p = __builtin_fmaf(p, f, 0.24022242426872253f);
  p = __builtin_fmaf(p, f, 0.6931470036506653f);
  p = __builtin_fmaf(p, f, 1.0f);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(p) + (std::bit_cast<std::uint32_t>(shifted) << 23));
}

// x / (1 + e^-x)
static KVIST_INLINE float silu(float x) { return x / (1.0f + exp(-x)); }

// x / 2 * (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 x^3)
static KVIST_INLINE float gelu_tanh(float x) {
  constexpr float kLinear = -2.0f * 0.7978845608f;
  return x / (1.0f + exp(x * __builtin_fmaf(x * x, kLinear * 0.044715f, kLinear)));
}

// x / 2 * erfc(-x / sqrt 2), with a rational-exponential fit of erfc whose relative error is below 2e-7 before rounding.
static KVIST_INLINE float gelu(float x) {
  const float z = (x < 0.0f ? -x : x) * 0.7071067812f;
  const float t = 1.0f / __builtin_fmaf(z, 0.5f, 1.0f);
  float p = 0.17087277f;
  for (const float coefficient : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f,
                                  0.37409196f, 1.00002368f, -1.26551223f}) {
    p = __builtin_fmaf(p, t, coefficient);
  }
  const float half_erfc = t * 0.5f * exp(__builtin_fmaf(-z, z, p));
  return x * (x < 0.0f ? half_erfc : 1.0f - half_erfc);
}

}  // namespace kvist::neon
