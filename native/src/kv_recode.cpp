#include "kvist/kv_recode.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "aligned.h"
#include "kvist/common.h"
#include "kvist/kv_codec.h"
#include "kvist/kv_span_codec.h"
#include "kvist/rowwise.h"

namespace kvist {
namespace {

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

// The change of one block, in items that any thread may take.
class Recoding {
 public:
  Recoding(Isa isa, const KvRecode& recode, const std::uint8_t* source, std::uint8_t* target)
      : recode_(recode),
        from_(recode.source),
        to_(recode.target),
        source_(source),
        target_(target),
        encode_row_(encode_kv_row(isa)),
        spans_(kv_span_kernels(isa)),
        from_bits_(kv_codec_bits(from_.codec)),
        to_bits_(kv_codec_bits(to_.codec)) {
    if (from_.codec == to_.codec) {
      kind_ = from_bits_ == 0 ? Kind::kRows : Kind::kCopy;
    } else {
      kind_ = from_bits_ == 0 && to_bits_ == 0 ? Kind::kRows : Kind::kSpans;
    }
    if (kind_ == Kind::kSpans) {
      turn_ = head_turn(from_.head_dim);
      has_feedback_ = to_bits_ != 0 && recode.transforms->key_metric != nullptr;
    }
  }

  int num_items() const {
    const int num_heads = recode_.num_layers * from_.num_kv_heads;
    switch (kind_) {
      case Kind::kRows:
        return ceil_div(2 * num_heads, planes_per_item());
      case Kind::kCopy:
        return recode_.num_layers;
      case Kind::kSpans:
        return num_heads * ceil_div(recode_.num_tokens, kSpanTokens);
    }
    return 0;
  }

  // Per thread, aligned to kAlignment.
  std::size_t scratch_bytes() const {
    return kind_ == Kind::kSpans ? 2 * rows_bytes() + inner_bytes() + (has_feedback_ ? shares_bytes() : 0) : 0;
  }

  // Returns how much was held.
  int run(int item, std::uint8_t* scratch) const {
    int num_held = 0;
    switch (kind_) {
      case Kind::kRows:
        for (int plane = item * planes_per_item(); plane < (item + 1) * planes_per_item(); ++plane) {
          num_held += plane < recode_.num_layers * 2 * from_.num_kv_heads ? recode_plane(plane) : 0;
        }
        break;
      case Kind::kCopy: {
        const std::int64_t layer_bytes = kv_layer_bytes(to_);
        std::memcpy(target_ + item * layer_bytes, source_ + item * layer_bytes, static_cast<std::size_t>(layer_bytes));
        break;
      }
      case Kind::kSpans:
        num_held = recode_span(item, scratch);
        break;
    }
    return num_held;
  }

 private:
  enum class Kind { kRows, kCopy, kSpans };

  // A plane: P rows of one layer, K or V, and KV head.
  int planes_per_item() const { return std::max(1, 256 / std::max(1, recode_.num_tokens)); }

  std::size_t rows_bytes() const { return static_cast<std::size_t>(kSpanTokens * from_.head_dim) * sizeof(float); }

  std::size_t inner_bytes() const { return round_up(kv_span_scratch_bytes(from_.head_dim), kAlignment); }

  std::size_t shares_bytes() const {
    return round_up(static_cast<std::size_t>(from_.head_dim) * from_.head_dim * sizeof(float), kAlignment);
  }

  int recode_plane(std::int64_t plane) const {
    const std::uint8_t* row = source_ + plane * from_.block_size * from_.row_bytes;
    std::uint8_t* out = target_ + plane * to_.block_size * to_.row_bytes;
    if (from_.codec == to_.codec) {
      std::memcpy(out, row, static_cast<std::size_t>(recode_.num_tokens) * static_cast<std::size_t>(to_.row_bytes));
      return 0;
    }
    float x[kMaxHeadDim];
    int num_held = 0;
    for (int i = 0; i < recode_.num_tokens; ++i, row += from_.row_bytes, out += to_.row_bytes) {
      decode_row(from_.codec, from_.head_dim, row, x);
      num_held += encode_row(x, out);
    }
    return num_held;
  }

