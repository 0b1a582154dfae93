// How the int4 weights of a group get their scale, minimum and codes: eight outputs at a time, one in each lane.
//
// For files compiled for AVX2 or more, whatever layout they pack into; static, so that none leaks elsewhere.
#pragma once

#include "linear_common.h"
#include "vec_avx2.h"

namespace kvist::avx2 {

// Rounds to float16; what is beyond its range saturates.
static KVIST_INLINE __m256 round_to_half(__m256 values) {
  const __m256 largest = _mm256_set1_ps(65504.0f);
  values = _mm256_min_ps(_mm256_max_ps(values, negate(largest)), largest);
  return _mm256_cvtph_ps(_mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

// The nearest codes; a NaN becomes 15.
static KVIST_INLINE __m256 round_code(__m256 code) {
  const __m256 rounded = _mm256_round_ps(code, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm256_max_ps(_mm256_min_ps(rounded, _mm256_set1_ps(15.0f)), _mm256_setzero_ps());
}

static KVIST_INLINE __m256 inverse_or_zero(__m256 scale) {
  const __m256 is_zero = _mm256_cmp_ps(scale, _mm256_setzero_ps(), _CMP_EQ_OQ);
  return _mm256_andnot_ps(is_zero, _mm256_div_ps(_mm256_set1_ps(1.0f), scale));
}

// One group of eight outputs, one in each lane.
struct Group {
  const __m256* columns;
  int count;
  __m256 low;
  __m256 high;
  __m256 range;
  __m256 per_range;
};

struct Grid {
  __m256 error;
  __m256 scale;
  __m256 minimum;
};

// Takes the grid in the lanes where it is nearer to the weights than `best`. Errors are compared in units of the range,
// so that their squares neither vanish nor overflow.
static inline void keep_better(const Group& group, __m256 scale, __m256 minimum, Grid& best) {
  const __m256 inverse = inverse_or_zero(scale);
  __m256 error = _mm256_setzero_ps();
  for (int k = 0; k < group.count; ++k) {
    const __m256 code = round_code(_mm256_mul_ps(_mm256_sub_ps(group.columns[k], minimum), inverse));
    const __m256 rest = _mm256_sub_ps(group.columns[k], _mm256_fmadd_ps(code, scale, minimum));
    const __m256 part = _mm256_mul_ps(rest, group.per_range);
    error = _mm256_fmadd_ps(part, part, error);
  }
  const __m256 better = _mm256_cmp_ps(error, best.error, _CMP_LT_OQ);
  best.error = _mm256_blendv_ps(best.error, error, better);
  best.scale = _mm256_blendv_ps(best.scale, scale, better);
  best.minimum = _mm256_blendv_ps(best.minimum, minimum, better);
}

// The grid whose codes 0 to `steps` span the weights, from the lowest up or from the highest down, shifted to where its
// minimum is nearest to a float16.
static inline void try_steps(const Group& group, int steps, Grid& best) {
  const __m256 step = round_to_half(_mm256_div_ps(group.range, _mm256_set1_ps(static_cast<float>(steps))));
  Grid grid{_mm256_set1_ps(std::numeric_limits<float>::infinity()), step, round_to_half(group.low)};
  for (int shift = 0; shift <= 15 - steps; ++shift) {
    for (const __m256 scale : {step, negate(step)}) {
      const __m256 start = _mm256_blendv_ps(group.low, group.high, scale);
      const __m256 exact = _mm256_fnmadd_ps(_mm256_set1_ps(static_cast<float>(shift)), scale, start);
      const __m256 half = round_to_half(exact);
      const __m256 distance = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_sub_ps(half, exact));
      const __m256 nearer = _mm256_cmp_ps(distance, grid.error, _CMP_LT_OQ);
      grid.error = _mm256_blendv_ps(grid.error, distance, nearer);
      grid.scale = _mm256_blendv_ps(grid.scale, scale, nearer);
      grid.minimum = _mm256_blendv_ps(grid.minimum, half, nearer);
    }
  }
  keep_better(group, grid.scale, grid.minimum, best);
}

// The least squares fit to the codes that weights have when `steps` steps span them and codes beyond 15 are clipped, at
// the upper end or, with a shift, at the lower.
static inline void try_fit(const Group& group, float steps, float shift, Grid& best) {
  const __m256 to_code = _mm256_mul_ps(_mm256_set1_ps(steps), group.per_range);
  __m256 sum = _mm256_setzero_ps();
  __m256 sum_codes = _mm256_setzero_ps();
  __m256 sum_squares = _mm256_setzero_ps();
  __m256 sum_products = _mm256_setzero_ps();
  for (int k = 0; k < group.count; ++k) {
    const __m256 offset = _mm256_sub_ps(group.columns[k], group.low);
    const __m256 code = round_code(_mm256_fmadd_ps(offset, to_code, _mm256_set1_ps(shift)));
    const __m256 part = _mm256_mul_ps(offset, group.per_range);
    sum = _mm256_add_ps(sum, part);
    sum_codes = _mm256_add_ps(sum_codes, code);
    sum_squares = _mm256_fmadd_ps(code, code, sum_squares);
    sum_products = _mm256_fmadd_ps(code, part, sum_products);
  }
  const __m256 count = _mm256_set1_ps(static_cast<float>(group.count));
  const __m256 along = _mm256_fmsub_ps(count, sum_products, _mm256_mul_ps(sum, sum_codes));
  const __m256 spread = _mm256_fmsub_ps(count, sum_squares, _mm256_mul_ps(sum_codes, sum_codes));
  const __m256 slope = _mm256_div_ps(along, _mm256_max_ps(spread, _mm256_set1_ps(1.0f)));
  const __m256 start = _mm256_div_ps(_mm256_fnmadd_ps(slope, sum_codes, sum), count);
  keep_better(group, round_to_half(_mm256_mul_ps(slope, group.range)),
              round_to_half(_mm256_fmadd_ps(start, group.range, group.low)), best);
}

// Scales, minima and codes of one group of eight outputs, one in each lane; `columns[k]` are the weights.
static inline void quantise_group(const __m256* columns, int count, __m128i* scales, __m128i* minima, __m256i* codes) {
  const __m256 largest = _mm256_set1_ps(std::numeric_limits<float>::max());
  __m256 low = columns[0];
  __m256 high = columns[0];
  __m256 finite = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
  for (int k = 0; k < count; ++k) {
    low = _mm256_min_ps(low, columns[k]);
    high = _mm256_max_ps(high, columns[k]);
    const __m256 absolute = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), columns[k]);
    finite = _mm256_and_ps(finite, _mm256_cmp_ps(absolute, largest, _CMP_LE_OQ));
  }
  const __m256 range = _mm256_min_ps(_mm256_sub_ps(high, low), largest);
  const __m256 spread = _mm256_and_ps(finite, _mm256_cmp_ps(range, _mm256_set1_ps(kTiny), _CMP_GE_OQ));
  const Group group{columns, count, low, high, range, _mm256_and_ps(spread, inverse_or_zero(range))};
  // Equal weights are the code 1, whose scale is what the minimum lacks.
  const __m256 minimum = round_to_half(low);
  Grid best{_mm256_and_ps(spread, _mm256_set1_ps(std::numeric_limits<float>::infinity())),
            round_to_half(_mm256_sub_ps(low, minimum)), minimum};
  const auto is_exact = [&best] {
    return _mm256_movemask_ps(_mm256_cmp_ps(best.error, _mm256_setzero_ps(), _CMP_NEQ_OQ)) == 0;
  };
  for (int steps = 15; steps >= kInt4MinSteps && !is_exact(); --steps) {
    try_steps(group, steps, best);
  }
  if (!is_exact()) {
    for (const float steps : kInt4FitSteps) {
      try_fit(group, steps, 0.0f, best);
      try_fit(group, steps, 15.0f - steps, best);
    }
  }
  const __m256 inverse = inverse_or_zero(best.scale);
  for (int k = 0; k < count; ++k) {
    codes[k] = _mm256_cvtps_epi32(round_code(_mm256_mul_ps(_mm256_sub_ps(columns[k], best.minimum), inverse)));
  }
  const __m256 nan = _mm256_set1_ps(std::numeric_limits<float>::quiet_NaN());
  *scales = _mm256_cvtps_ph(_mm256_blendv_ps(nan, best.scale, finite), _MM_FROUND_TO_NEAREST_INT);
  *minima = _mm256_cvtps_ph(_mm256_and_ps(best.minimum, finite), _MM_FROUND_TO_NEAREST_INT);
}

}  // namespace kvist::avx2
