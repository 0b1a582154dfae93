// What the AVX-512 kernels of the three weight kinds share: the shape of a tile, and the epilogue.
//
// A panel is 32 outputs, two vectors. A tile is up to 12 rows: 24 accumulators, two vectors of weights, one activation
// and what widens weights fit the 32 registers. Of one to four rows, where memory is the bound, sums of integers are
// kept in several sets, so that enough of them are under way to hide the latency of a product.
#pragma once

#include "vec_avx512.h"

namespace kvist::avx512 {

inline constexpr int kPanel = 32;
inline constexpr int kTileRows = 12;
inline constexpr int kInt8Unit = 8;
inline constexpr std::size_t kInt8RowBytes = sizeof(std::int16_t);
inline constexpr std::size_t kWideBytes = std::size_t{512} << 10;  // K up to 8,192; part of a second-level cache
inline constexpr double kOpsPerNs[3] = {300.0, 350.0, 150.0};

}  // namespace kvist::avx512

#define KVIST_PANEL_NAMESPACE avx512
#include "linear_panels.h"

namespace kvist::avx512 {

static KVIST_INLINE __m512 activate(Gate gate, __m512 x) {
  return gate == Gate::kSilu ? silu(x) : gate == Gate::kGeluTanh ? gelu_tanh(x) : gelu(x);
}

// Some lanes of a vector. Masked stores are slow where they are microcoded, so whole vectors do without.
static KVIST_INLINE __m512 load_lanes(const float* from, __mmask16 mask) {
  return mask == 0xffff ? _mm512_loadu_ps(from) : _mm512_maskz_loadu_ps(mask, from);
}

static KVIST_INLINE void store_lanes(float* to, __mmask16 mask, __m512 value) {
  if (mask == 0xffff) {
    _mm512_storeu_ps(to, value);
  } else {
    _mm512_mask_storeu_ps(to, mask, value);
  }
}

// Finishes one panel for some rows: `load(r, low, high)` gives the scaled sums of row r.
template <typename Load>
static KVIST_INLINE void finish_panel(const PackedLinear& linear, int panel, Range rows, const Epilogue& epilogue,
                                      Load&& load) {
  const LinearShape& shape = linear.shape;
  const bool gated = shape.gate != Gate::kNone;
  const int n = panel * panel_results(shape);
  const int results = num_results(shape);
  const __mmask16 low_mask = first_lanes(results - n);
  const __mmask16 high_mask = gated ? low_mask : first_lanes(results - n - 16);
  __m512 low_bias = _mm512_setzero_ps();
  __m512 high_bias = _mm512_setzero_ps();
  if (linear.bias != nullptr) {
    low_bias = load_lanes(linear.bias + n, low_mask);
    if (high_mask != 0) {
      high_bias = load_lanes(linear.bias + n + (gated ? results : 16), high_mask);
    }
  }
  for (int r = rows.first; r < rows.last; ++r) {
    __m512 low;
    __m512 high;
    load(r, low, high);
    low = _mm512_add_ps(low, low_bias);
    high = _mm512_add_ps(high, high_bias);
    float* out = epilogue.out + r * epilogue.out_stride + n;
    const float* residual =
        epilogue.residual != nullptr ? epilogue.residual + r * epilogue.residual_stride + n : nullptr;
    if (gated) {
      low = _mm512_mul_ps(activate(shape.gate, low), high);
    }
    if (residual != nullptr) {
      low = _mm512_add_ps(low, load_lanes(residual, low_mask));
    }
    store_lanes(out, low_mask, low);
    // A half that is masked whole may lie beyond the row.
    if (!gated && high_mask != 0) {
      if (residual != nullptr) {
        high = _mm512_add_ps(high, load_lanes(residual + 16, high_mask));
      }
      store_lanes(out + 16, high_mask, high);
    }
  }
}

// Magnitudes compare like their bits, and those of a NaN are the largest.
static KVIST_INLINE float max_abs(const float* x, int count) {
  const __m512i magnitude = _mm512_set1_epi32(INT32_MAX);
  __m512i largest[4] = {};
  int k = 0;
  for (; k + 64 <= count; k += 64) {
    for (int i = 0; i < 4; ++i) {
      largest[i] = _mm512_max_epi32(largest[i], _mm512_and_si512(load(x + k + 16 * i), magnitude));
    }
  }
  for (; k < count; k += 16) {
    const __m512 values = load_lanes(x + k, first_lanes(count - k));
    largest[0] = _mm512_max_epi32(largest[0], _mm512_and_si512(_mm512_castps_si512(values), magnitude));
  }
  largest[0] = _mm512_max_epi32(_mm512_max_epi32(largest[0], largest[1]), _mm512_max_epi32(largest[2], largest[3]));
  __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(largest[0]), _mm512_extracti64x4_epi64(largest[0], 1));
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return std::bit_cast<float>(_mm_cvtsi128_si32(m));
}

// Sixteen values as integers, 0 where the inverse is 0 whatever the value (it may be an infinity).
static KVIST_INLINE __m512i round_values(__m512 values, __m512 inverse) {
  const __mmask16 nonzero = _mm512_cmp_ps_mask(inverse, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  return _mm512_cvtps_epi32(_mm512_maskz_mul_ps(nonzero, values, inverse));
}

}  // namespace kvist::avx512
