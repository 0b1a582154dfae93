// What the AVX2 kernels of the three weight kinds share: panels, the cut into items, rows of activations, the epilogue.
//
// A panel is 16 outputs, packed together and stored in the order in which the kernels read. With a gate it holds eight
// outputs of one half and the same eight of the other, so that both factors of a result meet in one pair of vectors.
// Outputs and inputs that a shape lacks are padded inside the panel with zeros.
//
// A tile is up to 6 rows x 16 outputs: 12 accumulators, two vectors of weights, one activation and one product are the
// 16 registers there are. Each tile widens the packed weights in registers again: those instructions start where the
// multiplications leave room, and a widened copy would cost the first-level cache twice the space or more. With several
// tiles K is cut, so that one cut of a panel stays in that cache while all tiles of a block of rows use it; the
// accumulators of a tile are kept in scratch (`sums`) between two cuts. Up to 3 rows wait for memory alone: they read
// several panels side by side (`stream_panels`).
#pragma once

#include <cstring>

#include "linear_common.h"
#include "vec_avx2.h"

namespace kvist::avx2 {

inline constexpr int kPanel = 16;
inline constexpr int kTileRows = 6;
inline constexpr int kRowBlock = 96;   // rows that share one read of the weights
inline constexpr int kItemPanels = 8;  // of one item with more rows than a tile: their sums must stay cached
inline constexpr int kCutBytes = 32768;
inline constexpr int kExpandedBytes = 16384;  // int4 with many rows: a cut of a panel, expanded, in scratch
// Panels that few rows read side by side: as many as their sums leave registers for.
constexpr int kMaxStreams = 4;
constexpr int kMaxStreamedRows = 3;
constexpr int streams_of(int rows) { return rows == 1 ? kMaxStreams : kTileRows / rows; }
// How far ahead a single tile fetches the weights it streams.
inline constexpr int kAheadBytes = 2048;

struct Range {
  int first;
  int last;
};

// The kernels of one weight kind. Rows of a panel without an output are null.
struct KindKernels {
  std::size_t (*panel_bytes)(const LinearShape& shape);
  void (*pack_panel)(const LinearShape& shape, const float* const (&rows)[kPanel], std::uint8_t* panel);
  void (*unpack_panel)(const LinearShape& shape, const std::uint8_t* panel, float* const (&rows)[kPanel]);
  void (*quantise_row)(const LinearShape& shape, const float* x, int row, int rows, std::uint8_t* activations);
  // next_panel: the one that this thread is likely to need afterwards; fetched ahead where several tiles share panels.
  void (*run)(const PackedLinear& linear, const std::uint8_t* activations, int rows, Range panel_range, int next_panel,
              Range row_range, const Epilogue& epilogue, std::uint8_t* scratch);
};

extern const KindKernels kInt8Kernels;
extern const KindKernels kInt4Kernels;
extern const KindKernels kBf16Kernels;

static inline int panel_results(const LinearShape& shape) { return shape.gate == Gate::kNone ? kPanel : kPanel / 2; }

static inline int num_panels(const LinearShape& shape) { return ceil_div(num_results(shape), panel_results(shape)); }

// K as the kernels see it.
static inline int padded_inputs(const LinearShape& shape) {
  switch (shape.kind) {
    case WeightKind::kInt8:
      return round_up(shape.num_inputs, 8);
    case WeightKind::kInt4:
      return round_up(shape.num_inputs, shape.group);
    case WeightKind::kBf16:
      break;
  }
  return round_up(shape.num_inputs, 4);
}

// Activations: one float32 scale for each row (not int4), then the rows (int8: codes of 16 bits, bf16: the float32
// values, int4: see there), each padded with zeros.
struct ActivationLayout {
  std::size_t codes;
  std::size_t stride;  // bytes from one row to the next
  std::size_t total;
};

static inline ActivationLayout activation_layout(const LinearShape& shape, int rows) {
  const auto count = static_cast<std::size_t>(rows);
  const std::size_t size = shape.kind == WeightKind::kInt8 ? 2 : shape.kind == WeightKind::kInt4 ? 1 : 4;
  ActivationLayout layout;
  layout.codes = round_up(count * sizeof(float), kAlignment);
  std::size_t row_bytes = static_cast<std::size_t>(padded_inputs(shape)) * size;
  if (shape.kind == WeightKind::kInt4) {
    layout.codes = 0;
    row_bytes += static_cast<std::size_t>(num_groups(shape)) * 2 * sizeof(float);
  }
  // Rows that start close to each other modulo a page compete for the same cache sets.
  layout.stride = round_up(row_bytes, kAlignment);
  const std::size_t phase = layout.stride % 4096;
  if (count > 1 && layout.stride > 2048 && (phase < 512 || phase > 3584)) {
    layout.stride += 1024;
  }
  layout.total = layout.codes + count * layout.stride;
  return layout;
}

// The cut of a product into items: blocks of rows x runs of panels, the panels of one block of rows first.
struct ItemPlan {
  int panels_per_item;
  int panel_items;
  int rows_per_block;
  int row_blocks;
};

static inline ItemPlan plan_items(const LinearShape& shape, std::size_t panel_bytes, int rows, int num_threads) {
  // Per nanosecond and core, about: bytes of weights from memory, and operations.
  constexpr double kBytesPerNs = 14.0;
  const double ops_per_ns = shape.kind == WeightKind::kInt8 ? 130.0 : shape.kind == WeightKind::kInt4 ? 180.0 : 80.0;
  // Long streams are worth more than the last bit of balance.
  const bool streams = rows <= kMaxStreamedRows;
  const double item_ns = streams ? 40e3 : 15e3;
  ItemPlan plan;
  plan.row_blocks = ceil_div(rows, kRowBlock);
  plan.rows_per_block = round_up(ceil_div(rows, plan.row_blocks), kTileRows);
  plan.row_blocks = ceil_div(rows, plan.rows_per_block);
  const double read_ns = static_cast<double>(panel_bytes) / kBytesPerNs;
  const double compute_ns =
      2.0 * kPanel * shape.num_inputs * (rows < plan.rows_per_block ? rows : plan.rows_per_block) / ops_per_ns;
  const int panels = num_panels(shape);
  const double wanted = item_ns / (read_ns > compute_ns ? read_ns : compute_ns);
  const std::int64_t all = static_cast<std::int64_t>(panels) * plan.row_blocks;
  const int most_items = (streams ? 2 : 4) * num_threads;
  const int balanced = static_cast<int>(streams ? ceil_div<std::int64_t>(all, most_items) : all / most_items);
  int count = wanted > panels ? panels : static_cast<int>(wanted);
  if (num_threads > 1 && count > balanced) {
    count = balanced;
  }
  if (rows > kTileRows && count > kItemPanels) {
    count = kItemPanels;
  }
  plan.panels_per_item = count < 1 ? 1 : count;
  plan.panel_items = ceil_div(panels, plan.panels_per_item);
  return plan;
}

// Eight inputs of eight outputs, [k][output]; zero where there is no output and from input `last` on.
static KVIST_INLINE void load_columns(const float* const* rows, int k, int last, __m256 (&columns)[8]) {
  const __m256i mask = lane_mask(last - k < 0 ? 0 : last - k > 8 ? 8 : last - k);
  for (int i = 0; i < 8; ++i) {
    columns[i] = rows[i] != nullptr && k < last ? _mm256_maskload_ps(rows[i] + k, mask) : _mm256_setzero_ps();
  }
  transpose(columns);
}

// Magnitudes compare like their bits, and those of a NaN are the largest.
static KVIST_INLINE float max_abs(const float* x, int count) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i largest[4] = {};
  int k = 0;
  for (; k + 32 <= count; k += 32) {
    for (int i = 0; i < 4; ++i) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + k + 8 * i));
      largest[i] = _mm256_max_epi32(largest[i], _mm256_and_si256(bits, magnitude));
    }
  }
  for (; k < count; k += 8) {
    const __m256i mask = lane_mask(count - k > 8 ? 8 : count - k);
    const __m256i bits = _mm256_castps_si256(_mm256_maskload_ps(x + k, mask));
    largest[0] = _mm256_max_epi32(largest[0], _mm256_and_si256(bits, magnitude));
  }
  largest[0] = _mm256_max_epi32(_mm256_max_epi32(largest[0], largest[1]), _mm256_max_epi32(largest[2], largest[3]));
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(largest[0]), _mm256_extracti128_si256(largest[0], 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return std::bit_cast<float>(_mm_cvtsi128_si32(m));
}

