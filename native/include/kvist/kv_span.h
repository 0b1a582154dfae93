// Records of 64 consecutive positions, a span, in the codecs int4 and int3: K and V of one layer and KV head.
//
// A block of P positions, a multiple of 64, is (L, P / 64, K) records, row-major. A record of D channels and b bits:
//
//   bytes      what
//   D          K: the step of each channel, e5m3
//   D          K: the zero point of each channel, int8
//   8 D b      K: codes; lanes are positions, members are channels
//   64         V: the scale of each position, e5m3
//   8 D b      V: codes; lanes are channels, members are positions
//
// Codes stand for rows turned by numbers of the model, y = (x - mean) diag(balance) R with the rotation of rowwise.h:
//
//   K:  y[t, c] = step[c] * (code[t, c] + zero[c] / 2)        V:  y[t, c] = scale[t] * level[code[t, c]]
//
// Four members of n lanes are a group, n * b / 2 bytes; groups follow each other by member:
//
//   int4   byte 4 i + j, i < n / 2:  low half: lane i, high half: lane i + n / 2, of member j
//   int3   first n bytes, 4 i + j, i < n / 4:  bits 2 r and 2 r + 1: the low two bits of lane i + r n / 4
//          next n / 2 bytes, 4 i + j, i < n / 8:  bit r: the high bit of lane i + r n / 8
//
// docs/formats/kv_block.md has the whole and a worked example.
#pragma once

#include <bit>
#include <cstdint>

namespace kvist {

inline constexpr int kSpanTokens = 64;

// What the codecs know of a model. Of all layers: (L, K, D) each, float32; V has no mean.
struct KvTransforms {
  const float* mean;  // subtracted from keys
  const float* key_balance;
  const float* value_balance;
  // For encoders: what an error of a key costs, as queries see it from the start of its span. Lower triangles by rows,
  // (L, K, D (D + 1) / 2), and kMetricSlack more that encoders may read; null: each channel is rounded by itself.
  const float* key_metric = nullptr;
  // (L, D / 2): by how much a position turns a pair of channels (c, c + D / 2), in radians. Null where the metric is.
  const double* frequencies = nullptr;
};

inline constexpr int kMetricSlack = 8;

static constexpr std::int64_t kv_metric_size(int head_dim) { return std::int64_t{head_dim} * (head_dim + 1) / 2; }

static constexpr std::int64_t kv_record_bytes(int bits, int head_dim) {
  return std::int64_t{2} * head_dim + kSpanTokens + std::int64_t{16} * head_dim * bits;
}

// Where the parts of a record begin; the steps are at 0.
struct KvRecordLayout {
  int zeros;
  int key_codes;
  int scales;
  int value_codes;
};

static constexpr KvRecordLayout kv_record_layout(int bits, int head_dim) {
  const int codes = 8 * head_dim * bits;
  return {head_dim, 2 * head_dim, 2 * head_dim + codes, 2 * head_dim + codes + kSpanTokens};
}

inline constexpr std::int8_t kInt4Levels[16] = {-126, -95, -74, -58, -43, -30, -18, -6, 6, 18, 30, 43, 58, 74, 95, 126};
inline constexpr std::int8_t kInt3Levels[8] = {-125, -78, -44, -14, 14, 44, 78, 125};

// e5m3, byte 8 e + m: m * 2^-22 where e is 0, otherwise (8 + m) * 2^(e - 23). 255 is no number.
inline constexpr std::uint8_t kE5m3Nan = 255;
inline constexpr float kE5m3Largest = 3584.0F;

static inline float e5m3_to_f32(std::uint8_t byte) {
  if (byte == kE5m3Nan) {
    return std::bit_cast<float>(0x7fc00000U);
  }
  if (byte < 8) {
    return static_cast<float>(byte) * 0x1p-22F;
  }
  return std::bit_cast<float>((static_cast<std::uint32_t>(byte) + 107U * 8U) << 20);
}

}  // namespace kvist