  // A record at one end or both, by number among those with positions to write.
  int recode_span(int item, std::uint8_t* scratch) const {
    const int head = item % from_.num_kv_heads;
    const int rest = item / from_.num_kv_heads;
    const int num_spans = ceil_div(recode_.num_tokens, kSpanTokens);
    const int span = rest % num_spans;
    const int layer = rest / num_spans;
    auto* keys = reinterpret_cast<float*>(scratch);
    auto* values = reinterpret_cast<float*>(scratch + rows_bytes());
    void* inner = scratch + 2 * rows_bytes();
    const std::int64_t layer_head = std::int64_t{layer} * from_.num_kv_heads + head;
    const std::int64_t numbers = layer_head * from_.head_dim;
    const KvSpanHead with = {&turn_, recode_.transforms->mean + numbers, recode_.transforms->key_balance + numbers,
                             recode_.transforms->value_balance + numbers};
    if (from_bits_ != 0) {
      spans_.decode(from_bits_, with, source_ + record_at(from_, from_bits_, layer, span, head), keys, values, inner);
    } else {
      read_rows(layer, 0, head, span, keys);
      read_rows(layer, 1, head, span, values);
    }
    if (to_bits_ != 0) {
      float* shares = nullptr;
      if (has_feedback_) {
        shares = reinterpret_cast<float*>(scratch + 2 * rows_bytes() + inner_bytes());
        find_shares(with, layer, layer_head, recode_.start + std::int64_t{span} * kSpanTokens, shares);
      }
      return spans_.encode(to_bits_, with, shares, keys, values, target_ + record_at(to_, to_bits_, layer, span, head),
                           inner);
    }
    return write_rows(layer, 0, head, span, keys) + write_rows(layer, 1, head, span, values);
  }

  // Of a span that starts at the given position.
  void find_shares(const KvSpanHead& with, int layer, std::int64_t layer_head, std::int64_t start,
                   float* shares) const {
    const int half = from_.head_dim / 2;
    const double* frequencies = recode_.transforms->frequencies + std::int64_t{layer} * half;
    float cosines[kMaxHeadDim / 2];
    float sines[kMaxHeadDim / 2];
    for (int pair = 0; pair < half; ++pair) {
      const double angle = static_cast<double>(start) * frequencies[pair];
      cosines[pair] = static_cast<float>(std::cos(angle));
      sines[pair] = static_cast<float>(std::sin(angle));
    }
    const float* lower = recode_.transforms->key_metric + layer_head * kv_metric_size(from_.head_dim);
    spans_.feedback(with, {lower, cosines, sines}, shares);
  }

  static std::int64_t record_at(const KvLayout& layout, int bits, int layer, int span, int head) {
    const std::int64_t record = std::int64_t{layer} * (layout.block_size / kSpanTokens) + span;
    return (record * layout.num_kv_heads + head) * kv_record_bytes(bits, layout.head_dim);
  }

  static std::int64_t row_at(const KvLayout& layout, int layer, int k_or_v, int head, int position) {
    const std::int64_t plane = (std::int64_t{layer} * 2 + k_or_v) * layout.num_kv_heads + head;
    return (plane * layout.block_size + position) * layout.row_bytes;
  }

  void read_rows(int layer, int k_or_v, int head, int span, float* rows) const {
    const std::uint8_t* row = source_ + row_at(from_, layer, k_or_v, head, span * kSpanTokens);
    for (int t = 0; t < kSpanTokens; ++t) {
      decode_row(from_.codec, from_.head_dim, row + std::ptrdiff_t{t} * from_.row_bytes, rows + t * from_.head_dim);
    }
  }

  int write_rows(int layer, int k_or_v, int head, int span, float* rows) const {
    std::uint8_t* out = target_ + row_at(to_, layer, k_or_v, head, span * kSpanTokens);
    const int count = std::min(kSpanTokens, recode_.num_tokens - span * kSpanTokens);
    int num_held = 0;
    for (int t = 0; t < count; ++t) {
      num_held += encode_row(rows + t * to_.head_dim, out + std::ptrdiff_t{t} * to_.row_bytes);
    }
    return num_held;
  }

  int encode_row(float* x, std::uint8_t* out) const {
    const bool fits = encode_row_(to_.codec, to_.head_dim, x, out);
    return !fits && encode_held_row(encode_row_, to_.codec, to_.head_dim, x, out) ? 1 : 0;
  }

  const KvRecode& recode_;
  const KvLayout& from_;
  const KvLayout& to_;
  const std::uint8_t* source_;
  std::uint8_t* target_;
  EncodeKvRow encode_row_;
  const KvSpanKernels& spans_;
  int from_bits_;
  int to_bits_;
  Kind kind_;
  bool has_feedback_ = false;
  HeadTurn turn_;
};

}  // namespace

std::int64_t recode_block(Pool& pool, Isa isa, const KvRecode& recode, const std::uint8_t* source,
                          std::uint8_t* target) {
  const Recoding recoding(isa, recode, source, target);
  const int num_items = recoding.num_items();
  AlignedBuffer<std::uint8_t> scratch;
  scratch.at_least(recoding.scratch_bytes() * static_cast<std::size_t>(pool.num_threads()));
  std::atomic<std::int64_t> num_held{0};
  pool.run([&](Worker& worker) {
    std::uint8_t* own = scratch.data() + recoding.scratch_bytes() * static_cast<std::size_t>(worker.index());
    for (int item = worker.claim(num_items); item >= 0; item = worker.claim(num_items)) {
      num_held.fetch_add(recoding.run(item, own), std::memory_order_relaxed);
    }
  });
  return num_held.load();
}

}  // namespace kvist
