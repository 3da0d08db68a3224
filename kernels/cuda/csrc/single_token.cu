// One token over the experts that a rank holds: both linears, SwiGLU and the sum in one launch.
//
// Every block owns a run of (expert, channel) pairs of w1/w3 and, after a meeting of all blocks, a run of output rows of
// w2. Work is cut into tasks: 8 rows x STEPS steps of one matrix, dealt to the warps; a step is 2 x 128 columns, those of
// the lower and of the upper half of K. A lane (g, t) copies whole groups (16 bytes = 32 codes of row g) into memory that
// only it reads, RING tasks ahead; w2 is already on its way while the blocks meet.
//
// The tensor cores get 16 x 16 tiles whose rows g and g + 8 are row g of the two halves. Of the 8 columns, column n < 4
// holds the activations of group n of the lower half and column n + 4 those of the upper half, each only where lane t = n
// reads: so the four groups of a step stay apart and their scales are applied to group sums in fp32.
//
// A task leaves one partial sum per row; they are added in order of K. Nothing depends on which other experts there are.
#include "device.cuh"
#include "formats.cuh"

constexpr int THREADS = WARPS * 32;

DEVICE constexpr int groups_of(int k) { return k / 32; }
DEVICE constexpr int steps_of(int k) { return ((groups_of(k) + 3) / 4 + 1) / 2; }
DEVICE constexpr int splits_of(int k) { return (steps_of(k) + STEPS - 1) / STEPS; }
// Do steps and groups fill the tasks, so that nothing has to be masked within a row?
DEVICE constexpr bool is_whole(int k) { return groups_of(k) % 8 == 0 && steps_of(k) % STEPS == 0; }
constexpr int GROUP_PITCH = 80;  // bytes of 32 prepared activations: 64, and 16 against bank conflicts
constexpr int SLOT = STEPS * 2 * 512;

DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }
// Shared memory, in this order; the host computes the same (`SingleTokenPlan`).
constexpr int X_GROUPS = larger(groups_of(HIDDEN), MAX_EXPERTS * groups_of(INTERMEDIATE));
constexpr int X_BYTES = X_GROUPS * (PLANES * GROUP_PITCH + 4);
constexpr int UP_SCALE_BYTES = (MAX_PAIRS * 2 * groups_of(HIDDEN) + 15) / 16 * 16;
constexpr int DOWN_SCALE_BYTES = (MAX_ROWS * MAX_EXPERTS * groups_of(INTERMEDIATE) + 15) / 16 * 16;
constexpr int SUMS = larger(MAX_PAIRS * 2 * splits_of(HIDDEN), MAX_ROWS * MAX_EXPERTS * splits_of(INTERMEDIATE));

struct Shared {
    u8 ring[WARPS][RING][SLOT];
    u8 up_scales[UP_SCALE_BYTES];      // [pair][w1, w3][group]
    u8 down_scales[DOWN_SCALE_BYTES];  // [expert][row][group]
    u8 x[X_BYTES / 16 * 16 + 16];      // [group][plane] pitch, then fp32 [group]
    float sums[SUMS];                  // [pair][w1, w3][split], later [expert][row][split]
    const u8* up_rows[MAX_PAIRS * 2];  // [pair][w1, w3] codes
    const u8* down_rows[MAX_EXPERTS];  // codes of this block's first row of w2
    float route[MAX_EXPERTS];
    int place[MAX_EXPERTS];            // the expert's place among those this token uses, -1: not used
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host plans more shared memory than this");

// Where a lane reads in one task.
struct Task {
    const u8* codes;   // row g of the tile
    bool valid;
    int split;
};

template <int K>
DEVICE void issue(const Task& task, u8* slot, int t) {
    const u8* const from = task.codes + task.split * (STEPS * 64) + t * 16;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int step = task.split * STEPS + s;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool within = is_whole(K) || (step < steps_of(K) && 4 * (step + half * steps_of(K)) + t < groups_of(K));
            copy_async<16>(slot + (s * 2 + half) * 512, task.valid && within ? from + (s + half * steps_of(K)) * 64 : task.codes, task.valid && within);
        }
    }
}

