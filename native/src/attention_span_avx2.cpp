// Attention over int4 and int3 records on AVX2, any number of stacked rows.
//
// A span at a time, 64 keys. Per row: the query times the steps of the channels becomes integers of 14 bits and a sign,
// a high and a low digit of base 128; scores; one softmax update; the weights times V's scales as integers; the weighted
// sum. Sums within a span are of integers and exact; between spans everything is float32.
//
//   scores   positions are lanes. vpmaddubsw of unsigned codes and one digit of four channels, in 16 bits over 8 groups
//            of channels (15 * 127 * 2 * 8 < 2^15), then in 32. Two vectors of positions and up to 6 rows at a time: 12
//            sums in registers.
//   values   channels are lanes. A byte shuffle looks the codes up among the levels. 15 bits of weight: the levels less
//            the lowest, even and odd positions apart in 16 bits, for vpmaddwd with pairs of weights (32767 * 252 * 64 <
//            2^31); up to 4 rows at a time. 7 bits: vpmaddubsw of weights and levels (128 * 126 * 2 < 2^15), up to 6.
//
// A span is first scored by the high digits. Scores are then off by E (standard deviation, from the size of a digit),
// and with weights of 7 bits a row's sum by 0.026 times the span's largest weight, both in units of V's deviation; what
// is rounded up and what down changes without a pattern, so that small weights do not vanish together. The variances of
// a row's sum are added up over its spans. While they are below 2.5 * 10^-7 of the square of the weight met so far, which only
// grows, the span is done so: most of a long context. Otherwise the low digits are added, and weights keep 15 bits.
//
// Memory: every line of a record once, the next record's asked for. More rows take more passes over a record, which is
// in the first-level cache by then.
//
// A step that is no number makes the row's scores NaN; a scale makes the sums of the rows that see its position NaN.
// int4 needs a D that is a multiple of 16, int3 of 32; the portable version reads the others.

#include <cmath>

#include "attention_avx2.h"
#include "kvist/kv_span.h"
#include "kvist/rowwise.h"

namespace kvist {
namespace {

constexpr int kScoreRows = 6;                     // at a time
constexpr int kAddRows = 4;                       // with weights of 15 bits
constexpr int kAddMinorRows = 6;                  // with 7 bits
constexpr float kAllowedVariance = 2.5e-7F;       // of a result, in units of the variance of V
constexpr float kShortWeights = 0.026F * 0.026F;  // variance by weights of 7 bits: 64 times (0.41 / 127)^2
constexpr int kGroupsIn16Bits = 8;
constexpr int kNumGroups = kSpanTokens / 4;  // of V

static_assert(kSpanTokens == kChunk);

inline __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

inline __m256i broadcast(const void* from) {
  std::int32_t word;
  __builtin_memcpy(&word, from, sizeof(word));
  return _mm256_set1_epi32(word);
}

inline void add_words_in_place(__m256i& sum, __m256i x) { asm volatile("vpaddw %1, %0, %0" : "+x"(sum) : "x"(x)); }

struct Buffers {
  float* queries;  // (rows, D) in the records' basis, in units of log2(e)
  float* offsets;  // (rows,) added to every score: what the keys' mean gives
  float* sums;     // (rows, D) in the records' basis
  std::int32_t* positions;
  StripState* states;
  float* variances;  // (rows,) of the sums, by rounding
  // Of a strip, W values a row: D, and zeros up to a multiple of 32.
  float* products;  // of the query and the steps
  std::int8_t* digits;
};

Buffers divide(Scratch& scratch, int head_dim, int stacked) {
  const auto rows = static_cast<std::size_t>(round_up(stacked, kLanes));
  const auto width = static_cast<std::size_t>(head_dim);
  Buffers b{};
  b.queries = scratch.take<float>(rows * width);
  b.offsets = scratch.take<float>(rows);
  b.sums = scratch.take<float>(rows * width);
  b.positions = scratch.take<std::int32_t>(rows);
  b.states = scratch.take<StripState>(rows / kLanes);
  b.variances = scratch.take<float>(rows);
  b.products = scratch.take<float>(kLanes * static_cast<std::size_t>(round_up(head_dim, 32)));
  b.digits = scratch.take<std::int8_t>(kLanes * static_cast<std::size_t>(round_up(head_dim, 32)));
  return b;
}

// Eight bytes of e5m3 as float32, where none is 255: their exponents are 107 too small when the bits are moved to their
// places.
inline __m256 load_e5m3_numbers(const std::uint8_t* from) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(bytes, 20)), _mm256_set1_ps(0x1p107F));
}

// The same of any bytes. No number has low bits, which exp2_ps could not do with.
inline __m256 load_e5m3(const std::uint8_t* from) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  const __m256i is_nan = _mm256_cmpeq_epi32(bytes, _mm256_set1_epi32(kE5m3Nan));
  return _mm256_or_ps(load_e5m3_numbers(from),
                      _mm256_castsi256_ps(_mm256_and_si256(is_nan, _mm256_set1_epi32(0x7fc00000))));
}

