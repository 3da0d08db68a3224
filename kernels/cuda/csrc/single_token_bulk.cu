// One token over the experts that a rank holds, where the card has an engine for bulk copies (capability 9.0 up).
//
// The arithmetic is that of `single_token.cu`; what differs is how codes come. One thread has tiles of 8 rows copied, in
// the order in which they are needed, into a ring of stages: a tile of w1 and w3, or a few of w2. As soon as a tile has
// landed, a team of warps computes it, a split of K each; w2 lands while blocks wait for each other.
//
// Rows lie in a stage as in memory, so the same chunk of all rows is in the same banks. Lanes of odd rows therefore take
// the two chunks of a step in the other order; their sums come out in the other half of the tensor cores' tile.
#include "device.cuh"
#include "formats.cuh"
#include "bulk.cuh"
#include "single_token.cuh"

static_assert(u64(larger(MAX_EXPERTS * INTERMEDIATE, HIDDEN)) * BLOCKS <= 0xFFFFFFFFu, "a block counts in 32 bits");
static_assert(HIDDEN >= BLOCKS, "every block has rows of w2");
static_assert(PLANES == 1 && STEPS == 2 && HIDDEN % 512 == 0 && INTERMEDIATE % 256 == 0, "whole steps, and scales in pieces of 16 bytes");

constexpr int TILE = 8;
DEVICE constexpr int tiles_of(int rows) { return (rows + TILE - 1) / TILE; }
DEVICE constexpr int tile_bytes(int k) { return TILE * k / 2; }
DEVICE constexpr int stage_tiles(int k) { return larger(1, tile_bytes(HIDDEN) / tile_bytes(k)); }
constexpr int STAGE_TILES = stage_tiles(INTERMEDIATE);
constexpr int STAGE = larger(tile_bytes(HIDDEN), STAGE_TILES * tile_bytes(INTERMEDIATE));
constexpr int STAGE_TASKS = larger(splits_of(HIDDEN), STAGE_TILES * splits_of(INTERMEDIATE));
constexpr int DOWN_SCALES = padded(MAX_ROWS * groups_of(INTERMEDIATE) + 15);  // of an expert
constexpr int SUMS = TILE * larger(tiles_of(MAX_PAIRS * 2) * splits_of(HIDDEN), MAX_EXPERTS * tiles_of(MAX_ROWS) * splits_of(INTERMEDIATE));
static_assert(larger(splits_of(HIDDEN), splits_of(INTERMEDIATE)) <= WARPS, "a team has a warp for each split");

// The host computes its size (`plan.py`).
struct Shared {
    u8 stages[RING][STAGE];
    u8 up_scales[tiles_of(MAX_PAIRS * 2) * TILE * groups_of(HIDDEN)];  // [w1, w3][pair][group]
    u8 down_scales[MAX_EXPERTS * DOWN_SCALES];                         // [expert], there from the 16-byte boundary before the first row
    u8 x[X_GROUPS * GROUP_BYTES];
    float x_scales[X_GROUPS];
    float sums[SUMS];  // [w1, w3][pair][split], later [expert][row, whole tiles][split]
    u64 barriers[2 * RING + 2];
    u32 launch;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host plans less shared memory than this");
static_assert(RING % 2 == 0, "a slot has the same teams in all its phases");
constexpr int ALL = 1, COMPUTING = 2;           // meetings: ..
constexpr int ALL_THREADS = THREADS + 32;       // .. of those that compute and of the feeder's warp

// By shared address: what of a slot or a run of scales has landed, and what of a slot has been read.
struct Barriers {
    u32 first;
    DEVICE explicit Barriers(const Shared& shared) : first(shared_address(shared.barriers)) { keep(first); }
    DEVICE u32 full(u32 slot) const { return first + slot * 16; }
    DEVICE u32 empty(u32 slot) const { return first + slot * 16 + 8; }
    DEVICE u32 up_scales() const { return full(RING); }
    DEVICE u32 down_scales() const { return empty(RING); }
};

// What a block owns: a run of pairs (rows of w1 and w3), counted through all experts, and a run of rows of w2 of each.
struct Run {
    u32 pair0, pairs, row0, rows;
    u32 up_stages, expert_tiles, down_tiles;
    DEVICE explicit Run(int experts) {
        const u32 words = experts * (INTERMEDIATE / IN_WORD);
        pair0 = words * blockIdx.x / BLOCKS * IN_WORD, pairs = words * (blockIdx.x + 1) / BLOCKS * IN_WORD - pair0;
        row0 = HIDDEN * blockIdx.x / BLOCKS, rows = HIDDEN * (blockIdx.x + 1) / BLOCKS - row0;
        up_stages = tiles_of(pairs * 2);
        expert_tiles = tiles_of(rows), down_tiles = experts * expert_tiles;
    }
};

// A place in the ring and the parity of the phase in which it is used.
struct Slot {
    u32 index = 0, parity = 0;
    template <int BY>
    DEVICE void advance() {
        index += BY % RING, parity ^= BY / RING % 2;
        if (index >= RING) index -= RING, parity ^= 1;
    }
};

// The one thread that asks for copies.
struct Feeder {
    static constexpr int UP_GROUPS = groups_of(HIDDEN), DOWN_GROUPS = groups_of(INTERMEDIATE);
    const Token& call;
    const Run& run;
    Shared& shared;
    Barriers barriers;

