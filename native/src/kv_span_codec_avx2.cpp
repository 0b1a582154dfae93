// Spans written and read eight at a time. Rows are transposed first: a vector then holds one channel of eight positions,
// and all of turning is additions of whole vectors. V stays so, as each position has its scale; K is transposed back, as
// each channel has its step.
//
// A record of D = 64 is 16 KiB of float32 for K and as much for V, which stay in the first-level cache; larger heads are
// in the second. Per value, K costs two turns (6 additions each for D = 64, eight rows at a time in registers) and 8
// operations for each of 3 grids; V costs one turn and 14 operations for each of 5 scales, seldom 6, most of them the
// search for the level. 64 positions and D, a multiple of 8, leave no tails.
//
// With feedback K is rounded in columns, all positions of a channel at once: D / 2 products a value, eight channels at a
// time what the channels before those eight take, then one by one what the eight take from each other. The shares cost
// D^3 / 6 products and two turns of the (D, D) metric for each span, in tiles of registers as well: for D = 64 about as
// much as the rounding, for D = 256, whose 256 KiB fill half of a second-level cache, a little more.
//
// Compiled without contraction of products and sums, in the order of the serial version: the bytes are the same.
#include <immintrin.h>

#include <algorithm>
#include <limits>

#include "kv_span_grid.h"
#include "kvist/kv_span_codec.h"
#include "vec_avx2.h"

namespace kvist {
namespace {

using namespace avx2;

constexpr int kVector = 8;
constexpr int kVectors = kSpanTokens / kVector;

KVIST_INLINE __m256 broadcast(float x) { return _mm256_set1_ps(x); }
KVIST_INLINE __m256 round(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
KVIST_INLINE __m256 magnitude(__m256 x) { return _mm256_andnot_ps(broadcast(-0.0F), x); }
KVIST_INLINE __m256 above(__m256 a, __m256 b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }

// --- transposing and turning; columns are (D, 64) where no width is given

void to_columns(const float* rows, int head_dim, float* columns) {
  for (int c = 0; c < head_dim; c += kVector) {
    for (int t = 0; t < kSpanTokens; t += kVector) {
      __m256 v[kVector];
      unroll<kVector>([&](auto i) KVIST_LAMBDA { v[i] = _mm256_loadu_ps(rows + (t + i) * head_dim + c); });
      transpose(v);
      unroll<kVector>([&](auto i) KVIST_LAMBDA { _mm256_store_ps(columns + (c + i) * kSpanTokens + t, v[i]); });
    }
  }
}

void to_rows(const float* columns, int head_dim, float* rows) {
  for (int t = 0; t < kSpanTokens; t += kVector) {
    for (int c = 0; c < head_dim; c += kVector) {
      __m256 v[kVector];
      unroll<kVector>([&](auto i) KVIST_LAMBDA { v[i] = _mm256_load_ps(columns + (c + i) * kSpanTokens + t); });
      transpose(v);
      unroll<kVector>([&](auto i) KVIST_LAMBDA { _mm256_storeu_ps(rows + (t + i) * head_dim + c, v[i]); });
    }
  }
}

// log2(Radix) stages at once: rows `step` apart.
template <int Radix>
void hadamard_pass(float* columns, int head_dim, int width, int step) {
  for (int first = 0; first < head_dim; first += Radix * step) {
    for (int c = first; c < first + step; ++c) {
      for (int t = 0; t < width; t += kVector) {
        float* base = columns + c * width + t;
        const std::ptrdiff_t stride = std::ptrdiff_t{width} * step;
        __m256 v[Radix];
        unroll<Radix>([&](auto i) KVIST_LAMBDA { v[i] = _mm256_load_ps(base + i * stride); });
        const auto stage = [&](auto distance) KVIST_LAMBDA {
          constexpr int kDistance = decltype(distance)::value;
          unroll<Radix / 2>([&](auto pair) KVIST_LAMBDA {
            constexpr int kLeft = pair / kDistance * 2 * kDistance + pair % kDistance;
            const __m256 sum = _mm256_add_ps(v[kLeft], v[kLeft + kDistance]);
            v[kLeft + kDistance] = _mm256_sub_ps(v[kLeft], v[kLeft + kDistance]);
            v[kLeft] = sum;
          });
        };
        stage(std::integral_constant<int, 1>{});
        if constexpr (Radix >= 4) {
          stage(std::integral_constant<int, 2>{});
        }
        if constexpr (Radix >= 8) {
          stage(std::integral_constant<int, 4>{});
        }
        unroll<Radix>([&](auto i) KVIST_LAMBDA { _mm256_store_ps(base + i * stride, v[i]); });
      }
    }
  }
}

void hadamard(float* columns, int width, const HeadTurn& turn) {
  const int head_dim = turn.power * turn.odd;
  int step = 1;
  for (; step * 8 <= turn.power; step *= 8) {
    hadamard_pass<8>(columns, head_dim, width, step);
  }
  if (step * 4 == turn.power) {
    hadamard_pass<4>(columns, head_dim, width, step);
  } else if (step * 2 == turn.power) {
    hadamard_pass<2>(columns, head_dim, width, step);
  }
}

// The cosine transform across the runs of `power` channels, or back.
void cosines(float* columns, int width, const HeadTurn& turn, bool back) {
  if (turn.odd == 1) {
    return;
  }
  const std::ptrdiff_t stride = std::ptrdiff_t{width} * turn.power;
  for (float* base = columns; base < columns + stride; base += kVector) {
    __m256 column[kMaxOddPart];
    for (int run = 0; run < turn.odd; ++run) {
      column[run] = _mm256_load_ps(base + run * stride);
    }
    for (int run = 0; run < turn.odd; ++run) {
      __m256 sum = _mm256_setzero_ps();
      for (int other = 0; other < turn.odd; ++other) {
        const float cosine = turn.cosines[back ? other * turn.odd + run : run * turn.odd + other];
        sum = _mm256_add_ps(sum, _mm256_mul_ps(broadcast(cosine), column[other]));
      }
      _mm256_store_ps(base + run * stride, sum);
    }
  }
}

// change(channel) gives what is to become of each of the channel's vectors.
template <typename Change>
KVIST_INLINE void for_channels(float* columns, int head_dim, const Change& change) {
  for (int c = 0; c < head_dim; ++c) {
    const auto of_channel = change(c);
    unroll<kVectors>([&](auto i) KVIST_LAMBDA {
      float* x = columns + c * kSpanTokens + i * kVector;
      _mm256_store_ps(x, of_channel(_mm256_load_ps(x)));
    });
  }
}

// All of turning but the signs, and all of turning back, of `width` columns.
void turn_columns(float* columns, int width, const HeadTurn& turn) {
  hadamard(columns, width, turn);
  cosines(columns, width, turn, false);
}

void turn_columns_back(float* columns, int width, const HeadTurn& turn) {
  cosines(columns, width, turn, true);
  hadamard(columns, width, turn);
}

// --- e5m3

KVIST_INLINE __m256i nearest_e5m3(__m256 x) {
  const __m256i normal =
      _mm256_sub_epi32(_mm256_srli_epi32(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x7ffff)), 20),
                       _mm256_set1_epi32(kE5m3Bias));
  const __m256 scaled = _mm256_sub_ps(_mm256_mul_ps(x, broadcast(1.0F / kSmallestStep)), broadcast(0.5F));
  const __m256i small = _mm256_cvtps_epi32(_mm256_ceil_ps(scaled));
  const __m256 is_small = _mm256_cmp_ps(x, broadcast(kSmallestNormalStep), _CMP_LT_OQ);
  return _mm256_min_epi32(_mm256_blendv_epi8(normal, small, _mm256_castps_si256(is_small)),
                          _mm256_set1_epi32(kLargestByte));
}

KVIST_INLINE __m256i clamp_e5m3(__m256i byte) {
  return _mm256_min_epi32(_mm256_max_epi32(byte, _mm256_setzero_si256()), _mm256_set1_epi32(kLargestByte));
}

// Of bytes in [0, 254].
KVIST_INLINE __m256 values_of(__m256i byte) {
  const __m256i normal = _mm256_slli_epi32(_mm256_add_epi32(byte, _mm256_set1_epi32(kE5m3Bias)), 20);
  const __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(byte), broadcast(kSmallestStep));
  const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), byte);
  return _mm256_blendv_ps(_mm256_castsi256_ps(normal), small, _mm256_castsi256_ps(is_small));
}

