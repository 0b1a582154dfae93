// The AVX2 table: panels and items; the kernels of each weight kind are in linear_s8, linear_s4 and linear_bf16.

#include "linear_avx2.h"

#include "linear_tables.h"

namespace kvist::avx2 {
namespace {

const KindKernels& kernels_of(const LinearShape& shape) {
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

std::size_t packed_bytes(const LinearShape& shape) {
  return round_up(static_cast<std::size_t>(num_panels(shape)) * kernels_of(shape).panel_bytes(shape), kAlignment);
}

// Row i of a panel: which output it is, -1 for padding.
int output_of(const LinearShape& shape, int panel, int i) {
  const int results = num_results(shape);
  if (shape.gate == Gate::kNone) {
    const int n = panel * kPanel + i;
    return n < results ? n : -1;
  }
  const int n = panel * (kPanel / 2) + i % (kPanel / 2);
  return n >= results ? -1 : i < kPanel / 2 ? n : n + results;
}

template <typename Float>
void panel_rows(const LinearShape& shape, int panel, Float* weights, Float* (&rows)[kPanel]) {
  for (int i = 0; i < kPanel; ++i) {
    const int n = output_of(shape, panel, i);
    rows[i] = n < 0 ? nullptr : weights + static_cast<std::ptrdiff_t>(n) * shape.num_inputs;
  }
}

void pack(const LinearShape& shape, const float* weights, int first, int last, std::uint8_t* packed) {
  const KindKernels& kernels = kernels_of(shape);
  const std::size_t bytes = kernels.panel_bytes(shape);
  const int panels = ceil_div(last, panel_results(shape));
  for (int panel = first / panel_results(shape); panel < panels; ++panel) {
    const float* rows[kPanel];
    panel_rows(shape, panel, weights, rows);
    kernels.pack_panel(shape, rows, packed + static_cast<std::size_t>(panel) * bytes);
  }
}

void unpack(const LinearShape& shape, const std::uint8_t* packed, float* weights) {
  const KindKernels& kernels = kernels_of(shape);
  const std::size_t bytes = kernels.panel_bytes(shape);
  for (int panel = 0; panel < num_panels(shape); ++panel) {
    float* rows[kPanel];
    panel_rows(shape, panel, weights, rows);
    kernels.unpack_panel(shape, packed + static_cast<std::size_t>(panel) * bytes, rows);
  }
}

int activation_limit(const LinearShape& shape) { return activation_limit_of(shape); }

std::size_t activation_bytes(const LinearShape& shape, int rows) { return activation_layout(shape, rows).total; }

void quantise(const LinearShape& shape, const float* x, std::ptrdiff_t stride, int rows, int first, int last,
              std::uint8_t* activations) {
  const KindKernels& kernels = kernels_of(shape);
  for (int r = first; r < last; ++r) {
    kernels.quantise_row(shape, x + r * stride, r, rows, activations);
  }
}

int num_items(const LinearShape& shape, int rows, int num_threads) {
  const ItemPlan plan = plan_items(shape, kernels_of(shape).panel_bytes(shape), rows, num_threads);
  return plan.panel_items * plan.row_blocks;
}

std::size_t scratch_bytes(const LinearShape&, int rows) {
  const auto block = static_cast<std::size_t>(rows < kRowBlock ? rows : kRowBlock);
  return block * kItemPanels * kPanel * sizeof(float) + kExpandedBytes;
}

void run(const PackedLinear& linear, const std::uint8_t* activations, int rows, int num_threads, int item,
         const Epilogue& epilogue, std::uint8_t* scratch) {
  const KindKernels& kernels = kernels_of(linear.shape);
  const ItemPlan plan = plan_items(linear.shape, kernels.panel_bytes(linear.shape), rows, num_threads);
  const int panel = item % plan.panel_items * plan.panels_per_item;
  const int row = item / plan.panel_items * plan.rows_per_block;
  const int panels = num_panels(linear.shape);
  const Range panel_range{panel, panel + plan.panels_per_item < panels ? panel + plan.panels_per_item : panels};
  const Range row_range{row, row + plan.rows_per_block < rows ? row + plan.rows_per_block : rows};
  // Threads mostly claim items in turn. After the last item there is nothing to fetch that is not there.
  const int next_item = item + num_threads < plan.panel_items * plan.row_blocks ? item + num_threads : item;
  const int next_panel = next_item % plan.panel_items * plan.panels_per_item;
  kernels.run(linear, activations, rows, panel_range, next_panel, row_range, epilogue, scratch);
}

}  // namespace
}  // namespace kvist::avx2

namespace kvist {

const LinearKernels kLinearAvx2 = {
    .layout = "avx2-3",
    .packed_bytes = avx2::packed_bytes,
    .pack = avx2::pack,
    .pack_step = avx2::kPanel,
    .unpack = avx2::unpack,
    .activation_limit = avx2::activation_limit,
    .activation_bytes = avx2::activation_bytes,
    .quantise = avx2::quantise,
    .quantise_step = 1,
    .num_items = avx2::num_items,
    .scratch_bytes = avx2::scratch_bytes,
    .run = avx2::run,
};

}  // namespace kvist
