// Attention of few stacked rows on AVX2: keys are widened in registers as they come, and read once per item.
//
// Chunks of 64 keys: scores of 4 keys and up to 3 rows at a time (12 sums in registers, reduced together), one softmax
// update, then the weighted sum over the chunk for 32 values and up to 3 rows at a time. More rows take more passes
// over the chunk, which is in the first-level cache by then. D is a multiple of 32.
//
//   raw16    float32: 2 instructions widen 16 values into even and odd ones, which the sums keep apart to the end
//   int8     vpmaddwd: the row quantised to 15 bits against the codes, D products in D / 16 instructions; the weights
//            times V's scales in 15 bits, against pairs of keys
//
// Memory: every line of K and V once, the next chunk's prefetched; at D = 64 and 3 rows a key takes about 25 cycles of
// instructions for 132 bytes (int8) or 256 (raw16). Scores and sums are float32, integer sums exact.

#include "attention_avx2.h"

namespace kvist {
namespace {

constexpr int kQueryLimit = 32767;  // 32767 * 127 * 64 < 2^31
constexpr int kMaxPass = 3;

struct Buffers {
  std::int16_t* queries;
  float* float_queries;  // blocks of 16: even values, odd values
  float* sums;           // the same blocks
  std::int32_t* positions;
};

Buffers divide(Scratch& scratch, int head_dim) {
  const auto width = static_cast<std::size_t>(head_dim);
  Buffers b{};
  b.queries = scratch.take<std::int16_t>(kLanes * width);
  b.float_queries = scratch.take<float>(kLanes * width);
  b.sums = scratch.take<float>(kLanes * width);
  b.positions = scratch.take<std::int32_t>(kLanes);
  return b;
}

inline __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

inline __m256i load_codes(const std::uint8_t* row) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row)));
}

inline __m128i sum_of_each4(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const __m256i cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  const __m256i all = _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  return _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

inline __m128 sum_of_each4(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256 all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

inline void prefetch_row(const std::uint8_t* row, int row_bytes) {
  for (int offset = 0; offset + 16 < row_bytes; offset += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(row + offset), _MM_HINT_T0);
  }
}

// Scores of kRows rows against the keys of a chunk, up to a multiple of 4.
template <int kRows>
void score_int8(const Buffers& b, int first_row, const std::uint8_t* const* rows, int count, int head_dim,
                const float* key_scales, StripChunk& chunk) {
  const std::int16_t* const queries = b.queries + first_row * head_dim;
  for (int key = 0; key < count; key += 4) {
    __m128 scores[kRows];
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      scores[r] = _mm_setzero_ps();
    }
    for (int group = 0; group * kKvGroup < head_dim; ++group) {
      const int last = head_dim < (group + 1) * kKvGroup ? head_dim : (group + 1) * kKvGroup;
      __m256i sums[kRows][4];
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          sums[r][i] = _mm256_setzero_si256();
        }
      }
      for (int d = group * kKvGroup; d < last; d += 16) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const __m256i codes = load_codes(rows[key + i] + d);
#pragma GCC unroll 3
          for (int r = 0; r < kRows; ++r) {
            sums[r][i] = _mm256_add_epi32(sums[r][i], _mm256_madd_epi16(codes, load(queries + r * head_dim + d)));
          }
        }
      }
      const __m128 scale = _mm_load_ps(key_scales + group * kChunk + key);
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) {
        const __m128 sum = _mm_cvtepi32_ps(sum_of_each4(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
        scores[r] = _mm_fmadd_ps(sum, scale, scores[r]);
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      _mm_store_ps(&chunk.scores[first_row + r][key], scores[r]);
    }
  }
}

inline void widen(__m256i x, __m256& even, __m256& odd) {
  even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000U))));
}

template <int kRows>
void score_raw16(const Buffers& b, int first_row, const std::uint8_t* const* rows, int count, int head_dim,
                 StripChunk& chunk) {
  const float* const queries = b.float_queries + first_row * head_dim;
  for (int key = 0; key < count; key += 4) {
    __m256 sums[kRows][4];
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        sums[r][i] = _mm256_setzero_ps();
      }
    }
    for (int d = 0; d < head_dim; d += 16) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        __m256 even;
        __m256 odd;
        widen(load(rows[key + i] + 2 * d), even, odd);
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) {
          sums[r][i] = _mm256_fmadd_ps(even, _mm256_load_ps(queries + r * head_dim + d), sums[r][i]);
          sums[r][i] = _mm256_fmadd_ps(odd, _mm256_load_ps(queries + r * head_dim + d + 8), sums[r][i]);
        }
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      _mm_store_ps(&chunk.scores[first_row + r][key], sum_of_each4(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
    }
  }
}