// Eight values as integers, 0 where the inverse is 0 whatever the value (it may be an infinity).
static KVIST_INLINE __m256i round_values(__m256 values, __m256 inverse) {
  const __m256 zero = _mm256_cmp_ps(inverse, _mm256_setzero_ps(), _CMP_EQ_OQ);
  return _mm256_cvtps_epi32(_mm256_andnot_ps(zero, _mm256_mul_ps(values, inverse)));
}

static KVIST_INLINE __m256 activate(Gate gate, __m256 x) {
  return gate == Gate::kSilu ? silu(x) : gate == Gate::kGeluTanh ? gelu_tanh(x) : gelu(x);
}

// Some lanes of a vector. Masked stores are slow where they are microcoded, so whole vectors do without.
template <bool kWhole>
static KVIST_INLINE __m256 load_lanes(const float* from, __m256i mask) {
  return kWhole ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, mask);
}

template <bool kWhole>
static KVIST_INLINE void store_lanes(float* to, __m256i mask, __m256 value) {
  if constexpr (kWhole) {
    _mm256_storeu_ps(to, value);
  } else {
    _mm256_maskstore_ps(to, mask, value);
  }
}

template <bool kWhole, typename Load>
static KVIST_INLINE void finish_rows(const PackedLinear& linear, int n, Range rows, const Epilogue& epilogue,
                                     Load&& load) {
  const LinearShape& shape = linear.shape;
  const bool gated = shape.gate != Gate::kNone;
  const int results = num_results(shape);
  const int left = results - n;
  const __m256i low_mask = lane_mask(left > 8 ? 8 : left);
  const __m256i high_mask = gated ? low_mask : lane_mask(left > 16 ? 8 : left > 8 ? left - 8 : 0);
  // A half that is masked whole may lie beyond the row.
  const bool has_high = kWhole || gated || left > 8;
  __m256 low_bias = _mm256_setzero_ps();
  __m256 high_bias = _mm256_setzero_ps();
  if (linear.bias != nullptr) {
    low_bias = load_lanes<kWhole>(linear.bias + n, low_mask);
    if (has_high) {
      high_bias = load_lanes<kWhole>(linear.bias + n + (gated ? results : 8), high_mask);
    }
  }
  for (int r = rows.first; r < rows.last; ++r) {
    __m256 low;
    __m256 high;
    load(r, low, high);
    low = _mm256_add_ps(low, low_bias);
    high = _mm256_add_ps(high, high_bias);
    float* out = epilogue.out + r * epilogue.out_stride + n;
    const float* residual =
        epilogue.residual != nullptr ? epilogue.residual + r * epilogue.residual_stride + n : nullptr;
    if (gated) {
      low = _mm256_mul_ps(activate(shape.gate, low), high);
    }
    if (residual != nullptr) {
      low = _mm256_add_ps(low, load_lanes<kWhole>(residual, low_mask));
    }
    store_lanes<kWhole>(out, low_mask, low);
    if (!gated && has_high) {
      if (residual != nullptr) {
        high = _mm256_add_ps(high, load_lanes<kWhole>(residual + 8, high_mask));
      }
      store_lanes<kWhole>(out + 8, high_mask, high);
    }
  }
}

