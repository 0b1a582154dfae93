// One K or V row, written value by value. Arithmetic in float32, in the order that every version keeps: the scale is
// rounded first, then each value is multiplied by the scale's float32 reciprocal and rounded to nearest even.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kvist/common.h"
#include "kvist/kv_codec.h"
#include "kvist/rowwise.h"

namespace kvist {
namespace {

bool encode_raw16(int head_dim, const float* x, std::uint8_t* out) {
  bool finite = true;
  for (int d = 0; d < head_dim; ++d) {
    const std::uint16_t bits = f32_to_bf16(x[d]);
    finite = finite && (bits & 0x7f80U) != 0x7f80U;
    std::memcpy(out + 2 * d, &bits, sizeof(bits));
  }
  return finite;
}

struct Grid {
  std::uint16_t bits;
  float scale;
  float inverse;  // 0 where the scale is
};

// Of a group of n values; false where none is finite.
bool find_grid(const float* x, int n, Grid& grid) {
  std::uint32_t largest_bits = 0;  // of |x|: order of the bits is order of the values, a NaN above all
  for (int i = 0; i < n; ++i) {
    largest_bits = std::max(largest_bits, std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffU);
  }
  grid.bits = f32_to_f16(std::bit_cast<float>(largest_bits) / 127.0F);
  if (grid.bits >= 0x7c00U) {
    return false;
  }
  if (grid.bits == 0 && largest_bits != 0) {
    grid.bits = 1;
  }
  grid.scale = f16_to_f32(grid.bits);
  grid.inverse = grid.bits == 0 ? 0.0F : 1.0F / grid.scale;
  return true;
}

std::uint8_t to_byte(float code) { return static_cast<std::uint8_t>(static_cast<std::int8_t>(code)); }

bool encode_int8(int head_dim, const float* x, std::uint8_t* out) {
  for (int first = 0; first < head_dim; first += kKvGroup) {
    const int last = std::min(first + kKvGroup, head_dim);
    Grid grid{};
    if (!find_grid(x + first, last - first, grid)) {
      return false;
    }
    for (int d = first; d < last; ++d) {
      out[d] = to_byte(std::clamp(std::nearbyint(x[d] * grid.inverse), -127.0F, 127.0F));
    }
    std::memcpy(out + head_dim + 2 * (first / kKvGroup), &grid.bits, sizeof(grid.bits));
  }
  return true;
}

float fold(const float* lanes) {
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// Errors move the product with the query by `moved` so far. What is left can take that back, each value in proportion to
// its query's, at the least sum of squares of errors and, weighted alike, of the product.
bool encode_int8_key(int head_dim, int num_queries, const float* x, const float* queries, std::uint8_t* out) {
  float query[kMaxHeadDim];
  for (int d = 0; d < head_dim; ++d) {
    query[d] = queries[d];
    for (int i = 1; i < num_queries; ++i) {
      query[d] += queries[i * head_dim + d];
    }
  }
  float squares[kMaxKvStages] = {};  // of the query, from each stage on
  int num_stages = 0;
  for (int first = 0; first < head_dim; first = kv_stage_end(first, head_dim)) {
    float lanes[kKvLanes] = {};
    for (int d = first; d < kv_stage_end(first, head_dim); ++d) {
      lanes[d % kKvLanes] += query[d] * query[d];
    }
    squares[num_stages++] = fold(lanes);
  }
  for (int stage = num_stages - 2; stage >= 0; --stage) {
    squares[stage] += squares[stage + 1];
  }
  const float damping = squares[0] / static_cast<float>(head_dim);
  if (!(damping > 0.0F && std::isfinite(damping))) {
    return encode_int8(head_dim, x, out);
  }
  Grid grids[kMaxHeadDim / kKvGroup];
  for (int first = 0; first < head_dim; first += kKvGroup) {
    Grid& grid = grids[first / kKvGroup];
    if (!find_grid(x + first, std::min(kKvGroup, head_dim - first), grid)) {
      return false;
    }
    std::memcpy(out + head_dim + 2 * (first / kKvGroup), &grid.bits, sizeof(grid.bits));
  }
  float moved = 0.0F;
  for (int first = 0, stage = 0; first < head_dim; first = kv_stage_end(first, head_dim), ++stage) {
    const float back = moved / (damping + squares[stage]);
    float lanes[kKvLanes] = {};
    for (int d = first; d < kv_stage_end(first, head_dim); ++d) {
      const Grid& grid = grids[d / kKvGroup];
      const float exact = x[d] * grid.inverse;
      const float wanted = std::nearbyint(exact - query[d] * back * grid.inverse);
      const float near = std::clamp(wanted, std::floor(exact), std::ceil(exact));
      const float code = std::clamp(near, -127.0F, 127.0F);
      out[d] = to_byte(code);
      lanes[d % kKvLanes] += query[d] * (code * grid.scale - x[d]);
    }
    moved += fold(lanes);
  }
  return true;
}

}  // namespace

bool encode_kv_row_serial(KvCodec codec, int head_dim, const float* x, std::uint8_t* out) {
  return codec == KvCodec::kRaw16 ? encode_raw16(head_dim, x, out) : encode_int8(head_dim, x, out);
}

bool encode_kv_key_serial(KvCodec codec, int head_dim, int num_queries, const float* x, const float* queries,
                          std::uint8_t* out) {
  return codec == KvCodec::kRaw16 ? encode_raw16(head_dim, x, out)
                                  : encode_int8_key(head_dim, num_queries, x, queries, out);
}

}  // namespace kvist
