// Linear layers in plain loops: the oracle of the other tables, and what runs where none of them can.
//
//   kind    packed bytes, row-major over the outputs n (with a gate: one half, then the other)
//   int8    N float32 scales, then N x K codes
//   int4    N x G float16 scales (G groups of an output), N x G float16 minima, then N x K codes, one in a byte
//   bf16    N x K bfloat16
//
//   activations: one float32 scale for each row (int4: for each row and group), then rows x K codes of 16 bits, or
//   rows x K float32 for bf16
//
// Numerics: sums of codes in int32, exact; scaled sums, bias, gate and residual in float32, in this order. int4 adds
// the scaled sums of its groups in float32, first group first, of each the products and then what the minimum adds;
// bf16 adds products in float32, first input first.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "int4_groups.h"
#include "linear_common.h"
#include "linear_tables.h"

namespace kvist {
namespace {

constexpr int kOutputsPerItem = 16;

std::size_t elements(const LinearShape& shape) {
  return static_cast<std::size_t>(shape.num_outputs) * static_cast<std::size_t>(shape.num_inputs);
}

std::size_t scales_bytes(const LinearShape& shape) {
  const auto outputs = static_cast<std::size_t>(shape.num_outputs);
  switch (shape.kind) {
    case WeightKind::kInt8:
      return round_up(outputs * sizeof(float), kAlignment);
    case WeightKind::kInt4:
      return round_up(outputs * static_cast<std::size_t>(num_groups(shape)) * 2 * sizeof(std::uint16_t), kAlignment);
    case WeightKind::kBf16:
      break;
  }
  return 0;
}

std::size_t packed_bytes(const LinearShape& shape) {
  const std::size_t size = shape.kind == WeightKind::kBf16 ? sizeof(std::uint16_t) : sizeof(std::int8_t);
  return round_up(scales_bytes(shape) + elements(shape) * size, kAlignment);
}

void round_codes(const float* values, int count, float inverse, std::int16_t* codes) {
  for (int i = 0; i < count; ++i) {
    codes[i] = inverse == 0.0f ? std::int16_t{0} : static_cast<std::int16_t>(std::lrint(values[i] * inverse));
  }
}

void pack_row_int8(const float* weights, int count, float* scale, std::int8_t* codes) {
  const CodeScale row = code_scale(max_abs(weights, count), kInt8Limit);
  *scale = row.scale;
  for (int k = 0; k < count; ++k) {
    codes[k] = row.inverse == 0.0f ? std::int8_t{0} : static_cast<std::int8_t>(std::lrint(weights[k] * row.inverse));
  }
}

std::size_t all_groups(const LinearShape& shape) {
  return static_cast<std::size_t>(shape.num_outputs) * static_cast<std::size_t>(num_groups(shape));
}

void pack_rows(const LinearShape& shape, const float* weights, int first, int last, std::uint8_t* packed) {
  const auto inputs = static_cast<std::size_t>(shape.num_inputs);
  std::uint8_t* body = packed + scales_bytes(shape);
  for (int n = first; n < last; ++n) {
    const auto row = static_cast<std::size_t>(n);
    const float* source = weights + row * inputs;
    if (shape.kind == WeightKind::kInt8) {
      pack_row_int8(source, shape.num_inputs, reinterpret_cast<float*>(packed) + row,
                    reinterpret_cast<std::int8_t*>(body) + row * inputs);
    } else if (shape.kind == WeightKind::kInt4) {
      for (int group = 0; group < num_groups(shape); ++group) {
        const int start = group * shape.group;
        auto* scale =
            reinterpret_cast<std::uint16_t*>(packed) + row * static_cast<std::size_t>(num_groups(shape)) + group;
        pack_group(source + start, std::min(shape.group, shape.num_inputs - start), scale, scale + all_groups(shape),
                   body + row * inputs + start);
      }
    } else {
      std::transform(source, source + inputs, reinterpret_cast<std::uint16_t*>(body) + row * inputs, f32_to_bf16);
    }
  }
}

void pack(const LinearShape& shape, const float* weights, int first, int last, std::uint8_t* packed) {
  pack_rows(shape, weights, first, last, packed);
  if (shape.gate != Gate::kNone) {
    const int half = num_results(shape);
    pack_rows(shape, weights, half + first, half + last, packed);
  }
}

void unpack(const LinearShape& shape, const std::uint8_t* packed, float* weights) {
  const auto inputs = static_cast<std::size_t>(shape.num_inputs);
  const std::uint8_t* body = packed + scales_bytes(shape);
  for (std::size_t i = 0; i < elements(shape); ++i) {
    const std::size_t row = i / inputs;
    if (shape.kind == WeightKind::kInt8) {
      weights[i] = reinterpret_cast<const float*>(packed)[row] *
                   static_cast<float>(reinterpret_cast<const std::int8_t*>(body)[i]);
    } else if (shape.kind == WeightKind::kInt4) {
      const std::size_t group =
          row * static_cast<std::size_t>(num_groups(shape)) + i % inputs / static_cast<std::size_t>(shape.group);
      const auto* scales = reinterpret_cast<const std::uint16_t*>(packed);
      weights[i] =
          f16_to_f32(scales[all_groups(shape) + group]) + f16_to_f32(scales[group]) * static_cast<float>(body[i]);
    } else {
      weights[i] = bf16_to_f32(reinterpret_cast<const std::uint16_t*>(body)[i]);
    }
  }
}

// Inputs of a row that share a scale.
int scale_span(const LinearShape& shape) { return shape.kind == WeightKind::kInt4 ? shape.group : shape.num_inputs; }

int scales_per_row(const LinearShape& shape) { return ceil_div(shape.num_inputs, scale_span(shape)); }

std::size_t row_scales_bytes(const LinearShape& shape, int rows) {
  const std::size_t scales = static_cast<std::size_t>(rows) * static_cast<std::size_t>(scales_per_row(shape));
  return round_up(scales * sizeof(float), kAlignment);
}

std::size_t activation_bytes(const LinearShape& shape, int rows) {
  const std::size_t size = shape.kind == WeightKind::kBf16 ? sizeof(float) : sizeof(std::int16_t);
  return row_scales_bytes(shape, rows) +
         static_cast<std::size_t>(rows) * static_cast<std::size_t>(shape.num_inputs) * size;
}

void quantise(const LinearShape& shape, const float* x, std::ptrdiff_t stride, int rows, int first, int last,
              std::uint8_t* activations) {
  const auto inputs = static_cast<std::size_t>(shape.num_inputs);
  std::uint8_t* body = activations + row_scales_bytes(shape, rows);
  for (int r = first; r < last; ++r) {
    const float* source = x + r * stride;
    const auto row = static_cast<std::size_t>(r);
    if (shape.kind == WeightKind::kBf16) {
      std::copy(source, source + inputs, reinterpret_cast<float*>(body) + row * inputs);
      continue;
    }
    float* scale = reinterpret_cast<float*>(activations) + row * static_cast<std::size_t>(scales_per_row(shape));
    std::int16_t* out = reinterpret_cast<std::int16_t*>(body) + row * inputs;
    for (int start = 0; start < shape.num_inputs; start += scale_span(shape)) {
      const int count = std::min(scale_span(shape), shape.num_inputs - start);
      const CodeScale codes = code_scale(max_abs(source + start, count), activation_limit_of(shape));
      *scale++ = codes.scale;
      round_codes(source + start, count, codes.inverse, out + start);
    }
  }
}

int num_items(const LinearShape& shape, int, int) { return ceil_div(num_results(shape), kOutputsPerItem); }

std::size_t scratch_bytes(const LinearShape&, int) { return 0; }

float dot(const PackedLinear& linear, const std::uint8_t* activations, int rows, int r, int n) {
  const LinearShape& shape = linear.shape;
  const auto inputs = static_cast<std::size_t>(shape.num_inputs);
  const auto output = static_cast<std::size_t>(n);
  const std::uint8_t* body = linear.data + scales_bytes(shape);
  const std::uint8_t* row = activations + row_scales_bytes(shape, rows);
  if (shape.kind == WeightKind::kBf16) {
    const float* x = reinterpret_cast<const float*>(row) + static_cast<std::size_t>(r) * inputs;
    const std::uint16_t* w = reinterpret_cast<const std::uint16_t*>(body) + output * inputs;
    float sum = 0.0f;
    for (std::size_t k = 0; k < inputs; ++k) {
      sum += x[k] * bf16_to_f32(w[k]);
    }
    return sum;
  }
  const std::int16_t* x = reinterpret_cast<const std::int16_t*>(row) + static_cast<std::size_t>(r) * inputs;
  const auto* row_scales = reinterpret_cast<const float*>(activations) +
                           static_cast<std::size_t>(r) * static_cast<std::size_t>(scales_per_row(shape));
  if (shape.kind == WeightKind::kInt8) {
    const std::int8_t* w = reinterpret_cast<const std::int8_t*>(body) + output * inputs;
    std::int32_t sum = 0;
    for (std::size_t k = 0; k < inputs; ++k) {
      sum += std::int32_t{x[k]} * w[k];
    }
    return static_cast<float>(sum) * (row_scales[0] * reinterpret_cast<const float*>(linear.data)[n]);
  }
  const std::uint8_t* w = body + output * inputs;
  const auto groups = static_cast<std::size_t>(num_groups(shape));
  const auto* scales = reinterpret_cast<const std::uint16_t*>(linear.data) + output * groups;
  const auto* minima = scales + all_groups(shape);
  float total = 0.0f;
  for (std::size_t group = 0; group < groups; ++group) {
    const std::size_t start = group * static_cast<std::size_t>(shape.group);
    std::int32_t products = 0;
    std::int32_t codes = 0;
    for (std::size_t k = start; k < std::min(inputs, start + static_cast<std::size_t>(shape.group)); ++k) {
      products += std::int32_t{x[k]} * w[k];
      codes += x[k];
    }
    total += static_cast<float>(products) * row_scales[group] * f16_to_f32(scales[group]);
    total += static_cast<float>(codes) * row_scales[group] * f16_to_f32(minima[group]);
  }
  return total;
}

float activate(Gate gate, float x) {
  switch (gate) {
    case Gate::kSilu:
      return x / (1.0f + std::exp(-x));
    case Gate::kGeluTanh:
      return x / (1.0f + std::exp(-2.0f * 0.7978845608f * (x + 0.044715f * x * x * x)));
    case Gate::kGelu:
      return 0.5f * x * std::erfc(-0.7071067812f * x);
    case Gate::kNone:
      break;
  }
  return x;
}

void run(const PackedLinear& linear, const std::uint8_t* activations, int rows, int, int item, const Epilogue& epilogue,
         std::uint8_t*) {
  const int results = num_results(linear.shape);
  const int first = item * kOutputsPerItem;
  const int last = std::min(results, first + kOutputsPerItem);
  const auto output = [&](int r, int n) {
    const float value = dot(linear, activations, rows, r, n);
    return linear.bias != nullptr ? value + linear.bias[n] : value;
  };
  for (int r = 0; r < rows; ++r) {
    for (int n = first; n < last; ++n) {
      float value = output(r, n);
      if (linear.shape.gate != Gate::kNone) {
        value = activate(linear.shape.gate, value) * output(r, n + results);
      }
      if (epilogue.residual != nullptr) {
        value += epilogue.residual[r * epilogue.residual_stride + n];
      }
      epilogue.out[r * epilogue.out_stride + n] = value;
    }
  }
}

}  // namespace

const LinearKernels kLinearSerial = {
    .layout = "serial-2",
    .packed_bytes = packed_bytes,
    .pack = pack,
    .pack_step = 1,
    .unpack = unpack,
    .activation_limit = activation_limit_of,
    .activation_bytes = activation_bytes,
    .quantise = quantise,
    .quantise_step = 1,
    .num_items = num_items,
    .scratch_bytes = scratch_bytes,
    .run = run,
};

}  // namespace kvist
