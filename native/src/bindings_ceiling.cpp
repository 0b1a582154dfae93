// The ceilings for Python: rates of all threads of a pool together, the best of several short runs.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "kvist/ceiling.h"
#include "kvist/common.h"
#include "kvist/pool.h"

namespace nb = nanobind;

namespace kvist {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kLargePage = std::size_t{2} << 20;
constexpr std::size_t kStep = 256;  // what `read` reads at a time
// Longer than starting the threads takes by far, short enough that some run falls between two interruptions.
constexpr double kRunSeconds = 0.005;

struct Free {
  void operator()(std::uint8_t* data) const { std::free(data); }
};

// Memory as the kernels' weights have it: touched, on large pages where there are some.
std::unique_ptr<std::uint8_t, Free> touched_bytes(std::size_t bytes) {
  std::unique_ptr<std::uint8_t, Free> data(
      static_cast<std::uint8_t*>(std::aligned_alloc(kLargePage, round_up(bytes, kLargePage))));
  if (data == nullptr) {
    throw std::bad_alloc();
  }
#if defined(__linux__)
  madvise(data.get(), round_up(bytes, kLargePage), MADV_HUGEPAGE);
#endif
  std::memset(data.get(), 1, bytes);
  return data;
}

// Returns the seconds that all threads together take for `body`, from one barrier to the next.
template <typename Body>
double time_all(Pool& pool, std::atomic<std::uint64_t>& sink, const Body& body) {
  Clock::time_point start;
  Clock::time_point end;
  pool.run([&](Worker& worker) {
    worker.barrier();
    if (worker.index() == 0) {
      start = Clock::now();
    }
    sink.fetch_add(body(worker), std::memory_order_relaxed);
    worker.barrier();
    if (worker.index() == 0) {
      end = Clock::now();
    }
  });
  return std::chrono::duration<double>(end - start).count();
}

// Returns the best rate: amounts a second. `body(worker, times)` does `amount` times `times`, all threads together.
template <typename Body>
double best_rate(Pool& pool, double amount, double seconds, const Body& body) {
  std::atomic<std::uint64_t> sink{0};
  std::int64_t times = 1;
  double best = 0.0;
  const Clock::time_point start = Clock::now();
  do {
    const double taken = time_all(pool, sink, [&](Worker& worker) { return body(worker, times); });
    best = std::max(best, amount * static_cast<double>(times) / std::max(taken, 1e-9));
    if (taken < kRunSeconds) {
      times *= 2;
    }
  } while (std::chrono::duration<double>(Clock::now() - start).count() < seconds);
  return best;
}

double read_bandwidth(Pool& pool, const CeilingKernels& kernels, std::size_t bytes, double seconds) {
  const auto threads = static_cast<std::size_t>(pool.num_threads());
  const std::size_t share = round_up(ceil_div(bytes, threads), kStep);
  const auto data = touched_bytes(share * threads);
  double best = 0.0;
  for (const auto read : {kernels.read, kernels.read_prefetching}) {
    const double rate =
        best_rate(pool, static_cast<double>(share * threads), seconds / 2, [&](Worker& worker, std::int64_t times) {
          const std::uint8_t* own = data.get() + share * static_cast<std::size_t>(worker.index());
          std::uint64_t sum = 0;
          for (std::int64_t i = 0; i < times; ++i) {
            sum += read(own, share);
          }
          return sum;
        });
    best = std::max(best, rate);
  }
  return best;
}

double measure_ceiling(Pool& pool, const std::string& what, std::size_t bytes, double seconds) {
  const CeilingKernels& kernels = ceiling_kernels(current_isa());
  if (!(seconds > 0.0) || seconds > 60.0) {
    throw std::invalid_argument("[ceiling] expected seconds in (0, 60], received " + std::to_string(seconds));
  }
  if (what == "read") {
    if (bytes < kStep || bytes > std::size_t{1} << 36) {
      throw std::invalid_argument("[ceiling] a read needs 256 to 2^36 bytes, received " + std::to_string(bytes));
    }
    const nb::gil_scoped_release release;
    return read_bandwidth(pool, kernels, bytes, seconds);
  }
  const CeilingKernels::Loop* loop = what == "int8_madd"      ? &kernels.int8_madd
                                     : what == "int8_maddubs" ? &kernels.int8_maddubs
                                     : what == "f32_fma"      ? &kernels.f32_fma
                                                              : nullptr;
  if (loop == nullptr) {
    throw std::invalid_argument("[ceiling] expected read, int8_madd, int8_maddubs or f32_fma, received '" + what + "'");
  }
  const nb::gil_scoped_release release;
  const double amount = static_cast<double>(loop->operations) * pool.num_threads();
  return best_rate(pool, amount, seconds, [&](Worker&, std::int64_t times) { return loop->run(times); });
}

}  // namespace

void bind_ceiling(nb::module_& module) {
  module.def("measure_ceiling", measure_ceiling, nb::arg("pool"), nb::arg("what"), nb::arg("bytes") = 0,
             nb::arg("seconds") = 0.1,
             "Bytes read (`read`, over a buffer of that size) or operations done a second, all threads together.");
}

}  // namespace kvist
