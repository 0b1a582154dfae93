// Attention of many stacked rows on AVX-512 VNNI: fixed-point tiles.
//
// A tile of up to 64 keys is packed once for all the rows of the item: K as pairs of values [key / 16][d / 2][16][2], V
// as pairs of keys [d / 16][key / 2][16][2], both int16. The rows are quantised once, in strips of 12; a strip's rows,
// scores, weights and sums stay in the first-level cache beside the tile. Products are vpdpwssd, 32 of them added in
// pairs to 16 sums: two vectors of keys (or values) against 12 rows are 24 sums in registers, 14 loads for 24 products.
//
// Number formats and limits are those of the AVX2 version:
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
// D is padded to a multiple of 32, keys to one of 32, rows of a strip to an even number: with zeros.
//
// Memory: K and V are read once for the item, all of them by 64-byte lines; rows and sums of the item (100 KiB at 192
// rows of 64) stream from the second-level cache once per tile.

#include "attention_avx512.h"

namespace kvist::avx512 {
namespace {

constexpr int kStripRows = 12;
constexpr int kQueryLimit13 = 8191;
constexpr int kQueryLimit15 = 32767;
constexpr int kKeyLimit = 4095;
constexpr int kValueLimit = 4095;
constexpr int kSteps = 4;  // of a product in a row
// Of a score in natural units, one standard deviation: it moves a weight by this fraction.
constexpr float kMaxScoreError = 4e-3F;

struct Strip {
  StripState state;
  alignas(64) float factor[kLanes];  // integer scores (times the key's scale) to units of log2(e)
};

struct Buffers {
  std::int16_t* queries;  // (rows, padded)
  float* float_queries;   // (rows, padded), filled when a tile needs it
  float* sums;            // (rows, padded)
  Strip* strips;
  std::int32_t* positions;  // of each stacked row
  std::int16_t* keys;       // the tile; float32 [key / 16][d][16] where needed
  std::int16_t* values;
  float* key_scales;     // (groups, 64)
  float* value_scales;   // (padded)
  float* value_factors;  // (groups, 64)
  std::uint8_t* padded_rows;
};

Buffers divide(Scratch& scratch, int num_rows, int padded) {
  const auto rows = static_cast<std::size_t>(round_up(num_rows, 2));
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

// 16 rows of 16 int32 become 16 columns.
inline void transpose16(__m512i (&x)[16]) {
  __m512i t[16];
  unroll<8>([&](auto i) KVIST_LAMBDA {
    t[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  });
  __m512i u[16];  // quarter q of u[4 * k + c]: column 4 * q + c of the rows 4 * k to 4 * k + 3
  unroll<4>([&](auto k) KVIST_LAMBDA {
    u[4 * k] = _mm512_unpacklo_epi64(t[4 * k], t[4 * k + 2]);
    u[4 * k + 1] = _mm512_unpackhi_epi64(t[4 * k], t[4 * k + 2]);
    u[4 * k + 2] = _mm512_unpacklo_epi64(t[4 * k + 1], t[4 * k + 3]);
    u[4 * k + 3] = _mm512_unpackhi_epi64(t[4 * k + 1], t[4 * k + 3]);
  });
  unroll<4>([&](auto c) KVIST_LAMBDA {
    const __m512i low_even = _mm512_shuffle_i32x4(u[c], u[4 + c], 0x88);
    const __m512i low_odd = _mm512_shuffle_i32x4(u[c], u[4 + c], 0xdd);
    const __m512i high_even = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0x88);
    const __m512i high_odd = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0xdd);
    x[c] = _mm512_shuffle_i32x4(low_even, high_even, 0x88);
    x[4 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
    x[8 + c] = _mm512_shuffle_i32x4(low_even, high_even, 0xdd);
    x[12 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
  });
}

// The low int16 of each lane of `low` in even places, of `high` in odd ones.
inline __m512i join(__m512i low, __m512i high) {
  return _mm512_mask_blend_epi16(0xaaaaaaaaU, low, _mm512_slli_epi32(high, 16));
}

inline __m512i magnitudes(const std::uint8_t* from) { return _mm512_and_si512(load(from), _mm512_set1_epi16(0x7fff)); }

inline float largest_bf16(__m512i most) {
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
  const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  // The one horizontal instruction of 16-bit integers finds the minimum.
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi32(-1)));
  const auto bits = static_cast<std::uint32_t>(~_mm_cvtsi128_si32(least)) & 0xffffU;
  return bf16_to_f32(static_cast<std::uint16_t>(bits));
}

// 1 / x, and 0 for 0.
inline __m512 inverse_of(__m512 x, float numerator) {
  const __mmask16 nonzero = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_OQ);
  return _mm512_maskz_mov_ps(nonzero, _mm512_div_ps(_mm512_set1_ps(numerator), x));
}

// Scales of raw16 keys, one for each group; returns the largest value of all, infinity when there is a NaN.
float scale_keys(const std::uint8_t* const* rows, int count, int padded, float* scales) {
  float largest = 0.0F;
  for (int group = 0; group * kKvGroup < padded; ++group) {
    const int last = padded < (group + 1) * kKvGroup ? padded : (group + 1) * kKvGroup;
    for (int key = 0; key < count; ++key) {
      __m512i most = _mm512_setzero_si512();
      for (int d = group * kKvGroup; d < last; d += 32) {
        most = _mm512_max_epu16(most, magnitudes(rows[key] + 2 * d));
      }
      const float maximum = largest_bf16(most);
      largest = maximum > largest ? maximum : largest;
      largest = maximum == maximum ? largest : __builtin_inff();
      scales[group * kChunk + key] = maximum / static_cast<float>(kKeyLimit);
    }
  }
  return largest;
}

// K as pairs of values: `pairs(key, d)` gives the pairs of 32 values from d on as int16.
template <typename Pairs>
inline void pack_keys(int count, int padded, std::int16_t* keys, Pairs&& pairs) {
  for (int first = 0; first < count; first += 16) {
    std::int16_t* to = keys + static_cast<std::ptrdiff_t>(first) * padded;
    for (int d = 0; d < padded; d += 32) {
      __m512i x[16];
      unroll<16>([&](auto i) KVIST_LAMBDA { x[i] = pairs(first + i, d); });
      transpose16(x);
      unroll<16>([&](auto i) KVIST_LAMBDA { _mm512_storeu_si512(to + (d / 2 + i) * 32, x[i]); });
    }
  }
}

void pack_keys_raw16(const std::uint8_t* const* rows, int count, int padded, const float* scales, std::int16_t* keys) {
  alignas(64) float inverse[kMaxGroups * kChunk];
  for (int group = 0; group * kKvGroup < padded; ++group) {
    for (int i = group * kChunk; i < group * kChunk + count; i += kLanes) {
      _mm512_store_ps(inverse + i, inverse_of(_mm512_load_ps(scales + i), 1.0F));
    }
  }
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  pack_keys(count, padded, keys, [&](int key, int d) KVIST_LAMBDA {
    const __m512i x = load(rows[key] + 2 * d);
    const __m512 scale = _mm512_set1_ps(inverse[d / kKvGroup * kChunk + key]);
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(x, upper));
    return join(_mm512_cvtps_epi32(_mm512_mul_ps(even, scale)), _mm512_cvtps_epi32(_mm512_mul_ps(odd, scale)));
  });
}