// Finishes one panel for the rows [first, last): `load(r, low, high)` gives the scaled sums of row r.
template <typename Load>
static KVIST_INLINE void finish_panel(const PackedLinear& linear, int panel, Range rows, const Epilogue& epilogue,
                                      Load&& load) {
  const int n = panel * panel_results(linear.shape);
  if (num_results(linear.shape) - n >= panel_results(linear.shape)) {
    finish_rows<true>(linear, n, rows, epilogue, load);
  } else {
    finish_rows<false>(linear, n, rows, epilogue, load);
  }
}

// Lines of a large output are far away and on as many pages as there are rows: a tile asks for its own before it starts.
static KVIST_INLINE void prefetch_outputs(const LinearShape& shape, int panel, Range rows, const Epilogue& epilogue) {
  for (int r = rows.first; r < rows.last; ++r) {
    const float* out = epilogue.out + r * epilogue.out_stride + panel * panel_results(shape);
    _mm_prefetch(reinterpret_cast<const char*>(out), _MM_HINT_T0);
  }
}

// What a tile fetches ahead: its share, evenly over the units it goes through, kLines of kBytes each.
template <int kBytes>
struct Ahead {
  static constexpr int kLines = (kBytes + 63) / 64;
  const std::uint8_t* next;
  std::ptrdiff_t step;

  KVIST_INLINE void fetch_unit() {
    unroll<kLines>([&](auto) KVIST_LAMBDA {
      _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
      next += step;
    });
  }
};

