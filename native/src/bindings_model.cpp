// `kvist._native.Model`: checks what Python hands over, keeps it alive, and runs steps without the interpreter's lock.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "bindings_kv.h"
#include "bindings_linear.h"
#include "kvist/common.h"
#include "kvist/model.h"

namespace nb = nanobind;

namespace kvist {
namespace {

template <typename T, int kRank>
using Array = nb::ndarray<const T, nb::ndim<kRank>, nb::c_contig, nb::device::cpu>;
template <typename T, int kRank>
using MutableArray = nb::ndarray<T, nb::ndim<kRank>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument("[native] " + message); }

void check(bool holds, const char* message) {
  if (!holds) {
    refuse(message);
  }
}

// For where a step does not pass: the message is built whether it is needed or not.
void check(bool holds, const std::string& message) { check(holds, message.c_str()); }

// The array that is behind a Python object, found once for all steps that get the same object: asking numpy for it takes
// longer than all else between the call of a step and its first kernel.
template <typename A>
class KeptArray {
 public:
  const A& of(const nb::handle object, const char* expected) {
    if (!object.is(object_)) {
      // Not converted: the kernels write into the caller's memory, not into a copy.
      if (!nb::try_cast(object, array_, false)) {
        object_.reset();
        throw nb::type_error(expected);
      }
      object_ = nb::borrow(object);
    }
    return array_;
  }

