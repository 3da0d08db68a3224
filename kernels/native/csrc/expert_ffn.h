// C interface of the native CPU backend: routed experts straight from their packed rows.
//
// One engine per worker, one call per layer for all experts of the rank. Nothing is allocated in a call. An engine is
// used by one thread at a time; calls of different engines are independent.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define EVRUN_API __attribute__((visibility("default")))
#define EVRUN_ABI 5

typedef struct evrun_engine evrun_engine;

// One expert, as the release stores it: w1, w3 [I, H/2], w2 [H, I/2] (two E2M1 codes a byte, low nibble first),
// s1, s3 [I, H/32], s2 [H, I/32] (E8M0).
typedef struct {
    const uint8_t *w1, *s1, *w3, *s3, *w2, *s2;
} evrun_row;

typedef struct {
    int32_t hidden, intermediate;  // H, I: multiples of 32
    float swiglu_limit;
    int32_t quantise;   // 1: activations are rounded to E4M3 per 32 channels first (numerics "reference"); 0: they are not
    int32_t bfloat16;   // 1: x and exact rows are raw bf16, and g, u, a, y are rounded to bf16; 0: fp32 throughout
    int32_t max_tokens, top_k;
    int32_t threads;    // the calling thread included
    const int32_t *cpus;  // [threads] or null: thread i > 0 is pinned to cpus[i]; the calling thread is left alone
} evrun_config;

typedef struct {
    const void *x;           // [tokens, H]
    const int32_t *ids;      // [tokens, slots], no expert twice in one row
    const float *weights;    // [tokens, slots]
    int32_t tokens, slots;
    const int32_t *experts;  // [num_experts] ascending
    const evrun_row *rows;   // [num_experts]
    int32_t num_experts;
    int32_t exact;           // 0: out [tokens, H] fp32, overwritten; 1: out [pairs, H] activation dtype
    void *out;
    int64_t out_rows;
    void (*beat)(void *);    // null, or called on the calling thread about every 20 ms
    void *record;            // what it is called with
} evrun_call;

typedef struct {
    int32_t expert;  // position in the call
    int32_t tensor;  // 1, 3, 2 for w1, w3, w2
    int32_t row;
} evrun_fault;

enum {
    EVRUN_BAD_SCALE = -1,   // E8M0 byte 255; the fault says where
    EVRUN_TOO_LARGE = -2,   // more tokens or slots than the engine was made for, or too few rows in out
    EVRUN_DUPLICATE = -3,   // a token names one expert twice; the fault's expert says which, its row the token
};

EVRUN_API int32_t evrun_abi(void);

// The instruction sets in this library, slowest first. `supported`: by this CPU and its operating system.
EVRUN_API int32_t evrun_variants(void);
EVRUN_API const char *evrun_variant_name(int32_t variant);
EVRUN_API const char *evrun_variant_description(int32_t variant);
EVRUN_API int32_t evrun_variant_supported(int32_t variant);

// Null when memory or threads are not to be had.
EVRUN_API evrun_engine *evrun_create(int32_t variant, const evrun_config *config);
EVRUN_API void evrun_destroy(evrun_engine *engine);

// The number of (token, expert) pairs computed, or one of the negative codes.
EVRUN_API int64_t evrun_run(evrun_engine *engine, const evrun_call *call, evrun_fault *fault);

// Rows of a dense weight -> fp32 [rows, columns]: E4M3 codes without NaNs [rows, columns] and scales as fp32, one per 32 x 32
// tile [ceil(rows/32), ceil(columns/32)]. Needs no engine; any threads.
EVRUN_API void evrun_dequantise_fp8(int32_t variant, const uint8_t *codes, const float *scales, int64_t rows, int64_t columns, float *out);

// A plain vector read of the ranges by the engine's threads in chunks, as a floor for timings; returns a checksum.
EVRUN_API uint64_t evrun_read(evrun_engine *engine, const uint8_t *const *starts, const int64_t *bytes, int32_t ranges);

// Vector multiply-adds on registers by each of the engine's threads, as the peak that sums of products are compared to;
// returns the number of floating-point operations done.
EVRUN_API uint64_t evrun_multiply_add(evrun_engine *engine, uint64_t steps);

#if defined(__cplusplus)
}
#endif
