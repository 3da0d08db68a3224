// One token over the experts that a rank holds: both linears, SwiGLU and the sum in one launch.
//
// Every block owns a run of rows of w1 and w3 (the same channels) and, once all blocks have sent each other what comes out
// of them, a run of rows of w2. Work is cut into tasks: 16 rows (two tiles of 8) x STEPS steps, dealt to the warps; a step is 2 x 128 columns,
// those of the lower and of the upper half of K. A lane (g, t) copies whole groups (16 bytes = 32 codes of row g of a
// tile) into memory that only it reads, RING tasks ahead; w2 is already on its way while a block waits for the others.
//
// The tensor cores get 16 x 16 tiles whose rows g and g + 8 are row g in the two halves. Of the 8 columns, column n < 4
// holds the activations of group n of the lower half and column n + 4 those of the upper half, each only where lane t = n
// reads: so the four groups of a step stay apart and their scales are applied to group sums in fp32.
//
// A task leaves one partial sum per row; they are added in order of K. Nothing depends on which other experts there are.
#include "device.cuh"
#include "formats.cuh"
#include "single_token.cuh"

// Do steps and groups fill the tasks, so that nothing has to be masked within a row?
DEVICE constexpr bool is_whole(int k) { return groups_of(k) % 8 == 0 && steps_of(k) % STEPS == 0; }

constexpr int SLOT = STEPS * 4 * 512;     // [step][tile][half][lane] 16

// Shared memory, in this order; the host computes the same (`plan.py`).
constexpr int UP_SCALE_BYTES = padded(MAX_PAIRS * 2 * groups_of(HIDDEN));
constexpr int DOWN_SCALE_BYTES = padded(MAX_ROWS * MAX_EXPERTS * groups_of(INTERMEDIATE));
constexpr int SUMS = larger(MAX_PAIRS * 2 * splits_of(HIDDEN), MAX_ROWS * MAX_EXPERTS * splits_of(INTERMEDIATE));

struct Shared {
    u8 ring[WARPS][RING][SLOT];
    u8 up_scales[UP_SCALE_BYTES];      // [w1, w3][pair][group]
    u8 down_scales[DOWN_SCALE_BYTES];  // [expert][row][group]
    u8 x[X_GROUPS * GROUP_BYTES];      // [group][plane] fp16
    u8 zeros[GROUP_BYTES];
    float x_scales[X_GROUPS];
    float sums[SUMS];                  // [w1, w3][pair][split], later [expert][row][split]
    u32 launch;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host plans less shared memory than this");

// A task of w2. `whole`: tasks of two tiles in an expert, `whole_tasks` in all experts, both but for the splits.
struct Down {
    u32 expert, base, split;
    DEVICE Down(u32 id, u32 whole, u32 whole_tasks) : split(id % splits_of(INTERMEDIATE)) {
        const u32 rest = id / splits_of(INTERMEDIATE);
        expert = rest < whole_tasks ? rest / whole : rest - whole_tasks;
        base = (rest < whole_tasks ? rest % whole : whole) * 16;
    }
};

// 16 rows of one matrix in one task. Rows that do not exist read zero codes.
struct Rows {
    const u8* codes[2];  // row g of either tile
    bool valid[2];
    bool second;         // does the second tile have a row? The same in all lanes.
    int split;
};

template <int K>
DEVICE void issue(const Rows& rows, u32 slot, int t) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        if (tile == 1 && !rows.second) break;
        const u8* const from = rows.codes[tile] + rows.split * (STEPS * 64) + t * 16;
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int step = rows.split * STEPS + s;
                const bool within = is_whole(K) || (step < steps_of(K) && 4 * (step + half * steps_of(K)) + t < groups_of(K));
                const bool valid = rows.valid[tile] && within;
                copy_async<16>(slot + ((s * 2 + tile) * 2 + half) * 512, within ? from + (s + half * steps_of(K)) * 64 : rows.codes[tile], valid);
            }
    }
}