void pack_keys_int8(const std::uint8_t* const* rows, int count, int padded, std::int16_t* keys) {
  pack_keys(count, padded, keys, [&](int key, int d) KVIST_LAMBDA {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[key] + d)));
  });
}

// float32 [key / 16][d][16].
void pack_keys_float(const std::uint8_t* const* rows, int count, int padded, float* keys) {
  for (int first = 0; first < count; first += 16) {
    for (int d = 0; d < padded; d += 16) {
      __m512i x[16];
      unroll<16>([&](auto i) KVIST_LAMBDA { x[i] = _mm512_castps_si512(widen_bf16(rows[first + i] + 2 * d)); });
      transpose16(x);
      float* const to = keys + static_cast<std::ptrdiff_t>(first) * padded + d * 16;
      unroll<16>([&](auto i) KVIST_LAMBDA { _mm512_storeu_si512(to + i * 16, x[i]); });
    }
  }
}

void pack_values_raw16(const std::uint8_t* const* rows, int count, int padded, float* scales, std::int16_t* values) {
  for (int d = 0; d < padded; d += 32) {
    __m512i most = _mm512_setzero_si512();
    for (int key = 0; key < count; ++key) {
      most = _mm512_max_epu16(most, magnitudes(rows[key] + 2 * d));
    }
    alignas(64) std::uint16_t columns[32];
    _mm512_store_si512(columns, most);
    unroll<2>([&](auto half) KVIST_LAMBDA {
      const int first = d + 16 * half;
      const __m512 maximum = widen_bf16(columns + 16 * half);
      _mm512_store_ps(scales + first, _mm512_div_ps(maximum, _mm512_set1_ps(static_cast<float>(kValueLimit))));
      const __m512 inverse = inverse_of(maximum, static_cast<float>(kValueLimit));
      std::int16_t* to = values + static_cast<std::ptrdiff_t>(first) * kChunk;
      for (int key = 0; key < count; key += 2, to += 32) {
        const __m512 one = _mm512_mul_ps(widen_bf16(rows[key] + 2 * first), inverse);
        const __m512 two = _mm512_mul_ps(widen_bf16(rows[key + 1] + 2 * first), inverse);
        _mm512_storeu_si512(to, join(_mm512_cvtps_epi32(one), _mm512_cvtps_epi32(two)));
      }
    });
  }
}

