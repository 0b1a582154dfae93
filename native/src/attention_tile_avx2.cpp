// Attention of many stacked rows on AVX2: fixed-point tiles.
//
// A tile of up to 128 keys (int8 with D up to 64) or 64 is packed once for all the rows of the item: K as pairs of
// values [key / 16][d / 2][16][2], V as pairs of keys [d / 16][key / 2][16][2], of 16 keys those 8 apart; both int16,
// 16 KiB each at D = 64. The rows are quantised once, in strips of 6. All strips are weighed (scores and softmax), then
// values are added to all of them, so that the first-level cache holds K or V beside what a strip needs. Products are
// vpmaddwd: 32 operations in an instruction where an FMA has 16, and one more to add them up; 12 sums of 8 int32 in
// registers.
//
//   codec    rows        K                              V                            weights
//   raw16    limit 8191  limit 4095, a scale for each   limit 4095, a scale for      limit 2^13, relative to the
//                        key and 64 values              each value and tile          tile's maximum
//   int8     limit 32767 its codes and scales           its codes                    limit 32767, times V's scale
//
// No sum overflows: 8191 * 4095 * 64, 8192 * 4095 * 64, 32767 * 127 * 64 and 32767 * 127 * 128 are below 2^31. Scores,
// the softmax and the running sums are float32. A raw16 tile whose keys are so large that rounding them would move a
// score by more than kMaxScoreError has its scores computed in float32 (a few outlier values per key, as some models
// have).
//
// Memory: K and V are read once for the item, all of them by 64-byte lines that are asked for while the tile before is
// worked on; rows, weights and sums of the item (120 KiB at 192 rows of 64) stream from the second-level cache once per
// tile. In the first-level cache, products take 1.0 to 1.1 of what they take on registers alone; beside them a strip and
// 64 keys of int8 take 0.37 of that for the softmax, and the tile 0.9 for packing.

#include "attention_avx2.h"

namespace kvist {
namespace {

constexpr int kStripRows = 6;
constexpr int kQueryLimit13 = 8191;
constexpr int kQueryLimit15 = 32767;
constexpr int kKeyLimit = 4095;
constexpr int kValueLimit = 4095;
constexpr int kWeight13 = 8192;  // 2^13
// Steps of a product in a row. Checks of every access would make the compiler take minutes over more than one.
#if defined(__SANITIZE_ADDRESS__)
constexpr int kSteps = 1;
#else
constexpr int kSteps = 4;
#endif
constexpr int kTileKeys = 128;  // at most
constexpr int kLine = 64;
constexpr int kRowsAhead = 6;  // rows of queries and outputs are asked for ahead
// Of a score in natural units, one standard deviation: it moves a weight by this fraction.
constexpr float kMaxScoreError = 4e-3F;

// One strip against one chunk.
struct TileChunk {
  alignas(32) float scores[kStripRows][kTileKeys];  // before the factor
  std::int32_t first_key[kLanes];                   // places that a row sees: [first_key, last_key)
  std::int32_t last_key[kLanes];
};

struct Strip {
  StripState state;
  alignas(32) float factor[kLanes];      // integer scores (times the key's scale) to units of log2(e)
  alignas(32) float old_factor[kLanes];  // multiplies the sums so far
  alignas(32) float new_factor[kLanes];  // multiplies the sums of this chunk
  int num_keys;                          // of this chunk: up to the last one that a row sees
};

struct Buffers {
  std::int16_t* queries;  // (strips, groups, 6, 64)
  float* float_queries;   // (rows, padded), filled when a tile needs it
  float* sums;            // (rows, padded), blocks of 16: raw16's even values, then the odd ones
  Strip* strips;
  std::int32_t* positions;  // of each stacked row
  std::int16_t* keys;       // the tile; float32 [key / 16][d][16] where needed
  std::int16_t* values;
  std::int16_t* weights;  // (strips, groups, 6, kTileKeys)
  float* key_scales;      // (groups, kTileKeys)
  float* value_scales;    // raw16: (padded), in the order of sums; int8: of each group
  float* value_factors;   // (groups, kTileKeys)
  std::uint8_t* padded_rows;
};

Buffers divide(Scratch& scratch, int num_rows, int padded) {
  const auto rows = static_cast<std::size_t>(num_rows);
  const auto width = static_cast<std::size_t>(padded);
  Buffers b{};
  const std::size_t strips = ceil_div(rows, std::size_t{kStripRows});
  b.queries = scratch.take<std::int16_t>(strips * kStripRows * round_up(width, std::size_t{kKvGroup}));
  b.float_queries = scratch.take<float>(rows * width);
  b.sums = scratch.take<float>(rows * width);
  b.strips = scratch.take<Strip>(strips);
  b.positions = scratch.take<std::int32_t>(rows);
  b.keys = scratch.take<std::int16_t>(2 * kTileKeys * width);
  b.values = scratch.take<std::int16_t>(kTileKeys * width);
  b.weights = scratch.take<std::int16_t>(strips * ceil_div(width, std::size_t{kKvGroup}) * kStripRows * kTileKeys);
  b.key_scales = scratch.take<float>(kMaxGroups * kTileKeys);
  b.value_scales = scratch.take<float>(kMaxHeadDim);
  b.value_factors = scratch.take<float>(kMaxGroups * kTileKeys);
  b.padded_rows = scratch.take<std::uint8_t>(kChunk * 2 * width);
  return b;
}

inline __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store(void* to, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }

// 8 rows of 8 int32 become 8 columns.
inline void transpose8(__m256i* x) {
  __m256i t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
  }
  __m256i u[8];
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    x[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}

// 16 bfloat16 as float32: the even ones and the odd ones.
inline void widen(__m256i x, __m256& even, __m256& odd) {
  even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000U))));
}

