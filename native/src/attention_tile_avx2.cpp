// Attention of many stacked rows on AVX2: fixed-point tiles.
//
// A tile of up to 64 keys is packed once for all the rows of the item: K as pairs of values [key / 16][d / 2][16][2], V
// as pairs of keys [d / 16][key / 2][16][2], both int16, 8 KiB each at D = 64. The rows are quantised once, in strips
// of 6; a strip's rows, scores, weights and sums stay in the first-level cache beside the tile. Products are vpmaddwd:
// 32 operations in an instruction where an FMA has 16, and one more to add them up; 12 sums of 8 int32 in registers.
//
//   codec    rows        K                              V                            weights
//   raw16    limit 8191  limit 4095, a scale for each   limit 4095, a scale for      limit 2^13, relative to the
//                        key and 64 values              each value and tile          tile's maximum
//   int8     limit 32767 its codes and scales           its codes                    limit 32767, times V's scale
//
// No sum overflows: 8191 * 4095 * 64, 8192 * 4095 * 64 and 32767 * 127 * 64 are below 2^31. Scores, the softmax and the
// running sums are float32. A raw16 tile whose keys are so large that rounding them would move a score by more than
// kMaxScoreError has its scores computed in float32 (a few outlier values per key, as some models have).
//
// Memory: K and V are read once for the item, all of them by 64-byte lines; rows and sums of the item (100 KiB at 192
// rows of 64) stream from the second-level cache once per tile.

#include "attention_avx2.h"

namespace kvist {
namespace {

constexpr int kStripRows = 6;
constexpr int kQueryLimit13 = 8191;
constexpr int kQueryLimit15 = 32767;
constexpr int kKeyLimit = 4095;
constexpr int kValueLimit = 4095;
// Steps of a product in a row. Checks of every access would make the compiler take minutes over more than one.
#if defined(__SANITIZE_ADDRESS__)
constexpr int kSteps = 1;
#else
constexpr int kSteps = 4;
#endif
// Of a score in natural units, one standard deviation: it moves a weight by this fraction.
constexpr float kMaxScoreError = 4e-3F;

struct Strip {
  StripState state;
  alignas(32) float factor[kLanes];  // integer scores (times the key's scale) to units of log2(e)
};

struct Buffers {
  std::int16_t* queries;  // (rows, padded)
  float* float_queries;   // (rows, padded), filled when a tile needs it
  float* sums;            // (rows, padded), blocks of 16: raw16's even values, then the odd ones
  Strip* strips;
  std::int32_t* positions;  // of each stacked row
  std::int16_t* keys;       // the tile; float32 [key / 16][d][16] where needed
  std::int16_t* values;
  float* key_scales;     // (groups, 64)
  float* value_scales;   // (padded), in the order of sums
  float* value_factors;  // (groups, 64)
  std::uint8_t* padded_rows;
};

Buffers divide(Scratch& scratch, int num_rows, int padded) {
  const auto rows = static_cast<std::size_t>(num_rows);
  const auto width = static_cast<std::size_t>(padded);
  Buffers b{};
  b.queries = scratch.take<std::int16_t>(rows * width);
  b.float_queries = scratch.take<float>(rows * width);
  b.sums = scratch.take<float>(rows * width);
  b.strips = scratch.take<Strip>(ceil_div(rows, std::size_t{kStripRows}));
  b.positions = scratch.take<std::int32_t>(rows);
  b.keys = scratch.take<std::int16_t>(2 * kChunk * width);
  b.values = scratch.take<std::int16_t>(kChunk * width);
  b.key_scales = scratch.take<float>(kMaxGroups * kChunk);
  b.value_scales = scratch.take<float>(kMaxHeadDim);
  b.value_factors = scratch.take<float>(kMaxGroups * kChunk);
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
      scales[group * kChunk + key] = maximum / static_cast<float>(kKeyLimit);
    }
  }
  return largest;
}

