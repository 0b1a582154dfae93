#include "kvist/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace kvist {
namespace {

// The compiler's run-time library asks the CPU and, through XCR0, whether the system saves the registers: a set it does
// not save does not count as supported.
std::vector<Isa> probe() {
  std::vector<Isa> found;
#if defined(KVIST_EMULATES_AVX512)
  found.push_back(Isa::kAvx512);
#endif
#if defined(KVIST_EMULATES_NEON)
  found.push_back(Isa::kNeon);
#endif
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#if !defined(KVIST_EMULATES_AVX512)
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni")) {
    found.push_back(Isa::kAvx512);
  }
#endif
  if (has_avx2) {
    found.push_back(Isa::kAvx2);
  }
#elif defined(__aarch64__) && defined(__linux__)
  if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0) {
    found.push_back(Isa::kNeon);
  }
#endif
  found.push_back(Isa::kSerial);
  return found;
}

Isa& selected() {
  static Isa isa = [] {
    const char* forced = std::getenv("KVIST_ISA");
    return forced != nullptr && *forced != '\0' ? find_isa(forced) : available_isas().front();
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

Isa find_isa(std::string_view name) {
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

Isa current_isa() { return selected(); }

void force_isa(std::string_view name) { selected() = find_isa(name); }

}  // namespace kvist
