// Number formats (spec 2.4, 3.2) in integer arithmetic, and the activations as the tensor cores want them.
#pragma once

DEVICE bool is_finite(float x) { return (float_bits(x) & 0x7F800000u) != 0x7F800000u; }

DEVICE u32 bf16_bits(float x) {  // nearest, ties to even
    const u32 bits = float_bits(x);
    return x != x ? 0x7FFFu : (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
}

// The value an operation hands on: rounded where the reference rounds.
#if BFLOAT16
using Activation = u16;
DEVICE float rounded(float x) { return bits_float(bf16_bits(x) << 16); }
DEVICE Activation stored(float x) { return static_cast<u16>(bf16_bits(x)); }
DEVICE u32 word_of(Activation x) { return x; }
#else
using Activation = float;
DEVICE float rounded(float x) { return x; }
DEVICE Activation stored(float x) { return x; }
DEVICE u32 word_of(Activation x) { return float_bits(x); }
#endif

// Eight neighbouring activations as they lie in memory.
struct Eight {
    uint4 raw[sizeof(Activation) / 2];
    DEVICE void values(float (&v)[8]) const {
        const u32* words = reinterpret_cast<const u32*>(raw);
        for (int i = 0; i < 8; ++i)
#if BFLOAT16
            v[i] = bits_float(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16);
#else
            v[i] = bits_float(words[i]);
#endif
    }
};

// 2^(b - 127), b = 0 included; b = 255 is infinite and shows in every sum it touches.
DEVICE float e8m0_float(u32 b) { return bits_float(max_u32(b << 23, 0x00400000u)); }

// Eight codes -> eight fp16, each the code's value x 2^-14: half[i] = codes i (low) and i + 4 (high). Sign, exponent and
// mantissa move to the places where they lie in the upper byte of an fp16, for every second code at once, and the last
// step takes those of two codes and leaves the rest. `byte` is 256, but the compiler must not know: multiplications run
// beside the logic unit, which is what decoding waits for.
DEVICE void decode_half(u32 word, u32 byte, u32 (&half)[4]) {
    constexpr u32 SIGNS = 0x80808080u, TWO_CODES = 0x8E008E00u;
    const u32 even = choose(SIGNS, word << 4, word << 1);
    const u32 odd = choose(SIGNS, word, word >> 3);
    half[0] = multiply_add(even, byte, 0) & TWO_CODES;
    half[1] = multiply_add(odd, byte, 0) & TWO_CODES;
    half[2] = even & TWO_CODES;
    half[3] = odd & TWO_CODES;
}
constexpr float DECODE_HALF = 16384.0f;

// Eight codes -> eight bf16, each the code's value x 2^-126, paired as above.
DEVICE void decode_bf16(u32 word, u32 (&pair)[4]) {
    pair[0] = ((word << 12) & 0x80008000u) | ((word << 6) & 0x01C001C0u);
    pair[1] = ((word << 8) & 0x80008000u) | ((word << 2) & 0x01C001C0u);
    pair[2] = ((word << 4) & 0x80008000u) | ((word >> 2) & 0x01C001C0u);
    pair[3] = (word & 0x80008000u) | ((word >> 6) & 0x01C001C0u);
}

// Nearest E4M3 of |y| <= 448, ties to even; NaN stays NaN.
DEVICE float e4m3_rounded(float y) {
    const u32 bits = float_bits(y);
    const float normal = bits_float((bits + 0x7FFFFu + ((bits >> 20) & 1)) & 0xFFF00000u);
    const float subnormal = (y + 24576.0f) - 24576.0f;  // 1.5 x 2^14: the spacing of its neighbours is 2^-9
    return y != y ? y : (bits & 0x7FFFFFFFu) < 0x3C800000u ? subnormal : normal;
}

// Both rounded to E4M3, beyond its range to 448 of that sign, as fp16: low | high << 16.
DEVICE u32 e4m3_halves(float low, float high) {
#if HAS_E4M3
    return e4m3_halves_by_conversion(low, high);
#else
    low = e4m3_rounded(low > 448.0f ? 448.0f : low < -448.0f ? -448.0f : low);
    high = e4m3_rounded(high > 448.0f ? 448.0f : high < -448.0f ? -448.0f : high);
    return half_bits(low) | half_bits(high) << 16;
#endif
}

// Four neighbouring lanes hold a group of 32 activations, eight each -> E4M3 (spec 3.2) as fp16, half[i] = values i (low)
// and i + 4 (high), and their scale.
DEVICE float quantise_group(const float (&v)[8], u32 (&half)[4]) {
    float peak = 1e-4f;
    for (int i = 0; i < 8; ++i) peak = fmaxf(peak, fabsf(v[i]));
    peak = fmaxf(peak, shuffle_xor(peak, 1));
    peak = fmaxf(peak, shuffle_xor(peak, 2));
    const u32 bits = float_bits(peak * (1.0f / 448.0f));
    const u32 exponent = (bits >> 23) + ((bits & 0x7FFFFFu) != 0);
    const float inverse = bits_float((254 - exponent) << 23);
    for (int i = 0; i < 4; ++i) half[i] = e4m3_halves(v[i] * inverse, v[i + 4] * inverse);
    return bits_float(exponent << 23);
}

// Four neighbouring lanes as above; v becomes v / scale below 2^15, the scale a power of two.
DEVICE float normalise_group(float (&v)[8]) {
    float peak = 0;
    for (int i = 0; i < 8; ++i) peak = fmaxf(peak, fabsf(v[i]));
    peak = fmaxf(peak, shuffle_xor(peak, 1));
    peak = fmaxf(peak, shuffle_xor(peak, 2));
    const u32 exponent = max_u32(float_bits(peak) >> 23, 16) - 14;
    const float inverse = bits_float((254 - exponent) << 23);
    for (int i = 0; i < 8; ++i) v[i] *= inverse;
    return bits_float(exponent << 23);
}

// An activation is scale x (plane 0 + 2^-11 plane 1 + 2^-22 plane 2), each plane an fp16: one plane holds E4M3 and
// bf16 exactly, three hold fp32. (Unquantised values below 2^-31 of their group's largest lose bits.)
#if REFERENCE || BFLOAT16
constexpr int PLANES = 1;
#else
constexpr int PLANES = 3;
#endif
constexpr float NEXT_PLANE = 2048.0f;

// Splits a group held by four lanes into planes; half[plane][i] pairs values i (low) and i + 4 (high), as codes are paired.
DEVICE float prepare_group(float (&v)[8], u32 (&half)[PLANES][4]) {
#if REFERENCE
    return quantise_group(v, half[0]);
#else
    const float scale = normalise_group(v);
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 low = half_bits(v[i]), high = half_bits(v[i + 4]);
            half[plane][i] = low | (high << 16);
            if (plane + 1 < PLANES) {
                v[i] = (v[i] - half_float(low)) * NEXT_PLANE;
                v[i + 4] = (v[i + 4] - half_float(high)) * NEXT_PLANE;
            }
        }
    return scale;
#endif
}

DEVICE float join_planes(const float (&sums)[PLANES]) {
    float joined = sums[PLANES - 1];
#pragma unroll
    for (int plane = PLANES - 2; plane >= 0; --plane) joined = sums[plane] + joined * (1.0f / NEXT_PLANE);
    return joined;
}

// SwiGLU of two rounded sums, with the route weight in front of w2 (spec 3.9).
DEVICE float swiglu(float gate, float up, float route) {
    gate = fminf(gate, SWIGLU_LIMIT);
    up = fminf(fmaxf(up, -SWIGLU_LIMIT), SWIGLU_LIMIT);
    return gate / (1.0f + expf(-gate)) * up * route;
}