void pack_keys_raw16(const std::uint8_t* const* rows, int count, int padded, const float* scales, std::int16_t* keys) {
  const int pairs = padded / 2;
  for (int first = 0; first < count; first += 8) {
    std::int16_t* const block = keys + (static_cast<std::ptrdiff_t>(first / 16) * pairs * 16 + first % 16) * 2;
    for (int d = 0; d < padded; d += 16) {
      const float* const group_scales = scales + d / kKvGroup * kChunk + first;
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
    for (int key = 0; key < count; key += 2, to += 32) {
      __m256 even[2];
      __m256 odd[2];
      widen(load(rows[key] + 2 * d), even[0], odd[0]);
      widen(load(rows[key + 1] + 2 * d), even[1], odd[1]);
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

void pack_values_int8(const std::uint8_t* const* rows, int count, int padded, std::int16_t* values) {
  for (int d = 0; d < padded; d += 16) {
    std::int16_t* to = values + static_cast<std::ptrdiff_t>(d / 16) * (kChunk / 2) * 32;
    for (int key = 0; key < count; key += 2, to += 32) {
      __m256i first;
      __m256i last;
      pair_codes(rows[key] + d, rows[key + 1] + d, first, last);
      store(to, first);
      store(to + 16, last);
    }
  }
}

// kRows rows of pairs against 16 columns of pairs, [pairs][16][2]; `finish(row, column / 8, sums)` takes the sums. Each
// step loads 2 vectors and broadcasts kRows pairs for 2 * kRows products; the sums stay in registers. The number of
// pairs is a multiple of kSteps.
template <int kRows, typename Finish>
[[gnu::always_inline]] inline void multiply(const std::int16_t* rows, std::ptrdiff_t stride,
                                            const std::int16_t* columns, int pairs, Finish&& finish) {
  __m256i sums[kRows][2];
  const auto step = [&](int p, auto is_first) __attribute__((always_inline)) {
    const __m256i c0 = load(columns + p * 32);
    const __m256i c1 = load(columns + p * 32 + 16);
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      std::int32_t pair;
      __builtin_memcpy(&pair, rows + r() * stride + 2 * p, sizeof(pair));
      const __m256i b = _mm256_set1_epi32(pair);
      if constexpr (is_first()) {
        sums[r()][0] = _mm256_madd_epi16(b, c0);
        sums[r()][1] = _mm256_madd_epi16(b, c1);
      } else {
        add_in_place(sums[r()][0], _mm256_madd_epi16(b, c0));
        add_in_place(sums[r()][1], _mm256_madd_epi16(b, c1));
      }
    });
  };
  step(0, std::true_type{});
  unroll<kSteps - 1>([&](auto i) __attribute__((always_inline)) { step(1 + i(), std::false_type{}); });
  for (int p = kSteps; p < pairs; p += kSteps) {
    unroll<kSteps>([&](auto i) __attribute__((always_inline)) { step(p + i(), std::false_type{}); });
  }
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    finish(r(), 0, sums[r()][0]);
    finish(r(), 1, sums[r()][1]);
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
  bool is_int8;
  bool in_float;  // scores from float32 keys
  float softcap;
  const Buffers* buffers;
};

template <int kRows>
void score_strip(const Tile& tile, int first_row, int num_keys, StripChunk& chunk) {
  const Buffers& b = *tile.buffers;
  const std::ptrdiff_t padded = tile.padded;
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
      const float* const scales = b.key_scales + group * kChunk + key;
      const __m256 scale[2] = {_mm256_load_ps(scales), _mm256_load_ps(scales + 8)};
      const std::int16_t* const rows = b.queries + first_row * padded + d;
      const std::int16_t* const columns = b.keys + key * padded + d * 16;
      if (group == 0) {
        multiply<kRows>(rows, padded, columns, width / 2, [&](int r, int c, __m256i sums) {
          _mm256_store_ps(&chunk.scores[r][key + 8 * c], _mm256_mul_ps(_mm256_cvtepi32_ps(sums), scale[c]));
        });
      } else {
        multiply<kRows>(rows, padded, columns, width / 2, [&](int r, int c, __m256i sums) {
          float* const score = &chunk.scores[r][key + 8 * c];
          _mm256_store_ps(score, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), scale[c], _mm256_load_ps(score)));
        });
      }
    }
  }
}

template <int kRows>
void add_values(const Tile& tile, int first_row, int num_keys, const StripChunk& chunk) {
  const Buffers& b = *tile.buffers;
  const std::ptrdiff_t padded = tile.padded;
  for (int d = 0; d < tile.padded; d += 16) {
    const __m256 scale[2] = {_mm256_load_ps(b.value_scales + d), _mm256_load_ps(b.value_scales + d + 8)};
    float* const sums_so_far = b.sums + first_row * padded + d;
    multiply<kRows>(&chunk.weights[tile.is_int8 ? d / kKvGroup : 0][0][0], kChunk, b.values + d * kChunk, num_keys / 2,
                    [&](int r, int c, __m256i sums) {
                      float* const sum = sums_so_far + r * padded + 8 * c;
                      const __m256 added = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sums), scale[c]),
                                                         _mm256_broadcast_ss(&chunk.new_factor[r]));
                      _mm256_store_ps(
                          sum, _mm256_fmadd_ps(_mm256_load_ps(sum), _mm256_broadcast_ss(&chunk.old_factor[r]), added));
                    });
  }
}

