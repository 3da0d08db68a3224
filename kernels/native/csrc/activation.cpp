#include "activation.h"

#include <sys/mman.h>

#include <cmath>

#include "numbers.h"

namespace evrun {

namespace {

uint32_t peak_bits(const float *x) {
    uint32_t peak = 0;
    for (int i = 0; i < kGroup; ++i) {
        const uint32_t b = bits_of(x[i]) & 0x7FFFFFFF;
        peak = b > peak ? b : peak;
    }
    return peak;
}

void clear(Group *group, int range) {
    for (int i = 0; i < kGroup; ++i) {
        group->magnitude[i] = 0;
        group->negative[i] = 0;
    }
    group->exponent = 0;
    group->range = range;
}

constexpr uint32_t kInfinity = 0x7F800000;

}  // namespace

void quantise(const float *x, Group *group) {
    const uint32_t peak = peak_bits(x);
    if (peak >= kInfinity) return clear(group, kNotFinite);
    const float floor = 1e-4f;
    const float t = (float_of(peak) > floor ? float_of(peak) : floor) * (1.0f / 448.0f);
    const uint32_t tb = bits_of(t);
    const int e = static_cast<int>(tb >> 23) - 127 + ((tb & 0x7FFFFF) != 0);
    const float to_steps = power_of_two(9 - e);  // E4M3's smallest step is 2^-9
    int32_t any = 0;
    for (int i = 0; i < kGroup; ++i) {
        float r = std::fabs(x[i]) * to_steps;
        r = r < 448.0f * 512.0f ? r : 448.0f * 512.0f;
        // Adding and subtracting 1.5 * 2^23 units rounds to a unit: 2^-3 of the leading bit, at least one step.
        uint32_t exponent = bits_of(r) >> 23;
        exponent = exponent > 130 ? exponent : 130;
        const float shifter = float_of(((exponent + 20) << 23) | 0x400000);
        const int32_t steps = static_cast<int32_t>((r + shifter) - shifter);
        group->magnitude[i] = steps << 6;
        group->negative[i] = static_cast<uint8_t>(bits_of(x[i]) >> 31);
        any |= steps;
    }
    group->exponent = e - 15;
    group->range = any ? group->exponent : kNothing;
}

void fix_point(const float *x, Group *group) {
    const uint32_t peak = peak_bits(x);
    if (peak >= kInfinity) return clear(group, kNotFinite);
    if (peak == 0) return clear(group, kNothing);
    const int leading = static_cast<int>(peak >> 23) - 127 > -126 ? static_cast<int>(peak >> 23) - 127 : -126;
    group->exponent = leading - (kMagnitudeBits - 1);
    // In two factors: 2^149 is no fp32 number.
    const int first = -group->exponent < 100 ? -group->exponent : 100;
    const float f0 = power_of_two(first), f1 = power_of_two(-group->exponent - first);
    for (int i = 0; i < kGroup; ++i) {
        group->magnitude[i] = static_cast<int32_t>(std::lrintf(std::fabs(x[i]) * f0 * f1));
        group->negative[i] = static_cast<uint8_t>(bits_of(x[i]) >> 31);
    }
    group->range = group->exponent;
}

TokenStore::TokenStore(Layout layout, int k, int count, bool all_digits)
    : layout_(layout), all_digits_(all_digits), blocks_(blocks_of(k)) {
    const size_t blocks = static_cast<size_t>(blocks_), groups = blocks * kBlockGroups;
    const bool tile = layout == Layout::kTile;
    scale_offset_ = blocks * (tile ? kTileBlockBytes : kVectorBlockBytes);  // tile: the scales lie in the blocks
    low_offset_ = scale_offset_ + (tile ? 0 : groups * sizeof(float));
    flag_offset_ = low_offset_ + (tile ? blocks * kTileCodes * sizeof(int16_t) : 0);
    exponent_offset_ = flag_offset_ + groups;
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
    const int block = group / kBlockGroups, inside = group % kBlockGroups;
    int32_t all = 0;
    for (int i = 0; i < kGroup; ++i) all |= value.magnitude[i];
    int16_t exponent = static_cast<int16_t>(value.exponent);
    std::memcpy(base + exponent_offset_ + static_cast<size_t>(group) * 2, &exponent, 2);
    if (layout_ == Layout::kVector) {
        uint8_t *digits = base + static_cast<size_t>(block) * kVectorBlockBytes + inside * (kGroup / 2);
        for (int i = 0; i < kGroup / 2; ++i) {
            const int32_t even = value.magnitude[2 * i], odd = value.magnitude[2 * i + 1];
            digits[kSign * kBlockBytes + i] = static_cast<uint8_t>(value.negative[2 * i] << 3 | value.negative[2 * i + 1] << 7);
            digits[kHighEven * kBlockBytes + i] = static_cast<uint8_t>(even >> 16);
            digits[kHighOdd * kBlockBytes + i] = static_cast<uint8_t>(odd >> 16);
            digits[kMiddleEven * kBlockBytes + i] = static_cast<uint8_t>(even >> 8);
            digits[kMiddleOdd * kBlockBytes + i] = static_cast<uint8_t>(odd >> 8);
            digits[kLowEven * kBlockBytes + i] = static_cast<uint8_t>(even);
            digits[kLowOdd * kBlockBytes + i] = static_cast<uint8_t>(odd);
        }
        base[flag_offset_ + static_cast<size_t>(group)] = (all & 0xFF) != 0;
        const float scale = power_of_two(value.exponent - 1 + (all_digits_ ? 0 : 8));
        const int position = block * kBlockGroups + inside / 2 + (inside % 2) * 4;
        std::memcpy(base + scale_offset_ + static_cast<size_t>(position) * 4, &scale, 4);
    } else {
        uint8_t *high = base + static_cast<size_t>(block) * kTileBlockBytes;
        uint8_t *low = base + low_offset_ + static_cast<size_t>(block) * kTileCodes * 2;
        for (int i = 0; i < kGroup; ++i) {
            const int32_t sign = value.negative[i] ? -1 : 1;
            const int16_t h = static_cast<int16_t>(sign * (value.magnitude[i] >> kTileLowBits));
            const int16_t l = static_cast<int16_t>(sign * (value.magnitude[i] & ((1 << kTileLowBits) - 1)));
            const int position = tile_position(inside * kGroup + i);
            std::memcpy(high + position * 2, &h, 2);
            std::memcpy(low + position * 2, &l, 2);
        }
        base[flag_offset_ + static_cast<size_t>(group)] = (all & ((1 << kTileLowBits) - 1)) != 0;
        const float scale = power_of_two(value.exponent - 1 + (all_digits_ ? 0 : kTileLowBits));
        float lanes[4] = {scale, scale, scale, scale};
        std::memcpy(high + tile_scales(inside / 2) + (inside % 2) * 16, lanes, 16);
    }
}

VectorToken TokenStore::vector(int token) const {
    const uint8_t *base = at(token);
    return {base, reinterpret_cast<const float *>(base + scale_offset_), base + flag_offset_};
}

TileToken TokenStore::tile(int token) const {
    const uint8_t *base = at(token);
    return {base, reinterpret_cast<const int16_t *>(base + low_offset_), base + flag_offset_};
}

int64_t TokenStore::value(int token, int k) const {
    const uint8_t *base = at(token);
    const int block = k / kBlock, inside = k % kBlock;
    if (layout_ == Layout::kTile) {
        int16_t h, l;
        const int position = tile_position(inside);
        std::memcpy(&h, base + static_cast<size_t>(block) * kTileBlockBytes + position * 2, 2);
        std::memcpy(&l, base + low_offset_ + static_cast<size_t>(block) * kTileCodes * 2 + position * 2, 2);
        return static_cast<int64_t>(h) * (1 << kTileLowBits) + l;
    }
    const uint8_t *digits = base + static_cast<size_t>(block) * kVectorBlockBytes + inside / 2;
    const int odd = inside % 2;
    const int64_t magnitude = digits[(kHighEven + odd) * kBlockBytes] << 16 | digits[(kMiddleEven + odd) * kBlockBytes] << 8 |
                              digits[(kLowEven + odd) * kBlockBytes];
    return digits[kSign * kBlockBytes] & (odd ? 0x80 : 0x08) ? -magnitude : magnitude;
}

int TokenStore::exponent(int token, int group) const {
    int16_t e;
    std::memcpy(&e, at(token) + exponent_offset_ + static_cast<size_t>(group) * 2, 2);
    return e;
}

}  // namespace evrun
