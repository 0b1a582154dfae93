// Attention of few stacked rows on AVX-512: keys are widened in registers as they come, and read once per item.
//
// Chunks of 64 keys: scores of 4 keys and up to 3 rows at a time (12 sums in registers, reduced for 16 keys together),
// one softmax update, then the weighted sum over the chunk, for up to 6 rows at a time. More rows take more passes over
// the chunk, which is in the first-level cache by then. D is a multiple of 32.
//
//   raw16    float32: a load that widens and a shift for 16 values
//   int8     vpdpwssd: the row quantised to 15 bits against the codes, D products in D / 32 instructions; the weights
//            times V's scales in 15 bits, against pairs of keys
//
// Memory: every line of K and V once, the next chunk's prefetched. Scores and sums are float32, integer sums exact.

#include "attention_avx512.h"

namespace kvist::avx512 {
namespace {

constexpr int kQueryLimit = 32767;  // 32767 * 127 * 64 < 2^31
constexpr int kScorePass = 3;       // rows at a time: 4 sums, and 4 vectors of folded ones
constexpr int kAddPass = 6;

struct Buffers {
  std::int16_t* queries;
  float* float_queries;
  float* sums;
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

inline __m512i load_codes(const std::uint8_t* row) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)));
}

// Scores of kRows rows against the keys of a chunk, up to a multiple of 16.
template <int kRows>
[[gnu::noinline]] void score_int8(const std::int16_t* queries, const std::uint8_t* const* rows, int count, int head_dim,
                                  const float* key_scales, float* scores) {
  for (int first = 0; first < head_dim; first += kKvGroup, key_scales += kChunk) {
    const int last = head_dim < first + kKvGroup ? head_dim : first + kKvGroup;
    for (int key = 0; key < count; key += 16) {
      __m512 folded[kRows][4];
      unroll<4>([&](auto quad) KVIST_LAMBDA {
        const std::uint8_t* const* four = rows + key + 4 * quad;
        __m512i sums[kRows][4];
        unroll<kRows>(
            [&](auto r) KVIST_LAMBDA { unroll<4>([&](auto i) KVIST_LAMBDA { sums[r][i] = _mm512_setzero_si512(); }); });
        for (int d = first; d < last; d += 32) {
          const __m512i k[4] = {load_codes(four[0] + d), load_codes(four[1] + d), load_codes(four[2] + d),
                                load_codes(four[3] + d)};
          unroll<kRows>([&](auto r) KVIST_LAMBDA {
            const __m512i q = load(queries + r * head_dim + d);
            unroll<4>([&](auto i) KVIST_LAMBDA { add_pairs(sums[r][i], k[i], q); });
          });
        }
        unroll<kRows>([&](auto r) KVIST_LAMBDA {
          const __m512 bits[4] = {_mm512_castsi512_ps(sums[r][0]), _mm512_castsi512_ps(sums[r][1]),
                                  _mm512_castsi512_ps(sums[r][2]), _mm512_castsi512_ps(sums[r][3])};
          folded[r][quad] = fold_four(bits, AddIntegers{});
        });
      });
      const __m512 scale = _mm512_load_ps(key_scales + key);
      unroll<kRows>([&](auto r) KVIST_LAMBDA {
        float* const to = scores + r * kChunk + key;
        const __m512 sum = _mm512_cvtepi32_ps(_mm512_castps_si512(fold_quarters(folded[r], AddIntegers{})));
        _mm512_store_ps(to, first == 0 ? _mm512_mul_ps(sum, scale) : _mm512_fmadd_ps(sum, scale, _mm512_load_ps(to)));
      });
    }
  }
}

template <int kRows>
[[gnu::noinline]] void score_raw16(const float* queries, const std::uint8_t* const* rows, int count, int head_dim,
                                   float* scores) {
  for (int key = 0; key < count; key += 16) {
    __m512 folded[kRows][4];
    unroll<4>([&](auto quad) KVIST_LAMBDA {
      const std::uint8_t* const* four = rows + key + 4 * quad;
      __m512 sums[kRows][4];
      unroll<kRows>([&](auto r)
                        KVIST_LAMBDA { unroll<4>([&](auto i) KVIST_LAMBDA { sums[r][i] = _mm512_setzero_ps(); }); });
      for (int d = 0; d < head_dim; d += 16) {
        const __m512 k[4] = {widen_bf16(four[0] + 2 * d), widen_bf16(four[1] + 2 * d), widen_bf16(four[2] + 2 * d),
                             widen_bf16(four[3] + 2 * d)};
        unroll<kRows>([&](auto r) KVIST_LAMBDA {
          const __m512 q = _mm512_load_ps(queries + r * head_dim + d);
          unroll<4>([&](auto i) KVIST_LAMBDA { sums[r][i] = _mm512_fmadd_ps(k[i], q, sums[r][i]); });
        });
      }
      unroll<kRows>([&](auto r) KVIST_LAMBDA { folded[r][quad] = fold_four(sums[r], Add{}); });
    });
    unroll<kRows>([&](auto r)
                      KVIST_LAMBDA { _mm512_store_ps(scores + r * kChunk + key, fold_quarters(folded[r], Add{})); });
  }
}

