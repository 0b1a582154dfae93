// The NEON table; the kernels of each weight kind are in linear_s8, linear_s4 and linear_bf16.

#include "linear_neon.h"

#include "linear_tables.h"

namespace kvist {

const LinearKernels kLinearNeon = neon::Panels::table("neon-1");

}  // namespace kvist
