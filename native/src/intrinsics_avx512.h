// The intrinsics of AVX-512: the compiler's own, or, in a build that emulates them, functions of the same names from
// SIMDe, for tests on a CPU that lacks them.
#pragma once

#include <immintrin.h>

#if defined(KVIST_EMULATES_AVX512)

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

// What SIMDe 0.7.4 lacks, by its definition in Intel's manual, on the two halves or lane by lane.
namespace kvist::emulated {

static inline __m256 low(__m512 x) { return _mm512_castps512_ps256(x); }
static inline __m256 high(__m512 x) {
  return _mm256_castsi256_ps(_mm512_extracti64x4_epi64(_mm512_castps_si512(x), 1));
}
static inline __m512 join(__m256 a, __m256 b) {
  return _mm512_castsi512_ps(
      _mm512_inserti64x4(_mm512_castps_si512(_mm512_castps256_ps512(a)), _mm256_castps_si256(b), 1));
}
static inline __m512i join(__m256i a, __m256i b) {
  return _mm512_castps_si512(join(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)));
}
static inline __m512i cvtps_epi32(__m512 x) { return join(_mm256_cvtps_epi32(low(x)), _mm256_cvtps_epi32(high(x))); }
static inline __m512 cvtepi32_ps(__m512i x) {
  return join(_mm256_cvtepi32_ps(_mm512_castsi512_si256(x)), _mm256_cvtepi32_ps(_mm512_extracti64x4_epi64(x, 1)));
}
static inline __m512 cvtph_ps(__m256i x) {
  return join(_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}
static inline __m512i cvtepu16_epi32(__m256i x) {
  return join(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)));
}
// Touches the lanes of the mask alone, as the instructions do.
static inline __m512 maskz_loadu_ps(std::uint16_t mask, const float* from) {
  alignas(64) float lanes[16] = {};
  for (int i = 0; i < 16; ++i) {
    if ((mask >> i & 1) != 0) {
      lanes[i] = from[i];
    }
  }
  return _mm512_load_ps(lanes);
}
static inline void mask_storeu_ps(float* to, std::uint16_t mask, __m512 x) {
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, x);
  for (int i = 0; i < 16; ++i) {
    if ((mask >> i & 1) != 0) {
      to[i] = lanes[i];
    }
  }
}

// The instructions fault where SIMDe does not ask.
template <typename T>
static inline T* aligned(T* p) {
  if (reinterpret_cast<std::uintptr_t>(p) % 64 != 0) {
    std::fputs("an access of 64 bytes that must be aligned is not\n", stderr);
    std::abort();
  }
  return p;
}

}  // namespace kvist::emulated

#undef _mm512_load_ps
#undef _mm512_store_ps
#undef _mm512_store_si512
#define _mm512_load_ps(from) simde_mm512_loadu_ps(kvist::emulated::aligned(from))
#define _mm512_store_ps(to, x) simde_mm512_storeu_ps(kvist::emulated::aligned(to), x)
#define _mm512_store_si512(to, x) simde_mm512_storeu_si512(kvist::emulated::aligned(to), x)
#undef _mm512_shuffle_f32x4
#define _mm512_cvtps_epi32 kvist::emulated::cvtps_epi32
#define _mm512_cvtepi32_ps kvist::emulated::cvtepi32_ps
#define _mm512_cvtph_ps kvist::emulated::cvtph_ps
#define _mm512_cvtepu16_epi32 kvist::emulated::cvtepu16_epi32
#define _mm512_maskz_loadu_ps kvist::emulated::maskz_loadu_ps
#define _mm512_mask_storeu_ps kvist::emulated::mask_storeu_ps
#define _mm512_shuffle_f32x4(a, b, order) \
  _mm512_castsi512_ps(_mm512_shuffle_i32x4(_mm512_castps_si512(a), _mm512_castps_si512(b), order))

#endif
