#include "kvist/model.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>

#include "aligned.h"
#include "kvist/common.h"
#include "kvist/kv_codec.h"

namespace kvist {
namespace {

// Norms and quantisation of so few rows take less than the barrier that sharing them would need.
constexpr int kOwnRows = 4;
// Rows that a thread claims at once in a row-wise phase: about ten microseconds.
constexpr int kRowChunk = 8;
// At most: see Run::operator().
constexpr std::size_t kPhasesPerLayer = 16;
constexpr std::size_t kPhasesBeside = 8;

// Charges the time since the last call to a phase; that of one thread alone, the others' do nothing.
class PhaseClock {
 public:
  PhaseClock(std::int64_t* phase_ns, bool is_running) : phase_ns_(phase_ns), is_running_(is_running) {
    if (is_running_) {
      last_ = std::chrono::steady_clock::now();
    }
  }

  void charge(Phase phase) {
    if (is_running_) {
      const auto now = std::chrono::steady_clock::now();
      phase_ns_[static_cast<int>(phase)] += std::chrono::nanoseconds(now - last_).count();
      last_ = now;
    }
  }

 private:
  std::int64_t* phase_ns_;
  bool is_running_;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace

// Everything that is not weights or K and V. Sized by the largest step so far.
struct Model::Buffers {
  AlignedBuffer<float> x;         // (T, hidden) the residual stream
  AlignedBuffer<float> selected;  // (S, hidden) its rows that are asked for, after the last attention
  AlignedBuffer<float> normed;    // (T, hidden)
  AlignedBuffer<float> update;    // (T, hidden), models with post norms
  AlignedBuffer<float> qkv;       // (T, (H + 2 K) D)
  AlignedBuffer<float> attended;  // (T, H D), of fewer dimensions at first where heads are reduced
  AlignedBuffer<float> picked;    // (S, H D) its rows that are asked for
  AlignedBuffer<float> gated;     // (T, I)
  AlignedBuffer<float> cosines;   // (ropes, T, D / 2)
  AlignedBuffer<float> sines;
  AlignedBuffer<std::uint8_t> activations;  // quantised input of one linear layer, all rows
  struct PerThread {
    AlignedBuffer<float> normed;              // (kOwnRows, hidden)
    AlignedBuffer<std::uint8_t> activations;  // kOwnRows rows
    AlignedBuffer<std::uint8_t> scratch;
  };
  std::vector<PerThread> threads;
  std::map<int, AttentionPlan> plans;  // by window
};

// One step, as every thread runs it.
class Model::Run {
 public:
  Run(Model& model, Pool& pool, const StepInputs& inputs, const StepOutputs& outputs);
  void operator()(Worker& worker) const;

 private:
  using Thread = Buffers::PerThread;

  template <typename Body>
  static void for_rows(Worker& worker, int rows, int step, Body&& body);

  void embed(Worker& worker) const;
  void rotate_and_store(Worker& worker, std::size_t layer) const;
  void normalise_and_rotate(std::size_t layer, int row) const;
  void reduce(std::size_t layer, int first, int last) const;
  void store(std::size_t layer, int row) const;
  void restore(Worker& worker, std::size_t layer, float* attended, int rows) const;
  void attend(Worker& worker, Thread& thread, std::size_t layer) const;
  void select_rows(Worker& worker) const;
  const std::uint8_t* quantise_normed(Worker& worker, Thread& thread, const LinearShape& shape, const float* x,
                                      int rows, const float* weight) const;
  const std::uint8_t* quantise_plain(Worker& worker, Thread& thread, const LinearShape& shape, const float* source,
                                     std::ptrdiff_t stride, int rows) const;
  void multiply(Worker& worker, Thread& thread, const PackedLinear& linear, const std::uint8_t* activations, int rows,
                const Epilogue& epilogue) const;
  // x += linear(activations), through the post norm if there is one.
  void add_update(Worker& worker, Thread& thread, const PackedLinear& linear, const std::uint8_t* activations, int rows,
                  float* x, const float* post_norm) const;
  void score(Worker& worker, Thread& thread, const float* x) const;

