#include "kvist/kv_span_codec.h"

namespace kvist {

extern const KvSpanKernels kv_span_serial;
extern const KvSpanKernels kv_span_avx2;

const KvSpanKernels& kv_span_kernels([[maybe_unused]] Isa isa) {
#if defined(KVIST_HAS_AVX2)
  if (isa == Isa::kAvx2 || isa == Isa::kAvx512) {
    return kv_span_avx2;
  }
#endif
  return kv_span_serial;
}

}  // namespace kvist
