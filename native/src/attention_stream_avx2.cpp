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
// KV heads of an item take turns chunk by chunk: theirs lie side by side in a block, and blocks are far apart.
//
// Memory: every line of K and V once, the next chunk's asked for as this one is worked on. At D = 64 and 3 rows a key
// takes some 28 (int8) or 39 cycles (raw16) on Zen 3 in the first-level cache, int8 1.4 times as long from memory.
// Scores and sums are float32, integer sums exact.

#include "attention_avx2.h"

namespace kvist {
namespace {

constexpr int kQueryLimit = 32767;  // 32767 * 127 * 64 < 2^31
constexpr int kScorePass = 3;       // rows at a time: 2 sums and a vector of the row each
constexpr int kAddPass = 6;         // 2 sums each
constexpr int kLine = 64;
constexpr int kMaxHeadsTogether = 8;
constexpr int kHeadsBytes = 16384;  // of the rows and sums of heads together: half of the first-level cache

struct Buffers {
  std::int16_t* queries;
  float* float_queries;  // blocks of 16: even values, odd values
  float* sums;           // blocks of 16: raw16's even values, then the odd ones
};

Buffers divide(Scratch& scratch, int head_dim) {
  const auto width = static_cast<std::size_t>(head_dim);
  Buffers b{};
  b.queries = scratch.take<std::int16_t>(kLanes * width);
  b.float_queries = scratch.take<float>(kLanes * width);
  b.sums = scratch.take<float>(kLanes * width);
  return b;
}

// How often scores ask in each of their steps: 4 keys, and in int8 a group of values.
constexpr int kScoreInt8Asks = 3;
constexpr int kScoreRaw16Asks = 6;

// How K or V of the next chunk is covered: by asks of the loop over keys and, where those are too few, by others before
// and after it.
struct Asks {
  int before;
  int after;
  int in_loop;
  std::uintptr_t step;  // of those in the loop
};

Asks spread(int row_bytes, int in_loop) {
  const int num_lines = row_bytes * kChunk / kLine + 1;  // one more where it does not begin with a line
  if (num_lines <= in_loop) {
    return {0, 0, in_loop, static_cast<std::uintptr_t>(ceil_div(num_lines * kLine, in_loop))};
  }
  const int beside = num_lines - in_loop;
  return {beside * 2 / 5, beside - beside * 2 / 5, in_loop, kLine};  // as long as what is done there takes
}

// Asks for `count` lines, from line `first` of what begins at `base` on. Null: for nothing.
inline void ask_lines(const std::uint8_t* base, int first, int count) {
  Ahead ahead{reinterpret_cast<std::uintptr_t>(base) + static_cast<std::uintptr_t>(first * kLine), kLine};
  for (int i = 0; base != nullptr && i < count; ++i) {
    ahead.ask();
  }
}

// For a loop, from line `first` on.
inline Ahead loop_ahead(const std::uint8_t* base, int first, const Asks& asks) {
  if (base == nullptr) {
    return {reinterpret_cast<std::uintptr_t>(kZeroRow), 0};
  }
  return {reinterpret_cast<std::uintptr_t>(base) + static_cast<std::uintptr_t>(first * kLine), asks.step};
}

// Where K of the keys [begin, end) begins, which V follows by v_offset; null where they are in several blocks.
const std::uint8_t* in_one_block(const KvLayout& layout, const AttentionItem& item, const KvLayer& layer, int begin,
                                 int end, std::int64_t v_offset) {
  const int block = begin / layout.block_size;
  if (end - block * layout.block_size > layout.block_size) {
    return nullptr;
  }
  return layer.base + item.block_offsets[block] + item.kv_head * (v_offset / layout.num_kv_heads) +
         static_cast<std::int64_t>(begin - block * layout.block_size) * layout.row_bytes;
}

// The same for keys to be asked for. Null where there are none, too. Those in several blocks are asked for at once.
const std::uint8_t* look_ahead(const KvLayout& layout, const AttentionItem& item, const KvLayer& layer, int begin,
                               int end, std::int64_t v_offset) {
  if (begin >= end) {
    return nullptr;
  }
  const std::uint8_t* const keys = in_one_block(layout, item, layer, begin, end, v_offset);
  if (keys == nullptr) {
    ChunkRows rows;
    locate_rows<true>(layout, item, layer, begin, end, rows);
  }
  return keys;
}

inline __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

inline __m256i load_codes(const std::uint8_t* row) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row)));
}