// Partial sum of row g of the tile, the same in its four lanes. `scales` are the bytes of that row.
template <int K>
DEVICE float consume(const u8* slot, const u8* x, const float* x_scales, const u8* scales, int split, int lane) {
    const int g = lane / 4, t = lane % 4;
    const bool feeds = (g & 3) == t;  // lanes that hold activations: column g of fragment b
    float sum = 0;
    u32 b[PLANES][16];
#pragma unroll
    for (int i = 0; i < PLANES * 16; ++i) b[i / 16][i % 16] = 0;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int step = split * STEPS + s;
        if (!is_whole(K) && step >= steps_of(K)) break;
        const uint4 lower = *reinterpret_cast<const uint4*>(slot + s * 1024);
        const uint4 upper = *reinterpret_cast<const uint4*>(slot + s * 1024 + 512);
        if (feeds) {
            int group = 4 * (step + (g < 4 ? 0 : steps_of(K))) + t;
            if (groups_of(K) % 8 != 0) group = group < groups_of(K) ? group : groups_of(K) - 1;  // meets zero codes
            const u8* source = x + group * (PLANES * GROUP_PITCH);
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const uint4 v = *reinterpret_cast<const uint4*>(source + plane * GROUP_PITCH + w * 16);
                    b[plane][4 * w] = v.x, b[plane][4 * w + 1] = v.y, b[plane][4 * w + 2] = v.z, b[plane][4 * w + 3] = v.w;
                }
        }
        float c[PLANES][4] = {};
        const u32 lower_words[4] = {lower.x, lower.y, lower.z, lower.w}, upper_words[4] = {upper.x, upper.y, upper.z, upper.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            u32 p[4], q[4];
            decode_half(lower_words[w], p);
            decode_half(upper_words[w], q);
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane) {
                mma_f16(c[plane], p[0], q[0], p[1], q[1], b[plane][4 * w], b[plane][4 * w + 1]);
                mma_f16(c[plane], p[2], q[2], p[3], q[3], b[plane][4 * w + 2], b[plane][4 * w + 3]);
            }
        }
        // Lanes t = 0, 1 hold the group sums of the lower half of row g, t = 2, 3 those of the upper half.
        const int first = 4 * (step + (t < 2 ? 0 : steps_of(K))) + 2 * (t & 1);
        float pair[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float planes[PLANES];
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane) planes[plane] = t < 2 ? c[plane][i] : c[plane][2 + i];
            pair[i] = join_planes(planes);
        }
        if constexpr (groups_of(K) % 8 == 0) {
            const u32 bytes = *reinterpret_cast<const u16*>(scales + first);
            const float2 by = *reinterpret_cast<const float2*>(x_scales + first);
            sum += pair[0] * by.x * e8m0_float(bytes & 0xFF);
            sum += pair[1] * by.y * e8m0_float(bytes >> 8);
        } else {
            if (first < groups_of(K)) sum += pair[0] * x_scales[first] * e8m0_float(scales[first]);
            if (first + 1 < groups_of(K)) sum += pair[1] * x_scales[first + 1] * e8m0_float(scales[first + 1]);
        }
    }
    sum += shuffle_xor(sum, 1);
    return sum + shuffle_xor(sum, 2);
}

// Groups of 32 activations, eight to a lane, on their way from global to shared memory. All lanes of a warp call.
template <int AT_ONCE>
struct Prepare {
    Eight eight[AT_ONCE];

    template <bool BY_GRID>
    DEVICE void load(const Activation* source, int groups, int begin) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = begin + i * THREADS + int(threadIdx.x);
            const uint4* from = reinterpret_cast<const uint4*>(source + (at < groups * 4 ? at : 0) * 8);
#pragma unroll
            for (int part = 0; part < int(sizeof(Eight) / 16); ++part)
                eight[i].raw[part] = BY_GRID ? load_shared_by_grid(from + part) : from[part];
        }
    }
    DEVICE void store(u8* x, float* scales, int groups, int begin) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = begin + i * THREADS + int(threadIdx.x);
            if (at - int(threadIdx.x) % 32 >= groups * 4) break;
            float v[8];
            u32 half[PLANES][4];
            eight[i].values(v);
            const float scale = prepare_group(v, half);
            if (at >= groups * 4) break;
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane)
                *reinterpret_cast<uint4*>(x + (at / 4) * (PLANES * GROUP_PITCH) + plane * GROUP_PITCH + (at % 4) * 16) =
                    make_uint4(half[plane][0], half[plane][1], half[plane][2], half[plane][3]);
            if (at % 4 == 0) scales[at / 4] = scale * DECODE_HALF;
        }
    }
};

// One row of scale bytes -> shared memory, in the largest pieces that its alignment allows.
template <int GROUPS>
struct ScaleRow {
    static constexpr int PIECE = GROUPS % 16 == 0 ? 16 : GROUPS % 8 == 0 ? 8 : GROUPS % 4 == 0 ? 4 : 1;
    static constexpr int PIECES = GROUPS / PIECE;
    DEVICE static void copy(u8* to, const u8* row, int piece) {
        if constexpr (PIECE == 1)
            to[piece] = row[piece];
        else
            copy_async<PIECE>(to + piece * PIECE, row + piece * PIECE, true);
    }
};

