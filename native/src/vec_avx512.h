// Vector functions of 16 floats. Only for files compiled for AVX-512; static, so that none leaks elsewhere.
#pragma once

#include "intrinsics_avx512.h"
#include "vec_avx2.h"

namespace kvist::avx512 {

using avx2::unroll;

// Calls f(0), ..., f(N - 1), unrolled where that is worth the compiler's time: emulated intrinsics, and checks of every
// access, would make it take minutes.
template <int N, typename F>
static KVIST_INLINE void repeat(F&& f) {
#if defined(KVIST_EMULATES_AVX512) || defined(__SANITIZE_ADDRESS__)
  for (int i = 0; i < N; ++i) {
    f(i);
  }
#else
  unroll<N>(f);
#endif
}

static KVIST_INLINE __m512i load(const void* from) { return _mm512_loadu_si512(from); }

// Four bytes, whatever they are, in every lane. Written as the instruction: a compiler left to itself loads them again
// for each product, or early, and then spills sums.
static KVIST_INLINE __m512i broadcast_bytes4(const void* p) {
#if defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__) && !defined(KVIST_EMULATES_AVX512)
  typedef std::int32_t Bytes4 __attribute__((may_alias, aligned(1)));
  __m512i v;
  asm volatile("vpbroadcastd %1, %0" : "=v"(v) : "m"(*static_cast<const Bytes4*>(p)));
  return v;
#else
  std::int32_t bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return _mm512_set1_epi32(bytes);
#endif
}

static KVIST_INLINE __m512 broadcast_float(const float* p) { return _mm512_castsi512_ps(broadcast_bytes4(p)); }

// sum += products of 16 bits, added in pairs; in place: a compiler copies the sums of a short loop once a step.
static KVIST_INLINE void add_pairs(__m512i& sum, __m512i a, __m512i b) {
#if defined(__GNUC__) && !defined(KVIST_EMULATES_AVX512)
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#else
  sum = _mm512_dpwssd_epi32(sum, a, b);
#endif
}

// The rows of a tile: an address for every three, and a stride.
template <typename T, int R>
struct RowPointers {
  const T* base[(R + 2) / 3];
  std::ptrdiff_t stride;

  RowPointers(const T* rows, std::ptrdiff_t row_stride) : stride(row_stride) {
    unroll<(R + 2) / 3>([&](auto i) KVIST_LAMBDA { base[i] = rows + 3 * i * row_stride; });
  }
  KVIST_INLINE void advance(int count) {
    unroll<(R + 2) / 3>([&](auto i) KVIST_LAMBDA {
      base[i] += count;
      avx2::pin(base[i]);
    });
  }
  template <int I>
  KVIST_INLINE const T* row(std::integral_constant<int, I>) const {
    return base[I / 3] + I % 3 * stride;
  }
};

// The functions below compute what those of vec_avx2.h do, to the bit.

static KVIST_INLINE __m512 exp(__m512 x) {
  const __m512 low = _mm512_set1_ps(-87.3365f);
  const __m512 clamped = _mm512_max_ps(low, _mm512_min_ps(_mm512_set1_ps(88.3762f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clamped);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  const __m512i power = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
  const __m512 result = _mm512_mul_ps(p, _mm512_castsi512_ps(power));
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), result);
}

static KVIST_INLINE __m512 negate(__m512 x) {
  return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN)));
}

static KVIST_INLINE __m512 absolute(__m512 x) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MAX)));
}

static KVIST_INLINE __m512 silu(__m512 x) {
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp(negate(x))));
}

static KVIST_INLINE __m512 gelu_tanh(__m512 x) {
  const __m512 square = _mm512_mul_ps(x, x);
  const __m512 inner = _mm512_mul_ps(x, _mm512_fmadd_ps(square, _mm512_set1_ps(-2.0f * 0.7978845608f * 0.044715f),
                                                        _mm512_set1_ps(-2.0f * 0.7978845608f)));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp(inner)));
}

static KVIST_INLINE __m512 gelu(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 z = _mm512_mul_ps(absolute(x), _mm512_set1_ps(0.7071067812f));
  const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(z, _mm512_set1_ps(0.5f), one));
  __m512 p = _mm512_set1_ps(0.17087277f);
  for (const float coefficient : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f,
                                  0.37409196f, 1.00002368f, -1.26551223f}) {
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(coefficient));
  }
  const __m512 half_erfc = _mm512_mul_ps(_mm512_mul_ps(t, _mm512_set1_ps(0.5f)), exp(_mm512_fnmadd_ps(z, z, p)));
  const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
  return _mm512_mul_ps(x, _mm512_mask_blend_ps(negative, _mm512_sub_ps(one, half_erfc), half_erfc));
}

// The first `count` of 16 lanes; none below 0, all from 16 on.
static KVIST_INLINE __mmask16 first_lanes(int count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1);
}

// Lane i of each quarter of the result: four lanes of v[i], put together by `op`, which takes and gives vectors.
template <typename Op>
static KVIST_INLINE __m512 fold_four(const __m512* v, Op op) {
  const __m512 ab = op(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512 cd = op(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  return op(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
}

// Quarter i of the result: the quarters of v[i] put together.
template <typename Op>
static KVIST_INLINE __m512 fold_quarters(const __m512 (&v)[4], Op op) {
  const auto pair = [&](__m512 a, __m512 b)
                        KVIST_LAMBDA { return op(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); };
  return pair(pair(v[0], v[1]), pair(v[2], v[3]));
}

// Lane i of the result: all lanes of v[i] put together.
template <typename Op>
static KVIST_INLINE __m512 reduce_each(const __m512 (&v)[16], Op op) {
  __m512 quads[4];
  unroll<4>([&](auto i) KVIST_LAMBDA { quads[i] = fold_four(v + 4 * i, op); });
  return fold_quarters(quads, op);
}

struct Add {
  KVIST_INLINE __m512 operator()(__m512 a, __m512 b) const { return _mm512_add_ps(a, b); }
};
struct AddIntegers {
  KVIST_INLINE __m512 operator()(__m512 a, __m512 b) const {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }
};
struct Max {
  KVIST_INLINE __m512 operator()(__m512 a, __m512 b) const { return _mm512_max_ps(a, b); }
};

// All lanes of one vector put together, in the order of the tree.
template <typename Op>
static KVIST_INLINE float reduce(__m512 x, Op op) {
  x = op(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  x = op(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  x = op(x, _mm512_shuffle_ps(x, x, 0x4e));
  x = op(x, _mm512_shuffle_ps(x, x, 0xb1));
  return _mm_cvtss_f32(_mm512_castps512_ps128(x));
}

// 16 bfloat16 as float32, in their order.
static KVIST_INLINE __m512 widen_bf16(const void* from) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from))), 16));
}

}  // namespace kvist::avx512
