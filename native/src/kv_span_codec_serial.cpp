// Spans written and read value by value: rows are turned one at a time, channels of K and positions of V have their
// grids chosen one at a time.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "kv_span_grid.h"
#include "kvist/kv_span_codec.h"

namespace kvist {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// --- choices

// What a channel of K or a position of V is coded with.
struct Choice {
  std::uint8_t byte;
  int zero;  // of K
};

bool is_finite(const float* x, int n) {
  return std::all_of(x, x + n, [](float value) { return std::isfinite(value); });
}

float sum_of_squares(const float* x, int n) {
  float sum = 0.0F;
  for (int i = 0; i < n; ++i) {
    sum += x[i] * x[i];
  }
  return sum;
}

// Returns how many of n finite values are beyond reach; they are held within it.
int hold(float* x, int n, float reach) {
  int num_held = 0;
  for (int i = 0; i < n; ++i) {
    num_held += std::fabs(x[i]) > reach ? 1 : 0;
    x[i] = std::clamp(x[i], -reach, reach);
  }
  return num_held;
}

// In steps above the zero point, not yet rounded.
float position_in_grid(float x, float inverse, float half) { return x * inverse - half; }

float nearest_code(float position, float limit) { return std::clamp(std::nearbyint(position), 0.0F, limit); }

// The step and zero point of one channel of K, `x` its 64 values.
Choice choose_grid(int bits, const float* x) {
  const float limit = static_cast<float>((1 << bits) - 1);
  const float lowest = *std::min_element(x, x + kSpanTokens);
  const float highest = *std::max_element(x, x + kSpanTokens);
  const float middle = lowest / 2.0F + highest / 2.0F;
  // Far from 0 the step grows until the zero point reaches the middle.
  const float for_range = (highest / 2.0F - lowest / 2.0F) / (limit / 2.0F);
  const float for_middle = 2.0F * std::fabs(middle) / (127.0F - limit);
  const int nearest = nearest_e5m3(std::max(for_range, for_middle));
  const bool is_far = for_middle > for_range;
  Choice best = {0, 0};
  float least = std::numeric_limits<float>::infinity();
  for (int i = 0; i < (is_far ? kNumFarGrids : kNumNearGrids); ++i) {
    const GridCandidate candidate = is_far ? kFarGrids[i] : kNearGrids[i];
    const auto byte = static_cast<std::uint8_t>(clamp_e5m3(nearest + candidate.step));
    const float step = e5m3_to_f32(byte);
    const float inverse = inverse_of(step);
    float zero = 0.0F;
    if (step > 0.0F) {
      zero = std::nearbyint(2.0F * middle * inverse - limit) + static_cast<float>(candidate.shift);
      zero = std::clamp(zero, -128.0F, 127.0F);
    }
    float error = 0.0F;  // in steps
    for (int t = 0; t < kSpanTokens; ++t) {
      const float position = position_in_grid(x[t], inverse, zero * 0.5F);
      const float off = nearest_code(position, limit) - position;
      error += off * off;
    }
    error = step > 0.0F ? error * (step * step) : sum_of_squares(x, kSpanTokens);
    if (error < least) {
      least = error;
      best = {byte, static_cast<int>(zero)};
    }
  }
  return best;
}

// How many levels further out than the innermost a magnitude belongs.
template <int Bits>
int nearest_magnitude(float magnitude) {
  int index = 0;
  for (const float midpoint : SpanLevels<Bits>::midpoints) {
    index += midpoint < magnitude ? 1 : 0;
  }
  return index;
}

// The scale of one position of V, `x` its values.
template <int Bits>
Choice choose_scale(const float* x, int head_dim) {
  using Levels = SpanLevels<Bits>;
  float largest = 0.0F;
  for (int c = 0; c < head_dim; ++c) {
    largest = std::max(largest, std::fabs(x[c]));
  }
  const float squares = sum_of_squares(x, head_dim);
  const int nearest = nearest_e5m3(std::sqrt(squares / static_cast<float>(head_dim)) / Levels::kDeviation);
  const int reaching = nearest_e5m3(largest / Levels::magnitudes.back());
  int candidates[kNumScales];
  int count = 0;
  for (const int step : kDeviationScales) {
    candidates[count++] = clamp_e5m3(nearest + step);
  }
  for (const int step : kReachingScales) {
    candidates[count++] = clamp_e5m3(reaching + step);
  }
  Choice best = {0, 0};
  float least = std::numeric_limits<float>::infinity();
  for (const int candidate : candidates) {
    const auto byte = static_cast<std::uint8_t>(candidate);
    const float scale = e5m3_to_f32(byte);
    const float inverse = inverse_of(scale);
    float error = 0.0F;  // in scales
    for (int c = 0; c < head_dim; ++c) {
      const float magnitude = std::fabs(x[c]) * inverse;
      const float off = Levels::magnitudes[nearest_magnitude<Bits>(magnitude)] - magnitude;
      error += off * off;
    }
    error = scale > 0.0F ? error * (scale * scale) : squares;
    if (error < least) {
      least = error;
      best.byte = byte;
    }
  }
  return best;
}

// --- records

// Codes are kept as pack_codes wants them.
std::uint8_t& code_at(std::uint8_t* codes, int num_lanes, int lane, int member) {
  return codes[(member / 4 * num_lanes + lane) * 4 + member % 4];
}

// The codes of one channel, `x` its values. `moved` are those values less what the errors of channels before it take.
template <int Bits>
void round_channel(Choice choice, const float* x, const float* moved, float* codes) {
  const float limit = static_cast<float>((1 << Bits) - 1);
  const float inverse = inverse_of(e5m3_to_f32(choice.byte));
  const float half = static_cast<float>(choice.zero) * 0.5F;
  for (int t = 0; t < kSpanTokens; ++t) {
    const float exact = position_in_grid(x[t], inverse, half);
    const float lowest = std::clamp(std::floor(exact), 0.0F, limit);
    const float highest = std::clamp(std::ceil(exact), 0.0F, limit);
    // A position that is no number becomes the lowest.
    const float nearest = std::nearbyint(position_in_grid(moved[t], inverse, half));
    const float not_below = nearest > lowest ? nearest : lowest;
    codes[t] = not_below < highest ? not_below : highest;
  }
}

template <int Bits>
int encode_keys(const KvSpanHead& head, const float* shares, float* keys, std::uint8_t* record, std::uint8_t* codes) {
  const RowwiseKernels& kernels = rowwise_kernels(Isa::kSerial);
  const HeadTurn& turn = *head.turn;
  const int head_dim = turn.power * turn.odd;
  for (int t = 0; t < kSpanTokens; ++t) {
    float* row = keys + t * head_dim;
    kernels.turn_back(row, turn);
    for (int c = 0; c < head_dim; ++c) {
      row[c] = (row[c] - head.mean[c]) * head.key_balance[c];
    }
    kernels.turn(row, turn);
  }
  const KvRecordLayout parts = kv_record_layout(Bits, head_dim);
  int num_held = 0;
  for (int c = 0; c < head_dim; ++c) {
    float channel[kSpanTokens];
    for (int t = 0; t < kSpanTokens; ++t) {
      channel[t] = keys[t * head_dim + c];
    }
    const bool is_sound = is_finite(channel, kSpanTokens);
    num_held += is_sound ? hold(channel, kSpanTokens, kReachOfKeys<Bits>) : 0;
    const Choice choice = is_sound ? choose_grid(Bits, channel) : Choice{kE5m3Nan, 0};
    const float step = e5m3_to_f32(choice.byte);
    const float half = static_cast<float>(choice.zero) * 0.5F;
    float rounded[kSpanTokens] = {};
    if (is_sound && shares != nullptr) {
      float moved[kSpanTokens];
      for (int t = 0; t < kSpanTokens; ++t) {
        moved[t] = channel[t];
        for (int before = 0; before < c; ++before) {
          moved[t] -= shares[c * head_dim + before] * keys[t * head_dim + before];
        }
      }
      round_channel<Bits>(choice, channel, moved, rounded);
    } else if (is_sound) {
      for (int t = 0; t < kSpanTokens; ++t) {
        const float position = position_in_grid(channel[t], inverse_of(step), half);
        rounded[t] = nearest_code(position, static_cast<float>((1 << Bits) - 1));
      }
    }
    for (int t = 0; t < kSpanTokens; ++t) {
      code_at(codes, kSpanTokens, t, c) = static_cast<std::uint8_t>(rounded[t]);
      // Nobody needs the key any more, but channels after it its error.
      keys[t * head_dim + c] = is_sound ? step * (rounded[t] + half) - channel[t] : 0.0F;
    }
    record[c] = choice.byte;
    record[parts.zeros + c] = static_cast<std::uint8_t>(choice.zero);
  }
  pack_codes<Bits>(codes, kSpanTokens, head_dim / 4, record + parts.key_codes);
  return num_held;
}

template <int Bits>
int encode_values(const KvSpanHead& head, const float* values, std::uint8_t* record, std::uint8_t* codes) {
  constexpr int kHalf = SpanLevels<Bits>::kCount;
  const RowwiseKernels& kernels = rowwise_kernels(Isa::kSerial);
  const HeadTurn& turn = *head.turn;
  const int head_dim = turn.power * turn.odd;
  const KvRecordLayout parts = kv_record_layout(Bits, head_dim);
  int num_held = 0;
  for (int t = 0; t < kSpanTokens; ++t) {
    float row[kMaxHeadDim];
    for (int c = 0; c < head_dim; ++c) {
      row[c] = values[t * head_dim + c] * head.value_balance[c];
    }
    kernels.turn(row, turn);
    const bool is_sound = is_finite(row, head_dim);
    num_held += is_sound ? hold(row, head_dim, kReachOfValues<Bits>) : 0;
    const Choice choice = is_sound ? choose_scale<Bits>(row, head_dim) : Choice{kE5m3Nan, 0};
    const float inverse = inverse_of(e5m3_to_f32(choice.byte));
    for (int c = 0; c < head_dim; ++c) {
      const int index = nearest_magnitude<Bits>(std::fabs(row[c]) * inverse);
      const int code = row[c] > 0.0F ? kHalf + index : kHalf - 1 - index;
      code_at(codes, head_dim, c, t) = is_sound ? static_cast<std::uint8_t>(code) : 0;
    }
    record[parts.scales + t] = choice.byte;
  }
  pack_codes<Bits>(codes, head_dim, kSpanTokens / 4, record + parts.value_codes);
  return num_held;
}

template <int Bits>
void decode_keys(const KvSpanHead& head, const std::uint8_t* record, float* keys, std::uint8_t* codes) {
  const RowwiseKernels& kernels = rowwise_kernels(Isa::kSerial);
  const HeadTurn& turn = *head.turn;
  const int head_dim = turn.power * turn.odd;
  const KvRecordLayout parts = kv_record_layout(Bits, head_dim);
  unpack_codes<Bits>(record + parts.key_codes, kSpanTokens, head_dim / 4, codes);
  for (int t = 0; t < kSpanTokens; ++t) {
    float* row = keys + t * head_dim;
    for (int c = 0; c < head_dim; ++c) {
      const float half = static_cast<float>(static_cast<std::int8_t>(record[parts.zeros + c])) * 0.5F;
      row[c] = e5m3_to_f32(record[c]) * (static_cast<float>(code_at(codes, kSpanTokens, t, c)) + half);
    }
    kernels.turn_back(row, turn);
    for (int c = 0; c < head_dim; ++c) {
      row[c] = row[c] / head.key_balance[c] + head.mean[c];
    }
    kernels.turn(row, turn);
  }
}

template <int Bits>
void decode_values(const KvSpanHead& head, const std::uint8_t* record, float* values, std::uint8_t* codes) {
  constexpr int kHalf = SpanLevels<Bits>::kCount;
  const RowwiseKernels& kernels = rowwise_kernels(Isa::kSerial);
  const HeadTurn& turn = *head.turn;
  const int head_dim = turn.power * turn.odd;
  const KvRecordLayout parts = kv_record_layout(Bits, head_dim);
  unpack_codes<Bits>(record + parts.value_codes, head_dim, kSpanTokens / 4, codes);
  for (int t = 0; t < kSpanTokens; ++t) {
    float* row = values + t * head_dim;
    const float scale = e5m3_to_f32(record[parts.scales + t]);
    for (int c = 0; c < head_dim; ++c) {
      const int code = code_at(codes, head_dim, c, t);
      const float level =
          code < kHalf ? -SpanLevels<Bits>::magnitudes[kHalf - 1 - code] : SpanLevels<Bits>::magnitudes[code - kHalf];
      row[c] = scale * level;
    }
    kernels.turn_back(row, turn);
    for (int c = 0; c < head_dim; ++c) {
      row[c] /= head.value_balance[c];
    }
  }
}

// --- feedback

void transpose(float* matrix, int size) {
  for (int row = 0; row < size; ++row) {
    for (int column = 0; column < row; ++column) {
      std::swap(matrix[row * size + column], matrix[column * size + row]);
    }
  }
}

void feedback(const KvSpanHead& head, const KvSpanMetric& metric, float* shares) noexcept {
  const RowwiseKernels& kernels = rowwise_kernels(Isa::kSerial);
  const HeadTurn& turn = *head.turn;
  const int head_dim = turn.power * turn.odd;
  const float* lower = metric.lower;
  for (int row = 0; row < head_dim; ++row) {
    for (int column = 0; column <= row; ++column) {
      shares[row * head_dim + column] = shares[column * head_dim + row] = *lower++;
    }
  }
  for (int side = 0; side < 2; ++side) {
    for (float* row = shares; row < shares + head_dim * head_dim; row += head_dim) {
      kernels.rope(row, metric.cosines, metric.sines, head_dim / 2);
      for (int c = 0; c < head_dim; ++c) {
        row[c] *= 1.0F / head.key_balance[c];
      }
      kernels.turn(row, turn);
    }
    transpose(shares, head_dim);
  }
  float trace = 0.0F;
  for (int c = 0; c < head_dim; ++c) {
    trace += shares[c * head_dim + c];
  }
  const float damping = kMetricDamping * (trace / static_cast<float>(head_dim)) + std::numeric_limits<float>::min();
  for (int c = 0; c < head_dim; ++c) {
    shares[c * head_dim + c] += damping;
  }
  // From the last channel on, each takes its part out of the matrix of those before it.
  for (int c = head_dim - 1; c > 0; --c) {
    float* own = shares + c * head_dim;
    const float inverse = 1.0F / own[c];
    for (int row = 0; row < c; ++row) {
      const float share = own[row] * inverse;
      for (int column = 0; column <= row; ++column) {
        shares[row * head_dim + column] -= share * own[column];
      }
    }
    for (int column = 0; column < c; ++column) {
      own[column] *= inverse;
    }
  }
}

int encode(int bits, const KvSpanHead& head, const float* shares, float* keys, const float* values,
           std::uint8_t* record, void* scratch) noexcept {
  auto* codes = static_cast<std::uint8_t*>(scratch);
  if (bits == 4) {
    const int num_held = encode_keys<4>(head, shares, keys, record, codes);
    return num_held + encode_values<4>(head, values, record, codes);
  }
  const int num_held = encode_keys<3>(head, shares, keys, record, codes);
  return num_held + encode_values<3>(head, values, record, codes);
}

void decode(int bits, const KvSpanHead& head, const std::uint8_t* record, float* keys, float* values,
            void* scratch) noexcept {
  auto* codes = static_cast<std::uint8_t*>(scratch);
  if (bits == 4) {
    decode_keys<4>(head, record, keys, codes);
    decode_values<4>(head, record, values, codes);
  } else {
    decode_keys<3>(head, record, keys, codes);
    decode_values<3>(head, record, values, codes);
  }
}

}  // namespace

extern const KvSpanKernels kv_span_serial;
const KvSpanKernels kv_span_serial = {feedback, encode, decode};

}  // namespace kvist
