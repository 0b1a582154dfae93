#include <cmath>

#include "kvist/sampling.h"

namespace kvist {
namespace {

void softmax_weights(const float* logits, int n, float largest, float temperature, float* weights) {
  for (int i = 0; i < n; ++i) {
    weights[i] = std::exp((logits[i] - largest) / temperature);
  }
}

double sum_from(const float* weights, int n, float least) {
  double sum = 0.0;
  for (int i = 0; i < n; ++i) {
    sum += weights[i] >= least ? static_cast<double>(weights[i]) : 0.0;
  }
  return sum;
}

}  // namespace

extern const SamplingKernels kSamplingSerial;
const SamplingKernels kSamplingSerial = {softmax_weights, sum_from};

}  // namespace kvist
