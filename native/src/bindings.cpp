// The Python module `kvist._native`: what the CPU can run, the pool, and the parts.
//
// Every function checks its arguments and raises; the kernels behind it take them as they are.

#include "bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "kvist/isa.h"
#include "kvist/pool.h"
#include "kvist/self_check.h"

namespace nb = nanobind;

NB_MODULE(_native, module) {
  nb::set_leak_warnings(false);
  module.def("isas", [] {
    std::vector<std::string> names;
    for (const kvist::Isa isa : kvist::available_isas()) {
      names.emplace_back(kvist::isa_name(isa));
    }
    return names;
  });
  module.def("isa", [] { return std::string(kvist::isa_name(kvist::current_isa())); });
  module.def("force_isa", [](const std::string& name) { kvist::force_isa(name); }, nb::arg("name"));
  module.def(
      "self_check",
      [](const std::string& name, const std::string& falsify) {
        const kvist::Isa isa = kvist::find_isa(name);
        if (!falsify.empty() && falsify != "linear" && falsify != "attention" && falsify != "spans" &&
            falsify != "codec" && falsify != "span codec" && falsify != "rowwise") {
          throw std::invalid_argument(
              "[native] falsify must be linear, attention, spans, codec, span codec or rowwise, received '" + falsify +
              "'");
        }
        const nb::gil_scoped_release release;
        return kvist::self_check(isa, falsify);
      },
      nb::arg("name"), nb::arg("falsify") = "",
      "Compares an instruction set's kernels with the portable ones: what differs, or nothing. `falsify` changes the "
      "results of one part first, for tests.");
  nb::class_<kvist::Pool>(module, "Pool")
      .def(
          "__init__",
          [](kvist::Pool* self, int num_threads) {
            if (num_threads < 1 || num_threads > 1024) {
              throw std::invalid_argument("[native] expected 1 to 1024 threads, received " +
                                          std::to_string(num_threads));
            }
            new (self) kvist::Pool(num_threads);
          },
          nb::arg("num_threads"))
      .def_prop_ro("num_threads", &kvist::Pool::num_threads)
      .def("wake", &kvist::Pool::wake, "Wakes threads that sleep, since a run is near; returns at once.")
      .def(
          "check",
          [](kvist::Pool& pool, int phases, int items) {
            // Every item of every phase claimed exactly once: the sum a test knows.
            std::atomic<long long> sum{0};
            pool.run([&](kvist::Worker& worker) {
              for (int phase = 0; phase < phases; ++phase) {
                for (int item = worker.claim(items); item >= 0; item = worker.claim(items)) {
                  sum.fetch_add(item + 1, std::memory_order_relaxed);
                }
                worker.barrier();
              }
            });
            return sum.load();
          },
          nb::arg("phases"), nb::arg("items"), nb::call_guard<nb::gil_scoped_release>());
  kvist::bind_linear(module);
  kvist::bind_attention(module);
  kvist::bind_kv(module);
  kvist::bind_sampling(module);
  kvist::bind_model(module);
  kvist::bind_ceiling(module);
}