    DEVICE void bring_up_scales() {
        make_barrier(barriers.up_scales(), 1);
        publish_barriers();
        expect_bytes(barriers.up_scales(), run.pairs * 2 * UP_GROUPS);
        for (u32 pair = 0; pair < run.pairs;) {
            const u32 in_expert = (run.pair0 + pair) % INTERMEDIATE, count = min(run.pairs - pair, INTERMEDIATE - in_expert);
            const Row& of = call.drawn[(run.pair0 + pair) / INTERMEDIATE].row;
            bulk_copy(shared.up_scales + pair * UP_GROUPS, of.s1 + in_expert * u64(UP_GROUPS), count * UP_GROUPS, barriers.up_scales());
            bulk_copy(shared.up_scales + (run.pairs + pair) * UP_GROUPS, of.s3 + in_expert * u64(UP_GROUPS), count * UP_GROUPS, barriers.up_scales());
            pair += count;
        }
    }
    DEVICE void bring_up(u32 stage, u32 slot) {
        const u32 full = barriers.full(slot);
        const u32 first = stage * TILE, count = min(u32(TILE), run.pairs * 2 - first);
        expect_bytes(full, count * (HIDDEN / 2));
        for (u32 row = 0; row < count;) {  // a piece lies in one matrix
            const bool gate = first + row < run.pairs;
            const u32 pair = first + row - (gate ? 0 : run.pairs), in_expert = (run.pair0 + pair) % INTERMEDIATE;
            const u32 piece = min(min(count - row, run.pairs - pair), INTERMEDIATE - in_expert);
            const Row& of = call.drawn[(run.pair0 + pair) / INTERMEDIATE].row;
            bulk_copy(shared.stages[slot] + row * (HIDDEN / 2), (gate ? of.w1 : of.w3) + in_expert * u64(HIDDEN / 2), piece * (HIDDEN / 2), full);
            row += piece;
        }
    }
    // The first copies do not wait until the barriers of all others are made.
    DEVICE void begin() {
        make_barrier(barriers.full(0), 1);
        publish_barriers();
        if (run.up_stages > 0) bring_up(0, 0);
        bring_up_scales();
        make_barrier(barriers.empty(0), STAGE_TASKS * 32), make_barrier(barriers.down_scales(), 1);
        for (int slot = 1; slot < RING; ++slot) make_barrier(barriers.full(slot), 1), make_barrier(barriers.empty(slot), STAGE_TASKS * 32);
        publish_barriers();
    }
    DEVICE void go_on() {
        Slot slot;
        bool again = false;  // was the slot filled before?
        const auto next_slot = [&] {
            slot.advance<1>();
            again = again || slot.index == 0;
        };
        for (u32 stage = 0; stage < run.up_stages; ++stage, next_slot()) {
            if (stage == 0) continue;  // brought before
            if (again) wait_for(barriers.empty(slot.index), slot.parity ^ 1);
            bring_up(stage, slot.index);
        }

        const u32 before = run.row0 * DOWN_GROUPS % 16, size = padded(before + run.rows * DOWN_GROUPS);  // whole pieces of 16 bytes around the rows
        expect_bytes(barriers.down_scales(), call.num_experts * size);
        for (int e = 0; e < call.num_experts; ++e)
            bulk_copy(shared.down_scales + e * DOWN_SCALES, call.drawn[e].row.s2 + run.row0 * u64(DOWN_GROUPS) - before, size, barriers.down_scales());
        u32 expert = 0, row = 0;
        for (u32 tile = 0; tile < run.down_tiles; next_slot()) {
            if (again) wait_for(barriers.empty(slot.index), slot.parity ^ 1);
            const u32 full = barriers.full(slot.index);
            u32 bytes = 0;
            for (u32 i = 0, r = row; i < STAGE_TILES && tile + i < run.down_tiles; ++i) {
                bytes += min(u32(TILE), run.rows - r) * (INTERMEDIATE / 2);
                r = r + TILE < run.rows ? r + TILE : 0;
            }
            expect_bytes(full, bytes);
            for (u32 i = 0; i < STAGE_TILES && tile < run.down_tiles; ++i, ++tile) {
                bulk_copy(shared.stages[slot.index] + i * tile_bytes(INTERMEDIATE), call.drawn[expert].row.w2 + (run.row0 + row) * u64(INTERMEDIATE / 2),
                          min(u32(TILE), run.rows - row) * (INTERMEDIATE / 2), full);
                row += TILE;
                if (row >= run.rows) row = 0, ++expert;
            }
        }
    }
};

// How many teams there are where there are warps for `most`: as many as take one or two stages at a time, or divide one.
// A slot is then always the same teams', and nobody waits for a phase of it before having seen the last one end.
DEVICE constexpr int teams_of(int tiles, int most) {
    if (most >= tiles) return most >= 2 * tiles ? 2 * tiles : tiles;
    while (tiles % most) --most;
    return most;
}

// How the splits of K are dealt: a team has a warp for each. Chunks are 64 bytes of a row: 0, 1, .. of the lower half of
// K, then of the upper. In step s of a split the tensor cores take a lower and an upper chunk that lie in different banks.
template <int K>
struct Team {
    static constexpr int SPLITS = splits_of(K), COUNT = teams_of(stage_tiles(K), WARPS / SPLITS), CHUNKS = steps_of(K);
    u32 number;
    int split;
    DEVICE explicit Team(int warp) : number(warp / SPLITS), split(warp % SPLITS) {}
    DEVICE int lower(int s) const { return split * STEPS + s; }
    DEVICE int upper(int s) const { return CHUNKS + split * STEPS + (CHUNKS % 2 ? s : s ^ 1); }
    DEVICE bool has_both_steps() const { return CHUNKS % 2 == 0 || split < SPLITS - 1; }
};

// What a lane reads in a task of its split, in bytes: of every row the same.
template <int K>
struct Lane {
    u32 codes[2];   // in a stage, from the tile's first row: the first and the second chunk of step 0, of step 1 ..
    int next;       // .. so much further for the first chunk, and so much nearer for the second if steps are crossed
    u32 scales;     // in the scales of a tile
    int next_scales;
    bool low;       // do sums of rows 0 .. 7 of the tensor cores' tile count?