KVIST_INLINE __m256 inverses_of(__m256 step) {
  return _mm256_and_ps(_mm256_div_ps(broadcast(1.0F), step), above(step, _mm256_setzero_ps()));
}

// Eight bytes from eight dwords.
KVIST_INLINE void store_bytes(std::uint8_t* out, __m256i dwords) {
  const __m256i chosen = _mm256_shuffle_epi8(dwords, _mm256_set1_epi32(0x0c080400));
  store32(out, static_cast<std::uint32_t>(_mm256_extract_epi32(chosen, 0)));
  store32(out + 4, static_cast<std::uint32_t>(_mm256_extract_epi32(chosen, 4)));
}

// Of eight channels or positions, `count` vectors `stride` apart.
struct Found {
  __m256 squares;
  __m256 lowest;
  __m256 highest;
  __m256 sound;  // all of them finite
};

KVIST_INLINE Found look_at(const float* x, int count, std::ptrdiff_t stride) {
  Found found = {_mm256_setzero_ps(), _mm256_loadu_ps(x), _mm256_loadu_ps(x), _mm256_setzero_ps()};
  __m256i largest = _mm256_setzero_si256();  // bits of the magnitudes: those of infinities and NaN are above all others
  for (int i = 0; i < count; ++i, x += stride) {
    const __m256 v = _mm256_loadu_ps(x);
    found.squares = _mm256_add_ps(found.squares, _mm256_mul_ps(v, v));
    found.lowest = _mm256_min_ps(found.lowest, v);
    found.highest = _mm256_max_ps(found.highest, v);
    largest = _mm256_max_epu32(largest, _mm256_castps_si256(magnitude(v)));
  }
  found.sound = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f800000), largest));
  return found;
}

// As look_at, after what is beyond reach was held within it and counted, which is rare. Lanes that are not sound are
// left alone and what is found of them means nothing.
KVIST_INLINE Found look_and_hold(float* x, int count, std::ptrdiff_t stride, float reach, int& num_held) {
  const Found found = look_at(x, count, stride);
  const __m256 beyond = _mm256_or_ps(above(found.highest, broadcast(reach)), above(broadcast(-reach), found.lowest));
  const int lanes = _mm256_movemask_ps(_mm256_and_ps(beyond, found.sound));
  if (lanes == 0) [[likely]] {
    return found;
  }
  for (int i = 0; i < count; ++i) {
    const __m256 v = _mm256_loadu_ps(x + i * stride);
    const int held = lanes & _mm256_movemask_ps(above(magnitude(v), broadcast(reach)));
    num_held += __builtin_popcount(static_cast<unsigned>(held));
    const __m256 within = _mm256_min_ps(_mm256_max_ps(v, broadcast(-reach)), broadcast(reach));
    _mm256_storeu_ps(x + i * stride, _mm256_blendv_ps(v, within, found.sound));
  }
  return look_at(x, count, stride);
}

// Keeps the candidate with the least error in each lane.
struct Best {
  __m256i byte = _mm256_setzero_si256();
  __m256 zero = _mm256_setzero_ps();
  __m256 least = broadcast(std::numeric_limits<float>::infinity());

