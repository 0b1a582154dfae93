// What both AVX2 attention kernels need: keys in blocks, the exponential, the online softmax of a chunk, the output.
//
// Included by files compiled for AVX2 only; everything is local to the file that includes it.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "attention_kernels.h"
#include "kvist/common.h"
#include "kvist/rowwise.h"

namespace kvist {

// Many stacked rows: fixed-point tiles. Few: keys streamed once. Same contract.
std::size_t attention_tile_scratch_avx2(const AttentionShape& shape, int num_rows);
void attention_tile_avx2(const AttentionShape& shape, const AttentionItem& item, const KvLayer& layer,
                         const AttentionRows& rows, std::uint8_t* scratch);
std::size_t attention_stream_scratch_avx2(const AttentionShape& shape);
int attention_stream_heads_avx2(const AttentionShape& shape, int num_rows);
void attention_stream_avx2(const AttentionShape& shape, const AttentionItem& item, const KvLayer& layer,
                           const AttentionRows& rows, std::uint8_t* scratch);

namespace {

constexpr int kChunk = 64;  // keys that one softmax update covers
constexpr int kLanes = 8;   // rows of a strip share vectors of float32: at most 8
constexpr int kMaxGroups = kMaxHeadDim / kKvGroup;
constexpr int kWeight15 = 32767;

// Calls body with the constants 0 to kCount - 1. Unlike a loop that is unrolled later, arrays indexed by them become
// registers.
template <int kCount, typename Body>
[[gnu::always_inline]] inline void unroll(Body&& body) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, kIndex>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// Calls body with a constant number of rows up to kMost and the first row, until all rows had their turn: passes as
// equal as can be.
template <int kMost, typename Body>
inline void for_passes(int num_rows, Body&& body) {
  for (int first = 0, left = num_rows; left > 0;) {
    const int rows = ceil_div(left, ceil_div(left, kMost));
    unroll<kMost>([&](auto i) __attribute__((always_inline)) {
      if (rows == i() + 1) {
        body(std::integral_constant<int, i() + 1>{}, first);
      }
    });
    first += rows;
    left -= rows;
  }
}

// sum += x, and sum += a * b, in the order written and in sum's own register. Left to itself the compiler gathers the
// products of a step first, runs out of registers and keeps the sums on the stack, or copies each sum once a step.
inline void add_in_place(__m256i& sum, __m256i x) { asm volatile("vpaddd %1, %0, %0" : "+x"(sum) : "x"(x)); }

inline void add_in_place(__m256& sum, __m256 a, __m256 b) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
}

// What is read next, asked for while something else is worked on, in the order of the addresses and evenly over the
// work: asked for at once it fills all buffers of lines, and everything waits until most of them have come. Addresses
// are numbers here: behind the end they are no places in an object.
struct Ahead {
  std::uintptr_t at;
  std::uintptr_t step;

  [[gnu::always_inline]] void ask() {
    _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
    at += step;
  }
};

// Read in place of keys that do not exist.
alignas(64) constexpr std::uint8_t kZeroRow[2 * kMaxHeadDim] = {};

// Rows of K of a chunk; the row of V is v_offset bytes further. Places from the number of keys up to a multiple of 16
// point to zeros.
struct ChunkRows {
  const std::uint8_t* k[kChunk];
  const std::uint8_t* v[kChunk];
};

template <bool kPrefetch>
inline void locate_rows(const KvLayout& layout, const AttentionItem& item, const KvLayer& layer, int begin, int end,
                        ChunkRows& chunk) {
  const std::int64_t head_bytes = static_cast<std::int64_t>(layout.block_size) * layout.row_bytes;
  const std::int64_t v_offset = layout.num_kv_heads * head_bytes;
  int block = begin / layout.block_size;
  int slot = begin - block * layout.block_size;
  int i = 0;
  for (int key = begin; key < end; ++block, slot = 0) {
    const std::uint8_t* row = layer.base + item.block_offsets[block] + item.kv_head * head_bytes +
                              static_cast<std::int64_t>(slot) * layout.row_bytes;
    const int stop = key + layout.block_size - slot < end ? key + layout.block_size - slot : end;
    if constexpr (kPrefetch) {
      const int num_bytes = (stop - key) * layout.row_bytes;
      for (int offset = 0; offset < num_bytes; offset += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(row + offset), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(row + v_offset + offset), _MM_HINT_T0);
      }
    }
    for (; key < stop; ++key, ++i, row += layout.row_bytes) {
      chunk.k[i] = row;
      chunk.v[i] = row + v_offset;
    }
  }
  for (; i % 16 != 0; ++i) {
    chunk.k[i] = kZeroRow;
    chunk.v[i] = kZeroRow;
  }
}

