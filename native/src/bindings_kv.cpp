#include "bindings_kv.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "kvist/isa.h"
#include "kvist/kv_recode.h"
#include "kvist/pool.h"

namespace nb = nanobind;

namespace kvist {
namespace {

constexpr const char* kCodecNames[kNumKvCodecs] = {"raw16", "int8", "int4", "int3"};

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("[native] " + what); }

// What int4 and int3 ask for on either side of a change.
void check_spans(const KvRecode& recode, const std::string& source_codec, const std::string& target_codec) {
  const bool reads_spans = kv_codec_bits(recode.source.codec) != 0;
  const bool writes_spans = kv_codec_bits(recode.target.codec) != 0;
  if (!reads_spans && !writes_spans) {
    return;
  }
  const std::string& name = writes_spans ? target_codec : source_codec;
  const int block_size = recode.target.block_size;
  if (block_size % kSpanTokens != 0) {
    refuse("block_size must be a multiple of 64 for " + name + ", received " + std::to_string(block_size));
  }
  if (writes_spans && recode.num_tokens != block_size) {
    refuse("num_tokens must be the whole block of " + std::to_string(block_size) + " for the target_codec " + name +
           ", received " + std::to_string(recode.num_tokens));
  }
  if (recode.source.codec != recode.target.codec && recode.transforms == nullptr) {
    refuse("transforms are needed between " + source_codec + " and " + target_codec);
  }
}

}  // namespace

KvCodec kv_codec_from(const std::string& name) {
  for (int codec = 0; codec < kNumKvCodecs; ++codec) {
    if (name == kCodecNames[codec]) {
      return static_cast<KvCodec>(codec);
    }
  }
  refuse("the codec must be raw16, int8, int4 or int3, received '" + name + "'");
}

KvCodec kv_row_codec_from(const std::string& name) {
  const KvCodec codec = kv_codec_from(name);
  if (kv_codec_bits(codec) != 0) {
    refuse("rows are written in raw16 or int8, received '" + name + "'");
  }
  return codec;
}

OwnedTransforms::OwnedTransforms(const Array& mean, const Array& key_balance, const Array& value_balance,
                                 const std::optional<Metric>& key_metric,
                                 const std::optional<Frequencies>& frequencies) {
  for (int axis = 0; axis < 3; ++axis) {
    const auto size = static_cast<std::size_t>(axis);
    if (mean.shape(size) != key_balance.shape(size) || mean.shape(size) != value_balance.shape(size)) {
      refuse("mean, key_balance and value_balance must be of the same shape, (L, K, D)");
    }
    shape_[size] = static_cast<std::int64_t>(mean.shape(size));
  }
  const std::size_t count = mean.size();
  values_.reserve(3 * count);
  for (const Array* part : {&mean, &key_balance, &value_balance}) {
    values_.insert(values_.end(), part->data(), part->data() + count);
  }
  const auto is_bad = [&](std::size_t i) { return !std::isfinite(values_[i]) || (i >= count && !(values_[i] > 0.0F)); };
  for (std::size_t i = 0; i < values_.size(); ++i) {
    if (is_bad(i)) {
      refuse("transforms must be finite, and balances above 0; received " + std::to_string(values_[i]));
    }
  }
  transforms_ = {values_.data(), values_.data() + count, values_.data() + 2 * count};
  if (key_metric.has_value() != frequencies.has_value()) {
    refuse("key_metric and frequencies go together");
  }
  if (key_metric.has_value()) {
    keep_metric(*key_metric, *frequencies);
  }
}

void OwnedTransforms::keep_metric(const Metric& metric, const Frequencies& frequencies) {
  const std::int64_t head_dim = shape_[2];
  const std::array<std::int64_t, 4> expected = {shape_[0], shape_[1], head_dim, head_dim};
  for (std::size_t axis = 0; axis < expected.size(); ++axis) {
    if (static_cast<std::int64_t>(metric.shape(axis)) != expected[axis]) {
      refuse("key_metric must be (L, K, D, D) of the sizes of the mean");
    }
  }
  if (static_cast<std::int64_t>(frequencies.shape(0)) != shape_[0] ||
      static_cast<std::int64_t>(frequencies.shape(1)) * 2 != head_dim) {
    refuse("frequencies must be (L, D / 2) of the sizes of the mean");
  }
  const std::int64_t size = shape_[0] * shape_[1] * kv_metric_size(static_cast<int>(head_dim));
  metric_.reserve(static_cast<std::size_t>(size) + kMetricSlack);
  const float* row = metric.data();
  for (std::int64_t i = 0; i < shape_[0] * shape_[1] * head_dim; ++i, row += head_dim) {
    const std::int64_t channel = i % head_dim;
    metric_.insert(metric_.end(), row, row + channel + 1);
    if (row[channel] < 0.0F) {
      refuse("the diagonals of key_metric must not be below 0, received " + std::to_string(row[channel]));
    }
  }
  frequencies_.assign(frequencies.data(), frequencies.data() + frequencies.size());
  const auto is_finite = [](double x) { return std::isfinite(x); };
  if (!std::all_of(metric_.begin(), metric_.end(), is_finite) ||
      !std::all_of(frequencies_.begin(), frequencies_.end(), is_finite)) {
    refuse("key_metric and frequencies must be finite");
  }
  metric_.insert(metric_.end(), kMetricSlack, 0.0F);
  transforms_.key_metric = metric_.data();
  transforms_.frequencies = frequencies_.data();
}