// Adds a chunk's weighted values to the sums of kRows rows.
template <int kRows>
void add_int8(const Buffers& b, int first_row, const std::uint8_t* const* rows, int count, int head_dim,
              const float* undo, const StripChunk& chunk) {
  for (int d = 0; d < head_dim; d += 32) {
    const int group = d / kKvGroup;
    const std::int16_t* const weights = &chunk.weights[group][first_row][0];
    __m256i sums[kRows][4];
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        sums[r][i] = _mm256_setzero_si256();
      }
    }
    for (int key = 0; key < count; key += 2) {
      __m256i pairs[kRows];
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) {
        std::int32_t pair;
        __builtin_memcpy(&pair, weights + r * kChunk + key, sizeof(pair));
        pairs[r] = _mm256_set1_epi32(pair);
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m256i one = load_codes(rows[key] + d + 16 * i);
        const __m256i two = load_codes(rows[key + 1] + d + 16 * i);
        const __m256i even = _mm256_blend_epi16(one, _mm256_slli_epi32(two, 16), 0xaa);
        const __m256i odd = _mm256_blend_epi16(_mm256_srli_epi32(one, 16), two, 0xaa);
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) {
          sums[r][2 * i] = _mm256_add_epi32(sums[r][2 * i], _mm256_madd_epi16(even, pairs[r]));
          sums[r][2 * i + 1] = _mm256_add_epi32(sums[r][2 * i + 1], _mm256_madd_epi16(odd, pairs[r]));
        }
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      const __m256 shrink = _mm256_set1_ps(chunk.old_factor[first_row + r]);
      const __m256 scale = _mm256_set1_ps(chunk.new_factor[first_row + r] * undo[group]);
      float* const to = b.sums + (first_row + r) * head_dim + d;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m256 old = _mm256_mul_ps(_mm256_load_ps(to + 8 * i), shrink);
        _mm256_store_ps(to + 8 * i, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][i]), scale, old));
      }
    }
  }
}

template <int kRows>
void add_raw16(const Buffers& b, int first_row, const std::uint8_t* const* rows, int count, int head_dim,
               const StripChunk& chunk) {
  for (int d = 0; d < head_dim; d += 32) {
    __m256 sums[kRows][4];
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      const __m256 shrink = _mm256_set1_ps(chunk.old_factor[first_row + r]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        sums[r][i] = _mm256_mul_ps(shrink, _mm256_load_ps(b.sums + (first_row + r) * head_dim + d + 8 * i));
      }
    }
    for (int key = 0; key < count; ++key) {
      __m256 weights[kRows];
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) {
        weights[r] = _mm256_broadcast_ss(&chunk.scores[first_row + r][key]);
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        __m256 even;
        __m256 odd;
        widen(load(rows[key] + 2 * (d + 16 * i)), even, odd);
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) {
          sums[r][2 * i] = _mm256_fmadd_ps(even, weights[r], sums[r][2 * i]);
          sums[r][2 * i + 1] = _mm256_fmadd_ps(odd, weights[r], sums[r][2 * i + 1]);
        }
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        _mm256_store_ps(b.sums + (first_row + r) * head_dim + d + 8 * i, sums[r][i]);
      }
    }
  }
}

// Calls body with a constant 1, 2 or 3 and the first row, until all rows had their turn: passes as equal as can be.
template <typename Body>
inline void for_passes(int num_rows, Body&& body) {
  for (int first = 0, left = num_rows; left > 0;) {
    const int passes = ceil_div(left, kMaxPass);
    const int rows = ceil_div(left, passes);
    if (rows == 3) {
      body(std::integral_constant<int, 3>{}, first);
    } else if (rows == 2) {
      body(std::integral_constant<int, 2>{}, first);
    } else {
      body(std::integral_constant<int, 1>{}, first);
    }
    first += rows;
    left -= rows;
  }
}

// Queries as the scores need them; returns the factor that brings scores to units of log2(e).
float prepare_query(const float* x, int head_dim, bool is_int8, float to_log2, std::int16_t* codes, float* blocks) {
  if (!is_int8) {
    for (int d = 0; d < head_dim; d += 16) {
      const __m256 low = _mm256_loadu_ps(x + d);
      const __m256 high = _mm256_loadu_ps(x + d + 8);
      const __m256 even = _mm256_shuffle_ps(low, high, 0x88);
      const __m256 odd = _mm256_shuffle_ps(low, high, 0xdd);
      _mm256_store_ps(blocks + d, _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(even), 0xd8)));
      _mm256_store_ps(blocks + d + 8, _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(odd), 0xd8)));
    }
    return to_log2;
  }
  __m256 most = _mm256_setzero_ps();
  for (int d = 0; d < head_dim; d += 8) {
    most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0F), _mm256_loadu_ps(x + d)));
  }
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  half = _mm_max_ss(half, _mm_movehdup_ps(half));
  const float largest = _mm_cvtss_f32(half);
  const __m256 inverse = _mm256_set1_ps(largest > 0.0F ? static_cast<float>(kQueryLimit) / largest : 0.0F);
  for (int d = 0; d < head_dim; d += 8) {
    const __m256i integers = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + d), inverse));
    _mm_store_si128(reinterpret_cast<__m128i*>(codes + d),
                    _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1)));
  }
  return largest / static_cast<float>(kQueryLimit) * to_log2;
}

}  // namespace

