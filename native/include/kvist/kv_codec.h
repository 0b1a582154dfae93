// Formats of K and V rows in a block, and how one row (one position, one KV head) is written.
//
//   codec    a row of D values
//   raw16    D bfloat16, rounded to nearest even
//   int8     D int8 codes, then one float16 scale for each group of 64 values (the last may be shorter): value = code *
//            scale, scale = max|x| / 127 of its group rounded to float16 (never down to 0 for a nonzero group), codes
//            in
//            [-127, 127]; a group of zeros has scale 0
//
// Rows follow each other without padding, so a row of int8 starts at any even or odd address.
//
// int4 and int3 have no rows: 64 positions are encoded together, when their block is complete (kv_span.h).
#pragma once

#include <bit>
#include <cstdint>

#include "kvist/common.h"
#include "kvist/isa.h"

namespace kvist {

enum class KvCodec : int { kRaw16 = 0, kInt8 = 1, kInt4 = 2, kInt3 = 3 };

inline constexpr int kNumKvCodecs = 4;

inline constexpr int kKvGroup = 64;  // values that share a scale in int8

static constexpr int kv_num_groups(int head_dim) { return (head_dim + kKvGroup - 1) / kKvGroup; }

// Whether queries are turned (rowwise.h) before they meet the keys of blocks of this codec.
static constexpr bool kv_turns_keys(KvCodec codec) { return codec != KvCodec::kRaw16; }

// Bits of a code of the codecs that encode spans; 0 for those that encode rows.
static constexpr int kv_codec_bits(KvCodec codec) {
  return codec == KvCodec::kInt4 ? 4 : codec == KvCodec::kInt3 ? 3 : 0;
}

// 0 for codecs without rows.
static constexpr int kv_row_bytes(KvCodec codec, int head_dim) {
  return codec == KvCodec::kRaw16 ? 2 * head_dim : codec == KvCodec::kInt8 ? head_dim + 2 * kv_num_groups(head_dim) : 0;
}

// Writes head_dim float32 values as one row. Returns false, with unspecified bytes in the row, when a value is not
// finite or has no finite image in the format. Every instruction set writes the same bytes.
using EncodeKvRow = bool (*)(KvCodec codec, int head_dim, const float* x, std::uint8_t* out);

// The encoder of an instruction set; every available one has it.
EncodeKvRow encode_kv_row(Isa isa);

bool encode_kv_row_serial(KvCodec codec, int head_dim, const float* x, std::uint8_t* out);
bool encode_kv_row_avx2(KvCodec codec, int head_dim, const float* x, std::uint8_t* out);

// The same for a key whose position's queries are known, `num_queries` rows of head_dim in the key's basis: those of the
// heads that read it. int8 rounds so that the product with their sum changes as little as it can, each code to one of
// the two grid points around its value (docs/formats/kv_block.md); queries whose sum is 0 or too large to be squared
// change nothing. Every instruction set writes the same bytes.
using EncodeKvKey = bool (*)(KvCodec codec, int head_dim, int num_queries, const float* x, const float* queries,
                             std::uint8_t* out);

EncodeKvKey encode_kv_key(Isa isa);

bool encode_kv_key_serial(KvCodec codec, int head_dim, int num_queries, const float* x, const float* queries,
                          std::uint8_t* out);
bool encode_kv_key_avx2(KvCodec codec, int head_dim, int num_queries, const float* x, const float* queries,
                        std::uint8_t* out);

inline constexpr int kKvLanes = 8;      // sums over a stage are kept in so many lanes, by position
inline constexpr int kMaxKvStages = 8;  // 6 for 256 values

// Values [first, end) are rounded together, with what is known of the errors before them: half of those that are left.
static constexpr int kv_stage_end(int first, int head_dim) {
  const int half = (head_dim - first) / 2 / kKvLanes * kKvLanes;
  return half == 0 ? head_dim : first + half;
}

// Rounds to nearest, ties to even; values beyond the range become infinity.
static inline std::uint16_t f32_to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t rest = bits & 0x7fffffffU;
  if (rest >= 0x7f800000U) {
    return static_cast<std::uint16_t>(sign | (rest > 0x7f800000U ? 0x7e00U : 0x7c00U));
  }
  if (rest < 0x38800000U) {
    // Below 2^-14: adding 0.5 leaves the multiple of 2^-24, rounded by the FPU, in the low bits.
    const float shifted = std::bit_cast<float>(rest) + 0.5F;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000U));
  }
  const std::uint32_t rounded = rest + 0xfffU + ((rest >> 13) & 1U);
  if (rounded >= 0x47800000U) {
    return static_cast<std::uint16_t>(sign | 0x7c00U);
  }
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

}  // namespace kvist
