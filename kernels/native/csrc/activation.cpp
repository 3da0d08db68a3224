#include "activation.h"

#include <sys/mman.h>

#include "numbers.h"

namespace evrun {

TokenStore::TokenStore(int k, int count) {
    const size_t blocks = static_cast<size_t>(blocks_of(k)), groups = blocks * kBlockGroups;
    low_offset_ = blocks * kTokenBlock;
    used_offset_ = low_offset_ + blocks * kBlock;
    exponent_offset_ = used_offset_ + groups;
    stride_ = (exponent_offset_ + groups * sizeof(int16_t) + 63) / 64 * 64;
    stride_ += 64 * (1 - stride_ / 64 % 2);  // an odd number of cache lines: tokens spread over the cache's sets
    bytes_ = stride_ * static_cast<size_t>(count);
    void *memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    memory_ = memory == MAP_FAILED ? nullptr : static_cast<uint8_t *>(memory);
}

TokenStore::~TokenStore() {
    if (memory_) munmap(memory_, bytes_);
}

void TokenStore::put(int token, int group, const Group &value) {
    uint8_t *base = at(token);
    const size_t block = static_cast<size_t>(group / kBlockGroups);
    const int inside = group % kBlockGroups;
    uint8_t *out = base + block * kTokenBlock;
    for (int v = 0; v < kHighVectors; ++v) {
        const int16_t pair[2] = {static_cast<int16_t>(value.value[high_code(v, 0)] >> kLowBits),
                                 static_cast<int16_t>(value.value[high_code(v, 1)] >> kLowBits)};
        std::memcpy(out + high_position(inside, v, 0) * 2, pair, sizeof pair);
    }
    uint8_t *lows = base + low_offset_ + block * kBlock, any = 0;
    for (int code = 0; code < kGroup; ++code) {
        const uint8_t low = static_cast<uint8_t>(value.value[code]);
        lows[low_position(inside, code)] = low;
        any |= low;
    }
    base[used_offset_ + static_cast<size_t>(group)] = any != 0;
    const float scale = power_of_two(value.exponent + kLowBits - 1);
    std::memcpy(out + kTokenScales + lane_of(inside) * 4, &scale, sizeof scale);
    const int16_t exponent = static_cast<int16_t>(value.exponent);
    std::memcpy(base + exponent_offset_ + static_cast<size_t>(group) * 2, &exponent, 2);
}

Token TokenStore::token(int token) const {
    const uint8_t *base = at(token);
    return {base, base + low_offset_, base + used_offset_};
}

Group TokenStore::get(int token, int group) const {
    Group out;
    read_group(this->token(token), group, out.value);
    int16_t exponent;
    std::memcpy(&exponent, at(token) + exponent_offset_ + static_cast<size_t>(group) * 2, 2);
    out.exponent = out.range = exponent;
    return out;
}

}  // namespace evrun
