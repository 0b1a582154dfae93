// Attention over blocks: what each piece of a step reads, and the kernels that read it.
//
// A step holds S sequences; sequence s has the query rows [query_starts[s], query_starts[s + 1]), which are its last
// positions, and reads the positions [0, context_lens[s]) through its block table. K and V of the step's own rows are
// in the blocks already. Positions no query may see are never read.
//
// A block is (L, 2, K, P, N) row-major: per layer, K then V, per KV head, P positions of `row_bytes` each:
//
//   codec    a row of D values
//   raw16    D bfloat16
//   int8     D int8 codes, then one float16 scale for each group of 64 values (the last may be shorter): value = code *
//            scale, scale = max|x| / 127 of its group rounded to float16 (never down to 0 for a nonzero group), codes in
//            [-127, 127]; a group of zeros has scale 0
//
// The work is planned once per step and window, and used by every layer: items for the pool, and merges of items that
// saw different parts of one row's keys (by log-sum-exp). Blocks that several sequences share, as the block tables show,
// are read once for all of them: their query rows are stacked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvist/isa.h"

namespace kvist {

enum class KvCodec : int { kRaw16 = 0, kInt8 = 1 };

struct KvLayout {
  KvCodec codec;
  int num_kv_heads;           // K
  int block_size;             // P
  int head_dim;               // D, a multiple of 8 up to 256
  int row_bytes;              // N * element size
  std::int64_t block_stride;  // bytes from one block to the next, all layers in between
};

// One layer's K and V: base points at layer l of block 0.
struct KvLayer {
  const std::uint8_t* base;
};

struct AttentionBatch {
  int num_sequences;                 // S
  const std::int32_t* query_starts;  // S + 1
  const std::int32_t* context_lens;  // S
  const std::int32_t* table_starts;  // S + 1 offsets into block_ids
  const std::int32_t* block_ids;
};

struct AttentionShape {
  KvLayout layout;
  int num_heads;  // H, a multiple of K
  float scale;
  float softcap;  // 0: none
  int window;     // keys a query sees at most, itself included; 0: all
};

// Where queries come from and results go; rows are float32.
struct AttentionRows {
  const float* queries;  // row r, head h, at queries + r * query_stride + h * D
  std::ptrdiff_t query_stride;
  float* out;  // row r, head h, at out + r * out_stride + h * D
  std::ptrdiff_t out_stride;
};

class AttentionPlan {
 public:
  virtual ~AttentionPlan() = default;
  virtual int num_items() const = 0;
  virtual int num_merges() const = 0;             // 0: no barrier and no second phase needed
  virtual std::size_t scratch_bytes() const = 0;  // per thread
  // Both phases: any order, any thread, each index once per layer; a barrier between them.
  virtual void run(int item, const KvLayer& layer, const AttentionRows& rows, std::uint8_t* scratch) = 0;
  virtual void merge(int index, const AttentionRows& rows) = 0;
};

// Plans a step. The arrays of the batch need not outlive the call. Partial results live in the plan.
std::unique_ptr<AttentionPlan> plan_attention(Isa isa, const AttentionShape& shape, const AttentionBatch& batch,
                                              int num_threads);

}  // namespace kvist
