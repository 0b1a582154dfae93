// Attention with NEON, in float32: keys widened once for all rows of an item, 64 at a time.
//
// A chunk's K and V become float32 in scratch; then, for four stacked rows at a time, the scores of four keys (16 sums in
// registers, reduced together), one update of the online softmax, and the weighted sum over the chunk for 16 values at a
// time. The dominating instruction is fmla: 4 products; 16 of them need 8 loads of the first-level cache.
//
// Memory: every line of K and V once. D is padded to a multiple of 16 and rows to a multiple of four, with zeros.

#include "attention_kernels.h"
#include "kvist/common.h"
#include "vec_neon.h"

namespace kvist {
namespace neon {
namespace {

constexpr int kChunk = 64;     // keys that one softmax update covers
constexpr int kStripRows = 4;  // rows that share loads
constexpr int kDimStep = 16;

struct Buffers {
  float* queries;  // (rows, padded), times what brings scores to units of log2(e)
  float* sums;     // (rows, padded)
  float* maxima;   // (rows,) of the scores so far
  float* weights;  // (rows,) sums of exp2(score - maximum)
  float* keys;     // (64, padded)
  float* values;   // (64, padded)
};

// On a null base it only counts.
std::size_t divide(std::uint8_t* base, int num_rows, int padded, Buffers& b) {
  std::size_t used = 0;
  const auto take = [&](int rows, int width) {
    float* const piece = base == nullptr ? nullptr : reinterpret_cast<float*>(base + used);
    used += round_up(static_cast<std::size_t>(rows) * static_cast<std::size_t>(width) * sizeof(float), kAlignment);
    return piece;
  };
  b.queries = take(num_rows, padded);
  b.sums = take(num_rows, padded);
  b.maxima = take(num_rows, 1);
  b.weights = take(num_rows, 1);
  b.keys = take(kChunk, padded);
  b.values = take(kChunk, padded);
  return used;
}

int stacked_rows(const AttentionShape& shape, int num_rows) {
  return round_up(num_rows * (shape.num_heads / shape.layout.num_kv_heads), kStripRows);
}

// A row of K or V as float32, `padded` values.
void decode_row(KvCodec codec, int head_dim, int padded, const std::uint8_t* row, float* out) {
  if (codec == KvCodec::kRaw16) {
    for (int d = 0; d < head_dim; d += 8) {
      const uint16x8_t bits = vld1q_u16(reinterpret_cast<const std::uint16_t*>(row + 2 * d));
      vst1q_f32(out + d, widen_bf16(vget_low_u16(bits)));
      vst1q_f32(out + d + 4, widen_bf16(vget_high_u16(bits)));
    }
  } else {
    for (int first = 0; first < head_dim; first += kKvGroup) {
      std::uint16_t bits;
      std::memcpy(&bits, row + head_dim + 2 * (first / kKvGroup), sizeof bits);
      const float scale = f16_to_f32(bits);
      for (int d = first; d < head_dim && d < first + kKvGroup; d += 8) {
        const int16x8_t codes = vmovl_s8(vld1_s8(reinterpret_cast<const std::int8_t*>(row + d)));
        vst1q_f32(out + d, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(codes))), scale));
        vst1q_f32(out + d + 4, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(codes))), scale));
      }
    }
  }
  for (int d = head_dim; d < padded; ++d) {
    out[d] = 0.0f;
  }
}

// K and V of the keys [begin, begin + count) as float32.
void decode_chunk(const KvLayout& layout, const AttentionItem& item, const KvLayer& layer, int begin, int count,
                  int padded, const Buffers& b) {
  const std::int64_t head_bytes = static_cast<std::int64_t>(layout.block_size) * layout.row_bytes;
  for (int i = 0; i < count; ++i) {
    const int key = begin + i;
    const std::uint8_t* const row = layer.base + item.block_offsets[key / layout.block_size] +
                                    item.kv_head * head_bytes +
                                    static_cast<std::int64_t>(key % layout.block_size) * layout.row_bytes;
    const std::uint8_t* const value = row + layout.num_kv_heads * head_bytes;
    __builtin_prefetch(row + kChunk / 4 * layout.row_bytes);
    __builtin_prefetch(value + kChunk / 4 * layout.row_bytes);
    decode_row(layout.codec, layout.head_dim, padded, row, b.keys + i * padded);
    decode_row(layout.codec, layout.head_dim, padded, value, b.values + i * padded);
  }
}