 private:
  nb::object object_;
  A array_;
};

// A model together with the Python objects that own its weights.
class BoundModel {
 public:
  BoundModel(const nb::dict& shape, const nb::list& ropes, const nb::list& layers, const nb::object& embedding,
             const nb::object& final_norm, const nb::object& head) {
    const auto integer = [&](const char* name) { return nb::cast<int>(shape[name]); };
    const auto real = [&](const char* name) { return nb::cast<float>(shape[name]); };
    shape_ = {integer("hidden"),       integer("num_heads"),    integer("num_kv_heads"),   integer("head_dim"),
              integer("kv_head_dim"),  integer("intermediate"), integer("vocab"),          real("norm_eps"),
              real("embedding_scale"), real("attention_scale"), real("attention_softcap"), real("logit_softcap")};
    check(shape_.hidden > 0 && shape_.num_heads > 0 && shape_.num_kv_heads > 0 && shape_.head_dim > 0 &&
              shape_.intermediate > 0 && shape_.vocab > 0,
          "every dimension of a model must be at least 1");
    check(shape_.num_heads % shape_.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads");
    check(shape_.head_dim % 8 == 0 && shape_.head_dim <= 256, "head_dim must be a multiple of 8, at most 256");
    check(shape_.kv_head_dim % 8 == 0 && shape_.kv_head_dim > 0 && shape_.kv_head_dim <= shape_.head_dim,
          "kv_head_dim must be a multiple of 8, at most head_dim");
    std::vector<RotarySpec> rotary;
    for (const nb::handle item : ropes) {
      const auto rope = nb::cast<std::pair<std::vector<float>, float>>(item);
      check(rope.first.size() == static_cast<std::size_t>(shape_.head_dim / 2),
            "a rotary embedding needs head_dim / 2 frequencies");
      rotary.push_back({rope.first, rope.second});
    }
    ModelWeights weights;
    for (const nb::handle item : layers) {
      weights.layers.push_back(read_layer(nb::cast<nb::dict>(item), static_cast<int>(rotary.size())));
    }
    check(!weights.layers.empty(), "a model needs at least one layer");
    num_layers_ = static_cast<int>(weights.layers.size());
    const auto table = nb::cast<Array<std::uint16_t, 2>>(embedding);
    check(table.shape(0) == static_cast<std::size_t>(shape_.vocab) &&
              table.shape(1) == static_cast<std::size_t>(shape_.hidden),
          "the embedding must be (vocab, hidden)");
    weights.embedding = table.data();
    keep_.append(embedding);
    weights.final_norm = vector(final_norm, shape_.hidden, "final_norm");
    weights.head = linear(head, shape_.hidden, shape_.vocab, Gate::kNone, "head");
    model_ = std::make_unique<Model>(shape_, std::move(rotary), std::move(weights), current_isa());
  }

  // sequences: (first position, token ids, block table, of how many of the last tokens the logits are wanted), each.
  // codec: of the blocks that the step writes, and of all blocks where there are no offsets and codecs by block id.
  // transforms: needed where blocks are int4 or int3. meanwhile: None, or what this thread does once the others have
  // begun; what it raises is raised when the step is over.
  nb::tuple step(Pool& pool, const nb::object& arena_object, const std::string& codec, int block_size,
                 const nb::list& sequences, const nb::object& logits_object, const std::optional<BlockOffsets>& offsets,
                 const std::optional<BlockCodecs>& codecs, const OwnedTransforms* transforms,
                 const nb::object& meanwhile) {
    const auto& arena =
        arena_.of(arena_object, "[native] arena must be (blocks, bytes) uint8, contiguous and writable");
    const auto& logits =
        logits_.of(logits_object, "[native] logits must be (rows, vocab) float32, contiguous and writable");
    const KvLayout layout = layout_of(kv_row_codec_from(codec), block_size);
    const BlockPlaces places(layout, num_layers_, static_cast<std::int64_t>(arena.shape(0)),
                             static_cast<std::int64_t>(arena.shape(1)), offsets, codecs, transforms);
    token_ids_.clear();
    positions_.clear();
    slots_.clear();
    context_lens_.clear();
    block_ids_.clear();
    logit_rows_.clear();
    query_starts_.assign(1, 0);
    table_starts_.assign(1, 0);
    for (const nb::handle item : sequences) {
      add_sequence(nb::cast<nb::tuple>(item), block_size, places);
    }
    const int num_rows = query_starts_.back();
    const auto num_logits = static_cast<int>(logit_rows_.size());
    check(num_rows >= 1, "a step needs at least one token");
    check(logits.shape(0) >= logit_rows_.size() && logits.shape(1) == static_cast<std::size_t>(shape_.vocab),
          "logits must be (at least as many rows as asked for, vocab)");
    best_.resize(logit_rows_.size());
    is_finite_.assign(static_cast<std::size_t>(num_rows), 1);
    const StepInputs inputs = {{static_cast<int>(context_lens_.size()), query_starts_.data(), context_lens_.data(),
                                table_starts_.data(), block_ids_.data(), places.offsets(), places.codecs()},
                               num_rows,
                               token_ids_.data(),
                               positions_.data(),
                               slots_.data(),
                               arena.data(),
                               layout,
                               num_logits,
                               logit_rows_.data(),
                               places.transforms()};
    run(pool, inputs, {logits.data(), best_.data(), is_finite_.data()}, meanwhile);
    nb::list best_logits;
    nb::list best_tokens;
    for (const BestToken& best : best_) {
      best_logits.append(best.logit);
      best_tokens.append(best.token);
    }
    nb::list damaged;
    for (int row = 0; row < num_rows; ++row) {
      if (is_finite_[static_cast<std::size_t>(row)] == 0) {
        damaged.append(row);
      }
    }
    return nb::make_tuple(best_logits, best_tokens, damaged);
  }

  // Nanoseconds per phase since the model was made, by name.
  nb::dict phase_ns() const {
    nb::dict times;
    for (int phase = 0; phase < static_cast<int>(Phase::kCount); ++phase) {
      times[kPhaseNames[phase]] = model_->phase_ns()[static_cast<std::size_t>(phase)];
    }
    return times;
  }

 private:
  void run(Pool& pool, const StepInputs& inputs, const StepOutputs& outputs, const nb::object& meanwhile) {
    if (meanwhile.is_none()) {
      const nb::gil_scoped_release release;
      model_->step(pool, inputs, outputs, {});
      return;
    }
    // The lock is kept until `meanwhile` is done: whoever took it in between could keep this thread from the step.
    std::optional<nb::gil_scoped_release> release;
    std::exception_ptr error;
    model_->step(pool, inputs, outputs, [&] {
      try {
        meanwhile();
      } catch (...) {
        error = std::current_exception();
      }
      release.emplace();
    });
    release.reset();
    if (error) {
      std::rethrow_exception(error);
    }
  }

  void add_sequence(const nb::tuple& sequence, int block_size, const BlockPlaces& places) {
    check(sequence.size() == 4, "a sequence is (start, token ids, block table, number of logits)");
    const auto start = nb::cast<std::int64_t>(sequence[0]);
    const nb::tuple tokens = nb::cast<nb::tuple>(sequence[1]);
    const nb::tuple table = nb::cast<nb::tuple>(sequence[2]);
    const auto count = static_cast<std::int64_t>(tokens.size());
    const std::int64_t context_len = start + count;
    check(count >= 1 && start >= 0, "a sequence needs at least one token, at position 0 or later");
    check(context_len <= std::int64_t{1} << 30, "a context is longer than 2^30 positions");
    const std::int64_t needed = ceil_div(context_len, std::int64_t{block_size});
    if (needed > static_cast<std::int64_t>(table.size())) {
      refuse("a block table is too short for its context of " + std::to_string(context_len));
    }
    const std::size_t first_block = block_ids_.size();
    for (std::int64_t i = 0; i < needed; ++i) {
      const auto block = nb::cast<std::int64_t>(table[static_cast<std::size_t>(i)]);
      places.check_readable(block);
      block_ids_.push_back(static_cast<std::int32_t>(block));
    }
    for (std::int64_t i = start / block_size; i < needed; ++i) {
      places.check_writable(block_ids_[first_block + static_cast<std::size_t>(i)]);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const auto token = nb::cast<std::int64_t>(tokens[static_cast<std::size_t>(i)]);
      if (token < 0 || token >= shape_.vocab) {
        refuse("token id " + std::to_string(token) + " is outside the vocabulary of " + std::to_string(shape_.vocab));
      }
      const std::int64_t position = start + i;
      const std::int64_t block = block_ids_[first_block + static_cast<std::size_t>(position / block_size)];
      token_ids_.push_back(token);
      positions_.push_back(static_cast<std::int32_t>(position));
      slots_.push_back(block * block_size + position % block_size);
    }
    context_lens_.push_back(static_cast<std::int32_t>(context_len));
    query_starts_.push_back(static_cast<std::int32_t>(token_ids_.size()));
    table_starts_.push_back(static_cast<std::int32_t>(block_ids_.size()));
    const auto wanted = nb::cast<std::int64_t>(sequence[3]);
    check(wanted >= 0 && wanted <= count, "a sequence can have the logits of its own tokens only");
    for (std::int64_t row = query_starts_.back() - wanted; row < query_starts_.back(); ++row) {
      logit_rows_.push_back(static_cast<std::int32_t>(row));
    }
  }

  KvLayout layout_of(KvCodec codec, int block_size) const {
    check(block_size >= 1, "block_size must be at least 1");
    const int dim = shape_.kv_head_dim;
    KvLayout layout = {codec, shape_.num_kv_heads, block_size, dim, kv_row_bytes(codec, dim), 0};
    layout.block_stride = num_layers_ * kv_layer_bytes(layout);
    return layout;
  }

  const float* vector(const nb::handle object, int size, const char* name) {
    const auto array = nb::cast<Array<float, 1>>(object);
    check(array.shape(0) == static_cast<std::size_t>(size), std::string(name) + " must have " + std::to_string(size) +
                                                                " elements, received " +
                                                                std::to_string(array.shape(0)));
    keep_.append(object);
    return array.data();
  }

  const float* optional_vector(const nb::dict& layer, const char* name, int size) {
    const nb::object object = layer[name];
    return object.is_none() ? nullptr : vector(object, size, name);
  }

  // Of a layer: None, or queries, keys, values (K, D, r) and outputs (K, r, D).
  HeadReduction reduction(const nb::object& object) {
    if (object.is_none()) {
      check(shape_.kv_head_dim == shape_.head_dim, "every layer needs a reduction where kv_head_dim is not head_dim");
      return {};
    }
    const auto parts = nb::cast<nb::tuple>(object);
    check(parts.size() == 4, "a reduction has matrices of queries, keys, values and outputs");
    const auto dim = static_cast<std::size_t>(shape_.head_dim);
    const auto kept = static_cast<std::size_t>(shape_.kv_head_dim);
    const float* matrices[4];
    for (std::size_t part = 0; part < 4; ++part) {
      // Not converted: of what is kept alive the memory is read, not of a copy.
      const auto array = nb::cast<Array<float, 3>>(parts[part], false);
      const bool is_output = part == 3;
      check(array.shape(0) == static_cast<std::size_t>(shape_.num_kv_heads) &&
                array.shape(1) == (is_output ? kept : dim) && array.shape(2) == (is_output ? dim : kept),
            "a reduction must be (KV heads, head_dim, kv_head_dim), its outputs (KV heads, kv_head_dim, head_dim)");
      keep_.append(parts[part]);
      matrices[part] = array.data();
    }
    return {matrices[0], matrices[1], matrices[2], matrices[3]};
  }

  PackedLinear linear(const nb::handle object, int num_inputs, int num_outputs, Gate gate, const char* name) {
    const auto pair = nb::cast<nb::tuple>(object);
    const auto& owned = nb::cast<const OwnedLinear&>(pair[0]);
    PackedLinear packed = owned.packed;
    check(packed.shape.num_inputs == num_inputs && packed.shape.num_outputs == num_outputs,
          std::string(name) + " must be (" + std::to_string(num_outputs) + ", " + std::to_string(num_inputs) + ")");
    check((packed.shape.gate == Gate::kNone) == (gate == Gate::kNone), std::string(name) + " has the wrong gate");
    check(owned.kernels == &linear_kernels(current_isa()),
          std::string(name) + " was packed for another instruction set");
    packed.bias = pair[1].is_none() ? nullptr : vector(pair[1], num_outputs, name);
    keep_.append(object);
    return packed;
  }

  LayerWeights read_layer(const nb::dict& layer, int num_ropes) {
    LayerWeights weights;
    weights.rope = nb::cast<int>(layer["rope"]);
    weights.window = nb::cast<int>(layer["window"]);
    check(weights.rope >= -1 && weights.rope < num_ropes, "a layer names a rotary embedding that is not there");
    check(weights.window >= 0, "a window must be at least 1 key");
    const int query_width = shape_.num_heads * shape_.head_dim;
    const int qkv_width = (shape_.num_heads + 2 * shape_.num_kv_heads) * shape_.head_dim;
    weights.attention_norm = vector(layer["attention_norm"], shape_.hidden, "attention_norm");
    weights.qkv = linear(layer["qkv"], shape_.hidden, qkv_width, Gate::kNone, "qkv");
    weights.query_norm = optional_vector(layer, "query_norm", shape_.head_dim);
    weights.key_norm = optional_vector(layer, "key_norm", shape_.head_dim);
    check((weights.query_norm == nullptr) == (weights.key_norm == nullptr), "query_norm and key_norm go together");
    weights.output = linear(layer["output"], query_width, shape_.hidden, Gate::kNone, "output");
    weights.post_attention_norm = optional_vector(layer, "post_attention_norm", shape_.hidden);
    weights.mlp_norm = vector(layer["mlp_norm"], shape_.hidden, "mlp_norm");
    // Any gate will do here; which one it is was decided when the weights were packed.
    weights.gate_up = linear(layer["gate_up"], shape_.hidden, 2 * shape_.intermediate, Gate::kSilu, "gate_up");
    weights.down = linear(layer["down"], shape_.intermediate, shape_.hidden, Gate::kNone, "down");
    weights.post_mlp_norm = optional_vector(layer, "post_mlp_norm", shape_.hidden);
    weights.reduction = reduction(layer["reduction"]);
    return weights;
  }

  ModelShape shape_{};
  int num_layers_ = 0;
  nb::list keep_;
  std::unique_ptr<Model> model_;
  KeptArray<MutableArray<std::uint8_t, 2>> arena_;
  KeptArray<MutableArray<float, 2>> logits_;
  // The arrays of a step, kept so that the next one allocates nothing.
  std::vector<std::int64_t> token_ids_;
  std::vector<std::int32_t> query_starts_;
  std::vector<std::int32_t> context_lens_;
  std::vector<std::int32_t> table_starts_;
  std::vector<std::int32_t> block_ids_;
  std::vector<std::int32_t> logit_rows_;
  std::vector<std::int32_t> positions_;
  std::vector<std::int64_t> slots_;
  std::vector<BestToken> best_;
  std::vector<std::uint8_t> is_finite_;
};

}  // namespace

void bind_model(nb::module_& module) {
  nb::class_<BoundModel>(module, "Model")
      .def(nb::init<const nb::dict&, const nb::list&, const nb::list&, const nb::object&, const nb::object&,
                    const nb::object&>(),
           nb::arg("shape"), nb::arg("ropes"), nb::arg("layers"), nb::arg("embedding"), nb::arg("final_norm"),
           nb::arg("head"))
      .def("phase_ns", &BoundModel::phase_ns)
      .def("step", &BoundModel::step, nb::arg("pool"), nb::arg("arena"), nb::arg("codec"), nb::arg("block_size"),
           nb::arg("sequences"), nb::arg("logits"), nb::arg("offsets").noconvert() = nb::none(),
           nb::arg("codecs").noconvert() = nb::none(), nb::arg("transforms") = nb::none(),
           nb::arg("meanwhile") = nb::none());
}

}  // namespace kvist
