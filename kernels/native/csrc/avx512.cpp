// The kernels with AVX-512, its byte permutations (VBMI) and byte products (VNNI). Built with its own flags: nothing here may
// be shared with other files, so only static functions of the headers are used.
//
// A vector holds 16 lanes. With few tokens these are two blocks of one row, so that a row is read in one go; with many they are
// one block of two rows.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "activation_math.h"
#include "byte_digits.h"
#include "kernels.h"

namespace evrun {

namespace {

#define EVRUN_INLINE inline __attribute__((always_inline))

inline __m512i load(const void *p) { return _mm512_loadu_si512(p); }
inline __m256i load_half(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
inline __m512i load_twice(const void *p) { return _mm512_broadcast_i64x4(load_half(p)); }
inline __m512 load_floats(const void *p) { return _mm512_castsi512_ps(load(p)); }
inline __m512 load_floats_twice(const void *p) { return _mm512_castsi512_ps(load_twice(p)); }
inline __m512i load_pair(const uint8_t *first, const uint8_t *second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load_half(first)), load_half(second), 1);
}

// 2w + kBias of the code in the lower nibble; VBMI looks at the lower 6 bits of an index, so the table is there four times.
inline __m512i code_values() {
    return _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

// Twice eight scale bytes -> fp32 in the order of lanes. A byte becomes the exponent; byte 0 is 2^-127, a subnormal.
inline __m512 scale_values(__m128i bytes) {
    const __m512i where = _mm512_slli_epi32(_mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15), 24);
    const __m512i spread = _mm512_maskz_permutexvar_epi8(0x8888888888888888, where, _mm512_castsi128_si512(bytes));
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_srli_epi32(spread, 1), _mm512_set1_epi32(0x00400000)));
}

// The lanes are l0 l2 l4 l6 l1 l3 l5 l7.
inline float add_lanes(__m256 lanes) {
    const __m128 pairs = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    const __m128 fours = _mm_add_ps(pairs, _mm_movehl_ps(pairs, pairs));
    return _mm_cvtss_f32(_mm_add_ss(fours, _mm_movehdup_ps(fours)));
}

inline __m128i load_scales(const uint8_t *p) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)); }
inline __m128i load_scales(const uint8_t *first, const uint8_t *second) {
    int64_t low, high;
    std::memcpy(&low, first, 8);
    std::memcpy(&high, second, 8);
    return _mm_set_epi64x(high, low);
}

// The last blocks of a row, filled up with zeros to `kBlocks`.
template <int kBlocks>
struct Tail {
    uint8_t codes[kBlocks * kBlockBytes] = {}, scales[kBlocks * kBlockGroups] = {};
    Tail(const uint8_t *row_codes, const uint8_t *row_scales, int k) {
        const int left = k % (kBlocks * kBlock), before = k - left;
        std::memcpy(codes, row_codes + before / 2, static_cast<size_t>(left / 2));
        std::memcpy(scales, row_scales + before / kGroup, static_cast<size_t>(left / kGroup));
    }
};

void extremes(const uint8_t *bytes, size_t count, uint8_t *least, uint8_t *most) {
    __m512i lows = _mm512_set1_epi8(-1), highs = _mm512_setzero_si512();
    for (size_t i = 0; i < count; i += 64) {
        const __mmask64 mask = count - i >= 64 ? ~__mmask64{0} : (__mmask64{1} << (count - i)) - 1;
        const __m512i v = _mm512_maskz_loadu_epi8(mask, bytes + i);
        lows = _mm512_mask_min_epu8(lows, mask, lows, v);
        highs = _mm512_max_epu8(highs, v);
    }
    uint8_t parts[2][64], low = 255, high = 0;
    std::memcpy(parts[0], &lows, 64);
    std::memcpy(parts[1], &highs, 64);
    for (int j = 0; j < 64; ++j) {
        low = parts[0][j] < low ? parts[0][j] : low;
        high = parts[1][j] > high ? parts[1][j] : high;
    }
    *least = low;
    *most = high;
}

