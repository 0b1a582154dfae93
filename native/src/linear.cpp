// Which table of linear kernels an instruction set has.

#include "kvist/linear.h"

#include "linear_tables.h"

namespace kvist {

const LinearKernels& linear_kernels(Isa isa) {
#if defined(KVIST_HAS_AVX512)
  if (isa == Isa::kAvx512) {
    return kLinearAvx512;
  }
#endif
#if defined(KVIST_HAS_AVX2)
  if (isa == Isa::kAvx2) {
    return kLinearAvx2;
  }
#endif
#if defined(KVIST_HAS_NEON)
  if (isa == Isa::kNeon) {
    return kLinearNeon;
  }
#endif
  static_cast<void>(isa);
  return kLinearSerial;
}

}  // namespace kvist
