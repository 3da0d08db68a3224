// Warpgroup matrix instructions (sm_90a): c[64 x N] (+)= a[64 x 16] b[16 x N], bf16 in, fp32 out, a in registers, b in
// shared memory. Warp w of the four owns rows 16 w .. 16 w + 15, its fragments as in `mma_f16`; c holds N / 8 of those.
// `wgmma<N>` itself is generated for each N (see `wgmma.py`).
#pragma once

template <int N>
DEVICE void wgmma(float (&c)[N / 2], const u32 (&a)[4], u64 b, bool add);

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Returns when all but the newest PENDING groups are done; only then may their operands and sums be touched.
template <int PENDING>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// What this thread wrote to shared memory becomes visible to the tensor cores (after the next barrier, for all threads).
DEVICE void publish_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// b: rows of 64 bf16 (128 bytes), K contiguous, pieces of 16 bytes at place (piece ^ row % 8); 1024-byte aligned.
DEVICE u64 wgmma_operand(const void* rows, int byte_offset) {
    return u64((shared_address(rows) + byte_offset) >> 4 & 0x3FFF) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

DEVICE u32 multiply_bf16(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
