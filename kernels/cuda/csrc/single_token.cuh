// What the kernels of one token have in common: how a sum over K is cut, how activations come to lie in shared memory, and
// how blocks send each other those before w2.
#pragma once

using Token = OneToken<MAX_EXPERTS>;
constexpr int THREADS = WARPS * 32;  // those that compute

// A step is 2 x 128 columns, those of the lower and of the upper half of K; a split is STEPS steps, one term of a row's sum.
DEVICE constexpr int groups_of(int k) { return k / 32; }
DEVICE constexpr int steps_of(int k) { return ((groups_of(k) + 3) / 4 + 1) / 2; }
DEVICE constexpr int splits_of(int k) { return (steps_of(k) + STEPS - 1) / STEPS; }
DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }
DEVICE constexpr int padded(int bytes) { return (bytes + 15) / 16 * 16; }

constexpr int GROUP_BYTES = PLANES * 80;  // 32 prepared activations: 64 bytes a plane, and 16 against bank conflicts
constexpr int IN_WORD = 4 / sizeof(Activation);  // activations that travel together
// Groups that x or the activations before w2 take, whichever are more.
constexpr int X_GROUPS = larger(8 * steps_of(HIDDEN), MAX_EXPERTS * 8 * steps_of(INTERMEDIATE));

// Groups of 32 activations, eight to a lane, on their way from global to shared memory. All lanes of a warp call.
template <int K, int AT_ONCE>
struct Prepare {
    Eight eight[AT_ONCE];

    DEVICE void load(const Activation* source, int groups) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = i * THREADS + int(threadIdx.x);
            const uint4* from = reinterpret_cast<const uint4*>(source + (at < groups * 4 ? at : 0) * 8);
#pragma unroll
            for (int part = 0; part < int(sizeof(Eight) / 16); ++part) eight[i].raw[part] = from[part];
        }
    }
    // The same from words that the blocks of this launch send.
    DEVICE void receive(const u64* source, u32 launch, int groups, int begin) {
        constexpr int WORDS = 8 / IN_WORD;
        for (bool arrived = false; !arrived;) {
            arrived = true;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int at = begin + i * THREADS + int(threadIdx.x);
                if (at < groups * 4)
                    arrived = poll_words<WORDS / 2>(source + at * WORDS, launch, reinterpret_cast<u32(&)[WORDS]>(eight[i].raw)) && arrived;
            }
            if (!arrived) let_others_run();
        }
    }
    DEVICE void store(u8* x, float* x_scales, int groups, int begin) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = begin + i * THREADS + int(threadIdx.x);
            if (at - int(threadIdx.x) % 32 >= groups * 4) break;
            float v[8];
            u32 half[PLANES][4];
            eight[i].values(v);
            const float scale = prepare_group(v, half);
            if (at >= groups * 4) break;
            const int group = at / 4 + at / 4 / groups_of(K) * (8 * steps_of(K) - groups_of(K));  // a K has whole steps
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane)
                *reinterpret_cast<uint4*>(x + group * GROUP_BYTES + plane * 80 + at % 4 * 16) =
                    make_uint4(half[plane][0], half[plane][1], half[plane][2], half[plane][3]);
            if (at % 4 == 0) x_scales[group] = scale * DECODE_HALF;
        }
    }
};

// The activations of a block's pairs, from the splits' sums [w1, w3][pair][split], to all blocks. False if a sum is not finite.
DEVICE bool send_activations(const Token& call, const float* sums, u32 pair0, u32 pairs, u32 launch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool finite = true;
    for (u32 begin = warp * 32; begin < pairs; begin += THREADS) {
        const u32 pair = begin + lane < pairs ? begin + lane : pairs - 1;
        float both[2] = {};
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int split = 0; split < splits_of(HIDDEN); ++split) both[m] += sums[(m * pairs + pair) * splits_of(HIDDEN) + split];
        finite = finite && is_finite(both[0]) && is_finite(both[1]);
        const float act = swiglu(rounded(both[0]), rounded(both[1]), call.drawn[(pair0 + pair) / INTERMEDIATE].route);
        u32 word = word_of(stored(act));
        if (IN_WORD == 2) word |= shuffle_xor(word, 1) << 16;
        if (begin + lane < pairs && lane % IN_WORD == 0) send_word(call.act + (pair0 + pair) / IN_WORD, word, launch);
    }
    return finite;
}
// Those of all blocks, AT_ONCE x 8 to a thread at a time.
template <int AT_ONCE>
DEVICE void receive_activations(const Token& call, u8* x, float* x_scales, u32 launch) {
    const int groups = call.num_experts * groups_of(INTERMEDIATE);
    for (int begin = 0; begin < groups * 4; begin += AT_ONCE * THREADS) {
        Prepare<INTERMEDIATE, AT_ONCE> act_in{};
        act_in.receive(call.act, launch, groups, begin);
        act_in.store(x, x_scales, groups, begin);
    }
}
