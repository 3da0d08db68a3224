// Activations for kernels that multiply unsigned by signed bytes: three balanced base-256 digits of -128 .. 127, the upper
// two of which are the high digit. Weights come as 2w + kBias, so that sums start at -kBias times the sum of the digits.
#pragma once

#include "layout.h"
#include "numbers.h"

namespace evrun {

constexpr int kBias = 12;

// A block of one token: 8 times a vector of middle and one of top digits, then a start and a scale a lane: the scale of sums of
// high * 2w, half of what a high digit of 1 is. A block of its low digits: 8 vectors, then a start a lane.
constexpr int kTokenStarts = kByteVectors * kLanes * 4 * 2;
constexpr int kTokenScales = kTokenStarts + kLanes * 4;
constexpr int kTokenBlock = kTokenScales + kLanes * 4;
constexpr int kLowStarts = kByteVectors * kLanes * 4;
constexpr int kLowBlock = kLowStarts + kLanes * 4;

// Where the middle digit of a code is; its top digit is a vector further.
static inline int middle_position(int group, int code) {
    const int at = byte_position(group, code);
    return at + at / (kLanes * 4) * (kLanes * 4);
}

static inline void put_bytes(const Group &group, int inside, uint8_t *block, uint8_t *low) {
    int32_t high_sum = 0, low_sum = 0;
    for (int code = 0; code < kGroup; ++code) {
        const int32_t value = group.value[code], bottom = static_cast<int8_t>(value), high = (value - bottom) >> kLowBits;
        const int32_t middle = static_cast<int8_t>(high), top = (high - middle) >> kLowBits;
        low[byte_position(inside, code)] = static_cast<uint8_t>(bottom);
        const int at = middle_position(inside, code);
        block[at] = static_cast<uint8_t>(middle);
        block[at + kLanes * 4] = static_cast<uint8_t>(top);
        high_sum += high;
        low_sum += bottom;
    }
    const int32_t high_start = -kBias * high_sum, low_start = -kBias * low_sum;
    const float scale = power_of_two(group.exponent + kLowBits - 1);
    std::memcpy(block + kTokenStarts + lane_of(inside) * 4, &high_start, 4);
    std::memcpy(block + kTokenScales + lane_of(inside) * 4, &scale, 4);
    std::memcpy(low + kLowStarts + lane_of(inside) * 4, &low_start, 4);
}

static inline void get_bytes(const uint8_t *block, const uint8_t *low, int inside, int32_t *values) {
    for (int code = 0; code < kGroup; ++code) {
        const int at = middle_position(inside, code);
        const int32_t top = static_cast<int8_t>(block[at + kLanes * 4]), middle = static_cast<int8_t>(block[at]);
        values[code] = (top * 256 + middle) * (1 << kLowBits) + static_cast<int8_t>(low[byte_position(inside, code)]);
    }
}

constexpr Layout kByteDigits = {kTokenBlock, kLowBlock, put_bytes, get_bytes};

}  // namespace evrun