// The int16 in even places from `low`, in odd places from the even ones of `high`.
inline __m256i join(__m256i low, __m256i high) { return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa); }

inline float largest_bf16(__m256i magnitudes) {
  const __m128i half = _mm_max_epu16(_mm256_castsi256_si128(magnitudes), _mm256_extracti128_si256(magnitudes, 1));
  // The one horizontal instruction of 16-bit integers finds the minimum.
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi32(-1)));
  const auto bits = static_cast<std::uint32_t>(~_mm_cvtsi128_si32(least)) & 0xffffU;
  return bf16_to_f32(static_cast<std::uint16_t>(bits));
}

// Scales of raw16 keys, one for each group; returns the largest value of all, infinity when there is a NaN.
float scale_keys(const std::uint8_t* const* rows, int count, int padded, float* scales) {
  const __m256i magnitude = _mm256_set1_epi16(0x7fff);
  float largest = 0.0F;
  for (int group = 0; group * kKvGroup < padded; ++group) {
    const int last = padded < (group + 1) * kKvGroup ? padded : (group + 1) * kKvGroup;
    for (int key = 0; key < count; ++key) {
      __m256i most = _mm256_setzero_si256();
      for (int d = group * kKvGroup; d < last; d += 16) {
        most = _mm256_max_epu16(most, _mm256_and_si256(load(rows[key] + 2 * d), magnitude));
      }
      const float maximum = largest_bf16(most);
      largest = maximum > largest ? maximum : largest;
      largest = maximum == maximum ? largest : __builtin_inff();
      scales[group * kTileKeys + key] = maximum / static_cast<float>(kKeyLimit);
    }
  }
  return largest;
}

void pack_keys_raw16(const std::uint8_t* const* rows, int count, int padded, const float* scales, std::int16_t* keys) {
  const int pairs = padded / 2;
  for (int first = 0; first < count; first += 8) {
    std::int16_t* const block = keys + (static_cast<std::ptrdiff_t>(first / 16) * pairs * 16 + first % 16) * 2;
    for (int d = 0; d < padded; d += 16) {
      const float* const group_scales = scales + d / kKvGroup * kTileKeys + first;
      __m256i x[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        __m256 even;
        __m256 odd;
        widen(load(rows[first + i] + 2 * d), even, odd);
        const __m256 inverse = _mm256_broadcast_ss(group_scales + i);
        x[i] = join(_mm256_cvtps_epi32(_mm256_mul_ps(even, inverse)), _mm256_cvtps_epi32(_mm256_mul_ps(odd, inverse)));
      }
      transpose8(x);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        store(block + static_cast<std::ptrdiff_t>(d / 2 + i) * 32, x[i]);
      }
    }
  }
}

// float32 [key / 16][d][16].
void pack_keys_float(const std::uint8_t* const* rows, int count, int padded, float* keys) {
  for (int first = 0; first < count; first += 8) {
    float* const block = keys + static_cast<std::ptrdiff_t>(first / 16) * padded * 16 + first % 16;
    for (int d = 0; d < padded; d += 16) {
      __m256i even[8];
      __m256i odd[8];
      for (int i = 0; i < 8; ++i) {
        const __m256i x = load(rows[first + i] + 2 * d);
        even[i] = _mm256_slli_epi32(x, 16);
        odd[i] = _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000U)));
      }
      transpose8(even);
      transpose8(odd);
      for (int i = 0; i < 8; ++i) {
        store(block + static_cast<std::ptrdiff_t>(d + 2 * i) * 16, even[i]);
        store(block + static_cast<std::ptrdiff_t>(d + 2 * i + 1) * 16, odd[i]);
      }
    }
  }
}

