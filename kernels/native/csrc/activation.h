// Activations as the kernels read them: digits and scales.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace evrun {

// Tokens as the kernels read them, in one stretch of memory whose pages are touched when used.
class TokenStore {
   public:
    TokenStore(const Layout &layout, int k, int count);
    ~TokenStore();
    TokenStore(const TokenStore &) = delete;
    TokenStore &operator=(const TokenStore &) = delete;

    // False when there was no memory.
    bool valid() const { return memory_ != nullptr; }

    // Writes one group of a token; different groups may be written by different threads at once.
    void put(int token, int group, const Group &value);

    Token token(int token) const;

    // The group again, without its range: for sums outside the kernels.
    Group get(int token, int group) const;

   private:
    uint8_t *at(int token) const { return memory_ + static_cast<size_t>(token) * stride_; }

    const Layout &layout_;
    size_t low_offset_, used_offset_, exponent_offset_, stride_, bytes_;
    uint8_t *memory_;
};

}  // namespace evrun