inline std::uint8_t max_lanes_u8(__m256i v) {
  const __m128i half = _mm_max_epu8(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  const __m128i below = _mm_xor_si128(half, _mm_set1_epi8(-1));  // vphminposuw finds the least of 8 words
  const __m128i words = _mm_min_epu8(below, _mm_srli_epi16(below, 8));
  return static_cast<std::uint8_t>(~_mm_cvtsi128_si32(_mm_minpos_epu16(words)));
}

inline float sum_lanes(__m256 v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline std::int32_t sum_lanes(__m256i v) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return _mm_cvtsi128_si32(half);
}

inline float max_lanes(__m256 v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// What a span has for all rows.
struct SpanNumbers {
  alignas(32) float steps[kMaxHeadDim];
  alignas(32) float middles[kMaxHeadDim];  // of the codes, in steps: (2^bits - 1) / 2 more than half the zero point
  alignas(32) float value_factors[kSpanTokens];  // scales over the largest, times kWeight15
  float undo;                                    // the largest scale over kWeight15
  std::uint64_t nan_scales;                      // bit t: the scale of position t is no number
};

inline void read_numbers(const std::uint8_t* record, const KvRecordLayout& parts, int head_dim, float middle,
                         SpanNumbers& span) {
  for (int d = 0; d < head_dim; d += 8) {
    const __m128i zeros = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(record + parts.zeros + d));
    _mm256_store_ps(span.steps + d, load_e5m3(record + d));
    _mm256_store_ps(span.middles + d, _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(zeros)),
                                                      _mm256_set1_ps(0.5F), _mm256_set1_ps(middle)));
  }
  // As bytes they are in the order of the numbers.
  const __m256i nan = _mm256_set1_epi8(static_cast<char>(kE5m3Nan));
  const __m256i first = load(record + parts.scales);
  const __m256i last = load(record + parts.scales + 32);
  const __m256i first_nan = _mm256_cmpeq_epi8(first, nan);
  const __m256i last_nan = _mm256_cmpeq_epi8(last, nan);
  span.nan_scales = static_cast<std::uint32_t>(_mm256_movemask_epi8(first_nan)) |
                    std::uint64_t{static_cast<std::uint32_t>(_mm256_movemask_epi8(last_nan))} << 32;
  alignas(32) std::uint8_t scales[kSpanTokens];
  _mm256_store_si256(reinterpret_cast<__m256i*>(scales), _mm256_andnot_si256(first_nan, first));
  _mm256_store_si256(reinterpret_cast<__m256i*>(scales + 32), _mm256_andnot_si256(last_nan, last));
  const float largest = e5m3_to_f32(
      max_lanes_u8(_mm256_max_epu8(_mm256_andnot_si256(first_nan, first), _mm256_andnot_si256(last_nan, last))));
  const __m256 factor = _mm256_set1_ps(largest > 0.0F ? static_cast<float>(kWeight15) / largest : 0.0F);
  for (int t = 0; t < kSpanTokens; t += 8) {
    _mm256_store_ps(span.value_factors + t, _mm256_mul_ps(load_e5m3_numbers(scales + t), factor));
  }
  span.undo = largest / static_cast<float>(kWeight15);
}

// The rows of a strip against a span: what the products of digits and codes are multiplied by, and what is added.
struct RowFactors {
  alignas(32) float factor[kLanes];
  alignas(32) float base[kLanes];
};

// Queries times steps, by row of a strip.
struct RowProducts {
  __m256 unit;  // of a high digit; 0 where nothing can be said in units
  __m256 base;  // the score of a key whose codes are all in the middle
};

inline RowProducts multiply_steps(const float* queries, const SpanNumbers& span, int num_rows, int head_dim, int width,
                                  float* products) {
  __m256 most[kLanes];
  __m256 base[kLanes];
  unroll<kLanes>([&](auto r) __attribute__((always_inline)) {
    most[r()] = _mm256_setzero_ps();
    base[r()] = _mm256_setzero_ps();
  });
  for (int row = 0; row < num_rows; ++row) {
    const float* const query = queries + static_cast<std::ptrdiff_t>(row) * head_dim;
    float* const to = products + static_cast<std::ptrdiff_t>(row) * width;
    __m256 row_most = _mm256_setzero_ps();
    __m256 row_base = _mm256_setzero_ps();
    for (int d = 0; d < head_dim; d += 16) {
      unroll<2>([&](auto i) __attribute__((always_inline)) {
        const __m256 u = _mm256_mul_ps(_mm256_load_ps(query + d + 8 * i()), _mm256_load_ps(span.steps + d + 8 * i()));
        _mm256_store_ps(to + d + 8 * i(), u);
        row_most = _mm256_max_ps(row_most, _mm256_andnot_ps(_mm256_set1_ps(-0.0F), u));
        row_base = _mm256_fmadd_ps(u, _mm256_load_ps(span.middles + d + 8 * i()), row_base);
      });
    }
    most[row] = row_most;
    base[row] = row_base;
  }
  const __m256 largest = max_of_each(most);
  // Products so small that the inverse of a unit overflows count as 0.
  const __m256 is_small = _mm256_cmp_ps(largest, _mm256_set1_ps(1e-30F), _CMP_LT_OQ);
  return {_mm256_andnot_ps(is_small, _mm256_mul_ps(largest, _mm256_set1_ps(1.0F / 127.0F))), sum_of_each(base)};
}