// 16 int8 codes of two rows as pairs: of the first 8 values, of the last 8.
inline void pair_codes(const std::uint8_t* one, const std::uint8_t* two, __m256i& first, __m256i& last) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(one));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(two));
  first = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
  last = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
}

// Where the row of a key is: anywhere, or behind the row of the key before.
struct RowsAnywhere {
  const std::uint8_t* const* rows;
  const std::uint8_t* operator()(int key) const { return rows[key]; }
};

struct RowsTogether {
  const std::uint8_t* first;
  std::ptrdiff_t row_bytes;
  const std::uint8_t* operator()(int key) const { return first + key * row_bytes; }
};

// The float16 scales of group `group` of num_keys rows, zeros up to a multiple of 16.
template <typename At>
inline void load_scales(const At& at, int num_keys, int head_dim, int group, float* scales) {
  const int offset = head_dim + 2 * group;
  // Its last 16 bits are the scale: one instruction takes two of them, and nothing beside the row is touched.
  const auto up_to_scale = [&](int key) __attribute__((always_inline)) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at(key) + offset - 14));
  };
  const auto four = [&](int key) __attribute__((always_inline)) {
    return _mm_unpackhi_epi32(_mm_unpackhi_epi16(up_to_scale(key), up_to_scale(key + 1)),
                              _mm_unpackhi_epi16(up_to_scale(key + 2), up_to_scale(key + 3)));
  };
  int key = 0;
  for (; offset >= 14 && key + 8 <= num_keys; key += 8) {
    _mm256_store_ps(scales + key, _mm256_cvtph_ps(_mm_unpackhi_epi64(four(key), four(key + 4))));
  }
  for (; key < num_keys; ++key) {
    std::uint16_t scale;
    __builtin_memcpy(&scale, at(key) + offset, sizeof(scale));
    scales[key] = _cvtsh_ss(scale);
  }
  for (; key % 16 != 0; ++key) {
    scales[key] = 0.0F;
  }
}

// V scales of a chunk, divided by their maximum and multiplied by kWeight15: what a weight is multiplied by before it
// becomes an integer. Returns what undoes it: NaN when a scale is, since the integers cannot say so.
inline float normalise_scales(float* scales, int num_keys) {
  __m256 largest = _mm256_setzero_ps();
  __m256 all = _mm256_setzero_ps();
  for (int i = 0; i < num_keys; i += 8) {
    const __m256 scale = _mm256_load_ps(scales + i);
    largest = _mm256_max_ps(largest, scale);
    all = _mm256_add_ps(all, scale);
  }
  if (_mm256_movemask_ps(_mm256_cmp_ps(all, all, _CMP_UNORD_Q)) != 0) {
    return __builtin_nanf("");
  }
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  half = _mm_max_ss(half, _mm_movehdup_ps(half));
  const float maximum = _mm_cvtss_f32(half);
  const __m256 factor = _mm256_set1_ps(maximum > 0.0F ? static_cast<float>(kWeight15) / maximum : 0.0F);
  for (int i = 0; i < num_keys; i += 8) {
    _mm256_store_ps(scales + i, _mm256_mul_ps(_mm256_load_ps(scales + i), factor));
  }
  return maximum / static_cast<float>(kWeight15);
}

// 2^x for x <= 126, relative error 3e-6 with degree 4, 1e-7 with degree 5; at or below -126 it is 2^-126, of NaN it is
// NaN.
template <int kDegree>
inline __m256 exp2_ps(__m256 x) {
  static_assert(kDegree == 4 || kDegree == 5);
  const __m256 magic = _mm256_set1_ps(12582912.0F);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  x = _mm256_max_ps(_mm256_set1_ps(-126.0F), x);     // in this order: where either is NaN the second is the result
  const __m256 shifted = _mm256_add_ps(x, magic);
  const __m256 f = _mm256_sub_ps(x, _mm256_sub_ps(shifted, magic));
  __m256 p;
  if constexpr (kDegree == 5) {
    p = _mm256_set1_ps(0.001326472731307149F);
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.009671512991189957F));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.05550733581185341F));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.24022242426872253F));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.6931470036506653F));
  } else {
    p = _mm256_set1_ps(0.009582852944731712F);
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.055906426161527634F));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.24024099111557007F));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.6931241750717163F));
  }
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0F));
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
}

