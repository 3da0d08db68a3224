// Many tokens over many experts on Hopper (sm_90a). Scales are multiplied into bf16 operands, which is exact on both
// sides (spec 3.2): codes become bf16 fragments in registers, activations wait in shared memory as `prepare.cu` left them.
//
// A tile is 128 rows of one expert (up: 64 of w1 and the same 64 of w3) by N of its tokens; two warpgroups own 64 rows
// each. In up, rows g and g + 8 of a warp are the same channel of w1 and w3. The tensor cores sum over 128 columns; those
// sums are added in fp32 registers in order of K, because the tensor cores truncate. While they run over half a chunk,
// the codes of the next half are decoded. A token's column is computed alike for every N.
#include "device.cuh"
#include "formats.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"
#include "wgmma_generated.cuh"

constexpr int THREADS = 256, WARPS = 8;
// Two kernels of the same code share the tiles: few tokens need few registers, so that two blocks fit a multiprocessor
// and one computes while the other fetches its first chunks.
#if NARROW
#define WIDTHS WGMMA_NARROW_WIDTHS
constexpr int LEAST_WIDTH = 1, MAX_N = NARROW_N, BLOCKS = 2;
#else
#define WIDTHS WGMMA_WIDE_WIDTHS
constexpr int LEAST_WIDTH = NARROW_N + 1, MAX_N = WIDE_N, BLOCKS = 1;
#endif
constexpr int CODE_BYTES = WARPS * 2 * 512, SCALE_BYTES = WARPS * 2 * 8 * 4;

struct Header {
    int tiles_before[MAX_EXPERTS + 1];
    int sources[MAX_N];  // row of the activations; columns without a token repeat the first
};
constexpr int HEADER_BYTES = (int(sizeof(Header)) + 1023) / 1024 * 1024;

template <int N>
struct Stages {  // [activations N x 128 bf16 in two panels of 64][codes][scales]
    static constexpr int CODES = N * 256, SCALES = CODES + CODE_BYTES, BYTES = (SCALES + SCALE_BYTES + 1023) / 1024 * 1024;
    static constexpr int FIT = (SHARED_BYTES - HEADER_BYTES) / BYTES, COUNT = FIT < 12 ? FIT : 12;
    static_assert(COUNT >= 3 && BYTES % 1024 == 0, "loads need a stage to land in");
};

template <bool UP>
struct Linear {
    static constexpr int K = UP ? HIDDEN : INTERMEDIATE, GROUPS = K / 32, CHUNKS = K / 128;
    static constexpr int ROWS = UP ? INTERMEDIATE : HIDDEN, TILE = UP ? 64 : 128, TILES = (ROWS + TILE - 1) / TILE;
    static_assert(K % 128 == 0, "a chunk is four whole groups");
};

struct Weights {
    u32 a[4][4];  // fragments of half a chunk: four steps of 16 columns

    // Two words of the 32 codes of this lane's group in one row; i = 0 for row g, 1 for row g + 8.
    DEVICE void decode_row(int i, uint2 codes, u32 factor) {
        const u32 words[2] = {codes.x, codes.y};
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            u32 pair[4];
            decode_bf16(words[w], pair);
#pragma unroll
            for (int j = 0; j < 4; ++j) a[2 * w + j / 2][i + 2 * (j % 2)] = multiply_bf16(pair[j], factor);
        }
    }
    DEVICE void multiply_row(int i, u32 factor) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) a[j][i + 2 * half] = multiply_bf16(a[j][i + 2 * half], factor);
    }
};

// A code is decoded to value x 2^-126; times 2^(b - 1) that is the weight. Above b = 128 that overflows: the rest is
// a second factor. b = 255 gives NaN.
DEVICE u32 first_factor(u32 b) { return b == 255 ? 0x7FFF7FFFu : ((b < 128 ? b : 128) + 126) * 0x00800080u; }
DEVICE u32 second_factor(u32 b) { return b > 128 ? (b - 1) * 0x00800080u : 0x3F803F80u; }