template <int kRows>
void run_strip(const Tile& tile, int first_row, int num_keys, bool masked, const float* factor, StripState& state,
               StripChunk& chunk) {
  const Buffers& b = *tile.buffers;
  score_strip<kRows>(tile, first_row, num_keys, chunk);
  alignas(32) float ones[kLanes];
  if (tile.softcap > 0.0F) {
    apply_softcap(chunk, kRows, num_keys / 8, factor, tile.softcap);
    const __m256 given = _mm256_load_ps(factor);
    const __m256 is_nan = _mm256_cmp_ps(given, given, _CMP_UNORD_Q);
    _mm256_store_ps(ones, _mm256_blendv_ps(_mm256_set1_ps(1.0F), given, is_nan));
    factor = ones;
  }
  if (tile.is_int8) {
    if (masked) {
      softmax_chunk<Weights::kFixed15, true>(state, chunk, kRows, num_keys / 8, factor, b.value_factors,
                                             tile.num_groups);
    } else {
      softmax_chunk<Weights::kFixed15, false>(state, chunk, kRows, num_keys / 8, factor, b.value_factors,
                                              tile.num_groups);
    }
  } else if (masked) {
    softmax_chunk<Weights::kFixed13, true>(state, chunk, kRows, num_keys / 8, factor, nullptr, 1);
  } else {
    softmax_chunk<Weights::kFixed13, false>(state, chunk, kRows, num_keys / 8, factor, nullptr, 1);
  }
  add_values<kRows>(tile, first_row, num_keys, chunk);
}

using RunStrip = void (*)(const Tile&, int, int, bool, const float*, StripState&, StripChunk&);
constexpr RunStrip kRunStrip[kStripRows + 1] = {nullptr,      run_strip<1>, run_strip<2>, run_strip<3>,
                                                run_strip<4>, run_strip<5>, run_strip<6>};

// Quantises a row of queries; returns its scale. `norm` becomes the sum of squares, `largest` the largest value.
float quantise_query(const float* x, int head_dim, int padded, int limit, std::int16_t* out, float& norm,
                     float& largest) {
  __m256 most = _mm256_setzero_ps();
  __m256 squares = _mm256_setzero_ps();
  for (int d = 0; d < head_dim; d += 8) {
    const __m256 value = _mm256_loadu_ps(x + d);
    most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0F), value));
    squares = _mm256_fmadd_ps(value, value, squares);
  }
  alignas(32) float lanes[16];
  _mm256_store_ps(lanes, most);
  _mm256_store_ps(lanes + 8, squares);
  largest = 0.0F;
  norm = 0.0F;
  for (int i = 0; i < 8; ++i) {
    largest = lanes[i] > largest ? lanes[i] : largest;
    norm += lanes[8 + i];
  }
  const __m256 inverse = _mm256_set1_ps(largest > 0.0F ? static_cast<float>(limit) / largest : 0.0F);
  for (int d = 0; d < padded; d += 8) {
    const __m256i codes =
        d < head_dim ? _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + d), inverse)) : _mm256_setzero_si256();
    _mm_store_si128(reinterpret_cast<__m128i*>(out + d),
                    _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)));
  }
  return largest / static_cast<float>(limit);
}

