// Activations for kernels that multiply 16-bit integers: high digits are int16s, low digits are 0 .. 255.
#pragma once

#include "layout.h"
#include "numbers.h"

namespace evrun {

// High digits: 16 vectors of a pair a lane. Vectors 4w .. 4w + 3 are of the group's packed word w: its lower nibbles in even
// bytes, in odd bytes, its upper nibbles in even bytes, in odd bytes.
constexpr int kHighVectors = 16;
static inline int high_position(int group, int vector, int slot) { return (vector * kLanes + lane_of(group)) * 2 + slot; }  // int16s
static inline int high_code(int vector, int slot) { return vector / 4 * 8 + slot * 4 + vector % 2 * 2 + vector % 4 / 2; }

// A block of one token: high digits, then one scale a lane, that of sums of high * 2w: half of what a high digit of 1 is.
constexpr int kTokenScales = kBlock * 2;
constexpr int kTokenBlock = kTokenScales + kLanes * 4;

static inline void put_wide(const Group &group, int inside, uint8_t *block, uint8_t *low) {
    for (int v = 0; v < kHighVectors; ++v) {
        const int16_t pair[2] = {static_cast<int16_t>(group.value[high_code(v, 0)] >> kLowBits),
                                 static_cast<int16_t>(group.value[high_code(v, 1)] >> kLowBits)};
        std::memcpy(block + high_position(inside, v, 0) * 2, pair, sizeof pair);
    }
    for (int code = 0; code < kGroup; ++code) low[byte_position(inside, code)] = static_cast<uint8_t>(group.value[code]);
    const float scale = power_of_two(group.exponent + kLowBits - 1);
    std::memcpy(block + kTokenScales + lane_of(inside) * 4, &scale, sizeof scale);
}

static inline void get_wide(const uint8_t *block, const uint8_t *low, int inside, int32_t *values) {
    for (int v = 0; v < kHighVectors; ++v)
        for (int slot = 0; slot < 2; ++slot) {
            int16_t high;
            std::memcpy(&high, block + high_position(inside, v, slot) * 2, 2);
            const int code = high_code(v, slot);
            values[code] = high * (1 << kLowBits) + low[byte_position(inside, code)];
        }
}

constexpr Layout kWideDigits = {kBlockGroups, kTokenBlock, kBlock, put_wide, get_wide};

}  // namespace evrun
