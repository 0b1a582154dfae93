// Blocks of K and V from one codec to another: what a block is when its precision changes, and what a copy of the head
// of a block reads.
//
// Rows are decoded to float32 and encoded anew, as encode_kv_row and kv_span_kernels do it, so that a block encoded here
// has the bytes of one that was encoded from the same values. Between equal codecs bytes are copied. K is turned in all
// of them, as in arenas with blocks of several codecs.
//
// Values that the target has no image for cannot stop a step: finite ones beyond its range become the nearest that it
// has, and are counted; what they share a scale or step with an infinity or a NaN reads as NaN.
#pragma once

#include <cstdint>

#include "kvist/attention.h"
#include "kvist/isa.h"
#include "kvist/kv_span.h"
#include "kvist/pool.h"

namespace kvist {

struct KvRecode {
  KvLayout source;  // same K, P and D as the target
  KvLayout target;
  int num_layers;
  int num_tokens;  // leading positions to write, all of them where the target is in spans; the others keep their bytes
  const KvTransforms* transforms = nullptr;  // required where one codec is of spans and the other is another
};

// Writes `target` from `source`, whole blocks that do not overlap, on the pool's threads. Reads and writes the leading
// positions once each. Returns the number of rows of K or V, or of components of spans, with values held within the
// target's range. Throws std::bad_alloc.
std::int64_t recode_block(Pool& pool, Isa isa, const KvRecode& recode, const std::uint8_t* source,
                          std::uint8_t* target);

}  // namespace kvist