// The pairs of 16 keys: keys i and i + 8, as weights are stored.
void pack_values_raw16(const std::uint8_t* const* rows, int count, int padded, float* scales, std::int16_t* values) {
  const __m256i magnitude = _mm256_set1_epi16(0x7fff);
  const __m256 limit = _mm256_set1_ps(static_cast<float>(kValueLimit));
  for (int d = 0; d < padded; d += 16) {
    __m256i most = _mm256_setzero_si256();
    for (int key = 0; key < count; ++key) {
      most = _mm256_max_epu16(most, _mm256_and_si256(load(rows[key] + 2 * d), magnitude));
    }
    __m256 even_inverse;
    __m256 odd_inverse;
    widen(most, even_inverse, odd_inverse);
    _mm256_store_ps(scales + d, _mm256_div_ps(even_inverse, limit));
    _mm256_store_ps(scales + d + 8, _mm256_div_ps(odd_inverse, limit));
    // A column of zeros divides by zero; its codes are made 0 by the mask.
    const __m256 zero = _mm256_setzero_ps();
    even_inverse = _mm256_and_ps(_mm256_div_ps(limit, even_inverse), _mm256_cmp_ps(even_inverse, zero, _CMP_NEQ_OQ));
    odd_inverse = _mm256_and_ps(_mm256_div_ps(limit, odd_inverse), _mm256_cmp_ps(odd_inverse, zero, _CMP_NEQ_OQ));
    std::int16_t* to = values + static_cast<std::ptrdiff_t>(d / 16) * (kChunk / 2) * 32;
    for (int pair = 0; pair < count / 2; ++pair, to += 32) {
      const int key = pair + (pair & ~7);
      __m256 even[2];
      __m256 odd[2];
      widen(load(rows[key] + 2 * d), even[0], odd[0]);
      widen(load(rows[key + 8] + 2 * d), even[1], odd[1]);
      store(to, join(_mm256_cvtps_epi32(_mm256_mul_ps(even[0], even_inverse)),
                     _mm256_cvtps_epi32(_mm256_mul_ps(even[1], even_inverse))));
      store(to + 16, join(_mm256_cvtps_epi32(_mm256_mul_ps(odd[0], odd_inverse)),
                          _mm256_cvtps_epi32(_mm256_mul_ps(odd[1], odd_inverse))));
    }
  }
}

inline __m256i load_codes(const std::uint8_t* row) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row)));
}

void pack_keys_int8(const std::uint8_t* const* rows, int count, int padded, std::int16_t* keys) {
  const int pairs = padded / 2;
  for (int first = 0; first < count; first += 8) {
    std::int16_t* const block = keys + (static_cast<std::ptrdiff_t>(first / 16) * pairs * 16 + first % 16) * 2;
    for (int d = 0; d < padded; d += 16) {
      __m256i x[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        x[i] = load_codes(rows[first + i] + d);
      }
      transpose8(x);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        store(block + static_cast<std::ptrdiff_t>(d / 2 + i) * 32, x[i]);
      }
    }
  }
}

// `keys` is how many the tile has room for. Of 16 values the sums are in this order: 0 to 3, 8 to 11, 4 to 7, 12 to 15.
void pack_values_int8(const std::uint8_t* const* rows, int count, int padded, int keys, std::int16_t* values) {
  for (int first = 0; first < count; first += 16) {
    for (int d = 0; d < padded; d += 16) {
      std::int16_t* const to = values + static_cast<std::ptrdiff_t>(d) * keys + first * 16;
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const __m256i one = load_codes(rows[first + i] + d);
        const __m256i two = load_codes(rows[first + i + 8] + d);
        store(to + i * 32, _mm256_unpacklo_epi16(one, two));
        store(to + i * 32 + 16, _mm256_unpackhi_epi16(one, two));
      }
    }
  }
}

using PackedPair [[gnu::may_alias]] = std::int32_t;

// A pair of a row times two vectors of pairs, added to their sums. In this order, and in no more registers than two
// beside the sums and the columns: the compiler keeps some of 12 sums on the stack.
inline void multiply_add(const std::int16_t* pair, __m256i column0, __m256i column1, __m256i& sum0, __m256i& sum1) {
  __m256i row;
  __m256i product;
  asm volatile(
      "vpbroadcastd %[pair], %[row]\n\t"
      "vpmaddwd %[column0], %[row], %[product]\n\t"
      "vpmaddwd %[column1], %[row], %[row]\n\t"
      "vpaddd %[product], %[sum0], %[sum0]\n\t"
      "vpaddd %[row], %[sum1], %[sum1]"
      : [sum0] "+x"(sum0), [sum1] "+x"(sum1), [row] "=&x"(row), [product] "=&x"(product)
      : [column0] "x"(column0), [column1] "x"(column1), [pair] "m"(*reinterpret_cast<const PackedPair*>(pair)));
}

// kRows rows of pairs, kStride values apart, against 16 columns of pairs, [pairs][16][2]; `finish(row, column / 8,
// sums)` takes the sums. Each step loads 2 vectors and broadcasts kRows pairs for 2 * kRows products; the sums stay in
// registers. The number of pairs is a multiple of kSteps.
template <int kRows, int kStride, typename Finish>
[[gnu::always_inline]] inline void multiply(const std::int16_t* rows, const std::int16_t* columns, int pairs,
                                            Finish&& finish) {
  __m256i sums[kRows][2];
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    sums[r()][0] = _mm256_setzero_si256();
    sums[r()][1] = _mm256_setzero_si256();
  });
  for (int p = 0; p < pairs; p += kSteps) {
    unroll<kSteps>([&](auto i) __attribute__((always_inline)) {
      const __m256i column0 = load(columns + (p + i()) * 32);
      const __m256i column1 = load(columns + (p + i()) * 32 + 16);
      unroll<kRows>([&](auto r) __attribute__((always_inline)) {
        multiply_add(rows + r() * kStride + 2 * (p + i()), column0, column1, sums[r()][0], sums[r()][1]);
      });
    });
  }
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    finish(r, 0, sums[r()][0]);
    finish(r, 1, sums[r()][1]);
  });
}

