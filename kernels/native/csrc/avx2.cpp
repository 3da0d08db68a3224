// The kernels with AVX2, FMA and F16C (x86-64-v3). Built with its own flags: nothing here may be shared with other files,
// so only static functions of the headers are used.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "activation_math.h"
#include "kernels.h"
#include "wide_digits.h"

namespace evrun {

namespace {

#define EVRUN_INLINE inline __attribute__((always_inline))

inline __m256i load(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
inline void store(void *p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i *>(p), v); }

inline __m256i code_values() {
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
}

// Eight scale bytes -> fp32 in the order of lanes. A byte becomes the exponent; byte 0 is 2^-127, a subnormal.
inline __m256 scale_values(uint64_t bytes) {
    const __m256i where = _mm256_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 2, -1, -1, -1, 4, -1, -1, -1, 6,  //
                                           -1, -1, -1, 1, -1, -1, -1, 3, -1, -1, -1, 5, -1, -1, -1, 7);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi64x(static_cast<int64_t>(bytes)), where);
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_srli_epi32(spread, 1), _mm256_set1_epi32(0x00400000)));
}

// The lanes are l0 l2 l4 l6 l1 l3 l5 l7.
inline float add_lanes(__m256 lanes) {
    const __m128 pairs = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    const __m128 fours = _mm_add_ps(pairs, _mm_movehl_ps(pairs, pairs));
    return _mm_cvtss_f32(_mm_add_ss(fours, _mm_movehdup_ps(fours)));
}

inline uint64_t load_scales(const uint8_t *p) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    return v;
}

// The last, partial block of a row, filled up with zeros.
struct Tail {
    uint8_t codes[kBlockBytes];
    uint64_t scales;
    Tail(const uint8_t *row_codes, const uint8_t *row_scales, int k) {
        const int left = k % kBlock, full = k / kBlock;
        std::memset(codes, 0, sizeof codes);
        scales = 0;
        std::memcpy(codes, row_codes + full * kBlockBytes, static_cast<size_t>(left / 2));
        std::memcpy(&scales, row_scales + full * kBlockGroups, static_cast<size_t>(left / kGroup));
    }
};

void extremes(const uint8_t *bytes, size_t count, uint8_t *least, uint8_t *most) {
    uint8_t low = 255, high = 0;
    size_t i = 0;
    if (count >= 32) {
        __m256i lows = load(bytes), highs = lows;
        for (i = 32; i + 32 <= count; i += 32) {
            lows = _mm256_min_epu8(lows, load(bytes + i));
            highs = _mm256_max_epu8(highs, load(bytes + i));
        }
        uint8_t parts[2][32];
        store(parts[0], lows);
        store(parts[1], highs);
        for (int j = 0; j < 32; ++j) {
            low = parts[0][j] < low ? parts[0][j] : low;
            high = parts[1][j] > high ? parts[1][j] : high;
        }
    }
    for (; i < count; ++i) {
        low = bytes[i] < low ? bytes[i] : low;
        high = bytes[i] > high ? bytes[i] : high;
    }
    *least = low;
    *most = high;
}

// Keeps the compiler from rearranging sums until they no longer fit into the registers, and from loading a vector twice.
EVRUN_INLINE void settle(__m256i &v) { asm("" : "+x"(v)); }

// The packed words of a block, word w of each group in its lane.
struct Words {
    __m256i word[4];
};

EVRUN_INLINE Words transpose(const uint8_t *codes) {
    const __m256i a = load(codes), b = load(codes + 32), c = load(codes + 64), d = load(codes + 96);
    const __m256i ab_low = _mm256_unpacklo_epi32(a, b), ab_high = _mm256_unpackhi_epi32(a, b);
    const __m256i cd_low = _mm256_unpacklo_epi32(c, d), cd_high = _mm256_unpackhi_epi32(c, d);
    return {{_mm256_unpacklo_epi64(ab_low, cd_low), _mm256_unpackhi_epi64(ab_low, cd_low), _mm256_unpacklo_epi64(ab_high, cd_high),
             _mm256_unpackhi_epi64(ab_high, cd_high)}};
}

// 2w of the lower and of the upper nibbles of a word, as int8.
struct Nibbles {
    __m256i lower, upper;
};