  // `error` in steps; `squares` is what a step of 0 costs. `allowed`: lanes that may have it.
  KVIST_INLINE void offer(__m256i candidate, __m256 step, __m256 its_zero, __m256 error, __m256 squares,
                          __m256 allowed) {
    const __m256 is_zero = _mm256_cmp_ps(step, _mm256_setzero_ps(), _CMP_EQ_OQ);
    error = _mm256_blendv_ps(_mm256_mul_ps(error, _mm256_mul_ps(step, step)), squares, is_zero);
    const __m256 better = _mm256_and_ps(_mm256_cmp_ps(error, least, _CMP_LT_OQ), allowed);
    least = _mm256_blendv_ps(least, error, better);
    zero = _mm256_blendv_ps(zero, its_zero, better);
    byte = _mm256_blendv_epi8(byte, candidate, _mm256_castps_si256(better));
  }
};

// Codes of four rows of eight members each, dwords, to where pack_codes wants them: two groups, `lane` and the three
// after it.
KVIST_INLINE void store_codes(const __m256i (&rows)[4], std::uint8_t* first_group, std::uint8_t* second_group) {
  const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(rows[0], rows[1]), _mm256_packs_epi32(rows[2], rows[3]));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(first_group), _mm256_castsi256_si128(bytes));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(second_group), _mm256_extracti128_si256(bytes, 1));
}

// --- K

// Eight channels of a span, rows `head_dim` apart.
template <int Bits>
class KeyGrids {
 public:
  KeyGrids(float* x, int head_dim) : x_(x), head_dim_(head_dim) {}

  // Returns how many components were held.
  int choose() {
    int num_held = 0;
    found_ = look_and_hold(x_, kSpanTokens, head_dim_, kReachOfKeys<Bits>, num_held);
    const __m256 two = broadcast(2.0F);
    const __m256 low = _mm256_div_ps(found_.lowest, two);
    const __m256 high = _mm256_div_ps(found_.highest, two);
    twice_middle_ = _mm256_mul_ps(two, _mm256_add_ps(low, high));
    const __m256 for_range = _mm256_div_ps(_mm256_sub_ps(high, low), broadcast(kLimit / 2.0F));
    const __m256 for_middle = _mm256_div_ps(magnitude(twice_middle_), broadcast(127.0F - kLimit));
    nearest_ = nearest_e5m3(_mm256_max_ps(for_range, for_middle));
    const __m256 is_far = _mm256_and_ps(above(for_middle, for_range), found_.sound);
    const __m256 is_near = _mm256_andnot_ps(is_far, found_.sound);
    offer_grids<kNumNearGrids>(kNearGrids, is_near);
    if (_mm256_movemask_ps(is_far) != 0) [[unlikely]] {
      for (int i = 0; i < kNumFarGrids; i += 3) {
        offer_grids<3>(kFarGrids + i, is_far);
      }
    }
    return num_held;
  }

  void store_grids(std::uint8_t* steps, std::uint8_t* zeros) const {
    const __m256i nan = _mm256_set1_epi32(kE5m3Nan);
    store_bytes(steps, _mm256_blendv_epi8(nan, best_.byte, _mm256_castps_si256(found_.sound)));
    store_bytes(zeros, _mm256_cvtps_epi32(best_.zero));
  }

  // Each channel by itself.
  void round_each(std::uint8_t* codes) const {
    const __m256 inverse = inverses_of(values_of(best_.byte));
    const __m256 half = _mm256_mul_ps(best_.zero, broadcast(0.5F));
    for (int t = 0; t < kSpanTokens; t += 4) {
      __m256i rows[4];
      unroll<4>([&](auto i) KVIST_LAMBDA {
        const __m256 v = _mm256_loadu_ps(x_ + (t + i) * head_dim_);
        const __m256 position = _mm256_sub_ps(_mm256_mul_ps(v, inverse), half);
        rows[i] = _mm256_cvtps_epi32(_mm256_and_ps(nearest_code(position), found_.sound));
      });
      store_codes(rows, codes + 4 * t, codes + 4 * (kSpanTokens + t));
    }
  }

 private:
  static constexpr float kLimit = (1 << Bits) - 1;

  static KVIST_INLINE __m256 nearest_code(__m256 position) {
    return _mm256_min_ps(_mm256_max_ps(round(position), _mm256_setzero_ps()), broadcast(kLimit));
  }

  template <int Count>
  KVIST_INLINE void offer_grids(const GridCandidate* candidates, __m256 allowed) {
    __m256i bytes[Count];
    __m256 inverse[Count], half[Count], error[Count];
    for (int i = 0; i < Count; ++i) {
      bytes[i] = clamp_e5m3(_mm256_add_epi32(nearest_, _mm256_set1_epi32(candidates[i].step)));
      const __m256 step = values_of(bytes[i]);
      inverse[i] = inverses_of(step);
      __m256 zero = _mm256_sub_ps(_mm256_mul_ps(twice_middle_, inverse[i]), broadcast(kLimit));
      zero = _mm256_add_ps(round(zero), broadcast(static_cast<float>(candidates[i].shift)));
      zero = _mm256_min_ps(_mm256_max_ps(zero, broadcast(-128.0F)), broadcast(127.0F));
      half[i] = _mm256_mul_ps(_mm256_and_ps(zero, above(step, _mm256_setzero_ps())), broadcast(0.5F));
      error[i] = _mm256_setzero_ps();
    }
    const float* x = x_;
    for (int t = 0; t < kSpanTokens; ++t, x += head_dim_) {
      const __m256 v = _mm256_loadu_ps(x);
      unroll<Count>([&](auto i) KVIST_LAMBDA {
        const __m256 position = _mm256_sub_ps(_mm256_mul_ps(v, inverse[i]), half[i]);
        const __m256 off = _mm256_sub_ps(nearest_code(position), position);
        error[i] = _mm256_add_ps(error[i], _mm256_mul_ps(off, off));
      });
    }
    for (int i = 0; i < Count; ++i) {
      const __m256 zero = _mm256_add_ps(half[i], half[i]);
      best_.offer(bytes[i], values_of(bytes[i]), zero, error[i], found_.squares, allowed);
    }
  }

  float* x_;
  std::ptrdiff_t head_dim_;
  Found found_;
  __m256 twice_middle_;
  __m256i nearest_;
  Best best_;
};