    DEVICE explicit Lane(const Team<K>& team) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const bool odd = g % 2, lower = t < 2;
        const auto at = [&](bool upper, int s) { return u32(g * (K / 2) + (upper ? team.upper(s) : team.lower(s)) * 64 + t * 16); };
        codes[0] = at(odd, 0), codes[1] = at(!odd, 0);
        next = (team.CHUNKS % 2 || !odd) ? 64 : -64;
        scales = g * groups_of(K) + 4 * (lower ? team.lower(0) : team.upper(0)) + 2 * (t & 1);
        next_scales = (team.CHUNKS % 2 || lower) ? 4 : -4;
        low = lower != odd;
        keep(codes[0]), keep(codes[1]), keep(scales);
    }
};

// The activations of a split as the tensor cores take them, with the scales of the groups whose sums the lane gets.
template <int K>
struct Fragments {
    uint4 b[STEPS][4];
    float2 by[STEPS];

    // `x` and `x_scales` begin at group 0 of this K.
    DEVICE void load(const u8* x, const float* x_scales, const Team<K>& team) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const bool feeds = (g & 3) == t;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            if (s > 0 && !team.has_both_steps()) break;
            const u8* const from = x + (4 * (g < 4 ? team.lower(s) : team.upper(s)) + t) * GROUP_BYTES;
#pragma unroll
            for (int w = 0; w < 4; ++w) b[s][w] = feeds ? *reinterpret_cast<const uint4*>(from + w * 16) : make_uint4(0, 0, 0, 0);
            by[s] = *reinterpret_cast<const float2*>(x_scales + 4 * (t < 2 ? team.lower(s) : team.upper(s)) + 2 * (t & 1));
        }
    }
};

