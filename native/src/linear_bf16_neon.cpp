// Bfloat16 weights with NEON: products and sums in float32, first input first.
//
//   panel   [k][16] bfloat16; K padded to 4
//   row     float32 values
//
// The dominating instruction is fmla. Per input and tile of 6 rows: 24 of them, four widening shifts, two loads of
// weights and six broadcasts. With one row, a panel is a stream of 32 bytes per input: memory is the bound.

#include "linear_neon.h"

namespace kvist::neon {
namespace {

constexpr int kInputBytes = kPanel * 2;
constexpr int kUnitBytes = kBf16Unit * kInputBytes;

std::size_t panel_bytes(const LinearShape& shape) {
  return static_cast<std::size_t>(padded_inputs(shape)) * kInputBytes;
}

void pack_panel(const LinearShape& shape, const float* const (&rows)[kPanel], std::uint8_t* panel) {
  auto* out = reinterpret_cast<std::uint16_t*>(panel);
  for (int i = 0; i < kPanel; ++i) {
    for (int k = 0; k < padded_inputs(shape); ++k) {
      out[k * kPanel + i] = rows[i] != nullptr && k < shape.num_inputs ? f32_to_bf16(rows[i][k]) : std::uint16_t{0};
    }
  }
}

void unpack_panel(const LinearShape& shape, const std::uint8_t* panel, float* const (&rows)[kPanel]) {
  for (int i = 0; i < kPanel; ++i) {
    for (int k = 0; rows[i] != nullptr && k < shape.num_inputs; ++k) {
      rows[i][k] = bf16_to_f32(reinterpret_cast<const std::uint16_t*>(panel)[k * kPanel + i]);
    }
  }
}

void quantise_row(const LinearShape& shape, const float* x, int row, int rows, std::uint8_t* activations) {
  const ActivationLayout layout = activation_layout(shape, rows);
  auto* out = reinterpret_cast<float*>(activations + layout.rows + static_cast<std::size_t>(row) * layout.stride);
  std::memcpy(out, x, static_cast<std::size_t>(shape.num_inputs) * sizeof(float));
  for (int k = shape.num_inputs; k < padded_inputs(shape); ++k) {
    out[k] = 0.0f;
  }
}

// Sets sums[R][16] to the products of R rows.
template <int R>
[[gnu::noinline]] void tile(const float* rows, std::ptrdiff_t stride, const std::uint8_t* packed, int units,
                            Ahead<kUnitBytes> ahead, float* sums) {
  float32x4_t acc[R][4];
  unroll<4 * R>([&](auto i) KVIST_LAMBDA { acc[i / 4][i % 4] = vdupq_n_f32(0.0f); });
  for (int unit = 0; unit < units; ++unit, rows += kBf16Unit, packed += kUnitBytes) {
    ahead.fetch_unit();
    unroll<kBf16Unit>([&](auto k) KVIST_LAMBDA {
      const auto* from = reinterpret_cast<const std::uint16_t*>(packed + k * kInputBytes);
      float32x4_t weights[4];
      unroll<4>([&](auto i) KVIST_LAMBDA { weights[i] = widen_bf16(vld1_u16(from + 4 * i)); });
      unroll<R>([&](auto r) KVIST_LAMBDA {
        const float32x4_t value = vdupq_n_f32(rows[r * stride + k]);
        unroll<4>([&](auto i) KVIST_LAMBDA { acc[r][i] = vfmaq_f32(acc[r][i], weights[i], value); });
      });
    });
  }
  unroll<4 * R>([&](auto i) KVIST_LAMBDA { vst1q_f32(sums + 4 * i, acc[i / 4][i % 4]); });
}

using Tile = void (*)(const float*, std::ptrdiff_t, const std::uint8_t*, int, Ahead<kUnitBytes>, float*);
constexpr Tile kTiles[kTileRows + 1] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

struct Kernel {
  static constexpr std::size_t kHeaderBytes = 0;
  static constexpr int kUnitBytes = kBf16Unit * kInputBytes;
  const PackedLinear& linear;
  const Epilogue& epilogue;
  const float* x;
  std::ptrdiff_t stride;

  const std::uint8_t* prepare(const std::uint8_t* packed, int, int) const { return packed; }

  void tile(int height, int row, int units, const std::uint8_t* packed, Ahead<kUnitBytes> ahead, float* sums) const {
    kTiles[height](x + row * stride, stride, packed, units, ahead, sums);
  }

  void finish(int panel, const std::uint8_t*, Range range, float* sums) const {
    finish_panel(linear, panel, range, epilogue, [&](int r) KVIST_LAMBDA { return sums + (r - range.first) * kPanel; });
  }
};

void run(const PackedLinear& linear, const std::uint8_t* activations, int rows, Range panel_range, Range row_range,
         const Epilogue& epilogue, std::uint8_t* scratch) {
  const ActivationLayout layout = activation_layout(linear.shape, rows);
  const Kernel kernel{linear, epilogue, reinterpret_cast<const float*>(activations + layout.rows),
                      static_cast<std::ptrdiff_t>(layout.stride / sizeof(float))};
  run_panels(kernel, linear, panel_bytes(linear.shape), panel_range, row_range, epilogue,
             reinterpret_cast<float*>(scratch));
}

}  // namespace

const KindKernels kBf16Kernels = {
    .panel_bytes = panel_bytes,
    .pack_panel = pack_panel,
    .unpack_panel = unpack_panel,
    .quantise_row = quantise_row,
    .run = run,
};

}  // namespace kvist::neon
