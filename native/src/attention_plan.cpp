// The plan of a step: which rows read which keys, as what item, and which items' results are merged.
//
//   sequences -> spans -> pieces -> units -> items
//
// A span is a set of query rows and a range of keys, made in one of two ways. Sequences with rows for half a tile
// become tiles of rows that read every key they may see. The others are put into a trie by their block tables: a node
// is a range of whole blocks that its sequences share and that ends before the first query of each, so that no causal
// mask is needed in it, and becomes one span with all their rows stacked; what a sequence has for itself, its last
// blocks at least, is a span of its own.
//
// Where the blocks of a span are of several codecs, it is cut into pieces of one codec each: where the codec changes, or,
// when it changes often, by collecting the blocks of each codec, whose order means nothing to a sum. Pieces that cost
// more than a fraction of the step are split over keys, into units; each unit is one item per KV head, or per run of KV
// heads where the kernel reads those side by side. Units are sorted from heavy to light: threads claim items in order,
// so that the last ones to be claimed are short. A row whose keys are spread over several units gets its result by a
// merge.
//
// Planning a step takes O(rows + blocks + units log units).

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "attention_kernels.h"
#include "kvist/attention.h"
#include "kvist/common.h"
#include "kvist/rowwise.h"

namespace kvist {
namespace {

constexpr int kStackedRows = 192;   // query rows times heads of a full tile: packing keys is then 2 % of the work
constexpr int kFewStacked = 8;      // below: keys are streamed and not packed
constexpr int kItemsPerThread = 8;  // an item costs at most this fraction of a thread's part of the step
constexpr int kMinSplitKeys = 256;  // times KV heads of an item: shorter parts cost more in merges than they gain
constexpr int kLongItem = 2;        // limits that KV heads together may cost
constexpr int kMinSharedKeys = 64;  // reads that sharing must save: less does not pay for a merge
constexpr int kMergeFloats = 2048;  // outputs per merge: a microsecond
constexpr int kMaxRuns = 4;         // of blocks of one codec in a span; more are collected by codec

struct Span {
  int first_row;  // in State::rows
  int num_rows;
  int table;  // offset of the block table in State::block_offsets
  int key_begin;
  int key_end;
  bool shared;
  int num_parts;
  std::int64_t cost;
};

struct Piece {
  int table;
  int key_begin;
  int key_end;
  int codec;
};

struct Unit {
  int first_row;
  int num_rows;
  int table;
  int key_begin;
  int key_end;
  int codec;
  int heads;          // KV heads of an item; the last one may have fewer
  int slot;           // of the first row's partial result; -1: writes the output
  std::int64_t cost;  // per item
};

struct Item {
  int unit;
  int kv_head;
};

struct Member {
  int sequence;
  int num_shareable;  // leading blocks that end before the sequence's first query
};

// About cycles per KV head.
std::int64_t span_cost(int stacked, int num_keys) {
  const std::int64_t per_key = stacked < kFewStacked ? 10 + 7 * stacked : 50 + 32 * ceil_div(stacked, 6);
  return per_key * num_keys + 500;
}

const AttentionKernels& kernels(Isa isa) {
#if defined(KVIST_HAS_AVX512)
  if (isa == Isa::kAvx512) {
    return kAttentionAvx512;
  }
#endif
#if defined(KVIST_HAS_AVX2)
  if (isa == Isa::kAvx2) {
    return kAttentionAvx2;
  }
#endif
#if defined(KVIST_HAS_NEON)
  if (isa == Isa::kNeon) {
    return kAttentionNeon;
  }
#endif
  static_cast<void>(isa);
  return kAttentionSerial;
}

const AttentionKernels& span_kernels(Isa isa) {
#if defined(KVIST_HAS_AVX2)
  if (isa == Isa::kAvx2 || isa == Isa::kAvx512) {
    return kAttentionSpanAvx2;
  }
#endif
  static_cast<void>(isa);
  return kAttentionSpanSerial;
}

}  // namespace

struct AttentionPlan::State {
  AttentionShape shape{};
  std::array<AttentionShape, kNumKvCodecs> shapes{};  // the same, with the layout of each codec
  bool is_mixed = false;                              // the batch has tables of offsets and codecs
  std::array<const AttentionKernels*, kNumKvCodecs> kernels{};
  HeadTurn turn{};
  std::size_t scratch_bytes = 0;
  AttentionPlanInfo info{};

