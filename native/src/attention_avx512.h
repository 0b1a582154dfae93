// What both AVX-512 attention kernels need: the exponential, the online softmax of a chunk of keys, the output.
//
// Included by files compiled for AVX-512 only; everything is local to the file that includes it. Where keys are, and
// how scratch is handed out, is that of attention_avx2.h.
#pragma once

#include "attention_avx2.h"
#include "vec_avx512.h"

namespace kvist::avx512 {

// Many stacked rows: fixed-point tiles. Few: keys streamed once. Same contract.
std::size_t tile_scratch(const AttentionShape& shape, int num_rows);
void run_tile(const AttentionShape& shape, const AttentionItem& item, const KvLayer& layer, const AttentionRows& rows,
              std::uint8_t* scratch);
std::size_t stream_scratch(const AttentionShape& shape, int num_rows);
void run_stream(const AttentionShape& shape, const AttentionItem& item, const KvLayer& layer, const AttentionRows& rows,
                std::uint8_t* scratch);

namespace {

constexpr int kLanes = 16;  // rows of a strip share vectors of float32: at most 16
constexpr int kKeyStep = 32;

// Rows of keys that do not exist, up to a multiple of kKeyStep.
inline void fill_rows(ChunkRows& chunk, int count) {
  for (int i = count; i % kKeyStep != 0; ++i) {
    chunk.k[i] = kZeroRow;
    chunk.v[i] = kZeroRow;
  }
}

// The float16 scales of group `group` of `count` rows, zeros up to a multiple of kKeyStep.
inline void load_filled_scales(const std::uint8_t* const* rows, int count, int head_dim, int group, float* scales) {
  load_scales(RowsAnywhere{rows}, count, head_dim, group, scales);
  for (int key = round_up(count, 16); key % kKeyStep != 0; ++key) {
    scales[key] = 0.0F;
  }
}

// V scales of a chunk, divided by their maximum and multiplied by kWeight15: what a weight is multiplied by before it
// becomes an integer. Returns what undoes it: NaN when a scale is, since the integers cannot say so.
inline float normalise_scales(float* scales, int num_keys) {
  __m512 largest = _mm512_setzero_ps();
  __m512 all = _mm512_setzero_ps();
  for (int i = 0; i < num_keys; i += kLanes) {
    const __m512 scale = _mm512_load_ps(scales + i);
    largest = _mm512_max_ps(largest, scale);
    all = _mm512_add_ps(all, scale);
  }
  if (_mm512_cmp_ps_mask(all, all, _CMP_UNORD_Q) != 0) {
    return __builtin_nanf("");
  }
  const float maximum = reduce(largest, Max{});
  const __m512 factor = _mm512_set1_ps(maximum > 0.0F ? static_cast<float>(kWeight15) / maximum : 0.0F);
  for (int i = 0; i < num_keys; i += kLanes) {
    _mm512_store_ps(scales + i, _mm512_mul_ps(_mm512_load_ps(scales + i), factor));
  }
  return maximum / static_cast<float>(kWeight15);
}

// 2^x for x <= 126, relative error 3e-6 with degree 4, 1e-7 with degree 5; at or below -126 it is 2^-126, of NaN it is
// NaN.
template <int kDegree>
inline __m512 exp2(__m512 x) {
  static_assert(kDegree == 4 || kDegree == 5);
  const __m512 magic = _mm512_set1_ps(12582912.0F);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  x = _mm512_max_ps(_mm512_set1_ps(-126.0F), x);     // in this order: where either is NaN the second is the result
  const __m512 shifted = _mm512_add_ps(x, magic);
  const __m512 f = _mm512_sub_ps(x, _mm512_sub_ps(shifted, magic));
  __m512 p;
  if constexpr (kDegree == 5) {
    p = _mm512_set1_ps(0.001326472731307149F);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.009671512991189957F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.05550733581185341F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24022242426872253F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6931470036506653F));
  } else {
    p = _mm512_set1_ps(0.009582852944731712F);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.055906426161527634F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24024099111557007F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6931241750717163F));
  }
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0F));
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent));
}

// The softmax of up to 16 rows, kept over chunks.
struct StripState {
  alignas(64) float maxima[kLanes];   // of the scores so far, in units of log2(e)
  alignas(64) float weights[kLanes];  // sum of exp2(score - maximum)
};

inline void reset(StripState& state) {
  _mm512_store_ps(state.maxima, _mm512_set1_ps(kNoScore));
  _mm512_store_ps(state.weights, _mm512_setzero_ps());
}

// One strip against one chunk.
struct StripChunk {
  alignas(64) float scores[kLanes][kChunk];  // before the factor
  alignas(64) std::int16_t weights[kMaxGroups][kLanes][kChunk];
  alignas(64) float old_factor[kLanes];  // multiplies the sums so far
  alignas(64) float new_factor[kLanes];  // multiplies the sums of this chunk
  std::int32_t first_key[kLanes];        // places that a row sees: [first_key, last_key)
  std::int32_t last_key[kLanes];
};

