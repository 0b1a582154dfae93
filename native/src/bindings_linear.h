// The Python class PackedLinear, as other parts of the module take it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "kvist/linear.h"
#include "kvist/pool.h"

namespace kvist {

// Memory aligned for vectors, on large pages where there are some; its contents are undefined. Pieces that are smaller
// than a large page share their pages with those asked for before and after: the layers of a model follow each other.
class AlignedBytes {
 public:
  explicit AlignedBytes(std::size_t size);
  std::uint8_t* data() const { return data_.get(); }

 private:
  std::shared_ptr<std::uint8_t> data_;
};

// Packed weights and what keeps their bytes alive: own memory, or a Python array.
struct OwnedLinear {
  const LinearKernels* kernels;  // the table that packed them, and the only one that may read them
  PackedLinear packed;           // `bias` is null: who runs it sets it on a copy
  std::size_t bytes;
  std::unique_ptr<AlignedBytes> memory;
  nanobind::object array;
};

// One call of a linear layer: rows quantised by all threads, a barrier, then the items. `scratch` holds scratch_bytes
// for each thread, `activations` activation_bytes.
void run_linear(Worker& worker, const LinearKernels& kernels, const PackedLinear& linear, const float* x,
                std::ptrdiff_t stride, int rows, const Epilogue& epilogue, std::uint8_t* activations,
                std::uint8_t* scratch, std::size_t scratch_bytes);

}  // namespace kvist
