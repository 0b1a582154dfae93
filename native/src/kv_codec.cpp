#include "kvist/kv_codec.h"

namespace kvist {

EncodeKvRow encode_kv_row(Isa isa) {
#if defined(KVIST_HAS_AVX2)
  // A row is a few vectors of either width.
  if (isa == Isa::kAvx2 || isa == Isa::kAvx512) {
    return encode_kv_row_avx2;
  }
#endif
  static_cast<void>(isa);
  return encode_kv_row_serial;
}

EncodeKvKey encode_kv_key(Isa isa) {
#if defined(KVIST_HAS_AVX2)
  if (isa == Isa::kAvx2 || isa == Isa::kAvx512) {
    return encode_kv_key_avx2;
  }
#endif
  static_cast<void>(isa);
  return encode_kv_key_serial;
}

}  // namespace kvist