EVRUN_INLINE Nibbles decode(__m256i word) {
    const __m256i nibble = _mm256_set1_epi8(15);
    return {_mm256_shuffle_epi8(code_values(), _mm256_and_si256(word, nibble)),
            _mm256_shuffle_epi8(code_values(), _mm256_and_si256(_mm256_srli_epi16(word, 4), nibble))};
}

// One word's products with its two vectors of low digits in 16 bits: at most 4 * 255 * 12, so that two words can be added.
EVRUN_INLINE __m256i low_products(__m256i lower, __m256i upper, const uint8_t *low, int word) {
    return _mm256_add_epi16(_mm256_maddubs_epi16(load(low + word * 64), lower), _mm256_maddubs_epi16(load(low + word * 64 + 32), upper));
}

EVRUN_INLINE __m256i widen(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }

// high + low / 256, rounded once.
inline __m256 join(__m256i high, __m256i low) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(low), _mm256_set1_ps(1.0f / (1 << kLowBits)), _mm256_cvtepi32_ps(high));
}

// Not the intrinsic: GCC 12 drops it from the loops below. Codes are used once; scales are read twice.
EVRUN_INLINE void fetch_codes(const uint8_t *p) { asm volatile("prefetchnta %0" : : "m"(*p)); }
EVRUN_INLINE void fetch_scales(const uint8_t *p) { asm volatile("prefetcht0 %0" : : "m"(*p)); }

// How far ahead codes are fetched, at least. Whole rows, so that the fetches of a row run through one linear piece.
constexpr int kAheadBytes = 2048;

// One block of one row times kTokens tokens. `kLow`: low digits are added whether a block has some or not; else where it has.
template <int kTokens, bool kLow>
EVRUN_INLINE void add_block(const uint8_t *codes, uint64_t row_scales, const Token *x, ptrdiff_t block, __m256 *lanes) {
    const __m256i odd = _mm256_set1_epi16(static_cast<int16_t>(0xFF00));
    const Words words = transpose(codes);
    const uint8_t *digits[kTokens], *lows[kTokens];
    bool with_low[kTokens];
    __m256i high[kTokens], low[kTokens];
    for (int t = 0; t < kTokens; ++t) {
        digits[t] = x[t].blocks + block * kTokenBlock;
        lows[t] = x[t].low + block * kBlock;
        low[t] = _mm256_setzero_si256();
        with_low[t] = kLow || __builtin_expect(load_scales(x[t].used + block * kBlockGroups) != 0, 0);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        // The weights stand in the upper bytes, so that products are 256 times as large: those of two words fit into 31 bits.
        __m256i sum[kTokens], low_sum[kTokens];
        for (int t = 0; t < kTokens; ++t) low_sum[t] = _mm256_setzero_si256();
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const int word = half * 2 + i;
            const Nibbles n = decode(words.word[word]);
            const __m256i weights[4] = {_mm256_slli_epi16(n.lower, 8), _mm256_and_si256(n.lower, odd), _mm256_slli_epi16(n.upper, 8),
                                        _mm256_and_si256(n.upper, odd)};
            for (int t = 0; t < kTokens; ++t) {
                const auto product = [&](int v) { return _mm256_madd_epi16(weights[v], load(digits[t] + (word * 4 + v) * 32)); };
                const __m256i products = _mm256_add_epi32(_mm256_add_epi32(product(0), product(1)), _mm256_add_epi32(product(2), product(3)));
                sum[t] = i == 0 ? products : _mm256_add_epi32(sum[t], products);
                settle(sum[t]);
            }
            for (int t = 0; t < kTokens; ++t)
                if (with_low[t]) low_sum[t] = _mm256_add_epi16(low_sum[t], low_products(n.lower, n.upper, lows[t], word));
        }
        for (int t = 0; t < kTokens; ++t) {
            const __m256i part = _mm256_srai_epi32(sum[t], 8);
            high[t] = half ? _mm256_add_epi32(high[t], part) : part;
            if (with_low[t]) low[t] = _mm256_add_epi32(low[t], widen(low_sum[t]));
        }
    }
    const __m256 w_scales = scale_values(row_scales);
    for (int t = 0; t < kTokens; ++t) {
        const __m256 x_scales = _mm256_loadu_ps(reinterpret_cast<const float *>(digits[t] + kTokenScales));
        const __m256 sum = with_low[t] ? join(high[t], low[t]) : _mm256_cvtepi32_ps(high[t]);
        lanes[t] = _mm256_fmadd_ps(sum, _mm256_mul_ps(w_scales, x_scales), lanes[t]);
    }
}