// The same in float32: columns are [depth][16].
template <int kRows, typename Finish>
inline void multiply(const float* rows, std::ptrdiff_t stride, const float* columns, int depth, Finish&& finish) {
  __m256 sums[kRows][2];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    sums[r][0] = _mm256_setzero_ps();
    sums[r][1] = _mm256_setzero_ps();
  }
#pragma GCC unroll 2
  for (int d = 0; d < depth; ++d) {
    const __m256 c0 = _mm256_loadu_ps(columns + d * 16);
    const __m256 c1 = _mm256_loadu_ps(columns + d * 16 + 8);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m256 b = _mm256_broadcast_ss(rows + r * stride + d);
      add_in_place(sums[r][0], b, c0);
      add_in_place(sums[r][1], b, c1);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    finish(r, 0, sums[r][0]);
    finish(r, 1, sums[r][1]);
  }
}

// What the strips of a tile have in common.
struct Tile {
  int padded;
  int num_groups;
  int keys;  // in a chunk
  bool is_int8;
  bool in_float;  // scores from float32 keys
  float softcap;
  const Buffers* buffers;
};

template <int kRows>
void score_strip(const Tile& tile, int first_row, int num_keys, TileChunk& chunk) {
  const Buffers& b = *tile.buffers;
  const std::ptrdiff_t padded = tile.padded;
  if (!tile.in_float && tile.padded == kKvGroup) {
    const std::int16_t* const rows = b.queries + first_row * kKvGroup;
    for (int key = 0; key < num_keys; key += 16) {
      multiply<kRows, kKvGroup>(rows, b.keys + key * kKvGroup, kKvGroup / 2, [&](int r, int c, __m256i sums) {
        _mm256_store_ps(&chunk.scores[r][key + 8 * c],
                        _mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_load_ps(b.key_scales + key + 8 * c)));
      });
    }
    return;
  }
  for (int key = 0; key < num_keys; key += 16) {
    if (tile.in_float) {
      multiply<kRows>(b.float_queries + first_row * padded, padded,
                      reinterpret_cast<const float*>(b.keys) + key * padded, tile.padded,
                      [&](int r, int c, __m256 sums) { _mm256_store_ps(&chunk.scores[r][key + 8 * c], sums); });
      continue;
    }
    for (int group = 0; group < tile.num_groups; ++group) {
      const int d = group * kKvGroup;
      const int width = tile.padded - d < kKvGroup ? tile.padded - d : kKvGroup;
      const float* const scales = b.key_scales + group * kTileKeys + key;
      const std::int16_t* const rows = b.queries + (first_row * tile.num_groups + group * kStripRows) * kKvGroup;
      const std::int16_t* const columns = b.keys + key * padded + d * 16;
      if (group == 0) {
        multiply<kRows, kKvGroup>(rows, columns, width / 2, [&](int r, int c, __m256i sums) {
          _mm256_store_ps(&chunk.scores[r][key + 8 * c],
                          _mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_load_ps(scales + 8 * c)));
        });
      } else {
        multiply<kRows, kKvGroup>(rows, columns, width / 2, [&](int r, int c, __m256i sums) {
          float* const score = &chunk.scores[r][key + 8 * c];
          _mm256_store_ps(
              score, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), _mm256_load_ps(scales + 8 * c), _mm256_load_ps(score)));
        });
      }
    }
  }
}

