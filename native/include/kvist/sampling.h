// Drawing a token from a row of logits: temperature, top-k, top-p, min-p, in the order of kvist.runner.sampler.
//
// Weights are float32 (e^x within 2 ulp, the largest is 1), sums of them float64. Of the tokens that the three limits
// leave, the draw is the inverse of the cumulative distribution in order of token ids. It agrees with the version in
// Python but for draws within rounding of the border between two tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "kvist/isa.h"

namespace kvist {

// What goes over whole rows.
struct SamplingKernels {
  // weights = e^((logits - largest) / temperature), within 2 ulp; those below 1e-37 may be 0. No logit is NaN.
  void (*softmax_weights)(const float* logits, int n, float largest, float temperature, float* weights);
  // The sum of the weights that are at least `least`. Weights are 0 or more.
  double (*sum_from)(const float* weights, int n, float least);
};

const SamplingKernels& sampling_kernels(Isa isa);

struct DrawSpec {
  float temperature;   // > 0
  std::int64_t top_k;  // 0: all
  double top_p;        // in (0, 1]
  float min_p;         // in [0, 1]
  std::uint64_t seed;
  std::uint64_t output_index;
};

// Memory of a draw, kept from one to the next.
struct DrawScratch {
  std::vector<float> weights;
  std::vector<float> candidates;
  std::vector<float> bucket;

  // Takes the memory for draws from so many logits, which may throw; they never do afterwards.
  void at_least(int n) {
    weights.reserve(static_cast<std::size_t>(n));
    candidates.reserve(static_cast<std::size_t>(n));
    bucket.reserve(static_cast<std::size_t>(n));
  }
};

// Draws from `n` logits, of which `largest` is the largest and finite; none is NaN. Reads the row once, and its
// weights three times, five with top-k or top-p.
// `scratch` has memory for n logits.
std::int32_t draw_token(const SamplingKernels& kernels, const float* logits, int n, float largest, const DrawSpec& spec,
                        DrawScratch& scratch);

// The draw in [0, 1): 53 bits of Philox-4x64 keyed by the seed, at the counter after output_index.
// Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
double uniform_draw(std::uint64_t seed, std::uint64_t output_index);

}  // namespace kvist
