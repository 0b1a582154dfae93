// Blocks as Python hands them over: names of codecs, and where in an arena each block is.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "kvist/attention.h"
#include "kvist/kv_codec.h"

namespace kvist {

using BlockOffsets =
    nanobind::ndarray<const std::int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using BlockCodecs = nanobind::ndarray<const std::uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// Throws std::invalid_argument for a name that is no codec's.
KvCodec kv_codec_from(const std::string& name);

// The blocks of a (num_rows, row_bytes) arena: row b is block b of the layout, or the blocks are where the tables say.
// Holds pointers into the tables.
class BlockPlaces {
 public:
  // Throws std::invalid_argument when the arena's rows are no blocks, or the tables do not go together.
  BlockPlaces(const KvLayout& layout, int num_layers, std::int64_t num_rows, std::int64_t row_bytes,
              const std::optional<BlockOffsets>& offsets, const std::optional<BlockCodecs>& codecs);

  // Throws std::invalid_argument unless the id is one of a block that is allocated and inside the arena.
  void check_readable(std::int64_t id) const;

  // Throws std::invalid_argument unless rows in the layout's codec may be written to a readable block.
  void check_writable(std::int64_t id) const;

  const std::int64_t* offsets() const { return offsets_; }
  const std::uint8_t* codecs() const { return codecs_; }

 private:
  std::int64_t num_blocks_;
  std::int64_t arena_bytes_;
  KvCodec written_;
  std::array<std::int64_t, kNumKvCodecs> block_bytes_;
  const std::int64_t* offsets_ = nullptr;
  const std::uint8_t* codecs_ = nullptr;
};

}  // namespace kvist
