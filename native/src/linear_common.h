// What every table of linear kernels agrees on: code ranges, rounding of rows to codes, half precision.
//
// Functions here are static: each file compiles its own for its own instruction set, and none can leak into another.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kvist/common.h"
#include "kvist/linear.h"

namespace kvist {

inline constexpr int kInt8Limit = 127;
// Enough to make the rounding of activations invisible beside that of the weights.
inline constexpr int kWideLimit = 4095;
// A row (of activations or weights) whose largest magnitude is below this counts as zero: its scale and the inverse of
// its scale stay normal numbers.
inline constexpr float kTiny = 1e-30f;

// Int8 weights meet 16-bit activations where products and their int32 sum allow it: limit * 127 * K < 2^31.
static inline int activation_limit_of(const LinearShape& shape) {
  if (shape.kind == WeightKind::kBf16) {
    return 0;
  }
  if (shape.kind == WeightKind::kInt4) {
    return kInt8Limit;
  }
  const std::int64_t room = std::numeric_limits<std::int32_t>::max() / (std::int64_t{kInt8Limit} * shape.num_inputs);
  return static_cast<int>(room < kInt8Limit ? kInt8Limit : room > kWideLimit ? kWideLimit : room);
}

// Outputs of one half with a gate, all of them without.
static inline int num_results(const LinearShape& shape) {
  return shape.gate == Gate::kNone ? shape.num_outputs : shape.num_outputs / 2;
}

static inline int num_groups(const LinearShape& shape) { return ceil_div(shape.num_inputs, shape.group); }

// How a vector of floats becomes codes in [-limit, limit]: code = round(x * inverse), x ~ code * scale.
struct CodeScale {
  float scale;
  float inverse;
};

// A vector with an infinity or a NaN gets the scale NaN and codes of 0, so that everything computed from it is NaN.
static inline CodeScale code_scale(float max_abs, int limit) {
  if (!(max_abs <= std::numeric_limits<float>::max())) {
    return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
  }
  if (max_abs < kTiny) {
    return {0.0f, 0.0f};
  }
  return {max_abs / static_cast<float>(limit), static_cast<float>(limit) / max_abs};
}

// Rounds to nearest, ties to even, as the instruction does; beyond the range it saturates, so that a finite scale stays
// finite.
static inline std::uint16_t f32_to_f16_saturated(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {
    return static_cast<std::uint16_t>(sign | 0x7e00U);
  }
  if (magnitude >= 0x477fe000U) {
    return static_cast<std::uint16_t>(sign | 0x7bffU);
  }
  if (magnitude < 0x38800000U) {
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p24f;
    return static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(std::lrint(scaled)));
  }
  const std::uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U) - (112U << 23);
  return static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(rounded >> 13));
}

// Grids that an int4 group may have. First, steps that the range of its weights divides into: weights on a grid of 15
// steps or fewer are met exactly, also where its scale is negative or the group does not use all of its codes (fewer
// than 8 steps are part of a grid of twice as many). Where none is exact, fits by least squares: clipping a few weights
// costs less than a coarser step.
inline constexpr int kInt4MinSteps = 8;
inline constexpr float kInt4FitSteps[] = {14.5f, 15.5f, 16.25f};

}  // namespace kvist
