// Small things every kernel needs: number formats, alignment, integer division.
//
// Functions are static: each file compiles its own for its own instruction set, and none can leak into another.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvist {

// Every buffer a kernel reads in vectors starts at a multiple of this, in bytes: one cache line, one AVX-512 vector.
inline constexpr std::size_t kAlignment = 64;

template <typename T>
static constexpr T ceil_div(T value, T divisor) {
  return (value + divisor - 1) / divisor;
}

template <typename T>
static constexpr T round_up(T value, T multiple) {
  return ceil_div(value, multiple) * multiple;
}

// bfloat16 is the upper half of a float32.
static inline float bf16_to_f32(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// Rounds to nearest, ties to even; a NaN stays one.
static inline std::uint16_t f32_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    return static_cast<std::uint16_t>((bits >> 16) | 0x0040U);
  }
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

// float16 without help of the CPU; exact, subnormals included.
static inline float f16_to_f32(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
  const std::uint32_t rest = bits & 0x7fffU;
  if (rest >= 0x7c00U) {
    return std::bit_cast<float>(sign | 0x7f800000U | ((rest & 0x3ffU) << 13));
  }
  if (rest < 0x400U) {  // a subnormal is an integer multiple of 2^-24
    const float magnitude = static_cast<float>(rest) * 0x1p-24F;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((rest << 13) + 0x38000000U));
}

}  // namespace kvist
