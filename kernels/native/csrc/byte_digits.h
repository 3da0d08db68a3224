// Activations for kernels that multiply unsigned by signed bytes: three balanced base-256 digits of -128 .. 127, the upper
// two of which are the high digit. Weights come as 2w + kBias, so that sums start at -kBias times the sum of the digits.
#pragma once

#include "layout.h"
#include "numbers.h"

namespace evrun {

constexpr int kBias = 12;

// Two blocks lie together: a vector of 64 bytes has the lanes of the one, then those of the other.
constexpr int kVectorBytes = 2 * kLanes * 4;

// Of one token: 8 times a vector of middle and one of top digits, then a start and a scale a lane: the scale of sums of
// high * 2w, half of what a high digit of 1 is. Of its low digits: 8 vectors, then a start a lane.
constexpr int kTokenStarts = kByteVectors * kVectorBytes * 2;
constexpr int kTokenScales = kTokenStarts + kVectorBytes;
constexpr int kTokenBlock = kTokenScales + kVectorBytes;
constexpr int kLowStarts = kByteVectors * kVectorBytes;
constexpr int kLowBlock = kLowStarts + kVectorBytes;

static inline int lane_position(int group) { return (group / kBlockGroups * kLanes + lane_of(group % kBlockGroups)) * 4; }
static inline int low_position(int group, int code) { return (code / 8 * 2 + code % 2) * kVectorBytes + lane_position(group) + code % 8 / 2; }
// Its top digit is a vector further.
static inline int middle_position(int group, int code) {
    return (code / 8 * 2 + code % 2) * kVectorBytes * 2 + lane_position(group) + code % 8 / 2;
}

static inline void put_bytes(const Group &group, int inside, uint8_t *block, uint8_t *low) {
    int32_t high_sum = 0, low_sum = 0;
    for (int code = 0; code < kGroup; ++code) {
        const int32_t value = group.value[code], bottom = static_cast<int8_t>(value), high = (value - bottom) >> kLowBits;
        const int32_t middle = static_cast<int8_t>(high), top = (high - middle) >> kLowBits;
        low[low_position(inside, code)] = static_cast<uint8_t>(bottom);
        const int at = middle_position(inside, code);
        block[at] = static_cast<uint8_t>(middle);
        block[at + kVectorBytes] = static_cast<uint8_t>(top);
        high_sum += high;
        low_sum += bottom;
    }
    const int32_t high_start = -kBias * high_sum, low_start = -kBias * low_sum;
    const float scale = power_of_two(group.exponent + kLowBits - 1);
    std::memcpy(block + kTokenStarts + lane_position(inside), &high_start, 4);
    std::memcpy(block + kTokenScales + lane_position(inside), &scale, 4);
    std::memcpy(low + kLowStarts + lane_position(inside), &low_start, 4);
}

static inline void get_bytes(const uint8_t *block, const uint8_t *low, int inside, int32_t *values) {
    for (int code = 0; code < kGroup; ++code) {
        const int at = middle_position(inside, code);
        const int32_t top = static_cast<int8_t>(block[at + kVectorBytes]), middle = static_cast<int8_t>(block[at]);
        values[code] = (top * 256 + middle) * (1 << kLowBits) + static_cast<int8_t>(low[low_position(inside, code)]);
    }
}

constexpr Layout kByteDigits = {2 * kBlockGroups, kTokenBlock, kLowBlock, put_bytes, get_bytes};

}  // namespace evrun
