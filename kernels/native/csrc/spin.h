// What waiting without sleeping needs.
#pragma once

#include <time.h>

#include <cstdint>

inline int64_t now_ns() {  // CLOCK_MONOTONIC, the same for all processes of a host
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}
