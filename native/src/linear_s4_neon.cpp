// Int4 weights with NEON's dot product: 8-bit activations, exact int32 sums of a group, groups added in float32 in order.
//
//   panel   for each group: 16 float16 scales, 16 float16 minima, then [k / 4][8 outputs][4 inputs] bytes, whose low
//           nibble is the code of an output of the first eight, whose high nibble that of the one eight further
//   row     for each group its int8 codes, then their float32 scale and their sum times the scale; K padded to the group
//
// The dominating instruction is sdot: 16 products of a code (0 to 15, as a signed byte) and an activation, added in
// fours to 4 sums. Per four inputs and tile of 6 rows: 24 of them, two loads of weights, four instructions that part
// nibbles, six broadcasts. Per row, group and output
//
//   sum = fma(minimum, sum of the row's group, fma(sum of products * scale of the row's group, scale, sum))
//
// in float32, whatever the number of rows. With one row, a panel is a stream of 10 bytes per input (groups of 32):
// memory is the bound.

#include "int4_groups.h"
#include "linear_neon.h"

namespace kvist::neon {
namespace {

constexpr int kQuad = 4;  // inputs that meet in one 32-bit lane
constexpr int kMaxGroup = 64;
constexpr std::size_t kMetaBytes = 2 * kPanel * sizeof(std::uint16_t);

constexpr int unit_bytes(int group) { return static_cast<int>(kMetaBytes) + group * kPanel / 2; }

// A group of a row of activations.
constexpr int row_unit_bytes(int group) { return group + 2 * static_cast<int>(sizeof(float)); }

std::size_t panel_bytes(const LinearShape& shape) {
  return static_cast<std::size_t>(num_groups(shape)) * static_cast<std::size_t>(unit_bytes(shape.group));
}

// Where the byte with the code of input k of a group and row i of the panel is.
std::size_t place(int k, int i) {
  return kMetaBytes + static_cast<std::size_t>((k / kQuad * 8 + i % 8) * kQuad + k % kQuad);
}

void pack_panel(const LinearShape& shape, const float* const (&rows)[kPanel], std::uint8_t* panel) {
  for (int g = 0; g < num_groups(shape); ++g, panel += unit_bytes(shape.group)) {
    auto* halves = reinterpret_cast<std::uint16_t*>(panel);
    std::memset(panel, 0, static_cast<std::size_t>(unit_bytes(shape.group)));
    const int first = g * shape.group;
    const int left = shape.num_inputs - first;
    for (int i = 0; i < kPanel; ++i) {
      std::uint8_t codes[kMaxGroup] = {};
      if (rows[i] != nullptr) {
        pack_group(rows[i] + first, left < shape.group ? left : shape.group, halves + i, halves + kPanel + i, codes);
      }
      for (int k = 0; k < shape.group; ++k) {
        panel[place(k, i)] = static_cast<std::uint8_t>(panel[place(k, i)] | (i < 8 ? codes[k] : codes[k] << 4));
      }
    }
  }
}

void unpack_panel(const LinearShape& shape, const std::uint8_t* panel, float* const (&rows)[kPanel]) {
  for (int i = 0; i < kPanel; ++i) {
    for (int k = 0; rows[i] != nullptr && k < shape.num_inputs; ++k) {
      const std::uint8_t* group = panel + static_cast<std::ptrdiff_t>(k / shape.group) * unit_bytes(shape.group);
      const auto* halves = reinterpret_cast<const std::uint16_t*>(group);
      const std::uint8_t byte = group[place(k % shape.group, i)];
      rows[i][k] =
          f16_to_f32(halves[kPanel + i]) + f16_to_f32(halves[i]) * static_cast<float>(i < 8 ? byte & 15 : byte >> 4);
    }
  }
}

void quantise_row(const LinearShape& shape, const float* x, int row, int rows, std::uint8_t* activations) {
  const ActivationLayout layout = activation_layout(shape, rows);
  std::uint8_t* out = activations + layout.rows + static_cast<std::size_t>(row) * layout.stride;
  for (int first = 0; first < shape.num_inputs; first += shape.group, out += row_unit_bytes(shape.group)) {
    const int count = shape.num_inputs - first < shape.group ? shape.num_inputs - first : shape.group;
    const CodeScale scale = code_scale(max_abs(x + first, count), kInt8Limit);
    std::int32_t codes[kMaxGroup] = {};
    round_values(x + first, count, scale.inverse, codes);
    std::int32_t sum = 0;
    for (int k = 0; k < shape.group; ++k) {
      out[k] = static_cast<std::uint8_t>(codes[k]);
      sum += codes[k];
    }
    const float meta[2] = {scale.scale, scale.scale * static_cast<float>(sum)};
    std::memcpy(out + shape.group, meta, sizeof meta);
  }
}

// Four float16 as float32.
KVIST_INLINE float32x4_t load_halves(const std::uint8_t* from) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(from))));
}

