// Tokens of a call, grouped by expert: block e lists the (token, place) pairs of its expert in ascending order.
//
// counts [n], offsets [n + 1] (exclusive sums), pairs [total] = token * top_k + place, and place_of [T * top_k], the
// inverse of pairs: -1 where an expert belongs to another rank.
#include "device.cuh"

constexpr int THREADS = 256;

struct Shared {
    u32 held[(MAX_EXPERT_ID + 32) / 32];  // one bit per expert id: does this rank hold it?
    int before[THREADS / 32];             // held ids below this block's expert, by warp
    int mine[THREADS / 32];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host plans more shared memory than this");

KERNEL(group_tokens, THREADS, 1) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int n = call.num_experts, entries = call.tokens * call.top_k, mine = call.experts[blockIdx.x];

    for (int i = threadIdx.x; i < (MAX_EXPERT_ID + 32) / 32; i += THREADS) shared.held[i] = 0;
    sync_block();
    for (int i = threadIdx.x; i < n; i += THREADS) atomic_or_shared(&shared.held[call.experts[i] / 32], 1u << (call.experts[i] % 32));
    sync_block();
    const auto held = [&](int id) { return id >= 0 && id <= MAX_EXPERT_ID && (shared.held[id / 32] >> (id % 32) & 1); };

    // Every warp takes an equal run of entries; first it counts, then, knowing where its own begin, it writes.
    const int run = ((entries + THREADS / 32 - 1) / (THREADS / 32) + 31) / 32 * 32, begin = warp * run;
    const int end = begin + run < entries ? begin + run : entries;
    int before = 0, own = 0;
    for (int i = begin; i < end; i += 32) {
        const int id = i + lane < end ? call.ids[i + lane] : -1;
        own += count_bits(lanes_with(id == mine));
        before += count_bits(lanes_with(held(id) && id < mine));
    }
    if (lane == 0) shared.before[warp] = before, shared.mine[warp] = own;
    sync_block();
    int offset = 0, at = 0, count = 0;
    for (int w = 0; w < THREADS / 32; ++w) {
        offset += shared.before[w];
        at += w < warp ? shared.mine[w] : 0;
        count += shared.mine[w];
    }
    if (threadIdx.x == 0) {
        call.counts[blockIdx.x] = count;
        call.offsets[blockIdx.x] = offset;
        if (int(blockIdx.x) == n - 1) call.offsets[n] = offset + count;
    }
    at += offset;
    for (int i = begin; i < end; i += 32) {
        const int id = i + lane < end ? call.ids[i + lane] : -1;
        const u32 users = lanes_with(id == mine);
        if (id == mine) {
            const int place = at + count_bits(users & ((1u << lane) - 1));
            call.pairs[place] = i + lane;
            call.place_of[i + lane] = place;
        } else if (blockIdx.x == 0 && i + lane < end && !held(id)) {
            call.place_of[i + lane] = -1;
        }
        at += count_bits(users);
    }
}