// Takes `count` rows of errors, each by its share, from Channels rows of two vectors each. Shares of a channel are
// `stride` apart from those of the next one.
template <int Channels>
KVIST_INLINE void take_errors(const float* shares, std::ptrdiff_t stride, const float* errors, int count,
                              __m256 (&moved)[Channels][2]) {
  for (int i = 0; i < count; ++i, errors += kSpanTokens) {
    const __m256 first = _mm256_load_ps(errors);
    const __m256 second = _mm256_load_ps(errors + kVector);
    unroll<Channels>([&](auto c) KVIST_LAMBDA {
      const __m256 share = _mm256_broadcast_ss(shares + c * stride + i);
      sub_in_place(moved[c][0], _mm256_mul_ps(share, first));
      sub_in_place(moved[c][1], _mm256_mul_ps(share, second));
    });
  }
}

// Keys of a span, in columns, channel by channel. A channel that is done has its errors in its column.
template <int Bits>
class KeyRounding {
 public:
  // The record has steps and zero points.
  KeyRounding(const float* shares, int head_dim, const std::uint8_t* record, float* columns, std::uint8_t* codes)
      : shares_(shares), head_dim_(head_dim), steps_(record), columns_(columns), codes_(codes) {
    zeros_ = record + kv_record_layout(Bits, head_dim).zeros;
  }

  void run() {
    for (int first = 0; first < head_dim_; first += kVector) {
      move_by_earlier(first);
      for (int i = 0; i < kVector; ++i) {
        round_channel(first, i);
      }
    }
  }

 private:
  static constexpr float kLimit = (1 << Bits) - 1;

  // What the channels before eight of them leave of those.
  void move_by_earlier(int first) {
    constexpr int kTile = 4;
    for (int c = 0; c < kVector; c += kTile) {
      for (int t = 0; t < kSpanTokens; t += 2 * kVector) {
        const float* x = columns_ + (first + c) * kSpanTokens + t;
        __m256 tile[kTile][2];
        unroll<kTile>([&](auto i) KVIST_LAMBDA {
          tile[i][0] = _mm256_load_ps(x + i * kSpanTokens);
          tile[i][1] = _mm256_load_ps(x + i * kSpanTokens + kVector);
        });
        take_errors<kTile>(shares_ + (first + c) * head_dim_, head_dim_, columns_ + t, first, tile);
        unroll<kTile>([&](auto i) KVIST_LAMBDA {
          _mm256_store_ps(moved_ + (c + i) * kSpanTokens + t, tile[i][0]);
          _mm256_store_ps(moved_ + (c + i) * kSpanTokens + t + kVector, tile[i][1]);
        });
      }
    }
  }

  // Channel `i` of the eight, after those before it.
  void round_channel(int first, int i) {
    const int channel = first + i;
    float* x = columns_ + channel * kSpanTokens;
    const float* errors = columns_ + first * kSpanTokens;
    const float* shares = shares_ + channel * head_dim_ + first;
    std::uint8_t* group = codes_ + channel / 4 * 4 * kSpanTokens;
    if (steps_[channel] == kE5m3Nan) [[unlikely]] {
      for (int t = 0; t < kSpanTokens; t += kVector) {
        _mm256_store_ps(x + t, _mm256_setzero_ps());
        add_codes(_mm256_setzero_si256(), channel, group + 4 * t);
      }
      return;
    }
    const float scalar_step = e5m3_to_f32(steps_[channel]);
    const __m256 step = broadcast(scalar_step);
    const __m256 inverse = broadcast(inverse_of(scalar_step));
    const __m256 half = broadcast(static_cast<float>(static_cast<std::int8_t>(zeros_[channel])) * 0.5F);
    __m256 moved[kVectors];
    unroll<kVectors>([&](auto v) KVIST_LAMBDA { moved[v] = _mm256_load_ps(moved_ + i * kSpanTokens + v * kVector); });
    for (int before = 0; before < i; ++before) {
      const __m256 share = _mm256_broadcast_ss(shares + before);
      unroll<kVectors>([&](auto v) KVIST_LAMBDA {
        const __m256 error = _mm256_load_ps(errors + before * kSpanTokens + v * kVector);
        sub_in_place(moved[v], _mm256_mul_ps(share, error));
      });
    }
    unroll<kVectors>([&](auto v) KVIST_LAMBDA {
      const __m256 own = _mm256_load_ps(x + v * kVector);
      const __m256 exact = _mm256_sub_ps(_mm256_mul_ps(own, inverse), half);
      // What is no number becomes the second operand, the grid point below.
      const __m256 nearest = round(_mm256_sub_ps(_mm256_mul_ps(moved[v], inverse), half));
      const __m256 around = _mm256_min_ps(_mm256_max_ps(nearest, _mm256_floor_ps(exact)), _mm256_ceil_ps(exact));
      const __m256 code = _mm256_min_ps(_mm256_max_ps(around, _mm256_setzero_ps()), broadcast(kLimit));
      const __m256 stored = _mm256_mul_ps(step, _mm256_add_ps(code, half));
      _mm256_store_ps(x + v * kVector, _mm256_sub_ps(stored, own));
      add_codes(_mm256_cvtps_epi32(code), channel, group + 4 * v * kVector);
    });
  }

  // Eight codes beside those of the channels before it in its group of four.
  static KVIST_INLINE void add_codes(__m256i codes, int channel, std::uint8_t* group) {
    auto* four = reinterpret_cast<__m256i*>(group);
    const int member = channel % 4;
    const __m256i shifted = _mm256_sll_epi32(codes, _mm_cvtsi32_si128(8 * member));
    _mm256_storeu_si256(four, member == 0 ? shifted : _mm256_or_si256(_mm256_loadu_si256(four), shifted));
  }

  const float* shares_;
  int head_dim_;
  const std::uint8_t* steps_;
  const std::uint8_t* zeros_;
  float* columns_;
  std::uint8_t* codes_;
  alignas(32) float moved_[kVector * kSpanTokens];
};

