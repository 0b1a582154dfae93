// The ceilings of AVX2: the instructions that dominate the kernels, on registers alone, and a stream of 32-byte loads.
//
// Each has more independent chains than latency times throughput asks for, and few enough to stay in registers. The
// integer steps are written as instructions: of intrinsics whose operands never change a compiler computes the product
// once.

#include <immintrin.h>

#include "kvist/ceiling.h"

namespace kvist {
namespace {

constexpr int kLanes = 8;      // of 32 bits
constexpr int kChunk = 6;      // vectors of sums
constexpr int kMaddSteps = 4;  // of each vector in a round
constexpr int kGroupSteps = 8;
constexpr int kChains = 10;         // of vfmadd: 4 cycles each, two start each cycle
constexpr std::size_t kStep = 256;  // bytes
constexpr std::size_t kAhead = 2048;

std::uint64_t sum_lanes(__m256i values) {
  alignas(32) std::uint32_t lanes[kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), values);
  std::uint64_t total = 0;
  for (const std::uint32_t lane : lanes) {
    total += lane;
  }
  return total;
}

// Sums that the compiler must keep in registers: an array of them would be written to memory in every round.
struct Sums {
  __m256i s0{}, s1{}, s2{}, s3{}, s4{}, s5{};
};

// All products before all sums: in pairs, the sums take issue slots that the next products could have had.
#define KVIST_SIX_STEPS(multiply, add, sums, first, second)                                                          \
  asm volatile(multiply " %[right], %[left], %[p0]\n\t" multiply " %[right], %[left], %[p1]\n\t" multiply            \
                        " %[right], %[left], %[p2]\n\t" multiply " %[right], %[left], %[p3]\n\t" multiply            \
                        " %[right], %[left], %[p4]\n\t" multiply " %[right], %[left], %[p5]\n\t" add                 \
                        " %[p0], %[s0], %[s0]\n\t" add " %[p1], %[s1], %[s1]\n\t" add " %[p2], %[s2], %[s2]\n\t" add \
                        " %[p3], %[s3], %[s3]\n\t" add " %[p4], %[s4], %[s4]\n\t" add " %[p5], %[s5], %[s5]"         \
               : [s0] "+x"(sums.s0), [s1] "+x"(sums.s1), [s2] "+x"(sums.s2), [s3] "+x"(sums.s3), [s4] "+x"(sums.s4), \
                 [s5] "+x"(sums.s5), [p0] "=&x"(p0), [p1] "=&x"(p1), [p2] "=&x"(p2), [p3] "=&x"(p3), [p4] "=&x"(p4), \
                 [p5] "=&x"(p5)                                                                                      \
               : [left] "x"(first), [right] "x"(second))

// vpmaddwd, vpaddd.
std::uint64_t run_madd(std::int64_t rounds) {
  Sums sums;
  __m256i p0, p1, p2, p3, p4, p5;
  const __m256i left = _mm256_set1_epi16(77);
  const __m256i right = _mm256_set1_epi16(-3);
  for (std::int64_t round = 0; round < rounds; ++round) {
    KVIST_SIX_STEPS("vpmaddwd", "vpaddd", sums, left, right);
    KVIST_SIX_STEPS("vpmaddwd", "vpaddd", sums, left, right);
    KVIST_SIX_STEPS("vpmaddwd", "vpaddd", sums, left, right);
    KVIST_SIX_STEPS("vpmaddwd", "vpaddd", sums, left, right);
  }
  return sum_lanes(_mm256_add_epi32(_mm256_add_epi32(_mm256_add_epi32(sums.s0, sums.s1), sums.s2),
                                    _mm256_add_epi32(_mm256_add_epi32(sums.s3, sums.s4), sums.s5)));
}

// For each group of 32 inputs: eight times vpmaddubsw and vpaddw, then vpmaddwd, vcvtdq2ps and vfmadd; six
// vectors at a time. The float32 sums are in memory, as in the kernel.
std::uint64_t run_maddubs(std::int64_t rounds) {
  alignas(32) float totals[kChunk][kLanes] = {};
  __m256i p0, p1, p2, p3, p4, p5;
  const __m256i codes = _mm256_set1_epi8(7);
  const __m256i activations = _mm256_set1_epi8(5);
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256 scale = _mm256_set1_ps(1e-6f);
  const auto finish = [&](int index, __m256i pairs) {
    const __m256 group = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));
    _mm256_store_ps(totals[index], _mm256_fmadd_ps(group, scale, _mm256_load_ps(totals[index])));
  };
  for (std::int64_t round = 0; round < rounds; ++round) {
    Sums pairs;
    KVIST_SIX_STEPS("vpmaddubsw", "vpaddw", pairs, codes, activations);
    KVIST_SIX_STEPS("vpmaddubsw", "vpaddw", pairs, codes, activations);
    KVIST_SIX_STEPS("vpmaddubsw", "vpaddw", pairs, codes, activations);
    KVIST_SIX_STEPS("vpmaddubsw", "vpaddw", pairs, codes, activations);
    KVIST_SIX_STEPS("vpmaddubsw", "vpaddw", pairs, codes, activations);
    KVIST_SIX_STEPS("vpmaddubsw", "vpaddw", pairs, codes, activations);
    KVIST_SIX_STEPS("vpmaddubsw", "vpaddw", pairs, codes, activations);
    KVIST_SIX_STEPS("vpmaddubsw", "vpaddw", pairs, codes, activations);
    finish(0, pairs.s0);
    finish(1, pairs.s1);
    finish(2, pairs.s2);
    finish(3, pairs.s3);
    finish(4, pairs.s4);
    finish(5, pairs.s5);
  }
  return sum_lanes(_mm256_castps_si256(_mm256_load_ps(totals[0])));
}