// Turns the scores of a chunk into weights and updates the state, as softmax_chunk does: 18 instructions per 8 scores.
// The weights of 16 keys are stored in pairs: of keys i and i + 8.
template <bool kIsInt8, bool kMasked>
[[gnu::noinline]] void softmax_strip(Strip& strip, TileChunk& chunk, std::int16_t* weights, int num_rows,
                                     int num_vectors, const float* factor, const float* value_factors, int num_groups) {
  __m256 row_vectors[kLanes];
  const __m256 chunk_max = _mm256_mul_ps(largest_scores<kMasked>(chunk, num_rows, num_vectors), _mm256_load_ps(factor));
  const __m256 old_max = _mm256_load_ps(strip.state.maxima);
  const __m256 new_max = _mm256_max_ps(old_max, chunk_max);
  alignas(32) float reference[kLanes];
  _mm256_store_ps(reference, kIsInt8 ? chunk_max : _mm256_sub_ps(chunk_max, _mm256_set1_ps(13.0F)));
  _mm256_store_ps(strip.state.maxima, new_max);
  const __m256 old_factor = exp2_ps<5>(_mm256_sub_ps(old_max, new_max));
  __m256 new_factor = exp2_ps<5>(_mm256_sub_ps(chunk_max, new_max));
  if constexpr (!kIsInt8) {
    new_factor = _mm256_mul_ps(new_factor, _mm256_set1_ps(1.0F / static_cast<float>(kWeight13)));
  }
  _mm256_store_ps(strip.old_factor, old_factor);
  _mm256_store_ps(strip.new_factor, new_factor);
  // Adding it leaves an integer below 2^15 in the low 16 bits.
  const __m256 magic = _mm256_set1_ps(12582912.0F);
  unroll<kLanes>([&](auto r) __attribute__((always_inline)) { row_vectors[r()] = _mm256_setzero_ps(); });
  for (int r = 0; r < num_rows; ++r) {
    const __m256 scale = _mm256_set1_ps(factor[r]);
    const __m256 subtract = _mm256_set1_ps(reference[r]);
    const auto weight = [&](int i) __attribute__((always_inline)) {
      __m256 p = exp2_ps<4>(_mm256_fmsub_ps(_mm256_load_ps(chunk.scores[r] + 8 * i), scale, subtract));
      if constexpr (kMasked) {
        p = _mm256_and_ps(p, seen_places(chunk, r, i));
      }
      return p;
    };
    __m256 sum = _mm256_setzero_ps();
    for (int i = 0; i < num_vectors; i += 2) {
      const __m256 low = weight(i);
      const __m256 high = weight(i + 1);
      const auto store_pairs = [&](int group, __m256 a, __m256 b) __attribute__((always_inline)) {
        store(weights + (group * kStripRows + r) * kTileKeys + 8 * i,
              join(_mm256_castps_si256(a), _mm256_castps_si256(b)));
      };
      if constexpr (kIsInt8) {
        sum = _mm256_add_ps(sum, _mm256_add_ps(low, high));
        const auto store_group = [&](int g) __attribute__((always_inline)) {
          const float* const factors = value_factors + g * kTileKeys + 8 * i;
          store_pairs(g, _mm256_fmadd_ps(low, _mm256_load_ps(factors), magic),
                      _mm256_fmadd_ps(high, _mm256_load_ps(factors + 8), magic));
        };
        store_group(0);
        for (int g = 1; g < num_groups; ++g) {
          store_group(g);
        }
      } else {
        // The rounded weights are summed, so that those used are those normalised by.
        const __m256 a = _mm256_add_ps(low, magic);
        const __m256 b = _mm256_add_ps(high, magic);
        store_pairs(0, a, b);
        sum = _mm256_add_ps(sum, _mm256_add_ps(_mm256_sub_ps(a, magic), _mm256_sub_ps(b, magic)));
      }
    }
    row_vectors[r] = sum;
  }
  const __m256 sums = sum_of_each(row_vectors);
  _mm256_store_ps(strip.state.weights,
                  _mm256_fmadd_ps(_mm256_load_ps(strip.state.weights), old_factor, _mm256_mul_ps(sums, new_factor)));
}

template <int kRows, bool kIsInt8>
void add_values(const Tile& tile, int first_row, const Strip& strip) {
  const Buffers& b = *tile.buffers;
  const std::ptrdiff_t padded = tile.padded;
  alignas(32) float new_factor[kLanes];
  for (int d = 0; d < tile.padded; d += 16) {
    const int group = kIsInt8 ? d / kKvGroup : 0;
    if (d % kKvGroup == 0) {
      const __m256 scale = _mm256_set1_ps(kIsInt8 ? b.value_scales[group] : 1.0F);
      _mm256_store_ps(new_factor, _mm256_mul_ps(_mm256_load_ps(strip.new_factor), scale));
    }
    float* const sums_so_far = b.sums + first_row * padded + d;
    const float* const scales = b.value_scales + d;
    multiply<kRows, kTileKeys>(
        b.weights + (first_row * tile.num_groups + group * kStripRows) * kTileKeys,
        b.values + static_cast<std::ptrdiff_t>(d) * tile.keys, strip.num_keys / 2, [&](int r, int c, __m256i sums) {
          float* const sum = sums_so_far + r * padded + 8 * c;
          __m256 added = _mm256_cvtepi32_ps(sums);
          if constexpr (!kIsInt8) {
            added = _mm256_mul_ps(added, _mm256_load_ps(scales + 8 * c));
          }
          const __m256 kept = _mm256_mul_ps(_mm256_broadcast_ss(&strip.old_factor[r]), _mm256_load_ps(sum));
          _mm256_store_ps(sum, _mm256_fmadd_ps(added, _mm256_broadcast_ss(&new_factor[r]), kept));
        });
  }
}

template <int kRows>
void weigh_strip(const Tile& tile, int first_row, bool masked, const float* factor, Strip& strip, TileChunk& chunk) {
  const Buffers& b = *tile.buffers;
  score_strip<kRows>(tile, first_row, strip.num_keys, chunk);
  alignas(32) float ones[kLanes];
  if (tile.softcap > 0.0F) {
    apply_softcap(chunk, kRows, strip.num_keys / 8, factor, tile.softcap);
    const __m256 given = _mm256_load_ps(factor);
    const __m256 is_nan = _mm256_cmp_ps(given, given, _CMP_UNORD_Q);
    _mm256_store_ps(ones, _mm256_blendv_ps(_mm256_set1_ps(1.0F), given, is_nan));
    factor = ones;
  }
  const auto softmax = tile.is_int8 ? (masked ? softmax_strip<true, true> : softmax_strip<true, false>)
                                    : (masked ? softmax_strip<false, true> : softmax_strip<false, false>);
  softmax(strip, chunk, b.weights + first_row * tile.num_groups * kTileKeys, kRows, strip.num_keys / 8, factor,
          b.value_factors, tile.num_groups);
}

