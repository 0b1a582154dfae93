// The tables that exist; each is defined by the file of its instruction set.
#pragma once

#include "kvist/linear.h"

namespace kvist {

extern const LinearKernels kLinearSerial;
extern const LinearKernels kLinearAvx2;
extern const LinearKernels kLinearAvx512;
extern const LinearKernels kLinearNeon;

}  // namespace kvist