std::size_t attention_stream_scratch_avx2(const AttentionShape& shape, int) {
  Scratch scratch(nullptr);
  divide(scratch, shape.layout.head_dim);
  return scratch.used();
}

void attention_stream_avx2(const AttentionShape& shape, const AttentionItem& item, const KvLayer& layer,
                           const AttentionRows& rows, std::uint8_t* scratch_bytes) {
  const KvLayout& layout = shape.layout;
  const int head_dim = layout.head_dim;
  const int group = shape.num_heads / layout.num_kv_heads;
  const int num_rows = item.num_rows * group;
  const bool is_int8 = layout.codec == KvCodec::kInt8;
  const int num_groups = kv_num_groups(head_dim);
  Scratch scratch(scratch_bytes);
  const Buffers b = divide(scratch, head_dim);

  StripState state;
  reset(state);
  alignas(32) float factor[kLanes] = {};
  for (int row = 0; row < num_rows; ++row) {
    factor[row] = prepare_query(query_row(shape, item, rows, row), head_dim, is_int8, shape.scale * kLog2E,
                                b.queries + row * head_dim, b.float_queries + row * head_dim);
    b.positions[row] = item.positions[row / group];
  }
  __builtin_memset(b.sums, 0, sizeof(float) * static_cast<std::size_t>(num_rows) * static_cast<std::size_t>(head_dim));

  alignas(32) float key_scales[kMaxGroups * kChunk];
  alignas(32) float value_factors[kMaxGroups * kChunk];
  float undo[kMaxGroups] = {};
  StripChunk chunk;
  ChunkRows located[2];
  const auto chunk_end = [&](int begin) { return begin + kChunk < item.key_end ? begin + kChunk : item.key_end; };
  locate_rows(layout, item, layer, item.key_begin, chunk_end(item.key_begin), located[0]);
  int current = 0;
  for (int begin = item.key_begin; begin < item.key_end; begin += kChunk, current ^= 1) {
    const int count = chunk_end(begin) - begin;
    const int padded_count = round_up(count, 16);
    const ChunkRows& here = located[current];
    const int next_begin = begin + kChunk;
    if (next_begin < item.key_end) {
      ChunkRows& next = located[current ^ 1];
      locate_rows(layout, item, layer, next_begin, chunk_end(next_begin), next);
      for (int i = 0; i < chunk_end(next_begin) - next_begin; ++i) {
        prefetch_row(next.k[i], layout.row_bytes);
        prefetch_row(next.v[i], layout.row_bytes);
      }
    }
    const Seen seen = see(b.positions, num_rows, shape.window, begin, count, chunk);
    if (seen.last <= seen.first) {
      continue;
    }
    if (is_int8) {
      for (int g = 0; g < num_groups; ++g) {
        load_scales(here.k, count, head_dim, g, key_scales + g * kChunk);
        load_scales(here.v, count, head_dim, g, value_factors + g * kChunk);
        undo[g] = normalise_scales(value_factors + g * kChunk, padded_count);
      }
      for_passes(num_rows, [&](auto pass, int first) {
        score_int8<pass()>(b, first, here.k, padded_count, head_dim, key_scales, chunk);
      });
    } else {
      for_passes(num_rows,
                 [&](auto pass, int first) { score_raw16<pass()>(b, first, here.k, padded_count, head_dim, chunk); });
    }
    const float* chunk_factor = factor;
    alignas(32) float ones[kLanes];
    if (shape.softcap > 0.0F) {
      apply_softcap(chunk, num_rows, padded_count / 8, factor, shape.softcap);
      _mm256_store_ps(ones, _mm256_set1_ps(1.0F));
      chunk_factor = ones;
    }
    const bool masked = seen.masked || count != padded_count;
    const int vectors = padded_count / 8;
    if (is_int8) {
      if (masked) {
        softmax_chunk<Weights::kFixed15, true>(state, chunk, num_rows, vectors, chunk_factor, value_factors,
                                               num_groups);
      } else {
        softmax_chunk<Weights::kFixed15, false>(state, chunk, num_rows, vectors, chunk_factor, value_factors,
                                                num_groups);
      }
      for_passes(num_rows,
                 [&](auto pass, int first) { add_int8<pass()>(b, first, here.v, count, head_dim, undo, chunk); });
    } else {
      if (masked) {
        softmax_chunk<Weights::kFloat, true>(state, chunk, num_rows, vectors, chunk_factor, nullptr, 1);
      } else {
        softmax_chunk<Weights::kFloat, false>(state, chunk, num_rows, vectors, chunk_factor, nullptr, 1);
      }
      for_passes(num_rows, [&](auto pass, int first) { add_raw16<pass()>(b, first, here.v, count, head_dim, chunk); });
    }
  }
  for (int row = 0; row < num_rows; ++row) {
    write_row(shape, item, rows, row, b.sums + row * head_dim, state.maxima[row], state.weights[row]);
  }
}

}  // namespace kvist
