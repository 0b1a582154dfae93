// Int4 weights with AVX-512 VNNI: 8-bit activations, exact int32 sums of a group, groups added in float32 in order.
//
//   panel   for each group: 32 float16 scales, 32 float16 minima, then [k / 4][16 outputs][4 inputs] bytes, whose low
//           nibble is the code of an output of the first sixteen, whose high nibble that of the one sixteen further
//   row     for each group its int8 codes, then their float32 scale and their sum times the scale; K padded to the group
//
// The dominating instruction is vpdpbusd: 64 products of an unsigned code (0 to 15) and a signed activation, added in
// fours to 16 sums, which cannot overflow. Per group of 32 inputs and tile of 12 rows: 192 of them, 24 instructions that
// part nibbles, 96 that convert and scale the sums, 96 broadcasts from memory; at most 192 of 312 slots multiply, 157
// operations of 256 a cycle. Per row, group and output
//
//   sum = fma(minimum, sum of the row's group, fma(sum of products * scale of the row's group, scale, sum))
//
// in float32, whatever the number of rows. With one row, a panel is a stream of 20 bytes per input (groups of 32):
// memory is the bound.

#include "int4_groups_avx2.h"
#include "linear_avx2.h"
#include "linear_avx512.h"

namespace kvist::avx512 {
namespace {

constexpr int kQuad = 4;  // inputs that meet in one 32-bit lane
constexpr int kMaxGroup = 64;
constexpr std::size_t kVectorBytes = kPanel * sizeof(std::uint16_t);  // the scales or the minima of a group
constexpr std::size_t kMetaBytes = 2 * kVectorBytes;

constexpr int unit_bytes(int group) { return static_cast<int>(kMetaBytes) + group * kPanel / 2; }

// A group of a row of activations.
constexpr int row_unit_bytes(int group) { return group + 2 * static_cast<int>(sizeof(float)); }

std::size_t panel_bytes(const LinearShape& shape) {
  return static_cast<std::size_t>(num_groups(shape)) * static_cast<std::size_t>(unit_bytes(shape.group));
}

void pack_panel(const LinearShape& shape, const float* const (&rows)[kPanel], std::uint8_t* panel) {
  for (int g = 0; g < num_groups(shape); ++g) {
    std::uint8_t* out = panel + static_cast<std::ptrdiff_t>(g) * unit_bytes(shape.group);
    const int first = g * shape.group;
    const int left = shape.num_inputs - first;
    __m256i codes[4][kMaxGroup] = {};  // of eight outputs each
    for (int part = 0; part < 4; ++part) {
      __m256 columns[kMaxGroup] = {};
      for (int k = 0; k < shape.group; k += 8) {
        __m256 eight[8];
        avx2::load_columns(rows + 8 * part, first + k, shape.num_inputs, eight);
        for (int i = 0; i < 8; ++i) {
          columns[k + i] = eight[i];
        }
      }
      __m128i scales;
      __m128i minima;
      avx2::quantise_group(columns, left < shape.group ? left : shape.group, &scales, &minima, codes[part]);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out) + part, scales);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + kVectorBytes) + part, minima);
    }
    for (int k = 0; k < shape.group; k += kQuad) {
      for (int half = 0; half < 2; ++half) {
        __m256i bytes = _mm256_setzero_si256();
        for (int i = kQuad - 1; i >= 0; --i) {
          const __m256i both = _mm256_or_si256(codes[half][k + i], _mm256_slli_epi32(codes[2 + half][k + i], 4));
          bytes = _mm256_or_si256(_mm256_slli_epi32(bytes, 8), both);
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + kMetaBytes + k * kPanel / 2) + half, bytes);
      }
    }
  }
}

void unpack_panel(const LinearShape& shape, const std::uint8_t* panel, float* const (&rows)[kPanel]) {
  for (int i = 0; i < kPanel; ++i) {
    for (int k = 0; rows[i] != nullptr && k < shape.num_inputs; ++k) {
      const std::uint8_t* group = panel + static_cast<std::ptrdiff_t>(k / shape.group) * unit_bytes(shape.group);
      const auto* halves = reinterpret_cast<const std::uint16_t*>(group);
      const int inside = k % shape.group;
      const std::uint8_t byte = group[kMetaBytes + (inside / kQuad * 16 + i % 16) * kQuad + inside % kQuad];
      const int code = i < 16 ? byte & 15 : byte >> 4;
      rows[i][k] = f16_to_f32(halves[kPanel + i]) + f16_to_f32(halves[i]) * static_cast<float>(code);
    }
  }
}

void quantise_row(const LinearShape& shape, const float* x, int row, int rows, std::uint8_t* activations) {
  const ActivationLayout layout = activation_layout(shape, rows);
  std::uint8_t* out = activations + layout.rows + static_cast<std::size_t>(row) * layout.stride;
  for (int first = 0; first < shape.num_inputs; first += shape.group, out += row_unit_bytes(shape.group)) {
    const int left = shape.num_inputs - first;
    const CodeScale scale = code_scale(max_abs(x + first, left < shape.group ? left : shape.group), kInt8Limit);
    const __m512 inverse = _mm512_set1_ps(scale.inverse);
    __m512i sums = _mm512_setzero_si512();
    for (int k = 0; k < shape.group; k += 16) {
      const __m512i codes = round_values(load_lanes(x + first + k, first_lanes(left - k)), inverse);
      sums = _mm512_add_epi32(sums, codes);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k), _mm512_cvtsepi32_epi8(codes));
    }
    // Small integers: their sums are exact in float32.
    auto* meta = reinterpret_cast<float*>(out + shape.group);
    meta[0] = scale.scale;
    meta[1] = scale.scale * reduce(_mm512_cvtepi32_ps(sums), Add{});
  }
}

