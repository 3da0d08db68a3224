// What one instruction set provides. A file per instruction set defines one Kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace evrun {

// Some consecutive rows of one matrix.
struct Rows {
    const uint8_t *codes;   // [count, k/2]
    const uint8_t *scales;  // [count, k/32]
    int count;
    int k;
    const uint8_t *next;    // what will be read after these rows: fetched ahead, never required to be readable
};

// Scratch of one thread for `tile`.
struct TileScratch {
    uint8_t *weights;  // kTileRows * kPassBlocks or kFewRows * blocks_of(k) blocks, whichever is more
    float *lanes;      // [kTileRows][kTileTokens][kLanes]
};

constexpr int kTileRows = 32;    // rows expanded at a time when many tokens use them,
constexpr int kPassBlocks = 5;   // over so many blocks of K;
constexpr int kFewTokens = 16;   // for at most so many tokens
constexpr int kFewRows = 8;      // so few rows, over all of K
constexpr int kTileTokens = 64;  // tokens that meet an expanded piece before the next one is expanded

struct Kernels {
    const char *name;
    const char *description;
    bool (*supported)();

    // peaks[r]: the largest scale byte of row r.
    void (*peaks)(const uint8_t *scales, int rows, int groups, uint8_t *peaks);

    // y[r] = row r times x. `all_digits`: every group may have low digits, and scales are those of the low digit;
    // else they are those of the middle digit.
    void (*vector)(const Rows &rows, const VectorToken &x, bool all_digits, float *y);

    // y[t * stride + r] = row r times token t. rows.count is a multiple of 4. Scales are those of the low digit with
    // `all_digits`, else those of the high one.
    void (*tile)(const Rows &rows, const TileToken *x, int tokens, bool all_digits, float *y, ptrdiff_t stride,
                 const TileScratch &scratch);

    uint64_t (*read)(const uint8_t *start, size_t bytes);
};

extern const Kernels kScalar;
#if defined(__x86_64__)
extern const Kernels kAvx2;
#endif

}  // namespace evrun