constexpr int kWeight13 = 8192;  // 2^13: 8192 * 4095 * 64 < 2^31

// How weights leave the softmax.
enum class Weights {
  kFloat,    // float32 in place of the scores, relative to the maximum so far
  kFixed13,  // integers, relative to the chunk's maximum, times 2^13
  kFixed15,  // integers, relative to the chunk's maximum, times a row of factors for each group of D
};

// Scores become softcap * tanh(score / softcap), in units of log2(e): the factor is then 1.
inline void apply_softcap(StripChunk& chunk, int num_rows, int num_vectors, const float* factor, float softcap) {
  const __m512 one = _mm512_set1_ps(1.0F);
  const __m512 cap = _mm512_set1_ps(softcap * kLog2E);
  for (int r = 0; r < num_rows; ++r) {
    const __m512 doubled = _mm512_set1_ps(factor[r] * 2.0F / softcap);
    for (int i = 0; i < num_vectors; ++i) {
      float* const score = chunk.scores[r] + kLanes * i;
      const __m512 x = _mm512_mul_ps(_mm512_load_ps(score), doubled);
      const __m512 e = exp2<5>(_mm512_min_ps(_mm512_set1_ps(126.0F), x));
      const __m512 t = _mm512_div_ps(_mm512_set1_ps(2.0F), _mm512_add_ps(e, one));
      _mm512_store_ps(score, _mm512_mul_ps(cap, _mm512_sub_ps(one, t)));
    }
  }
}

// Turns the scores of a chunk into weights and updates the state. `factor` (lane per row, >= 0) brings scores to units
// of log2(e). About 18 instructions per 16 scores. With kFixed13 the integers are summed, so that the weights used are
// the weights normalised by. num_vectors is even.
template <Weights kWeights, bool kMasked>
[[gnu::noinline]] void softmax_chunk(StripState& state, StripChunk& chunk, int num_rows, int num_vectors,
                                     const float* factor, const float* value_factors, int num_groups) {
  const auto seen = [&](int r, int i) {
    const auto before = first_lanes(chunk.first_key[r] - kLanes * i);
    return static_cast<__mmask16>(first_lanes(chunk.last_key[r] - kLanes * i) & ~before);
  };
  const __m512 no_score = _mm512_set1_ps(kNoScore);
  __m512 row_vectors[kLanes];
  for (int r = 0; r < kLanes; ++r) {
    row_vectors[r] = no_score;
  }
  for (int r = 0; r < num_rows; ++r) {
    __m512 largest = no_score;
    for (int i = 0; i < num_vectors; ++i) {
      __m512 score = _mm512_load_ps(chunk.scores[r] + kLanes * i);
      if constexpr (kMasked) {
        score = _mm512_mask_blend_ps(seen(r, i), no_score, score);
      }
      largest = _mm512_max_ps(largest, score);
    }
    row_vectors[r] = largest;
  }
  const __m512 chunk_max = _mm512_mul_ps(reduce_each(row_vectors, Max{}), _mm512_load_ps(factor));
  const __m512 old_max = _mm512_load_ps(state.maxima);
  const __m512 new_max = _mm512_max_ps(old_max, chunk_max);
  const __m512 old_factor = exp2<5>(_mm512_sub_ps(old_max, new_max));
  const __m512 new_factor =
      kWeights == Weights::kFloat ? _mm512_set1_ps(1.0F) : exp2<5>(_mm512_sub_ps(chunk_max, new_max));
  _mm512_store_ps(state.maxima, new_max);
  _mm512_store_ps(chunk.old_factor, old_factor);
  alignas(64) float reference[kLanes];
  if constexpr (kWeights == Weights::kFloat) {
    _mm512_store_ps(reference, new_max);
  } else if constexpr (kWeights == Weights::kFixed13) {
    _mm512_store_ps(reference, _mm512_sub_ps(chunk_max, _mm512_set1_ps(13.0F)));
  } else {
    _mm512_store_ps(reference, chunk_max);
  }
  for (int r = 0; r < kLanes; ++r) {
    row_vectors[r] = _mm512_setzero_ps();
  }
  constexpr int kDegree = kWeights == Weights::kFloat ? 5 : 4;
  // Packing goes by quarters: the order of 64 bits that undoes it.
  const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
  for (int r = 0; r < num_rows; ++r) {
    const __m512 scale = _mm512_set1_ps(factor[r]);
    const __m512 subtract = _mm512_set1_ps(reference[r]);
    const auto weight = [&](int i) KVIST_LAMBDA {
      const __m512 score = _mm512_load_ps(chunk.scores[r] + kLanes * i);
      __m512 p = exp2<kDegree>(_mm512_fmsub_ps(score, scale, subtract));
      if constexpr (kMasked) {
        p = _mm512_maskz_mov_ps(seen(r, i), p);
      }
      return p;
    };
    const auto store_integers = [&](int group, int i, __m512 low, __m512 high) KVIST_LAMBDA {
      const __m512i a = _mm512_cvtps_epi32(low);
      const __m512i b = _mm512_cvtps_epi32(high);
      _mm512_store_si512(chunk.weights[group][r] + kLanes * i,
                         _mm512_permutexvar_epi64(order, _mm512_packs_epi32(a, b)));
      return _mm512_add_epi32(a, b);
    };
    __m512i integer_sum = _mm512_setzero_si512();
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < num_vectors; i += 2) {
      const __m512 low = weight(i);
      const __m512 high = weight(i + 1);
      if constexpr (kWeights == Weights::kFixed13) {
        integer_sum = _mm512_add_epi32(integer_sum, store_integers(0, i, low, high));
      } else {
        sum = _mm512_add_ps(sum, _mm512_add_ps(low, high));
        if constexpr (kWeights == Weights::kFloat) {
          _mm512_store_ps(chunk.scores[r] + kLanes * i, low);
          _mm512_store_ps(chunk.scores[r] + kLanes * (i + 1), high);
        } else {
          for (int g = 0; g < num_groups; ++g) {
            const float* const factors = value_factors + g * kChunk + kLanes * i;
            store_integers(g, i, _mm512_mul_ps(low, _mm512_load_ps(factors)),
                           _mm512_mul_ps(high, _mm512_load_ps(factors + kLanes)));
          }
        }
      }
    }
    row_vectors[r] = kWeights == Weights::kFixed13 ? _mm512_cvtepi32_ps(integer_sum) : sum;
  }
  __m512 scaled = new_factor;
  if constexpr (kWeights == Weights::kFixed13) {
    scaled = _mm512_mul_ps(new_factor, _mm512_set1_ps(1.0F / static_cast<float>(kWeight13)));
  }
  _mm512_store_ps(chunk.new_factor, scaled);
  const __m512 sums = reduce_each(row_vectors, Add{});
  _mm512_store_ps(state.weights,
                  _mm512_fmadd_ps(_mm512_load_ps(state.weights), old_factor, _mm512_mul_ps(sums, scaled)));
}