// Two blocks as bytes in the order of digits.
struct Weights {
    __m512i vector[kByteVectors];
};

EVRUN_INLINE Weights decode(const uint8_t *first, const uint8_t *second) {
    // Eight groups of a row, four words each: a transpose of words within quarters leaves each group in its lane.
    const __m512i a = load_pair(first, second), b = load_pair(first + 32, second + 32);
    const __m512i c = load_pair(first + 64, second + 64), d = load_pair(first + 96, second + 96);
    const __m512i ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
    const __m512i cd_low = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
    const __m512i words[4] = {_mm512_unpacklo_epi64(ab_low, cd_low), _mm512_unpackhi_epi64(ab_low, cd_low),
                              _mm512_unpacklo_epi64(ab_high, cd_high), _mm512_unpackhi_epi64(ab_high, cd_high)};
    Weights w;
    for (int i = 0; i < 4; ++i) {
        w.vector[2 * i] = _mm512_permutexvar_epi8(words[i], code_values());
        w.vector[2 * i + 1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(words[i], 4), code_values());
    }
    return w;
}

// The sums of top * 65536 + middle * 256 + low in units of 256, rounded once.
EVRUN_INLINE __m512 join(__m512i top, __m512i middle) {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(top, kLowBits), middle));
}
EVRUN_INLINE __m512 join(__m512i top, __m512i middle, __m512i low) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), _mm512_set1_ps(1.0f / (1 << kLowBits)), join(top, middle));
}

// Not the intrinsics: GCC 12 drops them from the loops below.
EVRUN_INLINE void fetch_soon(const uint8_t *p) { asm volatile("prefetcht0 %0" : : "m"(*p)); }
EVRUN_INLINE void fetch_later(const uint8_t *p) { asm volatile("prefetcht1 %0" : : "m"(*p)); }

// How far ahead codes are fetched: from memory, at least, in whole rows; and from the second-level cache. Neither alone keeps
// enough lines on their way.
constexpr ptrdiff_t kLaterBytes = 4096, kSoonBytes = 1536;

EVRUN_INLINE void fetch_codes(const uint8_t *soon, const uint8_t *later, int bytes) {
    for (int line = 0; line < bytes; line += 64) {
        fetch_later(later + line);
        fetch_soon(soon + line);
    }
}

// Two blocks of one row times kTokens tokens.
template <int kTokens>
EVRUN_INLINE void add_blocks(const uint8_t *codes, const uint8_t *scales, const Token *x, ptrdiff_t blocks, __m256 *lanes) {
    const Weights w = decode(codes, codes + kBlockBytes);
    const __m512 w_scales = scale_values(load_scales(scales));
    for (int t = 0; t < kTokens; ++t) {
        const uint8_t *digits = x[t].blocks + blocks * kTokenBlock, *lows = x[t].low + blocks * kLowBlock;
        __m512i top = _mm512_setzero_si512(), middle = load(digits + kTokenStarts), low = load(lows + kLowStarts);
#pragma GCC unroll 8
        for (int v = 0; v < kByteVectors; ++v) {
            middle = _mm512_dpbusd_epi32(middle, w.vector[v], load(digits + v * 2 * kVectorBytes));
            top = _mm512_dpbusd_epi32(top, w.vector[v], load(digits + (v * 2 + 1) * kVectorBytes));
            low = _mm512_dpbusd_epi32(low, w.vector[v], load(lows + v * kVectorBytes));
        }
        const __m512 sums = join(top, middle, low), scale = _mm512_mul_ps(w_scales, load_floats(digits + kTokenScales));
        lanes[t] = _mm256_fmadd_ps(_mm512_castps512_ps256(sums), _mm512_castps512_ps256(scale), lanes[t]);
        lanes[t] = _mm256_fmadd_ps(_mm512_extractf32x8_ps(sums, 1), _mm512_extractf32x8_ps(scale, 1), lanes[t]);
    }
}

