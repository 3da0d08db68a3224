// The machine of kernels/cuda/csrc/device.cuh, on a host: every CUDA thread is a coroutine, a warp or a block meets by
// waiting for all its threads. Stands in for that file, so that the kernels themselves run without a card.
//
// Strict where a card is forgiving: shared memory starts as NaN, background copies read and write only when they are
// waited for, threads run in a shuffled order, and a meeting that some thread never reaches ends the process.
#pragma once

#ifndef __x86_64__
#include <ucontext.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#include "call.cuh"

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::min;

#define DEVICE inline

namespace host {

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "emulated card: %s\n", what);
    std::abort();
}

struct Thread;

struct Meeting {
    std::vector<Thread*> waiting;
    std::size_t announced = 0;  // who came and went on
};

// A coroutine's registers. glibc's own switch enters the kernel every time, which is most of the run time.
#ifdef __x86_64__
struct Context {
    void* stack_pointer = nullptr;
};
extern "C" void host_switch(void** save, void* load);
__asm__(R"(
    .text
    .weak host_switch
    .type host_switch, @function
host_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
inline void switch_to(Context& from, Context& to) { host_switch(&from.stack_pointer, to.stack_pointer); }
inline void prepare(Context& context, u8* stack, std::size_t bytes, void (*entry)()) {
    auto top = (reinterpret_cast<std::uintptr_t>(stack) + bytes) / 16 * 16;
    auto* words = reinterpret_cast<u64*>(top) - 2;
    words[0] = reinterpret_cast<u64>(entry);
    for (int i = 1; i <= 6; ++i) words[-i] = 0;
    context.stack_pointer = words - 6;
}
#else
struct Context {
    ucontext_t registers;
};
inline void switch_to(Context& from, Context& to) { swapcontext(&from.registers, &to.registers); }
inline void prepare(Context& context, u8* stack, std::size_t bytes, void (*entry)()) {
    getcontext(&context.registers);
    context.registers.uc_stack = {stack, 0, bytes};
    context.registers.uc_link = nullptr;
    makecontext(&context.registers, entry, 0);
}
#endif

struct Copy {
    void* to;
    const void* from;
    int bytes;
    bool valid;
};

struct Warp {
    Meeting meeting;
    alignas(16) u8 slots[32][64];
};

struct Block {
    Meeting meetings[16];
    int index = 0;
    std::unique_ptr<u8[]> memory;
    u8* shared = nullptr;
    std::vector<Warp> warps;
};

struct Thread {
    Context context;
    std::unique_ptr<u8[]> stack;
    Block* block = nullptr;
    int index = 0;
    bool done = false;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
};

struct Grid {
    int blocks = 0, threads = 0;
    Meeting meeting;
    Context scheduler;
    Thread* now = nullptr;
    std::vector<Thread*> ready;
    std::mt19937 random;
    void (*body)(const void*) = nullptr;
    const void* call = nullptr;
};
inline Grid grid;

inline void sleep_among(std::vector<Thread*>& waiting) {
    waiting.push_back(grid.now);
    switch_to(grid.now->context, grid.scheduler);
}
inline void wake(std::vector<Thread*>& waiting) {
    grid.ready.insert(grid.ready.end(), waiting.begin(), waiting.end());
    waiting.clear();
}

// The last of `parties` threads wakes the others.
inline bool is_last(Meeting& meeting, std::size_t parties) {
    if (meeting.waiting.size() + meeting.announced + 1 < parties) return false;
    meeting.announced = 0;
    wake(meeting.waiting);
    return true;
}
inline void meet(Meeting& meeting, std::size_t parties) {
    if (!is_last(meeting, parties)) sleep_among(meeting.waiting);
}
inline void announce(Meeting& meeting, std::size_t parties) {
    if (!is_last(meeting, parties)) ++meeting.announced;
}

inline Warp& warp() { return grid.now->block->warps[grid.now->index / 32]; }
inline int lane() { return grid.now->index % 32; }

// Every lane gives a value and reads those of all.
template <typename T, typename F>
auto collect(const T& value, F read) {
    static_assert(sizeof(T) <= 64);
    Warp& own = warp();
    std::memcpy(own.slots[lane()], &value, sizeof(T));
    meet(own.meeting, 32);
    const auto result = read([&](int from) {
        T other;
        std::memcpy(&other, own.slots[from], sizeof(T));
        return other;
    });
    meet(own.meeting, 32);
    return result;
}

inline void run(const Copy& copy) {
    if (reinterpret_cast<std::uintptr_t>(copy.to) % copy.bytes || (copy.valid && reinterpret_cast<std::uintptr_t>(copy.from) % copy.bytes))
        fail("misaligned background copy");
    if (copy.valid)
        std::memcpy(copy.to, copy.from, copy.bytes);
    else
        std::memset(copy.to, 0, copy.bytes);
}

inline void start() {
    grid.body(grid.call);
    grid.now->done = true;
    switch_to(grid.now->context, grid.scheduler);
}

// All blocks live at once, as in a cooperative launch.
inline void launch(void (*body)(const void*), const void* call, int blocks, int threads, int shared_bytes, unsigned seed) {
    constexpr int STACK = 96 * 1024;
    grid = Grid();
    grid.blocks = blocks, grid.threads = threads, grid.body = body, grid.call = call;
    std::vector<Block> all_blocks(blocks);
    std::vector<Thread> all_threads(std::size_t(blocks) * threads);
    for (int b = 0; b < blocks; ++b) {
        Block& block = all_blocks[b];
        block.index = b;
        block.memory.reset(new u8[shared_bytes + 1024]);
        block.shared = reinterpret_cast<u8*>((reinterpret_cast<std::uintptr_t>(block.memory.get()) + 1023) / 1024 * 1024);
        std::memset(block.shared, 0xFF, shared_bytes);
        block.warps = std::vector<Warp>(threads / 32);
        for (int t = 0; t < threads; ++t) {
            Thread& thread = all_threads[std::size_t(b) * threads + t];
            thread.block = &block, thread.index = t;
            thread.stack.reset(new u8[STACK]);
            prepare(thread.context, thread.stack.get(), STACK, start);
        }
    }
    for (Thread& thread : all_threads) grid.ready.push_back(&thread);
    grid.random.seed(seed);
    std::size_t done = 0;
    while (!grid.ready.empty()) {
        std::swap(grid.ready[grid.random() % grid.ready.size()], grid.ready.back());
        grid.now = grid.ready.back();
        grid.ready.pop_back();
        switch_to(grid.scheduler, grid.now->context);
        done += grid.now->done;
    }
    if (done != all_threads.size()) fail("threads wait for a meeting that others never reach");
}


template <typename To, typename From>
To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

}  // namespace host

