// One K or V row in vectors of 8 values: the row is read once for the maximum (int8) and once for the codes.
//
// head_dim is a multiple of 8, so there are no tails. Same arithmetic and same bytes as the serial version.
#include <immintrin.h>

#include <cstring>

#include "kvist/kv_codec.h"

namespace kvist {
namespace {

bool encode_raw16(int head_dim, const float* x, std::uint8_t* out) {
  const __m256i exponent = _mm256_set1_epi32(0x7f800000);
  __m256i infinite = _mm256_setzero_si256();
  for (int d = 0; d < head_dim; d += 8) {
    const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + d));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    // Both are tested: rounding can carry a finite value to infinity, and a NaN's payload past the sign.
    infinite =
        _mm256_or_si256(infinite, _mm256_or_si256(_mm256_cmpeq_epi32(_mm256_and_si256(rounded, exponent), exponent),
                                                  _mm256_cmpeq_epi32(_mm256_and_si256(bits, exponent), exponent)));
    const __m256i upper = _mm256_srli_epi32(rounded, 16);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * d), packed);
  }
  return _mm256_testz_si256(infinite, infinite) != 0;
}

bool encode_int8(int head_dim, const float* x, std::uint8_t* out) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  for (int first = 0; first < head_dim; first += kKvGroup) {
    const int last = first + kKvGroup < head_dim ? first + kKvGroup : head_dim;
    __m256i largest = _mm256_setzero_si256();
    for (int d = first; d < last; d += 8) {
      const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + d));
      largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, magnitude));
    }
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
    const float maximum = _mm_cvtss_f32(_mm_castsi128_ps(most));
    auto scale_bits = static_cast<std::uint16_t>(_cvtss_sh(maximum / 127.0F, _MM_FROUND_TO_NEAREST_INT));
    if (scale_bits >= 0x7c00U) {
      return false;
    }
    if (scale_bits == 0 && _mm_cvtsi128_si32(most) != 0) {
      scale_bits = 1;
    }
    const float inverse = scale_bits == 0 ? 0.0F : 1.0F / _cvtsh_ss(scale_bits);
    const __m256 factor = _mm256_set1_ps(inverse);
    for (int d = first; d < last; d += 8) {
      __m256 code = _mm256_mul_ps(_mm256_loadu_ps(x + d), factor);
      code = _mm256_min_ps(_mm256_max_ps(code, _mm256_set1_ps(-127.0F)), _mm256_set1_ps(127.0F));
      const __m256i integers = _mm256_cvtps_epi32(code);
      const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out + d), _mm_packs_epi16(words, words));
    }
    std::memcpy(out + head_dim + 2 * (first / kKvGroup), &scale_bits, sizeof(scale_bits));
  }
  return true;
}

}  // namespace

bool encode_kv_row_avx2(KvCodec codec, int head_dim, const float* x, std::uint8_t* out) {
  return codec == KvCodec::kRaw16 ? encode_raw16(head_dim, x, out) : encode_int8(head_dim, x, out);
}

}  // namespace kvist
