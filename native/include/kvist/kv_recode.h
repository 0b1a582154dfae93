// Blocks of K and V from one codec to another: what a block is when its precision changes, and what a copy of the head
// of a block reads.
//
// A row is decoded to float32 and encoded anew, as encode_kv_row does it, so that a block encoded here has the bytes of
// one whose tokens were encoded one by one from the same values. Between equal codecs rows are copied.
//
// Values that the target has no image for cannot stop a step: finite ones beyond its range become the nearest that it
// has, and are counted; int8 groups with an infinity or a NaN in them read as NaN.
#pragma once

#include <cstdint>

#include "kvist/attention.h"
#include "kvist/isa.h"
#include "kvist/pool.h"

namespace kvist {

struct KvRecode {
  KvLayout source;  // same K, P and D as the target
  KvLayout target;
  int num_layers;
  int num_tokens;  // leading positions to write; the others keep their bytes
};

// Writes `target` from `source`, whole blocks that do not overlap, on the pool's threads. Reads and writes the rows of
// the leading positions once each. Returns the number of rows with values held within the target's range.
std::int64_t recode_block(Pool& pool, Isa isa, const KvRecode& recode, const std::uint8_t* source,
                          std::uint8_t* target);

}  // namespace kvist
