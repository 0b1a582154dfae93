// Vector functions of eight floats. Only for files compiled for AVX2 and FMA; static, so that none leaks elsewhere.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__GNUC__)
#define KVIST_INLINE inline __attribute__((always_inline))
#define KVIST_LAMBDA __attribute__((always_inline))
#else
#define KVIST_INLINE inline
#define KVIST_LAMBDA
#endif

namespace kvist::avx2 {

// Calls f(integral_constant 0), ..., f(integral_constant N - 1): indices known at compile time keep arrays of vectors in
// registers, where a loop that is unrolled late leaves them on the stack.
template <int N, typename F>
static KVIST_INLINE void unroll(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>)
      KVIST_LAMBDA { (f(std::integral_constant<int, I>{}), ...); }(std::make_integer_sequence<int, N>{});
}

// sum += v, in place. Compilers reassociate integer sums of several steps into trees of products that no longer fit the
// registers, and rename accumulators until some are spilled; this does neither.
static KVIST_INLINE void add_in_place32(__m256i& sum, __m256i v) {
#if defined(__GNUC__)
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(v));
#else
  sum = _mm256_add_epi32(sum, v);
#endif
}

static KVIST_INLINE void add_in_place16(__m256i& sum, __m256i v) {
#if defined(__GNUC__)
  asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(v));
#else
  sum = _mm256_add_epi16(sum, v);
#endif
}

// sum += a * b, in place, for the same reasons.
static KVIST_INLINE void fma_in_place(__m256& sum, __m256 a, __m256 b) {
#if defined(__GNUC__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
  sum = _mm256_fmadd_ps(a, b, sum);
#endif
}

// x -= v, in place, likewise.
static KVIST_INLINE void sub_in_place(__m256& x, __m256 v) {
#if defined(__GNUC__)
  asm("vsubps %1, %0, %0" : "+x"(x) : "x"(v));
#else
  x = _mm256_sub_ps(x, v);
#endif
}

// Makes an address opaque here: keeps the compiler from a separate register for every element an unrolled loop reads.
template <typename T>
static KVIST_INLINE void pin(T*& p) {
#if defined(__GNUC__)
  asm("" : "+r"(p));
#endif
}

// Four bytes, whatever they are, in every lane. Read where it is written: hoisted loads are what spills accumulators.
static KVIST_INLINE __m256i broadcast_bytes4(const void* p) {
#if defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__)
  typedef std::int32_t Bytes4 __attribute__((may_alias, aligned(1)));
  __m256i v;
  asm volatile("vpbroadcastd %1, %0" : "=x"(v) : "m"(*static_cast<const Bytes4*>(p)));
  return v;
#else
  std::int32_t bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return _mm256_set1_epi32(bytes);
#endif
}

// The rows of a tile: two addresses and a stride reach six of them.
template <typename T>
struct RowPointers {
  const T* first;
  const T* fourth;
  std::ptrdiff_t stride;

  RowPointers(const T* rows, std::ptrdiff_t row_stride)
      : first(rows), fourth(rows + 3 * row_stride), stride(row_stride) {}
  KVIST_INLINE void advance(int count) {
    first += count;
    fourth += count;
    pin(first);
    pin(fourth);
  }
  template <int I>
  KVIST_INLINE const T* row(std::integral_constant<int, I>) const {
    return I < 3 ? first + I * stride : fourth + (I - 3) * stride;
  }
};

// e^x within 2 ulp; 0 below the smallest normal result, 2.4e38 above 88.37; a NaN stays one.
static KVIST_INLINE __m256 exp(__m256 x) {
  const __m256 low = _mm256_set1_ps(-87.3365f);
  const __m256 clamped = _mm256_max_ps(low, _mm256_min_ps(_mm256_set1_ps(88.3762f), x));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(clamped, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // ln 2 in two parts: the product of n and the first is exact.
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), clamped);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
  p = _mm256_fmadd_ps(_mm256_mul_ps(r, r), p, _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(_mm256_cmp_ps(x, low, _CMP_LT_OQ), _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

static KVIST_INLINE __m256 negate(__m256 x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }

// x / (1 + e^-x)
static KVIST_INLINE __m256 silu(__m256 x) {
  return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), exp(negate(x))));
}

