// Linear layers in panels: what the kernels of an instruction set share, apart from its vectors.
//
// The including file opens no namespace; it defines KVIST_PANEL_NAMESPACE and, in kvist::KVIST_PANEL_NAMESPACE,
//
//   kPanel       outputs of a panel, which are packed together and stored in the order in which the kernels read
//   kTileRows    rows of activations that a kernel multiplies with a panel at most, their sums in registers
//   kInt8Unit    inputs that int8 weights are padded to
//   kInt8RowBytes  bytes of an activation of int8 weights
//   kOpsPerNs    of a core, for each weight kind, about
//   kWideBytes   scratch for a panel in a wider form, where several tiles use it
//
// With a gate, a panel holds kPanel / 2 outputs of one half and the same of the other, so that both factors of a result
// meet in one row of sums. Outputs and inputs that a shape lacks are padded inside the panel with zeros.
//
// A panel stays in the second-level cache while all tiles of a block of rows use it: a tile of many rows takes so little
// of it in a cycle that this cache keeps up. Sums of a tile pass through scratch on their way to the epilogue.

#include <cstring>

#include "linear_common.h"

namespace kvist::KVIST_PANEL_NAMESPACE {

inline constexpr int kMaxRowBlock = 192;          // rows that share one read of the weights
inline constexpr int kRowBlockBytes = 256 << 10;  // of their activations
inline constexpr int kMaxItemPanels = 16;         // of one item with more rows than a tile
inline constexpr int kBf16Unit = 4;
// How far ahead a single tile fetches the weights it streams.
inline constexpr int kAheadBytes = 2048;

inline constexpr std::size_t kSumsBytes = static_cast<std::size_t>(kTileRows) * kPanel * sizeof(float);

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
  void (*run)(const PackedLinear& linear, const std::uint8_t* activations, int rows, Range panel_range, Range row_range,
              const Epilogue& epilogue, std::uint8_t* scratch);
};

extern const KindKernels kInt8Kernels;
extern const KindKernels kInt4Kernels;
extern const KindKernels kBf16Kernels;

static inline int panel_results(const LinearShape& shape) { return shape.gate == Gate::kNone ? kPanel : kPanel / 2; }

static inline int num_panels(const LinearShape& shape) { return ceil_div(num_results(shape), panel_results(shape)); }

// K as the kernels see it.
static inline int padded_inputs(const LinearShape& shape) {
  const int unit = shape.kind == WeightKind::kInt8   ? kInt8Unit
                   : shape.kind == WeightKind::kInt4 ? shape.group
                                                     : kBf16Unit;
  return round_up(shape.num_inputs, unit);
}

// Activations: one float32 scale for each row (not int4), then the rows (int8: see there; bf16: the float32 values;
// int4: for each group its int8 codes, their float32 scale and their sum times the scale), each padded with zeros.
struct ActivationLayout {
  std::size_t rows;
  std::size_t stride;  // bytes from one row to the next
  std::size_t total;
};

static inline ActivationLayout activation_layout(const LinearShape& shape, int rows) {
  const auto count = static_cast<std::size_t>(rows);
  const auto inputs = static_cast<std::size_t>(padded_inputs(shape));
  ActivationLayout layout{round_up(count * sizeof(float), kAlignment), 0, 0};
  std::size_t row_bytes = inputs * (shape.kind == WeightKind::kInt8 ? kInt8RowBytes : sizeof(float));
  if (shape.kind == WeightKind::kInt4) {
    layout.rows = 0;
    row_bytes = inputs + static_cast<std::size_t>(num_groups(shape)) * 2 * sizeof(float);
  }
  // Rows that start close to each other modulo a page compete for the same cache sets.
  layout.stride = round_up(row_bytes, kAlignment);
  const std::size_t phase = layout.stride % 4096;
  if (count > 1 && layout.stride > 2048 && (phase < 512 || phase > 3584)) {
    layout.stride += 1024;
  }
  layout.total = layout.rows + count * layout.stride;
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
  constexpr double kBytesPerNs = 14.0;  // of weights from memory, for one core, about
  constexpr double kItemNs = 15e3;
  const int fitting = static_cast<int>(kRowBlockBytes / activation_layout(shape, 1).stride);
  const int most_rows = fitting > kMaxRowBlock ? kMaxRowBlock : fitting < 2 * kTileRows ? 2 * kTileRows : fitting;
  ItemPlan plan;
  plan.row_blocks = ceil_div(rows, most_rows);
  plan.rows_per_block = round_up(ceil_div(rows, plan.row_blocks), kTileRows);
  plan.row_blocks = ceil_div(rows, plan.rows_per_block);
  const double read_ns = static_cast<double>(panel_bytes) / kBytesPerNs;
  const double compute_ns = 2.0 * kPanel * shape.num_inputs *
                            (rows < plan.rows_per_block ? rows : plan.rows_per_block) /
                            kOpsPerNs[static_cast<int>(shape.kind)];
  const int panels = num_panels(shape);
  const double wanted = kItemNs / (read_ns > compute_ns ? read_ns : compute_ns);
  const int balanced = static_cast<int>(static_cast<std::int64_t>(panels) * plan.row_blocks / (4 * num_threads));
  int count = wanted > panels ? panels : static_cast<int>(wanted);
  if (num_threads > 1 && count > balanced) {
    count = balanced;
  }
  if (rows > kTileRows && count > kMaxItemPanels) {
    count = kMaxItemPanels;
  }
  plan.panels_per_item = count < 1 ? 1 : count;
  plan.panel_items = ceil_div(panels, plan.panels_per_item);
  return plan;
}

