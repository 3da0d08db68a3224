// The kernels in plain C++: for CPUs without a better instruction set, and to check the others against.
#include <cstring>

#include "activation_math.h"
#include "kernels.h"
#include "wide_digits.h"

namespace evrun {

namespace {

struct Codes {
    int8_t value[kBlock];
    float scale[kBlockGroups];
};

// One block of one row; codes beyond k count as zero.
void expand(const Rows &rows, int r, int block, Codes *out) {
    const uint8_t *codes = rows.codes + static_cast<ptrdiff_t>(r) * (rows.k / 2) + block * kBlockBytes;
    const uint8_t *scales = rows.scales + static_cast<ptrdiff_t>(r) * (rows.k / kGroup) + block * kBlockGroups;
    const int left = rows.k - block * kBlock, count = left < kBlock ? left : kBlock;
    std::memset(out, 0, sizeof *out);
    for (int i = 0; i < count / 2; ++i) {
        out->value[2 * i] = kCodeValues[codes[i] & 15];
        out->value[2 * i + 1] = kCodeValues[codes[i] >> 4];
    }
    for (int g = 0; g < count / kGroup; ++g) out->scale[g] = power_of_two(scales[g] - 127);
}

float add_lanes(const float *l) { return ((l[0] + l[1]) + (l[4] + l[5])) + ((l[2] + l[3]) + (l[6] + l[7])); }

void extremes(const uint8_t *bytes, size_t count, uint8_t *least, uint8_t *most) {
    uint8_t low = 255, high = 0;
    for (size_t i = 0; i < count; ++i) {
        low = bytes[i] < low ? bytes[i] : low;
        high = bytes[i] > high ? bytes[i] : high;
    }
    *least = low;
    *most = high;
}

// Adds the groups of one block of one row times one token to its lanes.
void add_groups(const Codes &w, const int32_t *x, const float *scales, float *lanes) {
    for (int g = 0; g < kBlockGroups; ++g) {
        int64_t sum = 0;  // just beyond 32 bits if all are at their largest
        for (int half = 0; half < kGroup; half += kGroup / 2) {
            int32_t part = 0;
            for (int k = g * kGroup + half; k < g * kGroup + half + kGroup / 2; ++k) part += x[k] * w.value[k];
            sum += part;
        }
        lanes[g] += static_cast<float>(sum) * (scales[g] * w.scale[g]);
    }
}

void multiply(const Rows &rows, const Token *x, int tokens, float *y, const Scratch &scratch) {
    for (int first = 0; first < rows.count; first += kManyRows) {
        const int count = rows.count - first < kManyRows ? rows.count - first : kManyRows;
        for (int token = 0; token < tokens; token += kTokensAtOnce) {
            const int width = tokens - token < kTokensAtOnce ? tokens - token : kTokensAtOnce;
            const auto lanes = [&](int r, int t) { return scratch.lanes + r * kRowLanes + t * kLanes; };
            std::memset(scratch.lanes, 0, sizeof(float) * kManyRows * kRowLanes);
            for (int block = 0; block < blocks_of(rows.k); ++block) {
                Codes w[kManyRows];
                for (int r = 0; r < count; ++r) expand(rows, first + r, block, &w[r]);
                for (int t = 0; t < width; ++t) {
                    int32_t values[kBlock];
                    float scales[kBlockGroups];
                    for (int g = 0; g < kBlockGroups; ++g) {
                        const uint8_t *digits = x[token + t].blocks + static_cast<ptrdiff_t>(block) * kTokenBlock;
                        get_wide(digits, x[token + t].low + static_cast<ptrdiff_t>(block) * kBlock, g, values + g * kGroup);
                        std::memcpy(&scales[g], digits + kTokenScales + lane_of(g) * 4, 4);
                        scales[g] *= 1.0f / (1 << kLowBits);  // of the low digit
                    }
                    for (int r = 0; r < count; ++r) add_groups(w[r], values, scales, lanes(r, t));
                }
            }
            for (int r = 0; r < count; ++r)
                for (int t = 0; t < width; ++t) y[static_cast<ptrdiff_t>(token + t) * rows.count + first + r] = add_lanes(lanes(r, t));
        }
    }
}

void dequantise(const uint8_t *codes, const float *scales, int64_t columns, float *out) {
    for (int64_t i = 0; i < columns; ++i) out[i] = from_e4m3(codes[i]) * scales[i / kGroup];
}

uint64_t read(const uint8_t *start, size_t bytes) {
    uint64_t sum = 0;
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        uint64_t word;
        std::memcpy(&word, start + i, 8);
        sum += word;
    }
    return sum;
}

uint64_t multiply_add(uint64_t steps) {
    constexpr int kSums = 12;
    float sums[kSums] = {};
    for (uint64_t i = 0; i < steps; ++i)
        for (float &sum : sums) sum = sum * 0.5f + 0.5f;
    for (float &sum : sums) asm volatile("" : "+m"(sum));
    return steps * kSums * 2;
}

bool supported() { return true; }

}  // namespace

const Kernels kScalar = {"scalar", "plain C++", supported, kWideDigits, extremes, swiglu_group, quantise_group, fix_group, multiply, dequantise, read, multiply_add};

}  // namespace evrun
