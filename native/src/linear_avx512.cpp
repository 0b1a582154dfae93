// The AVX-512 table; the kernels of each weight kind are in linear_s8, linear_s4 and linear_bf16.

#include "linear_avx512.h"

#include "linear_tables.h"

namespace kvist {

const LinearKernels kLinearAvx512 = avx512::Panels::table("avx512-1");

}  // namespace kvist
