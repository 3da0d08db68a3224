// What lies between the two products, in loops that a compiler turns into vector code. Every instruction set compiles
// them for itself, in its own file; the results are the same, since nothing is contracted.
#pragma once

#include <math.h>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "numbers.h"

namespace evrun {

// e^x rounded to fp32, through a double polynomial with a relative error of 1e-11: the nearest fp32 in all but about
// one case in 10^4.
static inline float exp_float(float x) {
    double v = x;
    v = v > 90.0 ? 90.0 : v;
    v = v < -105.0 ? -105.0 : v;
    const double shifter = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer in the low bits
    const double t = v * 1.4426950408889634 + shifter;
    const double k = t - shifter;
    const double r = (v - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10;
    double p = 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    uint64_t bits;
    std::memcpy(&bits, &t, 8);
    bits = (bits + 1023) << 52;
    double power;
    std::memcpy(&power, &bits, 8);
    return static_cast<float>(p * power);
}

// route * (silu(min(g, limit)) * clamp(u, -limit, limit)) in fp32, rounded where torch rounds (spec 3.9), for one group.
// With `bf16` g, u and the result are rounded to it. NaN stays NaN.
static inline void swiglu_group(const float *g, const float *u, float limit, float route, bool bf16, float *a) {
    float gate[kGroup], up[kGroup], e[kGroup];
    for (int i = 0; i < kGroup; ++i) {
        const float x = bf16 ? round_bfloat16(g[i]) : g[i], y = bf16 ? round_bfloat16(u[i]) : u[i];
        gate[i] = x > limit ? limit : x;
        const float below = y > limit ? limit : y;
        up[i] = below < -limit ? -limit : below;
    }
    for (int i = 0; i < kGroup; ++i) e[i] = exp_float(-gate[i]);
    for (int i = 0; i < kGroup; ++i) a[i] = route * (gate[i] / (1.0f + e[i]) * up[i]);
    for (int i = 0; i < kGroup; ++i) a[i] = bf16 ? round_bfloat16(a[i]) : a[i];
}

static inline uint32_t peak_bits(const float *x) {
    uint32_t peak = 0;
    for (int i = 0; i < kGroup; ++i) {
        const uint32_t b = bits_of(x[i]) & 0x7FFFFFFF;
        peak = b > peak ? b : peak;
    }
    return peak;
}

static inline void clear(Group *group, int range) {
    for (int i = 0; i < kGroup; ++i) group->value[i] = 0;
    group->exponent = 0;
    group->range = range;
}

static constexpr uint32_t kInfinity = 0x7F800000;

// E4M3 with a power-of-two scale (spec 3.2): exact, values are multiples of 32.
static inline void quantise_group(const float *x, Group *group) {
    const uint32_t peak = peak_bits(x);
    if (peak >= kInfinity) return clear(group, kNotFinite);
    const float floor = 1e-4f;
    const float t = (float_of(peak) > floor ? float_of(peak) : floor) * (1.0f / 448.0f);
    const uint32_t tb = bits_of(t);
    const int e = static_cast<int>(tb >> 23) - 127 + ((tb & 0x7FFFFF) != 0);
    const float to_steps = power_of_two(9 - e);  // E4M3's smallest step is 2^-9
    int32_t any = 0;
    for (int i = 0; i < kGroup; ++i) {
        float r = fabsf(x[i]) * to_steps;
        r = r < 448.0f * 512.0f ? r : 448.0f * 512.0f;
        // Adding and subtracting 1.5 * 2^23 units rounds to a unit: 2^-3 of the leading bit, at least one step.
        uint32_t exponent = bits_of(r) >> 23;
        exponent = exponent > 130 ? exponent : 130;
        const float shifter = float_of(((exponent + 20) << 23) | 0x400000);
        const int32_t steps = static_cast<int32_t>((r + shifter) - shifter);
        group->value[i] = (x[i] < 0 ? -steps : steps) * 32;
        any |= steps;
    }
    group->exponent = e - 14;
    group->range = any ? group->exponent : kNothing;
}

// In steps of 2^-22 of the power of two below the largest, or of 2^-21 where that were beyond kLargest: off by at most half
// a step, 1.2e-7 of the largest.
static inline void fix_group(const float *x, Group *group) {
    const uint32_t peak = peak_bits(x);
    if (peak >= kInfinity) return clear(group, kNotFinite);
    if (peak == 0) return clear(group, kNothing);
    const int leading = static_cast<int>(peak >> 23) - 127 > -126 ? static_cast<int>(peak >> 23) - 127 : -126;
    group->exponent = leading - 22 + ((peak & 0x7FFFFF) > 2 * kLargest - 0x800000);
    // In two factors: 2^149 is no fp32 number.
    const int first = -group->exponent < 100 ? -group->exponent : 100;
    const float f0 = power_of_two(first), f1 = power_of_two(-group->exponent - first);
    for (int i = 0; i < kGroup; ++i) group->value[i] = static_cast<int32_t>(lrintf(x[i] * f0 * f1));
    group->range = group->exponent;
}

}  // namespace evrun
