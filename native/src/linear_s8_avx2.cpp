// Int8 weights with AVX2: 16-bit activations, exact int32 sums.
//
//   panel   16 float32 scales, then [k / 2][16 outputs][2] int8 codes; K padded to 8
//
// The dominating instruction is vpmaddwd: 16 products of 16 bits, added in pairs; it takes 16-bit activations at no cost,
// so they are that wide. Per pair of inputs and tile of 6 rows: 12 vpmaddwd, 12 vpaddd, 6 broadcasts from memory and two
// widening loads of weights (vpmovsxbw); two vpmaddwd and four vector operations in all start each cycle, which bounds it
// at 64 operations a cycle. With one row, a panel is a stream of 16 bytes per input: memory is the bound.

#include "linear_avx2.h"

namespace kvist::avx2 {
namespace {

constexpr int kUnit = 8;  // inputs
constexpr int kUnitBytes = kUnit * kPanel;
constexpr std::size_t kScalesBytes = kPanel * sizeof(float);

std::size_t panel_bytes(const LinearShape& shape) {
  return kScalesBytes + static_cast<std::size_t>(padded_inputs(shape)) * kPanel;
}

void pack_panel(const LinearShape& shape, const float* const (&rows)[kPanel], std::uint8_t* panel) {
  alignas(32) float inverse[kPanel];
  auto* scales = reinterpret_cast<float*>(panel);
  for (int i = 0; i < kPanel; ++i) {
    const CodeScale codes = code_scale(rows[i] != nullptr ? max_abs(rows[i], shape.num_inputs) : 0.0f, kInt8Limit);
    scales[i] = codes.scale;
    inverse[i] = codes.inverse;
  }
  const __m256 low_inverse = _mm256_load_ps(inverse);
  const __m256 high_inverse = _mm256_load_ps(inverse + 8);
  const __m256i byte = _mm256_set1_epi32(0xff);
  std::uint8_t* out = panel + kScalesBytes;
  for (int k = 0; k < padded_inputs(shape); k += 8) {
    __m256 low[8];
    __m256 high[8];
    load_columns(rows, k, shape.num_inputs, low);
    load_columns(rows + 8, k, shape.num_inputs, high);
    for (int i = 0; i < 8; i += 2, out += 2 * kPanel) {
      const auto pair = [&](const __m256* columns, __m256 scale) {
        const __m256i even = _mm256_and_si256(round_values(columns[i], scale), byte);
        const __m256i odd = _mm256_and_si256(round_values(columns[i + 1], scale), byte);
        return _mm256_or_si256(even, _mm256_slli_epi32(odd, 8));
      };
      const __m256i both = _mm256_packus_epi32(pair(low, low_inverse), pair(high, high_inverse));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute4x64_epi64(both, 0xd8));
    }
  }
}

void unpack_panel(const LinearShape& shape, const std::uint8_t* panel, float* const (&rows)[kPanel]) {
  const auto* scales = reinterpret_cast<const float*>(panel);
  const auto* codes = reinterpret_cast<const std::int8_t*>(panel + kScalesBytes);
  for (int i = 0; i < kPanel; ++i) {
    for (int k = 0; rows[i] != nullptr && k < shape.num_inputs; ++k) {
      rows[i][k] = scales[i] * static_cast<float>(codes[(k / 2 * kPanel + i) * 2 + k % 2]);
    }
  }
}

void quantise_row(const LinearShape& shape, const float* x, int row, int rows, std::uint8_t* activations) {
  const ActivationLayout layout = activation_layout(shape, rows);
  const CodeScale codes = code_scale(max_abs(x, shape.num_inputs), activation_limit_of(shape));
  reinterpret_cast<float*>(activations)[row] = codes.scale;
  const __m256 inverse = _mm256_set1_ps(codes.inverse);
  auto* out =
      reinterpret_cast<std::int16_t*>(activations + layout.codes + static_cast<std::size_t>(row) * layout.stride);
  int k = 0;
  for (; k + 16 <= shape.num_inputs; k += 16) {
    const __m256i low = round_values(_mm256_loadu_ps(x + k), inverse);
    const __m256i high = round_values(_mm256_loadu_ps(x + k + 8), inverse);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + k),
                        _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
  }
  for (; k < padded_inputs(shape); k += 8) {
    const int left = shape.num_inputs - k;
    const __m256 values = left > 0 ? _mm256_maskload_ps(x + k, lane_mask(left > 8 ? 8 : left)) : _mm256_setzero_ps();
    const __m256i wide = round_values(values, inverse);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k),
                     _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
  }
}

