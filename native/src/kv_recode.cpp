#include "kvist/kv_recode.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "kvist/common.h"
#include "kvist/kv_codec.h"

namespace kvist {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr float kLargestInt8 = 65504.0F * 127.0F;  // the largest half times the largest code
constexpr std::uint16_t kNanHalf = 0x7e00;

void decode_row(KvCodec codec, int head_dim, const std::uint8_t* row, float* x) {
  if (codec == KvCodec::kRaw16) {
    for (int d = 0; d < head_dim; ++d) {
      std::uint16_t bits;
      std::memcpy(&bits, row + 2 * d, sizeof(bits));
      x[d] = bf16_to_f32(bits);
    }
    return;
  }
  for (int first = 0; first < head_dim; first += kKvGroup) {
    const int last = std::min(first + kKvGroup, head_dim);
    std::uint16_t bits;
    std::memcpy(&bits, row + head_dim + 2 * (first / kKvGroup), sizeof(bits));
    const float scale = f16_to_f32(bits);
    for (int d = first; d < last; ++d) {
      x[d] = static_cast<float>(static_cast<std::int8_t>(row[d])) * scale;
    }
  }
}

// For the rows that the encoder refuses. `x` is overwritten. Returns whether a finite value was beyond the range.
bool encode_held_row(EncodeKvRow encode, KvCodec codec, int head_dim, float* x, std::uint8_t* out) {
  if (codec == KvCodec::kRaw16) {
    // All finite values of other codecs are within its range, and it holds the others as they are.
    for (int d = 0; d < head_dim; ++d) {
      const std::uint16_t bits = f32_to_bf16(x[d]);
      std::memcpy(out + 2 * d, &bits, sizeof(bits));
    }
    return false;
  }
  bool is_nan[kMaxHeadDim / kKvGroup] = {};
  bool was_held = false;
  for (int d = 0; d < head_dim; ++d) {
    if (!std::isfinite(x[d])) {
      is_nan[d / kKvGroup] = true;
      x[d] = 0.0F;
    }
    const float held = std::clamp(x[d], -kLargestInt8, kLargestInt8);
    was_held = was_held || held != x[d];
    x[d] = held;
  }
  encode(codec, head_dim, x, out);
  for (int group = 0; group * kKvGroup < head_dim; ++group) {
    if (is_nan[group]) {
      std::memcpy(out + head_dim + 2 * group, &kNanHalf, sizeof(kNanHalf));
    }
  }
  return was_held;
}

}  // namespace

std::int64_t recode_block(Pool& pool, Isa isa, const KvRecode& recode, const std::uint8_t* source,
                          std::uint8_t* target) {
  const KvLayout& from = recode.source;
  const KvLayout& to = recode.target;
  const EncodeKvRow encode = encode_kv_row(isa);
  const int num_planes = recode.num_layers * 2 * from.num_kv_heads;  // of P rows each
  const int planes_per_item = std::max(1, 256 / std::max(1, recode.num_tokens));
  const int num_items = ceil_div(num_planes, planes_per_item);
  std::atomic<std::int64_t> num_held{0};
  const auto recode_plane = [&](std::int64_t plane) {
    const std::uint8_t* row = source + plane * from.block_size * from.row_bytes;
    std::uint8_t* out = target + plane * to.block_size * to.row_bytes;
    if (from.codec == to.codec) {
      std::memcpy(out, row, static_cast<std::size_t>(recode.num_tokens) * static_cast<std::size_t>(to.row_bytes));
      return;
    }
    float x[kMaxHeadDim];
    for (int i = 0; i < recode.num_tokens; ++i, row += from.row_bytes, out += to.row_bytes) {
      decode_row(from.codec, from.head_dim, row, x);
      if (!encode(to.codec, to.head_dim, x, out) && encode_held_row(encode, to.codec, to.head_dim, x, out)) {
        num_held.fetch_add(1, std::memory_order_relaxed);
      }
    }
  };
  pool.run([&](Worker& worker) {
    for (int item = worker.claim(num_items); item >= 0; item = worker.claim(num_items)) {
      const int last = std::min(num_planes, (item + 1) * planes_per_item);
      for (int plane = item * planes_per_item; plane < last; ++plane) {
        recode_plane(plane);
      }
    }
  });
  return num_held.load();
}

}  // namespace kvist
