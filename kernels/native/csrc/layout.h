// How activations lie in memory for the kernels, and the one definition of a dot product.
//
// K is cut into blocks of 256 codes: 128 packed bytes, 8 groups of 32. Activations of a group are integers below 2^23 times
// a power of two, weights are 2w = 0, +-1, 2, 3, 4, 6, 8, 12 times half a power of two, so that
//
//     sum(g)  = fp32( sum of the group's 32 integer products )                 exact in integers, rounded once
//     lane[g mod 8] += sum(g) * (scale(x, g) * scale(w, g))                     fp32, in ascending g; the product is exact
//     y = ((l0 + l1) + (l4 + l5)) + ((l2 + l3) + (l6 + l7))
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
constexpr int kLanes = 8;

static inline int blocks_of(int k) { return (k + kBlock - 1) / kBlock; }

// An activation is high * 256 + low: high an int16, low in 0 .. 255.
constexpr int kLowBits = 8;

// Within a block each group has one 32-bit lane of every vector, groups in the order 0 2 4 6 1 3 5 7: that of a transpose
// within the halves of a register.
static inline int lane_of(int group) { return group / 2 + group % 2 * 4; }

// High digits: 16 vectors of a pair a lane. Vectors 4w .. 4w + 3 are of the group's packed word w (codes 8w .. 8w + 7):
// its lower nibbles in even bytes, in odd bytes, its upper nibbles in even bytes, in odd bytes.
constexpr int kHighVectors = 16;
static inline int high_position(int group, int vector, int slot) { return (vector * kLanes + lane_of(group)) * 2 + slot; }  // int16s
static inline int high_code(int vector, int slot) { return vector / 4 * 8 + slot * 4 + vector % 2 * 2 + vector % 4 / 2; }

// Low digits: 8 vectors of 4 bytes a lane. Vectors 2w and 2w + 1 are of word w: its lower nibbles, its upper ones.
constexpr int kLowVectors = 8;
static inline int low_position(int group, int code) { return ((code / 8 * 2 + code % 2) * kLanes + lane_of(group)) * 4 + code % 8 / 2; }

// A block of one token: high digits, then one scale a lane, that of sums of high * 2w: half of what a high digit of 1 is.
constexpr int kTokenScales = kBlock * 2;
constexpr int kTokenBlock = kTokenScales + kLanes * 4;

struct Token {
    const uint8_t *blocks;  // [blocks of K] of kTokenBlock bytes
    const uint8_t *low;     // [blocks of K][256]
    const uint8_t *used;    // [blocks of K][8] nonzero: some low digit of the group is
};

// The integers of one group again.
static inline void read_group(const Token &x, int group, int32_t *values) {
    const ptrdiff_t block = group / kBlockGroups;
    const int inside = group % kBlockGroups;
    for (int v = 0; v < kHighVectors; ++v)
        for (int slot = 0; slot < 2; ++slot) {
            int16_t high;
            std::memcpy(&high, x.blocks + block * kTokenBlock + high_position(inside, v, slot) * 2, 2);
            const int code = high_code(v, slot);
            values[code] = high * (1 << kLowBits) + x.low[block * kBlock + low_position(inside, code)];
        }
}

// 2w of a code.
constexpr int8_t kCodeValues[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace evrun
