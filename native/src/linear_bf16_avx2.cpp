// Bfloat16 weights with AVX2: products and sums in float32, first input first.
//
//   panel   [k][8] pairs of bfloat16: the low half of a 32-bit lane is an output of the first eight, the high half the
//           one eight further, so that a shift and a mask widen them; K padded to 2
//
// The dominating instruction is vfmadd231ps: two start each cycle. Per input and tile of 6 rows: 12 of them, 6 broadcasts
// from memory and two loads of weights. Weights are widened in registers by the first tile of a block of rows, which also
// leaves them in scratch for the others. With one row, a panel is a stream of 32 bytes per input: memory is the bound.

#include "linear_avx2.h"

namespace kvist::avx2 {
namespace {

constexpr int kStep = 2;  // inputs per iteration
constexpr int kCut = 320;
static_assert(kCut * kPanel * sizeof(float) <= kExpandedBytes);
constexpr int kInputBytes = kPanel * 2;

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

// Where a tile finds its weights.
enum class Source {
  kPacked,          // the packed values, widened in registers
  kPackedAndStore,  // the same, and stored widened
  kExpanded,        // stored by an earlier tile
};

// Adds the products of `inputs` (a multiple of kStep) inputs of R rows to sums[R][16], or sets them.
template <int R, Source kSource>
[[gnu::noinline]] void tile(const float* rows, std::ptrdiff_t stride, const std::uint8_t* packed, float* expanded,
                            int inputs, bool resume, float* sums) {
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
  for (int k = 0; k < inputs; k += kStep) {
    unroll<kStep>([&](auto step) KVIST_LAMBDA {
      __m256 w0;
      __m256 w1;
      float* wide = expanded + kPanel * step;
      if constexpr (kSource == Source::kExpanded) {
        w0 = _mm256_load_ps(wide);
        w1 = _mm256_load_ps(wide + 8);
      } else {
        const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(packed) + step);
        w0 = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
        w1 = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000U))));
        if constexpr (kSource == Source::kPackedAndStore) {
          _mm256_store_ps(wide, w0);
          _mm256_store_ps(wide + 8, w1);
        }
      }
      unroll<R>([&](auto i) KVIST_LAMBDA {
        const __m256 value = _mm256_castsi256_ps(broadcast_bytes4(x.row(i) + step));
        fma_in_place(low[i], value, w0);
        fma_in_place(high[i], value, w1);
      });
    });
    x.advance(kStep);
    packed += kStep * kInputBytes;
    expanded += kStep * kPanel;
  }
  unroll<R>([&](auto i) KVIST_LAMBDA {
    _mm256_store_ps(sums + kPanel * i, low[i]);
    _mm256_store_ps(sums + kPanel * i + 8, high[i]);
  });
}

using Tile = void (*)(const float*, std::ptrdiff_t, const std::uint8_t*, float*, int, bool, float*);

template <Source kSource>
constexpr Tile kTiles[kTileRows + 1] = {nullptr,          tile<1, kSource>, tile<2, kSource>, tile<3, kSource>,
                                        tile<4, kSource>, tile<5, kSource>, tile<6, kSource>};

struct Job {
  const PackedLinear& linear;
  const Epilogue& epilogue;
  const float* x;
  std::ptrdiff_t stride;
};

void finish(const Job& job, int panel, Range rows, const float* sums) {
  finish_panel(job.linear, panel, rows, job.epilogue, [&](int r, __m256& low, __m256& high) KVIST_LAMBDA {
    low = _mm256_load_ps(sums + (r - rows.first) * kPanel);
    high = _mm256_load_ps(sums + (r - rows.first) * kPanel + 8);
  });
}

// One tile of rows: each panel once from end to end, straight from the packed values.
void run_tile(const Job& job, Range panels, Range rows, std::size_t bytes, float* sums) {
  const Tile kernel = kTiles<Source::kPacked>[rows.last - rows.first];
  for (int panel = panels.first; panel < panels.last; ++panel) {
    kernel(job.x + rows.first * job.stride, job.stride, job.linear.data + static_cast<std::size_t>(panel) * bytes,
           nullptr, padded_inputs(job.linear.shape), false, sums);
    finish(job, panel, rows, sums);
  }
}

// Several tiles: a cut of K of all panels after the other, each cut widened once.
void run_block(const Job& job, Range panels, Range rows, std::size_t bytes, float* expanded, float* all_sums) {
  const int inputs = padded_inputs(job.linear.shape);
  const Cuts cuts = cut_inputs(inputs, kCut, kStep);
  const int count = rows.last - rows.first;
  const int tiles = ceil_div(count, kTileRows);
  for (int cut = 0; cut < cuts.count; ++cut) {
    const int k = cut * cuts.size;
    const int size = inputs - k < cuts.size ? inputs - k : cuts.size;
    for (int panel = panels.first; panel < panels.last; ++panel) {
      const std::uint8_t* packed = job.linear.data + static_cast<std::size_t>(panel) * bytes +
                                   static_cast<std::size_t>(k) * kInputBytes;
      float* sums = all_sums + static_cast<std::ptrdiff_t>(panel - panels.first) * count * kPanel;
      // Each tile fetches its share of the next panel's cut.
      const std::size_t share =
          panel + 1 < panels.last ? round_up(static_cast<std::size_t>(size * kInputBytes / tiles), kAlignment) : 0;
      for (int t = 0; t < tiles; ++t) {
        const int row = t * kTileRows;
        const int height = count - row < kTileRows ? count - row : kTileRows;
        const std::uint8_t* next = packed + bytes + static_cast<std::size_t>(t) * share;
        prefetch(next, next + share);
        const Tile kernel = t == 0 ? kTiles<Source::kPackedAndStore>[height] : kTiles<Source::kExpanded>[height];
        kernel(job.x + (rows.first + row) * job.stride + k, job.stride, packed, expanded, size, cut > 0,
               sums + row * kPanel);
      }
      if (cut + 1 == cuts.count) {
        finish(job, panel, rows, sums);
      }
    }
  }
}

void run(const PackedLinear& linear, const std::uint8_t* activations, int rows, Range panel_range, Range row_range,
         const Epilogue& epilogue, std::uint8_t* scratch) {
  const ActivationLayout layout = activation_layout(linear.shape, rows);
  const Job job{linear, epilogue, reinterpret_cast<const float*>(activations + layout.codes),
                static_cast<std::ptrdiff_t>(layout.stride / sizeof(float))};
  auto* sums = reinterpret_cast<float*>(scratch + kExpandedBytes);
  const std::size_t bytes = panel_bytes(linear.shape);
  if (row_range.last - row_range.first <= kTileRows) {
    run_tile(job, panel_range, row_range, bytes, sums);
  } else {
    run_block(job, panel_range, row_range, bytes, reinterpret_cast<float*>(scratch), sums);
  }
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