// Partial sums of row g of TILES tiles, the same in the row's four lanes. `x` and `x_scales` begin at group 0 of this K;
// `scales` are the bytes of the lane's row in either tile.
template <int K, int TILES>
DEVICE void consume(const u8* slot, const u8* x, const u8* zeros, const float* x_scales, const u8* const (&scales)[2], int split, u32 byte,
                    float (&sums)[2]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool feeds = (g & 3) == t;  // does the lane hold activations in fragment b?
    const u8* from = feeds ? x + (4 * (split * STEPS + (g < 4 ? 0 : steps_of(K))) + t) * GROUP_BYTES : zeros;
    const int stride = feeds ? 4 * GROUP_BYTES : 0;
    sums[0] = sums[1] = 0;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int step = split * STEPS + s;
        if (!is_whole(K) && step >= steps_of(K)) break;
        uint4 b[PLANES][4];
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
            for (int w = 0; w < 4; ++w) b[plane][w] = *reinterpret_cast<const uint4*>(from + s * stride + plane * 80 + w * 16);
        uint4 codes[TILES][2];
#pragma unroll
        for (int i = 0; i < TILES * 2; ++i) codes[i / 2][i % 2] = *reinterpret_cast<const uint4*>(slot + (s * 4 + i) * 512);
        float c[TILES][PLANES][4] = {};
#pragma unroll
        for (int w = 0; w < 4; ++w)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                u32 p[4], q[4];
                decode_half(reinterpret_cast<const u32*>(&codes[tile][0])[w], byte, p);
                decode_half(reinterpret_cast<const u32*>(&codes[tile][1])[w], byte, q);
#pragma unroll
                for (int plane = 0; plane < PLANES; ++plane) {
                    mma_f16(c[tile][plane], p[0], q[0], p[1], q[1], b[plane][w].x, b[plane][w].y);
                    mma_f16(c[tile][plane], p[2], q[2], p[3], q[3], b[plane][w].z, b[plane][w].w);
                }
            }
        // Lanes t = 0, 1 hold the group sums of the lower half of row g, t = 2, 3 those of the upper half.
        const int first = 4 * (step + (t < 2 ? 0 : steps_of(K))) + 2 * (t & 1);
        float by[2];
        if constexpr (groups_of(K) % 8 == 0) {
            const float2 two = *reinterpret_cast<const float2*>(x_scales + first);
            by[0] = two.x, by[1] = two.y;
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) by[i] = first + i < groups_of(K) ? x_scales[first + i] : 0;
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            float pair[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float planes[PLANES];
#pragma unroll
                for (int plane = 0; plane < PLANES; ++plane) planes[plane] = t < 2 ? c[tile][plane][i] : c[tile][plane][2 + i];
                pair[i] = join_planes(planes);
            }
            u32 bytes = 0;
            if constexpr (groups_of(K) % 8 == 0)
                bytes = *reinterpret_cast<const u16*>(scales[tile] + first);
            else
#pragma unroll
                for (int i = 0; i < 2; ++i) bytes |= first + i < groups_of(K) ? u32(scales[tile][first + i]) << (8 * i) : 0;
            sums[tile] += pair[0] * by[0] * e8m0_float(bytes & 0xFF);
            sums[tile] += pair[1] * by[1] * e8m0_float(bytes >> 8);
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        sums[tile] += shuffle_xor(sums[tile], 1);
        sums[tile] += shuffle_xor(sums[tile], 2);
    }
}

// Groups beyond K meet zero codes; they only have to be finite.
template <int K>
DEVICE void clear_padding(u8* x, int count) {
    constexpr int WORDS = (8 * steps_of(K) - groups_of(K)) * (GROUP_BYTES / 4);
    for (int i = threadIdx.x; i < count * WORDS; i += THREADS)
        reinterpret_cast<u32*>(x + (i / (WORDS + !WORDS) * (8 * steps_of(K)) + groups_of(K)) * GROUP_BYTES)[i % (WORDS + !WORDS)] = 0;
}

// A run of scale rows, which lie one after the other -> shared memory, in the largest pieces that their alignment allows.
template <int GROUPS>
DEVICE void copy_scales(u8* to, const u8* from, int rows) {
    const u32 address = shared_address(to);
    constexpr int PIECE = GROUPS % 16 == 0 ? 16 : GROUPS % 8 == 0 ? 8 : GROUPS % 4 == 0 ? 4 : 1;
#pragma unroll 1
    for (int i = threadIdx.x * PIECE; i < rows * GROUPS; i += THREADS * PIECE)
        if constexpr (PIECE == 1)
            to[i] = from[i];
        else
            copy_async<PIECE>(address + i, from + i, true);
}