void pack_values_int8(const std::uint8_t* const* rows, int count, int padded, std::int16_t* values) {
  for (int d = 0; d < padded; d += 16) {
    std::int16_t* to = values + static_cast<std::ptrdiff_t>(d) * kChunk;
    for (int key = 0; key < count; key += 2, to += 32) {
      const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[key] + d));
      const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[key + 1] + d));
      const __m256i pairs = _mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b));
      _mm512_storeu_si512(to, _mm512_cvtepi8_epi16(pairs));
    }
  }
}

// The sums of up to 12 rows and two vectors of columns, on their way from a product to what is done with them.
struct Sums {
  alignas(64) std::int32_t lanes[kStripRows][2][kLanes];
};

// kRows rows of pairs against two vectors of columns of pairs, [pairs][16][2], `second` apart. Each step loads 2 vectors
// and broadcasts kRows pairs for 2 * kRows products; a function of its own, so that all sums stay in registers. The
// number of pairs is a multiple of kSteps.
template <int kRows>
[[gnu::noinline]] void multiply(const std::int16_t* rows, std::ptrdiff_t stride, const std::int16_t* columns,
                                std::ptrdiff_t second, int pairs, Sums& out) {
  __m512i sums[kRows][2];
  unroll<kRows>([&](auto r) KVIST_LAMBDA { sums[r][0] = sums[r][1] = _mm512_setzero_si512(); });
  RowPointers<std::int16_t, kRows> x(rows, stride);
  for (int p = 0; p < pairs; p += kSteps) {
    repeat<kSteps>([&](auto step) KVIST_LAMBDA {
      const __m512i c0 = load(columns + 32 * step);
      const __m512i c1 = load(columns + second + 32 * step);
      unroll<kRows>([&](auto r) KVIST_LAMBDA {
        const __m512i both = broadcast_bytes4(x.row(r) + 2 * step);
        sums[r][0] = _mm512_dpwssd_epi32(sums[r][0], c0, both);
        sums[r][1] = _mm512_dpwssd_epi32(sums[r][1], c1, both);
      });
    });
    x.advance(2 * kSteps);
    columns += 32 * kSteps;
  }
  unroll<kRows>([&](auto r) KVIST_LAMBDA {
    _mm512_store_si512(out.lanes[r][0], sums[r][0]);
    _mm512_store_si512(out.lanes[r][1], sums[r][1]);
  });
}

// The same in float32: columns are [depth][16], results scores of a strip.
template <int kRows>
[[gnu::noinline]] void multiply(const float* rows, std::ptrdiff_t stride, const float* columns, std::ptrdiff_t second,
                                int depth, float (*scores)[kChunk]) {
  __m512 sums[kRows][2];
  unroll<kRows>([&](auto r) KVIST_LAMBDA { sums[r][0] = sums[r][1] = _mm512_setzero_ps(); });
  RowPointers<float, kRows> x(rows, stride);
  for (int d = 0; d < depth; ++d) {
    const __m512 c0 = _mm512_loadu_ps(columns);
    const __m512 c1 = _mm512_loadu_ps(columns + second);
    unroll<kRows>([&](auto r) KVIST_LAMBDA {
      const __m512 value = broadcast_float(x.row(r));
      sums[r][0] = _mm512_fmadd_ps(value, c0, sums[r][0]);
      sums[r][1] = _mm512_fmadd_ps(value, c1, sums[r][1]);
    });
    x.advance(1);
    columns += 16;
  }
  unroll<kRows>([&](auto r) KVIST_LAMBDA {
    _mm512_storeu_ps(scores[r], sums[r][0]);
    _mm512_storeu_ps(scores[r] + 16, sums[r][1]);
  });
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
  const std::ptrdiff_t second = 16 * padded;  // from the columns of 16 keys to those of the next 16
  Sums sums;
  for (int key = 0; key < num_keys; key += kKeyStep) {
    if (tile.in_float) {
      auto* const scores = reinterpret_cast<float (*)[kChunk]>(&chunk.scores[0][key]);
      multiply<kRows>(b.float_queries + first_row * padded, padded,
                      reinterpret_cast<const float*>(b.keys) + key * padded, second, tile.padded, scores);
      continue;
    }
    for (int group = 0; group < tile.num_groups; ++group) {
      const int d = group * kKvGroup;
      const int width = tile.padded - d < kKvGroup ? tile.padded - d : kKvGroup;
      multiply<kRows>(b.queries + first_row * padded + d, padded, b.keys + key * padded + d * 16, second, width / 2,
                      sums);
      for (int c = 0; c < 2; ++c) {
        const __m512 scale = _mm512_load_ps(b.key_scales + group * kChunk + key + 16 * c);
        for (int r = 0; r < kRows; ++r) {
          float* const score = &chunk.scores[r][key + 16 * c];
          const __m512 sum = _mm512_cvtepi32_ps(load(sums.lanes[r][c]));
          _mm512_store_ps(score,
                          group == 0 ? _mm512_mul_ps(sum, scale) : _mm512_fmadd_ps(sum, scale, _mm512_load_ps(score)));
        }
      }
    }
  }
}

