// How activations and expanded weights lie in memory for the kernels, and the one definition of a dot product.
//
// K is cut into blocks of 256 codes (128 packed bytes, 8 groups of 32), a block into 4 steps of 64 codes, a step into
// 8 octets of 8 consecutive codes: the codes of one 32-bit word. Activations of a group are integers with at most 24
// bits times a power of two, weights are 2w = 0, +-1, 2, 3, 4, 6, 8, 12 times half a power of two, so that
//
//     octet(o) = fp32( sum of its 8 integer products )                  exact in int32, one rounding
//     lane[o mod 16] += octet(o) * scale(x, group) * scale(w, group)     fp32, in ascending o; the product is exact
//     y = lanes added as a tree: 16 -> 8 -> 4 -> 2 -> 1, upper half onto lower half
//
// Every kernel of every instruction set computes this, for one token or many: results are equal bit for bit.
#pragma once

#include <cstdint>

namespace evrun {

constexpr int kGroup = 32;
constexpr int kBlock = 256;
constexpr int kBlockBytes = kBlock / 2;
constexpr int kBlockGroups = kBlock / kGroup;
constexpr int kSteps = 4;
constexpr int kStepBytes = kBlockBytes / kSteps;
constexpr int kLanes = 16;

constexpr int kMagnitudeBits = 24;

// For one token: |x| as three digits of eight bits (high, middle, low), codes at even and odd k apart as the nibbles
// of a byte are, and a mask that flips the signs of the weight codes where x is negative.
enum Plane { kSign, kHighEven, kHighOdd, kMiddleEven, kMiddleOdd, kLowEven, kLowOdd, kPlanes };

constexpr int kVectorBlockBytes = kPlanes * kBlockBytes;

struct VectorToken {
    const uint8_t *digits;  // [blocks][kPlanes][128]
    const float *scale;     // [blocks][8], in the order of groups 0 2 4 6 1 3 5 7
    const uint8_t *low;     // [blocks][8] nonzero: the group has low digits
};

// For many tokens: x as high * 512 + low, both int16. A step holds 4 vectors of 8 pairs, one pair of each octet:
// vector 0 codes 0 and 4, 1 codes 2 and 6, 2 codes 1 and 5, 3 codes 3 and 7 of the octet. The vectors of two steps
// alternate: [2 step pairs][4 vectors][2 steps][8 octets][2]. Then the scales, one a lane: [4 steps][8].
constexpr int kTileCodes = kBlock;
constexpr int kTileBlockBytes = kTileCodes * 2 + kSteps * 8 * 4;

struct TileToken {
    const uint8_t *high;  // [blocks] of kTileBlockBytes
    const int16_t *low;   // [blocks][256], same order of codes
    const uint8_t *used;  // [blocks][8] nonzero: the group has low digits
};

constexpr int kTileLowBits = 9;

// Byte offset of the 32 bytes of one vector of one step in a tile block, and of its eight scales.
static inline int tile_vector(int step, int vector) { return (step / 2) * 256 + vector * 64 + (step % 2) * 32; }
static inline int tile_scales(int step) { return kTileCodes * 2 + step * 32; }

// Where code k of a block lies among the 256 int16 of a tile block.
static inline int tile_position(int k) {
    const int step = k / 64, octet = k % 64 / 8, i = k % 8;
    const int vector = (i % 2) * 2 + (i / 2) % 2, slot = i / 4;
    return tile_vector(step, vector) / 2 + octet * 2 + slot;
}

static inline int blocks_of(int k) { return (k + kBlock - 1) / kBlock; }

// 2w of a code.
constexpr int8_t kCodeValues[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace evrun