enum class Digit { kHigh, kLow };

// Writes one digit of each product and returns the sums of the rows' digits. The high ones are there when the low ones
// are wanted.
template <Digit kDigit>
inline __m256 take_digits(const float* products, __m256 unit, int num_rows, int width, std::int8_t* digits) {
  const __m256 one = _mm256_set1_ps(kDigit == Digit::kHigh ? 1.0F : 128.0F);
  const __m256 is_zero = _mm256_cmp_ps(unit, _mm256_setzero_ps(), _CMP_EQ_OQ);
  alignas(32) float units[kLanes];
  alignas(32) float scales[kLanes];
  _mm256_store_ps(units, unit);
  _mm256_store_ps(scales, _mm256_mul_ps(one, _mm256_andnot_ps(is_zero, _mm256_div_ps(_mm256_set1_ps(1.0F), unit))));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256 sums[kLanes];
  unroll<kLanes>([&](auto r) __attribute__((always_inline)) { sums[r()] = _mm256_setzero_ps(); });
  for (int row = 0; row < num_rows; ++row, products += width, digits += width) {
    const __m256 scale = _mm256_set1_ps(scales[row]);
    const auto integers = [&](int d) __attribute__((always_inline)) {
      const __m256 u = _mm256_load_ps(products + d);
      if constexpr (kDigit == Digit::kHigh) {
        return _mm256_cvtps_epi32(_mm256_mul_ps(u, scale));
      } else {
        const __m128i high = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(digits + d));
        const __m256 rest =
            _mm256_fnmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)), _mm256_set1_ps(units[row]), u);
        return _mm256_cvtps_epi32(_mm256_mul_ps(rest, scale));
      }
    };
    __m256i sum = _mm256_setzero_si256();
    for (int d = 0; d < width; d += 32) {
      const __m256i first = _mm256_packs_epi32(integers(d), integers(d + 8));
      const __m256i last = _mm256_packs_epi32(integers(d + 16), integers(d + 24));
      const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, last), order);
      _mm256_store_si256(reinterpret_cast<__m256i*>(digits + d), bytes);
      sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes));
    }
    sums[row] = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
  }
  return sum_of_each(sums);  // of integers, exact
}

// Codes of two vectors of lanes out of one group.
struct CodePair {
  __m256i first;
  __m256i second;
};

// int4: the low and the high halves of 32 bytes.
[[gnu::always_inline]] inline CodePair split_int4(const std::uint8_t* from) {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i x = load(from);
  asm("" : "+x"(x));  // loaded once
  return {_mm256_and_si256(x, mask), _mm256_and_si256(_mm256_srli_epi16(x, 4), mask)};
}

template <int kBit>
inline __m256i third_bit(__m256i x) {
  const __m256i mask = _mm256_set1_epi8(4);
  if constexpr (kBit < 2) {
    return _mm256_and_si256(_mm256_slli_epi16(x, 2 - kBit), mask);
  } else {
    return _mm256_and_si256(_mm256_srli_epi16(x, kBit - 2), mask);
  }
}

// int3: kPlace is where the codes are among the four of a byte of low bits, kBit among the eight of a byte of high ones.
template <int kPlace, int kBit>
inline __m256i join_int3(__m256i low, __m256i high) {
  const __m256i two = _mm256_and_si256(_mm256_srli_epi16(low, 2 * kPlace), _mm256_set1_epi8(3));
  return _mm256_or_si256(two, third_bit<kBit>(high));
}

// The products of kGroups groups of channels, in 16 bits: two vectors of positions for each row.
template <int kRows, int kGroups, typename Split>
[[gnu::always_inline]] inline void multiply_digits(const Split& split, int group_bytes, const std::uint8_t* codes,
                                                   const std::int8_t* digits, int width, Ahead& ahead,
                                                   __m256i (&sums)[kRows][2]) {
  unroll<kGroups>([&](auto group) __attribute__((always_inline)) {
    if constexpr (group() % 2 == 0) {
      ahead.ask();
    }
    const CodePair pair = split(codes + group() * group_bytes);
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      const __m256i u = broadcast(digits + r() * width + 4 * group());
      if constexpr (group() == 0) {
        sums[r()][0] = _mm256_maddubs_epi16(pair.first, u);
        sums[r()][1] = _mm256_maddubs_epi16(pair.second, u);
      } else {
        add_words_in_place(sums[r()][0], _mm256_maddubs_epi16(pair.first, u));
        add_words_in_place(sums[r()][1], _mm256_maddubs_epi16(pair.second, u));
      }
    });
  });
}

