// Spans of 64 positions in 4 and 3 bits (docs/formats/kv_block.md): how a record is written and read.
//
// Rows come and go in the basis of raw16 and int8 blocks of arenas with several codecs: K turned (`k R`, rowwise.h), V
// plain. Each record belongs to one layer and KV head, and so do the numbers it is turned with.
//
// Steps, zero points and scales are those with the least squared error among neighbours of what the range (K) and the
// deviation (V) ask for; each value is then rounded to the nearest grid point. With feedback keys are rounded channel by
// channel, and each error moves the channels that follow: codes are then one of the two grid points around the value.
// Turned components beyond what the largest step or scale reaches are held within it and counted. A channel of K, or a
// position of V, with a turned component that is not finite has the step or scale 255 and codes 0: it reads as NaN, and
// moves nothing.
//
// Numerics: float32, sums over positions (K) and channels (V) in ascending order, products rounded before they are
// added. Every instruction set writes the same bytes and reads the same values. Feedback that is not finite, as of a
// metric that is none, moves codes within their two grid points only.
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

// What an error of a key costs in one layer and KV head, and how RoPE turns it to where the span starts.
struct KvSpanMetric {
  // (D (D + 1) / 2,) the lower triangle by rows, seen from the start of a span. Vectors may read kMetricSlack beyond it.
  const float* lower;
  const float* cosines;  // (D / 2,) of what the start turns each pair of channels by
  const float* sines;
};

// Share of its mean diagonal that a metric gets added before it is factored.
inline constexpr float kMetricDamping = 0.01F;

// `bits` is 4 or 3. `keys` and `values` are (64, D) row-major; a record is kv_record_bytes, at any address. `scratch` is
// of kv_span_scratch_bytes, aligned to kAlignment.
struct KvSpanKernels {
  // What errors of turned keys take from the channels after them so that the metric makes least of them: an error of e
  // at channel i moves channel j > i by -e * shares[j * D + i]. `shares` is (D, D), aligned to kAlignment; what is not
  // below its diagonal means nothing. With the metric turned to the span and into the basis of turned keys, M = U D U^T,
  // U upper triangular with a diagonal of 1, the shares are U's.
  void (*feedback)(const KvSpanHead& head, const KvSpanMetric& metric, float* shares) noexcept;
  // Returns how many turned components were held within reach. Overwrites `keys`. `shares` may be null: each channel is
  // rounded by itself.
  int (*encode)(int bits, const KvSpanHead& head, const float* shares, float* keys, const float* values,
                std::uint8_t* record, void* scratch) noexcept;
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