// x / 2 * (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 x^3)
static KVIST_INLINE __m256 gelu_tanh(__m256 x) {
  const __m256 square = _mm256_mul_ps(x, x);
  const __m256 inner = _mm256_mul_ps(x, _mm256_fmadd_ps(square, _mm256_set1_ps(-2.0f * 0.7978845608f * 0.044715f),
                                                        _mm256_set1_ps(-2.0f * 0.7978845608f)));
  return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), exp(inner)));
}

// x / 2 * erfc(-x / sqrt 2), with a rational-exponential fit of erfc whose relative error is below 2e-7 before rounding.
static KVIST_INLINE __m256 gelu(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0f);
  const __m256 z = _mm256_mul_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x), _mm256_set1_ps(0.7071067812f));
  const __m256 t = _mm256_div_ps(one, _mm256_fmadd_ps(z, _mm256_set1_ps(0.5f), one));
  __m256 p = _mm256_set1_ps(0.17087277f);
  for (const float coefficient : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f,
                                  0.37409196f, 1.00002368f, -1.26551223f}) {
    p = _mm256_fmadd_ps(p, t, _mm256_set1_ps(coefficient));
  }
  const __m256 half_erfc = _mm256_mul_ps(_mm256_mul_ps(t, _mm256_set1_ps(0.5f)), exp(_mm256_fnmadd_ps(z, z, p)));
  const __m256 phi = _mm256_blendv_ps(_mm256_sub_ps(one, half_erfc), half_erfc, x);
  return _mm256_mul_ps(x, phi);
}

// The first `count` of eight lanes, for masked loads and stores; count in [0, 8].
static KVIST_INLINE __m256i lane_mask(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// Lane i of columns[j] becomes lane j of rows[i].
static KVIST_INLINE void transpose(__m256 (&v)[8]) {
  const __m256 a0 = _mm256_unpacklo_ps(v[0], v[1]), a1 = _mm256_unpackhi_ps(v[0], v[1]);
  const __m256 a2 = _mm256_unpacklo_ps(v[2], v[3]), a3 = _mm256_unpackhi_ps(v[2], v[3]);
  const __m256 a4 = _mm256_unpacklo_ps(v[4], v[5]), a5 = _mm256_unpackhi_ps(v[4], v[5]);
  const __m256 a6 = _mm256_unpacklo_ps(v[6], v[7]), a7 = _mm256_unpackhi_ps(v[6], v[7]);
  const __m256 b0 = _mm256_shuffle_ps(a0, a2, 0x44), b1 = _mm256_shuffle_ps(a0, a2, 0xee);
  const __m256 b2 = _mm256_shuffle_ps(a1, a3, 0x44), b3 = _mm256_shuffle_ps(a1, a3, 0xee);
  const __m256 b4 = _mm256_shuffle_ps(a4, a6, 0x44), b5 = _mm256_shuffle_ps(a4, a6, 0xee);
  const __m256 b6 = _mm256_shuffle_ps(a5, a7, 0x44), b7 = _mm256_shuffle_ps(a5, a7, 0xee);
  v[0] = _mm256_permute2f128_ps(b0, b4, 0x20);
  v[1] = _mm256_permute2f128_ps(b1, b5, 0x20);
  v[2] = _mm256_permute2f128_ps(b2, b6, 0x20);
  v[3] = _mm256_permute2f128_ps(b3, b7, 0x20);
  v[4] = _mm256_permute2f128_ps(b0, b4, 0x31);
  v[5] = _mm256_permute2f128_ps(b1, b5, 0x31);
  v[6] = _mm256_permute2f128_ps(b2, b6, 0x31);
  v[7] = _mm256_permute2f128_ps(b3, b7, 0x31);
}

}  // namespace kvist::avx2