// Half of a transposition: sums of neighbours of a and of b, by turns.
inline __m256i fold(__m256i a, __m256i b) {
  return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}

inline __m256 fold(__m256 a, __m256 b) { return _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)); }

// The other half: the sums of 4 vectors from two folded pairs.
inline __m128i sum_of_each4(__m256i ab, __m256i cd) {
  const __m256i all = _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  return _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

inline __m128 sum_of_each4(__m256 ab, __m256 cd) {
  const __m256 all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

// Scores of kRows rows against the keys of a chunk, up to a multiple of 4, by 16 * kBlocks values. Two keys at a time: a
// row's vectors stay in registers as far as there are any, and are operands in memory otherwise.
template <int kRows, int kBlocks, typename At>
[[gnu::always_inline]] inline void score_int8_group(const std::int16_t* queries, const At& at, int count, int head_dim,
                                                    int first, const float* key_scales, Ahead& ahead, float* scores) {
  __m256i q[kRows][kBlocks];
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    unroll<kBlocks>([&](auto i) __attribute__((always_inline)) {
      q[r()][i()] = load(queries + r() * head_dim + first + 16 * i());
    });
  });
  for (int key = 0; key < count; key += 4) {
    unroll<kScoreInt8Asks>([&](auto) __attribute__((always_inline)) { ahead.ask(); });
    __m256i folded[kRows][2];
    unroll<2>([&](auto half) __attribute__((always_inline)) {
      const std::uint8_t* const one = at(key + 2 * half()) + first;
      const std::uint8_t* const two = at(key + 2 * half() + 1) + first;
      __m256i sums[kRows][2];
      unroll<kBlocks>([&](auto i) __attribute__((always_inline)) {
        const __m256i a = load_codes(one + 16 * i());
        const __m256i b = load_codes(two + 16 * i());
        unroll<kRows>([&](auto r) __attribute__((always_inline)) {
          if constexpr (i() == 0) {
            sums[r()][0] = _mm256_madd_epi16(a, q[r()][i()]);
            sums[r()][1] = _mm256_madd_epi16(b, q[r()][i()]);
          } else {
            add_in_place(sums[r()][0], _mm256_madd_epi16(a, q[r()][i()]));
            add_in_place(sums[r()][1], _mm256_madd_epi16(b, q[r()][i()]));
          }
        });
      });
      unroll<kRows>([&](auto r)
                        __attribute__((always_inline)) { folded[r()][half()] = fold(sums[r()][0], sums[r()][1]); });
    });
    const __m128 scale = _mm_load_ps(key_scales + key);
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      float* const to = scores + r() * kChunk + key;
      const __m128 sum = _mm_cvtepi32_ps(sum_of_each4(folded[r()][0], folded[r()][1]));
      _mm_store_ps(to, first == 0 ? _mm_mul_ps(sum, scale) : _mm_fmadd_ps(sum, scale, _mm_load_ps(to)));
    });
  }
}

template <int kRows, typename At>
[[gnu::noinline]] void score_int8(const std::int16_t* queries, At at, int count, int head_dim, const float* key_scales,
                                  Ahead ahead, float* scores) {
  int first = 0;
  for (; first + kKvGroup <= head_dim; first += kKvGroup, key_scales += kChunk) {
    score_int8_group<kRows, kKvGroup / 16>(queries, at, count, head_dim, first, key_scales, ahead, scores);
  }
  unroll<kKvGroup / 16 - 1>([&](auto i) __attribute__((always_inline)) {
    if (head_dim - first == 16 * (i() + 1)) {
      score_int8_group<kRows, i() + 1>(queries, at, count, head_dim, first, key_scales, ahead, scores);
    }
  });
}

inline void widen(__m256i x, __m256& even, __m256& odd) {
  even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000U))));
}