// Scores of kRows rows by one digit: two vectors of positions from `split` at the places `first` and `second`. The high
// digit's are written, the low one's added to them.
template <int kRows, Digit kDigit, typename Split>
[[gnu::always_inline]] inline void score_pair(const Split& split, int group_bytes, const std::uint8_t* codes,
                                              const std::int8_t* digits, int head_dim, const RowFactors& factors,
                                              int first_row, int first, int second, Ahead& ahead, float* scores) {
  const int num_groups = head_dim / 4;
  const int width = round_up(head_dim, 32);
  for (int start = 0; start < num_groups; start += kGroupsIn16Bits) {
    __m256i sums[kRows][2];
    const std::uint8_t* const at = codes + static_cast<std::ptrdiff_t>(start) * group_bytes;
    if (num_groups - start >= kGroupsIn16Bits) {
      multiply_digits<kRows, kGroupsIn16Bits>(split, group_bytes, at, digits + 4 * start, width, ahead, sums);
    } else {
      multiply_digits<kRows, kGroupsIn16Bits / 2>(split, group_bytes, at, digits + 4 * start, width, ahead, sums);
    }
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      const __m256 factor = _mm256_set1_ps(factors.factor[first_row + r()]);
      const __m256 base = _mm256_set1_ps(factors.base[first_row + r()]);
      unroll<2>([&](auto i) __attribute__((always_inline)) {
        const __m256 sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(sums[r()][i()], _mm256_set1_epi16(1)));
        float* const to = scores + r() * kChunk + (i() == 0 ? first : second);
        if (start != 0) {
          _mm256_store_ps(to, _mm256_fmadd_ps(sum, factor, _mm256_load_ps(to)));
        } else if constexpr (kDigit == Digit::kHigh) {
          _mm256_store_ps(to, _mm256_fmadd_ps(sum, factor, base));
        } else {
          _mm256_store_ps(to, _mm256_fmadd_ps(sum, factor, _mm256_add_ps(base, _mm256_load_ps(to))));
        }
      });
    });
  }
}

template <int kBits, int kRows, Digit kDigit>
[[gnu::noinline]] void score_span(const std::uint8_t* codes, const std::int8_t* digits, int head_dim,
                                  const RowFactors& factors, int first_row, Ahead ahead, float* scores) {
  ahead.step *= 2;
  if constexpr (kBits == 4) {
    for (int i = 0; i < 4; ++i) {
      score_pair<kRows, kDigit>(split_int4, 128, codes + 32 * i, digits, head_dim, factors, first_row, 8 * i,
                                32 + 8 * i, ahead, scores);
    }
  } else {
    unroll<4>([&](auto i) __attribute__((always_inline)) {
      constexpr int part = i() % 2;  // of the low bits: 16 positions of four in turn
      constexpr int place = 2 * (i() / 2);
      constexpr int vector = part + 2 * place;
      const auto split = [](const std::uint8_t* from) __attribute__((always_inline)) {
        const __m256i low = load(from + 32 * part);
        const __m256i high = load(from + 64);
        return CodePair{join_int3<place, vector>(low, high), join_int3<place + 1, vector + 2>(low, high)};
      };
      score_pair<kRows, kDigit>(split, 96, codes, digits, head_dim, factors, first_row, 8 * vector, 8 * vector + 16,
                                ahead, scores);
    });
  }
}

// A row's weights in the order in which `add_pair` meets them: the even positions of each four, then the odd ones.
// Returns their sum.
inline std::int32_t order_weights(std::int16_t* weights) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7,
                                         8, 9, 12, 13, 10, 11, 14, 15);
  __m256i sum = _mm256_setzero_si256();
  for (int t = 0; t < kSpanTokens; t += 16) {
    const __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(weights + t));
    _mm256_store_si256(reinterpret_cast<__m256i*>(weights + t), _mm256_shuffle_epi8(x, order));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x, _mm256_set1_epi16(1)));
  }
  return sum_lanes(sum);
}

// The weights over 256, as bytes in the first half of where they were. What is rounded up and what down changes from
// position to position, without a pattern that a sum over positions would keep.
inline void shorten_weights(std::int16_t* weights) {
  const __m256i first = _mm256_setr_epi16(3, 161, 63, 222, 124, 26, 184, 86, 244, 147, 49, 207, 109, 11, 169, 72);
  for (int t = 0; t < kSpanTokens; t += 32) {
    const __m256i step = _mm256_set1_epi16(static_cast<std::int16_t>(7 * t / 4));
    const __m256i low = _mm256_and_si256(_mm256_add_epi16(first, step), _mm256_set1_epi16(255));
    const __m256i high = _mm256_sub_epi16(_mm256_set1_epi16(255), low);
    const __m256i a = _mm256_load_si256(reinterpret_cast<const __m256i*>(weights + t));
    const __m256i b = _mm256_load_si256(reinterpret_cast<const __m256i*>(weights + t + 16));
    const __m256i bytes = _mm256_packus_epi16(_mm256_srli_epi16(_mm256_add_epi16(a, low), 8),
                                              _mm256_srli_epi16(_mm256_add_epi16(b, high), 8));
    _mm256_store_si256(reinterpret_cast<__m256i*>(weights + t / 2), _mm256_permute4x64_epi64(bytes, 0xd8));
  }
}

// The weights of up to as many rows as a pass has against a span.
struct RowWeights {
  const std::int16_t* weights;  // ordered or shortened; the next row's are kChunk further
  const std::int32_t* sums;     // of the ordered ones
  const float* old_factor;      // of the sums so far
  const float* new_factor;      // of the integers
};

