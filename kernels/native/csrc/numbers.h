// Scalar number formats: bfloat16, powers of two, exp and SwiGLU in fp32.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace evrun {

static inline uint32_t bits_of(float x) {
    uint32_t b;
    std::memcpy(&b, &x, 4);
    return b;
}

static inline float float_of(uint32_t b) {
    float x;
    std::memcpy(&x, &b, 4);
    return x;
}

static inline double double_of(uint64_t b) {
    double x;
    std::memcpy(&x, &b, 8);
    return x;
}

// 2^e, zero below 2^-149; e <= 127.
static inline float power_of_two(int e) {
    if (e >= -126) return float_of(static_cast<uint32_t>(e + 127) << 23);
    return e >= -149 ? float_of(1u << (e + 149)) : 0.0f;
}

static inline float from_bfloat16(uint16_t b) { return float_of(static_cast<uint32_t>(b) << 16); }

// Nearest, ties to even; NaN stays NaN.
static inline uint16_t to_bfloat16(float x) {
    const uint32_t b = bits_of(x);
    const uint32_t rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
    return static_cast<uint16_t>((b & 0x7FFFFFFF) > 0x7F800000 ? (b >> 16) | 0x40 : rounded);
}

static inline float round_bfloat16(float x) { return from_bfloat16(to_bfloat16(x)); }

// e^x rounded to fp32, through a double polynomial (relative error 1e-14): the nearest fp32 in all but about one case in 1e7.
static inline float exp_float(float x) {
    double v = x;
    v = v > 90.0 ? 90.0 : v;
    v = v < -105.0 ? -105.0 : v;
    const double shifter = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer in the low bits
    const double t = v * 1.4426950408889634 + shifter;
    uint64_t tb;
    std::memcpy(&tb, &t, 8);
    const double k = t - shifter;
    const double r = (v - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10;
    double p = 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    return static_cast<float>(p * double_of((tb + 1023) << 52));
}

// r * (silu(min(g, limit)) * clamp(u, -limit, limit)) in fp32, rounded where torch rounds (spec 3.9). NaN stays NaN.
static inline float swiglu(float g, float u, float limit, float route) {
    g = g > limit ? limit : g;
    u = u > limit ? limit : u;
    u = u < -limit ? -limit : u;
    const float silu = g / (1.0f + exp_float(-g));
    return route * (silu * u);
}

}  // namespace evrun
