// Attention and the K/V formats for Python: for tests and for measurements. A model's step calls the C++ side itself.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "bindings_kv.h"
#include "kvist/attention.h"
#include "kvist/common.h"
#include "kvist/kv_codec.h"
#include "kvist/pool.h"

namespace nb = nanobind;

namespace kvist {
namespace {

using Queries = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Arena = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Integers = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<nb::numpy, float, nb::ndim<3>>;
using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<3>>;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("[attention] " + what); }

void check_head_dim(std::int64_t head_dim) {
  if (head_dim < 8 || head_dim > 256 || head_dim % 8 != 0) {
    refuse("head_dim must be a multiple of 8 up to 256, received " + std::to_string(head_dim));
  }
}

struct AlignedDelete {
  void operator()(std::uint8_t* data) const { ::operator delete[](data, std::align_val_t{kAlignment}); }
};

using Aligned = std::unique_ptr<std::uint8_t[], AlignedDelete>;

Aligned allocate(std::size_t bytes) {
  return Aligned(
      static_cast<std::uint8_t*>(::operator new[](std::max<std::size_t>(bytes, 1), std::align_val_t{kAlignment})));
}

// A step whose parts fit together. Holds pointers into the arrays it was made from.
struct Step {
  AttentionShape shape;
  AttentionBatch batch;
  int num_layers;
};

// Tables by block id, both or none, and what int4 and int3 blocks need.
struct Tables {
  const std::optional<BlockOffsets>& offsets;
  const std::optional<BlockCodecs>& codecs;
  const OwnedTransforms* transforms;
};

Step check_step(std::int64_t num_queries, std::int64_t num_heads, std::int64_t head_dim, std::int64_t num_blocks,
                std::int64_t block_bytes, const std::string& codec, int num_layers, int num_kv_heads, int block_size,
                const Integers& query_starts, const Integers& context_lens, const Integers& table_starts,
                const Integers& block_ids, float scale, int window, float softcap, const Tables& places_by_id) {
  check_head_dim(head_dim);
  if (num_layers < 1 || num_kv_heads < 1 || block_size < 1) {
    refuse("expected num_layers, num_kv_heads and block_size of at least 1, received " + std::to_string(num_layers) +
           ", " + std::to_string(num_kv_heads) + " and " + std::to_string(block_size));
  }
  if (num_heads < 1 || num_heads % num_kv_heads != 0) {
    refuse("the number of heads must be a multiple of num_kv_heads=" + std::to_string(num_kv_heads) + ", received " +
           std::to_string(num_heads));
  }
  if (!(scale > 0.0F) || !(scale < std::numeric_limits<float>::infinity()) || !(softcap >= 0.0F) || window < 0) {
    refuse("expected a finite scale above 0, and a softcap and a window of at least 0");
  }
  Step step{};
  step.num_layers = num_layers;
  KvLayout& layout = step.shape.layout;
  layout.codec = kv_codec_from(codec);
  layout.num_kv_heads = num_kv_heads;
  layout.block_size = block_size;
  layout.head_dim = static_cast<int>(head_dim);
  layout.row_bytes = kv_row_bytes(layout.codec, layout.head_dim);
  layout.block_stride = block_bytes;
  const BlockPlaces places(layout, num_layers, num_blocks, block_bytes, places_by_id.offsets, places_by_id.codecs,
                           places_by_id.transforms);
  step.shape.num_heads = static_cast<int>(num_heads);
  step.shape.scale = scale;
  step.shape.softcap = softcap;
  step.shape.window = window;
  step.shape.transforms = places.transforms();

  const std::size_t num_sequences = context_lens.shape(0);
  if (query_starts.shape(0) != num_sequences + 1 || table_starts.shape(0) != num_sequences + 1) {
    refuse("expected " + std::to_string(num_sequences + 1) + " query_starts and table_starts for " +
           std::to_string(num_sequences) + " context_lens, received " + std::to_string(query_starts.shape(0)) +
           " and " + std::to_string(table_starts.shape(0)));
  }
  const std::int32_t* const queries = query_starts.data();
  const std::int32_t* const tables = table_starts.data();
  if (queries[0] != 0 || queries[num_sequences] != num_queries) {
    refuse("query_starts must go from 0 to the number of query rows, " + std::to_string(num_queries));
  }
  if (tables[0] != 0 || tables[num_sequences] != static_cast<std::int64_t>(block_ids.shape(0))) {
    refuse("table_starts must go from 0 to the number of block_ids, " + std::to_string(block_ids.shape(0)));
  }
  for (std::size_t s = 0; s < num_sequences; ++s) {
    const std::int64_t rows = std::int64_t{queries[s + 1]} - queries[s];
    const std::int64_t context_len = context_lens.data()[s];
    const std::int64_t blocks = std::int64_t{tables[s + 1]} - tables[s];
    if (rows < 0 || context_len < rows || blocks < 0 || blocks * block_size < context_len) {
      refuse("sequence " + std::to_string(s) + " has " + std::to_string(rows) + " query rows, " +
             std::to_string(context_len) + " positions and " + std::to_string(blocks) + " blocks of " +
             std::to_string(block_size) + ": expected rows <= positions <= slots");
    }
  }
  for (std::size_t i = 0; i < block_ids.shape(0); ++i) {
    places.check_readable(block_ids.data()[i]);
  }
  step.batch = AttentionBatch{static_cast<int>(num_sequences),
                              queries,
                              context_lens.data(),
                              tables,
                              block_ids.data(),
                              places.offsets(),
                              places.codecs()};
  return step;
}

void run_step(Pool& pool, const AttentionPlan& plan, const std::uint8_t* arena, int layer, const AttentionRows& rows,
              const std::vector<Aligned>& scratch) {
  pool.run([&](Worker& worker) {
    std::uint8_t* const mine = scratch[static_cast<std::size_t>(worker.index())].get();
    for (int item = worker.claim(plan.num_items()); item >= 0; item = worker.claim(plan.num_items())) {
      plan.run(item, arena, layer, rows, mine);
    }
    if (plan.num_merges() == 0) {
      return;
    }
    worker.barrier();
    for (int index = worker.claim(plan.num_merges()); index >= 0; index = worker.claim(plan.num_merges())) {
      plan.merge(index, rows);
    }
  });
}

std::vector<Aligned> allocate_scratch(const Pool& pool, const AttentionPlan& plan) {
  std::vector<Aligned> scratch;
  for (int i = 0; i < pool.num_threads(); ++i) {
    scratch.push_back(allocate(plan.scratch_bytes()));
  }
  return scratch;
}

template <typename Array, typename Value>
Array make_array(std::size_t a, std::size_t b, std::size_t c, Value*& data) {
  auto* const owned = new Value[std::max<std::size_t>(a * b * c, 1)];
  data = owned;
  const nb::capsule owner(owned, [](void* memory) noexcept { delete[] static_cast<Value*>(memory); });
  return Array(owned, {a, b, c}, owner);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

void bind_attention(nb::module_& module) {
  module.def(
      "attention",
      [](Pool& pool, const Queries& queries, const Arena& arena, const std::string& codec, int num_layers, int layer,
         int num_kv_heads, int block_size, const Integers& query_starts, const Integers& context_lens,
         const Integers& table_starts, const Integers& block_ids, float scale, int window, float softcap,
         const std::optional<BlockOffsets>& offsets, const std::optional<BlockCodecs>& codecs,
         const OwnedTransforms* transforms) {
        const std::size_t num_heads = queries.shape(1);
        const std::size_t head_dim = queries.shape(2);
        const Step step = check_step(static_cast<std::int64_t>(queries.shape(0)), static_cast<std::int64_t>(num_heads),
                                     static_cast<std::int64_t>(head_dim), static_cast<std::int64_t>(arena.shape(0)),
                                     static_cast<std::int64_t>(arena.shape(1)), codec, num_layers, num_kv_heads,
                                     block_size, query_starts, context_lens, table_starts, block_ids, scale, window,
                                     softcap, {offsets, codecs, transforms});
        if (layer < 0 || layer >= num_layers) {
          refuse("layer must be below num_layers=" + std::to_string(num_layers) + ", received " +
                 std::to_string(layer));
        }
        float* out = nullptr;
        auto result = make_array<Floats>(queries.shape(0), num_heads, head_dim, out);
        const auto stride = static_cast<std::ptrdiff_t>(num_heads * head_dim);
        {
          const nb::gil_scoped_release released;
          AttentionPlan plan;
          plan.assign(current_isa(), step.shape, step.batch, pool.num_threads());
          run_step(pool, plan, arena.data(), layer, AttentionRows{queries.data(), stride, out, stride},
                   allocate_scratch(pool, plan));
        }
        return result;
      },
      nb::arg("pool"), nb::arg("queries").noconvert(), nb::arg("arena").noconvert(), nb::kw_only(), nb::arg("codec"),
      nb::arg("num_layers"), nb::arg("layer"), nb::arg("num_kv_heads"), nb::arg("block_size"),
      nb::arg("query_starts").noconvert(), nb::arg("context_lens").noconvert(), nb::arg("table_starts").noconvert(),
      nb::arg("block_ids").noconvert(), nb::arg("scale"), nb::arg("window") = 0, nb::arg("softcap") = 0.0F,
      nb::arg("offsets").noconvert() = nb::none(), nb::arg("codecs").noconvert() = nb::none(),
      nb::arg("transforms") = nb::none());

  module.def(
      "attention_plan_info",
      [](int num_threads, int num_heads, int head_dim, int num_blocks, const std::string& codec, int num_kv_heads,
         int block_size, const Integers& query_starts, const Integers& context_lens, const Integers& table_starts,
         const Integers& block_ids, int window, int repetitions, const std::optional<BlockOffsets>& offsets,
         const std::optional<BlockCodecs>& codecs, const OwnedTransforms* transforms) {
        if (num_threads < 1 || repetitions < 1 || query_starts.shape(0) < 1) {
          refuse("expected num_threads and repetitions of at least 1, and a query_starts that is not empty");
        }
        check_head_dim(head_dim);
        const std::int64_t block_bytes = kv_layer_bytes(
            with_codec({kv_codec_from(codec), num_kv_heads, block_size, head_dim, 0, 0}, kv_codec_from(codec)));
        const Step step = check_step(query_starts.data()[query_starts.shape(0) - 1], num_heads, head_dim, num_blocks,
                                     block_bytes, codec, 1, num_kv_heads, block_size, query_starts, context_lens,
                                     table_starts, block_ids, 1.0F, window, 0.0F, {offsets, codecs, transforms});
        AttentionPlan plan;
        double seconds = std::numeric_limits<double>::infinity();
        for (int i = 0; i < repetitions; ++i) {
          const auto start = std::chrono::steady_clock::now();
          plan.assign(current_isa(), step.shape, step.batch, num_threads);
          seconds = std::min(seconds, seconds_since(start));
        }
        const AttentionPlanInfo info = plan.info();
        nb::dict result;
        result["num_items"] = info.num_items;
        result["num_merges"] = info.num_merges;
        result["num_shared"] = info.num_shared;
        result["blocks_read"] = info.blocks_read;
        result["scratch_bytes"] = plan.scratch_bytes();
        result["seconds"] = seconds;
        return result;
      },
      nb::kw_only(), nb::arg("num_threads"), nb::arg("num_heads"), nb::arg("head_dim"), nb::arg("num_blocks"),
      nb::arg("codec"), nb::arg("num_kv_heads"), nb::arg("block_size"), nb::arg("query_starts").noconvert(),
      nb::arg("context_lens").noconvert(), nb::arg("table_starts").noconvert(), nb::arg("block_ids").noconvert(),
      nb::arg("window") = 0, nb::arg("repetitions") = 1, nb::arg("offsets").noconvert() = nb::none(),
      nb::arg("codecs").noconvert() = nb::none(), nb::arg("transforms") = nb::none());

  module.def(
      "time_attention",
      [](Pool& pool, const Queries& queries, const Arena& arena, const std::string& codec, int num_layers,
         int num_kv_heads, int block_size, const Integers& query_starts, const Integers& context_lens,
         const Integers& table_starts, const Integers& block_ids, float scale, int window, float softcap,
         int repetitions, const std::optional<BlockOffsets>& offsets, const std::optional<BlockCodecs>& codecs,
         const OwnedTransforms* transforms) {
        const std::size_t num_heads = queries.shape(1);
        const std::size_t head_dim = queries.shape(2);
        const Step step = check_step(static_cast<std::int64_t>(queries.shape(0)), static_cast<std::int64_t>(num_heads),
                                     static_cast<std::int64_t>(head_dim), static_cast<std::int64_t>(arena.shape(0)),
                                     static_cast<std::int64_t>(arena.shape(1)), codec, num_layers, num_kv_heads,
                                     block_size, query_starts, context_lens, table_starts, block_ids, scale, window,
                                     softcap, {offsets, codecs, transforms});
        const nb::gil_scoped_release released;
        std::vector<float> out(queries.size());
        const auto stride = static_cast<std::ptrdiff_t>(num_heads * head_dim);
        AttentionPlan plan;
        plan.assign(current_isa(), step.shape, step.batch, pool.num_threads());
        const std::vector<Aligned> scratch = allocate_scratch(pool, plan);
        std::vector<double> seconds;
        for (int i = 0; i < repetitions; ++i) {
          // Another layer each time: with enough of them K and V come from memory, with one from a cache.
          const auto start = std::chrono::steady_clock::now();
          run_step(pool, plan, arena.data(), i % num_layers, AttentionRows{queries.data(), stride, out.data(), stride},
                   scratch);
          seconds.push_back(seconds_since(start));
        }
        return seconds;
      },
      nb::arg("pool"), nb::arg("queries").noconvert(), nb::arg("arena").noconvert(), nb::kw_only(), nb::arg("codec"),
      nb::arg("num_layers"), nb::arg("num_kv_heads"), nb::arg("block_size"), nb::arg("query_starts").noconvert(),
      nb::arg("context_lens").noconvert(), nb::arg("table_starts").noconvert(), nb::arg("block_ids").noconvert(),
      nb::arg("scale"), nb::arg("window") = 0, nb::arg("softcap") = 0.0F, nb::arg("repetitions") = 1,
      nb::arg("offsets").noconvert() = nb::none(), nb::arg("codecs").noconvert() = nb::none(),
      nb::arg("transforms") = nb::none());

  module.def(
      "encode_kv",
      [](const std::string& codec, const Queries& x) {
        const auto head_dim = static_cast<int>(x.shape(2));
        check_head_dim(head_dim);
        const KvCodec format = kv_row_codec_from(codec);
        const int row_bytes = kv_row_bytes(format, head_dim);
        std::uint8_t* out = nullptr;
        auto result = make_array<Bytes>(x.shape(0), x.shape(1), static_cast<std::size_t>(row_bytes), out);
        const EncodeKvRow encode = encode_kv_row(current_isa());
        bool finite = true;
        for (std::size_t row = 0; row < x.shape(0) * x.shape(1); ++row) {
          finite = encode(format, head_dim, x.data() + row * head_dim, out + row * row_bytes) && finite;
        }
        if (!finite) {
          throw std::domain_error("[encode_kv] a value is not finite in the codec '" + codec + "'");
        }
        return result;
      },
      nb::arg("codec"), nb::arg("x").noconvert());

  module.def(
      "encode_kv_keys",
      [](const std::string& codec, const Queries& x, const Queries& queries) {
        const auto head_dim = static_cast<int>(x.shape(2));
        check_head_dim(head_dim);
        const KvCodec format = kv_row_codec_from(codec);
        const std::size_t num_keys = x.shape(1);
        if (queries.shape(0) != x.shape(0) || queries.shape(2) != x.shape(2) || num_keys == 0 ||
            queries.shape(1) == 0 || queries.shape(1) % num_keys != 0) {
          throw std::invalid_argument(
              "[encode_kv_keys] expected queries (T, H, D) of keys (T, K, D), H a multiple of K");
        }
        const auto group = static_cast<int>(queries.shape(1) / num_keys);
        const int row_bytes = kv_row_bytes(format, head_dim);
        std::uint8_t* out = nullptr;
        auto result = make_array<Bytes>(x.shape(0), num_keys, static_cast<std::size_t>(row_bytes), out);
        const EncodeKvKey encode = encode_kv_key(current_isa());
        bool finite = true;
        for (std::size_t row = 0; row < x.shape(0) * num_keys; ++row) {
          finite = encode(format, head_dim, group, x.data() + row * head_dim, queries.data() + row * group * head_dim,
                          out + row * row_bytes) &&
                   finite;
        }
        if (!finite) {
          throw std::domain_error("[encode_kv_keys] a value is not finite in the codec '" + codec + "'");
        }
        return result;
      },
      nb::arg("codec"), nb::arg("x").noconvert(), nb::arg("queries").noconvert());
}

}  // namespace kvist
