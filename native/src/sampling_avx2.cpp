// Rows of logits on AVX2, eight at a time. A row of some 50,000 logits stays in the second-level cache, so about 20
// instructions for eight exponentials are the bound.

#include "kvist/sampling.h"
#include "vec_avx2.h"

namespace kvist {
namespace {

using namespace avx2;

void softmax_weights(const float* logits, int n, float largest, float temperature, float* weights) {
  const __m256 most = _mm256_set1_ps(largest);
  const __m256 divisor = _mm256_set1_ps(temperature);
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_sub_ps(_mm256_loadu_ps(logits + i), most);
    _mm256_storeu_ps(weights + i, exp(_mm256_div_ps(x, divisor)));
  }
  if (i < n) {
    const __m256i mask = lane_mask(n - i);
    const __m256 x = _mm256_sub_ps(_mm256_maskload_ps(logits + i, mask), most);
    _mm256_maskstore_ps(weights + i, mask, exp(_mm256_div_ps(x, divisor)));
  }
}

double sum_from(const float* weights, int n, float least) {
  const __m256 limit = _mm256_set1_ps(least);
  __m256d sums[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
  const auto add = [&](int which, __m256 w) KVIST_LAMBDA {
    w = _mm256_and_ps(w, _mm256_cmp_ps(w, limit, _CMP_GE_OQ));
    sums[which] = _mm256_add_pd(sums[which], _mm256_cvtps_pd(_mm256_castps256_ps128(w)));
    sums[which + 1] = _mm256_add_pd(sums[which + 1], _mm256_cvtps_pd(_mm256_extractf128_ps(w, 1)));
  };
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    add(0, _mm256_loadu_ps(weights + i));
    add(2, _mm256_loadu_ps(weights + i + 8));
  }
  for (; i < n; i += 8) {
    // A masked lane is 0, and adds nothing.
    add(0, _mm256_maskload_ps(weights + i, lane_mask(n - i < 8 ? n - i : 8)));
  }
  const __m256d sum = _mm256_add_pd(_mm256_add_pd(sums[0], sums[1]), _mm256_add_pd(sums[2], sums[3]));
  const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(sum), _mm256_extractf128_pd(sum, 1));
  return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
}

}  // namespace

extern const SamplingKernels kSamplingAvx2;
const SamplingKernels kSamplingAvx2 = {softmax_weights, sum_from};

}  // namespace kvist
