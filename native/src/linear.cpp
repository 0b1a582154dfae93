// Which table of linear kernels an instruction set has.

#include "kvist/linear.h"

#include "linear_tables.h"

namespace kvist {

const LinearKernels& linear_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) {
    return kLinearAvx2;
  }
#endif
  static_cast<void>(isa);
  return kLinearSerial;
}

}  // namespace kvist