KERNEL(moe_single_token_fp4, THREADS, 1) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    float* const x_scales = reinterpret_cast<float*>(shared.x + X_GROUPS * (PLANES * GROUP_PITCH));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int n = call.num_experts;
    const Row* const packed = call.rows + call.first_expert;

    const u32 all_pairs = n * INTERMEDIATE;
    const u32 pair0 = u64(all_pairs) * blockIdx.x / gridDim.x, pairs = u64(all_pairs) * (blockIdx.x + 1) / gridDim.x - pair0;
    const u32 row0 = u64(HIDDEN) * blockIdx.x / gridDim.x, rows = u64(HIDDEN) * (blockIdx.x + 1) / gridDim.x - row0;
    const int up_tasks = (pairs + 7) / 8 * 2 * splits_of(HIDDEN);
    const int down_tiles = (rows + 7) / 8, down_tasks = n * down_tiles * splits_of(INTERMEDIATE);

    // A warp's tasks: first those of w1 and w3, then those of w2, each list dealt round-robin.
    const int up_own = (up_tasks - warp + WARPS - 1) / WARPS, down_own = (down_tasks - warp + WARPS - 1) / WARPS;
    u8* const ring = shared.ring[warp][0] + lane * 16;
    u8 *next_slot = ring, *oldest_slot = ring;
    const auto after = [&](u8* slot) { return slot == ring + (RING - 1) * SLOT ? ring : slot + SLOT; };
    const auto issue_task = [&](int k) {
        u8* const slot = next_slot;
        next_slot = after(slot);
        if (k < up_own) {
            const u32 id = warp + k * WARPS, rest = id / splits_of(HIDDEN), pair = rest / 2 * 8 + g;
            const bool valid = pair < pairs;
            issue<HIDDEN>({shared.up_rows[(valid ? pair : 0) * 2 + rest % 2], valid, int(id % splits_of(HIDDEN))}, slot, t);
        } else if (k < up_own + down_own) {
            const u32 id = warp + (k - up_own) * WARPS, rest = id / splits_of(INTERMEDIATE), row = rest % down_tiles * 8 + g;
            const u8* const codes = shared.down_rows[rest / down_tiles] + row * (INTERMEDIATE / 2);
            issue<INTERMEDIATE>({codes, row < rows, int(id % splits_of(INTERMEDIATE))}, slot, t);
        }
        copy_async_commit();
    };

    // The activation is asked for first: behind the weights it would wait for them.
    Prepare<(groups_of(HIDDEN) * 4 + THREADS - 1) / THREADS> x_in;
    x_in.load<false>(static_cast<const Activation*>(call.x), groups_of(HIDDEN), 0);

    for (u32 i = threadIdx.x; i < pairs * 2; i += THREADS) {
        const Row& row = packed[(pair0 + i / 2) / INTERMEDIATE];
        shared.up_rows[i] = (i % 2 ? row.w3 : row.w1) + (pair0 + i / 2) % INTERMEDIATE * u64(HIDDEN / 2);
    }
    if (threadIdx.x < n) shared.down_rows[threadIdx.x] = packed[threadIdx.x].w2 + row0 * u64(INTERMEDIATE / 2);
    sync_block();

    // Scales of w1 and w3 are the oldest group of copies; those of w2 come with the first task.
    using Up = ScaleRow<groups_of(HIDDEN)>;
    for (u32 i = threadIdx.x; i < pairs * 2 * Up::PIECES; i += THREADS) {
        const u32 piece = i % Up::PIECES, which = i / Up::PIECES, pair = pair0 + which / 2;
        const Row& row = packed[pair / INTERMEDIATE];
        Up::copy(shared.up_scales + which * groups_of(HIDDEN), (which % 2 ? row.s3 : row.s1) + pair % INTERMEDIATE * u64(groups_of(HIDDEN)), piece);
    }
    copy_async_commit();
    using Down = ScaleRow<groups_of(INTERMEDIATE)>;
    for (u32 i = threadIdx.x; i < n * rows * Down::PIECES; i += THREADS) {
        const u32 piece = i % Down::PIECES, which = i / Down::PIECES;
        const u8* const row = packed[which / rows].s2 + (row0 + which % rows) * u64(groups_of(INTERMEDIATE));
        Down::copy(shared.down_scales + which * groups_of(INTERMEDIATE), row, piece);
    }
    for (int k = 0; k < RING - 1; ++k) issue_task(k);

    if (warp == WARPS - 1) {  // which experts the token uses, its weights, and how many used ones come before
        int used = 0;
        for (int e = lane; e - lane < call.first_expert + n; e += 32) {
            float route = 0;
            bool uses = false;
            for (int k = 0; k < call.top_k; ++k)
                if (e < call.first_expert + n && call.ids[k] == call.experts[e]) uses = true, route = call.weights[k];
            const u32 users = lanes_with(uses);
            if (e >= call.first_expert && e < call.first_expert + n) {
                shared.route[e - call.first_expert] = route;
                shared.place[e - call.first_expert] = uses ? used + count_bits(users & ((1u << lane) - 1)) : -1;
            }
            used += count_bits(users);
        }
    }
    x_in.store(shared.x, x_scales, groups_of(HIDDEN), 0);
    copy_async_wait<RING - 1>();
    sync_block();
    for (int k = 0; k < up_own; ++k) {
        issue_task(k + RING - 1);
        copy_async_wait<RING - 1>();
        const int id = warp + k * WARPS, split = id % splits_of(HIDDEN), rest = id / splits_of(HIDDEN);
        const u32 pair = u32(rest / 2) * 8 + g, which = (pair < pairs ? pair : 0) * 2 + rest % 2;
        const float sum = consume<HIDDEN>(oldest_slot, shared.x, x_scales, shared.up_scales + which * groups_of(HIDDEN), split, lane);
        oldest_slot = after(oldest_slot);
        if (t == 0 && pair < pairs) shared.sums[which * splits_of(HIDDEN) + split] = sum;
    }
    copy_async_wait<RING - 2>();  // the scales of w2, also where a warp had no task yet
    sync_block();

    bool finite = true;
    for (u32 pair = threadIdx.x; pair < pairs; pair += THREADS) {
        float both[2] = {};
#pragma unroll
        for (int m = 0; m < 2; ++m)
            for (int split = 0; split < splits_of(HIDDEN); ++split) both[m] += shared.sums[(pair * 2 + m) * splits_of(HIDDEN) + split];
        finite = finite && is_finite(both[0]) && is_finite(both[1]);
        static_cast<Activation*>(call.act)[pair0 + pair] =
            stored(swiglu(rounded(both[0]), rounded(both[1]), shared.route[(pair0 + pair) / INTERMEDIATE]));
    }
    sync_grid(call.barrier);

    for (int begin = 0; begin < n * groups_of(INTERMEDIATE) * 4; begin += 4 * THREADS) {
        Prepare<4> act_in;
        act_in.load<true>(static_cast<const Activation*>(call.act), n * groups_of(INTERMEDIATE), begin);
        act_in.store(shared.x, x_scales, n * groups_of(INTERMEDIATE), begin);
    }
    sync_block();
    for (int k = 0; k < down_own; ++k) {
        issue_task(up_own + k + RING - 1);
        copy_async_wait<RING - 1>();
        const int id = warp + k * WARPS, split = id % splits_of(INTERMEDIATE), rest = id / splits_of(INTERMEDIATE);
        const int expert = rest / down_tiles;
        const u32 row = u32(rest % down_tiles) * 8 + g, which = expert * rows + (row < rows ? row : 0);
        const int group0 = expert * groups_of(INTERMEDIATE);
        const float sum = consume<INTERMEDIATE>(oldest_slot, shared.x + group0 * (PLANES * GROUP_PITCH), x_scales + group0,
                                                shared.down_scales + which * groups_of(INTERMEDIATE), split, lane);
        oldest_slot = after(oldest_slot);
        if (t == 0 && row < rows) shared.sums[which * splits_of(INTERMEDIATE) + split] = sum;
    }
    copy_async_wait<0>();
    sync_block();

    for (u32 row = threadIdx.x; row < rows; row += THREADS) {
        float* const partial = static_cast<float*>(call.out) + row0 + row;
        float total = call.accumulate && !call.exact ? *partial : 0;
        for (int e = 0; e < n; ++e) {
            if (shared.place[e] < 0) continue;
            float y = 0;
            for (int split = 0; split < splits_of(INTERMEDIATE); ++split) y += shared.sums[(e * rows + row) * splits_of(INTERMEDIATE) + split];
            finite = finite && is_finite(y);
            if (call.exact)
                static_cast<Activation*>(call.out)[shared.place[e] * u64(HIDDEN) + row0 + row] = stored(y);
            else
                total += rounded(y);
        }
        if (!call.exact) *partial = total;
    }
    if (!finite) report(call.status, 1);
}