// Lines of a large output are far away and on as many pages as there are rows: a tile asks for its own before it starts.
static inline void prefetch_outputs(const LinearShape& shape, int panel, Range rows, const Epilogue& epilogue) {
  const int n = panel * panel_results(shape);
  for (int r = rows.first; r < rows.last; ++r) {
    __builtin_prefetch(epilogue.out + r * epilogue.out_stride + n, 1);
    if (epilogue.residual != nullptr) {
      __builtin_prefetch(epilogue.residual + r * epilogue.residual_stride + n);
    }
  }
}

// What a tile fetches ahead: its share, evenly over the units it goes through, kLines of kBytes each.
template <int kBytes>
struct Ahead {
  static constexpr int kLines = (kBytes + 63) / 64;
  const std::uint8_t* next;
  std::ptrdiff_t step;

  [[gnu::always_inline]] inline void fetch_unit() {
#pragma GCC unroll 32
    for (int i = 0; i < kLines; ++i) {
      __builtin_prefetch(next, 0, 2);
      next += step;
    }
  }
};

// Multiplies a block of rows with a run of panels. A panel is a header and then units, which are what a tile goes
// through one by one: some inputs of all its outputs. The kernel of a weight kind has
//
//   kHeaderBytes, kUnitBytes
//   prepare(packed, units, tiles): what its tiles are given as the units of a panel, these or others in scratch
//   tile(height, row, units, prepared, ahead, sums): sets sums[height][kPanel] to the products of `height` rows from
//       `row` with the units
//   finish(panel, data, rows, sums): the epilogue of some rows of one panel
template <typename Kernel, typename Sum>
static inline void run_panels(const Kernel& kernel, const PackedLinear& linear, std::size_t panel_bytes, Range panels,
                              Range rows, const Epilogue& epilogue, Sum* sums) {
  using AheadUnit = Ahead<Kernel::kUnitBytes>;
  const int units = static_cast<int>((panel_bytes - Kernel::kHeaderBytes) / Kernel::kUnitBytes);
  const int count = rows.last - rows.first;
  const int tiles = ceil_div(count, kTileRows);
  for (int panel = panels.first; panel < panels.last; ++panel) {
    const std::uint8_t* data = linear.data + static_cast<std::size_t>(panel) * panel_bytes;
    // One tile streams; of several, each fetches its share of the next panel.
    AheadUnit ahead{data + kAheadBytes, 64};
    if (tiles > 1) {
      ahead.next = data + panel_bytes;
      ahead.step = panel + 1 < panels.last ? ceil_div(Kernel::kUnitBytes, tiles * AheadUnit::kLines) : 0;
    }
    const std::uint8_t* prepared = kernel.prepare(data + Kernel::kHeaderBytes, units, tiles);
    // Tiles as equal as can be: a last one of a row or two would cost nearly as much as a whole one.
    for (int t = 0; t < tiles; ++t) {
      const Range tile_rows{rows.first + count * t / tiles, rows.first + count * (t + 1) / tiles};
      if (tiles > 1) {
        prefetch_outputs(linear.shape, panel, tile_rows, epilogue);
      }
      kernel.tile(tile_rows.last - tile_rows.first, tile_rows.first, units, prepared, ahead, sums);
      ahead.next += units * AheadUnit::kLines * ahead.step;
      kernel.finish(panel, data, tile_rows, sums);
    }
  }
}

static inline const KindKernels& kernels_of(const LinearShape& shape) {
  switch (shape.kind) {
    case WeightKind::kInt8:
      return kInt8Kernels;
    case WeightKind::kInt4:
      return kInt4Kernels;
    case WeightKind::kBf16:
      break;
  }
  return kBf16Kernels;
}

