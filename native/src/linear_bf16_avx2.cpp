// Bfloat16 weights with AVX2: products and sums in float32, first input first.
//
//   panel   [k][8] pairs of bfloat16: the low half of a 32-bit lane is an output of the first eight, the high half the
//           one eight further, so that a shift and a mask widen them; K padded to 4
//
// The dominating instruction is vfmadd231ps: two start each cycle. Per input and tile of 6 rows: 12 of them, 6 broadcasts
// from memory, one load of weights and two instructions to widen it. With one row, a panel is a stream of 32 bytes per
// input: memory is the bound.

#include "linear_avx2.h"

namespace kvist::avx2 {
namespace {

constexpr int kUnit = 4;  // inputs
constexpr int kInputBytes = kPanel * 2;
constexpr int kUnitBytes = kUnit * kInputBytes;

std::size_t panel_bytes(const LinearShape& shape) {
  return static_cast<std::size_t>(padded_inputs(shape)) * kInputBytes;
}

// The nearest bfloat16 in the upper half of each lane, ties to even; a NaN stays one.
__m256i round_bf16(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  return _mm256_and_si256(_mm256_blendv_epi8(rounded, quiet, nan), _mm256_set1_epi32(static_cast<int>(0xffff0000U)));
}

void pack_panel(const LinearShape& shape, const float* const (&rows)[kPanel], std::uint8_t* panel) {
  for (int k = 0; k < padded_inputs(shape); k += 8) {
    __m256 low[8];
    __m256 high[8];
    load_columns(rows, k, shape.num_inputs, low);
    load_columns(rows + 8, k, shape.num_inputs, high);
    for (int i = 0; i < 8 && k + i < padded_inputs(shape); ++i) {
      const __m256i pair = _mm256_or_si256(_mm256_srli_epi32(round_bf16(low[i]), 16), round_bf16(high[i]));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(panel + static_cast<std::size_t>(k + i) * kInputBytes), pair);
    }
  }
}

void unpack_panel(const LinearShape& shape, const std::uint8_t* panel, float* const (&rows)[kPanel]) {
  for (int i = 0; i < kPanel; ++i) {
    for (int k = 0; rows[i] != nullptr && k < shape.num_inputs; ++k) {
      rows[i][k] = bf16_to_f32(reinterpret_cast<const std::uint16_t*>(panel)[k * kPanel + i % 8 * 2 + i / 8]);
    }
  }
}

void quantise_row(const LinearShape& shape, const float* x, int row, int rows, std::uint8_t* activations) {
  const ActivationLayout layout = activation_layout(shape, rows);
  auto* out = reinterpret_cast<float*>(activations + layout.codes + static_cast<std::size_t>(row) * layout.stride);
  std::memcpy(out, x, static_cast<std::size_t>(shape.num_inputs) * sizeof(float));
  for (int k = shape.num_inputs; k < padded_inputs(shape); ++k) {
    out[k] = 0.0f;
  }
}

// Adds the products of `units` units of R rows to sums[R][16], or sets them.
template <int R>
[[gnu::noinline]] void tile(const float* rows, std::ptrdiff_t stride, const std::uint8_t* packed, int units,
                            Ahead<kUnitBytes> ahead, bool resume, float* sums) {
  __m256 low[R];
  __m256 high[R];
  if (resume) {
    unroll<R>([&](auto i) KVIST_LAMBDA {
      low[i] = _mm256_load_ps(sums + kPanel * i);
      high[i] = _mm256_load_ps(sums + kPanel * i + 8);
    });
  } else {
    unroll<R>([&](auto i) KVIST_LAMBDA { low[i] = high[i] = _mm256_setzero_ps(); });
  }
  RowPointers<float> x(rows, stride);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
  for (int unit = 0; unit < units; ++unit) {
    ahead.fetch_unit();
    unroll<kUnit>([&](auto k) KVIST_LAMBDA {
      const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(packed) + k);
      const __m256 w0 = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
      const __m256 w1 = _mm256_castsi256_ps(_mm256_and_si256(both, upper));
      unroll<R>([&](auto i) KVIST_LAMBDA {
        const __m256 value = _mm256_castsi256_ps(broadcast_bytes4(x.row(i) + k));
        fma_in_place(low[i], value, w0);
        fma_in_place(high[i], value, w1);
      });
    });
    x.advance(kUnit);
    packed += kUnitBytes;
  }
  unroll<R>([&](auto i) KVIST_LAMBDA {
    _mm256_store_ps(sums + kPanel * i, low[i]);
    _mm256_store_ps(sums + kPanel * i + 8, high[i]);
  });
}