  Model& model_;
  const ModelShape& shape_;
  Buffers& buffers_;
  const StepInputs& inputs_;
  const StepOutputs& outputs_;
  const LinearKernels& linear_;
  const RowwiseKernels& rowwise_;
  int qkv_width_;
  int query_width_;
  std::map<int, const AttentionPlan*> plans_;
  mutable std::atomic<bool> has_begun_{false};  // on any thread
};

Model::Model(const ModelShape& shape, std::vector<RotarySpec> ropes, ModelWeights weights, Isa isa)
    : shape_(shape),
      ropes_(std::move(ropes)),
      weights_(std::move(weights)),
      isa_(isa),
      turn_(head_turn(shape.kv_head_dim)),
      buffers_(std::make_unique<Buffers>()) {
  const auto add = [&](const PackedLinear& linear) {
    const LinearShape& shape = linear.shape;
    const bool is_known = std::ranges::any_of(linear_shapes_, [&](const LinearShape& other) {
      return std::tie(other.kind, other.num_outputs, other.num_inputs, other.group, other.gate) ==
             std::tie(shape.kind, shape.num_outputs, shape.num_inputs, shape.group, shape.gate);
    });
    if (!is_known) {
      linear_shapes_.push_back(shape);
    }
  };
  for (const LayerWeights& layer : weights_.layers) {
    add(layer.qkv);
    add(layer.output);
    add(layer.gate_up);
    add(layer.down);
    if (std::ranges::find(windows_, layer.window) == windows_.end()) {
      windows_.push_back(layer.window);
    }
  }
  add(weights_.head);
}

Model::~Model() = default;

void Model::step(Pool& pool, const StepInputs& inputs, const StepOutputs& outputs,
                 const std::function<void()>& meanwhile) {
  const Run run(*this, pool, inputs, outputs);
  pool.run_phases(run, kPhasesPerLayer * weights_.layers.size() + kPhasesBeside, meanwhile);
}

Model::Run::Run(Model& model, Pool& pool, const StepInputs& inputs, const StepOutputs& outputs)
    : model_(model),
      shape_(model.shape_),
      buffers_(*model.buffers_),
      inputs_(inputs),
      outputs_(outputs),
      linear_(linear_kernels(model.isa_)),
      rowwise_(rowwise_kernels(model.isa_)),
      qkv_width_((shape_.num_heads + 2 * shape_.num_kv_heads) * shape_.head_dim),
      query_width_(shape_.num_heads * shape_.head_dim) {
  const auto rows = static_cast<std::size_t>(inputs.num_rows);
  const auto selected = static_cast<std::size_t>(inputs.num_logits);
  const auto hidden = static_cast<std::size_t>(shape_.hidden);
  Buffers& b = buffers_;
  b.x.at_least(rows * hidden);
  b.normed.at_least(rows * hidden);
  b.update.at_least(rows * hidden);
  b.qkv.at_least(rows * static_cast<std::size_t>(qkv_width_));
  b.attended.at_least(rows * static_cast<std::size_t>(query_width_));
  b.gated.at_least(rows * static_cast<std::size_t>(shape_.intermediate));
  b.selected.at_least(selected * hidden);
  b.picked.at_least(selected * static_cast<std::size_t>(query_width_));
  const std::size_t angles = model.ropes_.size() * rows * static_cast<std::size_t>(shape_.head_dim / 2);
  b.cosines.at_least(angles);
  b.sines.at_least(angles);

  std::size_t activations = 0;
  std::size_t own_activations = 0;
  std::size_t scratch = 0;
  for (const LinearShape& linear : model.linear_shapes_) {
    activations = std::max(activations, linear_.activation_bytes(linear, inputs.num_rows));
    own_activations = std::max(own_activations, linear_.activation_bytes(linear, kOwnRows));
    for (const int count : {inputs.num_rows, std::max(1, inputs.num_logits)}) {
      scratch = std::max(scratch, linear_.scratch_bytes(linear, count));
    }
  }
  for (const int window : model.windows_) {
    const AttentionShape attention = {inputs.layout, shape_.num_heads, shape_.attention_scale, shape_.attention_softcap,
                                      window,        inputs.transforms};
    AttentionPlan& plan = b.plans[window];
    plan.assign(model.isa_, attention, inputs.batch, pool.num_threads());
    plans_[window] = &plan;
    scratch = std::max(scratch, plan.scratch_bytes());
  }
  b.activations.at_least(activations);
  if (b.threads.size() < static_cast<std::size_t>(pool.num_threads())) {
    b.threads.resize(static_cast<std::size_t>(pool.num_threads()));
  }
  for (Thread& thread : b.threads) {
    thread.normed.at_least(kOwnRows * hidden);
    thread.activations.at_least(own_activations);
    thread.scratch.at_least(scratch);
  }
}

template <typename Body>
void Model::Run::for_rows(Worker& worker, int rows, int step, Body&& body) {
  const int chunks = ceil_div(rows, step);
  for (int chunk = worker.claim(chunks); chunk >= 0; chunk = worker.claim(chunks)) {
    body(chunk * step, std::min(rows, (chunk + 1) * step));
  }
}

void Model::Run::operator()(Worker& worker) const {
  Thread& thread = buffers_.threads[static_cast<std::size_t>(worker.index())];
  const auto& layers = model_.weights_.layers;
  PhaseClock clock(model_.phase_ns_.data(), !has_begun_.exchange(true));
  embed(worker);
  clock.charge(Phase::kEmbed);
  float* x = buffers_.x.data();
  int rows = inputs_.num_rows;
  for (std::size_t index = 0; index < layers.size(); ++index) {
    const LayerWeights& layer = layers[index];
    const bool is_last = index + 1 == layers.size();
    const std::uint8_t* activations = quantise_normed(worker, thread, layer.qkv.shape, x, rows, layer.attention_norm);
    clock.charge(Phase::kNorm);
    multiply(worker, thread, layer.qkv, activations, rows, {buffers_.qkv.data(), qkv_width_, nullptr, 0});
    worker.end_phase();
    clock.charge(Phase::kQkv);
    rotate_and_store(worker, index);
    worker.end_phase();
    clock.charge(Phase::kStore);
    if (is_last && inputs_.num_logits == 0) {
      return;
    }
    attend(worker, thread, index);
    clock.charge(Phase::kAttention);
    float* attended = buffers_.attended.data();
    if (is_last && inputs_.num_logits != rows) {
      select_rows(worker);
      worker.end_phase();
      attended = buffers_.picked.data();
      x = buffers_.selected.data();
      rows = inputs_.num_logits;
    }
    if (layer.reduction.outputs != nullptr) {
      restore(worker, index, attended, rows);
      worker.end_phase();
    }
    activations = quantise_plain(worker, thread, layer.output.shape, attended, query_width_, rows);
    add_update(worker, thread, layer.output, activations, rows, x, layer.post_attention_norm);
    clock.charge(Phase::kOutput);
    activations = quantise_normed(worker, thread, layer.gate_up.shape, x, rows, layer.mlp_norm);
    clock.charge(Phase::kNorm);
    multiply(worker, thread, layer.gate_up, activations, rows,
             {buffers_.gated.data(), shape_.intermediate, nullptr, 0});
    worker.end_phase();
    clock.charge(Phase::kGateUp);
    activations = quantise_plain(worker, thread, layer.down.shape, buffers_.gated.data(), shape_.intermediate, rows);
    add_update(worker, thread, layer.down, activations, rows, x, layer.post_mlp_norm);
    clock.charge(Phase::kDown);
  }
  score(worker, thread, x);
  worker.end_phase();
  clock.charge(Phase::kHead);
}

void Model::Run::embed(Worker& worker) const {
  const int half = shape_.head_dim / 2;
  for_rows(worker, inputs_.num_rows, kRowChunk, [&](int first, int last) {
    for (int row = first; row < last; ++row) {
      rowwise_.embed(model_.weights_.embedding, inputs_.token_ids[row], shape_.hidden, shape_.embedding_scale,
                     buffers_.x.data() + static_cast<std::ptrdiff_t>(row) * shape_.hidden);
      const auto position = static_cast<float>(inputs_.positions[row]);
      for (std::size_t rope = 0; rope < model_.ropes_.size(); ++rope) {
        const RotarySpec& spec = model_.ropes_[rope];
        const std::size_t at = (rope * static_cast<std::size_t>(inputs_.num_rows) + static_cast<std::size_t>(row)) *
                               static_cast<std::size_t>(half);
        for (int i = 0; i < half; ++i) {
          const float angle = position * spec.frequencies[static_cast<std::size_t>(i)];
          buffers_.cosines.data()[at + static_cast<std::size_t>(i)] = std::cos(angle) * spec.factor;
          buffers_.sines.data()[at + static_cast<std::size_t>(i)] = std::sin(angle) * spec.factor;
        }
      }
    }
  });
  worker.end_phase();
}

void Model::Run::rotate_and_store(Worker& worker, std::size_t index) const {
  for_rows(worker, inputs_.num_rows, kRowChunk, [&](int first, int last) {
    for (int row = first; row < last; ++row) {
      normalise_and_rotate(index, row);
    }
    reduce(index, first, last);
    for (int row = first; row < last; ++row) {
      store(index, row);
    }
  });
}

void Model::Run::normalise_and_rotate(std::size_t index, int row) const {
  const LayerWeights& layer = model_.weights_.layers[index];
  const int dim = shape_.head_dim;
  const int half = dim / 2;
  float* queries = buffers_.qkv.data() + static_cast<std::ptrdiff_t>(row) * qkv_width_;
  const int num_rotated = shape_.num_heads + shape_.num_kv_heads;
  if (layer.query_norm != nullptr) {
    for (int head = 0; head < num_rotated; ++head) {
      const float* weight = head < shape_.num_heads ? layer.query_norm : layer.key_norm;
      rowwise_.rms_norm(queries + head * dim, weight, dim, shape_.norm_eps, queries + head * dim);
    }
  }
  if (layer.rope >= 0) {
    const std::ptrdiff_t at =
        (static_cast<std::ptrdiff_t>(layer.rope) * inputs_.num_rows + row) * static_cast<std::ptrdiff_t>(half);
    for (int head = 0; head < num_rotated; ++head) {
      rowwise_.rope(queries + head * dim, buffers_.cosines.data() + at, buffers_.sines.data() + at, half);
    }
  }
}

// Heads in fewer dimensions move together: those of a row follow each other at the start of its room. Head by head from
// the first, so that none lands on one that is still to be read.
void Model::Run::reduce(std::size_t index, int first, int last) const {
  const HeadReduction& reduction = model_.weights_.layers[index].reduction;
  if (reduction.queries == nullptr) {
    return;
  }
  const int dim = shape_.head_dim;
  const int kept = shape_.kv_head_dim;
  const int group = shape_.num_heads / shape_.num_kv_heads;
  const std::ptrdiff_t size = static_cast<std::ptrdiff_t>(dim) * kept;
  float* rows = buffers_.qkv.data() + static_cast<std::ptrdiff_t>(first) * qkv_width_;
  float projected[kRowChunk * kMaxHeadDim];
  int head = 0;
  const auto take = [&](const float* matrix) {
    rowwise_.project(rows + head * dim, qkv_width_, last - first, matrix, dim, kept, projected);
    for (int row = 0; row < last - first; ++row) {
      std::memcpy(rows + static_cast<std::ptrdiff_t>(row) * qkv_width_ + head * kept, projected + row * kept,
                  static_cast<std::size_t>(kept) * sizeof(float));
    }
    ++head;
  };
  for (int query = 0; query < shape_.num_heads; ++query) {
    take(reduction.queries + query / group * size);
  }
  for (const float* matrices : {reduction.keys, reduction.values}) {
    for (int kv_head = 0; kv_head < shape_.num_kv_heads; ++kv_head) {
      take(matrices + kv_head * size);
    }
  }
}

void Model::Run::store(std::size_t index, int row) const {
  const KvLayout& layout = inputs_.layout;
  const int dim = shape_.kv_head_dim;
  const auto encode = encode_kv_row(model_.isa_);
  const auto encode_key = encode_kv_key(model_.isa_);
  const int group = shape_.num_heads / shape_.num_kv_heads;
  const std::int64_t head_bytes = static_cast<std::int64_t>(layout.block_size) * layout.row_bytes;
  const std::int64_t* const offsets = inputs_.batch.block_offsets;
  const int num_turned = shape_.num_heads + shape_.num_kv_heads;
  float* queries = buffers_.qkv.data() + static_cast<std::ptrdiff_t>(row) * qkv_width_;
  const float* keys = queries + shape_.num_heads * dim;
  const float* values = keys + shape_.num_kv_heads * dim;
  // Where blocks have several codecs all hold turned keys: any of them can then become another, and queries are the
  // same for all.
  if (kv_turns_keys(layout.codec) || offsets != nullptr) {
    for (int head = 0; head < num_turned; ++head) {
      rowwise_.turn(queries + head * dim, model_.turn_);
    }
  }
  const std::int64_t block = inputs_.slots[row] / layout.block_size;
  const std::int64_t offset = inputs_.slots[row] % layout.block_size;
  std::uint8_t* target = inputs_.arena + (offsets == nullptr ? block * layout.block_stride : offsets[block]) +
                         static_cast<std::int64_t>(index) * kv_layer_bytes(layout) + offset * layout.row_bytes;
  bool is_finite = true;
  for (int head = 0; head < shape_.num_kv_heads; ++head) {
    is_finite &= encode_key(layout.codec, dim, group, keys + head * dim, queries + head * group * dim,
                            target + head * head_bytes);
    is_finite &= encode(layout.codec, dim, values + head * dim, target + (shape_.num_kv_heads + head) * head_bytes);
  }
  if (!is_finite) {
    outputs_.is_finite[row] = 0;
  }
}

// The way back of what attention gives, from the last head: the first ones are where the others come to be.
void Model::Run::restore(Worker& worker, std::size_t index, float* attended, int rows) const {
  const float* const matrices = model_.weights_.layers[index].reduction.outputs;
  const int group = shape_.num_heads / shape_.num_kv_heads;
  const int dim = shape_.head_dim;
  const int kept = shape_.kv_head_dim;
  for_rows(worker, rows, kRowChunk, [&](int first, int last) {
    float* start = attended + static_cast<std::ptrdiff_t>(first) * query_width_;
    float restored[kRowChunk * kMaxHeadDim];
    for (int head = shape_.num_heads - 1; head >= 0; --head) {
      const float* matrix = matrices + static_cast<std::ptrdiff_t>(head / group) * kept * dim;
      rowwise_.project(start + head * kept, query_width_, last - first, matrix, kept, dim, restored);
      for (int row = 0; row < last - first; ++row) {
        std::memcpy(start + static_cast<std::ptrdiff_t>(row) * query_width_ + head * dim, restored + row * dim,
                    static_cast<std::size_t>(dim) * sizeof(float));
      }
    }
  });
}

void Model::Run::attend(Worker& worker, Thread& thread, std::size_t index) const {
  const AttentionPlan& plan = *plans_.at(model_.weights_.layers[index].window);
  const AttentionRows rows = {buffers_.qkv.data(), qkv_width_, buffers_.attended.data(), query_width_};
  const int items = plan.num_items();
  for (int item = worker.claim(items); item >= 0; item = worker.claim(items)) {
    plan.run(item, inputs_.arena, static_cast<int>(index), rows, thread.scratch.data());
  }
  worker.end_phase();
  const int merges = plan.num_merges();
  if (merges > 0) {
    for (int merge = worker.claim(merges); merge >= 0; merge = worker.claim(merges)) {
      plan.merge(merge, rows);
    }
    worker.end_phase();
  }
}

void Model::Run::select_rows(Worker& worker) const {
  for_rows(worker, inputs_.num_logits, kRowChunk, [&](int first, int last) {
    for (int index = first; index < last; ++index) {
      const std::ptrdiff_t row = inputs_.logit_rows[index];
      std::memcpy(buffers_.selected.data() + static_cast<std::ptrdiff_t>(index) * shape_.hidden,
                  buffers_.x.data() + row * shape_.hidden, static_cast<std::size_t>(shape_.hidden) * sizeof(float));
      std::memcpy(buffers_.picked.data() + static_cast<std::ptrdiff_t>(index) * query_width_,
                  buffers_.attended.data() + row * query_width_,
                  static_cast<std::size_t>(query_width_) * sizeof(float));
    }
  });
}

const std::uint8_t* Model::Run::quantise_normed(Worker& worker, Thread& thread, const LinearShape& shape,
                                                const float* x, int rows, const float* weight) const {
  const int width = shape_.hidden;
  const auto norm = [&](int first, int last, float* target) {
    for (int row = first; row < last; ++row) {
      const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(row) * width;
      rowwise_.rms_norm(x + at, weight, width, shape_.norm_eps, target + at);
    }
  };
  if (rows <= kOwnRows) {
    norm(0, rows, thread.normed.data());
    linear_.quantise(shape, thread.normed.data(), width, rows, 0, rows, thread.activations.data());
    return thread.activations.data();
  }
  const int step = round_up(kRowChunk, linear_.quantise_step);
  for_rows(worker, rows, step, [&](int first, int last) {
    norm(first, last, buffers_.normed.data());
    linear_.quantise(shape, buffers_.normed.data(), width, rows, first, last, buffers_.activations.data());
  });
  worker.end_phase();
  return buffers_.activations.data();
}

const std::uint8_t* Model::Run::quantise_plain(Worker& worker, Thread& thread, const LinearShape& shape,
                                               const float* source, std::ptrdiff_t stride, int rows) const {
  if (rows <= kOwnRows) {
    linear_.quantise(shape, source, stride, rows, 0, rows, thread.activations.data());
    return thread.activations.data();
  }
  const int step = round_up(kRowChunk, linear_.quantise_step);
  for_rows(worker, rows, step, [&](int first, int last) {
    linear_.quantise(shape, source, stride, rows, first, last, buffers_.activations.data());
  });
  worker.end_phase();
  return buffers_.activations.data();
}

void Model::Run::multiply(Worker& worker, Thread& thread, const PackedLinear& linear, const std::uint8_t* activations,
                          int rows, const Epilogue& epilogue) const {
  const int items = linear_.num_items(linear.shape, rows, worker.count());
  for (int item = worker.claim(items); item >= 0; item = worker.claim(items)) {
    linear_.run(linear, activations, rows, worker.count(), item, epilogue, thread.scratch.data());
  }
}

void Model::Run::add_update(Worker& worker, Thread& thread, const PackedLinear& linear, const std::uint8_t* activations,
                            int rows, float* x, const float* post_norm) const {
  const std::ptrdiff_t width = shape_.hidden;
  if (post_norm == nullptr) {
    multiply(worker, thread, linear, activations, rows, {x, width, x, width});
    worker.end_phase();
    return;
  }
  float* update = buffers_.update.data();
  multiply(worker, thread, linear, activations, rows, {update, width, nullptr, 0});
  worker.end_phase();
  for_rows(worker, rows, kRowChunk, [&](int first, int last) {
    for (int row = first; row < last; ++row) {
      rowwise_.add_rms_norm(update + row * width, post_norm, shape_.hidden, shape_.norm_eps, x + row * width);
    }
  });
  worker.end_phase();
}

void Model::Run::score(Worker& worker, Thread& thread, const float* x) const {
  const PackedLinear& head = model_.weights_.head;
  const int rows = inputs_.num_logits;
  const std::uint8_t* activations = quantise_normed(worker, thread, head.shape, x, rows, model_.weights_.final_norm);
  multiply(worker, thread, head, activations, rows, {outputs_.logits, shape_.vocab, nullptr, 0});
  worker.end_phase();
  for_rows(worker, rows, 1, [&](int first, int) {
    float* logits = outputs_.logits + static_cast<std::ptrdiff_t>(first) * shape_.vocab;
    if (shape_.logit_softcap > 0.0F) {
      for (int i = 0; i < shape_.vocab; ++i) {
        logits[i] = std::tanh(logits[i] / shape_.logit_softcap) * shape_.logit_softcap;
      }
    }
    outputs_.best[first] = rowwise_.best_token(logits, shape_.vocab);
  });
}

}  // namespace kvist
