// Int4 weights with AVX2: 8-bit activations, exact sums in each group, groups added in float32 in order.
//
//   panel   for each group: 16 float16 scales, then [k / 4][8 outputs][4 inputs] bytes, whose low nibble is the code + 8
//           of an output of the first eight and whose high nibble that of the one eight further; K padded to the group
//
// The dominating instruction is vpmaddubsw: 32 products of an unsigned code (0 to 15) and a signed activation, added in
// pairs of 16 bits. A sum starts at -8 times the activations it will see, which takes the offset out of the codes, and
// then adds up to 16 pairs: partial sums may wrap, the last one fits (8 * 127 * 32 < 2^15). At the end of a group the
// pairs of an output are added (vpmaddwd with ones), converted, scaled and added to the float32 sums. Per group of 32
// and vector: 8 vpmaddubsw, 8 vpaddw, then 3 more and a load and a store.
//
// Three instructions part the nibbles of two vectors. With one row, a panel is a stream of 9 bytes per input (groups of
// 32): memory is the bound.

#include "linear_avx2.h"

namespace kvist::avx2 {
namespace {

constexpr int kQuad = 4;  // inputs that meet in one 32-bit lane
constexpr std::size_t kScalesBytes = kPanel * sizeof(std::uint16_t);

constexpr int unit_bytes(int group) { return static_cast<int>(kScalesBytes) + group * kPanel / 2; }

std::size_t group_bytes(const LinearShape& shape) { return static_cast<std::size_t>(unit_bytes(shape.group)); }

std::size_t panel_bytes(const LinearShape& shape) {
  return static_cast<std::size_t>(num_groups(shape)) * group_bytes(shape);
}

__m256 round_int4(__m256 values, __m256 inverse) {
  const __m256 rounded = _mm256_round_ps(_mm256_mul_ps(values, inverse), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm256_max_ps(_mm256_set1_ps(-8.0f), _mm256_min_ps(_mm256_set1_ps(7.0f), rounded));
}

// Codes and scales of one group of eight outputs, one in each lane: every divisor is tried, each scale fitted to its
// codes by least squares, and the codes rounded again for the scale as it is stored; the least squared error wins.
// `columns[k]` are the weights on entry.
void quantise_group(const __m256* columns, int group, __m128i* stored_scale, __m256i* codes) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 magnitude = _mm256_setzero_ps();
  __m256 extreme = _mm256_setzero_ps();
  __m256 finite = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
  for (int k = 0; k < group; ++k) {
    const __m256 absolute = _mm256_andnot_ps(sign, columns[k]);
    const __m256 larger = _mm256_cmp_ps(absolute, magnitude, _CMP_GT_OQ);
    extreme = _mm256_blendv_ps(extreme, columns[k], larger);
    magnitude = _mm256_max_ps(magnitude, absolute);
    finite = _mm256_and_ps(finite, _mm256_cmp_ps(absolute, _mm256_set1_ps(std::numeric_limits<float>::max()), _CMP_LE_OQ));
  }
  const __m256 usable = _mm256_and_ps(finite, _mm256_cmp_ps(magnitude, _mm256_set1_ps(kTiny), _CMP_GE_OQ));
  const __m256 one = _mm256_set1_ps(1.0f);
  magnitude = _mm256_blendv_ps(one, magnitude, usable);
  const __m256 to_normal = _mm256_div_ps(one, magnitude);
  // Errors are compared in units of the extreme, so that their squares neither vanish nor overflow.
  alignas(32) __m256 normal[64];
  for (int k = 0; k < group; ++k) {
    normal[k] = _mm256_and_ps(usable, _mm256_mul_ps(_mm256_and_ps(finite, columns[k]), to_normal));
  }
  const __m256 direction = _mm256_or_ps(_mm256_and_ps(sign, extreme), one);
  __m256 best_error = _mm256_set1_ps(std::numeric_limits<float>::infinity());
  __m128i best_half = _mm_setzero_si128();
  __m256 best_scale = _mm256_setzero_ps();
  for (const float divisor : kInt4Divisors) {
    const __m256 inverse = _mm256_mul_ps(direction, _mm256_set1_ps(divisor));
    __m256 along = _mm256_setzero_ps();
    __m256 square = _mm256_setzero_ps();
    for (int k = 0; k < group; ++k) {
      const __m256 code = round_int4(normal[k], inverse);
      along = _mm256_fmadd_ps(code, normal[k], along);
      square = _mm256_fmadd_ps(code, code, square);
    }
    const __m256 fitted = _mm256_div_ps(along, _mm256_max_ps(square, one));
    __m256 stored = _mm256_mul_ps(fitted, magnitude);
    stored = _mm256_max_ps(_mm256_set1_ps(-65504.0f), _mm256_min_ps(_mm256_set1_ps(65504.0f), stored));
    const __m128i half = _mm256_cvtps_ph(stored, _MM_FROUND_TO_NEAREST_INT);
    const __m256 scale = _mm256_mul_ps(_mm256_cvtph_ps(half), to_normal);
    const __m256 zero = _mm256_cmp_ps(scale, _mm256_setzero_ps(), _CMP_EQ_OQ);
    const __m256 again = _mm256_andnot_ps(zero, _mm256_div_ps(one, scale));
    __m256 error = _mm256_setzero_ps();
    for (int k = 0; k < group; ++k) {
      const __m256 rest = _mm256_fnmadd_ps(round_int4(normal[k], again), scale, normal[k]);
      error = _mm256_fmadd_ps(rest, rest, error);
    }
    const __m256 better = _mm256_cmp_ps(error, best_error, _CMP_LT_OQ);
    best_error = _mm256_blendv_ps(best_error, error, better);
    best_scale = _mm256_blendv_ps(best_scale, again, better);
    const __m256i lanes = _mm256_castps_si256(better);
    const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    best_half = _mm_blendv_epi8(best_half, half, narrow);
  }
  for (int k = 0; k < group; ++k) {
    codes[k] = _mm256_cvtps_epi32(round_int4(normal[k], best_scale));
  }
  const auto narrow = [](__m256 mask) {
    const __m256i lanes = _mm256_castps_si256(mask);
    return _mm_packs_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  };
  best_half = _mm_and_si128(best_half, narrow(usable));
  *stored_scale = _mm_or_si128(best_half, _mm_andnot_si128(narrow(finite), _mm_set1_epi16(0x7e00)));
}

void pack_panel(const LinearShape& shape, const float* const (&rows)[kPanel], std::uint8_t* panel) {
  const __m256i offset = _mm256_set1_epi32(8);
  __m256i codes[2][64];
  for (int g = 0; g < num_groups(shape); ++g) {
    std::uint8_t* out = panel + static_cast<std::size_t>(g) * group_bytes(shape);
    for (int half = 0; half < 2; ++half) {
      __m256 columns[64];
      for (int k = 0; k < shape.group; k += 8) {
        __m256 eight[8];
        load_columns(rows + 8 * half, g * shape.group + k, shape.num_inputs, eight);
        for (int i = 0; i < 8; ++i) {
          columns[k + i] = eight[i];
        }
      }
      __m128i scale;
      quantise_group(columns, shape.group, &scale, codes[half]);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out) + half, scale);
    }
    for (int k = 0; k < shape.group; k += kQuad) {
      __m256i bytes = _mm256_setzero_si256();
      for (int i = kQuad - 1; i >= 0; --i) {
        const __m256i low = _mm256_add_epi32(codes[0][k + i], offset);
        const __m256i high = _mm256_add_epi32(codes[1][k + i], offset);
        bytes = _mm256_or_si256(_mm256_slli_epi32(bytes, 8), _mm256_or_si256(low, _mm256_slli_epi32(high, 4)));
      }
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + kScalesBytes + k * kPanel / 2), bytes);
    }
  }
}

