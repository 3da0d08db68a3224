// Activations as the kernels read them: rounding to E4M3, digits, scales.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace evrun {

constexpr int kNothing = INT32_MIN;   // range of a token without a nonzero group
constexpr int kNotFinite = INT32_MAX;  // range of a token with an infinity or a NaN

// 32 channels of one token: x = +-magnitude * 2^exponent with magnitude below 2^24. Weights count as 2w, so that
// x * w = +-magnitude * 2w * 2^(exponent - 1).
struct Group {
    int32_t magnitude[kGroup];
    uint8_t negative[kGroup];
    int exponent;
    int range;  // exponent, kNothing or kNotFinite; then all magnitudes are zero
};

// E4M3 with a power-of-two scale (spec 3.2): exact, magnitudes are multiples of 64.
void quantise(const float *x, Group *group);

// 24 bits relative to the largest of the 32: off by at most 2^-25 of it.
void fix_point(const float *x, Group *group);

// Which of the two layouts of layout.h a store holds.
enum class Layout { kVector, kTile };

// Tokens of one layout in one stretch of memory, `count` at most; pages are touched when used.
class TokenStore {
   public:
    TokenStore(Layout layout, int k, int count, bool all_digits);
    ~TokenStore();
    TokenStore(const TokenStore &) = delete;
    TokenStore &operator=(const TokenStore &) = delete;

    // False when there was no memory.
    bool valid() const { return memory_ != nullptr; }

    // Writes one group of a token; different groups may be written by different threads at once.
    void put(int token, int group, const Group &value);

    VectorToken vector(int token) const;
    TileToken tile(int token) const;

    // x * 2^exponent(group) of one code, for sums outside the kernels.
    int64_t value(int token, int k) const;
    int exponent(int token, int group) const;

   private:
    uint8_t *at(int token) const { return memory_ + static_cast<size_t>(token) * stride_; }

    Layout layout_;
    bool all_digits_;
    int blocks_;
    size_t scale_offset_, low_offset_, flag_offset_, exponent_offset_, stride_, bytes_;
    uint8_t *memory_;
};

}  // namespace evrun
