#include "kvist/rowwise.h"

namespace kvist {

extern const RowwiseKernels rowwise_serial;
#if defined(__x86_64__)
extern const RowwiseKernels rowwise_avx2;
#endif

const RowwiseKernels& rowwise_kernels([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa != Isa::kSerial) {
    return rowwise_avx2;
  }
#endif
  return rowwise_serial;
}

}  // namespace kvist