std::uint64_t run_fma(std::int64_t rounds) {
  __m256 sums[kChains] = {};
  const __m256 left = _mm256_set1_ps(3e-4f);
  const __m256 right = _mm256_set1_ps(0.5f);
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 10
    for (int i = 0; i < kChains; ++i) {
      sums[i] = _mm256_fmadd_ps(left, right, sums[i]);
    }
  }
  __m256 total = sums[0];
  for (int i = 1; i < kChains; ++i) {
    total = _mm256_add_ps(total, sums[i]);
  }
  return sum_lanes(_mm256_castps_si256(total));
}

template <bool kPrefetches>
std::uint64_t read(const std::uint8_t* data, std::size_t bytes) {
  constexpr int kLoads = static_cast<int>(kStep / sizeof(__m256i));
  __m256i sums[kLoads] = {};
  for (std::size_t offset = 0; offset < bytes; offset += kStep) {
    if constexpr (kPrefetches) {
      // Past the end it is the address of nothing, which a prefetch may have.
      for (std::size_t line = 0; line < kStep; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(data) + offset + kAhead + line),
                     _MM_HINT_T0);
      }
    }
    const auto* vectors = reinterpret_cast<const __m256i*>(data + offset);
#pragma GCC unroll 8
    for (int i = 0; i < kLoads; ++i) {
      sums[i] = _mm256_add_epi32(sums[i], _mm256_load_si256(vectors + i));
    }
  }
  __m256i total = sums[0];
  for (int i = 1; i < kLoads; ++i) {
    total = _mm256_add_epi32(total, sums[i]);
  }
  return sum_lanes(total);
}

}  // namespace

const CeilingKernels& ceiling_kernels_avx2() {
  static constexpr CeilingKernels kKernels{
      {run_madd, std::int64_t{kChunk} * kMaddSteps * kLanes * 4},
      {run_maddubs, std::int64_t{kChunk} * kGroupSteps * kLanes * 8},
      {run_fma, std::int64_t{kChains} * kLanes * 2},
      read<false>,
      read<true>,
  };
  return kKernels;
}

}  // namespace kvist
