// Bfloat16 weights with AVX-512: products and sums in float32, first input first.
//
//   panel   [k][16] pairs of bfloat16: the low half of a 32-bit lane is an output of the first sixteen, the high half
//           the one sixteen further, so that a shift and a mask widen them; K padded to 4
//   row     float32 values
//
// The dominating instruction is vfmadd231ps, of which two start each cycle where there are two units of 512 bits. Per
// input and tile of 12 rows: 24 of them, 12 broadcasts from memory, one load of weights and two instructions to widen
// it. With one row, a panel is a stream of 64 bytes per input: memory is the bound. (vdpbf16ps has half the rate of it
// where it was measured, and rounds activations.)

#include "linear_avx512.h"

namespace kvist::avx512 {
namespace {

constexpr int kInputBytes = kPanel * 2;
constexpr int kUnitBytes = kBf16Unit * kInputBytes;

std::size_t panel_bytes(const LinearShape& shape) {
  return static_cast<std::size_t>(padded_inputs(shape)) * kInputBytes;
}

// Where the weight of input k and row i of the panel is.
int place(int k, int i) { return k * kPanel + i % 16 * 2 + i / 16; }

void pack_panel(const LinearShape& shape, const float* const (&rows)[kPanel], std::uint8_t* panel) {
  auto* out = reinterpret_cast<std::uint16_t*>(panel);
  for (int i = 0; i < kPanel; ++i) {
    for (int k = 0; k < padded_inputs(shape); ++k) {
      out[place(k, i)] = rows[i] != nullptr && k < shape.num_inputs ? f32_to_bf16(rows[i][k]) : std::uint16_t{0};
    }
  }
}

void unpack_panel(const LinearShape& shape, const std::uint8_t* panel, float* const (&rows)[kPanel]) {
  for (int i = 0; i < kPanel; ++i) {
    for (int k = 0; rows[i] != nullptr && k < shape.num_inputs; ++k) {
      rows[i][k] = bf16_to_f32(reinterpret_cast<const std::uint16_t*>(panel)[place(k, i)]);
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

// Sets sums[R][32] to the products of R rows.
template <int R>
[[gnu::noinline]] void tile(const float* rows, std::ptrdiff_t stride, const std::uint8_t* packed, int units,
                            Ahead<kUnitBytes> ahead, float* sums) {
  __m512 low[R];
  __m512 high[R];
  unroll<R>([&](auto i) KVIST_LAMBDA { low[i] = high[i] = _mm512_setzero_ps(); });
  RowPointers<float, R> x(rows, stride);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  for (int unit = 0; unit < units; ++unit) {
    ahead.fetch_unit();
    repeat<kBf16Unit>([&](auto k) KVIST_LAMBDA {
      const __m512i both = load(packed + k * kInputBytes);
      const __m512 w0 = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
      const __m512 w1 = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
      unroll<R>([&](auto i) KVIST_LAMBDA {
        const __m512 value = broadcast_float(x.row(i) + k);
        low[i] = _mm512_fmadd_ps(value, w0, low[i]);
        high[i] = _mm512_fmadd_ps(value, w1, high[i]);
      });
    });
    x.advance(kBf16Unit);
    packed += kUnitBytes;
  }
  unroll<R>([&](auto i) KVIST_LAMBDA {
    _mm512_store_ps(sums + kPanel * i, low[i]);
    _mm512_store_ps(sums + kPanel * i + 16, high[i]);
  });
}

using Tile = void (*)(const float*, std::ptrdiff_t, const std::uint8_t*, int, Ahead<kUnitBytes>, float*);
constexpr Tile kTiles[kTileRows + 1] = {nullptr, tile<1>, tile<2>, tile<3>,  tile<4>,  tile<5>, tile<6>,
                                        tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>};

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

  void finish(int panel, const std::uint8_t*, Range rows, const float* sums) const {
    finish_panel(linear, panel, rows, epilogue, [&](int r, __m512& low, __m512& high) KVIST_LAMBDA {
      low = _mm512_load_ps(sums + (r - rows.first) * kPanel);
      high = _mm512_load_ps(sums + (r - rows.first) * kPanel + 16);
    });
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

}  // namespace kvist::avx512
