// A rank's partial: the sum of its rows of a token in ascending expert id. Block = token.
#include "device.cuh"
#include "formats.cuh"

constexpr int THREADS = 256;

KERNEL(combine_rows, THREADS, 1) {
    int* const places = reinterpret_cast<int*>(shared_memory());  // of this token's rows, ascending; [top_k] is their number
    if (threadIdx.x == 0) {
        int found = 0;
        for (int k = 0; k < call.top_k; ++k) {
            const int place = call.place_of[blockIdx.x * call.top_k + k];
            if (place < 0) continue;
            int at = found++;
            for (; at > 0 && places[at - 1] > place; --at) places[at] = places[at - 1];
            places[at] = place;
        }
        places[call.top_k] = found;
    }
    sync_block();
    const int found = places[call.top_k];
    float* const out = static_cast<float*>(call.out) + blockIdx.x * u64(HIDDEN);
    for (int h = threadIdx.x * 8; h < HIDDEN; h += THREADS * 8) {
        float total[8];
        for (int i = 0; i < 8; ++i) total[i] = call.accumulate ? out[h + i] : 0;
        for (int k = 0; k < found; ++k) {
            Eight eight;
            const uint4* from = reinterpret_cast<const uint4*>(static_cast<const Activation*>(call.y) + places[k] * u64(HIDDEN) + h);
#pragma unroll
            for (int part = 0; part < int(sizeof(Eight) / 16); ++part) eight.raw[part] = from[part];
            float v[8];
            eight.values(v);
#pragma unroll
            for (int i = 0; i < 8; ++i) total[i] += v[i];
        }
#pragma unroll
        for (int i = 0; i < 8; i += 4) *reinterpret_cast<float4*>(out + h + i) = make_float4(total[i], total[i + 1], total[i + 2], total[i + 3]);
    }
}