// One row times kTokens tokens: the weights of a step go from the packed codes into registers and no further.
template <int kTokens>
EVRUN_INLINE void row_times(const uint8_t *codes, const uint8_t *scales, int k, const uint8_t *later, const Token *x, float *y, ptrdiff_t stride) {
    constexpr int kStep = 2 * kBlock, kStepBytes = kStep / 2;
    const int full = k / kStep, left = k % kStep;
    const uint8_t *const soon = codes + kSoonBytes;
    __m256 lanes[kTokens];
    for (int t = 0; t < kTokens; ++t) lanes[t] = _mm256_setzero_ps();
    for (int b = 0; b < full; ++b) {
        fetch_codes(soon + b * kStepBytes, later + b * kStepBytes, kStepBytes);
        add_blocks<kTokens>(codes + b * kStepBytes, scales + b * (kStep / kGroup), x, b, lanes);
    }
    if (left) {
        fetch_codes(soon + full * kStepBytes, later + full * kStepBytes, left / 2);
        const Tail<2> tail(codes, scales, k);
        add_blocks<kTokens>(tail.codes, tail.scales, x, full, lanes);
    }
    for (int t = 0; t < kTokens; ++t) y[t * stride] = add_lanes(lanes[t]);
}

// Up to so many tokens rows are not expanded.
constexpr int kFewTokens = 2;

void few(const Rows &rows, const Token *x, int tokens, float *y) {
    const ptrdiff_t row_bytes = rows.k / 2, row_groups = rows.k / kGroup, stride = rows.count, lead = kLaterBytes / row_bytes + 1;
    for (int r = 0; r < rows.count; ++r) {
        const uint8_t *codes = rows.codes + r * row_bytes, *scales = rows.scales + r * row_groups;
        const uint8_t *later = r + lead < rows.count ? codes + lead * row_bytes : rows.next_codes + (r + lead - rows.count) * row_bytes;
        for (ptrdiff_t i = 0; i < row_groups; i += 64) fetch_later(rows.next_scales + r * row_groups + i);
        if (tokens == 2)
            row_times<2>(codes, scales, rows.k, later, x, y + r, stride);
        else
            row_times<1>(codes, scales, rows.k, later, x, y + r, stride);
    }
}

// Many tokens meet so many rows at a time, expanded over some blocks of K: vectors in the order of digits, those of the pairs of
// rows side by side, then a scale a lane.
constexpr int kTileRows = 16, kTilePairs = kTileRows / 2;
constexpr int kTileScales = kByteVectors * kTilePairs * 64;
constexpr int kTileBlock = kTileScales + kTilePairs * 64;
constexpr int kTileBlocks = 4;  // even: two blocks of a token lie together
static_assert(kTileBlock * kTileBlocks + 64 <= kManyRows * kManyBlocks * kRowBlock);
static_assert(kTokensAtOnce * kTileRows * kLanes + 16 <= kManyRows * kRowLanes);

void expand_pair(const uint8_t *first, const uint8_t *second, __m512 scales, uint8_t *out) {
    const Weights w = decode(first, second);
    for (int v = 0; v < kByteVectors; ++v) _mm512_store_si512(out + v * kTilePairs * 64, w.vector[v]);
    _mm512_store_ps(reinterpret_cast<float *>(out + kTileScales), scales);
}

void expand(const Rows &rows, int first_row, int first_block, int blocks, uint8_t *out) {
    const ptrdiff_t row_bytes = rows.k / 2, row_groups = rows.k / kGroup;
    const int full = rows.k / kBlock;
    for (int p = 0; p < kTilePairs; ++p, out += 64) {
        const uint8_t *codes = rows.codes + (first_row + 2 * p) * row_bytes, *scales = rows.scales + (first_row + 2 * p) * row_groups;
        uint8_t *to = out;
        for (int b = first_block; b < first_block + blocks; ++b, to += kTileBlock) {
            if (b < full) {
                expand_pair(codes + b * kBlockBytes, codes + row_bytes + b * kBlockBytes,
                            scale_values(load_scales(scales + b * kBlockGroups, scales + row_groups + b * kBlockGroups)), to);
            } else {
                const Tail<1> tail(codes, scales, rows.k), second(codes + row_bytes, scales + row_groups, rows.k);
                expand_pair(tail.codes, second.codes, scale_values(load_scales(tail.scales, second.scales)), to);
            }
        }
    }
}