// The index registers are unsigned, as on a card.
struct HostIndex { u32 x; };
#define threadIdx (HostIndex{u32(host::grid.now->index)})
#define blockIdx (HostIndex{u32(host::grid.now->block->index)})
#define gridDim (HostIndex{u32(host::grid.blocks)})

#define KERNEL_OF(Parameters, name, threads, blocks)                                                                     \
    static void name##_body(const Parameters& call);                                                                     \
    extern "C" void name(const void* call, int grid, int block, int shared_bytes, unsigned seed) {                       \
        host::launch([](const void* p) { name##_body(*static_cast<const Parameters*>(p)); }, call, grid, block, shared_bytes, seed); \
    }                                                                                                                    \
    static void name##_body(const Parameters& call)
#define KERNEL(name, threads, blocks) KERNEL_OF(Call, name, threads, blocks)

inline u8* shared_memory() { return host::grid.now->block->shared; }
inline u32 shared_address(const void* pointer) { return u32(static_cast<const u8*>(pointer) - shared_memory()); }
inline void sync_block() { host::meet(host::grid.now->block->meetings[0], host::grid.threads); }
inline void sync_warp() { host::meet(host::warp().meeting, 32); }
template <typename T>
T shuffle(T value, int lane) {
    return host::collect(value, [&](auto of) { return of(lane & 31); });
}
template <typename T>
T shuffle_xor(T value, int mask) {
    return shuffle(value, host::lane() ^ mask);
}
inline u32 lanes_with(bool predicate) {
    return host::collect(predicate, [](auto of) {
        u32 bits = 0;
        for (int i = 0; i < 32; ++i) bits |= u32(of(i)) << i;
        return bits;
    });
}
inline bool any_lane(bool predicate) { return lanes_with(predicate) != 0; }
inline int count_bits(u32 bits) { return __builtin_popcount(bits); }

inline u32 float_bits(float x) { return host::bits_as<u32>(x); }
inline float bits_float(u32 bits) { return host::bits_as<float>(bits); }
inline u32 half_bits(float x) { return host::bits_as<u16>(static_cast<_Float16>(x)); }
inline float half_float(u32 bits) { return static_cast<float>(host::bits_as<_Float16>(static_cast<u16>(bits))); }
#define HAS_E4M3 0
inline u32 multiply_add(u32 a, u32 b, u32 c) { return a * b + c; }
inline u32 choose(u32 mask, u32 a, u32 b) { return (mask & a) | (~mask & b); }
inline u32 max_u32(u32 a, u32 b) { return std::max(a, b); }

inline void keep(u32&) {}

template <int BYTES>
void copy_async(u32 to, const void* from, bool valid) {
    host::grid.now->open.push_back({shared_memory() + to, from, BYTES, valid});
}
inline void copy_async_commit() {
    host::grid.now->groups.push_back(std::move(host::grid.now->open));
    host::grid.now->open.clear();
}
template <int PENDING>
void copy_async_wait() {
    auto& groups = host::grid.now->groups;
    while (groups.size() > PENDING) {
        for (const auto& copy : groups.front()) host::run(copy);
        groups.erase(groups.begin());
    }
}

inline void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    struct Fragments { u32 a[4], b[2]; };
    const int g = host::lane() / 4, t = host::lane() % 4;
    const auto half = [](u32 pair, int k) { return double(half_float(pair >> 16 * (k % 2) & 0xFFFF)); };
    struct Four { float c[4]; };
    const Four sums = host::collect(Fragments{{a0, a1, a2, a3}, {b0, b1}}, [&](auto of) {
        Four result;
        for (int i = 0; i < 4; ++i) {
            double sum = c[i];
            for (int k = 0; k < 16; ++k)
                sum += half(of(g * 4 + k % 8 / 2).a[i / 2 + k / 8 * 2], k) * half(of((2 * t + i % 2) * 4 + k % 8 / 2).b[k / 8], k);
            result.c[i] = float(sum);
        }
        return result;
    });
    for (int i = 0; i < 4; ++i) c[i] = sums.c[i];
}

inline u64 arrive(u64* arrivals) { return (*arrivals)++; }
inline void send_word(u64* to, u32 word, u32 launch) { *to = u64(launch) << 32 | word; }
template <int COUNT>
bool poll_words(const u64* from, u32 launch, u32 (&words)[COUNT * 2]) {
    bool arrived = true;
    for (int i = 0; i < COUNT * 2; ++i) words[i] = u32(from[i]), arrived = arrived && u32(from[i] >> 32) == launch;
    return arrived;
}
inline void let_others_run() {
    host::grid.ready.push_back(host::grid.now);
    host::switch_to(host::grid.now->context, host::grid.scheduler);
}
inline void report(u32* status, u32 value) { *status = value; }
inline void atomic_min(u64* where, u64 value) { *where = std::min(*where, value); }
inline void atomic_or_shared(u32* where, u32 bits) { *where |= bits; }
