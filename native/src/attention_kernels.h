// Between the plan and the kernels of each instruction set: one item of work.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvist/attention.h"

namespace kvist {

struct HeadTurn;

// Some query rows, of the groups of query heads of one KV head or of several that follow each other, against the keys
// [key_begin, key_end). The row `rows[i]` is the position `positions[i]` of its sequence and sees the keys up to itself, within the window. Key j is in the block that
// starts at block_offsets[j / P] of the layer's base; all blocks are of the shape's codec. Keys at or beyond key_end are
// never touched, whatever their blocks hold.
struct AttentionItem {
  int kv_head;
  int num_kv_heads;  // up to what `heads_together` says
  int num_rows;
  const std::int32_t* rows;
  const std::int32_t* positions;
  const std::int64_t* block_offsets;
  const HeadTurn* turn;  // of heads of the layout's size
  int key_begin;
  int key_end;
  // Null: the item sees all keys of its rows and writes the output. Otherwise it writes, for row i and head h, the sum
  // of exp2(score - max) * v at partial_sums + (i * H + h) * D, and the maximum and the sum of exp2(score - max) at
  // partial_weights + (i * H + h) * 2. Scores are in units of log2(e). A row that sees no key has the sum 0 and the
  // maximum kNoScore.
  float* partial_sums;
  float* partial_weights;
};

// Below every score; finite, so that differences are numbers.
inline constexpr float kNoScore = -1e30F;

inline constexpr float kLog2E = 1.44269504088896341F;

struct AttentionKernels {
  // KV heads of an item of num_rows query rows, at most. Null: one.
  int (*heads_together)(const AttentionShape& shape, int num_rows);
  // For items of up to num_rows query rows.
  std::size_t (*scratch_bytes)(const AttentionShape& shape, int num_rows);
  void (*run)(const AttentionShape& shape, const AttentionItem& item, const KvLayer& layer, const AttentionRows& rows,
              std::uint8_t* scratch);
};

// Blocks of rows.
extern const AttentionKernels kAttentionSerial;
extern const AttentionKernels kAttentionAvx2;
extern const AttentionKernels kAttentionAvx512;
extern const AttentionKernels kAttentionNeon;

// Blocks of records.
extern const AttentionKernels kAttentionSpanSerial;
extern const AttentionKernels kAttentionSpanAvx2;

}  // namespace kvist