  // By place in the block tables; blocks collected by codec are behind them.
  std::vector<std::int64_t> block_offsets;
  std::vector<std::uint8_t> block_codecs;  // empty unless mixed
  std::vector<Piece> pieces;               // of one span
  std::vector<std::int32_t> rows;          // query rows of all spans
  std::vector<std::int32_t> positions;     // beside rows
  std::vector<Span> spans;
  std::vector<Unit> units;  // heavy to light
  std::vector<Item> items;
  std::vector<Member> members;

  // Merge m is for the row merge_rows[m], whose partial results are in the slots
  // merge_slots[merge_starts[m]..merge_starts[m + 1]).
  std::vector<std::int32_t> row_parts;
  std::vector<std::int32_t> merge_rows;
  std::vector<std::int32_t> merge_starts;
  std::vector<std::int32_t> merge_slots;
  int rows_per_merge = 1;
  // Written by items through a const plan: they are the step's data, not the plan's.
  mutable std::vector<float> partial_sums;
  mutable std::vector<float> partial_weights;

  int group() const { return shape.num_heads / shape.layout.num_kv_heads; }
  int rows_per_tile() const { return std::max(1, kStackedRows / group()); }

  void add_rows(const AttentionBatch& batch, int sequence, int first, int count);
  void add_private(const AttentionBatch& batch, int sequence, int key_begin);
  void add_shared(const AttentionBatch& batch, int first, int last, int start, int end);
  void add_trie(const AttentionBatch& batch, int first, int last, int start, int depth);
  void locate_blocks(const AttentionBatch& batch);
  void add_runs(const Span& span, int begin, int end);
  void cut_by_codec(const Span& span);
  void make_units(int num_threads);
  void make_items();
  void make_merges(int num_rows);
};

void AttentionPlan::State::add_rows(const AttentionBatch& batch, int sequence, int first, int count) {
  const int row = batch.query_starts[sequence];
  const int num_rows = batch.query_starts[sequence + 1] - row;
  const int position = batch.context_lens[sequence] - num_rows;
  for (int i = first; i < first + count; ++i) {
    rows.push_back(row + i);
    positions.push_back(position + i);
  }
}

// Every row of the sequence against its keys from key_begin on.
void AttentionPlan::State::add_private(const AttentionBatch& batch, int sequence, int key_begin) {
  const int num_rows = batch.query_starts[sequence + 1] - batch.query_starts[sequence];
  const int position = batch.context_lens[sequence] - num_rows;
  for (int first = 0; first < num_rows; first += rows_per_tile()) {
    const int count = std::min(rows_per_tile(), num_rows - first);
    const int oldest = shape.window > 0 ? std::max(0, position + first - shape.window + 1) : 0;
    spans.push_back(Span{.first_row = static_cast<int>(rows.size()),
                         .num_rows = count,
                         .table = batch.table_starts[sequence],
                         .key_begin = std::max(key_begin, oldest),
                         .key_end = position + first + count,
                         .shared = false,
                         .num_parts = 1,
                         .cost = 0});
    add_rows(batch, sequence, first, count);
  }
}

// Every row of the members [first, last) against the blocks [start, end) of the first one's table.
void AttentionPlan::State::add_shared(const AttentionBatch& batch, int first, int last, int start, int end) {
  Span span{.first_row = static_cast<int>(rows.size()),
            .num_rows = 0,
            .table = batch.table_starts[members[first].sequence],
            .key_begin = start * shape.layout.block_size,
            .key_end = end * shape.layout.block_size,
            .shared = true,
            .num_parts = 1,
            .cost = 0};
  for (int m = first; m < last; ++m) {
    const int sequence = members[m].sequence;
    const int num_rows = batch.query_starts[sequence + 1] - batch.query_starts[sequence];
    if (span.num_rows + num_rows > rows_per_tile()) {
      spans.push_back(span);
      span.first_row += span.num_rows;
      span.num_rows = 0;
    }
    add_rows(batch, sequence, 0, num_rows);
    span.num_rows += num_rows;
  }
  spans.push_back(span);
}

// The members [first, last) agree on their blocks [0, depth), of which [start, depth) is in no span of theirs yet.
void AttentionPlan::State::add_trie(const AttentionBatch& batch, int first, int last, int start, int depth) {
  const auto table = [&](const Member& member) { return batch.block_ids + batch.table_starts[member.sequence]; };
  const auto key = [&](const Member& member) {
    return member.num_shareable > depth ? static_cast<std::int64_t>(table(member)[depth]) : -1;
  };
  std::sort(members.begin() + first, members.begin() + last, [&](const Member& a, const Member& b) {
    const std::int64_t key_a = key(a);
    const std::int64_t key_b = key(b);
    return key_a != key_b ? key_a < key_b : a.sequence < b.sequence;
  });
  for (int begin = first, end = first; begin < last; begin = end) {
    const std::int64_t id = key(members[begin]);
    for (end = begin + 1; end < last && key(members[end]) == id; ++end) {
    }
    if (id < 0 || end - begin == 1) {
      for (int m = begin; m < end; ++m) {
        add_private(batch, members[m].sequence, start * shape.layout.block_size);
      }
      continue;
    }
    const std::int32_t* const first_table = table(members[begin]);
    int common = members[begin].num_shareable;
    for (int m = begin + 1; m < end; ++m) {
      common = std::min(common, members[m].num_shareable);
      const auto differ = std::mismatch(first_table + depth + 1, first_table + common, table(members[m]) + depth + 1);
      common = static_cast<int>(differ.first - first_table);
    }
    const std::int64_t saved = static_cast<std::int64_t>(end - begin - 1) * (common - start) * shape.layout.block_size;
    if (saved >= kMinSharedKeys) {
      add_shared(batch, begin, end, start, common);
      ++info.num_shared;
      add_trie(batch, begin, end, common, common);
    } else {
      add_trie(batch, begin, end, start, common);
    }
  }
}

void AttentionPlan::State::locate_blocks(const AttentionBatch& batch) {
  const auto num_entries = static_cast<std::size_t>(batch.table_starts[batch.num_sequences]);
  is_mixed = batch.block_offsets != nullptr;
  block_offsets.resize(num_entries);
  block_codecs.resize(is_mixed ? num_entries : 0);
  for (std::size_t i = 0; i < num_entries; ++i) {
    const std::int32_t id = batch.block_ids[i];
    block_offsets[i] = is_mixed ? batch.block_offsets[id] : id * shape.layout.block_stride;
    if (is_mixed) {
      block_codecs[i] = batch.block_codecs[id];
    }
  }
}

// Pieces for the keys [begin, end) of a span, one for each run of blocks of the same codec.
void AttentionPlan::State::add_runs(const Span& span, int begin, int end) {
  const int block_size = shape.layout.block_size;
  while (begin < end) {
    int block = begin / block_size;
    const int codec = block_codecs[span.table + block];
    while (block * block_size < end && block_codecs[span.table + block] == codec) {
      ++block;
    }
    const int stop = std::min(end, block * block_size);
    pieces.push_back(Piece{span.table, begin, stop, codec});
    begin = stop;
  }
}

void AttentionPlan::State::cut_by_codec(const Span& span) {
  pieces.clear();
  if (!is_mixed) {
    pieces.push_back(Piece{span.table, span.key_begin, span.key_end, static_cast<int>(shape.layout.codec)});
    return;
  }
  add_runs(span, span.key_begin, span.key_end);
  // Collected keys are not at their positions: only where every row sees all of them, within its window too, does the
  // position of a key not matter. Nothing but a window makes a span begin inside a block.
  const int last_position = positions[span.first_row + span.num_rows - 1];
  const bool is_within_window = span.shared || shape.window == 0 || last_position < shape.window;
  if (static_cast<int>(pieces.size()) <= kMaxRuns || !is_within_window) {
    return;
  }
  const int block_size = shape.layout.block_size;
  const int seen_by_all = span.shared ? span.key_end : std::min(span.key_end, positions[span.first_row] + 1);
  const int first = span.key_begin / block_size;
  const int last = seen_by_all / block_size;
  pieces.clear();
  for (int codec = 0; codec < kNumKvCodecs; ++codec) {
    const auto table = static_cast<int>(block_offsets.size());
    for (int block = first; block < last; ++block) {
      if (block_codecs[span.table + block] == codec) {
        block_offsets.push_back(block_offsets[span.table + block]);
      }
    }
    const int count = static_cast<int>(block_offsets.size()) - table;
    if (count > 0) {
      pieces.push_back(Piece{table, 0, count * block_size, codec});
    }
  }
  add_runs(span, std::max(span.key_begin, last * block_size), span.key_end);
}

void AttentionPlan::State::make_units(int num_threads) {
  std::int64_t total = 0;
  for (Span& span : spans) {
    // A causal tile's rows see fewer keys than the last one does, by half the rows on average.
    const int num_keys = span.key_end - span.key_begin - (span.shared ? 0 : span.num_rows / 2);
    span.cost = span_cost(span.num_rows * group(), std::max(num_keys, 1));
    total += span.cost;
  }
  const int block_size = shape.layout.block_size;
  const int grain = block_size * ceil_div(64, block_size);
  const std::int64_t everything = total * shape.layout.num_kv_heads;
  const std::int64_t limit =
      num_threads == 1
          ? everything
          : std::max<std::int64_t>(1, everything / (static_cast<std::int64_t>(num_threads) * kItemsPerThread));
  for (Span& span : spans) {
    cut_by_codec(span);
    span.num_parts = 0;
    for (const Piece& piece : pieces) {
      const int num_keys = piece.key_end - piece.key_begin;
      const std::int64_t cost = span.cost * num_keys / (span.key_end - span.key_begin);
      // Heads together save memory's time and fill fewer items: they part where those would be too long.
      const auto parts = [&](int heads) {
        const std::int64_t most = std::max(1, num_keys * heads / kMinSplitKeys);
        return static_cast<int>(std::min(ceil_div(heads * cost, heads > 1 ? kLongItem * limit : limit), most));
      };
      const auto heads_together = kernels[piece.codec]->heads_together;
      int heads = heads_together == nullptr ? 1 : heads_together(shapes[piece.codec], span.num_rows);
      if (heads * cost > parts(heads) * kLongItem * limit) {
        heads = 1;
      }
      const int wanted = parts(heads);
      // Parts end at multiples of the grain counted from key 0, so that a block is in one part only.
      const int part = round_up(ceil_div(num_keys, std::max(wanted, 1)), grain);
      for (int begin = piece.key_begin; begin < piece.key_end; ++span.num_parts) {
        const int end = wanted <= 1 ? piece.key_end : std::min(piece.key_end, begin / grain * grain + part);
        units.push_back(Unit{.first_row = span.first_row,
                             .num_rows = span.num_rows,
                             .table = piece.table,
                             .key_begin = begin,
                             .key_end = end,
                             .codec = piece.codec,
                             .heads = heads,
                             .slot = -1,
                             .cost = heads * cost * (end - begin) / num_keys});
        info.blocks_read += ceil_div(end, block_size) - begin / block_size;
        begin = end;
      }
    }
  }
}

void AttentionPlan::State::make_items() {
  items.clear();
  for (int unit = 0; unit < static_cast<int>(units.size()); ++unit) {
    for (int head = 0; head < shape.layout.num_kv_heads; head += units[unit].heads) {
      items.push_back(Item{unit, head});
    }
  }
  info.num_items = static_cast<int>(items.size());
}

void AttentionPlan::State::make_merges(int num_rows) {
  row_parts.assign(static_cast<std::size_t>(num_rows), 0);
  for (const Span& span : spans) {
    for (int i = span.first_row; i < span.first_row + span.num_rows; ++i) {
      row_parts[rows[i]] += span.num_parts;
    }
  }
  // The first slot of each row; row_parts becomes where the next one goes.
  std::int32_t num_slots = 0;
  for (int row = 0; row < num_rows; ++row) {
    if (row_parts[row] > 1) {
      merge_rows.push_back(row);
      merge_starts.push_back(num_slots);
      const std::int32_t first = num_slots;
      num_slots += row_parts[row];
      row_parts[row] = first;
    } else {
      row_parts[row] = -1;
    }
  }
  merge_starts.push_back(num_slots);
  merge_slots.resize(static_cast<std::size_t>(num_slots));
  std::int32_t slot = 0;
  for (Unit& unit : units) {
    // The rows of a unit have the same spans above them, so all of them are merged or none is.
    if (row_parts[rows[unit.first_row]] < 0) {
      continue;
    }
    unit.slot = slot;
    for (int i = unit.first_row; i < unit.first_row + unit.num_rows; ++i) {
      merge_slots[row_parts[rows[i]]++] = slot++;
    }
  }
  const std::size_t num_results = static_cast<std::size_t>(num_slots) * shape.num_heads;
  if (partial_weights.size() < 2 * num_results) {
    partial_weights.resize(2 * num_results);
  }
  if (partial_sums.size() < num_results * shape.layout.head_dim) {
    partial_sums.resize(num_results * shape.layout.head_dim);
  }
  rows_per_merge = std::max(1, kMergeFloats / (shape.num_heads * shape.layout.head_dim));
  info.num_merges = ceil_div(static_cast<int>(merge_rows.size()), rows_per_merge);
}

AttentionPlan::AttentionPlan() : state_(std::make_unique<State>()) {}
AttentionPlan::~AttentionPlan() = default;

void AttentionPlan::assign(Isa isa, const AttentionShape& shape, const AttentionBatch& batch, int num_threads) {
  State& state = *state_;
  state.shape = shape;
  if (state.turn.power * state.turn.odd != shape.layout.head_dim) {
    state.turn = head_turn(shape.layout.head_dim);
  }
  state.info = {};
  state.rows.clear();
  state.positions.clear();
  state.spans.clear();
  state.units.clear();
  state.members.clear();
  state.merge_rows.clear();
  state.merge_starts.clear();
  const int num_sequences = batch.num_sequences;
  for (int codec = 0; codec < kNumKvCodecs; ++codec) {
    state.shapes[codec] = shape;
    state.shapes[codec].layout = with_codec(shape.layout, static_cast<KvCodec>(codec));
    const bool has_records = kv_codec_bits(static_cast<KvCodec>(codec)) != 0;
    state.kernels[codec] = has_records ? &span_kernels(isa) : &kernels(isa);
  }
  state.locate_blocks(batch);

  for (int s = 0; s < num_sequences; ++s) {
    const int num_rows = batch.query_starts[s + 1] - batch.query_starts[s];
    if (num_rows == 0) {
      continue;
    }
    const int context_len = batch.context_lens[s];
    if (2 * num_rows <= state.rows_per_tile() && (shape.window == 0 || context_len <= shape.window)) {
      state.members.push_back(Member{s, (context_len - num_rows) / shape.layout.block_size});
    } else {
      state.add_private(batch, s, 0);
    }
  }
  state.add_trie(batch, 0, static_cast<int>(state.members.size()), 0, 0);
  state.make_units(num_threads);
  std::sort(state.units.begin(), state.units.end(), [](const Unit& a, const Unit& b) {
    return a.cost != b.cost ? a.cost > b.cost
                            : (a.first_row != b.first_row ? a.first_row < b.first_row : a.key_begin < b.key_begin);
  });
  state.make_merges(batch.query_starts[num_sequences]);
  state.make_items();
  int most_rows = 1;
  for (const Span& span : state.spans) {
    most_rows = std::max(most_rows, span.num_rows);
  }
  state.scratch_bytes = 0;
  for (int codec = 0; codec < kNumKvCodecs; ++codec) {
    const std::size_t bytes = state.kernels[codec]->scratch_bytes(state.shapes[codec], most_rows);
    state.scratch_bytes = std::max(state.scratch_bytes, bytes);
  }
}

int AttentionPlan::num_items() const { return state_->info.num_items; }
int AttentionPlan::num_merges() const { return state_->info.num_merges; }
std::size_t AttentionPlan::scratch_bytes() const { return state_->scratch_bytes; }
AttentionPlanInfo AttentionPlan::info() const { return state_->info; }

void AttentionPlan::run(int item, const std::uint8_t* arena, int layer, const AttentionRows& rows,
                        std::uint8_t* scratch) const {
  const State& state = *state_;
  const auto [unit_index, kv_head] = state.items[item];
  const Unit& unit = state.units[unit_index];
  const AttentionShape& shape = state.shapes[unit.codec];
  AttentionItem work{.kv_head = kv_head,
                     .num_kv_heads = std::min(unit.heads, state.shape.layout.num_kv_heads - kv_head),
                     .num_rows = unit.num_rows,
                     .rows = state.rows.data() + unit.first_row,
                     .positions = state.positions.data() + unit.first_row,
                     .block_offsets = state.block_offsets.data() + unit.table,
                     .turn = &state.turn,
                     .key_begin = unit.key_begin,
                     .key_end = unit.key_end,
                     .partial_sums = nullptr,
                     .partial_weights = nullptr};
  if (unit.slot >= 0) {
    const std::size_t first = static_cast<std::size_t>(unit.slot) * state.shape.num_heads;
    work.partial_sums = state.partial_sums.data() + first * state.shape.layout.head_dim;
    work.partial_weights = state.partial_weights.data() + 2 * first;
  }
  const KvLayer place{arena + layer * kv_layer_bytes(shape.layout), layer};
  state.kernels[unit.codec]->run(shape, work, place, rows, scratch);
}

// Sums in float32, in the order of the slots.
void AttentionPlan::merge(int index, const AttentionRows& rows) const {
  const State& state = *state_;
  const int num_heads = state.shape.num_heads;
  const int head_dim = state.shape.layout.head_dim;
  const int last = std::min((index + 1) * state.rows_per_merge, static_cast<int>(state.merge_rows.size()));
  for (int m = index * state.rows_per_merge; m < last; ++m) {
    const std::int32_t* const slots = state.merge_slots.data() + state.merge_starts[m];
    const int num_slots = state.merge_starts[m + 1] - state.merge_starts[m];
    for (int h = 0; h < num_heads; ++h) {
      const auto result = [&](int i) { return static_cast<std::size_t>(slots[i]) * num_heads + h; };
      float largest = kNoScore;
      for (int i = 0; i < num_slots; ++i) {
        largest = std::max(largest, state.partial_weights[2 * result(i)]);
      }
      float* const out = rows.out + state.merge_rows[m] * rows.out_stride + static_cast<std::ptrdiff_t>(h) * head_dim;
      std::fill(out, out + head_dim, 0.0F);
      float sum = 0.0F;
      for (int i = 0; i < num_slots; ++i) {
        const float factor = std::exp2(state.partial_weights[2 * result(i)] - largest);
        sum += factor * state.partial_weights[2 * result(i) + 1];
        const float* const part = state.partial_sums.data() + result(i) * head_dim;
        for (int d = 0; d < head_dim; ++d) {
          out[d] += factor * part[d];
        }
      }
      const float inverse = 1.0F / sum;
      for (int d = 0; d < head_dim; ++d) {
        out[d] *= inverse;
      }
    }
  }
}

}  // namespace kvist
