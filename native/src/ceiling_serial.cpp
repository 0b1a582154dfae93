// The ceilings of plain C++: one multiplication and one addition at a time.
//
// Eight independent chains hide the latency of each. An empty asm statement after each step makes the compiler take an
// operand as changed, or else it would compute the product once and the loop not at all.

#include <cstring>

#include "kvist/ceiling.h"
#include "kvist/common.h"

namespace kvist {
namespace {

constexpr int kChains = 8;
constexpr std::size_t kWords = 4;

std::uint64_t multiply_add_integers(std::int64_t rounds) {
  std::uint32_t sums[kChains] = {};
  std::uint32_t left = 3;
  const std::uint32_t right = 5;
  for (std::int64_t round = 0; round < rounds; ++round) {
    for (std::uint32_t& sum : sums) {
      asm volatile("" : "+r"(left));
      sum += left * right;
    }
  }
  std::uint64_t total = 0;
  for (const std::uint32_t sum : sums) {
    total += sum;
  }
  return total;
}

std::uint64_t multiply_add_floats(std::int64_t rounds) {
  float sums[kChains] = {};
  float left = 3e-4f;
#if defined(__x86_64__)
#define KVIST_FLOAT_REGISTER "+x"
#else
#define KVIST_FLOAT_REGISTER "+w"
#endif
  for (std::int64_t round = 0; round < rounds; ++round) {
    for (float& sum : sums) {
      asm volatile("" : KVIST_FLOAT_REGISTER(left));
      sum += left * 0.5f;
    }
  }
#undef KVIST_FLOAT_REGISTER
  float total = 0.0f;
  for (const float sum : sums) {
    total += sum;
  }
  return static_cast<std::uint64_t>(total);
}

std::uint64_t read(const std::uint8_t* data, std::size_t bytes) {
  std::uint64_t sums[kWords] = {};
  for (std::size_t offset = 0; offset < bytes; offset += sizeof(sums)) {
    for (std::size_t i = 0; i < kWords; ++i) {
      std::uint64_t word;
      std::memcpy(&word, data + offset + i * sizeof(word), sizeof(word));
      sums[i] += word;
    }
  }
  return sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace

const CeilingKernels& ceiling_kernels_serial() {
  static constexpr CeilingKernels::Loop kIntegers{multiply_add_integers, 2 * kChains};
  static constexpr CeilingKernels kKernels{kIntegers, kIntegers, {multiply_add_floats, 2 * kChains}, read, read};
  return kKernels;
}

const CeilingKernels& ceiling_kernels(Isa isa) {
#if defined(KVIST_HAS_AVX512)
  if (isa == Isa::kAvx512) {
    return ceiling_kernels_avx512();
  }
#endif
#if defined(KVIST_HAS_AVX2)
  if (isa == Isa::kAvx2) {
    return ceiling_kernels_avx2();
  }
#endif
#if defined(KVIST_HAS_NEON)
  if (isa == Isa::kNeon) {
    return ceiling_kernels_neon();
  }
#endif
  (void)isa;
  return ceiling_kernels_serial();
}

}  // namespace kvist
