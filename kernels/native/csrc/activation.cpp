#include "activation.h"

#include <sys/mman.h>

namespace evrun {

TokenStore::TokenStore(const Layout &layout, int k, int count) : layout_(layout) {
    const size_t together = static_cast<size_t>(layout.groups), blocks = (static_cast<size_t>(k / kGroup) + together - 1) / together;
    const size_t groups = blocks * together;
    low_offset_ = blocks * layout.block_bytes;
    used_offset_ = low_offset_ + blocks * layout.low_bytes;
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
    const size_t block = static_cast<size_t>(group / layout_.groups);
    layout_.put(value, group % layout_.groups, base + block * layout_.block_bytes, base + low_offset_ + block * layout_.low_bytes);
    int32_t any = 0;
    for (int code = 0; code < kGroup; ++code) any |= value.value[code];
    base[used_offset_ + static_cast<size_t>(group)] = any % (1 << kLowBits) != 0;
    const int16_t exponent = static_cast<int16_t>(value.exponent);
    std::memcpy(base + exponent_offset_ + static_cast<size_t>(group) * 2, &exponent, 2);
}

Token TokenStore::token(int token) const {
    const uint8_t *base = at(token);
    return {base, base + low_offset_, base + used_offset_};
}

Group TokenStore::get(int token, int group) const {
    Group out;
    const size_t block = static_cast<size_t>(group / layout_.groups);
    const uint8_t *base = at(token);
    layout_.get(base + block * layout_.block_bytes, base + low_offset_ + block * layout_.low_bytes, group % layout_.groups, out.value);
    int16_t exponent;
    std::memcpy(&exponent, base + exponent_offset_ + static_cast<size_t>(group) * 2, 2);
    out.exponent = out.range = exponent;
    return out;
}

}  // namespace evrun
