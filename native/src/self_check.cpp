// The self-check: one thread, fixed pseudo-random problems around the edges of tiles, `serial` as the oracle.
//
// Tolerances are several times what the contracts allow, and small against what a wrong lane, operand or layout does.

#include "kvist/self_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "aligned.h"
#include "kvist/attention.h"
#include "kvist/kv_codec.h"
#include "kvist/kv_span.h"
#include "kvist/kv_span_codec.h"
#include "kvist/linear.h"
#include "kvist/rowwise.h"

namespace kvist {
namespace {

// Values in (-1, 1), the same everywhere.
class Values {
 public:
  float next() {
    state_ = state_ * 1664525U + 1013904223U;
    return static_cast<float>(static_cast<std::int32_t>(state_ >> 8) - (1 << 23)) * 0x1p-23F;
  }
  std::vector<float> take(std::size_t count, float scale = 1.0F) {
    std::vector<float> values(count);
    std::generate(values.begin(), values.end(), [&] { return next() * scale; });
    return values;
  }

 private:
  std::uint32_t state_ = 12345;
};

// What is wrong with `got`, said of `what`; empty when each value is within `allowed` of the expected one. `want` may
// hold more.
std::string differs(const std::string& what, std::vector<float> got, const std::vector<float>& want, float allowed,
                    bool falsified) {
  if (falsified) {
    got[got.size() / 2] += 3.0F * allowed;
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (!(std::fabs(got[i] - want[i]) <= allowed)) {
      return what + ": " + std::to_string(got[i]) + " instead of " + std::to_string(want[i]);
    }
  }
  return "";
}

// A layer packed by one table, and the memory that its calls need.
class Layer {
 public:
  Layer(const LinearKernels& kernels, const LinearShape& shape, const std::vector<float>& weights)
      : kernels_(kernels), shape_(shape), results_(shape.num_outputs / (shape.gate == Gate::kNone ? 1 : 2)) {
    const std::size_t bytes = kernels.packed_bytes(shape);
    std::memset(packed_.at_least(bytes), 0, bytes);
    kernels.pack(shape, weights.data(), 0, results_, packed_.data());
  }

  std::vector<float> run(const std::vector<float>& x, int rows) {
    kernels_.quantise(shape_, x.data(), shape_.num_inputs, rows, 0, rows,
                      activations_.at_least(kernels_.activation_bytes(shape_, rows)));
    scratch_.at_least(kernels_.scratch_bytes(shape_, rows) + 1);
    std::vector<float> out(static_cast<std::size_t>(rows) * results_);
    const PackedLinear linear{shape_, packed_.data(), nullptr};
    for (int item = 0; item < kernels_.num_items(shape_, rows, 1); ++item) {
      kernels_.run(linear, activations_.data(), rows, 1, item, Epilogue{out.data(), results_, nullptr, 0},
                   scratch_.data());
    }
    return out;
  }

 private:
  const LinearKernels& kernels_;
  LinearShape shape_;
  int results_;
  AlignedBuffer<std::uint8_t> packed_;
  AlignedBuffer<std::uint8_t> activations_;
  AlignedBuffer<std::uint8_t> scratch_;
};

std::string check_linear(Isa isa, bool falsified) {
  constexpr int kOutputs = 70;
  constexpr int kInputs = 96;
  // On a grid of int4 that every table finds: minimum -1/4, step 1/32, both ends in each group.
  Values values;
  std::vector<float> weights(std::size_t{kOutputs} * kInputs);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const int code = i % 32 < 2 ? static_cast<int>(i % 32) * 15 : static_cast<int>((values.next() + 1.0F) * 8.0F);
    weights[i] = -0.25F + static_cast<float>(code) / 32.0F;
  }
  struct Case {
    const char* name;
    LinearShape shape;
  };
  const Case cases[] = {
      {"int8", {WeightKind::kInt8, kOutputs, kInputs, 0, Gate::kNone}},
      {"int4 in groups of 32", {WeightKind::kInt4, kOutputs, kInputs, 32, Gate::kNone}},
      {"int4 in groups of 64", {WeightKind::kInt4, kOutputs, kInputs, 64, Gate::kNone}},
      {"bf16", {WeightKind::kBf16, kOutputs, kInputs, 0, Gate::kNone}},
      {"gated int8", {WeightKind::kInt8, kOutputs, kInputs, 0, Gate::kSilu}},
  };
  constexpr int kMostRows = 17;
  const std::vector<float> x = values.take(std::size_t{kMostRows} * kInputs);
  for (const Case& one : cases) {
    Layer layer(linear_kernels(isa), one.shape, weights);
    const std::vector<float> want = Layer(linear_kernels(Isa::kSerial), one.shape, weights).run(x, kMostRows);
    // One row, a tile of each height up to the highest, more than a tile. A row does not depend on those behind it.
    for (const int rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, kMostRows}) {
      const std::vector<float> got = layer.run(x, rows);
      std::string error = differs("linear " + std::string(one.name) + " with " + std::to_string(rows) + " rows", got,
                                  want, 1e-4F, falsified);
      if (!error.empty()) {
        return error;
      }
    }
  }
  return "";
}