// Sets sums[R][16] to the products of `groups` groups of kGroup inputs of R rows.
template <int R, int kGroup>
[[gnu::noinline]] void tile(const std::uint8_t* rows, std::ptrdiff_t stride, const std::uint8_t* packed, int groups,
                            Ahead<unit_bytes(kGroup)> ahead, float* sums) {
  const uint8x16_t nibble = vdupq_n_u8(15);
  for (int i = 0; i < 4 * R; ++i) {
    vst1q_f32(sums + 4 * i, vdupq_n_f32(0.0f));
  }
  for (int g = 0; g < groups; ++g, rows += row_unit_bytes(kGroup), packed += unit_bytes(kGroup)) {
    ahead.fetch_unit();
    int32x4_t acc[R][4];
    unroll<4 * R>([&](auto i) KVIST_LAMBDA { acc[i / 4][i % 4] = vdupq_n_s32(0); });
    for (int quad = 0; quad < kGroup / kQuad; ++quad) {
      int8x16_t codes[4];
      unroll<2>([&](auto i) KVIST_LAMBDA {
        const uint8x16_t both = vld1q_u8(packed + kMetaBytes + 32 * quad + 16 * i);
        codes[i] = vreinterpretq_s8_u8(vandq_u8(both, nibble));
        codes[2 + i] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
      });
      unroll<R>([&](auto r) KVIST_LAMBDA {
        const int8x16_t x = broadcast_bytes4(rows + r * stride + kQuad * quad);
        unroll<4>([&](auto i) KVIST_LAMBDA { acc[r][i] = vdotq_s32(acc[r][i], codes[i], x); });
      });
    }
    float32x4_t scales[4];
    float32x4_t minima[4];
    unroll<4>([&](auto i) KVIST_LAMBDA {
      scales[i] = load_halves(packed + 8 * i);
      minima[i] = load_halves(packed + kMetaBytes / 2 + 8 * i);
    });
    unroll<R>([&](auto r) KVIST_LAMBDA {
      float meta[2];
      std::memcpy(meta, rows + r * stride + kGroup, sizeof meta);
      unroll<4>([&](auto i) KVIST_LAMBDA {
        float* to = sums + kPanel * r + 4 * i;
        const float32x4_t scaled = vmulq_n_f32(vcvtq_f32_s32(acc[r][i]), meta[0]);
        const float32x4_t sum = vfmaq_f32(vld1q_f32(to), scaled, scales[i]);
        vst1q_f32(to, vfmaq_f32(sum, vdupq_n_f32(meta[1]), minima[i]));
      });
    });
  }
}

template <int kGroup>
using Tile = void (*)(const std::uint8_t*, std::ptrdiff_t, const std::uint8_t*, int, Ahead<unit_bytes(kGroup)>, float*);

template <int kGroup>
constexpr Tile<kGroup> kTiles[kTileRows + 1] = {nullptr,         tile<1, kGroup>, tile<2, kGroup>, tile<3, kGroup>,
                                                tile<4, kGroup>, tile<5, kGroup>, tile<6, kGroup>};

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

  void finish(int panel, const std::uint8_t*, Range range, float* sums) const {
    finish_panel(linear, panel, range, epilogue, [&](int r) KVIST_LAMBDA { return sums + (r - range.first) * kPanel; });
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

}  // namespace kvist::neon
