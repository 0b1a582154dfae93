// Attention over blocks: what each piece of a step reads, and the kernels that read it.
//
// A step holds S sequences; sequence s has the query rows [query_starts[s], query_starts[s + 1]), which are its last
// positions, and reads the positions [0, context_lens[s]) through its block table. K and V of the step's own rows are
// in the blocks already. Positions no query may see are never read.
//
// A block is (L, 2, K, P, N) row-major: per layer, K then V, per KV head, P positions of `row_bytes` each, in the
// format of a codec (kv_codec.h); or, in int4 and int3, (L, P / 64, K) records (kv_span.h). The blocks of an arena are
// all of one codec, block b at b * block_stride, or each of its own, wherever two tables by block id say.
//
// Where blocks are in a codec other than raw16, or of several, queries come turned (rowwise.h), and so were the keys of
// raw16 and int8. Records have a basis of their own: items over them take queries there and bring their sums back.
//
// The work is planned once per step and window, and used by every layer: items for the pool, and merges of items that
// saw different parts of one row's keys (by log-sum-exp). Blocks that several sequences share, as the block tables
// show, are read once for all of them: their query rows are stacked. Sequences with many query rows in the step, and
// sequences longer than the window, keep to themselves. An item reads blocks of one codec.
//
// Numerics: softmax is exact up to float32 with serial. The vectorised versions may use fixed point where many rows
// share a tile of keys: their error stays below 2e-3 of the range of V, which is the rounding of a bfloat16 result. A
// result does not depend on which thread runs what, but it depends, within that tolerance, on the grouping and the
// splits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvist/isa.h"
#include "kvist/kv_codec.h"
#include "kvist/kv_span.h"

namespace kvist {

struct KvLayout {
  KvCodec codec;
  int num_kv_heads;           // K
  int block_size;             // P; a multiple of 64 in int4 and int3
  int head_dim;               // D, a multiple of 8 up to 256
  int row_bytes;              // N * element size; 0 in int4 and int3
  std::int64_t block_stride;  // bytes from one block to the next, all layers in between; unused where tables say
};

// Bytes of one layer of a block.
static constexpr std::int64_t kv_layer_bytes(const KvLayout& layout) {
  const int bits = kv_codec_bits(layout.codec);
  return bits != 0 ? layout.block_size / kSpanTokens * layout.num_kv_heads * kv_record_bytes(bits, layout.head_dim)
                   : std::int64_t{2} * layout.num_kv_heads * layout.block_size * layout.row_bytes;
}

// The same blocks in another codec.
static constexpr KvLayout with_codec(KvLayout layout, KvCodec codec) {
  layout.codec = codec;
  layout.row_bytes = kv_row_bytes(codec, layout.head_dim);
  return layout;
}

// One layer's K and V: base points at layer `index` of a block that starts at offset 0.
struct KvLayer {
  const std::uint8_t* base;
  int index;
};

struct AttentionBatch {
  int num_sequences;                 // S
  const std::int32_t* query_starts;  // S + 1
  const std::int32_t* context_lens;  // S
  const std::int32_t* table_starts;  // S + 1 offsets into block_ids
  const std::int32_t* block_ids;
  // By block id: bytes from the arena's start, and the codec's number. Null: block b is at b * block_stride, of the
  // layout's codec.
  const std::int64_t* block_offsets = nullptr;
  const std::uint8_t* block_codecs = nullptr;
};

// A code that is no codec's: the block is not allocated.
inline constexpr std::uint8_t kNotAllocated = 255;

struct AttentionShape {
  KvLayout layout;  // of blocks that are not in the tables of the batch
  int num_heads;    // H, a multiple of K
  float scale;
  float softcap;  // 0: none
  int window;     // keys a query sees at most, itself included; 0: all
  // Needed where blocks are int4 or int3. Must outlive the plan.
  const KvTransforms* transforms = nullptr;
};

// Where queries come from and results go; rows are float32.
struct AttentionRows {
  const float* queries;  // row r, head h, at queries + r * query_stride + h * D
  std::ptrdiff_t query_stride;
  float* out;  // row r, head h, at out + r * out_stride + h * D
  std::ptrdiff_t out_stride;
};

// What a plan does, in counts that do not depend on timing.
struct AttentionPlanInfo {
  int num_items;
  int num_merges;
  int num_shared;            // ranges of keys read once for several sequences, before they are split over threads
  std::int64_t blocks_read;  // per layer and KV head: the blocks of all items
};

// Holds the plan of one step and window. A long-lived object: `assign` replaces the plan and keeps the memory, so that
// planning a step allocates nothing once the buffers have grown.
class AttentionPlan {
 public:
  AttentionPlan();
  ~AttentionPlan();
  AttentionPlan(const AttentionPlan&) = delete;
  AttentionPlan& operator=(const AttentionPlan&) = delete;

  // Plans a step. The arrays of the batch need not outlive the call. A sequence may have no rows.
  void assign(Isa isa, const AttentionShape& shape, const AttentionBatch& batch, int num_threads);

  int num_items() const;
  int num_merges() const;             // 0: no barrier and no second phase needed
  std::size_t scratch_bytes() const;  // per thread, aligned to kAlignment
  AttentionPlanInfo info() const;

  // Both phases: any order, any thread, each index once per layer; a barrier between them. Partial results live in the
  // plan: one layer at a time. Each call writes places of its own. `arena` is where offset 0 is.
  void run(int item, const std::uint8_t* arena, int layer, const AttentionRows& rows, std::uint8_t* scratch) const;
  void merge(int index, const AttentionRows& rows) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvist
