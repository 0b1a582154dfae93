// Int4 weights with AVX2: 8-bit activations, exact sums of codes in each group, groups added in float32 in order.
//
//   panel        for each group: 16 float16 scales, 16 float16 minima, then [k / 4][8 outputs][4 inputs] bytes, whose
//                low nibble is the code of an output of the first eight, whose high nibble that of the one eight further
//   activations  each row [group]: int8 codes, then their float32 scale and their sum times the scale
//
// K is padded to the group. The dominating instruction is vpmaddubsw: 32 products of an unsigned code (0 to 15) and a
// signed activation, added in pairs of 16 bits; 32 inputs are added up in 16 bits (15 * 127 * 16 < 2^15), then pairs
// become 32 bits (vpmaddwd with ones), are converted and scaled. Per vector and 32 inputs: 8 vpmaddubsw, 7 vpaddw, then
// 5 more; four vector operations start each cycle, which bounds it at 100 operations a cycle. Per row, group and output
//
//   sum = fma(minimum, sum of the row's group, fma(sum of products * scale of the row's group, scale, sum))
//
// in float32, whatever the number of rows. With one row, a panel is a stream of 10 bytes per input (groups of 32):
// memory is the bound. Several tiles share weights expanded to bytes and float32, one cut of a panel at a time: a tile
// then need not part nibbles (three instructions for two vectors) nor widen scales, and the cut stays in the first-level
// cache.

#include "int4_groups_avx2.h"
#include "linear_avx2.h"

namespace kvist::avx2 {
namespace {

constexpr int kQuad = 4;   // inputs that meet in one 32-bit lane
constexpr int kSpan = 32;  // inputs whose products can be added in 16 bits
constexpr int kMaxGroup = 64;
constexpr std::size_t kVectorBytes = kPanel * sizeof(std::uint16_t);  // the scales or the minima of a group
constexpr std::size_t kMetaBytes = 2 * kVectorBytes;
constexpr int kMinExpandTiles = 2;  // of a block of rows, for its weights to be expanded

constexpr int unit_bytes(int group) { return static_cast<int>(kMetaBytes) + group * kPanel / 2; }

// A group as it is expanded: 16 float32 scales, 16 float32 minima, then [k / 4][16 outputs][4 inputs] codes.
constexpr int expanded_bytes(int group) { return 2 * kPanel * static_cast<int>(sizeof(float)) + group * kPanel; }

// A group of a row of activations.
constexpr int row_unit_bytes(int group) { return group + 2 * static_cast<int>(sizeof(float)); }

std::size_t group_bytes(const LinearShape& shape) { return static_cast<std::size_t>(unit_bytes(shape.group)); }

std::size_t panel_bytes(const LinearShape& shape) {
  return static_cast<std::size_t>(num_groups(shape)) * group_bytes(shape);
}

void pack_panel(const LinearShape& shape, const float* const (&rows)[kPanel], std::uint8_t* panel) {
  for (int g = 0; g < num_groups(shape); ++g) {
    std::uint8_t* out = panel + static_cast<std::size_t>(g) * group_bytes(shape);
    const int first = g * shape.group;
    const int left = shape.num_inputs - first;
    __m256i codes[2][kMaxGroup] = {};
    for (int half = 0; half < 2; ++half) {
      __m256 columns[kMaxGroup] = {};
      for (int k = 0; k < shape.group; k += 8) {
        __m256 eight[8];
        load_columns(rows + 8 * half, first + k, shape.num_inputs, eight);
        for (int i = 0; i < 8; ++i) {
          columns[k + i] = eight[i];
        }
      }
      __m128i scales;
      __m128i minima;
      quantise_group(columns, left < shape.group ? left : shape.group, &scales, &minima, codes[half]);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out) + half, scales);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + kVectorBytes) + half, minima);
    }
    for (int k = 0; k < shape.group; k += kQuad) {
      __m256i bytes = _mm256_setzero_si256();
      for (int i = kQuad - 1; i >= 0; --i) {
        const __m256i both = _mm256_or_si256(codes[0][k + i], _mm256_slli_epi32(codes[1][k + i], 4));
        bytes = _mm256_or_si256(_mm256_slli_epi32(bytes, 8), both);
      }
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + kMetaBytes + k * kPanel / 2), bytes);
    }
  }
}