KERNEL_OF(Token, moe_single_token_fp4, THREADS, 1) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int n = call.num_experts;

    // What has to come from far is asked for before the weights, behind which it would wait.
    Prepare<HIDDEN, (groups_of(HIDDEN) * 4 + THREADS - 1) / THREADS> x_in{};
    x_in.load(static_cast<const Activation*>(call.x), groups_of(HIDDEN));
    const u64 arrived = threadIdx.x == 0 ? arrive(call.arrivals) : 0;

    const u32 words = n * (INTERMEDIATE / IN_WORD);
    const u32 pair0 = u32(u64(words) * blockIdx.x / gridDim.x) * IN_WORD, pairs = u32(u64(words) * (blockIdx.x + 1) / gridDim.x) * IN_WORD - pair0;
    const u32 row0 = u64(HIDDEN) * blockIdx.x / gridDim.x, rows = u64(HIDDEN) * (blockIdx.x + 1) / gridDim.x - row0;
    const auto up_row = [&](u32 row) {  // codes of a row in [w1, w3][pair]
        const bool gate = row < pairs;
        const u32 pair = pair0 + (gate ? row : row - pairs);
        const Row& of = call.drawn[pair / INTERMEDIATE].row;
        return (gate ? of.w1 : of.w3) + pair % INTERMEDIATE * u64(HIDDEN / 2);
    };

    // A warp's tasks: first those of w1 and w3, then those of w2, each list dealt round-robin, those of one tile last.
    const int up_tasks = (pairs * 2 + 15) / 16 * splits_of(HIDDEN);
    const int down_tasks = n * ((rows + 15) / 16) * splits_of(INTERMEDIATE);
    const u32 whole = (rows + 7) / 16, whole_tasks = n * whole;  // of an expert, of all, but for the splits
    const int up_own = (up_tasks - warp + WARPS - 1) / WARPS, down_own = (down_tasks - warp + WARPS - 1) / WARPS;
    u8* const ring = shared.ring[warp][0] + lane * 16;
    const u32 ring_address = shared_address(ring);
    u32 filling = 0, reading = 0;
    const auto after = [](u32 slot) { return slot == (RING - 1) * SLOT ? 0 : slot + SLOT; };
    const auto issue_task = [&](int k) {
        Rows own;
        if (k < up_own) {
            const u32 id = warp + k * WARPS, base = id / splits_of(HIDDEN) * 16;
            own.split = id % splits_of(HIDDEN), own.second = base + 8 < pairs * 2;
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const u32 row = base + tile * 8 + g;
                own.valid[tile] = row < pairs * 2;
                own.codes[tile] = up_row(own.valid[tile] ? row : 0);
            }
            issue<HIDDEN>(own, ring_address + filling, t);
        } else if (k < up_own + down_own) {
            const Down task(warp + (k - up_own) * WARPS, whole, whole_tasks);
            own.split = task.split, own.second = task.base + 8 < rows;
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const u32 row = task.base + tile * 8 + g;
                own.valid[tile] = row < rows;
                own.codes[tile] = call.drawn[task.expert].row.w2 + (row0 + (own.valid[tile] ? row : 0)) * u64(INTERMEDIATE / 2);
            }
            issue<INTERMEDIATE>(own, ring_address + filling, t);
        }
        filling = after(filling);
    };

    // Groups of copies: the scales of w1 and w3, then a group a task; the scales of w2 go with the last of the first tasks.
    for (u32 pair = pair0; pair < pair0 + pairs;) {
        const u32 expert = pair / INTERMEDIATE, in_expert = pair % INTERMEDIATE, left = pair0 + pairs - pair;
        const u32 run = left < INTERMEDIATE - in_expert ? left : INTERMEDIATE - in_expert;
        u8* const to = shared.up_scales + (pair - pair0) * groups_of(HIDDEN);
        copy_scales<groups_of(HIDDEN)>(to, call.drawn[expert].row.s1 + in_expert * u64(groups_of(HIDDEN)), run);
        copy_scales<groups_of(HIDDEN)>(to + pairs * groups_of(HIDDEN), call.drawn[expert].row.s3 + in_expert * u64(groups_of(HIDDEN)), run);
        pair += run;
    }
    copy_async_commit();
    for (int k = 0; k < RING - 1; ++k) {
        issue_task(k);
        if (k < RING - 2) copy_async_commit();
    }