// Scores of four rows against the keys of a chunk, up to a multiple of four.
[[gnu::noinline]] void score_strip(const float* queries, const float* keys, int count, int padded,
                                   float (&scores)[kStripRows][kChunk]) {
  for (int key = 0; key < count; key += 4) {
    float32x4_t sums[kStripRows][4];
    unroll<16>([&](auto i) KVIST_LAMBDA { sums[i / 4][i % 4] = vdupq_n_f32(0.0f); });
    for (int d = 0; d < padded; d += 4) {
      float32x4_t k[4];
      unroll<4>([&](auto i) KVIST_LAMBDA { k[i] = vld1q_f32(keys + (key + i) * padded + d); });
      unroll<kStripRows>([&](auto r) KVIST_LAMBDA {
        const float32x4_t q = vld1q_f32(queries + r * padded + d);
        unroll<4>([&](auto i) KVIST_LAMBDA { sums[r][i] = vfmaq_f32(sums[r][i], q, k[i]); });
      });
    }
    unroll<kStripRows>([&](auto r) KVIST_LAMBDA {
      const float32x4_t low = vpaddq_f32(sums[r][0], sums[r][1]);
      const float32x4_t high = vpaddq_f32(sums[r][2], sums[r][3]);
      vst1q_f32(scores[r] + key, vpaddq_f32(low, high));
    });
  }
}

// Turns the scores of a row that sees the places [first, last) into weights relative to the maximum so far; returns what
// its sums so far are multiplied by.
[[gnu::noinline]] float soften(float* scores, int first, int last, int count, float softcap, float& maximum,
                               float& weights) {
  if (softcap > 0.0f) {
    // softcap * tanh(x / softcap) = softcap * (1 - 2 / (e^(2 x / softcap) + 1)), all in units of log2(e)
    const float cap = softcap * kLog2E;
    for (int i = 0; i < count; ++i) {
      const float doubled = scores[i] * 2.0f / softcap;
      scores[i] = cap * (1.0f - 2.0f / (exp2(doubled > 126.0f ? 126.0f : doubled) + 1.0f));
    }
  }
  float largest = maximum;
  for (int i = first; i < last; ++i) {
    largest = scores[i] > largest ? scores[i] : largest;
  }
  const float shrink = exp2(maximum - largest);
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) {
    const float weight = i >= first && i < last ? exp2(scores[i] - largest) : 0.0f;
    scores[i] = weight;
  }
  for (int i = first; i < last; ++i) {
    sum += scores[i];
  }
  maximum = largest;
  weights = weights * shrink + sum;
  return shrink;
}

// Multiplies the sums of four rows by `shrink` and adds a chunk's weighted values.
[[gnu::noinline]] void add_values(float* all_sums, const float* values, int count, int padded,
                                  const float (&weights)[kStripRows][kChunk], const float (&shrink)[kStripRows]) {
  for (int d = 0; d < padded; d += kDimStep) {
    float32x4_t sums[kStripRows][4];
    unroll<16>([&](auto i) KVIST_LAMBDA {
      sums[i / 4][i % 4] = vmulq_n_f32(vld1q_f32(all_sums + i / 4 * padded + d + i % 4 * 4), shrink[i / 4]);
    });
    for (int key = 0; key < count; ++key) {
      float32x4_t v[4];
      unroll<4>([&](auto i) KVIST_LAMBDA { v[i] = vld1q_f32(values + key * padded + d + 4 * i); });
      unroll<kStripRows>([&](auto r) KVIST_LAMBDA {
        const float32x4_t weight = vdupq_n_f32(weights[r][key]);
        unroll<4>([&](auto i) KVIST_LAMBDA { sums[r][i] = vfmaq_f32(sums[r][i], v[i], weight); });
      });
    }
    unroll<16>([&](auto i) KVIST_LAMBDA { vst1q_f32(all_sums + i / 4 * padded + d + i % 4 * 4, sums[i / 4][i % 4]); });
  }
}