// Lane r of the result: the maximum, or the sum, of the lanes of v[r].
inline __m256 max_of_each(const __m256* v) {
  const auto pair = [](__m256 a, __m256 b) {
    return _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  };
  const auto four = [](__m256 a, __m256 b) {
    return _mm256_max_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  };
  const __m256 low = four(pair(v[0], v[1]), pair(v[2], v[3]));
  const __m256 high = four(pair(v[4], v[5]), pair(v[6], v[7]));
  return _mm256_max_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

inline __m256 sum_of_each(const __m256* v) {
  const auto pair = [](__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  };
  const auto four = [](__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  };
  const __m256 low = four(pair(v[0], v[1]), pair(v[2], v[3]));
  const __m256 high = four(pair(v[4], v[5]), pair(v[6], v[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

// The softmax of up to 8 rows, kept over chunks.
struct StripState {
  alignas(32) float maxima[kLanes];   // of the scores so far, in units of log2(e)
  alignas(32) float weights[kLanes];  // sum of exp2(score - maximum)
};

inline void reset(StripState& state) {
  _mm256_store_ps(state.maxima, _mm256_set1_ps(kNoScore));
  _mm256_store_ps(state.weights, _mm256_setzero_ps());
}

// One strip against one chunk.
struct StripChunk {
  alignas(32) float scores[kLanes][kChunk];  // before the factor
  alignas(32) std::int16_t weights[kMaxGroups][kLanes][kChunk];
  alignas(32) float old_factor[kLanes];  // multiplies the sums so far
  alignas(32) float new_factor[kLanes];  // multiplies the sums of this chunk
  std::int32_t first_key[kLanes];        // places that a row sees: [first_key, last_key)
  std::int32_t last_key[kLanes];
};

// How weights leave the softmax.
enum class Weights {
  kFloat,    // float32 in place of the scores, relative to the maximum so far
  kFixed15,  // integers, relative to the chunk's maximum, times a row of factors for each group of D
};

// Scores become softcap * tanh(score / softcap), in units of log2(e): the factor is then 1.
template <typename Chunk>
inline void apply_softcap(Chunk& chunk, int num_rows, int num_vectors, const float* factor, float softcap) {
  const __m256 limit = _mm256_set1_ps(126.0F);
  const __m256 cap = _mm256_set1_ps(softcap * kLog2E);
  for (int r = 0; r < num_rows; ++r) {
    const __m256 doubled = _mm256_set1_ps(factor[r] * 2.0F / softcap);
    for (int i = 0; i < num_vectors; ++i) {
      const __m256 x = _mm256_mul_ps(_mm256_load_ps(chunk.scores[r] + 8 * i), doubled);
      const __m256 e = exp2_ps<5>(_mm256_min_ps(limit, x));
      const __m256 t = _mm256_div_ps(_mm256_set1_ps(2.0F), _mm256_add_ps(e, _mm256_set1_ps(1.0F)));
      _mm256_store_ps(chunk.scores[r] + 8 * i, _mm256_mul_ps(cap, _mm256_sub_ps(_mm256_set1_ps(1.0F), t)));
    }
  }
}

// Which of the places [8 * i, 8 * i + 8) row r sees, as a mask.
template <typename Chunk>
[[gnu::always_inline]] inline __m256 seen_places(const Chunk& chunk, int r, int i) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i place = _mm256_add_epi32(lane, _mm256_set1_epi32(8 * i));
  return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(chunk.first_key[r]), place),
                                                 _mm256_cmpgt_epi32(_mm256_set1_epi32(chunk.last_key[r]), place)));
}

// Lane r: the largest score that row r sees. Chunks are multiples of 16 keys: two vectors at a time.
template <bool kMasked, typename Chunk>
[[gnu::always_inline]] inline __m256 largest_scores(const Chunk& chunk, int num_rows, int num_vectors) {
  __m256 row_vectors[kLanes];
  unroll<kLanes>([&](auto r) __attribute__((always_inline)) { row_vectors[r()] = _mm256_set1_ps(kNoScore); });
  for (int r = 0; r < num_rows; ++r) {
    __m256 largest[2] = {_mm256_set1_ps(kNoScore), _mm256_set1_ps(kNoScore)};
    for (int i = 0; i < num_vectors; i += 2) {
      unroll<2>([&](auto j) __attribute__((always_inline)) {
        __m256 score = _mm256_load_ps(chunk.scores[r] + 8 * (i + j()));
        if constexpr (kMasked) {
          score = _mm256_blendv_ps(_mm256_set1_ps(kNoScore), score, seen_places(chunk, r, i + j()));
        }
        largest[j()] = _mm256_max_ps(largest[j()], score);
      });
    }
    row_vectors[r] = _mm256_max_ps(largest[0], largest[1]);
  }
  return max_of_each(row_vectors);
}

// Turns the scores of a chunk into weights and updates the state. `factor` (lane per row, >= 0) brings scores to units
// of log2(e). About 20 instructions per 8 scores.
template <Weights kWeights, bool kMasked>
[[gnu::noinline]] void softmax_chunk(StripState& state, StripChunk& chunk, int num_rows, int num_vectors,
                                     const float* factor, const float* value_factors, int num_groups) {
  __m256 row_vectors[kLanes];
  const __m256 chunk_max = _mm256_mul_ps(largest_scores<kMasked>(chunk, num_rows, num_vectors), _mm256_load_ps(factor));
  const __m256 old_max = _mm256_load_ps(state.maxima);
  const __m256 new_max = _mm256_max_ps(old_max, chunk_max);
  const __m256 old_factor = exp2_ps<5>(_mm256_sub_ps(old_max, new_max));
  const __m256 new_factor =
      kWeights == Weights::kFloat ? _mm256_set1_ps(1.0F) : exp2_ps<5>(_mm256_sub_ps(chunk_max, new_max));
  _mm256_store_ps(state.maxima, new_max);
  _mm256_store_ps(chunk.old_factor, old_factor);
  alignas(32) float reference[kLanes];
  if constexpr (kWeights == Weights::kFloat) {
    _mm256_store_ps(reference, new_max);
  } else {
    _mm256_store_ps(reference, chunk_max);
  }
  // Not a loop: the compiler makes `rep stos` of one, which is microcode.
  unroll<kLanes>([&](auto r) __attribute__((always_inline)) { row_vectors[r()] = _mm256_setzero_ps(); });
  constexpr int kDegree = kWeights == Weights::kFloat ? 5 : 4;
  for (int r = 0; r < num_rows; ++r) {
    const __m256 scale = _mm256_set1_ps(factor[r]);
    const __m256 subtract = _mm256_set1_ps(reference[r]);
    const auto weight = [&](int i) __attribute__((always_inline)) {
      __m256 p = exp2_ps<kDegree>(_mm256_fmsub_ps(_mm256_load_ps(chunk.scores[r] + 8 * i), scale, subtract));
      if constexpr (kMasked) {
        p = _mm256_and_ps(p, seen_places(chunk, r, i));
      }
      return p;
    };
    const auto store_integers = [&](int group, int i, __m256 low, __m256 high) __attribute__((always_inline)) {
      const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high));
      _mm256_store_si256(reinterpret_cast<__m256i*>(chunk.weights[group][r] + 8 * i),
                         _mm256_permute4x64_epi64(both, 0xd8));
    };
    __m256 sum = _mm256_setzero_ps();
    for (int i = 0; i < num_vectors; i += 2) {
      const __m256 low = weight(i);
      const __m256 high = weight(i + 1);
      sum = _mm256_add_ps(sum, _mm256_add_ps(low, high));
      if constexpr (kWeights == Weights::kFloat) {
        _mm256_store_ps(chunk.scores[r] + 8 * i, low);
        _mm256_store_ps(chunk.scores[r] + 8 * i + 8, high);
      } else {
        const auto store_group = [&](int g) __attribute__((always_inline)) {
          const float* const factors = value_factors + g * kChunk + 8 * i;
          store_integers(g, i, _mm256_mul_ps(low, _mm256_load_ps(factors)),
                         _mm256_mul_ps(high, _mm256_load_ps(factors + 8)));
        };
        store_group(0);
        for (int g = 1; g < num_groups; ++g) {
          store_group(g);
        }
      }
    }
    row_vectors[r] = sum;
  }
  _mm256_store_ps(chunk.new_factor, new_factor);
  const __m256 sums = sum_of_each(row_vectors);
  _mm256_store_ps(state.weights,
                  _mm256_fmadd_ps(_mm256_load_ps(state.weights), old_factor, _mm256_mul_ps(sums, new_factor)));
}