std::vector<float> run_attention(Isa isa, const AttentionShape& shape, const AttentionBatch& batch, int num_rows,
                                 const std::vector<float>& queries, const std::vector<std::uint8_t>& blocks) {
  const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(shape.num_heads) * shape.layout.head_dim;
  std::vector<float> out(static_cast<std::size_t>(num_rows * stride));
  const AttentionRows rows{queries.data(), stride, out.data(), stride};
  AttentionPlan plan;
  plan.assign(isa, shape, batch, 2);
  AlignedBuffer<std::uint8_t> scratch;
  scratch.at_least(plan.scratch_bytes() + 1);
  for (int item = 0; item < plan.num_items(); ++item) {
    plan.run(item, blocks.data(), 0, rows, scratch.data());
  }
  for (int index = 0; index < plan.num_merges(); ++index) {
    plan.merge(index, rows);
  }
  return out;
}

std::string check_attention(Isa isa, bool falsified) {
  constexpr int kHeads = 3;
  constexpr int kBlockSize = 16;
  constexpr int kBlocks = 14;
  // A decode step over a few blocks that it shares, and a prompt: rows streamed, rows in a tile.
  constexpr std::array<std::int32_t, 4> kQueryStarts = {0, 1, 2, 16};
  constexpr std::array<std::int32_t, 3> kContextLens = {75, 80, 70};
  constexpr std::array<std::int32_t, 4> kTableStarts = {0, 5, 10, 15};
  constexpr std::array<std::int32_t, 15> kTables = {0, 1, 2, 3, 4, 0, 1, 2, 3, 5, 6, 7, 8, 9, 10};
  const AttentionBatch batch{
      3, kQueryStarts.data(), kContextLens.data(), kTableStarts.data(), kTables.data(), nullptr, nullptr};
  Values values;
  for (const KvCodec codec : {KvCodec::kRaw16, KvCodec::kInt8}) {
    for (const int head_dim : {64, 72}) {
      const int row_bytes = kv_row_bytes(codec, head_dim);
      const std::int64_t block_bytes = std::int64_t{2} * kBlockSize * row_bytes;
      std::vector<std::uint8_t> blocks(static_cast<std::size_t>(kBlocks * block_bytes));
      for (std::size_t at = 0; at < blocks.size(); at += static_cast<std::size_t>(row_bytes)) {
        encode_kv_row_serial(codec, head_dim, values.take(static_cast<std::size_t>(head_dim)).data(), &blocks[at]);
      }
      const std::vector<float> queries =
          values.take(static_cast<std::size_t>(kQueryStarts.back()) * kHeads * head_dim, 3.0F);
      const int window = (codec == KvCodec::kInt8) == (head_dim == 64) ? 40 : 0;
      const AttentionShape shape{{codec, 1, kBlockSize, head_dim, row_bytes, block_bytes}, kHeads, 0.5F, 0.0F, window};
      std::string error =
          differs(std::string("attention over ") + (codec == KvCodec::kInt8 ? "int8" : "raw16") + ", head_dim " +
                      std::to_string(head_dim),
                  run_attention(isa, shape, batch, kQueryStarts.back(), queries, blocks),
                  run_attention(Isa::kSerial, shape, batch, kQueryStarts.back(), queries, blocks), 6e-3F, falsified);
      if (!error.empty()) {
        return error;
      }
    }
  }
  return "";
}

