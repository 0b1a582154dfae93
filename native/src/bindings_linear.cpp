// Python's view of the linear layers: the class PackedLinear, one call of a layer, and its timing.

#include "bindings_linear.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "kvist/common.h"

namespace nb = nanobind;

namespace kvist {
namespace {

using FloatMatrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatVector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr std::size_t kLargePage = std::size_t{2} << 20;
// Of pieces that have pages of their own, and of what others share.
constexpr std::size_t kSmallBytes = std::size_t{64} << 10;
constexpr std::size_t kSharedBytes = std::size_t{16} << 20;
// Sums of int8 products stay below 2^31 up to here: 127 * 127 * K.
constexpr int kMaxInputs = 131072;

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument("[linear] " + message); }

WeightKind parse_kind(const std::string& kind) {
  if (kind == "int8") {
    return WeightKind::kInt8;
  }
  if (kind == "int4") {
    return WeightKind::kInt4;
  }
  if (kind == "bf16") {
    return WeightKind::kBf16;
  }
  refuse("the kind of weights must be int8, int4 or bf16, received '" + kind + "'");
}

Gate parse_gate(const std::string& gate) {
  if (gate == "none") {
    return Gate::kNone;
  }
  if (gate == "silu") {
    return Gate::kSilu;
  }
  if (gate == "gelu_tanh") {
    return Gate::kGeluTanh;
  }
  if (gate == "gelu") {
    return Gate::kGelu;
  }
  refuse("the gate must be none, silu, gelu_tanh or gelu, received '" + gate + "'");
}

LinearShape make_shape(std::size_t outputs, std::size_t inputs, const std::string& kind_name, int group,
                       const std::string& gate_name) {
  const WeightKind kind = parse_kind(kind_name);
  const Gate gate = parse_gate(gate_name);
  if (outputs < 1 || outputs > std::size_t{1} << 30 || inputs < 1 || inputs > kMaxInputs) {
    refuse("expected 1 to 2^30 outputs and 1 to " + std::to_string(kMaxInputs) + " inputs, received weights (" +
           std::to_string(outputs) + ", " + std::to_string(inputs) + ")");
  }
  if (kind == WeightKind::kInt4 ? group != 32 && group != 64 : group != 0) {
    refuse(kind_name + " weights have " + (kind == WeightKind::kInt4 ? "groups of 32 or 64" : "no groups (0)") +
           ", received group " + std::to_string(group));
  }
  if (gate != Gate::kNone && outputs % 2 != 0) {
    refuse("a gate needs an even number of outputs, received " + std::to_string(outputs));
  }
  return {kind, static_cast<int>(outputs), static_cast<int>(inputs), group, gate};
}

int num_results(const LinearShape& shape) {
  return shape.gate == Gate::kNone ? shape.num_outputs : shape.num_outputs / 2;
}

void pack_matrix(OwnedLinear* self, const FloatMatrix& weights, const std::string& kind, int group,
                 const std::string& gate, Pool& pool) {
  const LinearShape shape = make_shape(weights.shape(0), weights.shape(1), kind, group, gate);
  const LinearKernels& kernels = linear_kernels(current_isa());
  const std::size_t bytes = kernels.packed_bytes(shape);
  auto memory = std::make_unique<AlignedBytes>(bytes);
  {
    const nb::gil_scoped_release release;
    const int results = num_results(shape);
    const int step = round_up(16, kernels.pack_step);
    pool.run([&](Worker& worker) {
      // The same weights give the same bytes, padding included.
      constexpr std::size_t kPiece = std::size_t{1} << 20;
      const auto pieces = static_cast<int>(ceil_div(bytes, kPiece));
      for (int piece = worker.claim(pieces); piece >= 0; piece = worker.claim(pieces)) {
        const std::size_t start = static_cast<std::size_t>(piece) * kPiece;
        std::memset(memory->data() + start, 0, std::min(kPiece, bytes - start));
      }
      worker.barrier();
      const int items = ceil_div(results, step);
      for (int item = worker.claim(items); item >= 0; item = worker.claim(items)) {
        kernels.pack(shape, weights.data(), item * step, std::min(results, (item + 1) * step), memory->data());
      }
    });
  }
  const PackedLinear packed{shape, memory->data(), nullptr};
  new (self) OwnedLinear{&kernels, packed, bytes, std::move(memory), nb::object()};
}

OwnedLinear from_data(std::size_t outputs, std::size_t inputs, const std::string& kind, int group,
                      const std::string& gate, nb::object array) {
  const LinearShape shape = make_shape(outputs, inputs, kind, group, gate);
  const LinearKernels& kernels = linear_kernels(current_isa());
  const auto data = nb::cast<Bytes>(array, false);
  const std::size_t bytes = kernels.packed_bytes(shape);
  if (data.shape(0) != bytes) {
    refuse("packed " + kind + " weights (" + std::to_string(outputs) + ", " + std::to_string(inputs) + ") of layout " +
           kernels.layout + " are " + std::to_string(bytes) + " bytes, received " + std::to_string(data.shape(0)));
  }
  if (reinterpret_cast<std::uintptr_t>(data.data()) % kAlignment == 0) {
    return {&kernels, {shape, data.data(), nullptr}, bytes, nullptr, std::move(array)};
  }
  auto memory = std::make_unique<AlignedBytes>(bytes);
  std::copy_n(data.data(), bytes, memory->data());
  const PackedLinear packed{shape, memory->data(), nullptr};
  return {&kernels, packed, bytes, std::move(memory), nb::object()};
}

nb::object new_matrix(std::size_t rows, std::size_t columns) {
  auto* values = new float[rows * columns];
  const nb::capsule owner(values, [](void* data) noexcept { delete[] static_cast<float*>(data); });
  return nb::cast(nb::ndarray<nb::numpy, float>(values, {rows, columns}, owner));
}

std::string dims(std::size_t rows, std::size_t columns) {
  return "(" + std::to_string(rows) + ", " + std::to_string(columns) + ")";
}

// Buffers of a call, for all threads.
struct Buffers {
  Buffers(const LinearKernels& kernels, const LinearShape& shape, int rows, int num_threads)
      : scratch_bytes(round_up(kernels.scratch_bytes(shape, rows), kAlignment)),
        activations(kernels.activation_bytes(shape, rows)),
        scratch(scratch_bytes * static_cast<std::size_t>(num_threads)) {}
  std::size_t scratch_bytes;
  AlignedBytes activations;
  AlignedBytes scratch;
};

nb::object linear(Pool& pool, const OwnedLinear& weights, const FloatMatrix& x, const std::optional<FloatVector>& bias,
                  const std::optional<FloatMatrix>& residual, nb::object out) {
  const LinearShape& shape = weights.packed.shape;
  const std::size_t rows = x.shape(0);
  const auto results = static_cast<std::size_t>(num_results(shape));
  if (x.shape(1) != static_cast<std::size_t>(shape.num_inputs)) {
    refuse("x must be (T, " + std::to_string(shape.num_inputs) + "), received " + dims(rows, x.shape(1)));
  }
  if (rows > 1U << 24) {
    refuse("expected at most 2^24 rows, received " + std::to_string(rows));
  }
  if (bias && bias->shape(0) != static_cast<std::size_t>(shape.num_outputs)) {
    refuse("bias must be (" + std::to_string(shape.num_outputs) + ",), received (" + std::to_string(bias->shape(0)) +
           ",)");
  }
  if (residual && (residual->shape(0) != rows || residual->shape(1) != results)) {
    refuse("residual must be " + dims(rows, results) + ", received " + dims(residual->shape(0), residual->shape(1)));
  }
  if (out.is_none()) {
    out = new_matrix(rows, results);
  }
  const auto target = nb::cast<FloatOut>(out, false);
  if (target.shape(0) != rows || target.shape(1) != results) {
    refuse("out must be " + dims(rows, results) + ", received " + dims(target.shape(0), target.shape(1)));
  }
  if (rows == 0) {
    return out;
  }
  PackedLinear packed = weights.packed;
  packed.bias = bias ? bias->data() : nullptr;
  const auto stride = static_cast<std::ptrdiff_t>(results);
  const Epilogue epilogue{target.data(), stride, residual ? residual->data() : nullptr, stride};
  const nb::gil_scoped_release release;
  const Buffers buffers(*weights.kernels, shape, static_cast<int>(rows), pool.num_threads());
  pool.run([&](Worker& worker) {
    run_linear(worker, *weights.kernels, packed, x.data(), shape.num_inputs, static_cast<int>(rows), epilogue,
               buffers.activations.data(), buffers.scratch.data(), buffers.scratch_bytes);
  });
  return out;
}

// Seconds per call over `repeats` rounds through all matrices, which together may exceed every cache. Each call quantises
// its rows, as in a model; all matrices have the same shape.
double time_linear(Pool& pool, const std::vector<OwnedLinear*>& matrices, int rows, int repeats) {
  if (matrices.empty() || rows < 1 || rows > 1 << 20 || repeats < 1) {
    refuse("time_linear needs a matrix, a row and a repetition");
  }
  const LinearKernels& kernels = *matrices[0]->kernels;
  const LinearShape& shape = matrices[0]->packed.shape;
  for (const OwnedLinear* matrix : matrices) {
    const LinearShape& other = matrix->packed.shape;
    if (matrix->kernels != &kernels || other.kind != shape.kind || other.num_outputs != shape.num_outputs ||
        other.num_inputs != shape.num_inputs || other.group != shape.group || other.gate != shape.gate) {
      refuse("time_linear needs matrices of one shape");
    }
  }
  const nb::gil_scoped_release release;
  const auto inputs = static_cast<std::size_t>(shape.num_inputs);
  const auto count = static_cast<std::size_t>(rows);
  std::vector<float> x(count * inputs);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(static_cast<int>(i * 2654435761U % 2001) - 1000) * 1e-3f;
  }
  std::vector<float> out(count * static_cast<std::size_t>(num_results(shape)));
  const Buffers buffers(kernels, shape, rows, pool.num_threads());
  const Epilogue epilogue{out.data(), num_results(shape), nullptr, 0};
  const auto start = std::chrono::steady_clock::now();
  pool.run([&](Worker& worker) {
    for (int repeat = 0; repeat < repeats; ++repeat) {
      for (const OwnedLinear* matrix : matrices) {
        run_linear(worker, kernels, matrix->packed, x.data(), shape.num_inputs, rows, epilogue,
                   buffers.activations.data(), buffers.scratch.data(), buffers.scratch_bytes);
        worker.barrier();
      }
    }
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return seconds.count() / repeats / static_cast<double>(matrices.size());
}

std::shared_ptr<std::uint8_t> allocate(std::size_t size) {
  const std::size_t alignment = size < kLargePage ? kAlignment : kLargePage;
  const std::size_t rounded = round_up(std::max<std::size_t>(size, 1), alignment);
  auto* data = static_cast<std::uint8_t*>(std::aligned_alloc(alignment, rounded));
  if (data == nullptr) {
    throw std::bad_alloc();
  }
#if defined(__linux__)
  if (alignment == kLargePage) {
    madvise(data, rounded, MADV_HUGEPAGE);
  }
#endif
  return {data, [](std::uint8_t* memory) { std::free(memory); }};
}

}  // namespace

AlignedBytes::AlignedBytes(std::size_t size) {
  if (size < kSmallBytes || size > kSharedBytes) {
    data_ = allocate(size);
    return;
  }
  static std::mutex mutex;
  static std::shared_ptr<std::uint8_t> shared;
  static std::size_t used = kSharedBytes;
  const std::lock_guard lock(mutex);
  const std::size_t rounded = round_up(size, kAlignment);
  if (kSharedBytes - used < rounded) {
    shared = allocate(kSharedBytes);
    used = 0;
  }
  data_ = std::shared_ptr<std::uint8_t>(shared, shared.get() + used);
  used += rounded;
}

void run_linear(Worker& worker, const LinearKernels& kernels, const PackedLinear& linear, const float* x,
                std::ptrdiff_t stride, int rows, const Epilogue& epilogue, std::uint8_t* activations,
                std::uint8_t* scratch, std::size_t scratch_bytes) {
  const LinearShape& shape = linear.shape;
  const int step = round_up(8, kernels.quantise_step);
  const int pieces = ceil_div(rows, step);
  for (int piece = worker.claim(pieces); piece >= 0; piece = worker.claim(pieces)) {
    kernels.quantise(shape, x, stride, rows, piece * step, std::min(rows, (piece + 1) * step), activations);
  }
  worker.barrier();
  std::uint8_t* own = scratch + scratch_bytes * static_cast<std::size_t>(worker.index());
  const int items = kernels.num_items(shape, rows, worker.count());
  for (int item = worker.claim(items); item >= 0; item = worker.claim(items)) {
    kernels.run(linear, activations, rows, worker.count(), item, epilogue, own);
  }
}

void bind_linear(nb::module_& module) {
  module.def(
      "linear_layout", [] { return std::string(linear_kernels(current_isa()).layout); },
      "Names how the current instruction set lays packed weights out.");
  nb::class_<OwnedLinear>(module, "PackedLinear")
      .def("__init__", pack_matrix, nb::arg("weights").noconvert(), nb::arg("kind"), nb::arg("group"), nb::arg("gate"),
           nb::arg("pool"), "Packs (N, K) float32 weights for the current instruction set.")
      .def_static("from_data", from_data, nb::arg("num_outputs"), nb::arg("num_inputs"), nb::arg("kind"),
                  nb::arg("group"), nb::arg("gate"), nb::arg("data"),
                  "Takes bytes that `data` gave under the same layout; keeps the array if it is aligned, else copies.")
      .def_prop_ro("nbytes", [](const OwnedLinear& self) { return self.bytes; })
      .def_prop_ro("layout", [](const OwnedLinear& self) { return std::string(self.kernels->layout); })
      .def_prop_ro("num_outputs", [](const OwnedLinear& self) { return self.packed.shape.num_outputs; })
      .def_prop_ro("num_inputs", [](const OwnedLinear& self) { return self.packed.shape.num_inputs; })
      .def_prop_ro("activation_limit",
                   [](const OwnedLinear& self) { return self.kernels->activation_limit(self.packed.shape); })
      .def(
          "data",
          [](nb::handle self) {
            const auto& linear = nb::cast<const OwnedLinear&>(self);
            return nb::ndarray<nb::numpy, const std::uint8_t>(linear.packed.data, {linear.bytes}, self);
          },
          "The packed bytes, read-only.")
      .def(
          "unpack",
          [](const OwnedLinear& self) {
            const LinearShape& shape = self.packed.shape;
            nb::object out =
                new_matrix(static_cast<std::size_t>(shape.num_outputs), static_cast<std::size_t>(shape.num_inputs));
            self.kernels->unpack(shape, self.packed.data, nb::cast<FloatOut>(out).data());
            return out;
          },
          "The values that the packed weights stand for, (N, K) float32.");
  module.def("linear", linear, nb::arg("pool"), nb::arg("weights"), nb::arg("x").noconvert(),
             nb::arg("bias").noconvert().none() = nb::none(), nb::arg("residual").noconvert().none() = nb::none(),
             nb::arg("out").none() = nb::none(),
             "One linear layer: (T, K) float32 to (T, N), or (T, N / 2) with a gate.");
  module.def("time_linear", time_linear, nb::arg("pool"), nb::arg("matrices"), nb::arg("rows"), nb::arg("repeats"),
             "Seconds per call, measured without Python in between.");
}

}  // namespace kvist
