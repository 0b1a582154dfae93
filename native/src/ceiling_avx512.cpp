// The ceilings of AVX-512 VNNI: the instructions that dominate the kernels, on registers alone, and a stream of 64-byte
// loads.
//
// Each has more independent chains than latency times throughput asks for, and few enough to stay in registers. An
// operand is made opaque in every round: of operands that never change a compiler computes the product once.

#include "kvist/ceiling.h"
#include "vec_avx512.h"

namespace kvist {
namespace {

using avx512::unroll;

constexpr int kLanes = 16;  // of 32 bits
constexpr int kChains = 12;
constexpr int kGroupSteps = 8;      // of four inputs in a group of int4 weights
constexpr std::size_t kStep = 256;  // bytes
constexpr std::size_t kAhead = 2048;

#if defined(__GNUC__) && !defined(KVIST_EMULATES_AVX512)
#define KVIST_OPAQUE(x) asm volatile("" : "+v"(x))
#else
#define KVIST_OPAQUE(x) static_cast<void>(x)
#endif

std::uint64_t sum_lanes(__m512i values) {
  alignas(64) std::uint32_t lanes[kLanes];
  _mm512_store_si512(lanes, values);
  std::uint64_t total = 0;
  for (const std::uint32_t lane : lanes) {
    total += lane;
  }
  return total;
}

// vpdpwssd.
std::uint64_t run_madd(std::int64_t rounds) {
  __m512i sums[kChains];
  unroll<kChains>([&](auto i) KVIST_LAMBDA { sums[i] = _mm512_setzero_si512(); });
  __m512i left = _mm512_set1_epi16(77);
  const __m512i right = _mm512_set1_epi16(-3);
  for (std::int64_t round = 0; round < rounds; ++round) {
    KVIST_OPAQUE(left);
    unroll<kChains>([&](auto i) KVIST_LAMBDA { sums[i] = _mm512_dpwssd_epi32(sums[i], left, right); });
  }
  unroll<kChains - 1>([&](auto i) KVIST_LAMBDA { sums[0] = _mm512_add_epi32(sums[0], sums[i + 1]); });
  return sum_lanes(sums[0]);
}

// For each group of 32 inputs: eight times vpdpbusd, then vcvtdq2ps and vfmadd; the float32 sums are in memory, as in
// the kernel.
std::uint64_t run_maddubs(std::int64_t rounds) {
  alignas(64) float totals[kChains][kLanes] = {};
  __m512i codes = _mm512_set1_epi8(7);
  const __m512i activations = _mm512_set1_epi8(5);
  const __m512 scale = _mm512_set1_ps(1e-6f);
  for (std::int64_t round = 0; round < rounds; ++round) {
    __m512i sums[kChains];
    unroll<kChains>([&](auto i) KVIST_LAMBDA { sums[i] = _mm512_setzero_si512(); });
    unroll<kGroupSteps>([&](auto) KVIST_LAMBDA {
      KVIST_OPAQUE(codes);
      unroll<kChains>([&](auto i) KVIST_LAMBDA { sums[i] = _mm512_dpbusd_epi32(sums[i], codes, activations); });
    });
    unroll<kChains>([&](auto i) KVIST_LAMBDA {
      const __m512 group = _mm512_cvtepi32_ps(sums[i]);
      _mm512_store_ps(totals[i], _mm512_fmadd_ps(group, scale, _mm512_load_ps(totals[i])));
    });
  }
  return sum_lanes(_mm512_castps_si512(_mm512_load_ps(totals[0])));
}

std::uint64_t run_fma(std::int64_t rounds) {
  __m512 sums[kChains];
  unroll<kChains>([&](auto i) KVIST_LAMBDA { sums[i] = _mm512_setzero_ps(); });
  __m512 left = _mm512_set1_ps(3e-4f);
  const __m512 right = _mm512_set1_ps(0.5f);
  for (std::int64_t round = 0; round < rounds; ++round) {
    KVIST_OPAQUE(left);
    unroll<kChains>([&](auto i) KVIST_LAMBDA { sums[i] = _mm512_fmadd_ps(left, right, sums[i]); });
  }
  unroll<kChains - 1>([&](auto i) KVIST_LAMBDA { sums[0] = _mm512_add_ps(sums[0], sums[i + 1]); });
  return sum_lanes(_mm512_castps_si512(sums[0]));
}

template <bool kPrefetches>
std::uint64_t read(const std::uint8_t* data, std::size_t bytes) {
  constexpr int kLoads = static_cast<int>(kStep / sizeof(__m512i));
  __m512i sums[kLoads];
  unroll<kLoads>([&](auto i) KVIST_LAMBDA { sums[i] = _mm512_setzero_si512(); });
  for (std::size_t offset = 0; offset < bytes; offset += kStep) {
    if constexpr (kPrefetches) {
      // Past the end it is the address of nothing, which a prefetch may have.
      for (std::size_t line = 0; line < kStep; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(data) + offset + kAhead + line),
                     _MM_HINT_T0);
      }
    }
    unroll<kLoads>([&](auto i)
                       KVIST_LAMBDA { sums[i] = _mm512_add_epi32(sums[i], avx512::load(data + offset + 64 * i)); });
  }
  unroll<kLoads - 1>([&](auto i) KVIST_LAMBDA { sums[0] = _mm512_add_epi32(sums[0], sums[i + 1]); });
  return sum_lanes(sums[0]);
}

}  // namespace

const CeilingKernels& ceiling_kernels_avx512() {
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