// Records of a block with any codes, and steps and scales of a few binades: keys and values are about 1.
std::vector<std::uint8_t> make_records(int bits, int head_dim, int num_records, Values& values) {
  const auto record_bytes = static_cast<std::size_t>(kv_record_bytes(bits, head_dim));
  const KvRecordLayout parts = kv_record_layout(bits, head_dim);
  std::vector<std::uint8_t> records(static_cast<std::size_t>(num_records) * record_bytes);
  std::generate(records.begin(), records.end(),
                [&] { return static_cast<std::uint8_t>(static_cast<int>((values.next() + 1.0F) * 128.0F)); });
  for (std::size_t at = 0; at < records.size(); at += record_bytes) {
    for (int d = 0; d < head_dim; ++d) {
      records[at + static_cast<std::size_t>(d)] %= 24U;
      records[at + static_cast<std::size_t>(d)] += 128U;
      records[at + static_cast<std::size_t>(parts.zeros + d)] = static_cast<std::uint8_t>(1 - (1 << bits) + d % 3);
    }
    for (int t = 0; t < kSpanTokens; ++t) {
      records[at + static_cast<std::size_t>(parts.scales + t)] %= 16U;
      records[at + static_cast<std::size_t>(parts.scales + t)] += 104U;
    }
  }
  return records;
}

std::string check_spans(Isa isa, bool falsified) {
  constexpr int kHeads = 3;
  constexpr int kBlocks = 8;
  // One row over a long context, a few and many rows with some of its blocks.
  constexpr std::array<std::int32_t, 4> kQueryStarts = {0, 1, 3, 17};
  constexpr std::array<std::int32_t, 3> kContextLens = {380, 250, 150};
  constexpr std::array<std::int32_t, 4> kTableStarts = {0, 6, 10, 13};
  constexpr std::array<std::int32_t, 13> kTables = {0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 0, 1, 7};
  const AttentionBatch batch{
      3, kQueryStarts.data(), kContextLens.data(), kTableStarts.data(), kTables.data(), nullptr, nullptr};
  Values values;
  for (const KvCodec codec : {KvCodec::kInt4, KvCodec::kInt3}) {
    for (const int head_dim : {64, 96}) {
      const auto width = static_cast<std::size_t>(head_dim);
      const int bits = kv_codec_bits(codec);
      const std::vector<std::uint8_t> blocks = make_records(bits, head_dim, kBlocks, values);
      const std::vector<float> mean = values.take(width);
      std::vector<float> balances = values.take(2 * width, 0.5F);
      std::ranges::transform(balances, balances.begin(), [](float x) { return 1.0F + x; });
      const KvTransforms transforms{mean.data(), balances.data(), balances.data() + width};
      const std::vector<float> queries =
          values.take(static_cast<std::size_t>(kQueryStarts.back()) * kHeads * width, 2.0F);
      const int window = (codec == KvCodec::kInt4) == (head_dim == 64) ? 100 : 0;
      const AttentionShape shape{{codec, 1, kSpanTokens, head_dim, 0, kv_record_bytes(bits, head_dim)},
                                 kHeads,
                                 0.125F,
                                 0.0F,
                                 window,
                                 &transforms};
      std::string error =
          differs("attention over int" + std::to_string(bits) + ", head_dim " + std::to_string(head_dim),
                  run_attention(isa, shape, batch, kQueryStarts.back(), queries, blocks),
                  run_attention(Isa::kSerial, shape, batch, kQueryStarts.back(), queries, blocks), 1.5e-2F, falsified);
      if (!error.empty()) {
        return error;
      }
    }
  }
  return "";
}

std::string check_codec(Isa isa, bool falsified) {
  constexpr int kHeadDim = 72;
  Values values;
  for (const KvCodec codec : {KvCodec::kRaw16, KvCodec::kInt8}) {
    const auto bytes = static_cast<std::size_t>(kv_row_bytes(codec, kHeadDim));
    for (int i = 0; i < 20; ++i) {
      const std::vector<float> x = values.take(kHeadDim, std::ldexp(1.0F, i - 10));
      std::vector<std::uint8_t> got(bytes);
      std::vector<std::uint8_t> want(bytes);
      const bool finite = encode_kv_row(isa)(codec, kHeadDim, x.data(), got.data());
      got[bytes / 2] ^= falsified ? 1U : 0U;
      if (!encode_kv_row_serial(codec, kHeadDim, x.data(), want.data()) || !finite || got != want) {
        return std::string("rows of keys in ") + (codec == KvCodec::kInt8 ? "int8" : "raw16");
      }
      const std::vector<float> queries = values.take(std::size_t{3} * kHeadDim);
      const bool fits = encode_kv_key(isa)(codec, kHeadDim, 3, x.data(), queries.data(), got.data());
      got[bytes / 2] ^= falsified ? 1U : 0U;
      if (!encode_kv_key_serial(codec, kHeadDim, 3, x.data(), queries.data(), want.data()) || !fits || got != want) {
        return std::string("keys that know their queries in ") + (codec == KvCodec::kInt8 ? "int8" : "raw16");
      }
    }
  }
  return "";
}

