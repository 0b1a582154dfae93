// `kvist._native.draw_tokens`: checks what Python hands over, and draws on the pool's threads.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "kvist/isa.h"
#include "kvist/pool.h"
#include "kvist/sampling.h"

namespace nb = nanobind;

namespace kvist {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
// Row, its largest logit, temperature, top_k, top_p, min_p, seed, output index.
using Draw = std::tuple<std::int64_t, float, float, std::int64_t, double, float, std::uint64_t, std::uint64_t>;

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument("[native] " + message); }

struct Row {
  const float* logits;
  float largest;
  DrawSpec spec;
};

Row row_of(const Logits& logits, const Draw& draw) {
  const auto& [row, largest, temperature, top_k, top_p, min_p, seed, output_index] = draw;
  if (row < 0 || row >= static_cast<std::int64_t>(logits.shape(0))) {
    refuse("expected a row of " + std::to_string(logits.shape(0)) + ", received " + std::to_string(row));
  }
  if (!std::isfinite(largest) || !(temperature > 0.0F) || !std::isfinite(temperature) || top_k < 0 ||
      !(top_p > 0.0 && top_p <= 1.0) || !(min_p >= 0.0F && min_p <= 1.0F)) {
    refuse(
        "expected a finite largest logit, temperature > 0, top_k >= 0, top_p in (0, 1] and min_p in [0, 1] for row " +
        std::to_string(row));
  }
  return {logits.data() + row * static_cast<std::int64_t>(logits.shape(1)), largest,
          DrawSpec{temperature, top_k, top_p, min_p, seed, output_index}};
}

std::vector<std::int32_t> draw_tokens(Pool& pool, const Logits& logits, const std::vector<Draw>& draws) {
  if (logits.shape(1) < 1 || logits.shape(1) > std::size_t{1} << 30) {
    refuse("expected 1 to 2^30 logits in a row, received " + std::to_string(logits.shape(1)));
  }
  std::vector<Row> rows;
  rows.reserve(draws.size());
  for (const Draw& draw : draws) {
    rows.push_back(row_of(logits, draw));
  }
  std::vector<std::int32_t> tokens(rows.size());
  const SamplingKernels& kernels = sampling_kernels(current_isa());
  const int num_rows = static_cast<int>(rows.size());
  const int num_logits = static_cast<int>(logits.shape(1));
  const nb::gil_scoped_release release;
  // Here, where it may throw: a thread of the pool must not.
  thread_local std::vector<DrawScratch> scratches;
  if (scratches.size() < static_cast<std::size_t>(pool.num_threads())) {
    scratches.resize(static_cast<std::size_t>(pool.num_threads()));
  }
  for (DrawScratch& scratch : scratches) {
    scratch.at_least(num_logits);
  }
  DrawScratch* const first = scratches.data();
  const auto draw = [&](int i, int thread) {
    const Row& row = rows[static_cast<std::size_t>(i)];
    tokens[static_cast<std::size_t>(i)] =
        draw_token(kernels, row.logits, num_logits, row.largest, row.spec, first[thread]);
  };
  if (num_rows == 1) {
    draw(0, 0);  // waking the other threads would take longer
    return tokens;
  }
  pool.run([&](Worker& worker) {
    for (int i = worker.claim(num_rows); i >= 0; i = worker.claim(num_rows)) {
      draw(i, worker.index());
    }
  });
  return tokens;
}

}  // namespace

void bind_sampling(nb::module_& module) {
  module.def("draw_tokens", draw_tokens, nb::arg("pool"), nb::arg("logits"), nb::arg("draws"),
             "A token for each draw: (row, largest logit, temperature, top_k, top_p, min_p, seed, output_index). The "
             "largest logit must be finite and no logit of the row NaN.");
  module.def("uniform_draw", uniform_draw, nb::arg("seed"), nb::arg("output_index"), "The draw in [0, 1).");
}

}  // namespace kvist