#pragma unroll 1
    for (int e = 0; e < n; ++e)
        copy_scales<groups_of(INTERMEDIATE)>(shared.down_scales + e * rows * groups_of(INTERMEDIATE),
                                             call.drawn[e].row.s2 + row0 * u64(groups_of(INTERMEDIATE)), rows);
    copy_async_commit();

    if (threadIdx.x == 0) shared.launch = u32(arrived / gridDim.x) + 1;
    if (threadIdx.x < GROUP_BYTES / 4) reinterpret_cast<u32*>(shared.zeros)[threadIdx.x] = 0;
    clear_padding<HIDDEN>(shared.x, 1);
    x_in.store(shared.x, shared.x_scales, groups_of(HIDDEN), 0);
    copy_async_wait<RING - 1>();
    sync_block();

    for (int k = 0; k < up_own; ++k) {
        issue_task(k + RING - 1);
        copy_async_commit();
        copy_async_wait<RING - 1>();
        const u32 id = warp + k * WARPS, split = id % splits_of(HIDDEN), base = id / splits_of(HIDDEN) * 16;
        const u8* scales[2];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const u32 row = base + tile * 8 + g;
            scales[tile] = shared.up_scales + (row < pairs * 2 ? row : 0) * groups_of(HIDDEN);
        }
        float sums[2];
        if (base + 8 < pairs * 2)
            consume<HIDDEN, 2>(ring + reading, shared.x, shared.zeros, shared.x_scales, scales, split, call.byte, sums);
        else
            consume<HIDDEN, 1>(ring + reading, shared.x, shared.zeros, shared.x_scales, scales, split, call.byte, sums);
        reading = after(reading);
        if (t < 2 && base + t * 8 + g < pairs * 2) shared.sums[(base + t * 8 + g) * splits_of(HIDDEN) + split] = t ? sums[1] : sums[0];
    }
    if (up_own < RING - 1) copy_async_wait<0>();  // the scales of w2 have landed
    sync_block();

    const u32 launch = shared.launch;
    bool finite = send_activations(call, shared.sums, pair0, pairs, launch);

    clear_padding<INTERMEDIATE>(shared.x, n);
    receive_activations<4>(call, shared.x, shared.x_scales, launch);
    sync_block();
    for (int k = 0; k < down_own; ++k) {
        issue_task(up_own + k + RING - 1);
        copy_async_commit();
        copy_async_wait<RING - 1>();
        const Down task(warp + k * WARPS, whole, whole_tasks);
        const u32 expert = task.expert, base = task.base, split = task.split;
        const u8* scales[2];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const u32 row = base + tile * 8 + g;
            scales[tile] = shared.down_scales + (expert * rows + (row < rows ? row : 0)) * groups_of(INTERMEDIATE);
        }
        const u8* const x = shared.x + expert * (8 * steps_of(INTERMEDIATE) * GROUP_BYTES);
        const float* const x_scales = shared.x_scales + expert * 8 * steps_of(INTERMEDIATE);
        float sums[2];
        if (base + 8 < rows)
            consume<INTERMEDIATE, 2>(ring + reading, x, shared.zeros, x_scales, scales, split, call.byte, sums);
        else
            consume<INTERMEDIATE, 1>(ring + reading, x, shared.zeros, x_scales, scales, split, call.byte, sums);
        reading = after(reading);
        if (t < 2 && base + t * 8 + g < rows) shared.sums[(expert * rows + base + t * 8 + g) * splits_of(INTERMEDIATE) + split] = t ? sums[1] : sums[0];
    }
    copy_async_wait<0>();
    sync_block();

    for (u32 i = threadIdx.x; i < n * rows; i += THREADS) {  // (expert, row)
        float y = 0;
#pragma unroll
        for (int split = 0; split < splits_of(INTERMEDIATE); ++split) y += shared.sums[i * splits_of(INTERMEDIATE) + split];
        finite = finite && is_finite(y);
        shared.sums[i * splits_of(INTERMEDIATE)] = rounded(y);
        if (call.exact) static_cast<Activation*>(call.out)[(call.first_place + i / rows) * u64(HIDDEN) + row0 + i % rows] = stored(y);
    }
    if (!finite) report(call.status, 1);
    if (call.exact) return;
    sync_block();
    for (u32 row = threadIdx.x; row < rows; row += THREADS) {
        float* const partial = static_cast<float*>(call.out) + row0 + row;
        float total = call.accumulate ? *partial : 0;
        for (int e = 0; e < n; ++e) total += shared.sums[(e * rows + row) * splits_of(INTERMEDIATE)];
        *partial = total;
    }
}
