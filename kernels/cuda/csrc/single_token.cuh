// What the kernels of one token have in common: how a sum over K is cut, and how activations come to lie in shared memory.
#pragma once

constexpr int THREADS = WARPS * 32;  // those that compute

// A step is 2 x 128 columns, those of the lower and of the upper half of K; a split is STEPS steps, one term of a row's sum.
DEVICE constexpr int groups_of(int k) { return k / 32; }
DEVICE constexpr int steps_of(int k) { return ((groups_of(k) + 3) / 4 + 1) / 2; }
DEVICE constexpr int splits_of(int k) { return (steps_of(k) + STEPS - 1) / STEPS; }
DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

constexpr int GROUP_BYTES = PLANES * 80;  // 32 prepared activations: 64 bytes a plane, and 16 against bank conflicts
constexpr int IN_WORD = 4 / sizeof(Activation);  // activations that travel together
// Groups that x or the activations before w2 take, whichever are more.
constexpr int X_GROUPS = larger(8 * steps_of(HIDDEN), MAX_EXPERTS * 8 * steps_of(INTERMEDIATE));

// Groups of 32 activations, eight to a lane, on their way from global to shared memory by COUNT threads, of which this is
// number `index`. All lanes of a warp call.
template <int K, int AT_ONCE, int COUNT>
struct Prepare {
    u32 index;
    Eight eight[AT_ONCE];

    DEVICE void load(const Activation* source, int groups) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = i * COUNT + int(index);
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
                const int at = begin + i * COUNT + int(index);
                if (at < groups * 4)
                    arrived = poll_words<WORDS / 2>(source + at * WORDS, launch, reinterpret_cast<u32(&)[WORDS]>(eight[i].raw)) && arrived;
            }
            if (!arrived) let_others_run();
        }
    }
    DEVICE void store(u8* x, float* x_scales, int groups, int begin) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = begin + i * COUNT + int(index);
            if (at - int(index) % 32 >= groups * 4) break;
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
