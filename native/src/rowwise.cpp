#include "kvist/rowwise.h"

namespace kvist {

extern const RowwiseKernels rowwise_serial;
extern const RowwiseKernels rowwise_avx2;
extern const RowwiseKernels rowwise_avx512;
extern const RowwiseKernels rowwise_neon;

const RowwiseKernels& rowwise_kernels([[maybe_unused]] Isa isa) {
#if defined(KVIST_HAS_AVX512)
  if (isa == Isa::kAvx512) {
    return rowwise_avx512;
  }
#endif
#if defined(KVIST_HAS_AVX2)
  if (isa == Isa::kAvx2) {
    return rowwise_avx2;
  }
#endif
#if defined(KVIST_HAS_NEON)
  if (isa == Isa::kNeon) {
    return rowwise_neon;
  }
#endif
  return rowwise_serial;
}

}  // namespace kvist