template <int kRows>
[[gnu::noinline]] void score_raw16(const float* queries, const std::uint8_t* const* rows, int count, int head_dim,
                                   Ahead ahead, float* scores) {
  for (int key = 0; key < count; key += 4) {
    unroll<kScoreRaw16Asks>([&](auto) __attribute__((always_inline)) { ahead.ask(); });
    __m256 folded[kRows][2];
    unroll<2>([&](auto half) __attribute__((always_inline)) {
      const std::uint8_t* const one = rows[key + 2 * half()];
      const std::uint8_t* const two = rows[key + 2 * half() + 1];
      __m256 sums[kRows][4];  // of even and odd values apart: enough sums to hide the latency of an FMA
      unroll<kRows>([&](auto r) __attribute__((always_inline)) {
        unroll<4>([&](auto i) __attribute__((always_inline)) { sums[r()][i()] = _mm256_setzero_ps(); });
      });
      for (int d = 0; d < head_dim; d += 16) {
        __m256 even[2];
        __m256 odd[2];
        widen(load(one + 2 * d), even[0], odd[0]);
        widen(load(two + 2 * d), even[1], odd[1]);
        unroll<kRows>([&](auto r) __attribute__((always_inline)) {
          const __m256 q = _mm256_load_ps(queries + r() * head_dim + d);
          add_in_place(sums[r()][0], even[0], q);
          add_in_place(sums[r()][1], even[1], q);
        });
        unroll<kRows>([&](auto r) __attribute__((always_inline)) {
          const __m256 q = _mm256_load_ps(queries + r() * head_dim + d + 8);
          add_in_place(sums[r()][2], odd[0], q);
          add_in_place(sums[r()][3], odd[1], q);
        });
      }
      unroll<kRows>([&](auto r) __attribute__((always_inline)) {
        folded[r()][half()] =
            fold(_mm256_add_ps(sums[r()][0], sums[r()][2]), _mm256_add_ps(sums[r()][1], sums[r()][3]));
      });
    });
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      _mm_store_ps(scores + r() * kChunk + key, sum_of_each4(folded[r()][0], folded[r()][1]));
    });
  }
}

using TwoWeights [[gnu::may_alias]] = std::int32_t;

// Adds a chunk's weighted values to the sums of kRows rows, 16 * kBlocks values at a time. Codes are widened as they are
// loaded, which takes half the time that it takes from a register, and paired by key afterwards.
template <int kRows, int kBlocks, typename At>
[[gnu::always_inline]] inline void add_int8_blocks(float* all_sums, const At& at, int count, int head_dim, int d,
                                                   const float* undo, const StripChunk& chunk, int first_row,
                                                   Ahead& ahead) {
  const int group = d / kKvGroup;
  const std::int16_t* const weights = &chunk.weights[group][first_row][0];
  __m256i sums[kRows][kBlocks][2];
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    unroll<kBlocks>([&](auto i) __attribute__((always_inline)) {
      sums[r()][i()][0] = _mm256_setzero_si256();
      sums[r()][i()][1] = _mm256_setzero_si256();
    });
  });
  // Weights of keys that do not exist are 0.
  for (int key = 0; key < count; key += 4) {
    unroll<kBlocks>([&](auto) __attribute__((always_inline)) { ahead.ask(); });
    unroll<2 * kBlocks>([&](auto step) __attribute__((always_inline)) {
      constexpr int pair = 2 * (step() / kBlocks);
      const std::integral_constant<int, step() % kBlocks> i;
      const std::uint8_t* const one = at(key + pair) + d;
      const std::uint8_t* const two = at(key + pair + 1) + d;
      const __m256i a = load_codes(one + 16 * i());
      const __m256i b = load_codes(two + 16 * i());
      const __m256i outer = _mm256_unpacklo_epi16(a, b);  // values 0 to 3 and 8 to 11
      const __m256i inner = _mm256_unpackhi_epi16(a, b);
      unroll<kRows>([&](auto r) __attribute__((always_inline)) {
        // Not kept for the next block: no register is left for it.
        __m256i weight;
        asm volatile("vpbroadcastd %1, %0"
                     : "=x"(weight)
                     : "m"(*reinterpret_cast<const TwoWeights*>(weights + r() * kChunk + key + pair)));
        add_in_place(sums[r()][i()][0], _mm256_madd_epi16(outer, weight));
        add_in_place(sums[r()][i()][1], _mm256_madd_epi16(inner, weight));
      });
    });
  }
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    const __m256 shrink = _mm256_set1_ps(chunk.old_factor[first_row + r()]);
    const __m256 scale = _mm256_set1_ps(chunk.new_factor[first_row + r()] * undo[group]);
    unroll<kBlocks>([&](auto i) __attribute__((always_inline)) {
      const auto update = [&](float* to, __m256i sum) __attribute__((always_inline)) {
        const __m256 old = _mm256_mul_ps(_mm256_load_ps(to), shrink);
        _mm256_store_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, old));
      };
      float* const to = all_sums + r() * head_dim + d + 16 * i();
      update(to, _mm256_permute2x128_si256(sums[r()][i()][0], sums[r()][i()][1], 0x20));
      update(to + 8, _mm256_permute2x128_si256(sums[r()][i()][0], sums[r()][i()][1], 0x31));
    });
  });
}