enum class Precision { kFull, kMinor };

// Adds the weighted levels of two vectors of channels to the sums of kRows rows.
template <int kRows, Precision kPrecision, typename Split>
[[gnu::always_inline]] inline void add_pair(const Split& split, int group_bytes, __m256i levels, std::int32_t lowest,
                                            const std::uint8_t* codes, const RowWeights& rows, int head_dim, int first,
                                            int second, Ahead& ahead, float* all_sums) {
  __m256i sums[kRows][2];
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    if constexpr (kPrecision == Precision::kFull) {
      // The levels in the table are higher by -lowest.
      sums[r()][0] = _mm256_set1_epi32(rows.sums[r()] * lowest);
      sums[r()][1] = _mm256_set1_epi32(rows.sums[r()] * lowest);
    } else {
      sums[r()][0] = _mm256_setzero_si256();
      sums[r()][1] = _mm256_setzero_si256();
    }
  });
  constexpr int kWeightBytes = kPrecision == Precision::kFull ? 8 : 4;  // of a group
  const auto* weights = reinterpret_cast<const std::uint8_t*>(rows.weights);
  constexpr int kRowBytes = kChunk * static_cast<int>(sizeof(std::int16_t));
  const auto add_group = [&](const std::uint8_t* from,
                             const std::uint8_t* weight_bytes) __attribute__((always_inline)) {
    const CodePair pair = split(from);
    const __m256i one = _mm256_shuffle_epi8(levels, pair.first);
    const __m256i two = _mm256_shuffle_epi8(levels, pair.second);
    if constexpr (kPrecision == Precision::kFull) {
      const __m256i even_one = _mm256_and_si256(one, _mm256_set1_epi16(255));
      const __m256i even_two = _mm256_and_si256(two, _mm256_set1_epi16(255));
      const __m256i odd_one = _mm256_srli_epi16(one, 8);
      const __m256i odd_two = _mm256_srli_epi16(two, 8);
      unroll<kRows>([&](auto r) __attribute__((always_inline)) {
        const __m256i even = broadcast(weight_bytes + r() * kRowBytes);
        add_in_place(sums[r()][0], _mm256_madd_epi16(even_one, even));
        add_in_place(sums[r()][1], _mm256_madd_epi16(even_two, even));
        const __m256i odd = broadcast(weight_bytes + r() * kRowBytes + 4);
        add_in_place(sums[r()][0], _mm256_madd_epi16(odd_one, odd));
        add_in_place(sums[r()][1], _mm256_madd_epi16(odd_two, odd));
      });
    } else {
      unroll<kRows>([&](auto r) __attribute__((always_inline)) {
        const __m256i weight = broadcast(weight_bytes + r() * kRowBytes);
        const __m256i ones = _mm256_set1_epi16(1);
        add_in_place(sums[r()][0], _mm256_madd_epi16(_mm256_maddubs_epi16(weight, one), ones));
        add_in_place(sums[r()][1], _mm256_madd_epi16(_mm256_maddubs_epi16(weight, two), ones));
      });
    }
  };
  for (int group = 0; group < kNumGroups; group += 2, codes += 2 * group_bytes, weights += 2 * kWeightBytes) {
    ahead.ask();
    add_group(codes, weights);
    add_group(codes + group_bytes, weights + kWeightBytes);
  }
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    const __m256 shrink = _mm256_set1_ps(rows.old_factor[r()]);
    const __m256 scale = _mm256_set1_ps(rows.new_factor[r()]);
    unroll<2>([&](auto i) __attribute__((always_inline)) {
      float* const to = all_sums + r() * head_dim + (i() == 0 ? first : second);
      const __m256 old = _mm256_mul_ps(_mm256_load_ps(to), shrink);
      _mm256_store_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r()][i()]), scale, old));
    });
  });
}

// The levels for codes of both halves of a vector: less the lowest, or as they are.
template <int kBits, Precision kPrecision>
inline __m256i level_table() {
  alignas(16) std::int8_t table[16] = {};
  for (int code = 0; code < 1 << kBits; ++code) {
    const int level = kBits == 4 ? kInt4Levels[code] : kInt3Levels[code % 8];
    const int lowest = kBits == 4 ? kInt4Levels[0] : kInt3Levels[0];
    table[code] = static_cast<std::int8_t>(kPrecision == Precision::kFull ? level - lowest : level);
  }
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}