// Multiplies up to kMaxStreamedRows rows with a run of panels. Memory is the bound, and what fetches ahead from it stops
// at the end of each page: the run is cut into as many parts as there are streams, one panel of each at a time.
template <typename Kernel, typename Sum>
static KVIST_INLINE void stream_panels(const Kernel& kernel, const std::uint8_t* packed, std::size_t panel_bytes,
                                       Range panels, Range rows, Sum* sums) {
  const int count = rows.last - rows.first;
  const int num_panels = panels.last - panels.first;
  const int num_streams = num_panels < streams_of(count) ? num_panels : streams_of(count);
  const int num_rounds = ceil_div(num_panels, num_streams);
  // Streams from `longer` on are a panel shorter.
  const int longer = num_panels - (num_rounds - 1) * num_streams;
  for (int round = 0; round < num_rounds; ++round) {
    const int here = round + 1 < num_rounds ? num_streams : longer;
    int indices[kMaxStreams];
    const std::uint8_t* data[kMaxStreams];
    for (int i = 0; i < here; ++i) {
      const int first = i * num_rounds - (i > longer ? i - longer : 0);
      indices[i] = panels.first + first + round;
      data[i] = packed + static_cast<std::size_t>(indices[i]) * panel_bytes;
    }
    kernel.stream(count, here, rows.first, data, sums);
    for (int i = 0; i < here; ++i) {
      kernel.finish(indices[i], data[i], rows, sums + static_cast<std::ptrdiff_t>(i) * count * kPanel);
    }
  }
}

// Multiplies a block of rows with a run of panels. A panel is a header and then units, which are what a tile goes
// through one by one: some inputs of all 16 outputs. The kernel of a weight kind has
//
//   kHeaderBytes, kUnitBytes
//   tile(height, row, first_unit, units, packed, ahead, resume, sums): adds the products of units of `height` rows from
//       `row` to sums[height][16] or, if not `resume`, sets them
//   stream(height, num_panels, row, panels, sums): sets sums[num_panels][height][16] to the products of whole panels, for
//       heights up to kMaxStreamedRows and up to streams_of(height) panels
//   finish(panel, data, rows, sums): the epilogue of some rows of one panel
template <typename Kernel, typename Sum>
static KVIST_INLINE void run_panels(const Kernel& kernel, const std::uint8_t* packed, std::size_t panel_bytes,
                                    int units, Range panels, int next_panel, Range rows, Sum* scratch) {
  using AheadUnit = Ahead<Kernel::kUnitBytes>;
  const int count = rows.last - rows.first;
  if (count <= kMaxStreamedRows) {
    stream_panels(kernel, packed, panel_bytes, panels, rows, scratch);
    return;
  }
  const int tiles = ceil_div(count, kTileRows);
  const int num_cuts = tiles == 1 ? 1 : ceil_div(units * Kernel::kUnitBytes, kCutBytes);
  const int cut_units = ceil_div(units, num_cuts);
  for (int first_unit = 0; first_unit < units; first_unit += cut_units) {
    const int cut = units - first_unit < cut_units ? units - first_unit : cut_units;
    const bool resume = first_unit > 0;
    for (int panel = panels.first; panel < panels.last; ++panel) {
      const std::uint8_t* data = packed + static_cast<std::size_t>(panel) * panel_bytes;
      const std::uint8_t* units_data =
          data + Kernel::kHeaderBytes + static_cast<std::ptrdiff_t>(first_unit) * Kernel::kUnitBytes;
      Sum* sums = scratch + (num_cuts == 1 ? 0 : static_cast<std::ptrdiff_t>(panel - panels.first) * count * kPanel);
      // One tile streams; of several, each fetches its share of the cut that comes next.
      AheadUnit ahead{units_data + kAheadBytes, kAlignment};
      if (tiles > 1) {
        const bool is_last = panel + 1 == panels.last;
        const int next = !is_last ? panel + 1 : first_unit + cut == units ? next_panel : panels.first;
        const int next_unit = !is_last ? first_unit : (first_unit + cut) % units;
        ahead.next = packed + static_cast<std::size_t>(next) * panel_bytes + Kernel::kHeaderBytes +
                     static_cast<std::ptrdiff_t>(next_unit) * Kernel::kUnitBytes;
        ahead.step = ceil_div(Kernel::kUnitBytes, tiles * AheadUnit::kLines);
      }
      for (int t = 0; t < tiles; ++t) {
        const int row = t * kTileRows;
        const int height = count - row < kTileRows ? count - row : kTileRows;
        if (tiles > 1 && first_unit + cut == units) {
          const Range tile_rows{rows.first + row, rows.first + row + height};
          prefetch_outputs(kernel.linear.shape, panel, tile_rows, kernel.epilogue);
        }
        kernel.tile(height, rows.first + row, first_unit, cut, units_data, ahead, resume, sums + row * kPanel);
        ahead.next += cut * AheadUnit::kLines * ahead.step;
        if (first_unit + cut == units) {
          kernel.finish(panel, data, Range{rows.first + row, rows.first + row + height}, sums + row * kPanel);
        }
      }
    }
  }
}

}  // namespace kvist::avx2