const KvTransforms* OwnedTransforms::of(int num_layers, int num_kv_heads, int head_dim) const {
  if (shape_ != std::array<std::int64_t, 3>{num_layers, num_kv_heads, head_dim}) {
    refuse("transforms must be of " + std::to_string(num_layers) + " layers, " + std::to_string(num_kv_heads) +
           " KV heads and " + std::to_string(head_dim) + " channels, received " + std::to_string(shape_[0]) + ", " +
           std::to_string(shape_[1]) + " and " + std::to_string(shape_[2]));
  }
  return &transforms_;
}

BlockPlaces::BlockPlaces(const KvLayout& layout, int num_layers, std::int64_t num_rows, std::int64_t row_bytes,
                         const std::optional<BlockOffsets>& offsets, const std::optional<BlockCodecs>& codecs,
                         const OwnedTransforms* transforms)
    : layout_(layout), num_blocks_(num_rows), arena_bytes_(num_rows * row_bytes) {
  if (transforms != nullptr) {
    transforms_ = transforms->of(num_layers, layout.num_kv_heads, layout.head_dim);
  }
  for (int codec = 0; codec < kNumKvCodecs; ++codec) {
    block_bytes_[codec] = num_layers * kv_layer_bytes(with_codec(layout, static_cast<KvCodec>(codec)));
  }
  if (offsets.has_value() != codecs.has_value()) {
    refuse("offsets and codecs of blocks go together");
  }
  if (offsets.has_value()) {
    if (offsets->shape(0) != codecs->shape(0)) {
      refuse("expected as many offsets as codecs of blocks, received " + std::to_string(offsets->shape(0)) + " and " +
             std::to_string(codecs->shape(0)));
    }
    num_blocks_ = static_cast<std::int64_t>(offsets->shape(0));
    offsets_ = offsets->data();
    codecs_ = codecs->data();
    return;
  }
  check_codec(layout.codec);
  if (row_bytes != block_bytes_[static_cast<int>(layout.codec)]) {
    refuse("a block of this layout has " + std::to_string(block_bytes_[static_cast<int>(layout.codec)]) +
           " bytes, the arena's have " + std::to_string(row_bytes));
  }
}

void BlockPlaces::check_codec(KvCodec codec) const {
  if (kv_codec_bits(codec) == 0) {
    return;
  }
  const char* const name = kCodecNames[static_cast<int>(codec)];
  if (layout_.block_size % kSpanTokens != 0) {
    refuse(std::string(name) + " blocks have a multiple of 64 positions, received block_size " +
           std::to_string(layout_.block_size));
  }
  if (transforms_ == nullptr) {
    refuse(std::string(name) + " blocks cannot be read without transforms");
  }
}

void BlockPlaces::check_readable(std::int64_t id) const {
  if (id < 0 || id >= num_blocks_) {
    refuse("block id " + std::to_string(id) + " is not in an arena of " + std::to_string(num_blocks_) + " blocks");
  }
  if (offsets_ == nullptr) {
    return;
  }
  const std::uint8_t codec = codecs_[id];
  if (codec == kNotAllocated) {
    refuse("block id " + std::to_string(id) + " is not allocated");
  }
  if (codec >= kNumKvCodecs) {
    refuse("block id " + std::to_string(id) + " has the codec " + std::to_string(codec) + ", which is none");
  }
  check_codec(static_cast<KvCodec>(codec));
  if (offsets_[id] < 0 || offsets_[id] > arena_bytes_ - block_bytes_[codec]) {
    refuse("block id " + std::to_string(id) + " is at " + std::to_string(offsets_[id]) + ", not in an arena of " +
           std::to_string(arena_bytes_) + " bytes");
  }
}

void BlockPlaces::check_writable(std::int64_t id) const {
  if (codecs_ != nullptr && codecs_[id] != static_cast<std::uint8_t>(layout_.codec)) {
    refuse("block id " + std::to_string(id) + " is to be written in " + kCodecNames[static_cast<int>(layout_.codec)] +
           " and is in " + kCodecNames[codecs_[id]]);
  }
}

