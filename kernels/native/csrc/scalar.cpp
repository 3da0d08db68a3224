// The kernels in plain C++: for CPUs without a better instruction set, and to check the others against.
#include <cstring>

#include "kernels.h"
#include "numbers.h"

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

float add_lanes(float *lanes) {
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

void peaks(const uint8_t *scales, int rows, int groups, uint8_t *out) {
    for (int r = 0; r < rows; ++r) {
        uint8_t peak = 0;
        for (int g = 0; g < groups; ++g) peak = scales[g] > peak ? scales[g] : peak;
        out[r] = peak;
        scales += groups;
    }
}

// Adds the octets of one block of one row times one token to its lanes. Integers are in units of the scales.
void add_octets(const Codes &w, const int32_t *x, const float *scales, float *lanes) {
    for (int octet = 0; octet < kBlock / 8; ++octet) {
        int32_t sum = 0;
        for (int k = octet * 8; k < octet * 8 + 8; ++k) sum += x[k] * w.value[k];
        lanes[octet % kLanes] += static_cast<float>(sum) * (scales[octet / 4] * w.scale[octet / 4]);
    }
}

void vector(const Rows &rows, const VectorToken &x, bool all_digits, float *y) {
    for (int first = 0; first < rows.count; first += kTileRows) {
        const int count = rows.count - first < kTileRows ? rows.count - first : kTileRows;
        float lanes[kTileRows][kLanes] = {};
        for (int block = 0; block < blocks_of(rows.k); ++block) {
            const uint8_t *digits = x.digits + static_cast<ptrdiff_t>(block) * kVectorBlockBytes;
            const auto digit = [digits](int plane, int k) { return static_cast<int32_t>(digits[(plane + k % 2) * kBlockBytes + k / 2]); };
            int32_t values[kBlock];
            float scales[kBlockGroups];
            for (int k = 0; k < kBlock; ++k) {
                const int32_t magnitude = digit(kHighEven, k) << 16 | digit(kMiddleEven, k) << 8 | digit(kLowEven, k);
                values[k] = digits[k / 2] & (k % 2 ? 0x80 : 0x08) ? -magnitude : magnitude;
            }
            for (int g = 0; g < kBlockGroups; ++g)
                scales[g] = x.scale[block * kBlockGroups + g / 2 + g % 2 * 4] * (all_digits ? 1.0f : 1.0f / 256);
            for (int r = 0; r < count; ++r) {
                Codes w;
                expand(rows, first + r, block, &w);
                add_octets(w, values, scales, lanes[r]);
            }
        }
        for (int r = 0; r < count; ++r) y[first + r] = add_lanes(lanes[r]);
    }
}

void tile(const Rows &rows, const TileToken *x, int tokens, bool all_digits, float *y, ptrdiff_t stride, const TileScratch &scratch) {
    for (int first = 0; first < rows.count; first += kTileRows) {
        const int count = rows.count - first < kTileRows ? rows.count - first : kTileRows;
        // Few tokens at a time: their lanes are all that is kept.
        for (int token = 0; token < tokens; token += kTileTokens) {
            const int width = tokens - token < kTileTokens ? tokens - token : kTileTokens;
            const auto lanes = [&](int r, int t) { return scratch.lanes + (r * kTileTokens + t) * kLanes; };
            std::memset(scratch.lanes, 0, sizeof(float) * kTileRows * kTileTokens * kLanes);
            for (int block = 0; block < blocks_of(rows.k); ++block) {
                Codes w[kTileRows];
                for (int r = 0; r < count; ++r) expand(rows, first + r, block, &w[r]);
                for (int t = 0; t < width; ++t) {
                    const uint8_t *high = x[token + t].high + static_cast<ptrdiff_t>(block) * kTileBlockBytes;
                    const int16_t *low = x[token + t].low + static_cast<ptrdiff_t>(block) * kTileCodes;
                    int32_t values[kBlock];
                    float scales[kBlockGroups];
                    for (int k = 0; k < kBlock; ++k) {
                        int16_t h;
                        std::memcpy(&h, high + tile_position(k) * 2, 2);
                        values[k] = h * (1 << kTileLowBits) + low[tile_position(k)];
                    }
                    for (int g = 0; g < kBlockGroups; ++g) {
                        std::memcpy(&scales[g], high + tile_scales(g / 2) + g % 2 * 16, 4);
                        scales[g] *= all_digits ? 1.0f : 1.0f / (1 << kTileLowBits);
                    }
                    for (int r = 0; r < count; ++r) add_octets(w[r], values, scales, lanes(r, t));
                }
            }
            for (int r = 0; r < count; ++r)
                for (int t = 0; t < width; ++t) y[(token + t) * stride + first + r] = add_lanes(lanes(r, t));
        }
    }
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

bool supported() { return true; }

}  // namespace

const Kernels kScalar = {"scalar", "plain C++", supported, peaks, vector, tile, read};

}  // namespace evrun