// By the number of rows.
struct StripKernels {
  void (*weigh)(const Tile&, int, bool, const float*, Strip&, TileChunk&);
  void (*add_int8)(const Tile&, int, const Strip&);
  void (*add_raw16)(const Tile&, int, const Strip&);
};

template <int kRows>
constexpr StripKernels kKernelsOf{weigh_strip<kRows>, add_values<kRows, true>, add_values<kRows, false>};
constexpr StripKernels kStripKernels[kStripRows + 1] = {{nullptr, nullptr, nullptr},
                                                        kKernelsOf<1>,
                                                        kKernelsOf<2>,
                                                        kKernelsOf<3>,
                                                        kKernelsOf<4>,
                                                        kKernelsOf<5>,
                                                        kKernelsOf<6>};

// A chunk of keys, in halves of 64.
struct TileRows {
  ChunkRows halves[kTileKeys / kChunk];
  int count = 0;

  void locate(const KvLayout& layout, const AttentionItem& item, const KvLayer& layer, int begin, int keys) {
    count = item.key_end - begin < keys ? item.key_end - begin : keys;
    for (int half = 0; half * kChunk < count; ++half) {
      const int stop = (half + 1) * kChunk < count ? (half + 1) * kChunk : count;
      locate_rows<false>(layout, item, layer, begin + half * kChunk, begin + stop, halves[half]);
    }
  }
};

// Asks for the lines of a chunk, part by part: asked for at once they fill all buffers of lines.
class RowsAhead {
 public:
  RowsAhead(const TileRows& rows, int row_bytes, int num_parts)
      : rows_(rows), lines_(row_bytes / kLine > 1 ? row_bytes / kLine : 1), share_(ceil_div(rows.count, num_parts)) {}

  void ask() {
    const int stop = at_ + share_ < rows_.count ? at_ + share_ : rows_.count;
    for (; at_ < stop; ++at_) {
      const ChunkRows& half = rows_.halves[at_ / kChunk];
      const auto* const k = reinterpret_cast<const char*>(half.k[at_ % kChunk]);
      const auto* const v = reinterpret_cast<const char*>(half.v[at_ % kChunk]);
      for (int line = 0; line < lines_; ++line) {
        _mm_prefetch(k + line * kLine, _MM_HINT_T0);
        _mm_prefetch(v + line * kLine, _MM_HINT_T0);
      }
    }
  }

 private:
  const TileRows& rows_;
  int lines_;  // of a row: rows are one behind the other, so that the bytes left over are in the next one's
  int share_;
  int at_ = 0;
};

// Lane 0 of the result: the largest of the lanes, or their sum.
template <typename Combine>
inline float reduce(__m256 x, Combine&& combine) {
  __m128 half = combine(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = combine(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(combine(half, _mm_movehdup_ps(half)));
}

inline __m256 magnitude(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), x); }

// Quantises a row of queries into a strip; returns its scale.
float quantise_query(const float* x, int head_dim, int padded, int limit, std::int16_t* out) {
  __m256 most = _mm256_setzero_ps();
  for (int d = 0; d < head_dim; d += 8) {
    // In this order: where either is NaN the second is the result.
    most = _mm256_max_ps(most, magnitude(_mm256_loadu_ps(x + d)));
  }
  const float largest = reduce(most, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
  const __m256 inverse = _mm256_set1_ps(largest > 0.0F ? static_cast<float>(limit) / largest : 0.0F);
  for (int d = 0; d < padded; d += 8) {
    const __m256i codes =
        d < head_dim ? _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + d), inverse)) : _mm256_setzero_si256();
    _mm_store_si128(reinterpret_cast<__m128i*>(out + d / kKvGroup * kStripRows * kKvGroup + d % kKvGroup),
                    _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)));
  }
  return largest / static_cast<float>(limit);
}

