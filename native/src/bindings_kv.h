// Blocks as Python hands them over: names of codecs, the numbers of a model that int4 and int3 need, and where in an
// arena each block is.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvist/attention.h"
#include "kvist/kv_codec.h"
#include "kvist/kv_span.h"

namespace kvist {

using BlockOffsets =
    nanobind::ndarray<const std::int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using BlockCodecs = nanobind::ndarray<const std::uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// Throws std::invalid_argument for a name that is no codec's.
KvCodec kv_codec_from(const std::string& name);

// The same for what is written row by row: raw16 and int8.
KvCodec kv_row_codec_from(const std::string& name);

// `kvist._native.KvTransforms`: a model's numbers, copied.
class OwnedTransforms {
 public:
  using Array = nanobind::ndarray<const float, nanobind::ndim<3>, nanobind::c_contig, nanobind::device::cpu>;
  using Metric = nanobind::ndarray<const float, nanobind::ndim<4>, nanobind::c_contig, nanobind::device::cpu>;
  using Frequencies = nanobind::ndarray<const double, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

  // Throws std::invalid_argument unless the first three are of one shape, finite, and the balances above 0, and the last
  // two are both there or none, of the same layers, heads and channels, finite, and no diagonal is below 0.
  OwnedTransforms(const Array& mean, const Array& key_balance, const Array& value_balance,
                  const std::optional<Metric>& key_metric, const std::optional<Frequencies>& frequencies);

  // Throws std::invalid_argument unless they are of a model of these sizes.
  const KvTransforms* of(int num_layers, int num_kv_heads, int head_dim) const;

 private:
  void keep_metric(const Metric& metric, const Frequencies& frequencies);

  std::array<std::int64_t, 3> shape_;
  std::vector<float> values_;
  std::vector<float> metric_;  // lower triangles
  std::vector<double> frequencies_;
  KvTransforms transforms_;
};

// The blocks of a (num_rows, row_bytes) arena: row b is block b of the layout, or the blocks are where the tables say.
// Holds pointers into the tables. Without transforms no block may be int4 or int3.
class BlockPlaces {
 public:
  // Throws std::invalid_argument when the arena's rows are no blocks, or the tables do not go together.
  BlockPlaces(const KvLayout& layout, int num_layers, std::int64_t num_rows, std::int64_t row_bytes,
              const std::optional<BlockOffsets>& offsets, const std::optional<BlockCodecs>& codecs,
              const OwnedTransforms* transforms);

  // Throws std::invalid_argument unless the id is one of a block that is allocated and inside the arena.
  void check_readable(std::int64_t id) const;

  // Throws std::invalid_argument unless rows in the layout's codec may be written to a readable block.
  void check_writable(std::int64_t id) const;

  const std::int64_t* offsets() const { return offsets_; }
  const std::uint8_t* codecs() const { return codecs_; }
  const KvTransforms* transforms() const { return transforms_; }

 private:
  void check_codec(KvCodec codec) const;

  KvLayout layout_;
  std::int64_t num_blocks_;
  std::int64_t arena_bytes_;
  std::array<std::int64_t, kNumKvCodecs> block_bytes_;
  const std::int64_t* offsets_ = nullptr;
  const std::uint8_t* codecs_ = nullptr;
  const KvTransforms* transforms_ = nullptr;
};

}  // namespace kvist
