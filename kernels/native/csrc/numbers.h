// Scalar number formats: bfloat16, powers of two.
#pragma once

#include <math.h>
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

// 2^e, zero below 2^-149; e <= 127.
static inline float power_of_two(int e) {
    if (e >= -126) return float_of(static_cast<uint32_t>(e + 127) << 23);
    return e >= -149 ? float_of(1u << (e + 149)) : 0.0f;
}

// E4M3 without NaNs. Sign, exponent and mantissa at their places in an fp32 are the value x 2^-120.
static inline float from_e4m3(uint8_t code) {
    const uint32_t bits = code;
    return float_of((bits & 0x80) << 24 | (bits & 0x7F) << 20) * 0x1p120f;
}

static inline float from_bfloat16(uint16_t b) { return float_of(static_cast<uint32_t>(b) << 16); }

// Nearest, ties to even; NaN stays NaN.
static inline uint16_t to_bfloat16(float x) {
    const uint32_t b = bits_of(x);
    const uint32_t rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
    return static_cast<uint16_t>((b & 0x7FFFFFFF) > 0x7F800000 ? (b >> 16) | 0x40 : rounded);
}

static inline float round_bfloat16(float x) { return from_bfloat16(to_bfloat16(x)); }

}  // namespace evrun
