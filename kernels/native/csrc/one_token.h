// One token's call as a worker that serves it without Python (expert_worker/wire/csrc/exchange.cpp) hands it to the native
// function of its lane: int64 function(void *lane, const OneToken *call) gives the rows computed, or -1 when the call needs
// the lane's Python, which does it from the start.
#pragma once

#include <cstdint>

struct OneToken {
    int64_t layer, count;
    const int32_t *experts;  // [count] ascending
    const void *x;           // [H] activation dtype
    const int32_t *ids;      // [top_k]
    const float *weights;    // [top_k]
    void *out;               // partial [H] fp32, or rows [count, H] activation dtype
    void (*beat)(void *);    // to be called with `record` now and then during a long call, to show progress
    void *record;
};