template <int kRows, typename At>
[[gnu::noinline]] void add_int8(float* all_sums, At at, int count, int head_dim, const float* undo,
                                const StripChunk& chunk, int first_row, Ahead ahead) {
  constexpr int kBlocks = kRows <= 3 ? 2 : 1;
  int d = 0;
  for (; d + 16 * kBlocks <= head_dim; d += 16 * kBlocks) {
    add_int8_blocks<kRows, kBlocks>(all_sums, at, count, head_dim, d, undo, chunk, first_row, ahead);
  }
  if (d < head_dim) {
    add_int8_blocks<kRows, 1>(all_sums, at, count, head_dim, d, undo, chunk, first_row, ahead);
  }
}

// The same from bfloat16, 16 * kBlocks values at a time: enough sums to hide the latency of an FMA.
template <int kRows, int kBlocks>
inline void add_raw16_blocks(float* all_sums, const std::uint8_t* const* rows, int count, int head_dim, int d,
                             const StripChunk& chunk, int first_row, Ahead& ahead) {
  __m256 sums[kRows][2 * kBlocks];
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    const __m256 shrink = _mm256_set1_ps(chunk.old_factor[first_row + r()]);
    unroll<2 * kBlocks>([&](auto i) __attribute__((always_inline)) {
      sums[r()][i()] = _mm256_mul_ps(shrink, _mm256_load_ps(all_sums + r() * head_dim + d + 8 * i()));
    });
  });
  const float* const weights = &chunk.scores[first_row][0];
  for (int key = 0; key < count; ++key) {
    ahead.ask();
    unroll<kBlocks>([&](auto i) __attribute__((always_inline)) {
      __m256 even;
      __m256 odd;
      widen(load(rows[key] + 2 * (d + 16 * i())), even, odd);
      unroll<kRows>([&](auto r) __attribute__((always_inline)) {
        // Not kept for the next block: no register is left for it.
        __m256 weight;
        asm volatile("vbroadcastss %1, %0" : "=x"(weight) : "m"(weights[r() * kChunk + key]));
        add_in_place(sums[r()][2 * i()], even, weight);
        add_in_place(sums[r()][2 * i() + 1], odd, weight);
      });
    });
  }
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    unroll<2 * kBlocks>([&](auto i) __attribute__((always_inline)) {
      _mm256_store_ps(all_sums + r() * head_dim + d + 8 * i(), sums[r()][i()]);
    });
  });
}