// The split's sum of row g, the same in the row's four lanes. `codes` and `scales` are those of the tile; `release` is
// called once the codes are in registers.
template <int K, int COUNT, typename Release>
DEVICE float row_sum(const u8* codes, const u8* scales, const Fragments<K>& x, const Lane<K>& own, u32 byte, Release release) {
    uint4 words[COUNT][2];
    u32 bytes[COUNT];
#pragma unroll
    for (int s = 0; s < COUNT; ++s) {
        words[s][0] = *reinterpret_cast<const uint4*>(codes + own.codes[0] + s * own.next);
        words[s][1] = *reinterpret_cast<const uint4*>(codes + own.codes[1] + s * (Team<K>::CHUNKS % 2 ? own.next : -own.next));
        bytes[s] = *reinterpret_cast<const u16*>(scales + own.scales + s * own.next_scales);
    }
    release();
    float c[COUNT][4] = {};
#pragma unroll
    for (int s = 0; s < COUNT; ++s)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            u32 p[4], q[4];
            decode_half(reinterpret_cast<const u32*>(&words[s][0])[w], byte, p);
            decode_half(reinterpret_cast<const u32*>(&words[s][1])[w], byte, q);
            mma_f16(c[s], p[0], q[0], p[1], q[1], x.b[s][w].x, x.b[s][w].y);
            mma_f16(c[s], p[2], q[2], p[3], q[3], x.b[s][w].z, x.b[s][w].w);
        }
    float sum = 0;
#pragma unroll
    for (int s = 0; s < COUNT; ++s) {
        sum += (own.low ? c[s][0] : c[s][2]) * x.by[s].x * e8m0_float(bytes[s] & 0xFF);
        sum += (own.low ? c[s][1] : c[s][3]) * x.by[s].y * e8m0_float(bytes[s] >> 8);
    }
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    return sum;
}

