// kernels/cuda/csrc/wgmma.cuh on a host: the sums are made when they are waited for.
#pragma once

inline float bf16_float(u32 bits) { return bits_float(bits << 16); }

struct PendingSums {
    float* c;
    const u32* a;
    u64 b;
    int n;
    bool add;
    bool last;  // of its group
};
inline std::vector<PendingSums>& pending_sums() {
    static std::vector<std::vector<PendingSums>> all;
    const std::size_t index = std::size_t(blockIdx.x) * host::grid.threads + threadIdx.x;
    if (all.size() <= index) all.resize(std::size_t(host::grid.blocks) * host::grid.threads);
    return all[index];
}

template <int N>
void wgmma(float (&c)[N / 2], const u32 (&a)[4], u64 b, bool add) {
    pending_sums().push_back({c, a, b, N, add, false});
}
inline void wgmma_fence() {}
inline void wgmma_commit() { pending_sums().back().last = true; }
inline void publish_to_wgmma() {}

inline u64 wgmma_operand(const void* rows, int byte_offset) {
    return u64((shared_address(rows) + byte_offset) >> 4 & 0x3FFF) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

template <int PENDING>
void wgmma_wait() {
    const int g = host::lane() / 4, t = host::lane() % 4;
    struct Fragments { u32 a[4]; };
    auto& pending = pending_sums();
    const auto groups = [&] { return std::count_if(pending.begin(), pending.end(), [](const PendingSums& p) { return p.last; }); };
    while (groups() > PENDING) {
        const PendingSums one = pending.front();
        pending.erase(pending.begin());
        Fragments own;
        std::memcpy(own.a, one.a, sizeof(own.a));
        const u32 start = u32(one.b & 0x3FFF) << 4, group_stride = u32(one.b >> 32 & 0x3FFF) << 4;
        if (one.b >> 62 != 1 || start / 128 % 8 != 0) host::fail("warpgroup operand is not laid out as the kernel says");
        const int done = host::collect(own, [&](auto of) {
            for (int i = 0; i < one.n / 2; ++i) {
                const int column = i / 4 * 8 + 2 * t + i % 2, half = i / 2 % 2;
                double sum = one.add ? one.c[i] : 0;
                for (int k = 0; k < 16; ++k) {
                    u32 address = start + column / 8 * group_stride + column % 8 * 128 + k * 2;
                    address ^= (address >> 7 & 7) << 4;
                    u16 b;
                    std::memcpy(&b, shared_memory() + address, 2);
                    const u32 a = of(g * 4 + k % 8 / 2).a[half + k / 8 * 2] >> 16 * (k % 2) & 0xFFFF;
                    sum += double(bf16_float(a)) * bf16_float(b);
                }
                one.c[i] = float(sum);
            }
            return 0;
        });
        (void)done;
    }
}

inline u32 multiply_bf16(u32 a, u32 b) {
    const auto rounded = [](float x) -> u32 {
        const u32 bits = float_bits(x);
        return x != x ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
    };
    return rounded(bf16_float(a & 0xFFFF) * bf16_float(b & 0xFFFF)) | rounded(bf16_float(a >> 16) * bf16_float(b >> 16)) << 16;
}
