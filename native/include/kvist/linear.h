// Linear layers: weights packed once, activations quantised per row, integer products, one fused epilogue.
//
//   y[r, n] = a[r] * sum_k xq[r, k] * w[n, k] + bias[n] + residual[r, n]
//
// xq is the row divided by its own scale a[r] = max|x[r]| / limit and rounded to nearest (an all-zero row has a = 0).
// With int4 weights, each group g of inputs of a row has its own scale, and weights are minimum + scale * code:
//
//   y[r, n] = sum_g a[r, g] * (scale[n, g] * sum_k xq[r, k] * code[n, k] + minimum[n, g] * sum_k xq[r, k]) + ...
//
// Integer sums are exact and floats are added in an order of their own, so a row's result does not depend on the other
// rows of the call, on tiling or on threads.
//
//   kind    weights                                       activations
//   int8    symmetric per output channel, codes in        int8 or wider: `activation_limit` says how far codes go
//           [-127, 127], scale = max|w| / 127
//   int4    codes in [0, 15], f16 scale and minimum per   int8, limit 127, a scale for each group
//           group of 32 or 64 inputs of one output;
//           groups that lie on such a grid are exact
//   bf16    bfloat16, products and sums in float32        float32, not quantised
//
// Layout and activation format belong to the instruction set: packed weights are only read by the table that packed
// them, and carry its `layout` name when they are stored.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvist/isa.h"

namespace kvist {

enum class WeightKind : int { kInt8 = 0, kInt4 = 1, kBf16 = 2 };

// What the epilogue does with two halves of the outputs: y[r, i] = act(p[r, i]) * p[r, i + N / 2] for i < N / 2.
enum class Gate : int { kNone = 0, kSilu = 1, kGeluTanh = 2, kGelu = 3 };

struct LinearShape {
  WeightKind kind;
  int num_outputs;  // N
  int num_inputs;   // K
  int group;        // inputs per scale and minimum, int4 only; otherwise 0
  Gate gate;        // not kNone: rows of the two halves are packed side by side, N is even
};

struct PackedLinear {
  LinearShape shape;
  const std::uint8_t* data;  // packed_bytes(shape), aligned to kAlignment
  const float* bias;         // (N,) or null
};

struct Epilogue {
  float* out;  // (rows, N) or (rows, N / 2) with a gate
  std::ptrdiff_t out_stride;
  const float* residual;  // same shape as out, or null; may be `out` itself
  std::ptrdiff_t residual_stride;
};

struct LinearKernels {
  const char* layout;  // changes whenever the bytes of a packed weight do
  std::size_t (*packed_bytes)(const LinearShape& shape);
  // Quantises and packs the outputs [first, last) of row-major (N, K) float32 weights. `first` and `last` are multiples
  // of pack_step (or N), so that several threads can pack one matrix; with a gate they count outputs of one half.
  void (*pack)(const LinearShape& shape, const float* weights, int first, int last, std::uint8_t* packed);
  int pack_step;
  // The values the packed weights stand for: row-major (N, K) float32. For tests and for measuring the loss.
  void (*unpack)(const LinearShape& shape, const std::uint8_t* packed, float* weights);
  // Largest code of an activation for this shape, of a row or a group; see the top of the file. 0: not quantised.
  int (*activation_limit)(const LinearShape& shape);
  std::size_t (*activation_bytes)(const LinearShape& shape, int rows);
  // Writes rows [first, last) of the (rows, K) activations into the opaque buffer; any split over threads is allowed
  // whose pieces start at multiples of quantise_step.
  void (*quantise)(const LinearShape& shape, const float* x, std::ptrdiff_t stride, int rows, int first, int last,
                   std::uint8_t* activations);
  int quantise_step;
  // The product is cut into items, any order, any thread; a good size is tens of microseconds, enough items to balance
  // num_threads when one is slowed, and few enough rows per item that weights are expanded rarely.
  int (*num_items)(const LinearShape& shape, int rows, int num_threads);
  std::size_t (*scratch_bytes)(const LinearShape& shape, int rows);  // per thread
  void (*run)(const PackedLinear& linear, const std::uint8_t* activations, int rows, int num_threads, int item,
              const Epilogue& epilogue, std::uint8_t* scratch);
};

// The table of an instruction set; every available one has it.
const LinearKernels& linear_kernels(Isa isa);

}  // namespace kvist