void unpack_panel(const LinearShape& shape, const std::uint8_t* panel, float* const (&rows)[kPanel]) {
  for (int i = 0; i < kPanel; ++i) {
    for (int k = 0; rows[i] != nullptr && k < shape.num_inputs; ++k) {
      const std::uint8_t* group = panel + static_cast<std::size_t>(k / shape.group) * group_bytes(shape);
      const auto* halves = reinterpret_cast<const std::uint16_t*>(group);
      const int inside = k % shape.group;
      const std::uint8_t byte = group[kMetaBytes + (inside / kQuad * 8 + i % 8) * kQuad + inside % kQuad];
      const int code = i < 8 ? byte & 15 : byte >> 4;
      rows[i][k] = f16_to_f32(halves[kPanel + i]) + f16_to_f32(halves[i]) * static_cast<float>(code);
    }
  }
}

std::int32_t add_lanes(__m256i lanes) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

void quantise_row(const LinearShape& shape, const float* x, int row, int rows, std::uint8_t* activations) {
  const ActivationLayout layout = activation_layout(shape, rows);
  std::uint8_t* out = activations + layout.codes + static_cast<std::size_t>(row) * layout.stride;
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int first = 0; first < shape.num_inputs; first += shape.group, out += row_unit_bytes(shape.group)) {
    const int left = shape.num_inputs - first;
    const CodeScale scale = code_scale(max_abs(x + first, left < shape.group ? left : shape.group), kInt8Limit);
    const __m256 inverse = _mm256_set1_ps(scale.inverse);
    __m256i sums = _mm256_setzero_si256();
    for (int k = 0; k < shape.group; k += kSpan) {
      __m256i parts[4];
      for (int i = 0; i < 4; ++i) {
        const int here = left - (k + 8 * i);
        const __m256 values = here >= 8  ? _mm256_loadu_ps(x + first + k + 8 * i)
                              : here > 0 ? _mm256_maskload_ps(x + first + k + 8 * i, lane_mask(here))
                                         : _mm256_setzero_ps();
        parts[i] = round_values(values, inverse);
        sums = _mm256_add_epi32(sums, parts[i]);
      }
      const __m256i bytes =
          _mm256_packs_epi16(_mm256_packs_epi32(parts[0], parts[1]), _mm256_packs_epi32(parts[2], parts[3]));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + k), _mm256_permutevar8x32_epi32(bytes, order));
    }
    auto* meta = reinterpret_cast<float*>(out + shape.group);
    meta[0] = scale.scale;
    meta[1] = scale.scale * static_cast<float>(add_lanes(sums));
  }
}

struct TileRows {
  const std::uint8_t* units;
  std::ptrdiff_t stride;
};

// Four bytes of row I of a tile, kOffset bytes from where `rows` stand, in every lane. A compiler that may choose the
// address keeps sums of offset and stride in registers that it does not have.
template <int I, int kOffset>
KVIST_INLINE __m256i broadcast_row(const RowPointers<std::uint8_t>& rows) {
#if defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__)
  const std::uint8_t* base = I < 3 ? rows.first : rows.fourth;
  __m256i v;
  if constexpr (I % 3 == 0) {
    asm volatile("vpbroadcastd %c2(%1), %0" : "=x"(v) : "r"(base), "i"(kOffset));
  } else {
    asm volatile("vpbroadcastd %c2(%1,%3,%c4), %0" : "=x"(v) : "r"(base), "i"(kOffset), "r"(rows.stride), "i"(I % 3));
  }
  return v;
#else
  return broadcast_bytes4(rows.row(std::integral_constant<int, I>{}) + kOffset);
#endif
}

// The weights of a group as they are packed.
template <int kGroup>
struct Packed {
  static constexpr int kBytes = unit_bytes(kGroup);
  static KVIST_INLINE void codes(const std::uint8_t* unit, int quad, __m256i& low, __m256i& high) {
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(unit + kMetaBytes) + quad);
    low = _mm256_and_si256(both, nibble);
    high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
  }
  // Scales (0, 1) or minima (2, 3) of the first or last eight outputs.
  static KVIST_INLINE __m256 meta(const std::uint8_t* unit, int i) {
    return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(unit) + i));
  }
};

template <int kGroup>
struct Expanded {
  static constexpr int kBytes = expanded_bytes(kGroup);
  static KVIST_INLINE void codes(const std::uint8_t* unit, int quad, __m256i& low, __m256i& high) {
    const auto* vectors = reinterpret_cast<const __m256i*>(unit) + 4 + 2 * quad;
    low = _mm256_load_si256(vectors);
    high = _mm256_load_si256(vectors + 1);
  }
  static KVIST_INLINE __m256 meta(const std::uint8_t* unit, int i) {
    return _mm256_load_ps(reinterpret_cast<const float*>(unit) + 8 * i);
  }
};

