// kernels/cuda/csrc/bulk.cuh on a host: copies are made when somebody waits for their barrier.
#pragma once

#include <map>

struct HostBarrier {
    u32 arrivals = 0, awaited = 0, phase = 0;
    u64 expected = 0;
    std::vector<host::Copy> copies;
    std::vector<host::Thread*> waiting;

    // Wakes who waits once nothing is missing; who finds the phase ended makes its copies.
    bool complete() {
        u64 bytes = 0;
        for (const auto& copy : copies) bytes += copy.bytes;
        if (awaited > 0 || bytes < expected) return false;
        if (bytes > expected) host::fail("more bytes than a barrier expects");
        host::wake(waiting);
        return true;
    }
    bool ended(u32 parity) {
        if (complete()) {
            for (const auto& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
            copies.clear();
            expected = 0, awaited = arrivals, ++phase;
        }
        return phase % 2 != parity;
    }
};
inline HostBarrier& host_barrier(u32 barrier) {
    static std::map<u8*, HostBarrier> all;
    return all[shared_memory() + barrier];
}

inline void make_barrier(u32 barrier, u32 arrivals) { host_barrier(barrier) = {arrivals, arrivals}; }
inline void publish_barriers() {}
inline void arrive_at(u32 barrier, u32 count) {
    HostBarrier& own = host_barrier(barrier);
    own.ended(0);  // a phase that nobody waited for yet
    if (count > own.awaited) host::fail("more arrivals than a barrier was made for");
    own.awaited -= count;
    own.complete();
}
inline void expect_bytes(u32 barrier, u32 bytes) {
    host_barrier(barrier).ended(0);
    host_barrier(barrier).expected += bytes;
    arrive_at(barrier, 1);
}
inline void wait_for(u32 barrier, u32 parity) {
    HostBarrier& own = host_barrier(barrier);
    while (!own.ended(parity)) host::sleep_among(own.waiting);
}
inline void bulk_copy(void* to, const void* from, u32 bytes, u32 barrier) {
    if (reinterpret_cast<std::uintptr_t>(to) % 16 || reinterpret_cast<std::uintptr_t>(from) % 16 || bytes % 16) host::fail("misaligned bulk copy");
    host_barrier(barrier).copies.push_back({to, from, int(bytes), true});
    host_barrier(barrier).complete();
}
template <int NUMBER, int COUNT>
void meet() {
    host::meet(host::grid.now->block->meetings[NUMBER], COUNT);
}
template <int NUMBER, int COUNT>
void announce() {
    host::announce(host::grid.now->block->meetings[NUMBER], COUNT);
}