// The error of a score of raw16 is at most about this times the largest value of K: rounding of K weighed by the row's
// norm, rounding of the row weighed by a norm of K of half its possible size. 0.29 is the deviation of rounding to
// integers.
float error_of_row(const float* x, int head_dim, float largest) {
  __m256 squares = _mm256_setzero_ps();
  for (int d = 0; d < head_dim; d += 8) {
    const __m256 value = _mm256_loadu_ps(x + d);
    squares = _mm256_fmadd_ps(value, value, squares);
  }
  const float norm = reduce(squares, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
  return 0.29F * (__builtin_sqrtf(norm) / kKeyLimit +
                  0.5F * largest / kQueryLimit13 * __builtin_sqrtf(static_cast<float>(head_dim)));
}

// Rows of D values, D not a multiple of 16, copied with zeros behind them.
void pad_rows(const std::uint8_t** rows, int count, std::size_t bytes, std::size_t padded_bytes, std::uint8_t* to) {
  for (int i = 0; i < count; ++i, to += padded_bytes) {
    __builtin_memcpy(to, rows[i], bytes);
    __builtin_memset(to + bytes, 0, padded_bytes - bytes);
    rows[i] = to;
  }
}

inline void ask_row(const float* row, int head_dim) {
  for (int d = 0; d < head_dim; d += 16) {
    _mm_prefetch(reinterpret_cast<const char*>(row + d), _MM_HINT_T0);
  }
}

// Sums of int8 from the order of packed values to their own.
void restore_order(float* sums, int num_rows, int padded) {
  for (std::ptrdiff_t i = 0; i < static_cast<std::ptrdiff_t>(num_rows) * padded; i += 16) {
    const __m256 first = _mm256_load_ps(sums + i);
    const __m256 last = _mm256_load_ps(sums + i + 8);
    _mm256_store_ps(sums + i, _mm256_permute2f128_ps(first, last, 0x20));
    _mm256_store_ps(sums + i + 8, _mm256_permute2f128_ps(first, last, 0x31));
  }
}

void pack_int8(const KvLayout& layout, const Tile& tile, TileRows& rows) {
  const Buffers& b = *tile.buffers;
  const int head_dim = layout.head_dim;
  const auto bytes = static_cast<std::size_t>(head_dim);
  const auto padded_bytes = static_cast<std::size_t>(tile.padded);
  for (int first = 0; first < rows.count; first += kChunk) {
    ChunkRows& half = rows.halves[first / kChunk];
    const int count = rows.count - first < kChunk ? rows.count - first : kChunk;
    const int padded_count = round_up(count, 16);
    for (int g = 0; g < tile.num_groups; ++g) {
      load_scales(RowsAnywhere{half.k}, count, head_dim, g, b.key_scales + g * kTileKeys + first);
      load_scales(RowsAnywhere{half.v}, count, head_dim, g, b.value_factors + g * kTileKeys + first);
    }
    if (tile.padded != head_dim) {
      pad_rows(half.k, count, bytes, padded_bytes, b.padded_rows);
    }
    pack_keys_int8(half.k, padded_count, tile.padded, b.keys + static_cast<std::ptrdiff_t>(first) * tile.padded);
    if (tile.padded != head_dim) {
      pad_rows(half.v, count, bytes, padded_bytes, b.padded_rows);
    }
    pack_values_int8(half.v, padded_count, tile.padded, tile.keys, b.values + first * 16);
  }
  for (int g = 0; g < tile.num_groups; ++g) {
    b.value_scales[g] = normalise_scales(b.value_factors + g * kTileKeys, round_up(rows.count, 16));
  }
}

// Returns the largest value of the keys, infinity when there is a NaN.
float pack_raw16(const KvLayout& layout, Tile& tile, ChunkRows& rows, int count, float error_per_key) {
  const Buffers& b = *tile.buffers;
  const int padded_count = round_up(count, 16);
  const std::size_t bytes = sizeof(std::uint16_t) * static_cast<std::size_t>(layout.head_dim);
  const std::size_t padded_bytes = sizeof(std::uint16_t) * static_cast<std::size_t>(tile.padded);
  if (tile.padded != layout.head_dim) {
    pad_rows(rows.k, count, bytes, padded_bytes, b.padded_rows);
  }
  const float largest = scale_keys(rows.k, padded_count, tile.padded, b.key_scales);
  tile.in_float = !(largest * error_per_key <= kMaxScoreError);
  if (tile.in_float) {
    pack_keys_float(rows.k, padded_count, tile.padded, reinterpret_cast<float*>(b.keys));
  } else {
    alignas(32) float inverse[kMaxGroups * kTileKeys];
    for (int g = 0; g < tile.num_groups; ++g) {
      for (int i = g * kTileKeys; i < g * kTileKeys + padded_count; i += 8) {
        const __m256 scale = _mm256_load_ps(b.key_scales + i);
        const __m256 nonzero = _mm256_cmp_ps(scale, _mm256_setzero_ps(), _CMP_NEQ_OQ);
        _mm256_store_ps(inverse + i, _mm256_and_ps(_mm256_div_ps(_mm256_set1_ps(1.0F), scale), nonzero));
      }
    }
    pack_keys_raw16(rows.k, padded_count, tile.padded, inverse, b.keys);
  }
  if (tile.padded != layout.head_dim) {
    pad_rows(rows.v, count, bytes, padded_bytes, b.padded_rows);
  }
  pack_values_raw16(rows.v, padded_count, tile.padded, b.value_scales, b.values);
  return largest;
}

}  // namespace

std::size_t attention_tile_scratch_avx2(const AttentionShape& shape, int num_rows) {
  Scratch scratch(nullptr);
  divide(scratch, num_rows * (shape.num_heads / shape.layout.num_kv_heads), round_up(shape.layout.head_dim, 16));
  return scratch.used();
}