void bind_kv(nb::module_& module) {
  using Source = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  using Target = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  nb::class_<OwnedTransforms>(module, "KvTransforms")
      .def(
          nb::init<const OwnedTransforms::Array&, const OwnedTransforms::Array&, const OwnedTransforms::Array&,
                   const std::optional<OwnedTransforms::Metric>&, const std::optional<OwnedTransforms::Frequencies>&>(),
          nb::arg("mean").noconvert(), nb::arg("key_balance").noconvert(), nb::arg("value_balance").noconvert(),
          nb::arg("key_metric").noconvert().none() = nb::none(), nb::arg("frequencies").noconvert().none() = nb::none(),
          "Copies what int4 and int3 know of a model: (L, K, D) float32 each, and for encoders what an error of a key "
          "costs, (L, K, D, D) float32, and by how much a position turns each pair of its channels, (L, D / 2) "
          "float64. Without these each channel is rounded by itself.");

  module.def(
      "kv_codecs",
      [] {
        nb::list names;
        for (const char* name : kCodecNames) {
          names.append(name);
        }
        return names;
      },
      "Names of the formats of K and V, in the order of their numbers in tables by block id.");

  module.def(
      "recode_block",
      [](Pool& pool, const Source& source, const Target& target, const std::string& source_codec,
         const std::string& target_codec, int num_layers, int num_kv_heads, int block_size, int head_dim,
         int num_tokens, const OwnedTransforms* transforms, std::int64_t start) {
        if (head_dim < 8 || head_dim > 256 || head_dim % 8 != 0) {
          refuse("head_dim must be a multiple of 8 up to 256, received " + std::to_string(head_dim));
        }
        constexpr int kMost = 1 << 16;  // of each: far above any model's, and no product overflows
        if (num_layers < 1 || num_kv_heads < 1 || block_size < 1 || num_layers > kMost || num_kv_heads > kMost ||
            block_size > kMost) {
          refuse("expected num_layers, num_kv_heads and block_size of at least 1, received " +
                 std::to_string(num_layers) + ", " + std::to_string(num_kv_heads) + " and " +
                 std::to_string(block_size));
        }
        if (num_tokens < 0 || num_tokens > block_size) {
          refuse("num_tokens must be within a block of " + std::to_string(block_size) + ", received " +
                 std::to_string(num_tokens));
        }
        const KvLayout layout =
            with_codec({KvCodec::kRaw16, num_kv_heads, block_size, head_dim, 0, 0}, KvCodec::kRaw16);
        KvRecode recode = {with_codec(layout, kv_codec_from(source_codec)),
                           with_codec(layout, kv_codec_from(target_codec)), num_layers, num_tokens};
        if (start < 0) {
          refuse("start must be the position of the block's first token, received " + std::to_string(start));
        }
        recode.start = start;
        if (transforms != nullptr) {
          recode.transforms = transforms->of(num_layers, num_kv_heads, head_dim);
        }
        check_spans(recode, source_codec, target_codec);
        const auto check_size = [&](std::size_t size, const KvLayout& of, const char* what) {
          if (static_cast<std::int64_t>(size) != num_layers * kv_layer_bytes(of)) {
            refuse("the " + std::string(what) + " must have the " + std::to_string(num_layers * kv_layer_bytes(of)) +
                   " bytes of a block, received " + std::to_string(size));
          }
        };
        check_size(source.size(), recode.source, "source");
        check_size(target.size(), recode.target, "target");
        if (source.data() < target.data() + target.size() && target.data() < source.data() + source.size()) {
          refuse("source and target must not overlap");
        }
        const nb::gil_scoped_release released;
        return recode_block(pool, current_isa(), recode, source.data(), target.data());
      },
      nb::arg("pool"), nb::arg("source").noconvert(), nb::arg("target").noconvert(), nb::kw_only(),
      nb::arg("source_codec"), nb::arg("target_codec"), nb::arg("num_layers"), nb::arg("num_kv_heads"),
      nb::arg("block_size"), nb::arg("head_dim"), nb::arg("num_tokens"), nb::arg("transforms").none() = nb::none(),
      nb::arg("start") = 0,
      "Writes the first positions of a block into another one of another codec or the same; all of them into int4 and "
      "int3, which need transforms, to be read as well as to be written. K of raw16 and int8 is turned where a block "
      "becomes or was int4 or int3. `start` is the position of the block's first token in its sequence, by which a key "
      "metric is turned. Returns how many K or V rows, of int4 and int3 turned components, had values "
      "beyond the target's range, which were held within it.");
}

}  // namespace kvist
