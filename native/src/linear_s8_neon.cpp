// Int8 weights with NEON's dot product: 16-bit activations in two planes of 8 bits, exact int32 sums.
//
//   panel   16 float32 scales, then [k / 4][16 outputs][4] int8 codes; K padded to 16
//   row     for each 16 inputs, 16 high and 16 low parts: code = 128 * high + low, low in [-64, 63]
//
// The dominating instruction is sdot: 16 products of 8 bits, added in fours to 4 sums. Two of them take 16 products of
// 16-bit activations, as many as two pairs of smlal and smlal2, which take 8. A product is 128 * (sum of high) + sum of
// low, modulo 2^32 on the way, which the result does not leave. Per four inputs and 3 rows: 24 sdot, four loads of
// weights. With one row, a panel is a stream of 16 bytes per input: memory is the bound.

#include "linear_neon.h"

namespace kvist::neon {
namespace {

constexpr int kUnitBytes = kInt8Unit * kPanel;
constexpr int kPassRows = 3;  // of a tile: two planes of four sums each
constexpr std::size_t kScalesBytes = kPanel * sizeof(float);

std::size_t panel_bytes(const LinearShape& shape) {
  return kScalesBytes + static_cast<std::size_t>(padded_inputs(shape)) * kPanel;
}

// Where the code of input k and row i of the panel is.
int place(int k, int i) { return (k / 4 * kPanel + i) * 4 + k % 4; }

void pack_panel(const LinearShape& shape, const float* const (&rows)[kPanel], std::uint8_t* panel) {
  auto* scales = reinterpret_cast<float*>(panel);
  auto* codes = reinterpret_cast<std::int8_t*>(panel + kScalesBytes);
  for (int i = 0; i < kPanel; ++i) {
    const CodeScale scale = code_scale(rows[i] != nullptr ? max_abs(rows[i], shape.num_inputs) : 0.0f, kInt8Limit);
    scales[i] = scale.scale;
    for (int first = 0; first < padded_inputs(shape); first += kInt8Unit) {
      const int left = shape.num_inputs - first;
      std::int32_t rounded[kInt8Unit] = {};
      if (rows[i] != nullptr) {
        round_values(rows[i] + first, left < kInt8Unit ? left : kInt8Unit, scale.inverse, rounded);
      }
      for (int k = 0; k < kInt8Unit; ++k) {
        codes[place(first + k, i)] = static_cast<std::int8_t>(rounded[k]);
      }
    }
  }
}

void unpack_panel(const LinearShape& shape, const std::uint8_t* panel, float* const (&rows)[kPanel]) {
  const auto* scales = reinterpret_cast<const float*>(panel);
  const auto* codes = reinterpret_cast<const std::int8_t*>(panel + kScalesBytes);
  for (int i = 0; i < kPanel; ++i) {
    for (int k = 0; rows[i] != nullptr && k < shape.num_inputs; ++k) {
      rows[i][k] = scales[i] * static_cast<float>(codes[place(k, i)]);
    }
  }
}

void quantise_row(const LinearShape& shape, const float* x, int row, int rows, std::uint8_t* activations) {
  const ActivationLayout layout = activation_layout(shape, rows);
  const CodeScale scale = code_scale(max_abs(x, shape.num_inputs), activation_limit_of(shape));
  reinterpret_cast<float*>(activations)[row] = scale.scale;
  auto* out = reinterpret_cast<std::int8_t*>(activations + layout.rows + static_cast<std::size_t>(row) * layout.stride);
  for (int first = 0; first < padded_inputs(shape); first += kInt8Unit, out += 2 * kInt8Unit) {
    const int left = shape.num_inputs - first;
    std::int32_t codes[kInt8Unit] = {};
    round_values(x + first, left < kInt8Unit ? left : kInt8Unit, scale.inverse, codes);
    for (int k = 0; k < kInt8Unit; ++k) {
      const std::int32_t high = (codes[k] + 64) >> 7;
      out[k] = static_cast<std::int8_t>(high);
      out[kInt8Unit + k] = static_cast<std::int8_t>(codes[k] - 128 * high);
    }
  }
}

// Sets sums[R][16] to the products of R rows.
template <int R>
[[gnu::noinline]] void pass(const std::int8_t* rows, std::ptrdiff_t stride, const std::uint8_t* packed, int units,
                            Ahead<kUnitBytes> ahead, std::int32_t* sums) {
  int32x4_t high[R][4];
  int32x4_t low[R][4];
  unroll<4 * R>([&](auto i) KVIST_LAMBDA { high[i / 4][i % 4] = low[i / 4][i % 4] = vdupq_n_s32(0); });
  for (int unit = 0; unit < units; ++unit, rows += 2 * kInt8Unit, packed += kUnitBytes) {
    ahead.fetch_unit();
    int8x16_t x[R][2];
    unroll<R>([&](auto r) KVIST_LAMBDA {
      x[r][0] = vld1q_s8(rows + r * stride);
      x[r][1] = vld1q_s8(rows + r * stride + kInt8Unit);
    });
    unroll<kInt8Unit / 4>([&](auto quad) KVIST_LAMBDA {
      unroll<4>([&](auto i) KVIST_LAMBDA {
        const int8x16_t weights = vld1q_s8(reinterpret_cast<const std::int8_t*>(packed) + 64 * quad + 16 * i);
        unroll<R>([&](auto r) KVIST_LAMBDA {
          high[r][i] = vdotq_laneq_s32(high[r][i], weights, x[r][0], quad);
          low[r][i] = vdotq_laneq_s32(low[r][i], weights, x[r][1], quad);
        });
      });
    });
  }
  unroll<R>([&](auto r) KVIST_LAMBDA {
    unroll<4>([&](auto i) KVIST_LAMBDA {
      vst1q_s32(sums + kPanel * r + 4 * i, vaddq_s32(vshlq_n_s32(high[r][i], 7), low[r][i]));
    });
  });
}

using Pass = void (*)(const std::int8_t*, std::ptrdiff_t, const std::uint8_t*, int, Ahead<kUnitBytes>, std::int32_t*);
constexpr Pass kPasses[kPassRows + 1] = {nullptr, pass<1>, pass<2>, pass<3>};

struct Kernel {
  static constexpr std::size_t kHeaderBytes = kScalesBytes;
  static constexpr int kUnitBytes = kInt8Unit * kPanel;
  const PackedLinear& linear;
  const Epilogue& epilogue;
  const float* row_scales;
  const std::int8_t* rows;
  std::ptrdiff_t stride;

