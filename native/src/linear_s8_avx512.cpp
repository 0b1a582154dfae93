// Int8 weights with AVX-512 VNNI: 16-bit activations, exact int32 sums.
//
//   panel   32 float32 scales, then [k / 2][32 outputs][2] int8 codes; K padded to 8
//   row     int16 codes
//
// The dominating instruction is vpdpwssd: 32 products of 16 bits, added in pairs to 16 sums; two start each cycle where
// there are two units of 512 bits, one with one unit or with units of half the width. Per pair of inputs and tile of 12
// rows: 24 of them, 12 broadcasts from memory and two loads of weights. Widening those takes the second unit a cycle
// each, so several tiles share a panel that is widened once, in scratch. With one row, a panel is a stream of 32 bytes
// per input: memory is the bound.

#include "linear_avx2.h"
#include "linear_avx512.h"

namespace kvist::avx512 {
namespace {

constexpr int kUnitBytes = kInt8Unit * kPanel;
constexpr std::size_t kScalesBytes = kPanel * sizeof(float);

std::size_t panel_bytes(const LinearShape& shape) {
  return kScalesBytes + static_cast<std::size_t>(padded_inputs(shape)) * kPanel;
}

void pack_panel(const LinearShape& shape, const float* const (&rows)[kPanel], std::uint8_t* panel) {
  auto* scales = reinterpret_cast<float*>(panel);
  for (int first = 0; first < kPanel; first += 8) {
    alignas(32) float inverses[8];
    for (int i = 0; i < 8; ++i) {
      const float* row = rows[first + i];
      const CodeScale codes = code_scale(row != nullptr ? max_abs(row, shape.num_inputs) : 0.0f, kInt8Limit);
      scales[first + i] = codes.scale;
      inverses[i] = codes.inverse;
    }
    const __m256 inverse = _mm256_load_ps(inverses);
    const __m256i byte = _mm256_set1_epi32(0xff);
    std::uint8_t* out = panel + kScalesBytes + 2 * first;
    for (int k = 0; k < padded_inputs(shape); k += 8) {
      __m256 columns[8];
      avx2::load_columns(rows + first, k, shape.num_inputs, columns);
      for (int i = 0; i < 8; i += 2, out += 2 * kPanel) {
        const __m256i even = _mm256_and_si256(avx2::round_values(columns[i], inverse), byte);
        const __m256i odd = _mm256_and_si256(avx2::round_values(columns[i + 1], inverse), byte);
        const __m256i pairs = _mm256_or_si256(even, _mm256_slli_epi32(odd, 8));
        const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), packed);
      }
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
  const __m512 inverse = _mm512_set1_ps(codes.inverse);
  auto* out =
      reinterpret_cast<std::int16_t*>(activations + layout.rows + static_cast<std::size_t>(row) * layout.stride);
  int k = 0;
  for (; k + 16 <= shape.num_inputs; k += 16) {
    const __m512i wide = round_values(_mm512_loadu_ps(x + k), inverse);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + k), _mm512_cvtsepi32_epi16(wide));
  }
  if (k < padded_inputs(shape)) {
    // Up to 15 values and padding: a row ends at a multiple of 8.
    const __m512 values = _mm512_maskz_loadu_ps(first_lanes(shape.num_inputs - k), x + k);
    const __m256i narrow = _mm512_cvtsepi32_epi16(round_values(values, inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k), _mm256_castsi256_si128(narrow));
    if (k + 8 < padded_inputs(shape)) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k + 8), _mm256_extracti128_si256(narrow, 1));
    }
  }
}

// Pair `pair` of a unit, of the first or the last sixteen outputs, as 16-bit integers.
struct Packed {
  static constexpr int kBytes = kUnitBytes;
  static KVIST_INLINE __m512i weights(const std::uint8_t* unit, int pair, int half) {
    return _mm512_cvtepi8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(unit) + 2 * pair + half));
  }
};

struct Widened {
  static constexpr int kBytes = 2 * kUnitBytes;
  static KVIST_INLINE __m512i weights(const std::uint8_t* unit, int pair, int half) {
    return load(unit + 64 * (2 * pair + half));
  }
};

void widen(const std::uint8_t* packed, int units, std::uint8_t* out) {
  for (int i = 0; i < units * kInt8Unit; ++i) {
    _mm512_store_si512(out + 64 * i, Packed::weights(packed + 32 * i, 0, 0));
  }
}

