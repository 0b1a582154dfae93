// The intrinsics of NEON: the compiler's own, or, in a build that emulates them, functions of the same names from SIMDe,
// for tests on a CPU of another architecture.
#pragma once

#if defined(KVIST_EMULATES_NEON)

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/arm/neon.h>

#include <cmath>

// What SIMDe 0.7.4 lacks, by its definition in Arm's manual: rounds to nearest, ties to even.
namespace kvist::emulated {

static inline int32x4_t cvtnq_s32_f32(float32x4_t x) {
  float lanes[4];
  vst1q_f32(lanes, x);
  std::int32_t integers[4];
  for (int i = 0; i < 4; ++i) {
    integers[i] = static_cast<std::int32_t>(std::lrint(lanes[i]));
  }
  return vld1q_s32(integers);
}

}  // namespace kvist::emulated

#define vcvtnq_s32_f32 kvist::emulated::cvtnq_s32_f32

#else
#include <arm_neon.h>
#endif