void unpack_panel(const LinearShape& shape, const std::uint8_t* panel, float* const (&rows)[kPanel]) {
  for (int i = 0; i < kPanel; ++i) {
    for (int k = 0; rows[i] != nullptr && k < shape.num_inputs; ++k) {
      const std::uint8_t* group = panel + static_cast<std::size_t>(k / shape.group) * group_bytes(shape);
      const int inside = k % shape.group;
      const std::uint8_t byte = group[kScalesBytes + (inside / kQuad * 8 + i % 8) * kQuad + inside % kQuad];
      const int code = (i < 8 ? byte & 15 : byte >> 4) - 8;
      rows[i][k] = f16_to_f32(reinterpret_cast<const std::uint16_t*>(group)[i]) * static_cast<float>(code);
    }
  }
}

// -8 times the sum of the codes in the two halves of the 32-bit lanes of one group, as two 16-bit integers.
std::int32_t group_start(const std::int8_t* codes, int group) {
  __m256i sums = _mm256_setzero_si256();
  for (int k = 0; k < group; k += 32) {
    const __m256i bytes = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + k));
    sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes));
  }
  __m128i sum = _mm_add_epi16(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0x4e));
  sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0xb1));
  return _mm_cvtsi128_si32(_mm_slli_epi16(_mm_sub_epi16(_mm_setzero_si128(), sum), 3));
}