// Adds the products of `units` units of R rows to sums[R][16], or sets them.
template <int R>
[[gnu::noinline]] void tile(const std::int16_t* codes, std::ptrdiff_t stride, const std::uint8_t* packed, int units,
                            Ahead<kUnitBytes> ahead, bool resume, std::int32_t* sums) {
  __m256i low[R];
  __m256i high[R];
  auto* out = reinterpret_cast<__m256i*>(sums);
  if (resume) {
    unroll<R>([&](auto i) KVIST_LAMBDA {
      low[i] = _mm256_load_si256(out + 2 * i);
      high[i] = _mm256_load_si256(out + 2 * i + 1);
    });
  } else {
    unroll<R>([&](auto i) KVIST_LAMBDA { low[i] = high[i] = _mm256_setzero_si256(); });
  }
  RowPointers<std::int16_t> x(codes, stride);
  for (int unit = 0; unit < units; ++unit) {
    ahead.fetch_unit();
    unroll<kUnit / 2>([&](auto pair) KVIST_LAMBDA {
      const auto* narrow = reinterpret_cast<const __m128i*>(packed) + 2 * pair;
      const __m256i w0 = _mm256_cvtepi8_epi16(_mm_load_si128(narrow));
      const __m256i w1 = _mm256_cvtepi8_epi16(_mm_load_si128(narrow + 1));
      unroll<R>([&](auto i) KVIST_LAMBDA {
        const __m256i both = broadcast_bytes4(x.row(i) + 2 * pair);
        add_in_place32(low[i], _mm256_madd_epi16(both, w0));
        add_in_place32(high[i], _mm256_madd_epi16(both, w1));
      });
    });
    x.advance(kUnit);
    packed += kUnitBytes;
  }
  unroll<R>([&](auto i) KVIST_LAMBDA {
    _mm256_store_si256(out + 2 * i, low[i]);
    _mm256_store_si256(out + 2 * i + 1, high[i]);
  });
}

using Tile = void (*)(const std::int16_t*, std::ptrdiff_t, const std::uint8_t*, int, Ahead<kUnitBytes>, bool,
                      std::int32_t*);
constexpr Tile kTiles[kTileRows + 1] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

// Sets sums[P][R][16] to the products of R rows with P whole panels.
template <int R, int P>
[[gnu::noinline]] void stream(const std::int16_t* codes, std::ptrdiff_t stride, const std::uint8_t* const* panels,
                              int units, std::int32_t* sums) {
  __m256i low[P][R];
  __m256i high[P][R];
  const std::uint8_t* packed[P];
  unroll<P>([&](auto p) KVIST_LAMBDA {
    packed[p] = panels[p] + kScalesBytes;
    unroll<R>([&](auto i) KVIST_LAMBDA { low[p][i] = high[p][i] = _mm256_setzero_si256(); });
  });
  RowPointers<std::int16_t> x(codes, stride);
  for (int unit = 0; unit < units; ++unit) {
    unroll<kUnit / 2>([&](auto pair) KVIST_LAMBDA {
      unroll<P>([&](auto p) KVIST_LAMBDA {
        const auto* narrow = reinterpret_cast<const __m128i*>(packed[p]) + 2 * pair;
        const __m256i w0 = _mm256_cvtepi8_epi16(_mm_load_si128(narrow));
        const __m256i w1 = _mm256_cvtepi8_epi16(_mm_load_si128(narrow + 1));
        unroll<R>([&](auto i) KVIST_LAMBDA {
          const __m256i both = broadcast_bytes4(x.row(i) + 2 * pair);
          add_in_place32(low[p][i], _mm256_madd_epi16(both, w0));
          add_in_place32(high[p][i], _mm256_madd_epi16(both, w1));
        });
      });
    });
    x.advance(kUnit);
    unroll<P>([&](auto p) KVIST_LAMBDA { packed[p] += kUnitBytes; });
  }
  auto* out = reinterpret_cast<__m256i*>(sums);
  unroll<P>([&](auto p) KVIST_LAMBDA {
    unroll<R>([&](auto i) KVIST_LAMBDA {
      _mm256_store_si256(out + 2 * (p * R + i), low[p][i]);
      _mm256_store_si256(out + 2 * (p * R + i) + 1, high[p][i]);
    });
  });
}