template <int Bits>
int encode_keys(const KvSpanHead& head, const float* shares, float* keys, std::uint8_t* record, float* columns,
                std::uint8_t* codes) {
  const HeadTurn& turn = *head.turn;
  const int head_dim = turn.power * turn.odd;
  to_columns(keys, head_dim, columns);
  turn_columns_back(columns, kSpanTokens, turn);
  for_channels(columns, head_dim, [&](int c) KVIST_LAMBDA {
    return [sign = broadcast(turn.signs[c]), mean = broadcast(head.mean[c]),
            balance = broadcast(head.key_balance[c])](__m256 x) KVIST_LAMBDA {
      const __m256 centred = _mm256_sub_ps(_mm256_mul_ps(x, sign), mean);
      return _mm256_mul_ps(_mm256_mul_ps(centred, balance), sign);
    };
  });
  turn_columns(columns, kSpanTokens, turn);
  to_rows(columns, head_dim, keys);
  const KvRecordLayout parts = kv_record_layout(Bits, head_dim);
  int num_held = 0;
  for (int c = 0; c < head_dim; c += kVector) {
    KeyGrids<Bits> grids(keys + c, head_dim);
    num_held += grids.choose();
    grids.store_grids(record + c, record + parts.zeros + c);
    if (shares == nullptr) {
      grids.round_each(codes + c * kSpanTokens);
    }
  }
  if (shares != nullptr) {
    if (num_held > 0) [[unlikely]] {
      to_columns(keys, head_dim, columns);
    }
    KeyRounding<Bits>(shares, head_dim, record, columns, codes).run();
  }
  pack_codes<Bits>(codes, kSpanTokens, head_dim / 4, record + parts.key_codes);
  return num_held;
}

// --- V

// For eight magnitudes in scales: the nearest level, and how far out it is.
struct Level {
  __m256 value;
  __m256i negative_index;
};

// A search in halves. Comparisons give -1, so the index counts down, and tables are in the order 0, 7, 6, ... or 0, 3,
// 2, 1, these once in each half: a permutation within halves costs less.
template <int Bits>
KVIST_INLINE Level nearest_level(__m256 x);

template <>
KVIST_INLINE Level nearest_level<4>(__m256 x) {
  using L = SpanLevels<4>;
  const auto& m = L::midpoints;
  const __m256i first = _mm256_castps_si256(above(x, broadcast(m[3])));
  const __m256 second_midpoint = _mm256_blendv_ps(broadcast(m[1]), broadcast(m[5]), _mm256_castsi256_ps(first));
  const __m256i second = _mm256_castps_si256(above(x, second_midpoint));
  const __m256i pair = _mm256_add_epi32(_mm256_add_epi32(first, first), second);
  const __m256 third_midpoints = _mm256_setr_ps(m[0], m[6], m[4], m[2], m[0], m[6], m[4], m[2]);
  const __m256i third = _mm256_castps_si256(above(x, _mm256_permutevar_ps(third_midpoints, pair)));
  const __m256i index = _mm256_add_epi32(_mm256_add_epi32(pair, pair), third);
  const auto& v = L::magnitudes;
  const __m256 levels = _mm256_setr_ps(v[0], v[7], v[6], v[5], v[4], v[3], v[2], v[1]);
  return {_mm256_permutevar8x32_ps(levels, index), index};
}

template <>
KVIST_INLINE Level nearest_level<3>(__m256 x) {
  using L = SpanLevels<3>;
  const auto& m = L::midpoints;
  const __m256i first = _mm256_castps_si256(above(x, broadcast(m[1])));
  const __m256 second_midpoint = _mm256_blendv_ps(broadcast(m[0]), broadcast(m[2]), _mm256_castsi256_ps(first));
  const __m256i second = _mm256_castps_si256(above(x, second_midpoint));
  const __m256i index = _mm256_add_epi32(_mm256_add_epi32(first, first), second);
  const auto& v = L::magnitudes;
  const __m256 levels = _mm256_setr_ps(v[0], v[3], v[2], v[1], v[0], v[3], v[2], v[1]);
  return {_mm256_permutevar_ps(levels, index), index};
}

// Eight positions of a span, in columns.
template <int Bits>
class ValueScales {
 public:
  ValueScales(float* x, int head_dim) : x_(x), head_dim_(head_dim) {}

  // Returns how many components were held.
  int choose() {
    int num_held = 0;
    found_ = look_and_hold(x_, head_dim_, kSpanTokens, kReachOfValues<Bits>, num_held);
    const __m256 mean = _mm256_div_ps(found_.squares, broadcast(static_cast<float>(head_dim_)));
    const __m256i nearest = nearest_e5m3(_mm256_div_ps(_mm256_sqrt_ps(mean), broadcast(Levels::kDeviation)));
    const __m256 largest = _mm256_max_ps(magnitude(found_.lowest), magnitude(found_.highest));
    const __m256i reaching = nearest_e5m3(_mm256_div_ps(largest, broadcast(Levels::magnitudes.back())));
    __m256i candidates[kNumScales];
    int count = 0;
    for (const int step : kDeviationScales) {
      candidates[count++] = clamp_e5m3(_mm256_add_epi32(nearest, _mm256_set1_epi32(step)));
    }
    for (const int step : kReachingScales) {
      candidates[count++] = clamp_e5m3(_mm256_add_epi32(reaching, _mm256_set1_epi32(step)));
    }
    offer_scales<3>(candidates);
    offer_scales<2>(candidates + 3);
    // The last one reaches half of the largest, whose error alone is seldom less than all of another scale's.
    if (may_be_best(candidates[kNumScales - 1], largest)) [[unlikely]] {
      offer_scales<1>(candidates + kNumScales - 1);
    }
    return num_held;
  }

