// Whether the kernels of an instruction set compute on this CPU what the portable ones do: small problems, both ways.
//
// Takes a few milliseconds. For a process's first use of an instruction set, since kernels can be right where they were
// tested and wrong on a CPU, under a hypervisor or from a compiler where they were not.
#pragma once

#include <string>
#include <string_view>

#include "kvist/isa.h"

namespace kvist {

// Returns which kernel differs and by how much; empty when none does. The part named by `falsify` (linear, attention,
// spans, codec, span codec, rowwise; none when empty) has its results changed before they are compared: for tests.
std::string self_check(Isa isa, std::string_view falsify);

}  // namespace kvist
