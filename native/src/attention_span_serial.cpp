// Attention over int4 and int3 records: what the other versions are compared with.
//
// Each span is decoded to the model's own basis, value by value, and every row reads every key it sees. Decoding is in
// float32; dot products, the online softmax and the weighted sum are in float64.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention_kernels.h"
#include "kvist/common.h"
#include "kvist/kv_span.h"
#include "kvist/rowwise.h"

namespace kvist {
namespace {

// One query row and head, over the spans so far.
struct Stream {
  double weights;
  float largest;  // only a reference: rounded, because it is stored so
};

struct Buffers {
  float* keys;      // (64, D)
  float* values;    // (64, D)
  float* queries;   // (rows, D)
  double* sums;     // (rows, D)
  Stream* streams;  // (rows,)
};

std::size_t scratch_bytes(const AttentionShape& shape, int num_rows) {
  const auto head_dim = static_cast<std::size_t>(shape.layout.head_dim);
  const auto stacked = static_cast<std::size_t>(num_rows * (shape.num_heads / shape.layout.num_kv_heads));
  return 2 * kSpanTokens * head_dim * sizeof(float) +
         stacked * (head_dim * (sizeof(float) + sizeof(double)) + sizeof(Stream));
}

Buffers divide(std::uint8_t* scratch, int head_dim, int stacked) {
  const std::ptrdiff_t rows = static_cast<std::ptrdiff_t>(stacked) * head_dim;
  Buffers b{};
  b.sums = reinterpret_cast<double*>(scratch);
  b.streams = reinterpret_cast<Stream*>(b.sums + rows);
  b.queries = reinterpret_cast<float*>(b.streams + stacked);
  b.keys = b.queries + rows;
  b.values = b.keys + static_cast<std::ptrdiff_t>(kSpanTokens) * head_dim;
  return b;
}

// The code of a lane and member among those of num_lanes lanes.
int code_at(const std::uint8_t* codes, int bits, int num_lanes, int lane, int member) {
  const std::uint8_t* const group = codes + member / 4 * (num_lanes * bits / 2);
  const int j = member % 4;
  // Of a plane of `width` bits a code.
  const auto part = [&](const std::uint8_t* plane, int width) {
    const int stride = num_lanes * width / 8;
    return (plane[4 * (lane % stride) + j] >> (lane / stride * width)) & ((1 << width) - 1);
  };
  return bits == 4 ? part(group, 4) : part(group, 2) | part(group + num_lanes, 1) << 2;
}

// K and V of a record as the model has them, (64, D) each.
void decode(const KvLayout& layout, const std::uint8_t* record, const KvTransforms& transforms, std::int64_t head,
            const HeadTurn& turn, float* keys, float* values) {
  const int bits = kv_codec_bits(layout.codec);
  const int head_dim = layout.head_dim;
  const KvRecordLayout parts = kv_record_layout(bits, head_dim);
  const std::int8_t* const levels = bits == 4 ? kInt4Levels : kInt3Levels;
  const auto turn_back = rowwise_kernels(Isa::kSerial).turn_back;
  for (int t = 0; t < kSpanTokens; ++t, keys += head_dim, values += head_dim) {
    const float scale = e5m3_to_f32(record[parts.scales + t]);
    for (int c = 0; c < head_dim; ++c) {
      const float step = e5m3_to_f32(record[c]);
      const auto zero = static_cast<float>(static_cast<std::int8_t>(record[parts.zeros + c]));
      const int code = code_at(record + parts.key_codes, bits, kSpanTokens, t, c);
      keys[c] = step * (static_cast<float>(code) + zero * 0.5F);
      values[c] = scale * static_cast<float>(levels[code_at(record + parts.value_codes, bits, head_dim, c, t)]);
    }
    turn_back(keys, turn);
    turn_back(values, turn);
    for (int c = 0; c < head_dim; ++c) {
      keys[c] = keys[c] / transforms.key_balance[head * head_dim + c] + transforms.mean[head * head_dim + c];
      values[c] /= transforms.value_balance[head * head_dim + c];
    }
  }
}

void add_key(const AttentionShape& shape, const float* q, const float* k, const float* v, Stream& stream,
             double* sums) {
  const int head_dim = shape.layout.head_dim;
  double score = 0.0;
  for (int d = 0; d < head_dim; ++d) {
    score += static_cast<double>(q[d]) * static_cast<double>(k[d]);
  }
  score *= static_cast<double>(shape.scale);
  if (shape.softcap > 0.0F) {
    score = static_cast<double>(shape.softcap) * std::tanh(score / static_cast<double>(shape.softcap));
  }
  score *= static_cast<double>(kLog2E);
  if (score > static_cast<double>(stream.largest)) {
    const double shrink =
        std::exp2(static_cast<double>(stream.largest) - static_cast<double>(static_cast<float>(score)));
    stream.weights *= shrink;
    for (int d = 0; d < head_dim; ++d) {
      sums[d] *= shrink;
    }
    stream.largest = static_cast<float>(score);
  }
  const double weight = std::exp2(score - static_cast<double>(stream.largest));
  stream.weights += weight;
  for (int d = 0; d < head_dim; ++d) {
    sums[d] += weight * static_cast<double>(v[d]);
  }
}

void run(const AttentionShape& shape, const AttentionItem& item, const KvLayer& layer, const AttentionRows& rows,
         std::uint8_t* scratch) {
  const KvLayout& layout = shape.layout;
  const int head_dim = layout.head_dim;
  const int group = shape.num_heads / layout.num_kv_heads;
  const int stacked = item.num_rows * group;
  const std::int64_t record_bytes = kv_record_bytes(kv_codec_bits(layout.codec), head_dim);
  const std::int64_t head = static_cast<std::int64_t>(layer.index) * layout.num_kv_heads + item.kv_head;
  const Buffers b = divide(scratch, head_dim, stacked);
  for (int r = 0; r < stacked; ++r) {
    const float* const q = rows.queries + item.rows[r / group] * rows.query_stride +
                           static_cast<std::ptrdiff_t>(item.kv_head * group + r % group) * head_dim;
    std::copy(q, q + head_dim, b.queries + static_cast<std::ptrdiff_t>(r) * head_dim);
    rowwise_kernels(Isa::kSerial).turn_back(b.queries + static_cast<std::ptrdiff_t>(r) * head_dim, *item.turn);
    b.streams[r] = {0.0, kNoScore};
  }
  std::fill(b.sums, b.sums + static_cast<std::ptrdiff_t>(stacked) * head_dim, 0.0);
  for (int span = item.key_begin / kSpanTokens; span * kSpanTokens < item.key_end; ++span) {
    const int first = span * kSpanTokens;
    const int block = first / layout.block_size;
    const int in_block = first % layout.block_size / kSpanTokens;
    decode(layout,
           layer.base + item.block_offsets[block] + (in_block * layout.num_kv_heads + item.kv_head) * record_bytes,
           *shape.transforms, head, *item.turn, b.keys, b.values);
    for (int r = 0; r < stacked; ++r) {
      const int position = item.positions[r / group];
      const int oldest = shape.window > 0 ? position - shape.window + 1 : 0;
      const int begin = std::max({item.key_begin, first, oldest});
      const int end = std::min({item.key_end, first + kSpanTokens, position + 1});
      for (int key = begin; key < end; ++key) {
        const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(key - first) * head_dim;
        add_key(shape, b.queries + static_cast<std::ptrdiff_t>(r) * head_dim, b.keys + at, b.values + at, b.streams[r],
                b.sums + static_cast<std::ptrdiff_t>(r) * head_dim);
      }
    }
  }
  for (int r = 0; r < stacked; ++r) {
    const std::ptrdiff_t query_head = item.kv_head * group + r % group;
    const double* const sums = b.sums + static_cast<std::ptrdiff_t>(r) * head_dim;
    const Stream& stream = b.streams[r];
    if (item.partial_sums == nullptr) {
      float* const out = rows.out + item.rows[r / group] * rows.out_stride + query_head * head_dim;
      for (int d = 0; d < head_dim; ++d) {
        out[d] = static_cast<float>(sums[d] / stream.weights);
      }
      continue;
    }
    const std::ptrdiff_t result = static_cast<std::ptrdiff_t>(r / group) * shape.num_heads + query_head;
    item.partial_weights[2 * result] = stream.largest;
    item.partial_weights[2 * result + 1] = static_cast<float>(stream.weights);
    for (int d = 0; d < head_dim; ++d) {
      item.partial_sums[result * head_dim + d] = static_cast<float>(sums[d]);
    }
  }
}

}  // namespace

const AttentionKernels kAttentionSpanSerial = {nullptr, scratch_bytes, run};

}  // namespace kvist
