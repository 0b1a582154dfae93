// Spans of 64 positions in 4 and 3 bits (docs/formats/kv_block.md): how a record is written and read.
//
// Rows come and go in the basis of raw16 and int8 blocks of arenas with several codecs: K turned (`k R`, rowwise.h), V
// plain. Each record belongs to one layer and KV head, and so do the numbers it is turned with.
//
// Steps, zero points and scales are those with the least squared error among neighbours of what the range (K) and the
// deviation (V) ask for; each value is then rounded to the nearest grid point. Turned components beyond what the largest
// step or scale reaches are held within it and counted. A channel of K, or a position of V, with a turned component that
// is not finite has the step or scale 255 and codes 0: it reads as NaN.
//
// Numerics: float32, sums over positions (K) and channels (V) in ascending order, products rounded before they are
// added. Every instruction set writes the same bytes and reads the same values.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvist/isa.h"
#include "kvist/kv_span.h"
#include "kvist/rowwise.h"

namespace kvist {

// What the rows of one layer and KV head are turned with.
struct KvSpanHead {
  const HeadTurn* turn;
  const float* mean;           // (D,) of K
  const float* key_balance;    // (D,)
  const float* value_balance;  // (D,)
};

// `bits` is 4 or 3. `keys` and `values` are (64, D) row-major; a record is kv_record_bytes, at any address. `scratch` is
// of kv_span_scratch_bytes, aligned to kAlignment.
struct KvSpanKernels {
  // Returns how many turned components were held within reach. Overwrites `keys`.
  int (*encode)(int bits, const KvSpanHead& head, float* keys, const float* values, std::uint8_t* record,
                void* scratch) noexcept;
  void (*decode)(int bits, const KvSpanHead& head, const std::uint8_t* record, float* keys, float* values,
                 void* scratch) noexcept;
};

// A float column of 64 positions and the codes of K or V, for each channel.
static constexpr std::size_t kv_span_scratch_bytes(int head_dim) {
  return static_cast<std::size_t>(head_dim) * kSpanTokens * (sizeof(float) + 1);
}

// The kernels of an instruction set; every available one has them.
const KvSpanKernels& kv_span_kernels(Isa isa);

}  // namespace kvist