template <int kRows>
void add_values(const Tile& tile, int first_row, int num_keys, const StripChunk& chunk) {
  const Buffers& b = *tile.buffers;
  const std::ptrdiff_t padded = tile.padded;
  Sums sums;
  for (int d = 0; d < tile.padded; d += 32) {
    multiply<kRows>(&chunk.weights[tile.is_int8 ? d / kKvGroup : 0][0][0], kChunk, b.values + d * kChunk, 16 * kChunk,
                    num_keys / 2, sums);
    for (int c = 0; c < 2; ++c) {
      const __m512 scale = _mm512_load_ps(b.value_scales + d + 16 * c);
      for (int r = 0; r < kRows; ++r) {
        float* const sum = b.sums + (first_row + r) * padded + d + 16 * c;
        const __m512 added = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(load(sums.lanes[r][c])), scale),
                                           _mm512_set1_ps(chunk.new_factor[r]));
        const __m512 old_factor = _mm512_set1_ps(chunk.old_factor[r]);
        _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_load_ps(sum), old_factor, added));
      }
    }
  }
}

template <int kRows>
void run_strip(const Tile& tile, int first_row, int num_keys, bool masked, const float* factor, StripState& state,
               StripChunk& chunk) {
  score_strip<kRows>(tile, first_row, num_keys, chunk);
  if (tile.is_int8) {
    soften<Weights::kFixed15>(state, chunk, kRows, num_keys, masked, tile.softcap, factor, tile.buffers->value_factors,
                              tile.num_groups);
  } else {
    soften<Weights::kFixed13>(state, chunk, kRows, num_keys, masked, tile.softcap, factor, nullptr, 1);
  }
  add_values<kRows>(tile, first_row, num_keys, chunk);
}

using RunStrip = void (*)(const Tile&, int, int, bool, const float*, StripState&, StripChunk&);
// For each pair of rows.
constexpr RunStrip kRunStrip[kStripRows / 2] = {run_strip<2>, run_strip<4>,  run_strip<6>,
                                                run_strip<8>, run_strip<10>, run_strip<12>};

// Quantises a row of queries; returns its scale. `norm` becomes the sum of squares, `largest` the largest value.
float quantise_query(const float* x, int head_dim, int padded, int limit, std::int16_t* out, float& norm,
                     float& largest) {
  __m512 most = _mm512_setzero_ps();
  __m512 squares = _mm512_setzero_ps();
  for (int d = 0; d < head_dim; d += kLanes) {
    const __m512 value = _mm512_maskz_loadu_ps(first_lanes(head_dim - d), x + d);
    most = _mm512_max_ps(most, absolute(value));
    squares = _mm512_fmadd_ps(value, value, squares);
  }
  largest = reduce(most, Max{});
  norm = reduce(squares, Add{});
  const __m512 inverse = _mm512_set1_ps(largest > 0.0F ? static_cast<float>(limit) / largest : 0.0F);
  for (int d = 0; d < padded; d += kLanes) {
    const __m512 value = _mm512_maskz_loadu_ps(first_lanes(head_dim - d), x + d);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d),
                        _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(value, inverse))));
  }
  return largest / static_cast<float>(limit);
}