template <int kBits, int kRows, Precision kPrecision>
[[gnu::noinline]] void add_span(const std::uint8_t* codes, const RowWeights& rows, int head_dim, Ahead ahead,
                                float* sums) {
  const __m256i levels = level_table<kBits, kPrecision>();
  ahead.step *= 2;
  if constexpr (kBits == 4) {
    for (int lane = 0; lane < head_dim / 2; lane += 8) {
      add_pair<kRows, kPrecision>(split_int4, 2 * head_dim, levels, kInt4Levels[0], codes + 4 * lane, rows, head_dim,
                                  lane, lane + head_dim / 2, ahead, sums);
    }
  } else {
    const int quarter = head_dim / 4;
    const int eighth = head_dim / 8;
    for (int lane = 0; lane < quarter; lane += 8) {
      // Four lanes each: those of the second eighth of a quarter have the next bit.
      const int low_half = lane / eighth;
      const int high_half = (lane + 4) / eighth;
      const int low_at = head_dim + 4 * (lane - low_half * eighth);
      const int high_at = head_dim + 4 * (lane + 4 - high_half * eighth);
      const __m256i counts =
          _mm256_setr_epi32(low_half, low_half, low_half, low_half, high_half, high_half, high_half, high_half);
      unroll<2>([&](auto i) __attribute__((always_inline)) {
        constexpr int place = 2 * i();
        const auto split = [&](const std::uint8_t* from) __attribute__((always_inline)) {
          const __m256i low = load(from + 4 * lane);
          const __m128i* const one = reinterpret_cast<const __m128i*>(from + low_at);
          const __m128i* const two = reinterpret_cast<const __m128i*>(from + high_at);
          const __m256i high = _mm256_srlv_epi32(
              _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(one)), _mm_loadu_si128(two), 1), counts);
          return CodePair{join_int3<place, 2 * place>(low, high), join_int3<place + 1, 2 * place + 2>(low, high)};
        };
        add_pair<kRows, kPrecision>(split, 3 * head_dim / 2, levels, kInt3Levels[0], codes, rows, head_dim,
                                    place * quarter + lane, (place + 1) * quarter + lane, ahead, sums);
      });
    }
  }
}

// The query in the records' basis, times `scale`. Returns its product with the keys' mean.
float turn_query(const float* from, const KvTransforms& at, const HeadTurn& turn, int head_dim, float scale,
                 float* query) {
  const RowwiseKernels& rowwise = rowwise_kernels(Isa::kAvx2);
  __builtin_memcpy(query, from, static_cast<std::size_t>(head_dim) * sizeof(float));
  rowwise.turn_back(query, turn);
  __m256 offset = _mm256_setzero_ps();
  for (int d = 0; d < head_dim; d += 8) {
    const __m256 q = _mm256_mul_ps(_mm256_load_ps(query + d), _mm256_set1_ps(scale));
    offset = _mm256_fmadd_ps(q, _mm256_loadu_ps(at.mean + d), offset);
    _mm256_store_ps(query + d, _mm256_div_ps(q, _mm256_loadu_ps(at.key_balance + d)));
  }
  rowwise.turn(query, turn);
  return sum_lanes(offset);
}

// Brings a row's sums to the model's basis.
void turn_sums_back(const float* balance, const HeadTurn& turn, int head_dim, float* sums) {
  rowwise_kernels(Isa::kAvx2).turn_back(sums, turn);
  for (int d = 0; d < head_dim; d += 8) {
    _mm256_store_ps(sums + d, _mm256_div_ps(_mm256_load_ps(sums + d), _mm256_loadu_ps(balance + d)));
  }
}

// Sums of rows that see a position whose scale is no number are none.
[[gnu::noinline]] void spoil_rows(std::uint64_t nan_scales, int num_rows, StripChunk& chunk) {
  for (int r = 0; r < num_rows; ++r) {
    for (int t = chunk.first_key[r]; t < chunk.last_key[r]; ++t) {
      if ((nan_scales >> t & 1U) != 0) {
        chunk.new_factor[r] = __builtin_nanf("");
      }
    }
  }
}

// After the softmax of a chunk: whether all rows of a strip can do without the low digits and with 7 bits of weight. The
// variances of the rows become what they are then. `before` is the state before the chunk, `errors` the deviation of
// each row's scores.
inline bool is_minor(const StripState& before, const StripState& state, const StripChunk& chunk, int num_rows,
                     const float* errors, float* variances) {
  const __m256 weights = _mm256_load_ps(state.weights);
  const __m256 shrink = _mm256_load_ps(chunk.old_factor);
  const __m256 largest = _mm256_load_ps(chunk.new_factor);
  const __m256 added = _mm256_fnmadd_ps(_mm256_load_ps(before.weights), shrink, weights);
  const __m256 error = _mm256_load_ps(errors);
  // The squares of the weights sum to less than the largest times their sum.
  const __m256 by_scores = _mm256_mul_ps(added, _mm256_mul_ps(error, error));
  const __m256 by_weights = _mm256_mul_ps(largest, _mm256_set1_ps(kShortWeights));
  const __m256 old = _mm256_mul_ps(_mm256_load_ps(variances), _mm256_mul_ps(shrink, shrink));
  const __m256 sum = _mm256_fmadd_ps(largest, _mm256_add_ps(by_scores, by_weights), old);
  const __m256 allowed = _mm256_mul_ps(_mm256_mul_ps(weights, weights), _mm256_set1_ps(kAllowedVariance));
  const int minor = _mm256_movemask_ps(_mm256_cmp_ps(sum, allowed, _CMP_LE_OQ));
  const bool all = (~minor & ((1 << num_rows) - 1)) == 0;
  _mm256_store_ps(variances, all ? sum : old);
  return all;
}