  void store(std::uint8_t* scales, std::uint8_t* codes) const {
    const __m256i sound = _mm256_castps_si256(found_.sound);
    store_bytes(scales, _mm256_blendv_epi8(_mm256_set1_epi32(kE5m3Nan), best_.byte, sound));
    const __m256 inverse = inverses_of(values_of(best_.byte));
    const __m256i inwards = _mm256_set1_epi32(Levels::kCount - 1);
    const __m256i outwards = _mm256_set1_epi32(Levels::kCount);
    for (int c = 0; c < head_dim_; c += 4) {
      __m256i rows[4];
      unroll<4>([&](auto i) KVIST_LAMBDA {
        const __m256 v = _mm256_load_ps(x_ + (c + i) * kSpanTokens);
        const Level level = nearest_level<Bits>(_mm256_mul_ps(magnitude(v), inverse));
        const __m256i index = _mm256_sub_epi32(_mm256_setzero_si256(), level.negative_index);
        const __m256i is_positive = _mm256_castps_si256(above(v, _mm256_setzero_ps()));
        // kCount + index on one side of 0, kCount - 1 - index on the other: kCount is a power of two.
        const __m256i code = _mm256_xor_si256(index, _mm256_blendv_epi8(inwards, outwards, is_positive));
        rows[i] = _mm256_and_si256(code, sound);
      });
      store_codes(rows, codes + 4 * c, codes + 4 * (head_dim_ + c));
    }
  }

 private:
  using Levels = SpanLevels<Bits>;

  // Whether the error of the largest component, a part of the sum, leaves the candidate a chance in any lane.
  bool may_be_best(__m256i candidate, __m256 largest) const {
    const __m256 scale = values_of(candidate);
    const __m256 in_scales = _mm256_mul_ps(largest, inverses_of(scale));
    const __m256 off = _mm256_sub_ps(nearest_level<Bits>(in_scales).value, in_scales);
    const __m256 part = _mm256_mul_ps(_mm256_mul_ps(off, off), _mm256_mul_ps(scale, scale));
    const __m256 may = _mm256_cmp_ps(part, best_.least, _CMP_LT_OQ);
    return _mm256_movemask_ps(_mm256_and_ps(may, found_.sound)) != 0;
  }

  template <int Count>
  KVIST_INLINE void offer_scales(const __m256i* candidates) {
    __m256 inverse[Count], error[Count];
    for (int i = 0; i < Count; ++i) {
      inverse[i] = inverses_of(values_of(candidates[i]));
      error[i] = _mm256_setzero_ps();
    }
    for (int c = 0; c < head_dim_; ++c) {
      const __m256 v = magnitude(_mm256_load_ps(x_ + c * kSpanTokens));
      unroll<Count>([&](auto i) KVIST_LAMBDA {
        const __m256 in_scales = _mm256_mul_ps(v, inverse[i]);
        const __m256 off = _mm256_sub_ps(nearest_level<Bits>(in_scales).value, in_scales);
        error[i] = _mm256_add_ps(error[i], _mm256_mul_ps(off, off));
      });
    }
    for (int i = 0; i < Count; ++i) {
      best_.offer(candidates[i], values_of(candidates[i]), _mm256_setzero_ps(), error[i], found_.squares, found_.sound);
    }
  }

  float* x_;
  int head_dim_;
  Found found_;
  Best best_;
};

template <int Bits>
int encode_values(const KvSpanHead& head, const float* values, std::uint8_t* record, float* columns,
                  std::uint8_t* codes) {
  const HeadTurn& turn = *head.turn;
  const int head_dim = turn.power * turn.odd;
  to_columns(values, head_dim, columns);
  for_channels(columns, head_dim, [&](int c) KVIST_LAMBDA {
    return [sign = broadcast(turn.signs[c]), balance = broadcast(head.value_balance[c])](__m256 x)
               KVIST_LAMBDA { return _mm256_mul_ps(_mm256_mul_ps(x, balance), sign); };
  });
  turn_columns(columns, kSpanTokens, turn);
  const KvRecordLayout parts = kv_record_layout(Bits, head_dim);
  int num_held = 0;
  for (int t = 0; t < kSpanTokens; t += kVector) {
    ValueScales<Bits> scales(columns + t, head_dim);
    num_held += scales.choose();
    scales.store(record + parts.scales + t, codes + t * head_dim);
  }
  pack_codes<Bits>(codes, head_dim, kSpanTokens / 4, record + parts.value_codes);
  return num_held;
}

// --- reading

template <int Bits>
void decode_keys(const KvSpanHead& head, const std::uint8_t* record, float* keys, float* columns, std::uint8_t* codes) {
  const HeadTurn& turn = *head.turn;
  const int head_dim = turn.power * turn.odd;
  const KvRecordLayout parts = kv_record_layout(Bits, head_dim);
  unpack_codes<Bits>(record + parts.key_codes, kSpanTokens, head_dim / 4, codes);
  for (int c = 0; c < head_dim; ++c) {
    const __m256 step = broadcast(e5m3_to_f32(record[c]));
    const __m256 half = broadcast(static_cast<float>(static_cast<std::int8_t>(record[parts.zeros + c])) * 0.5F);
    const __m128i shift = _mm_cvtsi32_si128(8 * (c % 4));
    const std::uint8_t* group = codes + c / 4 * 4 * kSpanTokens;
    for (int t = 0; t < kSpanTokens; t += kVector) {
      const __m256i four = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + 4 * t));
      const __m256i code = _mm256_and_si256(_mm256_srl_epi32(four, shift), _mm256_set1_epi32(15));
      const __m256 y = _mm256_mul_ps(step, _mm256_add_ps(_mm256_cvtepi32_ps(code), half));
      _mm256_store_ps(columns + c * kSpanTokens + t, y);
    }
  }
  turn_columns_back(columns, kSpanTokens, turn);
  for_channels(columns, head_dim, [&](int c) KVIST_LAMBDA {
    return [sign = broadcast(turn.signs[c]), mean = broadcast(head.mean[c]),
            balance = broadcast(head.key_balance[c])](__m256 x) KVIST_LAMBDA {
      return _mm256_mul_ps(_mm256_add_ps(_mm256_div_ps(_mm256_mul_ps(x, sign), balance), mean), sign);
    };
  });
  turn_columns(columns, kSpanTokens, turn);
  to_rows(columns, head_dim, keys);
}

