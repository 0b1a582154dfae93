// Attention, key by key: what the other versions are compared with.
//
// Every row reads every key it sees. Dot products, the online softmax and the weighted sum are in float64; the result
// is rounded to float32 once.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention_kernels.h"
#include "kvist/common.h"

namespace kvist {
namespace {

constexpr int kMaxHeadDim = 256;

void decode_row(KvCodec codec, int head_dim, const std::uint8_t* row, float* x) {
  for (int d = 0; d < head_dim; ++d) {
    if (codec == KvCodec::kRaw16) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, row + 2 * d, sizeof(bits));
      x[d] = bf16_to_f32(bits);
    } else {
      std::uint16_t scale = 0;
      std::memcpy(&scale, row + head_dim + 2 * (d / kKvGroup), sizeof(scale));
      x[d] = static_cast<float>(static_cast<std::int8_t>(row[d])) * f16_to_f32(scale);
    }
  }
}

std::size_t scratch_bytes(const AttentionShape&, int) { return 0; }

void run(const AttentionShape& shape, const AttentionItem& item, const KvLayer& layer, const AttentionRows& rows,
         std::uint8_t*) {
  const KvLayout& layout = shape.layout;
  const int head_dim = layout.head_dim;
  const int group = shape.num_heads / layout.num_kv_heads;
  const std::int64_t head_bytes = static_cast<std::int64_t>(layout.block_size) * layout.row_bytes;
  float k[kMaxHeadDim];
  float v[kMaxHeadDim];
  double sums[kMaxHeadDim];
  for (int i = 0; i < item.num_rows; ++i) {
    const int position = item.positions[i];
    const int begin = shape.window > 0 ? std::max(item.key_begin, position - shape.window + 1) : item.key_begin;
    const int end = std::min(item.key_end, position + 1);
    for (int g = 0; g < group; ++g) {
      const int head = item.kv_head * group + g;
      const float* const q =
          rows.queries + item.rows[i] * rows.query_stride + static_cast<std::ptrdiff_t>(head) * head_dim;
      float largest = kNoScore;  // only a reference: rounded, because it is stored so
      double weights = 0.0;
      std::fill(sums, sums + head_dim, 0.0);
      for (int key = begin; key < end; ++key) {
        const std::uint8_t* const row = layer.base + item.block_offsets[key / layout.block_size] +
                                        item.kv_head * head_bytes +
                                        static_cast<std::int64_t>(key % layout.block_size) * layout.row_bytes;
        decode_row(layout.codec, head_dim, row, k);
        decode_row(layout.codec, head_dim, row + layout.num_kv_heads * head_bytes, v);
        double score = 0.0;
        for (int d = 0; d < head_dim; ++d) {
          score += static_cast<double>(q[d]) * static_cast<double>(k[d]);
        }
        score *= static_cast<double>(shape.scale);
        if (shape.softcap > 0.0F) {
          score = static_cast<double>(shape.softcap) * std::tanh(score / static_cast<double>(shape.softcap));
        }
        score *= static_cast<double>(kLog2E);
        if (score > static_cast<double>(largest)) {
          const double shrink =
              std::exp2(static_cast<double>(largest) - static_cast<double>(static_cast<float>(score)));
          weights *= shrink;
          for (int d = 0; d < head_dim; ++d) {
            sums[d] *= shrink;
          }
          largest = static_cast<float>(score);
        }
        const double weight = std::exp2(score - static_cast<double>(largest));
        weights += weight;
        for (int d = 0; d < head_dim; ++d) {
          sums[d] += weight * static_cast<double>(v[d]);
        }
      }
      if (item.partial_sums == nullptr) {
        float* const out = rows.out + item.rows[i] * rows.out_stride + static_cast<std::ptrdiff_t>(head) * head_dim;
        for (int d = 0; d < head_dim; ++d) {
          out[d] = static_cast<float>(sums[d] / weights);
        }
        continue;
      }
      const std::ptrdiff_t result = static_cast<std::ptrdiff_t>(i) * shape.num_heads + head;
      item.partial_weights[2 * result] = largest;
      item.partial_weights[2 * result + 1] = static_cast<float>(weights);
      for (int d = 0; d < head_dim; ++d) {
        item.partial_sums[result * head_dim + d] = static_cast<float>(sums[d]);
      }
    }
  }
}

}  // namespace

const AttentionKernels kAttentionSerial = {nullptr, scratch_bytes, run};

}  // namespace kvist
