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
        host::grid.ready.insert(host::grid.ready.end(), waiting.begin(), waiting.end());
        waiting.clear();
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
    while (!own.ended(parity)) {
        own.waiting.push_back(host::grid.now);
        host::switch_to(host::grid.now->context, host::grid.scheduler);
    }
}
inline void bulk_copy(void* to, const void* from, u32 bytes, u32 barrier) {
    if (reinterpret_cast<std::uintptr_t>(to) % 16 || reinterpret_cast<std::uintptr_t>(from) % 16 || bytes % 16) host::fail("misaligned bulk copy");
    host_barrier(barrier).copies.push_back({to, from, int(bytes), true});
    host_barrier(barrier).complete();
}
struct HostMeeting {
    int announced = 0;
    std::vector<host::Thread*> waiting;

    bool announce(int count) {
        if (++announced < count) return false;
        host::grid.ready.insert(host::grid.ready.end(), waiting.begin(), waiting.end());
        announced = 0, waiting.clear();
        return true;
    }
};
template <int NUMBER>
HostMeeting& host_meeting() {
    static std::map<host::Block*, HostMeeting> all;
    return all[host::grid.now->block];
}
template <int NUMBER, int COUNT>
void announce() {
    host_meeting<NUMBER>().announce(COUNT);
}
template <int NUMBER, int COUNT>
void meet() {
    HostMeeting& own = host_meeting<NUMBER>();
    if (own.announce(COUNT)) return;
    own.waiting.push_back(host::grid.now);
    host::switch_to(host::grid.now->context, host::grid.scheduler);
}