template <int kGroup>
void expand(const std::uint8_t* packed, int groups, std::uint8_t* out) {
  for (int g = 0; g < groups; ++g) {
    for (int i = 0; i < 4; ++i) {
      _mm256_store_ps(reinterpret_cast<float*>(out) + 8 * i, Packed<kGroup>::meta(packed, i));
    }
    auto* vectors = reinterpret_cast<__m256i*>(out) + 4;
    for (int quad = 0; quad < kGroup / kQuad; ++quad) {
      __m256i low;
      __m256i high;
      Packed<kGroup>::codes(packed, quad, low, high);
      _mm256_store_si256(vectors + 2 * quad, low);
      _mm256_store_si256(vectors + 2 * quad + 1, high);
    }
    packed += unit_bytes(kGroup);
    out += expanded_bytes(kGroup);
  }
}

// The end of a span of inputs: scales row I's sums of products and adds them to `to`, and the minima once in a group.
template <int kGroup, typename Weights, bool kIsLast, int I, typename Rows>
KVIST_INLINE void add_span(const Rows& x, const std::uint8_t* weights, __m256i low, __m256i high, float* to) {
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256 scale = _mm256_castsi256_ps(broadcast_row<I, kGroup>(x));
  const __m256 first = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(low, ones)), scale);
  const __m256 second = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(high, ones)), scale);
  __m256 sum0 = _mm256_fmadd_ps(first, Weights::meta(weights, 0), _mm256_load_ps(to));
  __m256 sum1 = _mm256_fmadd_ps(second, Weights::meta(weights, 1), _mm256_load_ps(to + 8));
  if constexpr (kIsLast) {
    const __m256 all = _mm256_castsi256_ps(broadcast_row<I, kGroup + 4>(x));
    sum0 = _mm256_fmadd_ps(all, Weights::meta(weights, 2), sum0);
    sum1 = _mm256_fmadd_ps(all, Weights::meta(weights, 3), sum1);
  }
  _mm256_store_ps(to, sum0);
  _mm256_store_ps(to + 8, sum1);
}

// Adds `groups` groups of kGroup inputs of R rows to sums[R][16], or sets them.
template <int R, int kGroup, typename Weights>
[[gnu::noinline]] void tile(const TileRows& rows, const std::uint8_t* weights, int groups,
                            Ahead<unit_bytes(kGroup)> ahead, bool resume, float* sums) {
  RowPointers<std::uint8_t> x(rows.units, rows.stride);
  if (!resume) {
    for (int i = 0; i < 2 * R; ++i) {
      _mm256_store_ps(sums + 8 * i, _mm256_setzero_ps());
    }
  }
  for (int g = 0; g < groups; ++g) {
    ahead.fetch_unit();
    unroll<kGroup / kSpan>([&](auto span) KVIST_LAMBDA {
      __m256i low[R];
      __m256i high[R];
      unroll<kSpan / kQuad>([&](auto step) KVIST_LAMBDA {
        constexpr int kFirst = span * (kSpan / kQuad);
        __m256i w0;
        __m256i w1;
        Weights::codes(weights, kFirst + step, w0, w1);
        unroll<R>([&](auto i) KVIST_LAMBDA {
          const __m256i codes = broadcast_row<i, kQuad*(kFirst + step)>(x);
          if constexpr (step == 0) {
            low[i] = _mm256_maddubs_epi16(w0, codes);
            high[i] = _mm256_maddubs_epi16(w1, codes);
          } else {
            add_in_place16(low[i], _mm256_maddubs_epi16(w0, codes));
            add_in_place16(high[i], _mm256_maddubs_epi16(w1, codes));
          }
        });
      });
      constexpr bool kIsLast = span == kGroup / kSpan - 1;
      unroll<R>([&](auto i) KVIST_LAMBDA {
        add_span<kGroup, Weights, kIsLast, i>(x, weights, low[i], high[i], sums + kPanel * i);
      });
    });
    x.advance(row_unit_bytes(kGroup));
    weights += Weights::kBytes;
    pin(sums);
  }
}

template <int kGroup>
using Tile = void (*)(const TileRows&, const std::uint8_t*, int, Ahead<unit_bytes(kGroup)>, bool, float*);