// Sets sums[R][32] to the products of R rows.
template <int R, typename Weights>
[[gnu::noinline]] void tile(const std::int16_t* codes, std::ptrdiff_t stride, const std::uint8_t* unit, int units,
                            Ahead<kUnitBytes> ahead, std::int32_t* sums) {
  // Ten sums hide the latency of a product where two start each cycle.
  constexpr int kSets = R <= 2 ? 4 : R <= 4 ? 2 : 1;
  __m512i low[kSets][R];
  __m512i high[kSets][R];
  unroll<kSets * R>([&](auto i) KVIST_LAMBDA { low[i / R][i % R] = high[i / R][i % R] = _mm512_setzero_si512(); });
  RowPointers<std::int16_t, R> x(codes, stride);
  for (int left = units; left > 0; --left) {
    ahead.fetch_unit();
    unroll<kInt8Unit / 2>([&](auto pair) KVIST_LAMBDA {
      constexpr int set = pair % kSets;
      const __m512i w0 = Weights::weights(unit, pair, 0);
      const __m512i w1 = Weights::weights(unit, pair, 1);
      unroll<R>([&](auto i) KVIST_LAMBDA {
        const __m512i both = broadcast_bytes4(x.row(i) + 2 * pair);
        add_pairs(low[set][i], w0, both);
        add_pairs(high[set][i], w1, both);
      });
    });
    x.advance(kInt8Unit);
    unit += Weights::kBytes;
  }
  unroll<R>([&](auto i) KVIST_LAMBDA {
    unroll<kSets - 1>([&](auto set) KVIST_LAMBDA {
      low[0][i] = _mm512_add_epi32(low[0][i], low[set + 1][i]);
      high[0][i] = _mm512_add_epi32(high[0][i], high[set + 1][i]);
    });
    _mm512_store_si512(sums + kPanel * i, low[0][i]);
    _mm512_store_si512(sums + kPanel * i + 16, high[0][i]);
  });
}

using Tile = void (*)(const std::int16_t*, std::ptrdiff_t, const std::uint8_t*, int, Ahead<kUnitBytes>, std::int32_t*);
constexpr Tile kTiles[kTileRows + 1] = {nullptr,         tile<1, Packed>, tile<2, Packed>,  tile<3, Packed>,
                                        tile<4, Packed>, tile<5, Packed>, tile<6, Packed>,  tile<7, Packed>,
                                        tile<8, Packed>, tile<9, Packed>, tile<10, Packed>, tile<11, Packed>,
                                        tile<12, Packed>};
// Of several tiles, as equal as can be, none has fewer than half the rows.
constexpr Tile kWideTiles[kTileRows + 1] = {nullptr,          nullptr,          nullptr,           nullptr,
                                            nullptr,          nullptr,          tile<6, Widened>,  tile<7, Widened>,
                                            tile<8, Widened>, tile<9, Widened>, tile<10, Widened>, tile<11, Widened>,
                                            tile<12, Widened>};

struct Kernel {
  static constexpr std::size_t kHeaderBytes = kScalesBytes;
  static constexpr int kUnitBytes = kInt8Unit * kPanel;
  const PackedLinear& linear;
  const Epilogue& epilogue;
  const float* row_scales;
  const std::int16_t* codes;
  std::ptrdiff_t stride;
  std::uint8_t* room;  // kWideBytes

  const std::uint8_t* prepare(const std::uint8_t* packed, int units, int tiles) const {
    if (tiles == 1 || units * Widened::kBytes > static_cast<int>(kWideBytes)) {
      return packed;
    }
    widen(packed, units, room);
    return room;
  }

  void tile(int height, int row, int units, const std::uint8_t* packed, Ahead<kUnitBytes> ahead,
            std::int32_t* sums) const {
    const auto& tiles = packed == room ? kWideTiles : kTiles;
    tiles[height](codes + row * stride, stride, packed, units, ahead, sums);
  }

  void finish(int panel, const std::uint8_t* data, Range rows, const std::int32_t* sums) const {
    const auto* scales = reinterpret_cast<const float*>(data);
    const __m512 low_scale = _mm512_loadu_ps(scales);
    const __m512 high_scale = _mm512_loadu_ps(scales + 16);
    finish_panel(linear, panel, rows, epilogue, [&](int r, __m512& low, __m512& high) KVIST_LAMBDA {
      const std::int32_t* row = sums + (r - rows.first) * kPanel;
      const __m512 scale = _mm512_set1_ps(row_scales[r]);
      low = _mm512_mul_ps(_mm512_cvtepi32_ps(load(row)), _mm512_mul_ps(low_scale, scale));
      high = _mm512_mul_ps(_mm512_cvtepi32_ps(load(row + 16)), _mm512_mul_ps(high_scale, scale));
    });
  }
};

void run(const PackedLinear& linear, const std::uint8_t* activations, int rows, Range panel_range, Range row_range,
         const Epilogue& epilogue, std::uint8_t* scratch) {
  const ActivationLayout layout = activation_layout(linear.shape, rows);
  const Kernel kernel{linear,
                      epilogue,
                      reinterpret_cast<const float*>(activations),
                      reinterpret_cast<const std::int16_t*>(activations + layout.rows),
                      static_cast<std::ptrdiff_t>(layout.stride / sizeof(std::int16_t)),
                      scratch + kSumsBytes};
  run_panels(kernel, linear, panel_bytes(linear.shape), panel_range, row_range, epilogue,
             reinterpret_cast<std::int32_t*>(scratch));
}

}  // namespace

const KindKernels kInt8Kernels = {
    .panel_bytes = panel_bytes,
    .pack_panel = pack_panel,
    .unpack_panel = unpack_panel,
    .quantise_row = quantise_row,
    .run = run,
};

}  // namespace kvist::avx512