// Adds a chunk's weighted values to the sums of kRows rows, 32 values at a time.
template <int kRows>
[[gnu::noinline]] void add_int8(float* all_sums, const std::uint8_t* const* rows, int count, int head_dim,
                                const float* undo, const StripChunk& chunk, int first_row) {
  for (int d = 0; d < head_dim; d += 32) {
    const int group = d / kKvGroup;
    const std::int16_t* weights = &chunk.weights[group][first_row][0];
    __m512i sums[kRows][2];
    unroll<kRows>([&](auto r) KVIST_LAMBDA { sums[r][0] = sums[r][1] = _mm512_setzero_si512(); });
    for (int key = 0; key < count; key += 2, weights += 2) {
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[key] + d));
      const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[key + 1] + d));
      // Pairs of the values 0 to 7 and 16 to 23, and of the others.
      const __m512i low = _mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(a, b));
      const __m512i high = _mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(a, b));
      unroll<kRows>([&](auto r) KVIST_LAMBDA {
        const __m512i weight = broadcast_bytes4(weights + r * kChunk);
        add_pairs(sums[r][0], low, weight);
        add_pairs(sums[r][1], high, weight);
      });
    }
    unroll<kRows>([&](auto r) KVIST_LAMBDA {
      const __m512 shrink = _mm512_set1_ps(chunk.old_factor[first_row + r]);
      const __m512 scale = _mm512_set1_ps(chunk.new_factor[first_row + r] * undo[group]);
      const __m512 outer = _mm512_cvtepi32_ps(sums[r][0]);
      const __m512 inner = _mm512_cvtepi32_ps(sums[r][1]);
      float* const to = all_sums + r * head_dim + d;
      const auto add = [&](float* sum, __m512 added) KVIST_LAMBDA {
        _mm512_store_ps(sum, _mm512_fmadd_ps(added, scale, _mm512_mul_ps(_mm512_load_ps(sum), shrink)));
      };
      add(to, _mm512_shuffle_f32x4(outer, inner, 0x44));
      add(to + 16, _mm512_shuffle_f32x4(outer, inner, 0xee));
    });
  }
}

// The same from bfloat16, 16 * kBlocks values at a time: enough sums to hide the latency of an FMA.
template <int kRows, int kBlocks>
inline void add_raw16_blocks(float* all_sums, const std::uint8_t* const* rows, int count, int head_dim, int d,
                             const StripChunk& chunk, int first_row) {
  __m512 sums[kRows][kBlocks];
  unroll<kRows>([&](auto r) KVIST_LAMBDA {
    const __m512 shrink = _mm512_set1_ps(chunk.old_factor[first_row + r]);
    unroll<kBlocks>([&](auto i) KVIST_LAMBDA {
      sums[r][i] = _mm512_mul_ps(shrink, _mm512_load_ps(all_sums + r * head_dim + d + 16 * i));
    });
  });
  const float* weights = &chunk.scores[first_row][0];
  for (int key = 0; key < count; ++key, ++weights) {
    __m512 values[kBlocks];
    unroll<kBlocks>([&](auto i) KVIST_LAMBDA { values[i] = widen_bf16(rows[key] + 2 * (d + 16 * i)); });
    unroll<kRows>([&](auto r) KVIST_LAMBDA {
      const __m512 weight = broadcast_float(weights + r * kChunk);
      unroll<kBlocks>([&](auto i) KVIST_LAMBDA { sums[r][i] = _mm512_fmadd_ps(values[i], weight, sums[r][i]); });
    });
  }
  unroll<kRows>([&](auto r) KVIST_LAMBDA {
    unroll<kBlocks>([&](auto i) KVIST_LAMBDA { _mm512_store_ps(all_sums + r * head_dim + d + 16 * i, sums[r][i]); });
  });
}

template <int kRows>
[[gnu::noinline]] void add_raw16(float* all_sums, const std::uint8_t* const* rows, int count, int head_dim,
                                 const StripChunk& chunk, int first_row) {
  int d = 0;
  for (; d + 64 <= head_dim; d += 64) {
    add_raw16_blocks<kRows, 4>(all_sums, rows, count, head_dim, d, chunk, first_row);
  }
  if (d < head_dim) {
    add_raw16_blocks<kRows, 2>(all_sums, rows, count, head_dim, d, chunk, first_row);
  }
}

// Calls body with a constant number of rows up to kMost and the first row, until all rows had their turn: passes as
// equal as can be.
template <int kMost, typename Body>
inline void for_passes(int num_rows, Body&& body) {
  for (int first = 0, left = num_rows; left > 0;) {
    const int rows = ceil_div(left, ceil_div(left, kMost));
    unroll<kMost>([&](auto i) KVIST_LAMBDA {
      if (rows == i + 1) {
        body(std::integral_constant<int, i + 1>{}, first);
      }
    });
    first += rows;
    left -= rows;
  }
}

