// The ceilings of AVX2: the instructions that dominate the kernels, on registers alone, and a stream of 32-byte loads.
//
// Each has more independent chains than latency times throughput asks for, and few enough to stay in registers. The
// integer steps are written as instructions: of intrinsics with operands that never change a compiler computes the
// product once, and when it is kept from that, it moves sums about.

#include <immintrin.h>

#include "kvist/ceiling.h"

namespace kvist {
namespace {

constexpr int kChains = 10;  // of vfmadd: 4 cycles each, two start each cycle
constexpr int kMaddChains = 6;
constexpr int kMaddSteps = 4;
constexpr int kGroupChains = 4;
constexpr int kLanes = 8;           // of 32 bits
constexpr int kGroupSteps = 8;      // vpmaddubsw of a group of 32 inputs: 4 inputs a lane
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

// All products before all sums: in pairs, the sums take issue slots that the next products could have had.
inline void multiply_add(__m256i (&sums)[6], __m256i left, __m256i right) {
  __m256i p0, p1, p2, p3, p4, p5;
  asm volatile(
      "vpmaddwd %[right], %[left], %[p0]\n\t"
      "vpmaddwd %[right], %[left], %[p1]\n\t"
      "vpmaddwd %[right], %[left], %[p2]\n\t"
      "vpmaddwd %[right], %[left], %[p3]\n\t"
      "vpmaddwd %[right], %[left], %[p4]\n\t"
      "vpmaddwd %[right], %[left], %[p5]\n\t"
      "vpaddd %[p0], %[s0], %[s0]\n\t"
      "vpaddd %[p1], %[s1], %[s1]\n\t"
      "vpaddd %[p2], %[s2], %[s2]\n\t"
      "vpaddd %[p3], %[s3], %[s3]\n\t"
      "vpaddd %[p4], %[s4], %[s4]\n\t"
      "vpaddd %[p5], %[s5], %[s5]"
      : [s0] "+x"(sums[0]), [s1] "+x"(sums[1]), [s2] "+x"(sums[2]), [s3] "+x"(sums[3]), [s4] "+x"(sums[4]),
        [s5] "+x"(sums[5]), [p0] "=&x"(p0), [p1] "=&x"(p1), [p2] "=&x"(p2), [p3] "=&x"(p3), [p4] "=&x"(p4),
        [p5] "=&x"(p5)
      : [left] "x"(left), [right] "x"(right));
}

inline void multiply_add_bytes(__m256i (&sums)[4], __m256i codes, __m256i activations) {
  __m256i p0, p1, p2, p3;
  asm volatile(
      "vpmaddubsw %[activations], %[codes], %[p0]\n\t"
      "vpmaddubsw %[activations], %[codes], %[p1]\n\t"
      "vpmaddubsw %[activations], %[codes], %[p2]\n\t"
      "vpmaddubsw %[activations], %[codes], %[p3]\n\t"
      "vpaddw %[p0], %[s0], %[s0]\n\t"
      "vpaddw %[p1], %[s1], %[s1]\n\t"
      "vpaddw %[p2], %[s2], %[s2]\n\t"
      "vpaddw %[p3], %[s3], %[s3]"
      : [s0] "+x"(sums[0]), [s1] "+x"(sums[1]), [s2] "+x"(sums[2]), [s3] "+x"(sums[3]), [p0] "=&x"(p0), [p1] "=&x"(p1),
        [p2] "=&x"(p2), [p3] "=&x"(p3)
      : [codes] "x"(codes), [activations] "x"(activations));
}

// vpmaddwd, vpaddd.
std::uint64_t run_madd(std::int64_t rounds) {
  __m256i sums[kMaddChains] = {};
  const __m256i left = _mm256_set1_epi16(77);
  const __m256i right = _mm256_set1_epi16(-3);
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 4
    for (int step = 0; step < kMaddSteps; ++step) {
      multiply_add(sums, left, right);
    }
  }
  __m256i total = sums[0];
  for (int i = 1; i < kMaddChains; ++i) {
    total = _mm256_add_epi32(total, sums[i]);
  }
  return sum_lanes(total);
}

// For each group: eight times vpmaddubsw and vpaddw, then vpmaddwd, vcvtdq2ps and vfmadd.
std::uint64_t run_maddubs(std::int64_t rounds) {
  __m256 sums[kGroupChains] = {};
  const __m256i codes = _mm256_set1_epi8(7);
  const __m256i activations = _mm256_set1_epi8(5);
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256 scale = _mm256_set1_ps(1e-6f);
  for (std::int64_t round = 0; round < rounds; ++round) {
    __m256i pairs[kGroupChains] = {};
#pragma GCC unroll 8
    for (int step = 0; step < kGroupSteps; ++step) {
      multiply_add_bytes(pairs, codes, activations);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kGroupChains; ++i) {
      const __m256 group = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs[i], ones));
      sums[i] = _mm256_fmadd_ps(group, scale, sums[i]);
    }
  }
  const __m256 total = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
  return sum_lanes(_mm256_castps_si256(total));
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
      {run_madd, std::int64_t{kMaddChains} * kMaddSteps * kLanes * 4},
      {run_maddubs, std::int64_t{kGroupChains} * kGroupSteps * kLanes * 8},
      {run_fma, std::int64_t{kChains} * kLanes * 2},
      read<false>,
      read<true>,
  };
  return kKernels;
}

}  // namespace kvist
