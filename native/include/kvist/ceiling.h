// What this machine can do at best, for kernels to be compared with: a stream of reads, and loops of the instructions
// that dominate the kernels, on registers alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvist/isa.h"

namespace kvist {

struct CeilingKernels {
  // Runs a number of rounds and returns a value that depends on all of them. One operation is a multiplication or an
  // addition of two elements.
  struct Loop {
    std::uint64_t (*run)(std::int64_t rounds);
    std::int64_t operations;  // in a round
  };
  Loop int8_madd;     // products of 16-bit values, added in pairs to 32 bits: what int8 layers and int8 attention do
  Loop int8_maddubs;  // products of 8-bit values, added to 16 bits, groups of 32 converted and added in float32: int4
  Loop f32_fma;       // float32 products and sums: bfloat16 layers, raw16 attention
  // Reads every byte; `bytes` is a multiple of 256 and `data` aligned to kAlignment.
  std::uint64_t (*read)(const std::uint8_t* data, std::size_t bytes);
  std::uint64_t (*read_prefetching)(const std::uint8_t* data, std::size_t bytes);
};

// The table of an instruction set; every available one has it.
const CeilingKernels& ceiling_kernels(Isa isa);

// One for each instruction set, in the file that may use it.
const CeilingKernels& ceiling_kernels_serial();
const CeilingKernels& ceiling_kernels_avx2();
const CeilingKernels& ceiling_kernels_avx512();
const CeilingKernels& ceiling_kernels_neon();

}  // namespace kvist