template <int kGroup, typename W>
constexpr Tile<kGroup> kTiles[kTileRows + 1] = {nullptr,
                                                tile<1, kGroup, W>,
                                                tile<2, kGroup, W>,
                                                tile<3, kGroup, W>,
                                                tile<4, kGroup, W>,
                                                tile<5, kGroup, W>,
                                                tile<6, kGroup, W>};

// Sets sums[P][R][16] to the products of R rows with P whole panels: as `tile`, in the same order of additions.
template <int R, int P, int kGroup>
[[gnu::noinline]] void stream(const TileRows& rows, const std::uint8_t* const* panels, int groups, float* sums) {
  using Weights = Packed<kGroup>;
  RowPointers<std::uint8_t> x(rows.units, rows.stride);
  const std::uint8_t* weights[P];
  unroll<P>([&](auto p) KVIST_LAMBDA { weights[p] = panels[p]; });
  for (int i = 0; i < 2 * P * R; ++i) {
    _mm256_store_ps(sums + 8 * i, _mm256_setzero_ps());
  }
  for (int g = 0; g < groups; ++g) {
    unroll<kGroup / kSpan>([&](auto span) KVIST_LAMBDA {
      __m256i low[P][R];
      __m256i high[P][R];
      unroll<kSpan / kQuad>([&](auto step) KVIST_LAMBDA {
        constexpr int kFirst = span * (kSpan / kQuad);
        unroll<P>([&](auto p) KVIST_LAMBDA {
          __m256i w0;
          __m256i w1;
          Weights::codes(weights[p], kFirst + step, w0, w1);
          unroll<R>([&](auto i) KVIST_LAMBDA {
            const __m256i codes = broadcast_row<i, kQuad*(kFirst + step)>(x);
            if constexpr (step == 0) {
              low[p][i] = _mm256_maddubs_epi16(w0, codes);
              high[p][i] = _mm256_maddubs_epi16(w1, codes);
            } else {
              add_in_place16(low[p][i], _mm256_maddubs_epi16(w0, codes));
              add_in_place16(high[p][i], _mm256_maddubs_epi16(w1, codes));
            }
          });
        });
      });
      constexpr bool kIsLast = span == kGroup / kSpan - 1;
      unroll<P>([&](auto p) KVIST_LAMBDA {
        unroll<R>([&](auto i) KVIST_LAMBDA {
          float* const to = sums + kPanel * (p * R + i);
          add_span<kGroup, Weights, kIsLast, i>(x, weights[p], low[p][i], high[p][i], to);
        });
      });
    });
    x.advance(row_unit_bytes(kGroup));
    unroll<P>([&](auto p) KVIST_LAMBDA { weights[p] += Weights::kBytes; });
    pin(sums);
  }
}

using Stream = void (*)(const TileRows&, const std::uint8_t* const*, int, float*);

template <int kGroup>
constexpr Stream kStreams[kMaxStreamedRows + 1][kMaxStreams + 1] = {
    {},
    {nullptr, stream<1, 1, kGroup>, stream<1, 2, kGroup>, stream<1, 3, kGroup>, stream<1, 4, kGroup>},
    {nullptr, stream<2, 1, kGroup>, stream<2, 2, kGroup>, stream<2, 3, kGroup>},
    {nullptr, stream<3, 1, kGroup>, stream<3, 2, kGroup>},
};

template <int kGroup>
struct Kernel {
  static constexpr std::size_t kHeaderBytes = 0;
  static constexpr int kUnitBytes = unit_bytes(kGroup);
  const PackedLinear& linear;
  const Epilogue& epilogue;
  TileRows rows;

  TileRows rows_at(int row, int first_group) const {
    return {rows.units + row * rows.stride + first_group * row_unit_bytes(kGroup), rows.stride};
  }

  void tile(int height, int row, int first_group, int groups, const std::uint8_t* packed, Ahead<kUnitBytes> ahead,
            bool resume, float* sums) const {
    kTiles<kGroup, Packed<kGroup>>[height](rows_at(row, first_group), packed, groups, ahead, resume, sums);
  }

  void stream(int height, int num_panels, int row, const std::uint8_t* const* panels, float* sums) const {
    kStreams<kGroup>[height][num_panels](rows_at(row, 0), panels, num_groups(linear.shape), sums);
  }

  void finish(int panel, const std::uint8_t*, Range range, const float* sums) const {
    finish_panel(linear, panel, range, epilogue, [&](int r, __m256& low, __m256& high) KVIST_LAMBDA {
      const float* row = sums + (r - range.first) * kPanel;
      low = _mm256_load_ps(row);
      high = _mm256_load_ps(row + 8);
    });
  }
};

