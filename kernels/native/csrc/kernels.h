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
    int count;              // a multiple of 32
    int k;
    // What will be read after these rows: fetched ahead, never required to be readable.
    const uint8_t *next_codes, *next_scales;
};

// Many tokens meet rows that were expanded once: at most so many rows, over so many blocks of K, with so many tokens at
// a time.
constexpr int kManyRows = 32;
constexpr int kManyBlocks = 5;
constexpr int kTokensAtOnce = 64;

// An expanded block at most: 2w as int16 and as int8, in the order of the digits, then a scale a lane.
constexpr int kRowBytes = kBlock * 2;
constexpr int kRowScales = kRowBytes + kBlock;
constexpr int kRowBlock = kRowScales + kLanes * 4;

constexpr ptrdiff_t kRowLanes = (kTokensAtOnce + 1) * kLanes;  // [kTokensAtOnce][kLanes], rows not 4096 bytes apart

// Scratch of one thread.
struct Scratch {
    uint8_t *rows;  // kManyRows * kManyBlocks expanded blocks
    float *lanes;   // [kManyRows][kRowLanes]
};

struct Kernels {
    const char *name;
    const char *description;
    bool (*supported)();
    const Layout &layout;

    // The smallest and the largest of some bytes.
    void (*extremes)(const uint8_t *bytes, size_t count, uint8_t *least, uint8_t *most);

    // Of activation_math.h.
    void (*swiglu)(const float *g, const float *u, float limit, float route, bool bf16, float *a);
    void (*quantise)(const float *x, Group *group);
    void (*fix)(const float *x, Group *group);

    // y[t * rows.count + r] = row r times token t, whose memory is in `layout`.
    void (*multiply)(const Rows &rows, const Token *x, int tokens, float *y, const Scratch &scratch);

    // A row of a dense fp8 weight -> fp32: E4M3 codes, a scale for every 32 of them.
    void (*dequantise)(const uint8_t *codes, const float *scales, int64_t columns, float *out);

    uint64_t (*read)(const uint8_t *start, size_t bytes);

    // Twelve chains of multiply-adds on registers, `steps` long; returns the number of floating-point operations.
    uint64_t (*multiply_add)(uint64_t steps);
};

extern const Kernels kScalar;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

}  // namespace evrun
