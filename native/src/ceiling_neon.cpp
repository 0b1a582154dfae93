// The ceilings of NEON: the instructions that dominate the kernels, on registers alone, and a stream of 16-byte loads.
//
// Each has more independent chains than latency times throughput asks for, and few enough to stay in registers. An
// operand is made opaque in every round: of operands that never change a compiler computes the product once.

#include "kvist/ceiling.h"
#include "vec_neon.h"

namespace kvist {
namespace {

using neon::unroll;

constexpr int kLanes = 4;  // of 32 bits
constexpr int kChains = 16;
constexpr int kGroupSteps = 8;      // of four inputs in a group of int4 weights
constexpr std::size_t kStep = 256;  // bytes
constexpr std::size_t kAhead = 1024;

#if defined(__aarch64__)
#define KVIST_OPAQUE(x) asm volatile("" : "+w"(x))
#else
#define KVIST_OPAQUE(x) static_cast<void>(x)
#endif

std::uint64_t sum_lanes(uint32x4_t values) {
  std::uint32_t lanes[kLanes];
  vst1q_u32(lanes, values);
  return std::uint64_t{lanes[0]} + lanes[1] + lanes[2] + lanes[3];
}

std::uint64_t sum_all(const int32x4_t (&sums)[kChains]) {
  uint32x4_t total = vdupq_n_u32(0);
  for (const int32x4_t sum : sums) {
    total = vaddq_u32(total, vreinterpretq_u32_s32(sum));
  }
  return sum_lanes(total);
}

// sdot, twice for 16 products of 16-bit activations.
std::uint64_t run_madd(std::int64_t rounds) {
  int32x4_t sums[kChains];
  unroll<kChains>([&](auto i) KVIST_LAMBDA { sums[i] = vdupq_n_s32(0); });
  int8x16_t left = vdupq_n_s8(7);
  const int8x16_t right = vdupq_n_s8(-3);
  for (std::int64_t round = 0; round < rounds; ++round) {
    KVIST_OPAQUE(left);
    unroll<kChains>([&](auto i) KVIST_LAMBDA { sums[i] = vdotq_s32(sums[i], left, right); });
  }
  return sum_all(sums);
}

// For each group of 32 inputs: eight times sdot, then scvtf and fmla; the float32 sums are in memory, as in the kernel.
std::uint64_t run_maddubs(std::int64_t rounds) {
  float totals[kChains][kLanes] = {};
  int8x16_t codes = vdupq_n_s8(7);
  const int8x16_t activations = vdupq_n_s8(5);
  const float32x4_t scale = vdupq_n_f32(1e-6f);
  for (std::int64_t round = 0; round < rounds; ++round) {
    int32x4_t sums[kChains];
    unroll<kChains>([&](auto i) KVIST_LAMBDA { sums[i] = vdupq_n_s32(0); });
    for (int step = 0; step < kGroupSteps; ++step) {
      KVIST_OPAQUE(codes);
      unroll<kChains>([&](auto i) KVIST_LAMBDA { sums[i] = vdotq_s32(sums[i], codes, activations); });
    }
    unroll<kChains>([&](auto i) KVIST_LAMBDA {
      vst1q_f32(totals[i], vfmaq_f32(vld1q_f32(totals[i]), vcvtq_f32_s32(sums[i]), scale));
    });
  }
  return sum_lanes(vreinterpretq_u32_f32(vld1q_f32(totals[0])));
}

std::uint64_t run_fma(std::int64_t rounds) {
  float32x4_t sums[kChains];
  unroll<kChains>([&](auto i) KVIST_LAMBDA { sums[i] = vdupq_n_f32(0.0f); });
  float32x4_t left = vdupq_n_f32(3e-4f);
  const float32x4_t right = vdupq_n_f32(0.5f);
  for (std::int64_t round = 0; round < rounds; ++round) {
    KVIST_OPAQUE(left);
    unroll<kChains>([&](auto i) KVIST_LAMBDA { sums[i] = vfmaq_f32(sums[i], left, right); });
  }
  unroll<kChains - 1>([&](auto i) KVIST_LAMBDA { sums[0] = vaddq_f32(sums[0], sums[i + 1]); });
  return sum_lanes(vreinterpretq_u32_f32(sums[0]));
}

template <bool kPrefetches>
std::uint64_t read(const std::uint8_t* data, std::size_t bytes) {
  constexpr int kLoads = static_cast<int>(kStep / sizeof(uint32x4_t));
  uint32x4_t sums[kLoads];
  unroll<kLoads>([&](auto i) KVIST_LAMBDA { sums[i] = vdupq_n_u32(0); });
  for (std::size_t offset = 0; offset < bytes; offset += kStep) {
    if constexpr (kPrefetches) {
      // Past the end it is the address of nothing, which a prefetch may have.
      for (std::size_t line = 0; line < kStep; line += 64) {
        __builtin_prefetch(
            reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(data) + offset + kAhead + line));
      }
    }
    unroll<kLoads>([&](auto i) KVIST_LAMBDA {
      sums[i] = vaddq_u32(sums[i], vreinterpretq_u32_u8(vld1q_u8(data + offset + 16 * i)));
    });
  }
  unroll<kLoads - 1>([&](auto i) KVIST_LAMBDA { sums[0] = vaddq_u32(sums[0], sums[i + 1]); });
  return sum_lanes(sums[0]);
}

}  // namespace

const CeilingKernels& ceiling_kernels_neon() {
  static constexpr CeilingKernels kKernels{
      {run_madd, std::int64_t{kChains} * kLanes * 4},
      {run_maddubs, std::int64_t{kChains} * kGroupSteps * kLanes * 8},
      {run_fma, std::int64_t{kChains} * kLanes * 2},
      read<false>,
      read<true>,
  };
  return kKernels;
}

}  // namespace kvist