// One block of kTileRows rows times one token.
template <bool kLow>
EVRUN_INLINE void add_tile(const uint8_t *w, const uint8_t *digits, const uint8_t *lows, float *lanes) {
    __m512i top[kTilePairs], middle[kTilePairs], low[kTilePairs];
    for (int p = 0; p < kTilePairs; ++p) {
        top[p] = _mm512_setzero_si512();
        middle[p] = load_twice(digits + kTokenStarts);
        low[p] = kLow ? load_twice(lows + kLowStarts) : top[p];
    }
#pragma GCC unroll 8
    for (int v = 0; v < kByteVectors; ++v) {
        const __m512i middle_digits = load_twice(digits + v * 2 * kVectorBytes), top_digits = load_twice(digits + (v * 2 + 1) * kVectorBytes);
        const __m512i low_digits = kLow ? load_twice(lows + v * kVectorBytes) : top_digits;
        for (int p = 0; p < kTilePairs; ++p) {
            const __m512i weights = _mm512_load_si512(w + (v * kTilePairs + p) * 64);
            middle[p] = _mm512_dpbusd_epi32(middle[p], weights, middle_digits);
            top[p] = _mm512_dpbusd_epi32(top[p], weights, top_digits);
            if (kLow) low[p] = _mm512_dpbusd_epi32(low[p], weights, low_digits);
        }
    }
    const __m512 x_scales = load_floats_twice(digits + kTokenScales);
    for (int p = 0; p < kTilePairs; ++p) {
        const __m512 sum = kLow ? join(top[p], middle[p], low[p]) : join(top[p], middle[p]);
        const __m512 scales = _mm512_mul_ps(_mm512_load_ps(w + kTileScales + p * 64), x_scales);
        _mm512_store_ps(lanes + p * 16, _mm512_fmadd_ps(sum, scales, _mm512_load_ps(lanes + p * 16)));
    }
}

// Fetches some bytes with each block.
void add_tiles(const uint8_t *w, int blocks, const Token &x, ptrdiff_t first_block, float *lanes, const uint8_t *later, int bytes) {
    for (ptrdiff_t b = first_block; b < first_block + blocks; ++b, w += kTileBlock) {
        const uint8_t *digits = x.blocks + b / 2 * kTokenBlock + b % 2 * (kVectorBytes / 2);
        const uint8_t *lows = x.low + b / 2 * kLowBlock + b % 2 * (kVectorBytes / 2);
        for (int line = 0; line < bytes; line += 64, later += 64) fetch_later(later);
        uint64_t used;
        std::memcpy(&used, x.used + b * kBlockGroups, 8);
        if (used)
            add_tile<true>(w, digits, lows, lanes);
        else
            add_tile<false>(w, digits, lows, lanes);
    }
}

// The sums of kTileRows rows; as add_lanes, for all at once.
EVRUN_INLINE void add_tile_lanes(const float *lanes, float *y) {
    __m512 fours[2];
    for (int half = 0; half < 2; ++half) {
        __m512 pairs[2];
        for (int i = 0; i < 2; ++i) {
            const float *from = lanes + (half * 4 + i * 2) * 16;
            const __m512 a = _mm512_load_ps(from), b = _mm512_load_ps(from + 16);
            pairs[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));  // a quarter a row
        }
        fours[half] = _mm512_add_ps(_mm512_shuffle_ps(pairs[0], pairs[1], 0x44), _mm512_shuffle_ps(pairs[0], pairs[1], 0xEE));
    }
    const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(fours[0], fours[1], 0x88), _mm512_shuffle_ps(fours[0], fours[1], 0xDD));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_ps(y, _mm512_permutexvar_ps(order, sums));
}

uint8_t *aligned(void *p) { return reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64); }