template <int kRows>
[[gnu::noinline]] void add_raw16(float* all_sums, const std::uint8_t* const* rows, int count, int head_dim,
                                 const StripChunk& chunk, int first_row, Ahead ahead) {
  constexpr int kBlocks = kRows <= 3 ? 2 : 1;
  int d = 0;
  for (; d + 16 * kBlocks <= head_dim; d += 16 * kBlocks) {
    add_raw16_blocks<kRows, kBlocks>(all_sums, rows, count, head_dim, d, chunk, first_row, ahead);
  }
  if (d < head_dim) {
    add_raw16_blocks<kRows, 1>(all_sums, rows, count, head_dim, d, chunk, first_row, ahead);
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

// One KV head of an item.
struct Head {
  AttentionItem item;
  Buffers buffers;
  StripState state;
  alignas(32) float factor[kLanes];
};

}  // namespace

int attention_stream_heads_avx2(const AttentionShape& shape, int num_rows) {
  const int num_kv_heads = shape.layout.num_kv_heads;
  const int head_bytes =
      num_rows * (shape.num_heads / num_kv_heads) * shape.layout.head_dim * static_cast<int>(2 * sizeof(float));
  const int fitting = kHeadsBytes / head_bytes;
  const int most = fitting < 1 ? 1 : fitting > kMaxHeadsTogether ? kMaxHeadsTogether : fitting;
  return ceil_div(num_kv_heads, ceil_div(num_kv_heads, most));
}

std::size_t attention_stream_scratch_avx2(const AttentionShape& shape) {
  Scratch scratch(nullptr);
  for (int h = 0; h < attention_stream_heads_avx2(shape, 1); ++h) {
    divide(scratch, shape.layout.head_dim);
  }
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

  Head heads[kMaxHeadsTogether];
  for (int h = 0; h < item.num_kv_heads; ++h) {
    Head& head = heads[h];
    head.item = item;
    head.item.kv_head += h;
    head.buffers = divide(scratch, head_dim);
    const Buffers& b = head.buffers;
    reset(head.state);
    _mm256_store_ps(head.factor, _mm256_setzero_ps());
    for (int row = 0; row < num_rows; ++row) {
      head.factor[row] = prepare_query(query_row(shape, head.item, rows, row), head_dim, is_int8, shape.scale * kLog2E,
                                       b.queries + row * head_dim, b.float_queries + row * head_dim);
    }
    __builtin_memset(b.sums, 0,
                     sizeof(float) * static_cast<std::size_t>(num_rows) * static_cast<std::size_t>(head_dim));
  }
  std::int32_t row_positions[kLanes];
  for (int row = 0; row < num_rows; ++row) {
    row_positions[row] = item.positions[row / group];
  }

  alignas(32) float key_scales[kMaxGroups * kChunk];
  alignas(32) float value_factors[kMaxGroups * kChunk];
  float undo[kMaxGroups] = {};
  StripChunk chunk;
  ChunkRows here;
  const Positions positions = range_of(item.positions, item.num_rows);
  const std::int64_t v_offset = std::int64_t{layout.num_kv_heads} * layout.block_size * layout.row_bytes;
  const Asks score_asks =
      spread(layout.row_bytes, is_int8 ? kChunk / 4 * kScoreInt8Asks * num_groups : kChunk / 4 * kScoreRaw16Asks);
  const Asks add_asks = spread(layout.row_bytes, (is_int8 ? kChunk / 4 : kChunk / 2) * (head_dim / 16));
  // Chunks end where blocks of kChunk keys do, wherever a window begins.
  const auto chunk_end = [&](int begin) {
    const int end = (begin / kChunk + 1) * kChunk;
    return end < item.key_end ? end : item.key_end;
  };
  // The softmax and the sums of one head over the keys [begin, end), while the keys at `next` are asked for.
  const auto add_chunk = [&](Head& head, int begin, int end, bool is_masked, const std::uint8_t* next) {
    const Buffers& b = head.buffers;
    const int count = end - begin;
    const int padded_count = round_up(count, 16);
    const std::uint8_t* const together =
        is_int8 && count == padded_count ? in_one_block(layout, head.item, layer, begin, end, v_offset) : nullptr;
    if (together == nullptr) {
      locate_rows<false>(layout, head.item, layer, begin, end, here);
    }
    const RowsTogether keys_together{together, layout.row_bytes};
    const RowsTogether values_together{together == nullptr ? nullptr : together + v_offset, layout.row_bytes};
    const std::uint8_t* const next_v = next == nullptr ? nullptr : next + v_offset;
    ask_lines(next, 0, score_asks.before);
    // The first pass covers the chunk.
    const auto score_ahead = [&](int first) {
      return loop_ahead(first == 0 ? next : nullptr, score_asks.before, score_asks);
    };
    const auto add_ahead = [&](int first) {
      return loop_ahead(first == 0 ? next_v : nullptr, add_asks.before + add_asks.after, add_asks);
    };
    const auto score = [&](const auto& keys, const auto& values) __attribute__((always_inline)) {
      for (int g = 0; g < num_groups; ++g) {
        load_scales(keys, count, head_dim, g, key_scales + g * kChunk);
        load_scales(values, count, head_dim, g, value_factors + g * kChunk);
        undo[g] = normalise_scales(value_factors + g * kChunk, padded_count);
      }
      for_passes<kScorePass>(num_rows, [&](auto pass, int first) {
        score_int8<pass()>(b.queries + first * head_dim, keys, padded_count, head_dim, key_scales, score_ahead(first),
                           &chunk.scores[first][0]);
      });
    };
    if (together != nullptr) {
      score(keys_together, values_together);
    } else if (is_int8) {
      score(RowsAnywhere{here.k}, RowsAnywhere{here.v});
    } else {
      for_passes<kScorePass>(num_rows, [&](auto pass, int first) {
        score_raw16<pass()>(b.float_queries + first * head_dim, here.k, padded_count, head_dim, score_ahead(first),
                            &chunk.scores[first][0]);
      });
    }
    ask_lines(next, score_asks.before + score_asks.in_loop, score_asks.after);
    ask_lines(next_v, 0, add_asks.before + add_asks.after);
    const float* chunk_factor = head.factor;
    alignas(32) float ones[kLanes];
    if (shape.softcap > 0.0F) {
      apply_softcap(chunk, num_rows, padded_count / 8, head.factor, shape.softcap);
      _mm256_store_ps(ones, _mm256_set1_ps(1.0F));
      chunk_factor = ones;
    }
    const bool masked = is_masked || count != padded_count;
    const int vectors = padded_count / 8;
    if (is_int8) {
      if (masked) {
        softmax_chunk<Weights::kFixed15, true>(head.state, chunk, num_rows, vectors, chunk_factor, value_factors,
                                               num_groups);
      } else {
        softmax_chunk<Weights::kFixed15, false>(head.state, chunk, num_rows, vectors, chunk_factor, value_factors,
                                                num_groups);
      }
      for_passes<kAddPass>(num_rows, [&](auto pass, int first) {
        const auto add = [&](const auto& values) __attribute__((always_inline)) {
          add_int8<pass()>(b.sums + first * head_dim, values, count, head_dim, undo, chunk, first, add_ahead(first));
        };
        if (together != nullptr) {
          add(values_together);
        } else {
          add(RowsAnywhere{here.v});
        }
      });
    } else {
      if (masked) {
        softmax_chunk<Weights::kFloat, true>(head.state, chunk, num_rows, vectors, chunk_factor, nullptr, 1);
      } else {
        softmax_chunk<Weights::kFloat, false>(head.state, chunk, num_rows, vectors, chunk_factor, nullptr, 1);
      }
      for_passes<kAddPass>(num_rows, [&](auto pass, int first) {
        add_raw16<pass()>(b.sums + first * head_dim, here.v, count, head_dim, chunk, first, add_ahead(first));
      });
    }
  };
  for (int begin = item.key_begin; begin < item.key_end; begin = chunk_end(begin)) {
    const int end = chunk_end(begin);
    const Seen seen = positions.see_all(shape.window, begin, end)
                          ? see_all(end - begin, chunk)
                          : see(row_positions, num_rows, shape.window, begin, end - begin, chunk);
    if (seen.last <= seen.first) {
      continue;
    }
    for (int h = 0; h < item.num_kv_heads; ++h) {
      const std::uint8_t* const next = h + 1 < item.num_kv_heads
                                           ? look_ahead(layout, heads[h + 1].item, layer, begin, end, v_offset)
                                           : look_ahead(layout, heads[0].item, layer, end, chunk_end(end), v_offset);
      add_chunk(heads[h], begin, end, seen.masked, next);
    }
  }
  for (int h = 0; h < item.num_kv_heads; ++h) {
    for (int row = 0; row < num_rows; ++row) {
      write_row(shape, heads[h].item, rows, row, heads[h].buffers.sums + row * head_dim, heads[h].state.maxima[row],
                heads[h].state.weights[row]);
    }
  }
}

}  // namespace kvist