// One row times kTokens tokens: the weights of a step go from the packed codes into registers and no further.
template <int kTokens, bool kLow>
EVRUN_INLINE void row_times(const uint8_t *codes, const uint8_t *scales, int k, const uint8_t *ahead, const Token *x, float *y, ptrdiff_t stride) {
    const int full = k / kBlock;
    __m256 lanes[kTokens];
    for (int t = 0; t < kTokens; ++t) lanes[t] = _mm256_setzero_ps();
    for (int b = 0; b < full; ++b) {
        fetch_codes(ahead + b * kBlockBytes);
        fetch_codes(ahead + b * kBlockBytes + 64);
        add_block<kTokens, kLow>(codes + b * kBlockBytes, load_scales(scales + b * kBlockGroups), x, b, lanes);
    }
    if (k % kBlock) {
        const Tail tail(codes, scales, k);
        add_block<kTokens, kLow>(tail.codes, tail.scales, x, full, lanes);
    }
    for (int t = 0; t < kTokens; ++t) y[t * stride] = add_lanes(lanes[t]);
}

// Whether most blocks of some tokens have low digits: then they are added without asking. The sums are the same.
bool mostly_low(const Token *x, int tokens, int k) {
    const int blocks = blocks_of(k);
    int with = 0;
    for (int t = 0; t < tokens; ++t)
        for (int b = 0; b < blocks; ++b) with += load_scales(x[t].used + b * kBlockGroups) != 0;
    return 2 * with > tokens * blocks;
}

// Up to so many tokens a row is not expanded.
constexpr int kFewTokens = 6;

void few(const Rows &rows, const Token *x, int tokens, float *y) {
    const ptrdiff_t row_bytes = rows.k / 2, row_groups = rows.k / kGroup, stride = rows.count;
    const int lead = static_cast<int>(kAheadBytes / row_bytes) + 1;
    bool low[(kFewTokens + 1) / 2];
    for (int t = 0; t < tokens; t += 2) low[t / 2] = mostly_low(x + t, tokens - t < 2 ? 1 : 2, rows.k);
    for (int r = 0; r < rows.count; ++r) {
        const uint8_t *codes = rows.codes + r * row_bytes, *scales = rows.scales + r * row_groups;
        const uint8_t *ahead = r + lead < rows.count ? codes + lead * row_bytes : rows.next_codes + (r + lead - rows.count) * row_bytes;
        for (ptrdiff_t i = 0; i < row_groups; i += 64) fetch_scales(rows.next_scales + r * row_groups + i);
        for (int t = 0; t < tokens; t += 2) {
            float *to = y + t * stride + r;
            const bool all = low[t / 2];
            if (tokens - t >= 2)
                all ? row_times<2, true>(codes, scales, rows.k, ahead, x + t, to, stride)
                    : row_times<2, false>(codes, scales, rows.k, ahead, x + t, to, stride);
            else
                all ? row_times<1, true>(codes, scales, rows.k, ahead, x + t, to, stride)
                    : row_times<1, false>(codes, scales, rows.k, ahead, x + t, to, stride);
        }
    }
}

// One block of one row, expanded (kernels.h).
inline void expand_block(const uint8_t *codes, uint64_t scales, uint8_t *out) {
    const Words words = transpose(codes);
    for (int w = 0; w < 4; ++w) {
        const Nibbles n = decode(words.word[w]);
        store(out + (w * 4 + 0) * 32, _mm256_srai_epi16(_mm256_slli_epi16(n.lower, 8), 8));
        store(out + (w * 4 + 1) * 32, _mm256_srai_epi16(n.lower, 8));
        store(out + (w * 4 + 2) * 32, _mm256_srai_epi16(_mm256_slli_epi16(n.upper, 8), 8));
        store(out + (w * 4 + 3) * 32, _mm256_srai_epi16(n.upper, 8));
        store(out + kRowBytes + w * 64, n.lower);
        store(out + kRowBytes + w * 64 + 32, n.upper);
    }
    _mm256_storeu_ps(reinterpret_cast<float *>(out + kRowScales), scale_values(scales));
}