template <int Bits>
void decode_values(const KvSpanHead& head, const std::uint8_t* record, float* values, float* columns,
                   std::uint8_t* codes) {
  constexpr int kHalf = SpanLevels<Bits>::kCount;
  const HeadTurn& turn = *head.turn;
  const int head_dim = turn.power * turn.odd;
  const KvRecordLayout parts = kv_record_layout(Bits, head_dim);
  unpack_codes<Bits>(record + parts.value_codes, head_dim, kSpanTokens / 4, codes);
  float magnitudes[kVector] = {};
  std::copy_n(SpanLevels<Bits>::magnitudes.begin(), kHalf, magnitudes);
  const __m256 levels = _mm256_loadu_ps(magnitudes);
  for (int t = 0; t < kSpanTokens; ++t) {
    const __m256 scale = broadcast(e5m3_to_f32(record[parts.scales + t]));
    const __m128i shift = _mm_cvtsi32_si128(8 * (t % 4));
    const std::uint8_t* group = codes + t / 4 * 4 * head_dim;
    for (int c = 0; c < head_dim; c += kVector) {
      const __m256i four = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + 4 * c));
      const __m256i code = _mm256_and_si256(_mm256_srl_epi32(four, shift), _mm256_set1_epi32(15));
      const __m256i is_negative = _mm256_cmpgt_epi32(_mm256_set1_epi32(kHalf), code);
      // How far out: code - kHalf, or kHalf - 1 - code; the permutation looks at three bits.
      const __m256i index = _mm256_xor_si256(code, _mm256_and_si256(is_negative, _mm256_set1_epi32(kHalf - 1)));
      const __m256i outward = _mm256_and_si256(index, _mm256_set1_epi32(kHalf - 1));
      const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(is_negative), broadcast(-0.0F));
      const __m256 level = _mm256_xor_ps(_mm256_permutevar8x32_ps(levels, outward), sign);
      _mm256_storeu_ps(values + t * head_dim + c, _mm256_mul_ps(scale, level));
    }
  }
  to_columns(values, head_dim, columns);
  turn_columns_back(columns, kSpanTokens, turn);
  for_channels(columns, head_dim, [&](int c) KVIST_LAMBDA {
    return [sign = broadcast(turn.signs[c]), balance = broadcast(head.value_balance[c])](__m256 x)
               KVIST_LAMBDA { return _mm256_div_ps(_mm256_mul_ps(x, sign), balance); };
  });
  to_rows(columns, head_dim, values);
}

// --- feedback; matrices are (D, D)

// Turns both queries of a metric by RoPE, then brings it into the basis of turned keys: along its columns.
void turn_metric(float* matrix, const KvSpanHead& head, const KvSpanMetric& metric) {
  const HeadTurn& turn = *head.turn;
  const int head_dim = turn.power * turn.odd;
  const int half = head_dim / 2;
  for (int c = 0; c < half; ++c) {
    const __m256 cosine = broadcast(metric.cosines[c]);
    const __m256 sine = broadcast(metric.sines[c]);
    const __m256 first_factor = broadcast(1.0F / head.key_balance[c]);
    const __m256 second_factor = broadcast(1.0F / head.key_balance[c + half]);
    const __m256 first_sign = broadcast(turn.signs[c]);
    const __m256 second_sign = broadcast(turn.signs[c + half]);
    float* row = matrix + c * head_dim;
    for (float* x = row; x < row + head_dim; x += kVector) {
      float* y = x + half * head_dim;
      const __m256 first = _mm256_load_ps(x);
      const __m256 second = _mm256_load_ps(y);
      const __m256 turned_first = _mm256_sub_ps(_mm256_mul_ps(first, cosine), _mm256_mul_ps(second, sine));
      const __m256 turned_second = _mm256_add_ps(_mm256_mul_ps(second, cosine), _mm256_mul_ps(first, sine));
      _mm256_store_ps(x, _mm256_mul_ps(_mm256_mul_ps(turned_first, first_factor), first_sign));
      _mm256_store_ps(y, _mm256_mul_ps(_mm256_mul_ps(turned_second, second_factor), second_sign));
    }
  }
  turn_columns(matrix, head_dim, turn);
}

KVIST_INLINE void load_tile(const float* from, std::ptrdiff_t stride, __m256 (&v)[kVector]) {
  unroll<kVector>([&](auto i) KVIST_LAMBDA { v[i] = _mm256_load_ps(from + i * stride); });
}

KVIST_INLINE void store_tile(float* to, std::ptrdiff_t stride, const __m256 (&v)[kVector]) {
  unroll<kVector>([&](auto i) KVIST_LAMBDA { _mm256_store_ps(to + i * stride, v[i]); });
}

void transpose_matrix(float* matrix, int size) {
  for (int row = 0; row < size; row += kVector) {
    for (int column = 0; column <= row; column += kVector) {
      float* below = matrix + row * size + column;
      float* above_it = matrix + column * size + row;
      __m256 lower[kVector], upper[kVector];
      load_tile(below, size, lower);
      load_tile(above_it, size, upper);
      transpose(lower);
      transpose(upper);
      store_tile(above_it, size, lower);
      store_tile(below, size, upper);
    }
  }
}

// The whole symmetric matrix from its lower triangle.
void unpack_symmetric(const float* lower, int size, float* matrix) {
  for (int row = 0; row < size; row += kVector) {
    const float* rows[kVector];
    for (int i = 0; i < kVector; ++i) {
      rows[i] = lower;
      lower += row + i + 1;
    }
    for (int column = 0; column <= row; column += kVector) {
      __m256 tile[kVector], transposed[kVector];
      // On the diagonal this reads beyond the ends of rows, see KvSpanMetric.
      unroll<kVector>([&](auto i) KVIST_LAMBDA { transposed[i] = tile[i] = _mm256_loadu_ps(rows[i] + column); });
      transpose(transposed);
      if (column == row) {
        unroll<kVector>([&](auto i)
                            KVIST_LAMBDA { tile[i] = _mm256_blend_ps(tile[i], transposed[i], 0xff & (0xfe << i)); });
      } else {
        store_tile(matrix + column * size + row, size, transposed);
      }
      store_tile(matrix + row * size + column, size, tile);
    }
  }
}