void quantise_row(const LinearShape& shape, const float* x, int row, int rows, std::uint8_t* activations) {
  const ActivationLayout layout = activation_layout(shape, rows);
  const CodeScale scale = code_scale(max_abs(x, shape.num_inputs), kInt8Limit);
  reinterpret_cast<float*>(activations)[row] = scale.scale;
  const __m256 inverse = _mm256_set1_ps(scale.inverse);
  auto* out = reinterpret_cast<std::int8_t*>(activations + layout.codes + static_cast<std::size_t>(row) * layout.stride);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int k = 0; k < padded_inputs(shape); k += 32) {
    __m256i parts[4];
    for (int i = 0; i < 4; ++i) {
      const int left = shape.num_inputs - (k + 8 * i);
      const __m256 values = left >= 8  ? _mm256_loadu_ps(x + k + 8 * i)
                            : left > 0 ? _mm256_maskload_ps(x + k + 8 * i, lane_mask(left))
                                       : _mm256_setzero_ps();
      parts[i] = round_values(values, inverse);
    }
    const __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(parts[0], parts[1]), _mm256_packs_epi32(parts[2], parts[3]));
    _mm256_store_si256(reinterpret_cast<__m256i*>(out + k), _mm256_permutevar8x32_epi32(bytes, order));
  }
  auto* starts = reinterpret_cast<std::int32_t*>(activations + layout.starts) +
                 static_cast<std::ptrdiff_t>(row) * num_groups(shape);
  for (int g = 0; g < num_groups(shape); ++g) {
    starts[g] = group_start(out + g * shape.group, shape.group);
  }
}

struct TileRows {
  const std::int8_t* codes;
  std::ptrdiff_t stride;
  const std::int32_t* starts;
  std::ptrdiff_t starts_stride;
};