void expand(const Rows &rows, int first_row, int count, int first_block, int blocks, uint8_t *out) {
    const ptrdiff_t row_bytes = rows.k / 2, row_groups = rows.k / kGroup;
    const int full = rows.k / kBlock;
    for (int r = first_row; r < first_row + count; ++r) {
        const uint8_t *codes = rows.codes + r * row_bytes, *scales = rows.scales + r * row_groups;
        // What will be expanded next: the same rows further on, or the rows after these.
        const ptrdiff_t ahead = first_block + blocks < blocks_of(rows.k) ? blocks * kBlockBytes : count * row_bytes - first_block * kBlockBytes;
        for (int b = first_block; b < first_block + blocks; ++b, out += kRowBlock) {
            if (b < full) {
                fetch_codes(codes + b * kBlockBytes + ahead);
                fetch_codes(codes + b * kBlockBytes + ahead + 64);
                expand_block(codes + b * kBlockBytes, load_scales(scales + b * kBlockGroups), out);
            } else {
                const Tail tail(codes, scales, rows.k);
                expand_block(tail.codes, tail.scales, out);
            }
        }
    }
}

constexpr int kMicroRows = 4;

// kMicroRows expanded rows, w_stride apart, times kTokens tokens over some blocks; lanes: those of the first row and token.
template <int kTokens>
void micro(const uint8_t *w, ptrdiff_t w_stride, const Token *tokens, ptrdiff_t first_block, int blocks, float *lanes) {
    Token x[kTokens];
    for (int t = 0; t < kTokens; ++t)
        x[t] = {tokens[t].blocks + first_block * kTokenBlock, tokens[t].low + first_block * kBlock, tokens[t].used + first_block * kBlockGroups};
    for (int b = 0; b < blocks; ++b, w += kRowBlock) {
        __m256i high[kTokens][kMicroRows];
#pragma GCC unroll 16
        for (int v = 0; v < kHighVectors; ++v) {
            __m256i digits[kTokens];
            for (int t = 0; t < kTokens; ++t) digits[t] = load(x[t].blocks + v * 32);
            for (int r = 0; r < kMicroRows; ++r) {
                __m256i weights = load(w + r * w_stride + v * 32);
                settle(weights);
                for (int t = 0; t < kTokens; ++t) {
                    const __m256i products = _mm256_madd_epi16(weights, digits[t]);
                    high[t][r] = v ? _mm256_add_epi32(high[t][r], products) : products;
                    settle(high[t][r]);
                }
            }
        }
        for (int t = 0; t < kTokens; ++t) {
            const __m256 x_scale = _mm256_loadu_ps(reinterpret_cast<const float *>(x[t].blocks + kTokenScales));
            const bool with_low = __builtin_expect(load_scales(x[t].used) != 0, 0);
            for (int r = 0; r < kMicroRows; ++r) {
                const uint8_t *row = w + r * w_stride;
                __m256 sum = _mm256_cvtepi32_ps(high[t][r]);
                if (with_low) {
                    __m256i low = _mm256_setzero_si256();
                    for (int word = 0; word < 4; word += 2) {
                        const uint8_t *bytes = row + kRowBytes + word * 64;
                        low = _mm256_add_epi32(low, widen(_mm256_add_epi16(low_products(load(bytes), load(bytes + 32), x[t].low, word),
                                                                           low_products(load(bytes + 64), load(bytes + 96), x[t].low, word + 1))));
                    }
                    sum = join(high[t][r], low);
                }
                const __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(reinterpret_cast<const float *>(row + kRowScales)), x_scale);
                float *lane = lanes + r * kRowLanes + t * kLanes;
                _mm256_storeu_ps(lane, _mm256_fmadd_ps(sum, scale, _mm256_loadu_ps(lane)));
            }
        }
        for (int t = 0; t < kTokens; ++t) x[t] = {x[t].blocks + kTokenBlock, x[t].low + kBlock, x[t].used + kBlockGroups};
    }
}

