#include "kvist/sampling.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <functional>
#include <utility>

namespace kvist {
namespace {

constexpr float kMinTemperature = 1e-30F;  // as in Python: float32 divides by nothing smaller without a NaN

// Weights are in [0, 1], and their bits are in the order of the numbers: the upper 11 of 30 make buckets.
constexpr int kBucketShift = 19;
constexpr std::size_t kNumBuckets = (std::bit_cast<std::uint32_t>(1.0F) >> kBucketShift) + 1;

constexpr int kChunk = 512;  // tokens added up before it is asked whether the draw is among them

std::size_t bucket_of(float weight) { return std::bit_cast<std::uint32_t>(weight) >> kBucketShift; }

// Leaves the weights of one bucket, the largest first.
void keep_bucket(const float* weights, int n, std::size_t bucket, std::vector<float>& kept) {
  kept.clear();
  for (int i = 0; i < n; ++i) {
    if (bucket_of(weights[i]) == bucket) {
      kept.push_back(weights[i]);
    }
  }
  std::sort(kept.begin(), kept.end(), std::greater<>());
}

// The k-th largest weight, 1 <= k <= n.
float kth_largest(const float* weights, int n, std::int64_t k, DrawScratch& scratch) {
  std::array<std::int32_t, kNumBuckets> counts{};
  for (int i = 0; i < n; ++i) {
    ++counts[bucket_of(weights[i])];
  }
  std::size_t bucket = kNumBuckets - 1;
  while (counts[bucket] < k) {
    k -= counts[bucket--];
  }
  keep_bucket(weights, n, bucket, scratch.bucket);
  return scratch.bucket[static_cast<std::size_t>(k - 1)];
}

// The weight of the last token of the smallest set that holds top_p of all weight from `least` on.
float top_p_weight(const SamplingKernels& kernels, const float* weights, int n, float least, double top_p,
                   DrawScratch& scratch) {
  const double total = kernels.sum_from(weights, n, least);
  // All tokens below this together hold less than 1 - top_p: the set is complete before it reaches them.
  const auto negligible = static_cast<float>((1.0 - top_p) * total / n * 0.999);
  const float lowest = std::max(least, negligible);
  const auto lowest_bits = std::bit_cast<std::int32_t>(lowest);
  std::vector<float>& candidates = scratch.candidates;
  candidates.resize(static_cast<std::size_t>(n));
  int count = 0;
  for (int i = 0; i < n; ++i) {
    candidates[static_cast<std::size_t>(count)] = weights[i];
    count += std::bit_cast<std::int32_t>(weights[i]) >= lowest_bits ? 1 : 0;
  }
  std::array<double, kNumBuckets> mass{};
  for (int i = 0; i < count; ++i) {
    mass[bucket_of(candidates[static_cast<std::size_t>(i)])] +=
        static_cast<double>(candidates[static_cast<std::size_t>(i)]);
  }
  const double target = top_p * total;
  double sum = 0.0;
  std::size_t bucket = kNumBuckets - 1;
  const std::size_t last = bucket_of(lowest);
  while (bucket > last && sum + mass[bucket] < target) {
    sum += mass[bucket--];
  }
  keep_bucket(candidates.data(), count, bucket, scratch.bucket);
  for (const float weight : scratch.bucket) {
    sum += static_cast<double>(weight);
    if (sum >= target) {
      return weight;
    }
  }
  return lowest;
}

std::pair<std::uint64_t, std::uint64_t> multiply(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t a_low = a & 0xffffffffU;
  const std::uint64_t a_high = a >> 32;
  const std::uint64_t b_low = b & 0xffffffffU;
  const std::uint64_t b_high = b >> 32;
  const std::uint64_t middle = a_high * b_low + ((a_low * b_low) >> 32);
  const std::uint64_t other = a_low * b_high + (middle & 0xffffffffU);
  return {a_high * b_high + (middle >> 32) + (other >> 32), a * b};
}

}  // namespace

extern const SamplingKernels kSamplingSerial;
extern const SamplingKernels kSamplingAvx2;

const SamplingKernels& sampling_kernels([[maybe_unused]] Isa isa) {
#if defined(KVIST_HAS_AVX2)
  // Every CPU with AVX-512 has it.
  if (isa == Isa::kAvx2 || isa == Isa::kAvx512) {
    return kSamplingAvx2;
  }
#endif
  return kSamplingSerial;
}

double uniform_draw(std::uint64_t seed, std::uint64_t output_index) {
  constexpr int kRounds = 10;
  const std::uint64_t counter = output_index + 1;
  std::array<std::uint64_t, 4> x = {counter, counter == 0 ? 1U : 0U, 0, 0};
  std::array<std::uint64_t, 2> key = {seed, 0};
  for (int round = 0; round < kRounds; ++round) {
    const auto [high0, low0] = multiply(0xD2E7470EE14C6C93U, x[0]);
    const auto [high1, low1] = multiply(0xCA5A826395121157U, x[2]);
    x = {high1 ^ x[1] ^ key[0], low1, high0 ^ x[3] ^ key[1], low0};
    key = {key[0] + 0x9E3779B97F4A7C15U, key[1] + 0xBB67AE8584CAA73BU};
  }
  return static_cast<double>(x[0] >> 11) * 0x1p-53;
}

std::int32_t draw_token(const SamplingKernels& kernels, const float* logits, int n, float largest, const DrawSpec& spec,
                        DrawScratch& scratch) {
  scratch.weights.resize(static_cast<std::size_t>(n));
  float* const weights = scratch.weights.data();
  kernels.softmax_weights(logits, n, largest, std::max(spec.temperature, kMinTemperature), weights);
  float least = 0.0F;
  if (spec.top_k > 0 && spec.top_k < n) {
    least = kth_largest(weights, n, spec.top_k, scratch);
  }
  if (spec.top_p < 1.0) {
    least = std::max(least, top_p_weight(kernels, weights, n, least, spec.top_p, scratch));
  }
  least = std::max(least, spec.min_p);
  const double total = kernels.sum_from(weights, n, least);
  // The product may round up to the total, behind which there is no token.
  const double target = std::min(uniform_draw(spec.seed, spec.output_index) * total, std::nextafter(total, 0.0));
  double sum = 0.0;
  int first = 0;
  for (int count = std::min(kChunk, n); count > 0; count = std::min(kChunk, n - first)) {
    const double next = sum + kernels.sum_from(weights + first, count, least);
    if (next > target) {
      break;
    }
    sum = next;
    first += count;
  }
  std::int32_t drawn = -1;
  for (std::int32_t token = first; token < n && sum <= target; ++token) {
    if (weights[token] >= least) {
      sum += static_cast<double>(weights[token]);
      drawn = token;
    }
  }
  // Sums in another order may put the draw an ulp beyond the last token: it is that one then.
  for (std::int32_t token = n - 1; drawn < 0 && token > 0; --token) {
    drawn = weights[token] >= least ? token : -1;
  }
  return std::max(drawn, 0);
}

}  // namespace kvist