// The softmax of a chunk's raw scores, with the variants chosen.
template <Weights kWeights>
inline void soften(StripState& state, StripChunk& chunk, int num_rows, int num_keys, bool masked, float softcap,
                   const float* factor, const float* value_factors, int num_groups) {
  alignas(64) float ones[kLanes];
  if (softcap > 0.0F) {
    apply_softcap(chunk, num_rows, num_keys / kLanes, factor, softcap);
    const __m512 given = _mm512_load_ps(factor);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(given, given, _CMP_UNORD_Q);
    _mm512_store_ps(ones, _mm512_mask_blend_ps(is_nan, _mm512_set1_ps(1.0F), given));
    factor = ones;
  }
  if (masked) {
    softmax_chunk<kWeights, true>(state, chunk, num_rows, num_keys / kLanes, factor, value_factors, num_groups);
  } else {
    softmax_chunk<kWeights, false>(state, chunk, num_rows, num_keys / kLanes, factor, value_factors, num_groups);
  }
}

// Which places of the chunk [begin, begin + count) any row sees, as [first, last), and whether some row does not see
// all of them.
struct Seen {
  int first;
  int last;
  bool masked;
};

inline Seen see(const std::int32_t* positions, int num_rows, int window, int begin, int count, StripChunk& chunk) {
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

// Writes stacked row `stacked` (query row stacked / group, head stacked % group of the item's) to where it belongs.
inline void write_row(const AttentionShape& shape, const AttentionItem& item, const AttentionRows& rows, int stacked,
                      const float* sums, float maximum, float weights) {
  const int head_dim = shape.layout.head_dim;
  const int group = shape.num_heads / shape.layout.num_kv_heads;
  const int i = stacked / group;
  const int head = item.kv_head * group + stacked % group;
  float* out = rows.out + item.rows[i] * rows.out_stride + static_cast<std::ptrdiff_t>(head) * head_dim;
  float factor = 1.0F / weights;
  if (item.partial_sums != nullptr) {
    const std::ptrdiff_t result = static_cast<std::ptrdiff_t>(i) * shape.num_heads + head;
    item.partial_weights[2 * result] = maximum;
    item.partial_weights[2 * result + 1] = weights;
    out = item.partial_sums + result * head_dim;
    factor = 1.0F;
  }
  for (int d = 0; d < head_dim; d += kLanes) {
    const __m512 value = _mm512_mul_ps(_mm512_load_ps(sums + d), _mm512_set1_ps(factor));
    _mm512_mask_storeu_ps(out + d, first_lanes(head_dim - d), value);
  }
}

}  // namespace
}  // namespace kvist::avx512
