// Where is an E8M0 byte 255? Run after a sum came out infinite or NaN, never before. Block = (expert, tensor).
// found, all ones at first, becomes the smallest (expert << 34 | tensor << 32 | row), tensor 0 1 2 = w1 w3 w2.
#include "device.cuh"

constexpr int THREADS = 256;

KERNEL(find_bad_scale, THREADS, 1) {
    const u64 expert = blockIdx.x / 3, tensor = blockIdx.x % 3;
    const Row row = call.rows[expert];
    const u8* const scales = tensor == 0 ? row.s1 : tensor == 1 ? row.s3 : row.s2;
    const u32 groups = tensor == 2 ? INTERMEDIATE / 32 : HIDDEN / 32, bytes = tensor == 2 ? HIDDEN * groups : INTERMEDIATE * groups;
    for (u32 i = threadIdx.x; i < bytes; i += THREADS)
        if (scales[i] == 255) {
            atomic_min(call.found, expert << 34 | tensor << 32 | i / groups);
            break;  // later ones of this thread lie in later rows
        }
}
