// What the NEON kernels of the three weight kinds share: the shape of a tile, and the epilogue.
//
// A panel is 16 outputs, four vectors. A tile is up to 6 rows: 24 accumulators, weights and an activation fit the 32
// registers.
#pragma once

#include "vec_neon.h"

namespace kvist::neon {

inline constexpr int kPanel = 16;
inline constexpr int kTileRows = 6;
inline constexpr int kInt8Unit = 16;
inline constexpr std::size_t kInt8RowBytes = 2;
inline constexpr std::size_t kWideBytes = 0;
inline constexpr double kOpsPerNs[3] = {80.0, 100.0, 40.0};

}  // namespace kvist::neon

#define KVIST_PANEL_NAMESPACE neon
#include "linear_panels.h"

namespace kvist::neon {

// Finishes one panel for some rows: `sums(r)` gives the scaled sums of row r, which may be written to.
template <typename Sums>
static KVIST_INLINE void finish_panel(const PackedLinear& linear, int panel, Range rows, const Epilogue& epilogue,
                                      Sums&& sums) {
  const LinearShape& shape = linear.shape;
  const bool gated = shape.gate != Gate::kNone;
  const int n = panel * panel_results(shape);
  const int results = num_results(shape);
  const int count = results - n < panel_results(shape) ? results - n : panel_results(shape);
  float bias[kPanel] = {};
  if (linear.bias != nullptr) {
    for (int i = 0; i < count; ++i) {
      bias[i] = linear.bias[n + i];
      if (gated) {
        bias[kPanel / 2 + i] = linear.bias[results + n + i];
      }
    }
  }
  for (int r = rows.first; r < rows.last; ++r) {
    float* values = sums(r);
    for (int i = 0; i < kPanel; ++i) {
      values[i] += bias[i];
    }
    if (gated) {
      const float* factors = values + kPanel / 2;
      for (int i = 0; i < kPanel / 2; ++i) {
        values[i] = (shape.gate == Gate::kSilu       ? silu(values[i])
                     : shape.gate == Gate::kGeluTanh ? gelu_tanh(values[i])
                                                     : gelu(values[i])) *
                    factors[i];
      }
    }
    float* out = epilogue.out + r * epilogue.out_stride + n;
    if (epilogue.residual != nullptr) {
      const float* residual = epilogue.residual + r * epilogue.residual_stride + n;
      for (int i = 0; i < count; ++i) {
        out[i] = values[i] + residual[i];
      }
    } else {
      std::memcpy(out, values, static_cast<std::size_t>(count) * sizeof(float));
    }
  }
}

// Magnitudes compare like their bits, and those of a NaN are the largest.
static inline float max_abs(const float* x, int count) {
  std::uint32_t largest = 0;
  for (int k = 0; k < count; ++k) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x[k]) & 0x7fffffffU;
    largest = bits > largest ? bits : largest;
  }
  return std::bit_cast<float>(largest);
}

// Rounded to nearest, ties to even; 0 where the inverse is 0 whatever the value (it may be an infinity).
static inline void round_values(const float* x, int count, float inverse, std::int32_t* out) {
  int k = 0;
  for (; inverse != 0.0f && k + 4 <= count; k += 4) {
    vst1q_s32(out + k, vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + k), inverse)));
  }
  for (; k < count; ++k) {
    out[k] = inverse == 0.0f ? 0 : static_cast<std::int32_t>(std::lrint(x[k] * inverse));
  }
}

}  // namespace kvist::neon
