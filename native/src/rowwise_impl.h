// The row-wise kernels as plain loops over 16 lanes, compiled once for each instruction set.
//
// The including file defines KVIST_ROWWISE_TABLE, the name of its table. Loads and stores dominate: a row is read once
// or twice from the first-level cache. Tails run lane by lane.

#include <cmath>
#include <cstddef>
#include <limits>

#include "kvist/common.h"
#include "kvist/rowwise.h"

namespace kvist {
namespace {

constexpr int kLanes = 16;

float sum_of_squares(const float* x, int n) noexcept {
  float lanes[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += x[i + lane] * x[i + lane];
    }
  }
  for (; i < n; ++i) {
    lanes[i % kLanes] += x[i] * x[i];
  }
  float sum = 0.0F;
  for (const float lane : lanes) {
    sum += lane;
  }
  return sum;
}

float norm_scale(const float* x, int n, float eps) noexcept {
  return 1.0F / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps);
}

void embed(const std::uint16_t* table, std::int64_t token, int n, float scale, float* out) noexcept {
  const std::uint16_t* row = table + token * n;
  for (int i = 0; i < n; ++i) {
    out[i] = bf16_to_f32(row[i]) * scale;
  }
}

void rms_norm(const float* x, const float* weight, int n, float eps, float* out) noexcept {
  const float scale = norm_scale(x, n, eps);
  for (int i = 0; i < n; ++i) {
    out[i] = x[i] * scale * weight[i];
  }
}

void add_rms_norm(const float* x, const float* weight, int n, float eps, float* out) noexcept {
  const float scale = norm_scale(x, n, eps);
  for (int i = 0; i < n; ++i) {
    out[i] += x[i] * scale * weight[i];
  }
}

void rope(float* head, const float* cos, const float* sin, int half) noexcept {
  for (int i = 0; i < half; ++i) {
    const float first = head[i];
    const float second = head[i + half];
    head[i] = first * cos[i] - second * sin[i];
    head[i + half] = second * cos[i] + first * sin[i];
  }
}

void apply_signs(float* head, const HeadTurn& turn) noexcept {
  const float* signs = turn.signs;
  for (int i = 0; i < turn.power * turn.odd; ++i) {
    head[i] *= signs[i];
  }
}

void walsh_hadamard(float* head, int power, int n) noexcept {
  for (int step = 1; step < power; step *= 2) {
    for (int first = 0; first < n; first += 2 * step) {
      for (int i = first; i < first + step; ++i) {
        const float left = head[i];
        const float right = head[i + step];
        head[i] = left + right;
        head[i + step] = left - right;
      }
    }
  }
}

// A matrix across the runs: of the cosines, where a step to the next row is `odd`, or its transpose.
void apply_cosines(float* head, const HeadTurn& turn, int row_step, int column_step) noexcept {
  const int power = turn.power;
  const int odd = turn.odd;
  if (odd == 1) {
    return;
  }
  for (int i = 0; i < power; ++i) {
    float column[kMaxOddPart];
    for (int run = 0; run < odd; ++run) {
      column[run] = head[run * power + i];
    }
    for (int run = 0; run < odd; ++run) {
      float sum = 0.0F;
      for (int other = 0; other < odd; ++other) {
        sum += turn.cosines[run * row_step + other * column_step] * column[other];
      }
      head[run * power + i] = sum;
    }
  }
}

void turn(float* head, const HeadTurn& turn) noexcept {
  apply_signs(head, turn);
  walsh_hadamard(head, turn.power, turn.power * turn.odd);
  apply_cosines(head, turn, turn.odd, 1);
}

void turn_back(float* head, const HeadTurn& turn) noexcept {
  apply_cosines(head, turn, 1, turn.odd);
  walsh_hadamard(head, turn.power, turn.power * turn.odd);
  apply_signs(head, turn);
}

// Some columns of some rows; the sums stay in registers, and each piece of the matrix is read once for all rows.
template <int kRows, int kColumns>
void project_tile(const float* x, std::ptrdiff_t stride, const float* matrix, int n, int m, float* out) noexcept {
  float sums[kRows][kColumns] = {};
  for (int i = 0; i < n; ++i) {
    const float* weights = matrix + static_cast<std::ptrdiff_t>(i) * m;
    for (int row = 0; row < kRows; ++row) {
      const float value = x[row * stride + i];
      for (int column = 0; column < kColumns; ++column) {
        sums[row][column] += value * weights[column];
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      out[static_cast<std::ptrdiff_t>(row) * m + column] = sums[row][column];
    }
  }
}

template <int kRows>
void project_rows(const float* x, std::ptrdiff_t stride, const float* matrix, int n, int m, float* out) noexcept {
  int column = 0;
  for (; column + kLanes <= m; column += kLanes) {
    project_tile<kRows, kLanes>(x, stride, matrix + column, n, m, out + column);
  }
  for (; column + 8 <= m; column += 8) {
    project_tile<kRows, 8>(x, stride, matrix + column, n, m, out + column);
  }
  for (; column < m; ++column) {
    project_tile<kRows, 1>(x, stride, matrix + column, n, m, out + column);
  }
}

void project(const float* x, std::ptrdiff_t stride, int rows, const float* matrix, int n, int m, float* out) noexcept {
  constexpr int kRows = 4;
  int row = 0;
  for (; row + kRows <= rows; row += kRows) {
    project_rows<kRows>(x + row * stride, stride, matrix, n, m, out + static_cast<std::ptrdiff_t>(row) * m);
  }
  for (; row < rows; ++row) {
    project_rows<1>(x + row * stride, stride, matrix, n, m, out + static_cast<std::ptrdiff_t>(row) * m);
  }
}

BestToken best_token(const float* logits, int n) noexcept {
  float lanes[kLanes];
  std::int32_t unordered[kLanes] = {};
  for (float& lane : lanes) {
    lane = -std::numeric_limits<float>::infinity();
  }
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = logits[i + lane];
      lanes[lane] = value > lanes[lane] ? value : lanes[lane];
      unordered[lane] |= value != value ? 1 : 0;
    }
  }
  float best = -std::numeric_limits<float>::infinity();
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) {
    best = lanes[lane] > best ? lanes[lane] : best;
    has_nan |= unordered[lane] != 0;
  }
  for (; i < n; ++i) {
    best = logits[i] > best ? logits[i] : best;
    has_nan |= logits[i] != logits[i];
  }
  if (has_nan) {
    return {std::numeric_limits<float>::quiet_NaN(), 0};
  }
  std::int32_t token = 0;
  while (token < n - 1 && logits[token] != best) {
    ++token;
  }
  return {best, token};
}

}  // namespace

extern const RowwiseKernels KVIST_ROWWISE_TABLE;
const RowwiseKernels KVIST_ROWWISE_TABLE = {embed, rms_norm, add_rms_norm, rope, turn, turn_back, best_token, project};

}  // namespace kvist