// Adds `groups` groups of kGroup inputs of R rows to sums[R][16], or sets them.
template <int R, int kGroup>
[[gnu::noinline]] void tile(const TileRows& rows, const std::uint8_t* packed, int groups,
                            Ahead<unit_bytes(kGroup)> ahead, bool resume, float* sums) {
  RowPointers<std::int8_t> x(rows.codes, rows.stride);
  RowPointers<std::int32_t> starts(rows.starts, rows.starts_stride);
  if (!resume) {
    for (int i = 0; i < 2 * R; ++i) {
      _mm256_store_ps(sums + 8 * i, _mm256_setzero_ps());
    }
  }
  for (int g = 0; g < groups; ++g) {
    __m256i low[R];
    __m256i high[R];
    ahead.fetch_unit();
    unroll<R>([&](auto i) KVIST_LAMBDA { low[i] = high[i] = broadcast_bytes4(starts.row(i)); });
    unroll<kGroup / kQuad>([&](auto quad) KVIST_LAMBDA {
      const __m256i nibble = _mm256_set1_epi8(15);
      const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(packed + kScalesBytes) + quad);
      const __m256i w0 = _mm256_and_si256(both, nibble);
      const __m256i w1 = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
      unroll<R>([&](auto i) KVIST_LAMBDA {
        const __m256i codes = broadcast_bytes4(x.row(i) + kQuad * quad);
        add_in_place16(low[i], _mm256_maddubs_epi16(w0, codes));
        add_in_place16(high[i], _mm256_maddubs_epi16(w1, codes));
      });
    });
    const auto* scales = reinterpret_cast<const __m128i*>(packed);
    const __m256 low_scale = _mm256_cvtph_ps(_mm_load_si128(scales));
    const __m256 high_scale = _mm256_cvtph_ps(_mm_load_si128(scales + 1));
    const __m256i ones = _mm256_set1_epi16(1);
    unroll<R>([&](auto i) KVIST_LAMBDA {
      float* sum = sums + kPanel * i;
      const __m256 first = _mm256_cvtepi32_ps(_mm256_madd_epi16(low[i], ones));
      const __m256 second = _mm256_cvtepi32_ps(_mm256_madd_epi16(high[i], ones));
      _mm256_store_ps(sum, _mm256_fmadd_ps(first, low_scale, _mm256_load_ps(sum)));
      _mm256_store_ps(sum + 8, _mm256_fmadd_ps(second, high_scale, _mm256_load_ps(sum + 8)));
    });
    x.advance(kGroup);
    starts.advance(1);
    packed += unit_bytes(kGroup);
  }
}

template <int kGroup>
using Tile = void (*)(const TileRows&, const std::uint8_t*, int, Ahead<unit_bytes(kGroup)>, bool, float*);

template <int kGroup>
constexpr Tile<kGroup> kTiles[kTileRows + 1] = {nullptr,         tile<1, kGroup>, tile<2, kGroup>, tile<3, kGroup>,
                                                tile<4, kGroup>, tile<5, kGroup>, tile<6, kGroup>};

template <int kGroup>
struct Kernel {
  static constexpr std::size_t kHeaderBytes = 0;
  static constexpr int kUnitBytes = unit_bytes(kGroup);
  const PackedLinear& linear;
  const Epilogue& epilogue;
  const float* row_scales;
  TileRows rows;

  void tile(int height, int row, int first_group, int groups, const std::uint8_t* packed, Ahead<kUnitBytes> ahead,
            bool resume, float* sums) const {
    const TileRows tile_rows{rows.codes + row * rows.stride + first_group * kGroup, rows.stride,
                             rows.starts + row * rows.starts_stride + first_group, rows.starts_stride};
    kTiles<kGroup>[height](tile_rows, packed, groups, ahead, resume, sums);
  }

  void finish(int panel, const std::uint8_t*, Range range, const float* sums) const {
    finish_panel(linear, panel, range, epilogue, [&](int r, __m256& low, __m256& high) KVIST_LAMBDA {
      const float* row = sums + (r - range.first) * kPanel;
      const __m256 scale = _mm256_set1_ps(row_scales[r]);
      low = _mm256_mul_ps(_mm256_load_ps(row), scale);
      high = _mm256_mul_ps(_mm256_load_ps(row + 8), scale);
    });
  }
};

template <int kGroup>
void run_group(const PackedLinear& linear, const std::uint8_t* activations, int rows, Range panel_range,
               Range row_range, const Epilogue& epilogue, std::uint8_t* scratch) {
  const ActivationLayout layout = activation_layout(linear.shape, rows);
  const TileRows tile_rows{reinterpret_cast<const std::int8_t*>(activations + layout.codes),
                           static_cast<std::ptrdiff_t>(layout.stride),
                           reinterpret_cast<const std::int32_t*>(activations + layout.starts),
                           num_groups(linear.shape)};
  const Kernel<kGroup> kernel{linear, epilogue, reinterpret_cast<const float*>(activations), tile_rows};
  run_panels(kernel, linear.data, panel_bytes(linear.shape), num_groups(linear.shape), panel_range, row_range,
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

}  // namespace kvist::avx2
