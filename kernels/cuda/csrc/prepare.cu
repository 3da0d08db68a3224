// Activations as the matrix kernels read them: rounded to E4M3 per 32 (numerics `reference`) or not, permuted as codes
// are decoded. `prepare_x` takes the T tokens of the call, `prepare_act` the pairs that reached w2.
//
// For `multi_token.cu` (WGMMA 0): fp16 planes [row][group][plane][32] and fp32 scales [row][group]; eight channels that
// share a 32-bit word of codes lie in the order 0 4 1 5 2 6 3 7.
// For `multi_token_wgmma.cu` (WGMMA 1): bf16 with the scale multiplied in, which is exact, [row][K]. In 128 columns of
// four groups, position 16 j + 2 t + p + 8 (i % 2) holds channel 8 w + i + 4 p of group t, where j = 2 w + i / 2.
#include "device.cuh"
#include "formats.cuh"

constexpr int THREADS = 256;

template <int K>
DEVICE void prepare_rows(const Activation* source, void* to, float* scales, int rows) {
    constexpr int LANES = K / 8;  // lanes of a row, eight channels each
    const u64 lanes = u64(rows) * LANES;
    for (u64 begin = u64(blockIdx.x) * THREADS + threadIdx.x / 32 * 32; begin < lanes; begin += u64(gridDim.x) * THREADS) {
        const u64 at = begin + threadIdx.x % 32;
        Eight eight;
        const uint4* from = reinterpret_cast<const uint4*>(source + (at < lanes ? at : 0) * 8);
#pragma unroll
        for (int part = 0; part < int(sizeof(Eight) / 16); ++part) eight.raw[part] = from[part];
        float v[8];
        eight.values(v);
#if WGMMA
        static_assert(PLANES == 1, "one bf16 holds the activation");
#if REFERENCE
        u32 half[4];
        const float scale = quantise_group(v, half);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = half_float(half[i] & 0xFFFF) * scale, v[i + 4] = half_float(half[i] >> 16) * scale;
#endif
        if (at >= lanes) continue;
        const u32 in_chunk = at % 16, t = in_chunk / 4, w = in_chunk % 4;  // group of the 128 columns, word of the group
        u32* const chunk = static_cast<u32*>(to) + at / 16 * 64;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            chunk[8 * (2 * w + i / 2) + t + 4 * (i % 2)] = (float_bits(v[i]) >> 16) | (float_bits(v[i + 4]) & 0xFFFF0000u);
#else
        u32 half[PLANES][4];
        const float scale = prepare_group(v, half);
        if (at >= lanes) continue;
        uint4* const group = static_cast<uint4*>(to) + at / 4 * (PLANES * 4);
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) group[plane * 4 + at % 4] = make_uint4(half[plane][0], half[plane][1], half[plane][2], half[plane][3]);
        if (at % 4 == 0) scales[at / 4] = scale * DECODE_HALF;
#endif
    }
}

KERNEL(prepare_x, THREADS, 1) { prepare_rows<HIDDEN>(static_cast<const Activation*>(call.x), call.x_prepared, call.x_scales, call.tokens); }

KERNEL(prepare_act, THREADS, 1) {
    prepare_rows<INTERMEDIATE>(static_cast<const Activation*>(call.act), call.act_prepared, call.act_scales, call.offsets[call.num_experts]);
}