// Rows of D values, D not a multiple of 16, copied with zeros behind them.
void pad_rows(const std::uint8_t** rows, int count, std::size_t bytes, std::size_t padded_bytes, std::uint8_t* to) {
  for (int i = 0; i < count; ++i, to += padded_bytes) {
    __builtin_memcpy(to, rows[i], bytes);
    __builtin_memset(to + bytes, 0, padded_bytes - bytes);
    rows[i] = to;
  }
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
  const std::size_t value_bytes = is_int8 ? 1 : 2;
  Scratch scratch(scratch_bytes);
  const Buffers b = divide(scratch, num_rows, padded);

  Tile tile{padded, kv_num_groups(head_dim), is_int8, false, shape.softcap, &b};
  const float to_log2 = shape.scale * kLog2E;
  // The error of a score is at most about this times the largest value of K: rounding of K weighed by the row's norm,
  // rounding of the row weighed by a norm of K of half its possible size. 0.29 is the deviation of rounding to
  // integers.
  float error_per_key = 0.0F;
  for (int row = 0; row < num_rows; ++row) {
    Strip& strip = b.strips[row / kStripRows];
    if (row % kStripRows == 0) {
      reset(strip.state);
      _mm256_store_ps(strip.factor, _mm256_setzero_ps());
    }
    const int limit = is_int8 ? kQueryLimit15 : kQueryLimit13;
    float norm = 0.0F;
    float largest = 0.0F;
    const float scale = quantise_query(query_row(shape, item, rows, row), head_dim, padded, limit,
                                       b.queries + static_cast<std::ptrdiff_t>(row) * padded, norm, largest);
    strip.factor[row % kStripRows] = scale * to_log2;
    b.positions[row] = item.positions[row / group];
    const float error = 0.29F * shape.scale *
                        (__builtin_sqrtf(norm) / kKeyLimit +
                         0.5F * largest / kQueryLimit13 * __builtin_sqrtf(static_cast<float>(head_dim)));
    error_per_key = error > error_per_key ? error : error_per_key;
  }
  __builtin_memset(b.sums, 0, sizeof(float) * static_cast<std::size_t>(num_rows) * static_cast<std::size_t>(padded));
  alignas(32) float float_factor[kLanes];
  _mm256_store_ps(float_factor, _mm256_set1_ps(to_log2));
  bool has_float_queries = false;

  ChunkRows chunk_rows;
  StripChunk chunk;
  for (int begin = item.key_begin; begin < item.key_end; begin += kChunk) {
    const int count = item.key_end - begin < kChunk ? item.key_end - begin : kChunk;
    const int padded_count = round_up(count, 16);
    locate_rows<false>(layout, item, layer, begin, begin + count, chunk_rows);
    if (is_int8) {
      for (int g = 0; g < tile.num_groups; ++g) {
        load_scales(RowsAnywhere{chunk_rows.k}, count, head_dim, g, b.key_scales + g * kChunk);
        load_scales(RowsAnywhere{chunk_rows.v}, count, head_dim, g, b.value_factors + g * kChunk);
        const float undo = normalise_scales(b.value_factors + g * kChunk, padded_count);
        for (int d = g * kKvGroup; d < padded && d < (g + 1) * kKvGroup; d += 8) {
          _mm256_store_ps(b.value_scales + d, _mm256_set1_ps(undo));
        }
      }
    }
    if (padded != head_dim) {
      pad_rows(chunk_rows.k, count, head_dim * value_bytes, padded * value_bytes, b.padded_rows);
    }
    if (is_int8) {
      pack_keys_int8(chunk_rows.k, padded_count, padded, b.keys);
    } else {
      const float largest = scale_keys(chunk_rows.k, padded_count, padded, b.key_scales);
      tile.in_float = !(largest * error_per_key <= kMaxScoreError);
      // The integers that weights become cannot say that a key is no finite number; the factor of its chunk can.
      _mm256_store_ps(float_factor, _mm256_set1_ps(largest < __builtin_inff() ? to_log2 : __builtin_nanf("")));
      if (tile.in_float) {
        pack_keys_float(chunk_rows.k, padded_count, padded, reinterpret_cast<float*>(b.keys));
      } else {
        alignas(32) float inverse[kMaxGroups * kChunk];
        for (int i = 0; i < tile.num_groups * kChunk; i += 8) {
          const __m256 scale = _mm256_load_ps(b.key_scales + i);
          const __m256 nonzero = _mm256_cmp_ps(scale, _mm256_setzero_ps(), _CMP_NEQ_OQ);
          _mm256_store_ps(inverse + i, _mm256_and_ps(_mm256_div_ps(_mm256_set1_ps(1.0F), scale), nonzero));
        }
        pack_keys_raw16(chunk_rows.k, padded_count, padded, inverse, b.keys);
      }
    }
    if (padded != head_dim) {
      pad_rows(chunk_rows.v, count, head_dim * value_bytes, padded * value_bytes, b.padded_rows);
    }
    if (is_int8) {
      pack_values_int8(chunk_rows.v, padded_count, padded, b.values);
    } else {
      pack_values_raw16(chunk_rows.v, padded_count, padded, b.value_scales, b.values);
    }
    if (tile.in_float && !has_float_queries) {
      has_float_queries = true;
      __builtin_memset(b.float_queries, 0, sizeof(float) * static_cast<std::size_t>(num_rows) * padded);
      for (int row = 0; row < num_rows; ++row) {
        __builtin_memcpy(b.float_queries + static_cast<std::ptrdiff_t>(row) * padded, query_row(shape, item, rows, row),
                         sizeof(float) * static_cast<std::size_t>(head_dim));
      }
    }
    for (int first = 0; first < num_rows; first += kStripRows) {
      const int count_rows = num_rows - first < kStripRows ? num_rows - first : kStripRows;
      const Seen seen = see(b.positions + first, count_rows, shape.window, begin, count, chunk);
      if (seen.last <= seen.first) {
        continue;
      }
      const int num_keys = round_up(seen.last, 16);
      Strip& strip = b.strips[first / kStripRows];
      kRunStrip[count_rows](tile, first, num_keys, seen.masked || count % 16 != 0,
                            tile.in_float ? float_factor : strip.factor, strip.state, chunk);
    }
  }
  for (int row = 0; row < num_rows; ++row) {
    const StripState& state = b.strips[row / kStripRows].state;
    write_row(shape, item, rows, row, b.sums + static_cast<std::ptrdiff_t>(row) * padded,
              state.maxima[row % kStripRows], state.weights[row % kStripRows]);
  }
}

}  // namespace kvist
