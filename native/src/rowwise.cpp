#include "kvist/rowwise.h"

#include <cmath>
#include <numbers>

namespace kvist {
namespace {

// A number that looks unlike x (lowbias32): signs with a pattern would be much like a row of the Hadamard matrix.
std::uint32_t scrambled(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352dU;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  return x ^ (x >> 16);
}

}  // namespace

HeadTurn head_turn(int head_dim) {
  HeadTurn turn{};
  turn.power = 1;
  turn.odd = head_dim;
  while (turn.odd % 2 == 0) {
    turn.power *= 2;
    turn.odd /= 2;
  }
  const float length = 1.0F / std::sqrt(static_cast<float>(head_dim));
  for (int i = 0; i < head_dim; ++i) {
    turn.signs[i] = scrambled(static_cast<std::uint32_t>(i) + 1U) % 2 == 0 ? length : -length;
  }
  for (int row = 0; row < turn.odd; ++row) {
    for (int column = 0; column < turn.odd; ++column) {
      const double angle = std::numbers::pi * (column + 0.5) * row / turn.odd;
      const double cosine = row == 0 ? 1.0 : std::numbers::sqrt2 * std::cos(angle);
      turn.cosines[row * turn.odd + column] = static_cast<float>(cosine);
    }
  }
  return turn;
}

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
