// How the int4 weights of a group get their scale, minimum and codes, value by value.
//
// Functions here are static: each file compiles its own for its own instruction set, and none can leak into another.
#pragma once

#include <algorithm>
#include <cmath>

#include "linear_common.h"

namespace kvist {

static inline float max_abs(const float* values, int count) {
  float largest = 0.0f;
  for (int i = 0; i < count; ++i) {
    const float magnitude = std::fabs(values[i]);
    if (!(magnitude <= largest)) {
      largest = magnitude;
      if (std::isnan(largest)) {
        break;
      }
    }
  }
  return largest;
}

struct Grid {
  float error;
  float scale;
  float minimum;
};

static inline float round_to_half(float value) { return f16_to_f32(f32_to_f16_saturated(value)); }

static inline float round_code(float code) { return std::clamp(std::nearbyint(code), 0.0f, 15.0f); }

static inline float code_on(const Grid& grid, float weight) {
  return grid.scale == 0.0f ? 0.0f : round_code((weight - grid.minimum) / grid.scale);
}

// Takes the grid if it is nearer to the weights than `best`. Errors are compared in units of the range, so that their
// squares neither vanish nor overflow.
static inline void keep_better(const float* weights, int count, float range, Grid grid, Grid& best) {
  grid.error = 0.0f;
  for (int k = 0; k < count; ++k) {
    const float rest = (weights[k] - (grid.minimum + grid.scale * code_on(grid, weights[k]))) / range;
    grid.error += rest * rest;
  }
  if (grid.error < best.error) {
    best = grid;
  }
}

// The grid whose codes 0 to `steps` span the weights, from the lowest up or from the highest down, shifted to where its
// minimum is nearest to a float16.
static inline Grid grid_of_steps(float low, float high, int steps) {
  const float step = round_to_half(std::min(high - low, std::numeric_limits<float>::max()) / static_cast<float>(steps));
  Grid grid{std::numeric_limits<float>::infinity(), step, round_to_half(low)};
  for (int shift = 0; shift <= 15 - steps; ++shift) {
    for (const float scale : {step, -step}) {
      const float exact = (scale < 0.0f ? high : low) - static_cast<float>(shift) * scale;
      const float half = round_to_half(exact);
      if (std::fabs(half - exact) < grid.error) {
        grid = {std::fabs(half - exact), scale, half};
      }
    }
  }
  return grid;
}

// The least squares fit to the codes that weights have when `steps` steps span them and codes beyond 15 are clipped, at
// the upper end or, with a shift, at the lower.
static inline Grid fitted_grid(const float* weights, int count, float low, float range, float steps, float shift) {
  float sum = 0.0f;
  float sum_codes = 0.0f;
  float sum_squares = 0.0f;
  float sum_products = 0.0f;
  for (int k = 0; k < count; ++k) {
    const float part = (weights[k] - low) / range;
    const float code = round_code(part * steps + shift);
    sum += part;
    sum_codes += code;
    sum_squares += code * code;
    sum_products += code * part;
  }
  const auto n = static_cast<float>(count);
  const float spread = n * sum_squares - sum_codes * sum_codes;
  const float slope = (n * sum_products - sum * sum_codes) / std::max(spread, 1.0f);
  return {0.0f, round_to_half(slope * range), round_to_half(low + (sum - slope * sum_codes) / n * range)};
}

static inline Grid choose_grid(const float* weights, int count) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  const float low = *std::min_element(weights, weights + count);
  const float high = *std::max_element(weights, weights + count);
  const float range = std::min(high - low, kLargest);
  // Equal weights are the code 1, whose scale is what the minimum lacks.
  const float minimum = round_to_half(low);
  Grid best{std::numeric_limits<float>::infinity(), round_to_half(low - minimum), minimum};
  if (range < kTiny) {
    return best;
  }
  for (int steps = 15; steps >= kInt4MinSteps && best.error != 0.0f; --steps) {
    keep_better(weights, count, range, grid_of_steps(low, high, steps), best);
  }
  if (best.error != 0.0f) {
    for (const float steps : kInt4FitSteps) {
      keep_better(weights, count, range, fitted_grid(weights, count, low, range, steps, 0.0f), best);
      keep_better(weights, count, range, fitted_grid(weights, count, low, range, steps, 15.0f - steps), best);
    }
  }
  return best;
}

static inline void pack_group(const float* weights, int count, std::uint16_t* scale, std::uint16_t* minimum,
                              std::uint8_t* codes) {
  if (!(max_abs(weights, count) <= std::numeric_limits<float>::max())) {
    *scale = 0x7e00U;
    *minimum = 0;
    std::fill_n(codes, count, std::uint8_t{0});
    return;
  }
  const Grid grid = choose_grid(weights, count);
  *scale = f32_to_f16_saturated(grid.scale);
  *minimum = f32_to_f16_saturated(grid.minimum);
  std::transform(weights, weights + count, codes,
                 [&](float weight) { return static_cast<std::uint8_t>(code_on(grid, weight)); });
}

}  // namespace kvist
