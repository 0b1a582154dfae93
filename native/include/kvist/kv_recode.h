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
  int num_tokens;  // leading positions to write, all of them into int4 and int3; the others keep their bytes
  // Needed where int4 or int3 becomes another codec, or is what another becomes.
  const KvTransforms* transforms = nullptr;
  std::int64_t start = 0;  // position of the block's first token in its sequence: what a key metric is turned to
};

// Writes `target` from `source`, whole blocks that do not overlap, on the pool's threads. Reads and writes the leading
// positions once each; records are read whole. Returns the number of rows of K or V, of turned components where the
// target is int4 or int3, that were held within the target's range. Throws std::bad_alloc.
std::int64_t recode_block(Pool& pool, Isa isa, const KvRecode& recode, const std::uint8_t* source,
                          std::uint8_t* target);

}  // namespace kvist
