#include "kvist/kv_codec.h"

namespace kvist {

EncodeKvRow encode_kv_row(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx2 || isa == Isa::kAvx512) {
    return encode_kv_row_avx2;
  }
#endif
  static_cast<void>(isa);
  return encode_kv_row_serial;
}

}  // namespace kvist
