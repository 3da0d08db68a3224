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
    for (int v = 0; v < kVectors; ++v) {
        int16_t high[8];
        for (int j = 0; j < 8; ++j) high[j] = static_cast<int16_t>(value.value[high_code(v, j)] >> kLowBits);
        std::memcpy(out + high_position(inside, v, 0), high, sizeof high);
    }
    uint8_t low[2][kGroup / 2], any = 0;
    for (int j = 0; j < kGroup / 2; ++j) {
        low[0][j] = static_cast<uint8_t>(value.value[2 * j]);
        low[1][j] = static_cast<uint8_t>(value.value[2 * j + 1]);
        any |= low[0][j] | low[1][j];
    }
    uint8_t *lows = base + low_offset_ + block * kBlock;
    std::memcpy(lows + low_position(inside, 0), low[0], sizeof low[0]);
    std::memcpy(lows + low_position(inside, 1), low[1], sizeof low[1]);
    base[used_offset_ + static_cast<size_t>(group)] = any != 0;
    const float scale = power_of_two(value.exponent - 1);
    const float lanes[4] = {scale, scale, scale, scale};
    std::memcpy(out + kLaneScales + inside * 16, lanes, sizeof lanes);
    std::memcpy(out + group_scale(inside), &scale, sizeof scale);
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
