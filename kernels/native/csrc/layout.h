// The one definition of a dot product, and what all memory layouts of activations share.
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

// An activation is high * 256 + low. High digits and a scale a group lie in Token::blocks, low digits, which many groups
// do not have, in Token::low. How they lie is the business of an instruction set: wide_digits.h, byte_digits.h.
constexpr int kLowBits = 8;

struct Token {
    const uint8_t *blocks;  // [blocks of a Layout]
    const uint8_t *low;     // [blocks of a Layout]
    const uint8_t *used;    // [groups, whole blocks] nonzero: some low digit of the group is
};

constexpr int kNothing = INT32_MIN;    // range of a group without a nonzero value
constexpr int kNotFinite = INT32_MAX;  // range of a group with an infinity or a NaN
constexpr int32_t kLargest = 0x7F7F7F;  // |value| of a group: three balanced base-256 digits hold it

// 32 channels of one token: x = value * 2^exponent, |value| <= kLargest.
struct Group {
    int32_t value[kGroup];
    int exponent;
    int range;  // exponent, kNothing or kNotFinite; then all values are zero
};

// A memory layout of activations.
struct Layout {
    int groups;                     // that lie together
    size_t block_bytes, low_bytes;  // of so many groups in Token::blocks and Token::low
    void (*put)(const Group &group, int inside, uint8_t *block, uint8_t *low);
    void (*get)(const uint8_t *block, const uint8_t *low, int inside, int32_t *values);
};

// Within a block each group has one 32-bit lane of every vector, groups in the order 0 2 4 6 1 3 5 7: that of a transpose
// within the halves of a register.
static inline int lane_of(int group) { return group / 2 + group % 2 * 4; }

// A digit of one byte: 8 vectors of 4 bytes a lane. Vectors 2w and 2w + 1 are of the group's packed word w (codes 8w ..
// 8w + 7): its lower nibbles, its upper ones.
constexpr int kByteVectors = 8;
static inline int byte_position(int group, int code) { return ((code / 8 * 2 + code % 2) * kLanes + lane_of(group)) * 4 + code % 8 / 2; }

// 2w of a code.
constexpr int8_t kCodeValues[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace evrun