// Has the cache lines of results on their way while their last products are computed: they are far apart, and a tile's
// worth of stores would wait for memory.
template <int kGroup>
void fetch_results(const Kernel<kGroup>& kernel, int panel, Range rows) {
  const Epilogue& epilogue = kernel.epilogue;
  const int n = panel * panel_results(kernel.linear.shape);
  for (int r = rows.first; r < rows.last; ++r) {
    _mm_prefetch(reinterpret_cast<const char*>(epilogue.out + r * epilogue.out_stride + n), _MM_HINT_T0);
    if (epilogue.residual != nullptr) {
      _mm_prefetch(reinterpret_cast<const char*>(epilogue.residual + r * epilogue.residual_stride + n), _MM_HINT_T0);
    }
  }
}

// As run_panels, with each cut of a panel expanded once for all tiles.
template <int kGroup>
void run_expanded(const Kernel<kGroup>& kernel, Range panels, int next_panel, Range rows, std::uint8_t* scratch) {
  using AheadUnit = Ahead<unit_bytes(kGroup)>;
  const int groups = num_groups(kernel.linear.shape);
  const std::size_t bytes = panel_bytes(kernel.linear.shape);
  const int num_cuts = ceil_div(groups, kExpandedBytes / expanded_bytes(kGroup));
  const int cut_groups = ceil_div(groups, num_cuts);
  const int tiles = ceil_div(rows.last - rows.first, kTileRows);
  auto* sums = reinterpret_cast<float*>(scratch + kExpandedBytes);
  for (int panel = panels.first; panel < panels.last; ++panel) {
    const std::uint8_t* data = kernel.linear.data + static_cast<std::size_t>(panel) * bytes;
    for (int first = 0; first < groups; first += cut_groups) {
      const int cut = groups - first < cut_groups ? groups - first : cut_groups;
      const std::uint8_t* cut_data = data + static_cast<std::ptrdiff_t>(first) * unit_bytes(kGroup);
      expand<kGroup>(cut_data, cut, scratch);
      // Each tile fetches its share of the same cut of the next panel.
      const int next = panel + 1 < panels.last ? panel + 1 : next_panel;
      const std::uint8_t* next_cut =
          cut_data + static_cast<std::ptrdiff_t>(next - panel) * static_cast<std::ptrdiff_t>(bytes);
      AheadUnit ahead{next_cut, ceil_div(unit_bytes(kGroup), tiles * AheadUnit::kLines)};
      for (int t = 0; t < tiles; ++t) {
        const int row = rows.first + t * kTileRows;
        const int height = rows.last - row < kTileRows ? rows.last - row : kTileRows;
        float* tile_sums = sums + t * kTileRows * kPanel;
        if (first + cut == groups) {
          fetch_results(kernel, panel, Range{row, row + height});
        }
        const auto tile = kTiles<kGroup, Expanded<kGroup>>[height];
        tile(kernel.rows_at(row, first), scratch, cut, ahead, first > 0, tile_sums);
        ahead.next += cut * AheadUnit::kLines * ahead.step;
        if (first + cut == groups) {
          kernel.finish(panel, data, Range{row, row + height}, tile_sums);
        }
      }
    }
  }
}

template <int kGroup>
void run_group(const PackedLinear& linear, const std::uint8_t* activations, int rows, Range panel_range, int next_panel,
               Range row_range, const Epilogue& epilogue, std::uint8_t* scratch) {
  const ActivationLayout layout = activation_layout(linear.shape, rows);
  const TileRows tile_rows{activations + layout.codes, static_cast<std::ptrdiff_t>(layout.stride)};
  const Kernel<kGroup> kernel{linear, epilogue, tile_rows};
  if (row_range.last - row_range.first > (kMinExpandTiles - 1) * kTileRows) {
    run_expanded(kernel, panel_range, next_panel, row_range, scratch);
  } else {
    run_panels(kernel, linear.data, panel_bytes(linear.shape), num_groups(linear.shape), panel_range, next_panel,
               row_range, reinterpret_cast<float*>(scratch));
  }
}

void run(const PackedLinear& linear, const std::uint8_t* activations, int rows, Range panel_range, int next_panel,
         Range row_range, const Epilogue& epilogue, std::uint8_t* scratch) {
  const auto run_kernel = linear.shape.group == 32 ? run_group<32> : run_group<64>;
  run_kernel(linear, activations, rows, panel_range, next_panel, row_range, epilogue, scratch);
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