void many(const Rows &rows, const Token *x, int tokens, float *y, const Scratch &scratch) {
    const int blocks = blocks_of(rows.k);
    for (int first = 0; first < tokens; first += kTokensAtOnce) {
        const int count = tokens - first < kTokensAtOnce ? tokens - first : kTokensAtOnce;
        for (int row = 0; row < rows.count; row += kManyRows) {
            const int height = rows.count - row < kManyRows ? rows.count - row : kManyRows;
            std::memset(scratch.lanes, 0, sizeof(float) * static_cast<size_t>(height) * kRowLanes);
            for (int b = 0; b < blocks; b += kManyBlocks) {
                const int width = blocks - b < kManyBlocks ? blocks - b : kManyBlocks;
                expand(rows, row, height, b, width, scratch.rows);
                const ptrdiff_t w_stride = static_cast<ptrdiff_t>(width) * kRowBlock;
                for (int r = 0; r < height; r += kMicroRows) {
                    const uint8_t *w = scratch.rows + r * w_stride;
                    float *lanes = scratch.lanes + r * kRowLanes;
                    int t = 0;
                    for (; t + 2 <= count; t += 2) micro<2>(w, w_stride, x + first + t, b, width, lanes + t * kLanes);
                    if (t < count) micro<1>(w, w_stride, x + first + t, b, width, lanes + t * kLanes);
                }
            }
            for (int r = 0; r < height; ++r)
                for (int t = 0; t < count; ++t) {
                    const float *lanes = scratch.lanes + r * kRowLanes + t * kLanes;
                    y[static_cast<ptrdiff_t>(first + t) * rows.count + row + r] = add_lanes(_mm256_loadu_ps(lanes));
                }
        }
    }
}

void multiply(const Rows &rows, const Token *x, int tokens, float *y, const Scratch &scratch) {
    if (tokens <= kFewTokens)
        few(rows, x, tokens, y);
    else
        many(rows, x, tokens, y, scratch);
}

// A code's bits at their places in an fp16 are its value x 2^-8, subnormals included; conversion to fp32 is exact.
void dequantise(const uint8_t *codes, const float *scales, int64_t columns, float *out) {
    const __m256i magnitude = _mm256_set1_epi16(0x3F80), sign = _mm256_set1_epi16(static_cast<int16_t>(0x8000));
    const __m256 up = _mm256_set1_ps(256.0f);
    int64_t i = 0;
    for (; i + 16 <= columns; i += 16) {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(codes + i)));
        const __m256i half = _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(wide, 7), magnitude), _mm256_and_si256(_mm256_slli_epi16(wide, 8), sign));
        const __m256 scale = _mm256_set1_ps(scales[i / kGroup]);
        const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(half)), high = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_mul_ps(low, up), scale));
        _mm256_storeu_ps(out + i + 8, _mm256_mul_ps(_mm256_mul_ps(high, up), scale));
    }
    for (; i < columns; ++i) out[i] = from_e4m3(codes[i]) * scales[i / kGroup];
}

uint64_t read(const uint8_t *start, size_t bytes) {
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (size_t i = 0; i + 128 <= bytes; i += 128) {
        a = _mm256_add_epi64(a, load(start + i));
        b = _mm256_add_epi64(b, load(start + i + 32));
        c = _mm256_add_epi64(c, load(start + i + 64));
        d = _mm256_add_epi64(d, load(start + i + 96));
    }
    const __m256i sum = _mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(c, d));
    uint64_t parts[4];
    store(parts, sum);
    return parts[0] + parts[1] + parts[2] + parts[3];
}

uint64_t multiply_add(uint64_t steps) {
    constexpr int kSums = 12;
    __m256 sums[kSums] = {};
    const __m256 factor = _mm256_set1_ps(0.5f);
    for (uint64_t i = 0; i < steps; ++i)
        for (__m256 &sum : sums) {
            sum = _mm256_fmadd_ps(sum, factor, factor);
            asm volatile("" : "+x"(sum));
        }
    return steps * kSums * 8 * 2;
}

bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }

}  // namespace

const Kernels kAvx2 = {"avx2", "AVX2 and FMA, 256-bit integer products", supported, kWideDigits, extremes, swiglu_group, quantise_group, fix_group, multiply, dequantise, read, multiply_add};

}  // namespace evrun

#endif
