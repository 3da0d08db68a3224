// How activations lie in memory for the kernels, and the one definition of a dot product.
//
// K is cut into blocks of 256 codes (128 packed bytes, 8 groups of 32), a block into 4 steps of 64 codes = 2 groups.
// An octet is 8 consecutive codes: those of one 32-bit word. Activations of a group are integers below 2^23 times a power
// of two, weights are 2w = 0, +-1, 2, 3, 4, 6, 8, 12 times half a power of two, so that
//
//     octet(o) = fp32( sum of its 8 integer products )                              exact in int32, one rounding
//     lane[o mod 16] += octet(o) * scale(x, group) * scale(w, group)                fp32, in ascending o; products are exact
//     y = lanes added as a tree: 16 -> 8 -> 4 -> 2 -> 1, upper half onto lower half
//
// Every kernel of every instruction set computes this, for one token or many: results are equal bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace evrun {

constexpr int kGroup = 32;
constexpr int kBlock = 256;
constexpr int kBlockBytes = kBlock / 2;
constexpr int kBlockGroups = kBlock / kGroup;
constexpr int kSteps = 4;
constexpr int kStepBytes = kBlockBytes / kSteps;
constexpr int kLanes = 16;

static inline int blocks_of(int k) { return (k + kBlock - 1) / kBlock; }

// An activation is high * 256 + low: high an int16, low in 0 .. 255. Weights stand in the upper byte of an int16, so that
// sums of high * 2w come out in units of the low digit.
constexpr int kLowBits = 8;

// High digits: the 64 of a step are 4 vectors of 2 groups of 8; vector v holds, of each group, the codes 4j + 2 (v mod 2)
// + v / 2 for j = 0 .. 7. The vectors of two steps alternate, so that wider registers can take both.
constexpr int kVectors = 4;

static inline int high_offset(int step, int vector) { return (step / 2) * 256 + vector * 64 + (step % 2) * 32; }  // bytes
static inline int high_position(int group, int vector, int j) { return high_offset(group / 2, vector) + (group % 2 * 8 + j) * 2; }
static inline int high_code(int vector, int j) { return 4 * j + vector % 2 * 2 + vector / 2; }  // of the group

// Low digits lie as the nibbles of the packed bytes do: those of the lower ones, those of the upper ones, for two steps.
static inline int low_offset(int step, int upper) { return (step / 2) * 128 + upper * 64 + (step % 2) * 32; }
static inline int low_position(int group, int code) { return low_offset(group / 2, code % 2) + group % 2 * 16 + code / 2; }

// A block of one token: high digits, then each group's scale four times (one a lane), then once, in the order of groups
// 0 2 4 6 1 3 5 7. The scale of a group is 2^(e - 1) for activations (high * 256 + low) * 2^e: weights count twice.
constexpr int kLaneScales = kBlock * 2;
constexpr int kGroupScales = kLaneScales + kBlockGroups * 16;
constexpr int kTokenBlock = kGroupScales + kBlockGroups * 4;

static inline int group_scale(int group) { return kGroupScales + (group / 2 + group % 2 * 4) * 4; }

struct Token {
    const uint8_t *blocks;  // [blocks of K] of kTokenBlock bytes
    const uint8_t *low;     // [blocks of K][256]
    const uint8_t *used;    // [blocks of K][8] nonzero: some low digit of the group is
};

// The integers of one group again.
static inline void read_group(const Token &x, int group, int32_t *values) {
    const ptrdiff_t block = group / kBlockGroups;
    const int inside = group % kBlockGroups;
    for (int v = 0; v < kVectors; ++v)
        for (int j = 0; j < 8; ++j) {
            int16_t high;
            std::memcpy(&high, x.blocks + block * kTokenBlock + high_position(inside, v, j), 2);
            const int code = high_code(v, j);
            values[code] = high * (1 << kLowBits) + x.low[block * kBlock + low_position(inside, code)];
        }
}

// 2w of a code.
constexpr int8_t kCodeValues[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace evrun