template <bool UP, int N>
DEVICE bool run_tile(const Call& call, u8* stages, Header& header, int expert, int row_tile, int first_token, int tokens) {
    using L = Linear<UP>;
    using S = Stages<N>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Row packed = call.rows[expert];
    const int first_pair = call.offsets[expert] + first_token;

    sync_block();  // the tile before may still be read
    for (int i = threadIdx.x; i < N; i += THREADS)
        header.sources[i] = UP ? call.pairs[first_pair + (i < tokens ? i : 0)] / call.top_k : first_pair + (i < tokens ? i : 0);
    sync_block();

    const auto row_of = [&](int warp_, int i, int g_) { return row_tile * L::TILE + (UP ? warp_ * 8 + g_ : warp_ * 16 + i * 8 + g_); };
    const auto within = [&](int row) { return u64(row < L::ROWS ? row : L::ROWS - 1); };
    const u8* codes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) codes[i] = (!UP ? packed.w2 : i ? packed.w3 : packed.w1) + within(row_of(warp, i, g)) * (L::K / 2) + t * 16;
    const int scale_half = threadIdx.x / 8 % 2;  // the first 128 threads bring four scales of one row each: [warp][half][g]
    const u8* scales = (!UP ? packed.s2 : scale_half ? packed.s3 : packed.s1) + within(row_of(threadIdx.x / 16, scale_half, threadIdx.x % 8)) * L::GROUPS;
    const u8* const source = static_cast<const u8*>(UP ? call.x_prepared : call.act_prepared);

    // Where this thread's next pieces of activations come from: a row has 16 pieces of a chunk.
    constexpr int PIECES = (N * 16 + THREADS - 1) / THREADS;
    const int token0 = threadIdx.x / 16, piece = threadIdx.x % 16;
    const u8* activations[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int token = i * (THREADS / 16) + token0;
        activations[i] = source + u64(header.sources[token < N ? token : 0]) * (L::K * 2) + piece * 16;
    }
    // THREADS / 16 tokens further down, a piece lies at the same place of a swizzled row.
    const int to_activations = piece / 8 * (N * 128) + token0 * 128 + ((piece ^ token0) & 7) * 16;

    // Places of stages, as offsets from the first.
    u32 filling = 0, reading = 0, decoding = 0;
    const u32 stages_address = shared_address(stages);
    const auto after = [](u32 stage) -> u32 { return stage == (S::COUNT - 1) * S::BYTES ? 0 : stage + S::BYTES; };
    int left = L::CHUNKS;
    const auto issue = [&] {
        if (left-- > 0) {
            const u32 stage = stages_address + filling;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                copy_async<16>(stage + S::CODES + (i * THREADS + threadIdx.x) * 16, codes[i], true);
                codes[i] += 64;
            }
            if (threadIdx.x < SCALE_BYTES / 4) copy_async<4>(stage + S::SCALES + threadIdx.x * 4, scales, true);
            scales += 4;
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                if (N * 16 % THREADS == 0 || i * THREADS + int(threadIdx.x) < N * 16)
                    copy_async<16>(stage + to_activations + i * (THREADS / 16 * 128), activations[i], true);
                activations[i] += 256;
            }
            filling = after(filling);
        }
        copy_async_commit();
    };

    uint4 words[2];  // this lane's codes of the chunk that is being decoded
    u32 weight_scales[2], factors[2];
    bool two_factors;  // does any lane of the warp need both? Hardly ever.
    const auto fetch = [&] {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            words[i] = *reinterpret_cast<const uint4*>(stages + decoding + S::CODES + (i * THREADS + threadIdx.x) * 16);
            weight_scales[i] = stages[decoding + S::SCALES + (warp * 16 + i * 8 + g) * 4 + t];
            factors[i] = first_factor(weight_scales[i]);
        }
        two_factors = any_lane(weight_scales[0] > 128 || weight_scales[1] > 128);
        decoding = after(decoding);
    };
    const auto decode = [&](int half, Weights& weights) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            weights.decode_row(i, half ? make_uint2(words[i].z, words[i].w) : make_uint2(words[i].x, words[i].y), factors[i]);
        if (two_factors)
#pragma unroll
            for (int i = 0; i < 2; ++i) weights.multiply_row(i, second_factor(weight_scales[i]));
    };
    const auto multiply = [&](int half, const Weights& weights, float (&sums)[N / 2]) {
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; ++j) wgmma<N>(sums, weights.a[j], wgmma_operand(stages + reading, half * (N * 128) + j * 32), half + j > 0);
        wgmma_commit();
    };

