// What steps, scales and codes of spans stand for, and the order of the codes: shared by all that write them.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kvist/kv_span.h"

namespace kvist {

// --- e5m3: the bytes of steps and scales

inline constexpr int kLargestByte = 254;
inline constexpr float kSmallestStep = 0x1p-22F;
inline constexpr float kSmallestNormalStep = 0x1p-19F;
// The byte of a normal step is the top of the float32's bits minus this.
inline constexpr int kE5m3Bias = (127 - 20) * 8;

// The nearest byte to x >= 0, which is finite; of two as near the smaller one, and the largest beyond its value.
static inline int nearest_e5m3(float x) {
  if (x >= kE5m3Largest) {
    return kLargestByte;
  }
  if (x < kSmallestNormalStep) {
    return static_cast<int>(std::ceil(x * (1.0F / kSmallestStep) - 0.5F));
  }
  return static_cast<int>((std::bit_cast<std::uint32_t>(x) + 0x7ffffU) >> 20) - kE5m3Bias;
}

static inline int clamp_e5m3(int byte) { return byte < 0 ? 0 : byte > kLargestByte ? kLargestByte : byte; }

static inline float inverse_of(float step) { return step > 0.0F ? 1.0F / step : 0.0F; }

// --- K: grids of evenly spaced points

struct GridCandidate {
  int step;   // bytes above the nearest
  int shift;  // of the zero point
};
// The step that the range asks for. A smaller one for the sake of most keys would clip those at the ends, which get much of
// the attention.
inline constexpr GridCandidate kNearGrids[] = {{0, 0}};
inline constexpr int kNumNearGrids = 1;
// Where a channel varies less than the zero point can say: an octave up, in which some step may be just right.
inline constexpr GridCandidate kFarGrids[] = {{0, 0}, {0, 1}, {1, 0}, {1, 1}, {2, 0}, {2, 1}, {3, 0}, {3, 1}, {4, 0},
                                              {4, 1}, {5, 0}, {5, 1}, {6, 0}, {6, 1}, {7, 0}, {7, 1}, {8, 0}, {8, 1}};
inline constexpr int kNumFarGrids = 18;

// --- V: levels of a normal distribution, symmetric around 0

// A value belongs as many levels further out than the innermost as there are midpoints below its magnitude.
template <int Bits>
struct SpanLevels {
  static constexpr int kCount = 1 << (Bits - 1);
  // What the levels take as the standard deviation.
  static constexpr float kDeviation = Bits == 4 ? 46.0F : 58.0F;
  static constexpr std::array<float, kCount> magnitudes = [] {
    std::array<float, kCount> result{};
    for (int i = 0; i < kCount; ++i) {
      result[i] = Bits == 4 ? kInt4Levels[kCount + i] : kInt3Levels[kCount + i];
    }
    return result;
  }();
  static constexpr std::array<float, kCount - 1> midpoints = [] {
    std::array<float, kCount - 1> result{};
    for (int i = 0; i < kCount - 1; ++i) {
      result[i] = (magnitudes[i] + magnitudes[i + 1]) / 2.0F;
    }
    return result;
  }();
};

// Scales tried: bytes above the one that the deviation asks for, then above the one whose last level reaches the largest.
inline constexpr int kDeviationScales[] = {-1, 0, 1, 2};
inline constexpr int kReachingScales[] = {0, -8};
inline constexpr int kNumScales = 6;

// --- what turned components are held within

// The largest step, half of the codes on either side of 0.
template <int Bits>
inline constexpr float kReachOfKeys = kE5m3Largest * ((1 << Bits) - 1) / 2.0F;

// The last level at the largest scale.
template <int Bits>
inline constexpr float kReachOfValues = kE5m3Largest * SpanLevels<Bits>::magnitudes.back();

// --- the order of codes

static inline std::uint32_t load32(const std::uint8_t* p) {
  std::uint32_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return bits;
}

static inline void store32(std::uint8_t* p, std::uint32_t bits) { std::memcpy(p, &bits, sizeof(bits)); }

// Codes as they are between rounding and packing: groups of four members, per group the lanes, per lane a byte for each
// member. Lanes are a multiple of 8, and each lane's four bytes move as one.
template <int Bits>
static inline void pack_codes(const std::uint8_t* codes, int num_lanes, int num_groups, std::uint8_t* packed) {
  for (int group = 0; group < num_groups; ++group, codes += 4 * num_lanes) {
    if constexpr (Bits == 4) {
      for (int i = 0; i < num_lanes / 2; ++i) {
        store32(packed + 4 * i, load32(codes + 4 * i) | load32(codes + 4 * (i + num_lanes / 2)) << 4);
      }
    } else {
      const int quarter = num_lanes / 4;
      for (int i = 0; i < quarter; ++i) {
        std::uint32_t low = 0;
        for (int r = 0; r < 4; ++r) {
          low |= (load32(codes + 4 * (i + r * quarter)) & 0x03030303U) << (2 * r);
        }
        store32(packed + 4 * i, low);
      }
      const int eighth = num_lanes / 8;
      for (int i = 0; i < eighth; ++i) {
        std::uint32_t high = 0;
        for (int r = 0; r < 8; ++r) {
          high |= ((load32(codes + 4 * (i + r * eighth)) >> 2) & 0x01010101U) << r;
        }
        store32(packed + num_lanes + 4 * i, high);
      }
    }
    packed += num_lanes * Bits / 2;
  }
}

template <int Bits>
static inline void unpack_codes(const std::uint8_t* packed, int num_lanes, int num_groups, std::uint8_t* codes) {
  for (int group = 0; group < num_groups; ++group, codes += 4 * num_lanes) {
    if constexpr (Bits == 4) {
      for (int i = 0; i < num_lanes / 2; ++i) {
        const std::uint32_t both = load32(packed + 4 * i);
        store32(codes + 4 * i, both & 0x0f0f0f0fU);
        store32(codes + 4 * (i + num_lanes / 2), (both >> 4) & 0x0f0f0f0fU);
      }
    } else {
      const int quarter = num_lanes / 4;
      const int eighth = num_lanes / 8;
      for (int r = 0; r < 4; ++r) {
        for (int i = 0; i < quarter; ++i) {
          store32(codes + 4 * (i + r * quarter), (load32(packed + 4 * i) >> (2 * r)) & 0x03030303U);
        }
      }
      for (int r = 0; r < 8; ++r) {
        for (int i = 0; i < eighth; ++i) {
          std::uint8_t* code = codes + 4 * (i + r * eighth);
          store32(code, load32(code) | ((load32(packed + num_lanes + 4 * i) >> r) & 0x01010101U) << 2);
        }
      }
    }
    packed += num_lanes * Bits / 2;
  }
}

}  // namespace kvist
