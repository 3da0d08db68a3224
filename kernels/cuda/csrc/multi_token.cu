// Many tokens over many experts on any card from capability 7.5: `moe_multi_token_up` writes the SwiGLU of every
// (expert, token) pair, `moe_multi_token_down` its row of the output. E4M3 and E2M1 are exact in fp16; the group scales
// of both sides are applied to sums over 32 columns in fp32, in order of K.
//
// A tile is 64 rows of one expert (up: 32 of w1 and the same 32 of w3) by up to 8 x NT of its tokens. A warp owns 16 rows
// as the fragments want them: up g and g + 8 are the same channel of w1 and w3, so that SwiGLU stays in the lane. Chunks
// of four groups pass through STAGES stages of shared memory. A token's column is computed alike in every tile.
#include "device.cuh"
#include "formats.cuh"
#include "tiles.cuh"

constexpr int THREADS = 128, WARPS = 4, BLOCKS = PLANES == 1 ? 4 : 2;
constexpr int A_BYTES = WARPS * 2 * 512;                    // [warp][row half][lane] 16
constexpr int B_BYTES = MAX_NT * 8 * 256 * PLANES;          // [token][group][plane] 64, pieces of 16 bytes swapped by halves
constexpr int BS_BYTES = MAX_NT * 8 * 16;                   // [token][group] fp32
struct Stage {
    u8 a[A_BYTES], b[B_BYTES], scales[BS_BYTES];
};
struct Shared {
    Stage stages[STAGES];
    int tiles_before[MAX_EXPERTS + 1];
    int sources[MAX_NT * 8];                                // row of the activations, -1: no such token
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host plans more shared memory than this");

// What differs between the two linears.
template <bool UP>
struct Linear {
    static constexpr int K = UP ? HIDDEN : INTERMEDIATE, GROUPS = K / 32, CHUNKS = (GROUPS + 3) / 4;
    static constexpr int ROWS = UP ? INTERMEDIATE : HIDDEN, TILE = UP ? 32 : 64, TILES = (ROWS + TILE - 1) / TILE;
};

template <bool UP, int NT>
DEVICE bool run_tile(const Call& call, Shared& shared, int expert, int row_tile, int first_token) {
    using L = Linear<UP>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Row packed = call.rows[expert];
    const int tokens = min(call.counts[expert] - first_token, NT * 8), first_pair = call.offsets[expert] + first_token;

    sync_block();  // the tile before may still be read
    for (int i = threadIdx.x; i < NT * 8; i += THREADS)
        shared.sources[i] = i < tokens ? (UP ? call.pairs[first_pair + i] / call.top_k : first_pair + i) : -1;
    sync_block();

    // Rows g and g + 8 of this warp's fragments.
    int rows[2];
    const u8 *codes[2], *scales[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        rows[i] = row_tile * L::TILE + (UP ? warp * 8 + g : warp * 16 + i * 8 + g);
        const u64 row = rows[i] < L::ROWS ? rows[i] : L::ROWS - 1;
        codes[i] = (!UP ? packed.w2 : i ? packed.w3 : packed.w1) + row * (L::K / 2);
        scales[i] = (!UP ? packed.s2 : i ? packed.s3 : packed.s1) + row * L::GROUPS;
    }
    const u8* const source = static_cast<const u8*>(UP ? call.x_prepared : call.act_prepared);
    const float* const source_scales = UP ? call.x_scales : call.act_scales;

    const auto issue = [&](int chunk) {
        if (chunk < L::CHUNKS) {
            const Stage& stage = shared.stages[chunk % STAGES];
            const u32 a = shared_address(stage.a), b = shared_address(stage.b), scales = shared_address(stage.scales);
            const bool valid = chunk * 4 + t < L::GROUPS;
#pragma unroll
            for (int i = 0; i < 2; ++i)  // lane (g, t) brings group t; words are read across t, so groups trade places by g
                copy_async<16>(a + (warp * 2 + i) * 512 + (g * 4 + (t ^ (g / 2 & 3))) * 16, codes[i] + (valid ? (chunk * 4 + t) * 16 : 0), valid);
#pragma unroll 1
            for (int i = threadIdx.x; i < NT * 8 * 16 * PLANES; i += THREADS) {
                const int token = i / (16 * PLANES), piece = i % (16 * PLANES), group = chunk * 4 + piece / (4 * PLANES);
                const bool present = shared.sources[token] >= 0 && group < L::GROUPS;
                const u64 from = (u64(present ? shared.sources[token] : 0) * L::GROUPS + chunk * 4) * (64 * PLANES) + piece * 16;
                copy_async<16>(b + token * (256 * PLANES) + (piece ^ (token % 2 * 4)) * 16, source + (present ? from : 0), present);
            }
#pragma unroll 1
            for (int i = threadIdx.x; i < NT * 8 * 4; i += THREADS) {
                const int token = i / 4, group = chunk * 4 + i % 4;
                const bool present = shared.sources[token] >= 0 && group < L::GROUPS;
                copy_async<4>(scales + i * 4, source_scales + (present ? u64(shared.sources[token]) * L::GROUPS + group : 0), present);
            }
        }
        copy_async_commit();
    };
    const auto weight_scale = [&](int chunk, int i) -> u32 {  // of this lane's group; 127 (one) meets zero codes
        return chunk * 4 + t < L::GROUPS ? scales[i][chunk * 4 + t] : 127;
    };

    for (int chunk = 0; chunk < STAGES - 1; ++chunk) issue(chunk);
    float acc[NT][4] = {};
    u32 bytes[2] = {weight_scale(0, 0), weight_scale(0, 1)};
    for (int chunk = 0; chunk < L::CHUNKS; ++chunk) {
        const u32 now[2] = {bytes[0], bytes[1]};
        if (chunk + 1 < L::CHUNKS) bytes[0] = weight_scale(chunk + 1, 0), bytes[1] = weight_scale(chunk + 1, 1);
        copy_async_wait<STAGES - 2>();
        sync_block();
        issue(chunk + STAGES - 1);
        const Stage& stage = shared.stages[chunk % STAGES];
#pragma unroll 1  // unrolled, it takes twice the registers
        for (int group = 0; group < 4; ++group) {
            u32 half[2][4];
            float weight[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 word = *reinterpret_cast<const u32*>(stage.a + (warp * 2 + i) * 512 + (g * 4 + (group ^ (g / 2 & 3))) * 16 + t * 4);
                decode_half(word, call.byte, half[i]);
                weight[i] = e8m0_float(shuffle(now[i], lane / 4 * 4 + group));
            }
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) {
                float c[PLANES][4] = {};
#pragma unroll
                for (int plane = 0; plane < PLANES; ++plane) {
                    const int piece = (group * PLANES + plane) * 4 + t;
                    const uint4 b = *reinterpret_cast<const uint4*>(stage.b + (nt * 8 + g) * (256 * PLANES) + (piece ^ (g % 2 * 4)) * 16);
                    mma_f16(c[plane], half[0][0], half[1][0], half[0][1], half[1][1], b.x, b.y);
                    mma_f16(c[plane], half[0][2], half[1][2], half[0][3], half[1][3], b.z, b.w);
                }
                const float* by = reinterpret_cast<const float*>(stage.scales) + (nt * 8 + 2 * t) * 4 + group;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float planes[PLANES];
#pragma unroll
                    for (int plane = 0; plane < PLANES; ++plane) planes[plane] = c[plane][i];
                    acc[nt][i] += join_planes(planes) * by[i % 2 * 4] * weight[i / 2];
                }
            }
        }
    }
    copy_async_wait<0>();

    bool finite = true;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int token = nt * 8 + 2 * t + j;
            if (token >= tokens) continue;
            const float first = acc[nt][j], second = acc[nt][2 + j];
            if (UP) {
                if (rows[0] >= L::ROWS) continue;
                finite = finite && is_finite(first) && is_finite(second);
                static_cast<Activation*>(call.act)[u64(first_pair + token) * INTERMEDIATE + rows[0]] =
                    stored(swiglu(rounded(first), rounded(second), call.weights[call.pairs[first_pair + token]]));
            } else {
                Activation* const y = static_cast<Activation*>(call.y) + u64(first_pair + token) * HIDDEN;
                if (rows[0] < L::ROWS) y[rows[0]] = stored(first), finite = finite && is_finite(first);
                if (rows[1] < L::ROWS) y[rows[1]] = stored(second), finite = finite && is_finite(second);
            }
        }
    return finite;
}

