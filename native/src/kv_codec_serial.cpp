// One K or V row, written value by value. Arithmetic in float32, in the order that every version keeps: the scale is
// rounded first, then each value is multiplied by the scale's float32 reciprocal and rounded to nearest even.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kvist/common.h"
#include "kvist/kv_codec.h"

namespace kvist {
namespace {

bool encode_raw16(int head_dim, const float* x, std::uint8_t* out) {
  bool finite = true;
  for (int d = 0; d < head_dim; ++d) {
    const std::uint16_t bits = f32_to_bf16(x[d]);
    finite = finite && (bits & 0x7f80U) != 0x7f80U;
    std::memcpy(out + 2 * d, &bits, sizeof(bits));
  }
  return finite;
}

bool encode_int8(int head_dim, const float* x, std::uint8_t* out) {
  for (int first = 0; first < head_dim; first += kKvGroup) {
    const int last = std::min(first + kKvGroup, head_dim);
    std::uint32_t largest_bits = 0;  // of |x|: order of the bits is order of the values, a NaN above all
    for (int d = first; d < last; ++d) {
      largest_bits = std::max(largest_bits, std::bit_cast<std::uint32_t>(x[d]) & 0x7fffffffU);
    }
    std::uint16_t scale_bits = f32_to_f16(std::bit_cast<float>(largest_bits) / 127.0F);
    if (scale_bits >= 0x7c00U) {
      return false;
    }
    if (scale_bits == 0 && largest_bits != 0) {
      scale_bits = 1;
    }
    const float inverse = scale_bits == 0 ? 0.0F : 1.0F / f16_to_f32(scale_bits);
    for (int d = first; d < last; ++d) {
      const float code = std::nearbyint(x[d] * inverse);
      out[d] = static_cast<std::uint8_t>(static_cast<std::int8_t>(std::clamp(code, -127.0F, 127.0F)));
    }
    std::memcpy(out + head_dim + 2 * (first / kKvGroup), &scale_bits, sizeof(scale_bits));
  }
  return true;
}

}  // namespace

bool encode_kv_row_serial(KvCodec codec, int head_dim, const float* x, std::uint8_t* out) {
  return codec == KvCodec::kRaw16 ? encode_raw16(head_dim, x, out) : encode_int8(head_dim, x, out);
}

}  // namespace kvist