// Which places of the chunk [begin, begin + count) each row sees. Returns the places that any row sees, as [first,
// last), and whether some row does not see all of them.
struct Seen {
  int first;
  int last;
  bool masked;
};

template <typename Chunk>
inline Seen see(const std::int32_t* positions, int num_rows, int window, int begin, int count, Chunk& chunk) {
  Seen result{count, 0, false};
  for (int r = 0; r < num_rows; ++r) {
    const int end = positions[r] + 1 - begin;
    const int last = end < count ? (end > 0 ? end : 0) : count;
    const int start = end - window;
    const int first = window > 0 && start > 0 ? start : 0;
    chunk.first_key[r] = first;
    chunk.last_key[r] = last;
    if (first < last) {
      result.first = first < result.first ? first : result.first;
      result.last = last > result.last ? last : result.last;
    }
    result.masked = result.masked || first != 0 || last != count;
  }
  return result;
}

// The same where every row sees all of them.
inline Seen see_all(int count, StripChunk& chunk) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(chunk.first_key), _mm256_setzero_si256());
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(chunk.last_key), _mm256_set1_epi32(count));
  return {0, count, false};
}

// From the first position to the last one of an item's rows.
struct Positions {
  int first;
  int last;

  // Whether all rows see all keys of [begin, end).
  bool see_all(int window, int begin, int end) const {
    return first >= end - 1 && (window == 0 || last - window < begin);
  }
};