void many(const Rows &rows, const Token *x, int tokens, float *y, const Scratch &scratch) {
    const int blocks = blocks_of(rows.k);
    uint8_t *const tile = aligned(scratch.rows);
    float *const lanes = reinterpret_cast<float *>(aligned(scratch.lanes));
    constexpr ptrdiff_t kTokenLanes = kTileRows * kLanes;
    for (int first = 0; first < tokens; first += kTokensAtOnce) {
        const int count = tokens - first < kTokensAtOnce ? tokens - first : kTokensAtOnce;
        const int share = (kTileRows * kBlockBytes / count + 63) / 64 * 64;
        for (int row = 0; row < rows.count; row += kTileRows) {
            // What will be expanded next is fetched with the tokens, a share of it with each block.
            const uint8_t *later = row + kTileRows < rows.count ? rows.codes + (row + kTileRows) * (rows.k / 2) : rows.next_codes;
            std::memset(lanes, 0, sizeof(float) * static_cast<size_t>(count * kTokenLanes));
            for (int b = 0; b < blocks; b += kTileBlocks) {
                const int width = blocks - b < kTileBlocks ? blocks - b : kTileBlocks;
                expand(rows, row, b, width, tile);
                for (int t = 0; t < count; ++t) {
                    const int bytes = t * share < kTileRows * kBlockBytes ? share : 0;
                    add_tiles(tile, width, x[first + t], b, lanes + t * kTokenLanes, later, bytes);
                    later += width * bytes;
                }
            }
            for (int t = 0; t < count; ++t) add_tile_lanes(lanes + t * kTokenLanes, y + static_cast<ptrdiff_t>(first + t) * rows.count + row);
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
    const __m512i magnitude = _mm512_set1_epi16(0x3F80), sign = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
    const __m512 up = _mm512_set1_ps(256.0f);
    int64_t i = 0;
    for (; i + kGroup <= columns; i += kGroup) {
        const __m512i wide = _mm512_cvtepu8_epi16(load_half(codes + i));
        const __m512i half = _mm512_or_si512(_mm512_and_si512(_mm512_slli_epi16(wide, 7), magnitude), _mm512_and_si512(_mm512_slli_epi16(wide, 8), sign));
        const __m512 scale = _mm512_set1_ps(scales[i / kGroup]);
        const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(half)), high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
        _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_mul_ps(low, up), scale));
        _mm512_storeu_ps(out + i + 16, _mm512_mul_ps(_mm512_mul_ps(high, up), scale));
    }
    for (; i < columns; ++i) out[i] = from_e4m3(codes[i]) * scales[i / kGroup];
}

uint64_t read(const uint8_t *start, size_t bytes) {
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (size_t i = 0; i + 256 <= bytes; i += 256) {
        a = _mm512_add_epi64(a, load(start + i));
        b = _mm512_add_epi64(b, load(start + i + 64));
        c = _mm512_add_epi64(c, load(start + i + 128));
        d = _mm512_add_epi64(d, load(start + i + 192));
    }
    uint64_t parts[8], sum = 0;  // the library's own sum of lanes overflows as a signed number
    _mm512_storeu_si512(parts, _mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d)));
    for (uint64_t part : parts) sum += part;
    return sum;
}

uint64_t multiply_add(uint64_t steps) {
    constexpr int kSums = 12;
    __m512 sums[kSums] = {};
    const __m512 factor = _mm512_set1_ps(0.5f);
    for (uint64_t i = 0; i < steps; ++i)
        for (__m512 &sum : sums) {
            sum = _mm512_fmadd_ps(sum, factor, factor);
            asm volatile("" : "+v"(sum));
        }
    return steps * kSums * 16 * 2;
}

bool supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
}

}  // namespace

const Kernels kAvx512 = {"avx512",     "AVX-512 with VBMI and VNNI, 512-bit byte products", supported, kByteDigits, extremes, swiglu_group,
                         quantise_group, fix_group, multiply, dequantise, read, multiply_add};

}  // namespace evrun

#endif
