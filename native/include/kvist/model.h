// A whole step of a decoder-only transformer: one call from token ids to logits.
//
// Every thread of the pool runs the same sequence of phases; within a phase, threads claim pieces. Phases whose work is
// smaller than a barrier (the norms of one or a few rows) are done by every thread for itself.
//
// Letters: T rows of the step, S rows asked for, H query heads, K KV heads, D head dim, I intermediate size, V vocabulary.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kvist/attention.h"
#include "kvist/linear.h"
#include "kvist/pool.h"
#include "kvist/rowwise.h"

namespace kvist {

struct RotarySpec {
  std::vector<float> frequencies;  // (D / 2,) radians per position
  float factor;                    // multiplies cosines and sines
};

struct ModelShape {
  int hidden;
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int kv_head_dim;  // r, in which K and V are kept; D where layers have no reduction
  int intermediate;
  int vocab;
  float norm_eps;
  float embedding_scale;
  float attention_scale;
  float attention_softcap;  // 0: none
  float logit_softcap;      // 0: none
};

// What brings a layer's heads to fewer dimensions and back; null pointers: nothing does. Letter r: the kept dimensions.
struct HeadReduction {
  const float* queries;  // (K, D, r) of the query heads of each KV head, after the rotary embedding
  const float* keys;     // (K, D, r)
  const float* values;   // (K, D, r)
  const float* outputs;  // (K, r, D) of what the query heads of each KV head give
};

// Pointers into memory that outlives the model.
struct LayerWeights {
  int rope;    // index of the rotary embedding, -1: none
  int window;  // keys a query sees at most, 0: all
  const float* attention_norm;
  PackedLinear qkv;
  const float* query_norm;  // (D,) or null
  const float* key_norm;
  PackedLinear output;
  const float* post_attention_norm;  // (hidden,) or null
  const float* mlp_norm;
  PackedLinear gate_up;
  PackedLinear down;
  const float* post_mlp_norm;  // (hidden,) or null
  HeadReduction reduction;
};

struct ModelWeights {
  const std::uint16_t* embedding;  // (V, hidden) bfloat16
  std::vector<LayerWeights> layers;
  const float* final_norm;
  PackedLinear head;
};

struct StepInputs {
  AttentionBatch batch;
  int num_rows;                    // T
  const std::int64_t* token_ids;   // (T,), checked against the vocabulary
  const std::int32_t* positions;   // (T,)
  const std::int64_t* slots;       // (T,) block id * P + offset
  std::uint8_t* arena;             // where offset 0 is
  KvLayout layout;                 // of the blocks that the step writes
  int num_logits;                  // S
  const std::int32_t* logit_rows;  // (S,) ascending
  const KvTransforms* transforms;  // null: no block is int4 or int3
};

struct StepOutputs {
  float* logits;            // (S, V)
  BestToken* best;          // (S,)
  std::uint8_t* is_finite;  // (T,) 0: the row wrote a K or V value that is infinite or no number
};

// Where the time of steps went, as the first thread to begin saw it: waiting for the others counts as the phase waited
// for. Together the phases of a step are the time from its first kernel to its last.
enum class Phase : int { kEmbed, kNorm, kQkv, kStore, kAttention, kOutput, kGateUp, kDown, kHead, kCount };
inline constexpr const char* kPhaseNames[] = {"embed",  "norm",    "qkv",  "store", "attention",
                                              "output", "gate_up", "down", "head"};

class Model {
 public:
  Model(const ModelShape& shape, std::vector<RotarySpec> ropes, ModelWeights weights, Isa isa);
  ~Model();

  // One step at a time. Writes K and V of the step's rows into the arena. The calling thread does `meanwhile`, if it is
  // not empty, while the others begin; it must not throw.
  void step(Pool& pool, const StepInputs& inputs, const StepOutputs& outputs, const std::function<void()>& meanwhile);

  const ModelShape& shape() const { return shape_; }

  // Nanoseconds per phase since the model was made.
  const std::array<std::int64_t, static_cast<std::size_t>(Phase::kCount)>& phase_ns() const { return phase_ns_; }

 private:
  struct Buffers;
  class Run;
  ModelShape shape_;
  std::vector<RotarySpec> ropes_;
  ModelWeights weights_;
  Isa isa_;
  HeadTurn turn_;                           // of queries and keys as they are kept, where the codec asks for it
  std::vector<LinearShape> linear_shapes_;  // those that occur, each once
  std::vector<int> windows_;                // likewise
  std::unique_ptr<Buffers> buffers_;
  std::array<std::int64_t, static_cast<std::size_t>(Phase::kCount)> phase_ns_{};
};

}  // namespace kvist