inline Positions range_of(const std::int32_t* positions, int count) {
  Positions range{positions[0], positions[0]};
  for (int i = 1; i < count; ++i) {
    range.first = positions[i] < range.first ? positions[i] : range.first;
    range.last = positions[i] > range.last ? positions[i] : range.last;
  }
  return range;
}

// Sums of raw16 are kept in blocks of 16 values: the even ones, then the odd ones, as widening leaves them. Writes
// num_values (a multiple of 8) of them, multiplied by factor, in their order.
inline void write_sums(KvCodec codec, const float* sums, int num_values, float factor, float* out) {
  const __m256 scale = _mm256_set1_ps(factor);
  if (codec != KvCodec::kRaw16) {
    for (int d = 0; d < num_values; d += 8) {
      _mm256_storeu_ps(out + d, _mm256_mul_ps(_mm256_load_ps(sums + d), scale));
    }
    return;
  }
  for (int d = 0; d < num_values; d += 16) {
    const __m256 even = _mm256_mul_ps(_mm256_load_ps(sums + d), scale);
    const __m256 odd = _mm256_mul_ps(_mm256_load_ps(sums + d + 8), scale);
    const __m256 low = _mm256_unpacklo_ps(even, odd);
    const __m256 high = _mm256_unpackhi_ps(even, odd);
    _mm256_storeu_ps(out + d, _mm256_permute2f128_ps(low, high, 0x20));
    if (d + 8 < num_values) {
      _mm256_storeu_ps(out + d + 8, _mm256_permute2f128_ps(low, high, 0x31));
    }
  }
}

// Where stacked row `stacked` (query row stacked / group, head stacked % group of the item's) belongs.
inline float* out_row(const AttentionShape& shape, const AttentionItem& item, const AttentionRows& rows, int stacked) {
  const int group = shape.num_heads / shape.layout.num_kv_heads;
  const int i = stacked / group;
  const int head = item.kv_head * group + stacked % group;
  const int head_dim = shape.layout.head_dim;
  if (item.partial_sums == nullptr) {
    return rows.out + item.rows[i] * rows.out_stride + static_cast<std::ptrdiff_t>(head) * head_dim;
  }
  return item.partial_sums + (static_cast<std::ptrdiff_t>(i) * shape.num_heads + head) * head_dim;
}

// Writes a stacked row to where it belongs.
inline void write_row(const AttentionShape& shape, const AttentionItem& item, const AttentionRows& rows, int stacked,
                      const float* sums, float maximum, float weights) {
  float* const out = out_row(shape, item, rows, stacked);
  if (item.partial_sums == nullptr) {
    write_sums(shape.layout.codec, sums, shape.layout.head_dim, 1.0F / weights, out);
    return;
  }
  const std::ptrdiff_t result = (out - item.partial_sums) / shape.layout.head_dim;
  item.partial_weights[2 * result] = maximum;
  item.partial_weights[2 * result + 1] = weights;
  write_sums(shape.layout.codec, sums, shape.layout.head_dim, 1.0F, out);
}

inline const float* query_row(const AttentionShape& shape, const AttentionItem& item, const AttentionRows& rows,
                              int stacked) {
  const int group = shape.num_heads / shape.layout.num_kv_heads;
  return rows.queries + item.rows[stacked / group] * rows.query_stride +
         static_cast<std::ptrdiff_t>(item.kv_head * group + stacked % group) * shape.layout.head_dim;
}

// Hands out pieces of a thread's scratch, each aligned. On a null base it only counts.
class Scratch {
 public:
  explicit Scratch(std::uint8_t* base) : base_(base) {}
  template <typename T>
  T* take(std::size_t count) {
    const std::size_t offset = used_;
    used_ += round_up(count * sizeof(T), kAlignment);
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + offset);
  }
  std::size_t used() const { return used_; }

 private:
  std::uint8_t* base_;
  std::size_t used_ = 0;
};

}  // namespace
}  // namespace kvist