using Stream = void (*)(const std::int16_t*, std::ptrdiff_t, const std::uint8_t* const*, int, std::int32_t*);
constexpr Stream kStreams[kMaxStreamedRows + 1][kMaxStreams + 1] = {
    {},
    {nullptr, stream<1, 1>, stream<1, 2>, stream<1, 3>, stream<1, 4>},
    {nullptr, stream<2, 1>, stream<2, 2>, stream<2, 3>},
    {nullptr, stream<3, 1>, stream<3, 2>},
};

struct Kernel {
  static constexpr std::size_t kHeaderBytes = kScalesBytes;
  static constexpr int kUnitBytes = kUnit * kPanel;
  const PackedLinear& linear;
  const Epilogue& epilogue;
  const float* row_scales;
  const std::int16_t* codes;
  std::ptrdiff_t stride;

  void tile(int height, int row, int first_unit, int units, const std::uint8_t* packed, Ahead<kUnitBytes> ahead,
            bool resume, std::int32_t* sums) const {
    kTiles[height](codes + row * stride + first_unit * kUnit, stride, packed, units, ahead, resume, sums);
  }

  void stream(int height, int num_panels, int row, const std::uint8_t* const* panels, std::int32_t* sums) const {
    kStreams[height][num_panels](codes + row * stride, stride, panels, padded_inputs(linear.shape) / kUnit, sums);
  }

  void finish(int panel, const std::uint8_t* data, Range rows, const std::int32_t* sums) const {
    const auto* scales = reinterpret_cast<const float*>(data);
    const __m256 low_scale = _mm256_load_ps(scales);
    const __m256 high_scale = _mm256_load_ps(scales + 8);
    finish_panel(linear, panel, rows, epilogue, [&](int r, __m256& low, __m256& high) KVIST_LAMBDA {
      const auto* row = reinterpret_cast<const __m256i*>(sums + (r - rows.first) * kPanel);
      const __m256 scale = _mm256_set1_ps(row_scales[r]);
      low = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_load_si256(row)), _mm256_mul_ps(low_scale, scale));
      high = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_load_si256(row + 1)), _mm256_mul_ps(high_scale, scale));
    });
  }
};

void run(const PackedLinear& linear, const std::uint8_t* activations, int rows, Range panel_range, int next_panel,
         Range row_range, const Epilogue& epilogue, std::uint8_t* scratch) {
  const ActivationLayout layout = activation_layout(linear.shape, rows);
  const Kernel kernel{linear, epilogue, reinterpret_cast<const float*>(activations),
                      reinterpret_cast<const std::int16_t*>(activations + layout.codes),
                      static_cast<std::ptrdiff_t>(layout.stride / sizeof(std::int16_t))};
  run_panels(kernel, linear.data, panel_bytes(linear.shape), padded_inputs(linear.shape) / kUnit, panel_range,
             next_panel, row_range, reinterpret_cast<std::int32_t*>(scratch));
}

}  // namespace

const KindKernels kInt8Kernels = {
    .panel_bytes = panel_bytes,
    .pack_panel = pack_panel,
    .unpack_panel = unpack_panel,
    .quantise_row = quantise_row,
    .run = run,
};

}  // namespace kvist::avx2