  const std::uint8_t* prepare(const std::uint8_t* packed, int, int) const { return packed; }

  void tile(int height, int row, int units, const std::uint8_t* packed, Ahead<kUnitBytes> ahead,
            std::int32_t* sums) const {
    const int first = height > kPassRows ? (height + 1) / 2 : height;
    kPasses[first](rows + row * stride, stride, packed, units, ahead, sums);
    if (first < height) {
      kPasses[height - first](rows + (row + first) * stride, stride, packed, units, ahead, sums + first * kPanel);
    }
  }

  void finish(int panel, const std::uint8_t* data, Range range, const std::int32_t* sums) const {
    const auto* scales = reinterpret_cast<const float*>(data);
    float values[kPanel];
    finish_panel(linear, panel, range, epilogue, [&](int r) KVIST_LAMBDA {
      const std::int32_t* row = sums + (r - range.first) * kPanel;
      for (int i = 0; i < kPanel; ++i) {
        values[i] = static_cast<float>(row[i]) * (scales[i] * row_scales[r]);
      }
      return values;
    });
  }
};

void run(const PackedLinear& linear, const std::uint8_t* activations, int rows, Range panel_range, Range row_range,
         const Epilogue& epilogue, std::uint8_t* scratch) {
  const ActivationLayout layout = activation_layout(linear.shape, rows);
  const Kernel kernel{linear, epilogue, reinterpret_cast<const float*>(activations),
                      reinterpret_cast<const std::int8_t*>(activations + layout.rows),
                      static_cast<std::ptrdiff_t>(layout.stride)};
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

}  // namespace kvist::neon