// Queries as the scores need them; returns the factor that brings scores to units of log2(e).
float prepare_query(const float* x, int head_dim, bool is_int8, float to_log2, std::int16_t* codes, float* values) {
  if (!is_int8) {
    __builtin_memcpy(values, x, sizeof(float) * static_cast<std::size_t>(head_dim));
    return to_log2;
  }
  __m512 most = _mm512_setzero_ps();
  for (int d = 0; d < head_dim; d += 16) {
    most = _mm512_max_ps(most, absolute(_mm512_loadu_ps(x + d)));
  }
  const float largest = reduce(most, Max{});
  const __m512 inverse = _mm512_set1_ps(largest > 0.0F ? static_cast<float>(kQueryLimit) / largest : 0.0F);
  for (int d = 0; d < head_dim; d += 16) {
    const __m512i integers = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + d), inverse));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + d), _mm512_cvtsepi32_epi16(integers));
  }
  return largest / static_cast<float>(kQueryLimit) * to_log2;
}

}  // namespace

std::size_t stream_scratch(const AttentionShape& shape, int) {
  Scratch scratch(nullptr);
  divide(scratch, shape.layout.head_dim);
  return scratch.used();
}

void run_stream(const AttentionShape& shape, const AttentionItem& item, const KvLayer& layer, const AttentionRows& rows,
                std::uint8_t* scratch_bytes) {
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
  alignas(64) float factor[kLanes] = {};
  for (int row = 0; row < num_rows; ++row) {
    factor[row] = prepare_query(query_row(shape, item, rows, row), head_dim, is_int8, shape.scale * kLog2E,
                                b.queries + row * head_dim, b.float_queries + row * head_dim);
    b.positions[row] = item.positions[row / group];
  }
  __builtin_memset(b.sums, 0, sizeof(float) * static_cast<std::size_t>(num_rows) * static_cast<std::size_t>(head_dim));

  alignas(64) float key_scales[kMaxGroups * kChunk];
  alignas(64) float value_factors[kMaxGroups * kChunk];
  float undo[kMaxGroups] = {};
  StripChunk chunk;
  ChunkRows located[2];
  const auto chunk_end = [&](int begin) { return begin + kChunk < item.key_end ? begin + kChunk : item.key_end; };
  locate_rows<false>(layout, item, layer, item.key_begin, chunk_end(item.key_begin), located[0]);
  int current = 0;
  for (int begin = item.key_begin; begin < item.key_end; begin += kChunk, current ^= 1) {
    const int count = chunk_end(begin) - begin;
    const int padded_count = round_up(count, kKeyStep);
    ChunkRows& here = located[current];
    fill_rows(here, count);
    const int next_begin = begin + kChunk;
    if (next_begin < item.key_end) {
      locate_rows<true>(layout, item, layer, next_begin, chunk_end(next_begin), located[current ^ 1]);
    }
    const Seen seen = see(b.positions, num_rows, shape.window, begin, count, chunk);
    if (seen.last <= seen.first) {
      continue;
    }
    const bool masked = seen.masked || count != padded_count;
    if (is_int8) {
      for (int g = 0; g < num_groups; ++g) {
        load_filled_scales(here.k, count, head_dim, g, key_scales + g * kChunk);
        load_filled_scales(here.v, count, head_dim, g, value_factors + g * kChunk);
        undo[g] = normalise_scales(value_factors + g * kChunk, padded_count);
      }
      for_passes<kScorePass>(num_rows, [&](auto pass, int first) {
        score_int8<pass()>(b.queries + first * head_dim, here.k, padded_count, head_dim, key_scales,
                           &chunk.scores[first][0]);
      });
      soften<Weights::kFixed15>(state, chunk, num_rows, padded_count, masked, shape.softcap, factor, value_factors,
                                num_groups);
      for_passes<kAddPass>(num_rows, [&](auto pass, int first) {
        add_int8<pass()>(b.sums + first * head_dim, here.v, count, head_dim, undo, chunk, first);
      });
    } else {
      for_passes<kScorePass>(num_rows, [&](auto pass, int first) {
        score_raw16<pass()>(b.float_queries + first * head_dim, here.k, padded_count, head_dim,
                            &chunk.scores[first][0]);
      });
      soften<Weights::kFloat>(state, chunk, num_rows, padded_count, masked, shape.softcap, factor, nullptr, 1);
      for_passes<kAddPass>(num_rows, [&](auto pass, int first) {
        add_raw16<pass()>(b.sums + first * head_dim, here.v, count, head_dim, chunk, first);
      });
    }
  }
  for (int row = 0; row < num_rows; ++row) {
    write_row(shape, item, rows, row, b.sums + row * head_dim, state.maxima[row], state.weights[row]);
  }
}

}  // namespace kvist::avx512