// Row i of a panel: which output it is, -1 for padding.
static inline int output_of(const LinearShape& shape, int panel, int i) {
  const int results = num_results(shape);
  if (shape.gate == Gate::kNone) {
    const int n = panel * kPanel + i;
    return n < results ? n : -1;
  }
  const int n = panel * (kPanel / 2) + i % (kPanel / 2);
  return n >= results ? -1 : i < kPanel / 2 ? n : n + results;
}

template <typename Float>
static inline void panel_rows(const LinearShape& shape, int panel, Float* weights, Float* (&rows)[kPanel]) {
  for (int i = 0; i < kPanel; ++i) {
    const int n = output_of(shape, panel, i);
    rows[i] = n < 0 ? nullptr : weights + static_cast<std::ptrdiff_t>(n) * shape.num_inputs;
  }
}

// The functions of the table.
struct Panels {
  static std::size_t packed_bytes(const LinearShape& shape) {
    return round_up(static_cast<std::size_t>(num_panels(shape)) * kernels_of(shape).panel_bytes(shape), kAlignment);
  }

  static void pack(const LinearShape& shape, const float* weights, int first, int last, std::uint8_t* packed) {
    const KindKernels& kernels = kernels_of(shape);
    const std::size_t bytes = kernels.panel_bytes(shape);
    const int panels = ceil_div(last, panel_results(shape));
    for (int panel = first / panel_results(shape); panel < panels; ++panel) {
      const float* rows[kPanel];
      panel_rows(shape, panel, weights, rows);
      kernels.pack_panel(shape, rows, packed + static_cast<std::size_t>(panel) * bytes);
    }
  }

  static void unpack(const LinearShape& shape, const std::uint8_t* packed, float* weights) {
    const KindKernels& kernels = kernels_of(shape);
    const std::size_t bytes = kernels.panel_bytes(shape);
    for (int panel = 0; panel < num_panels(shape); ++panel) {
      float* rows[kPanel];
      panel_rows(shape, panel, weights, rows);
      kernels.unpack_panel(shape, packed + static_cast<std::size_t>(panel) * bytes, rows);
    }
  }

  static int activation_limit(const LinearShape& shape) { return activation_limit_of(shape); }

  static std::size_t activation_bytes(const LinearShape& shape, int rows) {
    return activation_layout(shape, rows).total;
  }

  static void quantise(const LinearShape& shape, const float* x, std::ptrdiff_t stride, int rows, int first, int last,
                       std::uint8_t* activations) {
    const KindKernels& kernels = kernels_of(shape);
    for (int r = first; r < last; ++r) {
      kernels.quantise_row(shape, x + r * stride, r, rows, activations);
    }
  }

  static int num_items(const LinearShape& shape, int rows, int num_threads) {
    const ItemPlan plan = plan_items(shape, kernels_of(shape).panel_bytes(shape), rows, num_threads);
    return plan.panel_items * plan.row_blocks;
  }

  static std::size_t scratch_bytes(const LinearShape&, int rows) {
    return kSumsBytes + (rows > kTileRows ? kWideBytes : 0);
  }

  static void run(const PackedLinear& linear, const std::uint8_t* activations, int rows, int num_threads, int item,
                  const Epilogue& epilogue, std::uint8_t* scratch) {
    const KindKernels& kernels = kernels_of(linear.shape);
    const ItemPlan plan = plan_items(linear.shape, kernels.panel_bytes(linear.shape), rows, num_threads);
    const int panel = item % plan.panel_items * plan.panels_per_item;
    const int row = item / plan.panel_items * plan.rows_per_block;
    const int panels = num_panels(linear.shape);
    const Range panel_range{panel, panel + plan.panels_per_item < panels ? panel + plan.panels_per_item : panels};
    const Range row_range{row, row + plan.rows_per_block < rows ? row + plan.rows_per_block : rows};
    kernels.run(linear, activations, rows, panel_range, row_range, epilogue, scratch);
  }

  static constexpr LinearKernels table(const char* layout) {
    return {
        .layout = layout,
        .packed_bytes = packed_bytes,
        .pack = pack,
        .pack_step = kPanel,
        .unpack = unpack,
        .activation_limit = activation_limit,
        .activation_bytes = activation_bytes,
        .quantise = quantise,
        .quantise_step = 1,
        .num_items = num_items,
        .scratch_bytes = scratch_bytes,
        .run = run,
    };
  }
};

}  // namespace kvist::KVIST_PANEL_NAMESPACE