template <int kBits>
void run_spans(const AttentionShape& shape, const AttentionItem& item, const KvLayer& layer, int stacked,
               const Buffers& b) {
  const KvLayout& layout = shape.layout;
  const int head_dim = layout.head_dim;
  const int width = round_up(head_dim, 32);
  constexpr float kMiddle = static_cast<float>((1 << kBits) - 1) * 0.5F;
  // In nats: a rounded digit is off by 0.29 units, and a code is 0.29 times their number away from the middle.
  const float error_per_unit =
      0.29F * 0.29F * static_cast<float>(1 << kBits) * std::sqrt(static_cast<float>(head_dim)) / kLog2E;
  const std::int64_t record_bytes = kv_record_bytes(kBits, head_dim);
  const KvRecordLayout parts = kv_record_layout(kBits, head_dim);
  const auto record = [&](int span) {
    const int key = span * kSpanTokens;
    const int in_block = key % layout.block_size / kSpanTokens;
    return layer.base + item.block_offsets[key / layout.block_size] +
           (in_block * layout.num_kv_heads + item.kv_head) * record_bytes;
  };
  alignas(32) float units[kLanes];
  _mm256_store_ps(units, _mm256_set1_ps(1.0F));
  const Positions positions = range_of(item.positions, item.num_rows);
  SpanNumbers numbers;
  StripChunk chunk;
  const int last_span = ceil_div(item.key_end, kSpanTokens);
  for (int span = item.key_begin / kSpanTokens; span < last_span; ++span) {
    const std::uint8_t* const here = record(span);
    const std::uint8_t* const next = span + 1 < last_span ? record(span + 1) : nullptr;
    // Each half of the work has D steps and asks for half of the codes; the rest of a record is a few lines.
    constexpr std::int64_t kStep = 8 * kBits;
    const std::int64_t half_bytes = kStep * head_dim;
    for (std::int64_t offset = 2 * half_bytes; next != nullptr && offset < record_bytes; offset += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(next + offset), _MM_HINT_T0);
    }
    const int begin = span * kSpanTokens;
    const int count = item.key_end - begin < kSpanTokens ? item.key_end - begin : kSpanTokens;
    const int skipped = item.key_begin > begin ? item.key_begin - begin : 0;
    read_numbers(here, parts, head_dim, kMiddle, numbers);
    for (int strip = 0; strip < stacked; strip += kLanes) {
      const int num_rows = stacked - strip < kLanes ? stacked - strip : kLanes;
      Seen seen = positions.see_all(shape.window, begin, begin + count)
                      ? see_all(count, chunk)
                      : see(b.positions + strip, num_rows, shape.window, begin, count, chunk);
      for (int r = 0; r < num_rows && skipped > 0; ++r) {
        chunk.first_key[r] = chunk.first_key[r] < skipped ? skipped : chunk.first_key[r];
        seen.masked = true;
      }
      if (seen.last <= seen.first || seen.last <= skipped) {
        continue;
      }
      const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(strip) * head_dim;
      const auto ahead = [&](int first, std::int64_t from) {
        // Where there is nothing to ask for, for what is in the cache.
        const std::uint8_t* const asked = strip == 0 && first == 0 && next != nullptr ? next : here;
        return Ahead{reinterpret_cast<std::uintptr_t>(asked + from), kStep};
      };
      const RowProducts products = multiply_steps(b.queries + at, numbers, num_rows, head_dim, width, b.products);
      const __m256 sums = take_digits<Digit::kHigh>(b.products, products.unit, num_rows, width, b.digits);
      const __m256 middle = _mm256_set1_ps(kMiddle);
      RowFactors factors;
      _mm256_store_ps(factors.factor, products.unit);
      _mm256_store_ps(factors.base, _mm256_fnmadd_ps(_mm256_mul_ps(products.unit, middle), sums,
                                                     _mm256_add_ps(products.base, _mm256_load_ps(b.offsets + strip))));
      alignas(32) float errors[kLanes];
      _mm256_store_ps(errors, _mm256_mul_ps(products.unit, _mm256_set1_ps(error_per_unit)));
      for_passes<kScoreRows>(num_rows, [&](auto pass, int first) {
        score_span<kBits, pass(), Digit::kHigh>(here + parts.key_codes, b.digits + first * width, head_dim, factors,
                                                first, ahead(first, 0), chunk.scores[first]);
      });
      StripState& state = b.states[strip / kLanes];
      const StripState before = state;
      const auto soften = [&] {
        if (shape.softcap > 0.0F) {
          apply_softcap(chunk, num_rows, kSpanTokens / 8, units, shape.softcap);
        }
        if (seen.masked || count != kSpanTokens) {
          softmax_chunk<Weights::kFixed15, true>(state, chunk, num_rows, kSpanTokens / 8, units, numbers.value_factors,
                                                 1);
        } else {
          softmax_chunk<Weights::kFixed15, false>(state, chunk, num_rows, kSpanTokens / 8, units, numbers.value_factors,
                                                  1);
        }
      };
      bool minor = false;
      if (shape.softcap == 0.0F) {  // with a cap the low digits would come too late
        soften();
        minor = is_minor(before, state, chunk, num_rows, errors, b.variances + strip);
      }
      if (!minor) {
        const __m256 low_sums = take_digits<Digit::kLow>(b.products, products.unit, num_rows, width, b.digits);
        const __m256 unit = _mm256_mul_ps(products.unit, _mm256_set1_ps(1.0F / 128.0F));
        _mm256_store_ps(factors.factor, unit);
        _mm256_store_ps(factors.base, _mm256_mul_ps(_mm256_mul_ps(unit, _mm256_set1_ps(-kMiddle)), low_sums));
        for_passes<kScoreRows>(num_rows, [&](auto pass, int first) {
          score_span<kBits, pass(), Digit::kLow>(here + parts.key_codes, b.digits + first * width, head_dim, factors,
                                                 first, ahead(kLanes, 0), chunk.scores[first]);
        });
        state = before;
        soften();
      }
      std::int32_t weight_sums[kLanes];
      for (int r = 0; r < num_rows; ++r) {
        if (minor) {
          shorten_weights(chunk.weights[0][r]);
          chunk.new_factor[r] *= 256.0F * numbers.undo;
        } else {
          weight_sums[r] = order_weights(chunk.weights[0][r]);
          chunk.new_factor[r] *= numbers.undo;
        }
      }
      if (numbers.nan_scales != 0) {
        spoil_rows(numbers.nan_scales, num_rows, chunk);
      }
      const auto weights = [&](int first) {
        return RowWeights{chunk.weights[0][first], weight_sums + first, chunk.old_factor + first,
                          chunk.new_factor + first};
      };
      const std::uint8_t* const codes = here + parts.value_codes;
      if (minor) {
        for_passes<kAddMinorRows>(num_rows, [&](auto pass, int first) {
          add_span<kBits, pass(), Precision::kMinor>(codes, weights(first), head_dim, ahead(first, half_bytes),
                                                     b.sums + at + first * head_dim);
        });
      } else {
        for_passes<kAddRows>(num_rows, [&](auto pass, int first) {
          add_span<kBits, pass(), Precision::kFull>(codes, weights(first), head_dim, ahead(first, half_bytes),
                                                    b.sums + at + first * head_dim);
        });
      }
    }
  }
}