KERNEL_OF(Token, moe_single_token_fp4, ALL_THREADS, 1) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int n = call.num_experts;
    const Run run(n);
    const Barriers barriers(shared);
    if (warp == WARPS) {
        Feeder feeder{call, run, shared, barriers};
        if (lane == 0) feeder.begin();
        sync_warp();
        announce<ALL, ALL_THREADS>();
        if (lane == 0) feeder.go_on();
        return;
    }

    Prepare<HIDDEN, (groups_of(HIDDEN) * 4 + THREADS - 1) / THREADS> x_in{};
    x_in.load(static_cast<const Activation*>(call.x), groups_of(HIDDEN));
    if (threadIdx.x == 0) shared.launch = u32(arrive(call.arrivals) / BLOCKS) + 1;
    x_in.store(shared.x, shared.x_scales, groups_of(HIDDEN), 0);
    meet<ALL, ALL_THREADS>();

    // Each lane says when it has a task's codes in registers; one task speaks for those that its stage has less than others.
    const auto release = [&](u32 slot, u32 tasks) { arrive_at(barriers.empty(slot), tasks); };
    {
        const Team<HIDDEN> team(warp);
        Fragments<HIDDEN> x;
        x.load(shared.x, shared.x_scales, team);
        wait_for(barriers.up_scales(), 0);
        Slot slot{team.number % RING, team.number / RING % 2};
        const u32 tasks = team.split == 0 ? STAGE_TASKS - team.SPLITS + 1 : 1;
        const Lane<HIDDEN> own(team);
        u32 row = team.number * TILE;
        float* sums = shared.sums + (row + g) * team.SPLITS + team.split;
        for (u32 stage = team.number; team.number < team.COUNT && stage < run.up_stages; stage += team.COUNT) {
            wait_for(barriers.full(slot.index), slot.parity);
            const float sum = row_sum<HIDDEN, STEPS>(shared.stages[slot.index], shared.up_scales + row * groups_of(HIDDEN), x, own, call.byte,
                                                     [&] { release(slot.index, tasks); });
            if (t == 0) *sums = sum;
            sums += team.COUNT * TILE * team.SPLITS;
            slot.advance<team.COUNT>();
            row += team.COUNT * TILE;
        }
    }
    meet<COMPUTING, THREADS>();

    constexpr int SPLITS = splits_of(INTERMEDIATE), GROUPS = groups_of(INTERMEDIATE);
    const Team<INTERMEDIATE> team(warp);
    Fragments<INTERMEDIATE> x;
    const u32 stage = run.up_stages + team.number / STAGE_TILES, before = run.row0 * GROUPS % 16;
    Slot slot{stage % RING, stage / RING % 2};
    u32 in_stage = team.number % STAGE_TILES, expert = 0, row = team.number * TILE, loaded = ~0u;  // expert of `x`
    const Lane<INTERMEDIATE> own(team);
    float* sums = shared.sums + (row + g) * SPLITS + team.split;
    for (; row >= run.expert_tiles * TILE; row -= run.expert_tiles * TILE) ++expert;

    const u32 launch = shared.launch;
    bool finite = send_activations(call, shared.sums, run.pair0, run.pairs, launch);
    constexpr int MOST = (MAX_EXPERTS * groups_of(INTERMEDIATE) * 4 + THREADS - 1) / THREADS;
    receive_activations<(MOST < 4 ? MOST : 4)>(call, shared.x, shared.x_scales, launch);
    wait_for(barriers.down_scales(), 0);
    meet<COMPUTING, THREADS>();

    for (u32 tile = team.number; team.number < team.COUNT && tile < run.down_tiles; tile += team.COUNT) {
        if (expert != loaded) x.load(shared.x + expert * (GROUPS * GROUP_BYTES), shared.x_scales + expert * GROUPS, team), loaded = expert;
        wait_for(barriers.full(slot.index), slot.parity);
        const u8* const codes = shared.stages[slot.index] + in_stage * tile_bytes(INTERMEDIATE);
        const u8* const scales = shared.down_scales + expert * DOWN_SCALES + before + row * GROUPS;
        // Nothing comes after the last stage, so only a full one must be accounted for.
        const auto read = [&] { release(slot.index, in_stage == 0 && team.split == 0 ? STAGE_TASKS - STAGE_TILES * SPLITS + 1 : 1); };
        const float sum = team.has_both_steps() ? row_sum<INTERMEDIATE, STEPS>(codes, scales, x, own, call.byte, read)
                                                : row_sum<INTERMEDIATE, 1>(codes, scales, x, own, call.byte, read);
        if (t == 0) *sums = sum;
        sums += team.COUNT * TILE * SPLITS;
        for (row += team.COUNT * TILE; row >= run.expert_tiles * TILE; row -= run.expert_tiles * TILE) ++expert;
        slot.advance<team.COUNT / STAGE_TILES>();
        in_stage += team.COUNT % STAGE_TILES;
        if (in_stage >= STAGE_TILES) in_stage -= STAGE_TILES, slot.advance<1>();
    }
    meet<COMPUTING, THREADS>();

    float* const partial = static_cast<float*>(call.out) + run.row0;
    for (u32 row = threadIdx.x; row < run.rows; row += THREADS) {
        float total = !call.exact && call.accumulate ? partial[row] : 0;
        for (int e = 0; e < n; ++e) {
            float y = 0;
#pragma unroll
            for (int split = 0; split < SPLITS; ++split) y += shared.sums[(e * run.expert_tiles * TILE + row) * SPLITS + split];
            finite = finite && is_finite(y);
            total += rounded(y);
            if (call.exact) static_cast<Activation*>(call.out)[(call.first_place + e) * u64(HIDDEN) + run.row0 + row] = stored(y);
        }
        if (!call.exact) partial[row] = total;
    }
    if (!finite) report(call.status, 1);
}
