// One K or V row in vectors of 8 values: the row is read once for the maximum (int8) and once for the codes. A key that
// knows its queries takes a division and a sum across lanes for each of up to 6 stages more.
//
// head_dim is a multiple of 8, so there are no tails. Same arithmetic and same bytes as the serial version: no product
// may be contracted into a sum.
#include <immintrin.h>

#include <cstring>

#include "kvist/kv_codec.h"
#include "kvist/rowwise.h"

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

struct Grid {
  std::uint16_t bits;
  float scale;
  float inverse;
};

// Of a group of n values; false where none is finite.
bool find_grid(const float* x, int n, Grid& grid) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i largest = _mm256_setzero_si256();
  for (int i = 0; i < n; i += 8) {
    const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + i));
    largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, magnitude));
  }
  __m128i most = _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
  const float maximum = _mm_cvtss_f32(_mm_castsi128_ps(most));
  grid.bits = static_cast<std::uint16_t>(_cvtss_sh(maximum / 127.0F, _MM_FROUND_TO_NEAREST_INT));
  if (grid.bits >= 0x7c00U) {
    return false;
  }
  if (grid.bits == 0 && _mm_cvtsi128_si32(most) != 0) {
    grid.bits = 1;
  }
  grid.scale = _cvtsh_ss(grid.bits);
  grid.inverse = grid.bits == 0 ? 0.0F : 1.0F / grid.scale;
  return true;
}

inline __m256 within_limit(__m256 code) {
  return _mm256_min_ps(_mm256_max_ps(code, _mm256_set1_ps(-127.0F)), _mm256_set1_ps(127.0F));
}

inline void store_codes(__m256 codes, std::uint8_t* out) {
  const __m256i integers = _mm256_cvtps_epi32(codes);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(words, words));
}

bool encode_int8(int head_dim, const float* x, std::uint8_t* out) {
  for (int first = 0; first < head_dim; first += kKvGroup) {
    const int last = first + kKvGroup < head_dim ? first + kKvGroup : head_dim;
    Grid grid;
    if (!find_grid(x + first, last - first, grid)) {
      return false;
    }
    const __m256 factor = _mm256_set1_ps(grid.inverse);
    for (int d = first; d < last; d += 8) {
      store_codes(within_limit(_mm256_mul_ps(_mm256_loadu_ps(x + d), factor)), out + d);
    }
    std::memcpy(out + head_dim + 2 * (first / kKvGroup), &grid.bits, sizeof(grid.bits));
  }
  return true;
}

inline float fold(__m256 lanes) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// Stages are whole vectors, and so are groups of a scale.
bool encode_int8_key(int head_dim, int num_queries, const float* x, const float* queries, std::uint8_t* out) {
  alignas(32) float query[kMaxHeadDim];
  float squares[kMaxKvStages] = {};  // of the query, from each stage on
  int num_stages = 0;
  for (int first = 0; first < head_dim;) {
    const int end = kv_stage_end(first, head_dim);
    __m256 lanes = _mm256_setzero_ps();
    for (int d = first; d < end; d += 8) {
      __m256 sum = _mm256_loadu_ps(queries + d);
      for (int i = 1; i < num_queries; ++i) {
        sum = _mm256_add_ps(sum, _mm256_loadu_ps(queries + i * head_dim + d));
      }
      _mm256_store_ps(query + d, sum);
      lanes = _mm256_add_ps(lanes, _mm256_mul_ps(sum, sum));
    }
    squares[num_stages++] = fold(lanes);
    first = end;
  }
  for (int stage = num_stages - 2; stage >= 0; --stage) {
    squares[stage] += squares[stage + 1];
  }
  const float damping = squares[0] / static_cast<float>(head_dim);
  if (!(damping > 0.0F && damping < __builtin_inff())) {
    return encode_int8(head_dim, x, out);
  }
  Grid grids[kMaxHeadDim / kKvGroup];
  for (int first = 0; first < head_dim; first += kKvGroup) {
    Grid& grid = grids[first / kKvGroup];
    if (!find_grid(x + first, first + kKvGroup < head_dim ? kKvGroup : head_dim - first, grid)) {
      return false;
    }
    std::memcpy(out + head_dim + 2 * (first / kKvGroup), &grid.bits, sizeof(grid.bits));
  }
  float moved = 0.0F;
  for (int first = 0, stage = 0; first < head_dim; ++stage) {
    const int end = kv_stage_end(first, head_dim);
    const __m256 back = _mm256_set1_ps(moved / (damping + squares[stage]));
    __m256 lanes = _mm256_setzero_ps();
    for (int d = first; d < end; d += 8) {
      const Grid& grid = grids[d / kKvGroup];
      const __m256 inverse = _mm256_set1_ps(grid.inverse);
      const __m256 value = _mm256_loadu_ps(x + d);
      const __m256 q = _mm256_load_ps(query + d);
      const __m256 exact = _mm256_mul_ps(value, inverse);
      const __m256 shifted = _mm256_sub_ps(exact, _mm256_mul_ps(_mm256_mul_ps(q, back), inverse));
      const __m256 wanted = _mm256_round_ps(shifted, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      const __m256 code =
          within_limit(_mm256_min_ps(_mm256_max_ps(wanted, _mm256_floor_ps(exact)), _mm256_ceil_ps(exact)));
      store_codes(code, out + d);
      const __m256 error = _mm256_sub_ps(_mm256_mul_ps(code, _mm256_set1_ps(grid.scale)), value);
      lanes = _mm256_add_ps(lanes, _mm256_mul_ps(q, error));
    }
    moved += fold(lanes);
    first = end;
  }
  return true;
}

}  // namespace

bool encode_kv_row_avx2(KvCodec codec, int head_dim, const float* x, std::uint8_t* out) {
  return codec == KvCodec::kRaw16 ? encode_raw16(head_dim, x, out) : encode_int8(head_dim, x, out);
}

bool encode_kv_key_avx2(KvCodec codec, int head_dim, int num_queries, const float* x, const float* queries,
                        std::uint8_t* out) {
  return codec == KvCodec::kRaw16 ? encode_raw16(head_dim, x, out)
                                  : encode_int8_key(head_dim, num_queries, x, queries, out);
}

}  // namespace kvist