// Rows of D values, D not a multiple of 32, copied with zeros behind them.
void pad_rows(const std::uint8_t** rows, int count, std::size_t bytes, std::size_t padded_bytes, std::uint8_t* to) {
  for (int i = 0; i < count; ++i, to += padded_bytes) {
    __builtin_memcpy(to, rows[i], bytes);
    __builtin_memset(to + bytes, 0, padded_bytes - bytes);
    rows[i] = to;
  }
}

}  // namespace

std::size_t tile_scratch(const AttentionShape& shape, int num_rows) {
  Scratch scratch(nullptr);
  divide(scratch, num_rows * (shape.num_heads / shape.layout.num_kv_heads), round_up(shape.layout.head_dim, 32));
  return scratch.used();
}

void run_tile(const AttentionShape& shape, const AttentionItem& item, const KvLayer& layer, const AttentionRows& rows,
              std::uint8_t* scratch_bytes) {
  const KvLayout& layout = shape.layout;
  const int head_dim = layout.head_dim;
  const int padded = round_up(head_dim, 32);
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
      _mm512_store_ps(strip.factor, _mm512_setzero_ps());
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
  const auto all_values = static_cast<std::size_t>(round_up(num_rows, 2)) * static_cast<std::size_t>(padded);
  if (num_rows % 2 != 0) {
    __builtin_memset(b.queries + static_cast<std::ptrdiff_t>(num_rows) * padded, 0,
                     sizeof(std::int16_t) * static_cast<std::size_t>(padded));
    // Sees what the row before it does; its factor is 0 and its result goes nowhere.
    b.positions[num_rows] = b.positions[num_rows - 1];
  }
  __builtin_memset(b.sums, 0, sizeof(float) * all_values);
  alignas(64) float float_factor[kLanes];
  _mm512_store_ps(float_factor, _mm512_set1_ps(to_log2));
  bool has_float_queries = false;

  ChunkRows chunk_rows;
  StripChunk chunk;
  for (int begin = item.key_begin; begin < item.key_end; begin += kChunk) {
    const int count = item.key_end - begin < kChunk ? item.key_end - begin : kChunk;
    const int padded_count = round_up(count, kKeyStep);
    locate_rows<false>(layout, item, layer, begin, begin + count, chunk_rows);
    fill_rows(chunk_rows, count);
    if (is_int8) {
      for (int g = 0; g < tile.num_groups; ++g) {
        load_filled_scales(chunk_rows.k, count, head_dim, g, b.key_scales + g * kChunk);
        load_filled_scales(chunk_rows.v, count, head_dim, g, b.value_factors + g * kChunk);
        const float undo = normalise_scales(b.value_factors + g * kChunk, padded_count);
        for (int d = g * kKvGroup; d < padded && d < (g + 1) * kKvGroup; d += kLanes) {
          _mm512_store_ps(b.value_scales + d, _mm512_set1_ps(undo));
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
      _mm512_store_ps(float_factor, _mm512_set1_ps(largest < __builtin_inff() ? to_log2 : __builtin_nanf("")));
      if (tile.in_float) {
        pack_keys_float(chunk_rows.k, padded_count, padded, reinterpret_cast<float*>(b.keys));
      } else {
        pack_keys_raw16(chunk_rows.k, padded_count, padded, b.key_scales, b.keys);
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
      __builtin_memset(b.float_queries, 0, sizeof(float) * all_values);
      for (int row = 0; row < num_rows; ++row) {
        __builtin_memcpy(b.float_queries + static_cast<std::ptrdiff_t>(row) * padded, query_row(shape, item, rows, row),
                         sizeof(float) * static_cast<std::size_t>(head_dim));
      }
    }
    for (int first = 0; first < num_rows; first += kStripRows) {
      const int left = num_rows - first < kStripRows ? num_rows - first : kStripRows;
      const int count_rows = round_up(left, 2);
      const Seen seen = see(b.positions + first, count_rows, shape.window, begin, count, chunk);
      if (seen.last <= seen.first) {
        continue;
      }
      const int num_keys = round_up(seen.last, kKeyStep);
      Strip& strip = b.strips[first / kStripRows];
      kRunStrip[count_rows / 2 - 1](tile, first, num_keys, seen.masked || count % kKeyStep != 0,
                                    tile.in_float ? float_factor : strip.factor, strip.state, chunk);
    }
  }
  for (int row = 0; row < num_rows; ++row) {
    const StripState& state = b.strips[row / kStripRows].state;
    write_row(shape, item, rows, row, b.sums + static_cast<std::ptrdiff_t>(row) * padded,
              state.maxima[row % kStripRows], state.weights[row % kStripRows]);
  }
}

}  // namespace kvist::avx512