template <bool UP>
DEVICE void run(const Call& call) {
    using L = Linear<UP>;
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    const int n = call.num_experts;
    const auto token_tiles_of = [](int count) { return (count + MAX_NT * 8 - 1) / (MAX_NT * 8); };
    if (threadIdx.x < 32) count_tiles(call.counts, n, shared.tiles_before, [&](int count) { return token_tiles_of(count) * L::TILES; });
    sync_block();
    bool finite = true;
    int expert = 0;
    for (int tile = blockIdx.x; tile < shared.tiles_before[n]; tile += gridDim.x) {
        while (tile >= shared.tiles_before[expert + 1]) ++expert;
        const int within = tile - shared.tiles_before[expert], token_tiles = token_tiles_of(call.counts[expert]);
        const int row_tile = within / token_tiles, first_token = within % token_tiles * (MAX_NT * 8), left = call.counts[expert] - first_token;
        if (left <= 8)
            finite = run_tile<UP, 1>(call, shared, expert, row_tile, first_token) && finite;
        else if (left <= 32)
            finite = run_tile<UP, 4>(call, shared, expert, row_tile, first_token) && finite;
        else
            finite = run_tile<UP, MAX_NT>(call, shared, expert, row_tile, first_token) && finite;
    }
    if (!finite) report(call.status, 1);
}

KERNEL(moe_multi_token_up, THREADS, BLOCKS) { run<true>(call); }
KERNEL(moe_multi_token_down, THREADS, BLOCKS) { run<false>(call); }
