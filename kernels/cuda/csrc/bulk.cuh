// Bulk copies into shared memory and the barriers that count their bytes (capability 9.0 up).
//
// A barrier's phase ends when all arrivals it was made for have come and all bytes that were announced have landed.
// Phases are waited for by parity: that of the first is 0. A barrier is eight bytes, named by their `shared_address`.
#pragma once

// `arrivals` in every phase. After all barriers, one thread publishes them to the copy engine; others need a `sync_block`.
DEVICE void make_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void publish_barriers() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void arrive_at(u32 barrier, u32 count) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// One arrival, and the bytes that copies of this phase bring in all.
DEVICE void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void wait_for(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred done;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}
// `to` in shared memory, both ends and the size multiples of 16 bytes.
DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}
// Meetings of COUNT threads of a block, beside that of all (which has number 0). Who announces itself goes on at once.
template <int NUMBER, int COUNT>
DEVICE void meet() {
    asm volatile("bar.sync %0, %1;" ::"n"(NUMBER), "n"(COUNT) : "memory");
}
template <int NUMBER, int COUNT>
DEVICE void announce() {
    asm volatile("bar.arrive %0, %1;" ::"n"(NUMBER), "n"(COUNT) : "memory");
}