// The factor of a metric, from its last row on: each row takes its part out of those above it, eight rows at a time.
class Factor {
 public:
  Factor(float* matrix, int size) : matrix_(matrix), size_(size) {}

  void run() {
    for (int first = size_ - kVector; first >= 0; first -= kVector) {
      factor_rows(first);
      for (int row = 0; row < first; row += kTile) {
        int column = 0;
        for (; column + kVector < row + kTile; column += 2 * kVector) {
          update<2>(first, row, column);
        }
        if (column < row + kTile) {
          update<1>(first, row, column);
        }
      }
    }
  }

 private:
  static constexpr int kTile = 4;

  // The shares of eight rows, what each of them takes from those of the eight that are above it included. The rows as
  // they were before they became shares are kept.
  void factor_rows(int first) {
    for (int i = kVector - 1; i >= 0; --i) {
      float* own = matrix_ + (first + i) * size_;
      const __m256 inverse = broadcast(1.0F / own[first + i]);
      for (int column = 0; column < first + kVector; column += kVector) {
        const __m256 row = _mm256_load_ps(own + column);
        _mm256_store_ps(rows_[i] + column, row);
        _mm256_store_ps(own + column, _mm256_mul_ps(row, inverse));
      }
      for (int above_it = 0; above_it < i; ++above_it) {
        float* other = matrix_ + (first + above_it) * size_;
        const __m256 share = broadcast(own[first + above_it]);
        for (int column = 0; column < first + kVector; column += kVector) {
          const __m256 product = _mm256_mul_ps(share, _mm256_load_ps(rows_[i] + column));
          _mm256_store_ps(other + column, _mm256_sub_ps(_mm256_load_ps(other + column), product));
        }
      }
    }
  }

  // A tile above the eight rows that begin at `first`, less what these take. Beyond the diagonal nothing is read.
  template <int Vectors>
  KVIST_INLINE void update(int first, int row, int column) {
    float* tile = matrix_ + row * size_ + column;
    const float* shares = matrix_ + first * size_ + row;
    __m256 sums[kTile][Vectors];
    unroll<kTile>([&](auto r) KVIST_LAMBDA {
      unroll<Vectors>([&](auto v) KVIST_LAMBDA { sums[r][v] = _mm256_load_ps(tile + r * size_ + v * kVector); });
    });
#pragma GCC unroll 1
    for (int i = kVector - 1; i >= 0; --i) {
      __m256 taken[Vectors];
      unroll<Vectors>([&](auto v) KVIST_LAMBDA { taken[v] = _mm256_load_ps(rows_[i] + column + v * kVector); });
      unroll<kTile>([&](auto r) KVIST_LAMBDA {
        const __m256 share = _mm256_castsi256_ps(broadcast_bytes4(shares + i * size_ + r));
        unroll<Vectors>([&](auto v) KVIST_LAMBDA { sub_in_place(sums[r][v], _mm256_mul_ps(share, taken[v])); });
      });
    }
    unroll<kTile>([&](auto r) KVIST_LAMBDA {
      unroll<Vectors>([&](auto v) KVIST_LAMBDA { _mm256_store_ps(tile + r * size_ + v * kVector, sums[r][v]); });
    });
  }

  float* matrix_;
  int size_;
  alignas(32) float rows_[kVector][kMaxHeadDim];
};

void feedback(const KvSpanHead& head, const KvSpanMetric& metric, float* shares) noexcept {
  const int head_dim = head.turn->power * head.turn->odd;
  unpack_symmetric(metric.lower, head_dim, shares);
  turn_metric(shares, head, metric);
  transpose_matrix(shares, head_dim);
  turn_metric(shares, head, metric);
  float trace = 0.0F;
  for (int c = 0; c < head_dim; ++c) {
    trace += shares[c * head_dim + c];
  }
  const float damping = kMetricDamping * (trace / static_cast<float>(head_dim)) + std::numeric_limits<float>::min();
  for (int c = 0; c < head_dim; ++c) {
    shares[c * head_dim + c] += damping;
  }
  Factor(shares, head_dim).run();
}

template <int Bits>
int encode_span(const KvSpanHead& head, const float* shares, float* keys, const float* values, std::uint8_t* record,
                float* columns, std::uint8_t* codes) {
  const int num_held = encode_keys<Bits>(head, shares, keys, record, columns, codes);
  return num_held + encode_values<Bits>(head, values, record, columns, codes);
}

template <int Bits>
void decode_span(const KvSpanHead& head, const std::uint8_t* record, float* keys, float* values, float* columns,
                 std::uint8_t* codes) {
  decode_keys<Bits>(head, record, keys, columns, codes);
  decode_values<Bits>(head, record, values, columns, codes);
}

// The codes lie behind the columns.
std::uint8_t* codes_in(void* scratch, const KvSpanHead& head) {
  const std::ptrdiff_t num_values = std::ptrdiff_t{kSpanTokens} * head.turn->power * head.turn->odd;
  return reinterpret_cast<std::uint8_t*>(static_cast<float*>(scratch) + num_values);
}

int encode(int bits, const KvSpanHead& head, const float* shares, float* keys, const float* values,
           std::uint8_t* record, void* scratch) noexcept {
  const auto run = bits == 4 ? encode_span<4> : encode_span<3>;
  return run(head, shares, keys, values, record, static_cast<float*>(scratch), codes_in(scratch, head));
}

void decode(int bits, const KvSpanHead& head, const std::uint8_t* record, float* keys, float* values,
            void* scratch) noexcept {
  const auto run = bits == 4 ? decode_span<4> : decode_span<3>;
  run(head, record, keys, values, static_cast<float*>(scratch), codes_in(scratch, head));
}

}  // namespace

extern const KvSpanKernels kv_span_avx2;
const KvSpanKernels kv_span_avx2 = {feedback, encode, decode};

}  // namespace kvist