#pragma unroll 1
    for (int stage = 0; stage < S::COUNT - 1; ++stage) issue();
    copy_async_wait<S::COUNT - 2>();
    publish_to_wgmma();
    sync_block();
    Weights lower, upper;
    fetch();
    decode(0, lower);
    float acc[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[i] = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < L::CHUNKS; ++chunk) {
        copy_async_wait<S::COUNT - 3>();  // the next chunk has landed
        publish_to_wgmma();
        sync_block();
        float sums[N / 2];
        multiply(0, lower, sums);
        issue();
        decode(1, upper);
        multiply(1, upper, sums);
        wgmma_wait<1>();
        if (chunk + 1 < L::CHUNKS) {
            fetch();
            decode(0, lower);
        }
        wgmma_wait<0>();
        reading = after(reading);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[i] += sums[i];
    }
    copy_async_wait<0>();

    bool finite = true;
#pragma unroll
    for (int nt = 0; nt < N / 8; ++nt)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int token = nt * 8 + 2 * t + j;
            if (token >= tokens) continue;
            const float first = acc[nt * 4 + j], second = acc[nt * 4 + 2 + j];
            const int row = row_of(warp, 0, g);
            if (UP) {
                if (row >= L::ROWS) continue;
                finite = finite && is_finite(first) && is_finite(second);
                static_cast<Activation*>(call.act)[u64(first_pair + token) * INTERMEDIATE + row] =
                    stored(swiglu(rounded(first), rounded(second), call.weights[call.pairs[first_pair + token]]));
            } else {
                Activation* const y = static_cast<Activation*>(call.y) + u64(first_pair + token) * HIDDEN;
                if (row < L::ROWS) y[row] = stored(first), finite = finite && is_finite(first);
                if (row + 8 < L::ROWS) y[row + 8] = stored(second), finite = finite && is_finite(second);
            }
        }
    return finite;
}

// Runs a tile in the narrowest of the given widths that holds `width` tokens.
template <bool UP, int N, int... WIDER>
DEVICE bool run_in(int width, const Call& call, u8* stages, Header& header, int expert, int row_tile, int first_token, int tokens) {
    if constexpr (sizeof...(WIDER) > 0)
        if (width > N) return run_in<UP, WIDER...>(width, call, stages, header, expert, row_tile, first_token, tokens);
    return run_tile<UP, N>(call, stages, header, expert, row_tile, first_token, tokens);
}

// A tile's width: an expert's tokens in as few equal tiles as possible.
DEVICE int token_tiles_of(int count) { return (count + WIDE_N - 1) / WIDE_N; }
DEVICE int width_of(int count) { return count ? (count + token_tiles_of(count) - 1) / token_tiles_of(count) : 0; }

template <bool UP>
DEVICE void run(const Call& call) {
    using L = Linear<UP>;
    Header& header = *reinterpret_cast<Header*>(shared_memory());
    u8* const stages = shared_memory() + HEADER_BYTES;
    const int n = call.num_experts;
    const auto tiles_of = [](int count) { return width_of(count) >= LEAST_WIDTH && width_of(count) <= MAX_N ? token_tiles_of(count) * L::TILES : 0; };
    if (threadIdx.x < 32) count_tiles(call.counts, n, header.tiles_before, tiles_of);
    sync_block();
    bool finite = true;
    int expert = 0;
    for (int tile = blockIdx.x; tile < header.tiles_before[n]; tile += gridDim.x) {
        while (tile >= header.tiles_before[expert + 1]) ++expert;
        const int count = call.counts[expert], token_tiles = token_tiles_of(count), width = width_of(count);
        const int within = tile - header.tiles_before[expert], row_tile = within / token_tiles, first_token = within % token_tiles * width;
        const int tokens = min(count - first_token, width);
        finite = run_in<UP, WIDTHS>(width, call, stages, header, expert, row_tile, first_token, tokens) && finite;
    }
    if (!finite) report(call.status, 1);
}

KERNEL(moe_multi_token_up, THREADS, BLOCKS) { run<true>(call); }
KERNEL(moe_multi_token_down, THREADS, BLOCKS) { run<false>(call); }