void attention_tile_avx2(const AttentionShape& shape, const AttentionItem& item, const KvLayer& layer,
                         const AttentionRows& rows, std::uint8_t* scratch_bytes) {
  const KvLayout& layout = shape.layout;
  const int head_dim = layout.head_dim;
  const int padded = round_up(head_dim, 16);
  const int group = shape.num_heads / layout.num_kv_heads;
  const int num_rows = item.num_rows * group;
  const bool is_int8 = layout.codec == KvCodec::kInt8;
  Scratch scratch(scratch_bytes);
  const Buffers b = divide(scratch, num_rows, padded);

  // Twice as many keys halve what a chunk costs beside products; with larger heads packed keys would leave the cache.
  const int keys = is_int8 && padded <= kKvGroup ? kTileKeys : kChunk;
  Tile tile{padded, kv_num_groups(head_dim), keys, is_int8, false, shape.softcap, &b};
  const float to_log2 = shape.scale * kLog2E;
  TileRows located[2];
  located[0].locate(layout, item, layer, item.key_begin, tile.keys);
  RowsAhead first_ahead(located[0], layout.row_bytes, num_rows);
  float error_per_key = 0.0F;
  const int limit = is_int8 ? kQueryLimit15 : kQueryLimit13;
  for (int row = 0; row < num_rows; ++row) {
    first_ahead.ask();
    ask_row(query_row(shape, item, rows, row + kRowsAhead < num_rows ? row + kRowsAhead : row), head_dim);
    Strip& strip = b.strips[row / kStripRows];
    if (row % kStripRows == 0) {
      reset(strip.state);
      _mm256_store_ps(strip.factor, _mm256_setzero_ps());
    }
    const float* const query = query_row(shape, item, rows, row);
    std::int16_t* const codes =
        b.queries + (row / kStripRows * tile.num_groups * kStripRows + row % kStripRows) * kKvGroup;
    const float scale = quantise_query(query, head_dim, padded, limit, codes);
    strip.factor[row % kStripRows] = scale * to_log2;
    b.positions[row] = item.positions[row / group];
    if (!is_int8) {
      const float error = shape.scale * error_of_row(query, head_dim, scale * static_cast<float>(limit));
      error_per_key = error > error_per_key ? error : error_per_key;
    }
  }
  __builtin_memset(b.sums, 0, sizeof(float) * static_cast<std::size_t>(num_rows) * static_cast<std::size_t>(padded));
  alignas(32) float float_factor[kLanes];
  _mm256_store_ps(float_factor, _mm256_set1_ps(to_log2));
  bool has_float_queries = false;

  const int num_strips = ceil_div(num_rows, kStripRows);
  TileChunk chunk;
  for (int begin = item.key_begin, turn = 0; begin < item.key_end; begin += tile.keys, turn ^= 1) {
    TileRows& here = located[turn];
    TileRows& next = located[turn ^ 1];
    next.count = 0;
    if (begin + tile.keys < item.key_end) {
      next.locate(layout, item, layer, begin + tile.keys, tile.keys);
    }
    RowsAhead ahead(next, layout.row_bytes, 2 * num_strips);
    const int count = here.count;
    if (is_int8) {
      pack_int8(layout, tile, here);
    } else {
      const float largest = pack_raw16(layout, tile, here.halves[0], count, error_per_key);
      // The integers that weights become cannot say that a key is no finite number; the factor of its chunk can.
      _mm256_store_ps(float_factor, _mm256_set1_ps(largest < __builtin_inff() ? to_log2 : __builtin_nanf("")));
      if (tile.in_float && !has_float_queries) {
        has_float_queries = true;
        __builtin_memset(b.float_queries, 0, sizeof(float) * static_cast<std::size_t>(num_rows) * padded);
        for (int row = 0; row < num_rows; ++row) {
          __builtin_memcpy(b.float_queries + static_cast<std::ptrdiff_t>(row) * padded,
                           query_row(shape, item, rows, row), sizeof(float) * static_cast<std::size_t>(head_dim));
        }
      }
    }
    const auto rows_of = [&](int first) { return num_rows - first < kStripRows ? num_rows - first : kStripRows; };
    for (int first = 0; first < num_rows; first += kStripRows) {
      ahead.ask();
      Strip& strip = b.strips[first / kStripRows];
      const Seen seen = see(b.positions + first, rows_of(first), shape.window, begin, count, chunk);
      strip.num_keys = seen.last > seen.first ? round_up(seen.last, 16) : 0;
      if (strip.num_keys != 0) {
        kStripKernels[rows_of(first)].weigh(tile, first, seen.masked || count % 16 != 0,
                                            tile.in_float ? float_factor : strip.factor, strip, chunk);
      }
    }
    for (int first = 0; first < num_rows; first += kStripRows) {
      ahead.ask();
      const Strip& strip = b.strips[first / kStripRows];
      if (strip.num_keys != 0) {
        const StripKernels& kernels = kStripKernels[rows_of(first)];
        (is_int8 ? kernels.add_int8 : kernels.add_raw16)(tile, first, strip);
      }
    }
  }
  if (is_int8) {
    restore_order(b.sums, num_rows, padded);
  }
  for (int row = 0; row < num_rows; ++row) {
    ask_row(out_row(shape, item, rows, row + kRowsAhead < num_rows ? row + kRowsAhead : row), head_dim);
    const StripState& state = b.strips[row / kStripRows].state;
    write_row(shape, item, rows, row, b.sums + static_cast<std::ptrdiff_t>(row) * padded,
              state.maxima[row % kStripRows], state.weights[row % kStripRows]);
  }
}

}  // namespace kvist