// Sets sums[R][32] to the products of `groups` groups of kGroup inputs of R rows.
template <int R, int kGroup>
[[gnu::noinline]] void tile(const std::uint8_t* rows, std::ptrdiff_t stride, const std::uint8_t* packed, int groups,
                            Ahead<unit_bytes(kGroup)> ahead, float* sums) {
  RowPointers<std::uint8_t, R> x(rows, stride);
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int i = 0; i < 2 * R; ++i) {
    _mm512_store_ps(sums + 16 * i, _mm512_setzero_ps());
  }
  for (int g = 0; g < groups; ++g) {
    ahead.fetch_unit();
    __m512i low[R];
    __m512i high[R];
    unroll<R>([&](auto i) KVIST_LAMBDA { low[i] = high[i] = _mm512_setzero_si512(); });
    repeat<kGroup / kQuad>([&](auto quad) KVIST_LAMBDA {
      const __m512i both = load(packed + kMetaBytes + quad * 64);
      const __m512i w0 = _mm512_and_si512(both, nibble);
      const __m512i w1 = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
      unroll<R>([&](auto i) KVIST_LAMBDA {
        const __m512i codes = broadcast_bytes4(x.row(i) + kQuad * quad);
        low[i] = _mm512_dpbusd_epi32(low[i], w0, codes);
        high[i] = _mm512_dpbusd_epi32(high[i], w1, codes);
      });
    });
    const auto meta = [&](int i) KVIST_LAMBDA {
      return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(packed) + i));
    };
    const __m512 scales[2] = {meta(0), meta(1)};
    const __m512 minima[2] = {meta(2), meta(3)};
    unroll<R>([&](auto i) KVIST_LAMBDA {
      const __m512 scale = broadcast_float(reinterpret_cast<const float*>(x.row(i) + kGroup));
      const __m512 all = broadcast_float(reinterpret_cast<const float*>(x.row(i) + kGroup + 4));
      float* to = sums + kPanel * i;
      const auto add = [&](int half, __m512i products) KVIST_LAMBDA {
        const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(products), scale);
        const __m512 sum = _mm512_fmadd_ps(scaled, scales[half], _mm512_load_ps(to + 16 * half));
        _mm512_store_ps(to + 16 * half, _mm512_fmadd_ps(all, minima[half], sum));
      };
      add(0, low[i]);
      add(1, high[i]);
    });
    x.advance(row_unit_bytes(kGroup));
    packed += unit_bytes(kGroup);
    avx2::pin(sums);
  }
}

template <int kGroup>
using Tile = void (*)(const std::uint8_t*, std::ptrdiff_t, const std::uint8_t*, int, Ahead<unit_bytes(kGroup)>, float*);

template <int kGroup>
constexpr Tile<kGroup> kTiles[kTileRows + 1] = {nullptr,         tile<1, kGroup>, tile<2, kGroup>,  tile<3, kGroup>,
                                                tile<4, kGroup>, tile<5, kGroup>, tile<6, kGroup>,  tile<7, kGroup>,
                                                tile<8, kGroup>, tile<9, kGroup>, tile<10, kGroup>, tile<11, kGroup>,
                                                tile<12, kGroup>};

template <int kGroup>
struct Kernel {
  static constexpr std::size_t kHeaderBytes = 0;
  static constexpr int kUnitBytes = unit_bytes(kGroup);
  const PackedLinear& linear;
  const Epilogue& epilogue;
  const std::uint8_t* rows;
  std::ptrdiff_t stride;

  const std::uint8_t* prepare(const std::uint8_t* packed, int, int) const { return packed; }

  void tile(int height, int row, int units, const std::uint8_t* packed, Ahead<kUnitBytes> ahead, float* sums) const {
    kTiles<kGroup>[height](rows + row* stride, stride, packed, units, ahead, sums);
  }

  void finish(int panel, const std::uint8_t*, Range range, const float* sums) const {
    finish_panel(linear, panel, range, epilogue, [&](int r, __m512& low, __m512& high) KVIST_LAMBDA {
      low = _mm512_load_ps(sums + (r - range.first) * kPanel);
      high = _mm512_load_ps(sums + (r - range.first) * kPanel + 16);
    });
  }
};

template <int kGroup>
void run_group(const PackedLinear& linear, const std::uint8_t* activations, int rows, Range panel_range,
               Range row_range, const Epilogue& epilogue, std::uint8_t* scratch) {
  const ActivationLayout layout = activation_layout(linear.shape, rows);
  const Kernel<kGroup> kernel{linear, epilogue, activations + layout.rows, static_cast<std::ptrdiff_t>(layout.stride)};
  run_panels(kernel, linear, panel_bytes(linear.shape), panel_range, row_range, epilogue,
             reinterpret_cast<float*>(scratch));
}

void run(const PackedLinear& linear, const std::uint8_t* activations, int rows, Range panel_range, Range row_range,
         const Epilogue& epilogue, std::uint8_t* scratch) {
  const auto run_kernel = linear.shape.group == 32 ? run_group<32> : run_group<64>;
  run_kernel(linear, activations, rows, panel_range, row_range, epilogue, scratch);
}

}  // namespace

const KindKernels kInt4Kernels = {
    .panel_bytes = panel_bytes,
    .pack_panel = pack_panel,
    .unpack_panel = unpack_panel,
    .quantise_row = quantise_row,
    .run = run,
};

}  // namespace kvist::avx512
