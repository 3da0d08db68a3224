// The machine: every instruction that is more than C++. A host that emulates these few functions runs the kernels.
//
// Lanes of a warp are named (g, t) = (lane / 4, lane % 4) after the fragments of the tensor-core instructions.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#include "call.cuh"  // generated from params.py

#define DEVICE __device__ __forceinline__
#define KERNEL_OF(Parameters, name, threads, blocks) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Parameters call)
#define KERNEL(name, threads, blocks) KERNEL_OF(Call, name, threads, blocks)

constexpr u32 ALL_LANES = 0xFFFFFFFFu;

DEVICE u8* shared_memory() {
    extern __shared__ __align__(1024) u8 bytes[];
    return bytes;
}
DEVICE u32 shared_address(const void* pointer) {
    u64 address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(pointer));
    return static_cast<u32>(address);
}
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
template <typename T>
DEVICE T shuffle_xor(T value, int mask) {
    return __shfl_xor_sync(ALL_LANES, value, mask);
}
template <typename T>
DEVICE T shuffle(T value, int lane) {
    return __shfl_sync(ALL_LANES, value, lane);
}
DEVICE bool any_lane(bool predicate) { return __any_sync(ALL_LANES, predicate); }
DEVICE u32 lanes_with(bool predicate) { return __ballot_sync(ALL_LANES, predicate); }
DEVICE int count_bits(u32 bits) { return __popc(bits); }

DEVICE u32 float_bits(float x) { return __float_as_uint(x); }
DEVICE float bits_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 half_bits(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
DEVICE float half_float(u32 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<u16>(bits)));
    return x;
}
#define HAS_E4M3 (__CUDA_ARCH__ >= 890)
#if HAS_E4M3
DEVICE u32 e4m3_halves_by_conversion(float low, float high) {
    u16 codes;
    u32 halves;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    return halves;
}
#endif
// The bits of a where the mask has ones, of b elsewhere: one instruction, which the compiler takes apart when it may.
DEVICE u32 choose(u32 mask, u32 a, u32 b) {
    u32 bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(bits) : "r"(mask), "r"(a), "r"(b));
    return bits;
}
// Low 32 bits of a b + c, never turned into shifts.
DEVICE u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 sum;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}
DEVICE u32 max_u32(u32 a, u32 b) {
    u32 larger;
    asm("max.u32 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// Makes the compiler hold a value in a register instead of computing it where it is used.
DEVICE void keep(u32& value) { asm volatile("" : "+r"(value)); }

// Copies BYTES (4, 8 or 16, both ends aligned to it) to a `shared_address` in the background; writes zeros if not `valid`.
template <int BYTES>
DEVICE void copy_async(u32 to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(valid ? BYTES : 0) : "memory");
#else
    if constexpr (BYTES == 16) {
        const uint4 v = valid ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
    } else {
#pragma unroll
        for (int i = 0; i < BYTES; i += 4) {
            const u32 word = valid ? static_cast<const u32*>(from)[i / 4] : 0;
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + i), "r"(word) : "memory");
        }
    }
#endif
}
DEVICE void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Returns when all but the newest PENDING groups of this thread's copies have landed.
template <int PENDING>
DEVICE void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// c[16 x 8] += a[16 x 16] b[16 x 8], fp16 in, fp32 out. a0: row g, k 2t 2t+1; a1: row g+8; a2, a3: the same rows, k + 8;
// b0: k 2t 2t+1, column g; b1: k + 8; c: row g columns 2t 2t+1, row g+8 columns 2t 2t+1.
DEVICE void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a2), "r"(a3), "r"(b1));
#endif
}

// One more block has started; how many did before, in all launches. One thread of every block calls it once.
DEVICE u64 arrive(u64* arrivals) { return atomicAdd(arrivals, 1ull); }

// A word and the number of the launch it belongs to travel in one store, so that blocks of a cooperative launch hand each
// other values without a meeting: who reads the number has the word.
DEVICE void send_word(u64* to, u32 word, u32 launch) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(u64(launch) << 32 | word) : "memory");
}
// COUNT pairs of words that other blocks send in this launch; 16-byte aligned.
template <int COUNT>
DEVICE bool poll_words(const u64* from, u32 launch, u32 (&words)[COUNT * 2]) {
    bool arrived = true;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        u64 low, high;
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from + 2 * i) : "memory");
        words[2 * i] = u32(low), words[2 * i + 1] = u32(high);
        arrived = arrived && u32(low >> 32) == launch && u32(high >> 32) == launch;
    }
    return arrived;
}
DEVICE void let_others_run() {}
// A word in host memory.
DEVICE void report(u32* status, u32 value) { *static_cast<volatile u32*>(status) = value; }
DEVICE void atomic_min(u64* where, u64 value) { atomicMin(where, value); }
DEVICE void atomic_or_shared(u32* where, u32 bits) { atomicOr(where, bits); }