bool reads(const KvLayout& layout) { return layout.head_dim % (layout.codec == KvCodec::kInt4 ? 16 : 32) == 0; }

std::size_t scratch_bytes(const AttentionShape& shape, int num_rows) {
  if (!reads(shape.layout)) {
    return kAttentionSpanSerial.scratch_bytes(shape, num_rows);
  }
  Scratch scratch(nullptr);
  divide(scratch, shape.layout.head_dim, num_rows * (shape.num_heads / shape.layout.num_kv_heads));
  return scratch.used();
}

void run(const AttentionShape& shape, const AttentionItem& item, const KvLayer& layer, const AttentionRows& rows,
         std::uint8_t* scratch_bytes) {
  const KvLayout& layout = shape.layout;
  if (!reads(layout)) {
    kAttentionSpanSerial.run(shape, item, layer, rows, scratch_bytes);
    return;
  }
  const int head_dim = layout.head_dim;
  const int group = shape.num_heads / layout.num_kv_heads;
  const int stacked = item.num_rows * group;
  const std::int64_t head = static_cast<std::int64_t>(layer.index) * layout.num_kv_heads + item.kv_head;
  const KvTransforms transforms = {shape.transforms->mean + head * head_dim,
                                   shape.transforms->key_balance + head * head_dim,
                                   shape.transforms->value_balance + head * head_dim};
  Scratch scratch(scratch_bytes);
  const Buffers b = divide(scratch, head_dim, stacked);
  for (int row = 0; row < stacked; ++row) {
    b.positions[row] = item.positions[row / group];
    b.offsets[row] = turn_query(query_row(shape, item, rows, row), transforms, *item.turn, head_dim,
                                shape.scale * kLog2E, b.queries + static_cast<std::ptrdiff_t>(row) * head_dim);
  }
  for (int strip = 0; strip < stacked; strip += kLanes) {
    reset(b.states[strip / kLanes]);
    _mm256_store_ps(b.variances + strip, _mm256_setzero_ps());
  }
  __builtin_memset(b.products, 0, sizeof(float) * static_cast<std::size_t>(kLanes * round_up(head_dim, 32)));
  __builtin_memset(b.sums, 0, sizeof(float) * static_cast<std::size_t>(stacked) * static_cast<std::size_t>(head_dim));
  if (layout.codec == KvCodec::kInt4) {
    run_spans<4>(shape, item, layer, stacked, b);
  } else {
    run_spans<3>(shape, item, layer, stacked, b);
  }
  for (int row = 0; row < stacked; ++row) {
    float* const sums = b.sums + static_cast<std::ptrdiff_t>(row) * head_dim;
    turn_sums_back(transforms.value_balance, *item.turn, head_dim, sums);
    const StripState& state = b.states[row / kLanes];
    write_row(shape, item, rows, row, sums, state.maxima[row % kLanes], state.weights[row % kLanes]);
  }
}

}  // namespace

const AttentionKernels kAttentionSpanAvx2 = {nullptr, scratch_bytes, run};

}  // namespace kvist