std::string check_span_codec(Isa isa, bool falsified) {
  Values values;
  for (const int bits : {4, 3}) {
    for (const int head_dim : {64, 80}) {
      const auto count = static_cast<std::size_t>(head_dim) * kSpanTokens;
      const HeadTurn turn = head_turn(head_dim);
      const std::vector<float> mean = values.take(static_cast<std::size_t>(head_dim));
      const std::vector<float> balance(static_cast<std::size_t>(head_dim), 1.25F);
      const KvSpanHead head{&turn, mean.data(), balance.data(), balance.data()};
      const std::vector<float> keys = values.take(count);
      const std::vector<float> rows = values.take(count);
      // A metric: its diagonal outweighs the rest.
      std::vector<float> lower = values.take(static_cast<std::size_t>(kv_metric_size(head_dim) + kMetricSlack));
      for (int c = 0; c < head_dim; ++c) {
        lower[static_cast<std::size_t>(kv_metric_size(c + 1) - 1)] = static_cast<float>(head_dim);
      }
      const std::vector<float> cosines(static_cast<std::size_t>(head_dim / 2), 0.6F);
      const std::vector<float> sines(static_cast<std::size_t>(head_dim / 2), 0.8F);
      AlignedBuffer<std::uint8_t> scratch;
      scratch.at_least(kv_span_scratch_bytes(head_dim));
      AlignedBuffer<float> shares;
      shares.at_least(static_cast<std::size_t>(head_dim) * static_cast<std::size_t>(head_dim));
      // The bytes with feedback and without, and the K and V that the latter stand for.
      const auto run = [&](const KvSpanKernels& kernels) {
        const auto bytes = static_cast<std::size_t>(kv_record_bytes(bits, head_dim));
        std::vector<std::uint8_t> record(2 * bytes);
        std::vector<float> turned = keys;
        std::vector<float> read(2 * count);
        kernels.feedback(head, {lower.data(), cosines.data(), sines.data()}, shares.data());
        kernels.encode(bits, head, shares.data(), turned.data(), rows.data(), record.data() + bytes, scratch.data());
        turned = keys;
        kernels.encode(bits, head, nullptr, turned.data(), rows.data(), record.data(), scratch.data());
        kernels.decode(bits, head, record.data(), read.data(), read.data() + count, scratch.data());
        return std::pair(record, read);
      };
      auto got = run(kv_span_kernels(isa));
      got.first[got.first.size() / 2] ^= falsified ? 1U : 0U;
      if (got != run(kv_span_kernels(Isa::kSerial))) {
        return "spans in int" + std::to_string(bits) + ", head_dim " + std::to_string(head_dim);
      }
    }
  }
  return "";
}

std::string check_rowwise(Isa isa, bool falsified) {
  constexpr int kSize = 107;
  constexpr int kHalf = 36;
  constexpr int kInputs = 4;
  constexpr int kProjected = 25;
  Values values;
  const std::vector<float> x = values.take(kSize);
  const std::vector<float> weight = values.take(kSize);
  const auto run = [&](const RowwiseKernels& kernels) {
    std::vector<float> out(kSize);
    kernels.rms_norm(x.data(), weight.data(), kSize, 1e-5F, out.data());
    kernels.add_rms_norm(x.data(), weight.data(), kSize, 1e-5F, out.data());
    kernels.rope(out.data(), x.data(), weight.data(), kHalf);
    std::vector<float> projected(std::size_t{kProjected} * 5);
    kernels.project(x.data(), kInputs, 5, weight.data(), kInputs, kProjected, projected.data());
    out.insert(out.end(), projected.begin(), projected.end());
    out.push_back(static_cast<float>(kernels.best_token(x.data(), kSize).token));
    return out;
  };
  return differs("row-wise work", run(rowwise_kernels(isa)), run(rowwise_kernels(Isa::kSerial)), 1e-5F, falsified);
}

}  // namespace

std::string self_check(Isa isa, std::string_view falsify) {
  struct Part {
    const char* name;
    std::string (*check)(Isa isa, bool falsified);
  };
  constexpr Part kParts[] = {{"codec", check_codec},   {"span codec", check_span_codec}, {"rowwise", check_rowwise},
                             {"linear", check_linear}, {"attention", check_attention},   {"spans", check_spans}};
  if (isa == Isa::kSerial) {
    return "";
  }
  for (const Part& part : kParts) {
    std::string error = part.check(isa, falsify == part.name);
    if (!error.empty()) {
      return error;
    }
  }
  return "";
}

}  // namespace kvist