using Tile = void (*)(const float*, std::ptrdiff_t, const std::uint8_t*, int, Ahead<kUnitBytes>, bool, float*);
constexpr Tile kTiles[kTileRows + 1] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

// Sets sums[P][R][16] to the products of R rows with P whole panels.
template <int R, int P>
[[gnu::noinline]] void stream(const float* rows, std::ptrdiff_t stride, const std::uint8_t* const* panels, int units,
                              float* sums) {
  __m256 low[P][R];
  __m256 high[P][R];
  const std::uint8_t* packed[P];
  unroll<P>([&](auto p) KVIST_LAMBDA {
    packed[p] = panels[p];
    unroll<R>([&](auto i) KVIST_LAMBDA { low[p][i] = high[p][i] = _mm256_setzero_ps(); });
  });
  RowPointers<float> x(rows, stride);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
  for (int unit = 0; unit < units; ++unit) {
    unroll<kUnit>([&](auto k) KVIST_LAMBDA {
      unroll<P>([&](auto p) KVIST_LAMBDA {
        const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(packed[p]) + k);
        const __m256 w0 = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
        const __m256 w1 = _mm256_castsi256_ps(_mm256_and_si256(both, upper));
        unroll<R>([&](auto i) KVIST_LAMBDA {
          const __m256 value = _mm256_castsi256_ps(broadcast_bytes4(x.row(i) + k));
          fma_in_place(low[p][i], value, w0);
          fma_in_place(high[p][i], value, w1);
        });
      });
    });
    x.advance(kUnit);
    unroll<P>([&](auto p) KVIST_LAMBDA { packed[p] += kUnitBytes; });
  }
  unroll<P>([&](auto p) KVIST_LAMBDA {
    unroll<R>([&](auto i) KVIST_LAMBDA {
      _mm256_store_ps(sums + kPanel * (p * R + i), low[p][i]);
      _mm256_store_ps(sums + kPanel * (p * R + i) + 8, high[p][i]);
    });
  });
}

using Stream = void (*)(const float*, std::ptrdiff_t, const std::uint8_t* const*, int, float*);
constexpr Stream kStreams[kMaxStreamedRows + 1][kMaxStreams + 1] = {
    {},
    {nullptr, stream<1, 1>, stream<1, 2>, stream<1, 3>, stream<1, 4>},
    {nullptr, stream<2, 1>, stream<2, 2>, stream<2, 3>},
    {nullptr, stream<3, 1>, stream<3, 2>},
};

struct Kernel {
  static constexpr std::size_t kHeaderBytes = 0;
  static constexpr int kUnitBytes = kUnit * kInputBytes;
  const PackedLinear& linear;
  const Epilogue& epilogue;
  const float* x;
  std::ptrdiff_t stride;

  void tile(int height, int row, int first_unit, int units, const std::uint8_t* packed, Ahead<kUnitBytes> ahead,
            bool resume, float* sums) const {
    kTiles[height](x + row * stride + first_unit * kUnit, stride, packed, units, ahead, resume, sums);
  }

  void stream(int height, int num_panels, int row, const std::uint8_t* const* panels, float* sums) const {
    kStreams[height][num_panels](x + row * stride, stride, panels, padded_inputs(linear.shape) / kUnit, sums);
  }

  void finish(int panel, const std::uint8_t*, Range rows, const float* sums) const {
    finish_panel(linear, panel, rows, epilogue, [&](int r, __m256& low, __m256& high) KVIST_LAMBDA {
      low = _mm256_load_ps(sums + (r - rows.first) * kPanel);
      high = _mm256_load_ps(sums + (r - rows.first) * kPanel + 8);
    });
  }
};

void run(const PackedLinear& linear, const std::uint8_t* activations, int rows, Range panel_range, int next_panel,
         Range row_range, const Epilogue& epilogue, std::uint8_t* scratch) {
  const ActivationLayout layout = activation_layout(linear.shape, rows);
  const Kernel kernel{linear, epilogue, reinterpret_cast<const float*>(activations + layout.codes),
                      static_cast<std::ptrdiff_t>(layout.stride / sizeof(float))};
  run_panels(kernel, linear.data, panel_bytes(linear.shape), padded_inputs(linear.shape) / kUnit, panel_range,
             next_panel, row_range, reinterpret_cast<float*>(scratch));
}

}  // namespace

const KindKernels kBf16Kernels = {
    .panel_bytes = panel_bytes,
    .pack_panel = pack_panel,
    .unpack_panel = unpack_panel,
    .quantise_row = quantise_row,
    .run = run,
};

}  // namespace kvist::avx2
