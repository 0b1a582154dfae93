#include "kvist/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace kvist {
namespace {

std::vector<Isa> probe() {
  std::vector<Isa> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    found.push_back(Isa::kAvx2);
  }
#endif
  found.push_back(Isa::kSerial);
  return found;
}

Isa find(std::string_view name) {
  std::string known;
  for (const Isa isa : available_isas()) {
    if (name == isa_name(isa)) {
      return isa;
    }
    known += known.empty() ? "" : ", ";
    known += isa_name(isa);
  }
  throw std::invalid_argument("[native] the instruction set must be one of " + known + ", received '" +
                              std::string(name) + "'");
}

Isa& selected() {
  static Isa isa = [] {
    const char* forced = std::getenv("KVIST_ISA");
    return forced != nullptr && *forced != '\0' ? find(forced) : available_isas().front();
  }();
  return isa;
}

}  // namespace

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::kSerial:
      return "serial";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kNeon:
      return "neon";
  }
  return "?";
}

const std::vector<Isa>& available_isas() {
  static const std::vector<Isa> isas = probe();
  return isas;
}

Isa current_isa() { return selected(); }

void force_isa(std::string_view name) { selected() = find(name); }

}  // namespace kvist