void write_row(const AttentionShape& shape, const AttentionItem& item, const AttentionRows& rows, int stacked,
               const float* sums, float maximum, float weights) {
  const int head_dim = shape.layout.head_dim;
  const int group = shape.num_heads / shape.layout.num_kv_heads;
  const int i = stacked / group;
  const int head = item.kv_head * group + stacked % group;
  if (item.partial_sums == nullptr) {
    float* const out = rows.out + item.rows[i] * rows.out_stride + static_cast<std::ptrdiff_t>(head) * head_dim;
    const float inverse = 1.0f / weights;
    for (int d = 0; d < head_dim; ++d) {
      out[d] = sums[d] * inverse;
    }
    return;
  }
  const std::ptrdiff_t result = static_cast<std::ptrdiff_t>(i) * shape.num_heads + head;
  item.partial_weights[2 * result] = maximum;
  item.partial_weights[2 * result + 1] = weights;
  std::memcpy(item.partial_sums + result * head_dim, sums, static_cast<std::size_t>(head_dim) * sizeof(float));
}

std::size_t scratch_bytes(const AttentionShape& shape, int num_rows) {
  Buffers b{};
  return divide(nullptr, stacked_rows(shape, num_rows), round_up(shape.layout.head_dim, kDimStep), b);
}

void run(const AttentionShape& shape, const AttentionItem& item, const KvLayer& layer, const AttentionRows& rows,
         std::uint8_t* scratch) {
  const int head_dim = shape.layout.head_dim;
  const int padded = round_up(head_dim, kDimStep);
  const int group = shape.num_heads / shape.layout.num_kv_heads;
  const int num_rows = item.num_rows * group;
  const int all_rows = stacked_rows(shape, item.num_rows);
  Buffers b{};
  divide(scratch, all_rows, padded, b);
  std::memset(b.queries, 0, sizeof(float) * static_cast<std::size_t>(all_rows) * static_cast<std::size_t>(padded));
  std::memset(b.sums, 0, sizeof(float) * static_cast<std::size_t>(all_rows) * static_cast<std::size_t>(padded));
  for (int row = 0; row < all_rows; ++row) {
    b.maxima[row] = kNoScore;
    b.weights[row] = 0.0f;
    if (row < num_rows) {
      const float* const query = rows.queries + item.rows[row / group] * rows.query_stride +
                                 static_cast<std::ptrdiff_t>(item.kv_head * group + row % group) * head_dim;
      for (int d = 0; d < head_dim; ++d) {
        b.queries[row * padded + d] = query[d] * (shape.scale * kLog2E);
      }
    }
  }
  for (int begin = item.key_begin; begin < item.key_end; begin += kChunk) {
    const int count = item.key_end - begin < kChunk ? item.key_end - begin : kChunk;
    decode_chunk(shape.layout, item, layer, begin, count, padded, b);
    std::memset(
        b.keys + count * padded, 0,
        sizeof(float) * static_cast<std::size_t>(round_up(count, 4) - count) * static_cast<std::size_t>(padded));
    for (int strip = 0; strip < all_rows; strip += kStripRows) {
      int first[kStripRows] = {};
      int last[kStripRows] = {};
      int end = 0;
      for (int r = 0; r < kStripRows && strip + r < num_rows; ++r) {
        const int position = item.positions[(strip + r) / group];
        const int oldest = shape.window > 0 ? position + 1 - shape.window - begin : 0;
        first[r] = oldest > 0 ? oldest : 0;
        last[r] = position + 1 - begin < count ? position + 1 - begin : count;
        if (first[r] >= last[r]) {
          first[r] = last[r] = 0;
        }
        end = last[r] > end ? last[r] : end;
      }
      if (end == 0) {
        continue;
      }
      float scores[kStripRows][kChunk];
      float shrink[kStripRows];
      score_strip(b.queries + strip * padded, b.keys, end, padded, scores);
      for (int r = 0; r < kStripRows; ++r) {
        shrink[r] = soften(scores[r], first[r], last[r], end, shape.softcap, b.maxima[strip + r], b.weights[strip + r]);
      }
      add_values(b.sums + strip * padded, b.values, end, padded, scores, shrink);
    }
  }
  for (int row = 0; row < num_rows; ++row) {
    write_row(shape, item, rows, row, b.sums + row * padded, b.maxima[row], b.weights[row]);
  }
}

}  // namespace
}  // namespace neon

const AttentionKernels kAttentionNeon = {nullptr, neon::scratch_bytes, neon::run};

}  // namespace kvist
