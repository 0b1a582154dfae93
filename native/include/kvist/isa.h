// Which instruction set runs: probed once, most specific first, forced by tests and bug reports.
#pragma once

#include <string_view>
#include <vector>

namespace kvist {

enum class Isa : int { kSerial = 0, kAvx2 = 1, kAvx512 = 2, kNeon = 3 };

std::string_view isa_name(Isa isa);

// What this CPU and this build can run, the best one first; kSerial is always the last.
const std::vector<Isa>& available_isas();

// The one that runs now: the best, unless KVIST_ISA or force_isa says otherwise.
Isa current_isa();

// Throws std::invalid_argument for a name that is unknown or cannot run here.
Isa find_isa(std::string_view name);

// As find_isa, and makes it the one that runs. Not to be called while a step runs.
void force_isa(std::string_view name);

}  // namespace kvist
