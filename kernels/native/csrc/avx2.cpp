// The kernels with AVX2 and FMA (x86-64-v3). Built with its own flags: nothing here may be shared with other files,
// so only static functions of the headers are used.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "kernels.h"

namespace evrun {

namespace {

inline __m256i load(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
inline void store(void *p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i *>(p), v); }

inline __m256i code_values() {
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
}

// Eight scale bytes -> fp32, groups 0 2 4 6 in the lower half and 1 3 5 7 in the upper, so that `step_scales` needs no
// move between the halves. A byte becomes the exponent; byte 0 is 2^-127, a subnormal.
inline __m256 scale_values(uint64_t bytes) {
    const __m256i where = _mm256_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 2, -1, -1, -1, 4, -1, -1, -1, 6,  //
                                           -1, -1, -1, 1, -1, -1, -1, 3, -1, -1, -1, 5, -1, -1, -1, 7);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi64x(static_cast<int64_t>(bytes)), where);
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_srli_epi32(spread, 1), _mm256_set1_epi32(0x00400000)));
}

// The scales of the two groups of a step, one a lane.
template <int kStep>
inline __m256 step_scales(__m256 scales) {
    return _mm256_permute_ps(scales, kStep * 0x55);
}

inline float add_lanes(__m256 lower, __m256 upper) {
    const __m256 eight = _mm256_add_ps(lower, upper);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
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

void peaks(const uint8_t *scales, int rows, int groups, uint8_t *out) {
    for (int r = 0; r < rows; ++r) {
        int peak = 0, g = 0;
        if (groups >= 32) {
            __m256i largest = _mm256_setzero_si256();
            for (; g + 32 <= groups; g += 32) largest = _mm256_max_epu8(largest, load(scales + g));
            largest = _mm256_max_epu8(largest, load(scales + groups - 32));
            g = groups;
            __m128i v = _mm_max_epu8(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
            v = _mm_xor_si128(v, _mm_set1_epi8(-1));  // the largest byte is the smallest complement
            v = _mm_min_epu8(v, _mm_srli_epi16(v, 8));
            peak = 255 - _mm_extract_epi16(_mm_minpos_epu16(_mm_and_si128(v, _mm_set1_epi16(255))), 0);
        }
        for (; g < groups; ++g) peak = scales[g] > peak ? scales[g] : peak;
        out[r] = static_cast<uint8_t>(peak);
        scales += groups;
    }
}

// 32-bit sums of the eight products of each octet of one step, in units of the middle digit; with kLow of the low one.
template <bool kLow>
inline __m256i octets(const uint8_t *codes, const uint8_t *digits, int step) {
    const __m256i nibble = _mm256_set1_epi8(15);
    const uint8_t *x = digits + step * kStepBytes;
    const auto plane = [x](int p) { return load(x + p * kBlockBytes); };
    const __m256i signed_codes = _mm256_xor_si256(load(codes + step * kStepBytes), plane(kSign));
    const __m256i even = _mm256_shuffle_epi8(code_values(), _mm256_and_si256(signed_codes, nibble));
    const __m256i odd = _mm256_shuffle_epi8(code_values(), _mm256_and_si256(_mm256_srli_epi16(signed_codes, 4), nibble));
    // At most 4 * 255 * 12 a 16-bit sum.
    const __m256i high = _mm256_add_epi16(_mm256_maddubs_epi16(plane(kHighEven), even), _mm256_maddubs_epi16(plane(kHighOdd), odd));
    const __m256i middle = _mm256_add_epi16(_mm256_maddubs_epi16(plane(kMiddleEven), even), _mm256_maddubs_epi16(plane(kMiddleOdd), odd));
    const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(256)), _mm256_madd_epi16(middle, _mm256_set1_epi16(1)));
    if (!kLow) return sum;
    const __m256i low = _mm256_add_epi16(_mm256_maddubs_epi16(plane(kLowEven), even), _mm256_maddubs_epi16(plane(kLowOdd), odd));
    return _mm256_add_epi32(_mm256_slli_epi32(sum, 8), _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
}

template <bool kAllDigits>
inline void vector_block(const uint8_t *codes, uint64_t scales, const uint8_t *digits, const float *x_scales, const uint8_t *low,
                         __m256 *lower, __m256 *upper) {
    const __m256 scale = _mm256_mul_ps(scale_values(scales), _mm256_loadu_ps(x_scales));
    if (kAllDigits || load_scales(low) == 0) {
        *lower = _mm256_fmadd_ps(_mm256_cvtepi32_ps(octets<kAllDigits>(codes, digits, 0)), step_scales<0>(scale), *lower);
        *upper = _mm256_fmadd_ps(_mm256_cvtepi32_ps(octets<kAllDigits>(codes, digits, 1)), step_scales<1>(scale), *upper);
        *lower = _mm256_fmadd_ps(_mm256_cvtepi32_ps(octets<kAllDigits>(codes, digits, 2)), step_scales<2>(scale), *lower);
        *upper = _mm256_fmadd_ps(_mm256_cvtepi32_ps(octets<kAllDigits>(codes, digits, 3)), step_scales<3>(scale), *upper);
    } else {
        const __m256 fine = _mm256_mul_ps(scale, _mm256_set1_ps(1.0f / 256));
        *lower = _mm256_fmadd_ps(_mm256_cvtepi32_ps(octets<true>(codes, digits, 0)), step_scales<0>(fine), *lower);
        *upper = _mm256_fmadd_ps(_mm256_cvtepi32_ps(octets<true>(codes, digits, 1)), step_scales<1>(fine), *upper);
        *lower = _mm256_fmadd_ps(_mm256_cvtepi32_ps(octets<true>(codes, digits, 2)), step_scales<2>(fine), *lower);
        *upper = _mm256_fmadd_ps(_mm256_cvtepi32_ps(octets<true>(codes, digits, 3)), step_scales<3>(fine), *upper);
    }
}

// How far ahead codes are fetched. Whole rows, so that the fetches of a row run through one linear piece.
constexpr int kAheadBytes = 4096;

inline const uint8_t *ahead_of(const Rows &rows, int r) {
    const ptrdiff_t row_bytes = rows.k / 2;
    const int lead = static_cast<int>(kAheadBytes / row_bytes) + 1, target = r + lead;
    if (target < rows.count || !rows.next) return rows.codes + target * row_bytes;
    return rows.next + (target - rows.count) * row_bytes;
}

inline void fetch(const uint8_t *p) { _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T0); }

template <bool kAllDigits>
void vector_rows(const Rows &rows, const VectorToken &x, float *y) {
    const ptrdiff_t row_bytes = rows.k / 2, row_groups = rows.k / kGroup;
    const int full = rows.k / kBlock;
    for (int r = 0; r < rows.count; ++r) {
        const uint8_t *codes = rows.codes + r * row_bytes, *scales = rows.scales + r * row_groups;
        const uint8_t *ahead = ahead_of(rows, r);
        __m256 lower = _mm256_setzero_ps(), upper = _mm256_setzero_ps();
        for (int b = 0; b < full; ++b) {
            fetch(ahead + b * kBlockBytes);
            fetch(ahead + b * kBlockBytes + 64);
            vector_block<kAllDigits>(codes + b * kBlockBytes, load_scales(scales + b * kBlockGroups), x.digits + b * kVectorBlockBytes,
                                     x.scale + b * kBlockGroups, x.low + b * kBlockGroups, &lower, &upper);
        }
        if (rows.k % kBlock) {
            const Tail tail(codes, scales, rows.k);
            vector_block<kAllDigits>(tail.codes, tail.scales, x.digits + full * kVectorBlockBytes, x.scale + full * kBlockGroups,
                                     x.low + full * kBlockGroups, &lower, &upper);
        }
        y[r] = add_lanes(lower, upper);
    }
}

void vector(const Rows &rows, const VectorToken &x, bool all_digits, float *y) {
    if (all_digits)
        vector_rows<true>(rows, x, y);
    else
        vector_rows<false>(rows, x, y);
}

// One block of one row as a tile block: 2w as int16 and a scale a lane.
inline void expand_block(const uint8_t *codes, uint64_t scales, uint8_t *out) {
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int step = 0; step < kSteps; ++step) {
        const __m256i v = load(codes + step * kStepBytes);
        const __m256i even = _mm256_shuffle_epi8(code_values(), _mm256_and_si256(v, nibble));
        const __m256i odd = _mm256_shuffle_epi8(code_values(), _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble));
        store(out + tile_vector(step, 0), _mm256_srai_epi16(_mm256_slli_epi16(even, 8), 8));
        store(out + tile_vector(step, 1), _mm256_srai_epi16(even, 8));
        store(out + tile_vector(step, 2), _mm256_srai_epi16(_mm256_slli_epi16(odd, 8), 8));
        store(out + tile_vector(step, 3), _mm256_srai_epi16(odd, 8));
    }
    const __m256 scale = scale_values(scales);
    float *lanes = reinterpret_cast<float *>(out + tile_scales(0));
    _mm256_storeu_ps(lanes, step_scales<0>(scale));
    _mm256_storeu_ps(lanes + 8, step_scales<1>(scale));
    _mm256_storeu_ps(lanes + 16, step_scales<2>(scale));
    _mm256_storeu_ps(lanes + 24, step_scales<3>(scale));
}

void expand(const Rows &rows, int first_row, int count, int first_block, int blocks, uint8_t *out) {
    const ptrdiff_t row_bytes = rows.k / 2, row_groups = rows.k / kGroup;
    const int full = rows.k / kBlock;
    for (int r = first_row; r < first_row + count; ++r) {
        const uint8_t *codes = rows.codes + r * row_bytes, *scales = rows.scales + r * row_groups;
        for (int b = first_block; b < first_block + blocks; ++b, out += kTileBlockBytes) {
            if (b < full) {
                // What the next pass over this row, or the next rows, will expand.
                fetch(codes + (b + blocks) * kBlockBytes);
                fetch(codes + (b + blocks) * kBlockBytes + 64);
                expand_block(codes + b * kBlockBytes, load_scales(scales + b * kBlockGroups), out);
            } else {
                const Tail tail(codes, scales, rows.k);
                expand_block(tail.codes, tail.scales, out);
            }
        }
    }
}

constexpr int kMicroRows = 4;

// `w`: kMicroRows rows of expanded blocks, w_stride apart; `lanes`: kTileTokens * kLanes a row, of which kTokens tokens.
template <int kTokens, bool kAllDigits>
void micro(const uint8_t *w, ptrdiff_t w_stride, const TileToken *x, int first_block, int blocks, float *lanes) {
    for (int b = 0; b < blocks; ++b) {
        const uint8_t *wb = w + static_cast<ptrdiff_t>(b) * kTileBlockBytes;
        const ptrdiff_t x_block = first_block + b;
        for (int step = 0; step < kSteps; ++step) {
            __m256i sum[kMicroRows][kTokens];
            for (int v = 0; v < 4; ++v) {
                __m256i xv[kTokens];
                for (int t = 0; t < kTokens; ++t) xv[t] = load(x[t].high + x_block * kTileBlockBytes + tile_vector(step, v));
                for (int r = 0; r < kMicroRows; ++r) {
                    const __m256i wv = load(wb + r * w_stride + tile_vector(step, v));
                    for (int t = 0; t < kTokens; ++t) {
                        const __m256i products = _mm256_madd_epi16(wv, xv[t]);
                        sum[r][t] = v ? _mm256_add_epi32(sum[r][t], products) : products;
                    }
                }
            }
            for (int t = 0; t < kTokens; ++t) {
                __m256 x_scale = _mm256_loadu_ps(reinterpret_cast<const float *>(x[t].high + x_block * kTileBlockBytes + tile_scales(step)));
                uint16_t used;
                std::memcpy(&used, x[t].used + x_block * kBlockGroups + step * 2, 2);
                if (kAllDigits || used) {
                    const uint8_t *low = reinterpret_cast<const uint8_t *>(x[t].low + x_block * kTileCodes);
                    for (int r = 0; r < kMicroRows; ++r) {
                        __m256i fine = _mm256_slli_epi32(sum[r][t], kTileLowBits);
                        for (int v = 0; v < 4; ++v)
                            fine = _mm256_add_epi32(fine, _mm256_madd_epi16(load(wb + r * w_stride + tile_vector(step, v)), load(low + tile_vector(step, v))));
                        sum[r][t] = fine;
                    }
                    if (!kAllDigits) x_scale = _mm256_mul_ps(x_scale, _mm256_set1_ps(1.0f / (1 << kTileLowBits)));
                }
                for (int r = 0; r < kMicroRows; ++r) {
                    const __m256 w_scale = _mm256_loadu_ps(reinterpret_cast<const float *>(wb + r * w_stride + tile_scales(step)));
                    float *lane = lanes + r * (kTileTokens * kLanes) + t * kLanes + step % 2 * 8;
                    _mm256_storeu_ps(lane, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][t]), _mm256_mul_ps(w_scale, x_scale), _mm256_loadu_ps(lane)));
                }
            }
        }
    }
}

template <bool kAllDigits>
void tile_rows(const Rows &rows, const TileToken *x, int tokens, float *y, ptrdiff_t stride, const TileScratch &scratch) {
    const int blocks = blocks_of(rows.k);
    const int step_rows = tokens <= kFewTokens ? kFewRows : kTileRows;
    const int pass = tokens <= kFewTokens ? blocks : kPassBlocks;
    for (int first = 0; first < tokens; first += kTileTokens) {
        const int count = tokens - first < kTileTokens ? tokens - first : kTileTokens;
        for (int row = 0; row < rows.count; row += step_rows) {
            const int height = rows.count - row < step_rows ? rows.count - row : step_rows;
            std::memset(scratch.lanes, 0, sizeof(float) * static_cast<size_t>(height) * kTileTokens * kLanes);
            for (int b = 0; b < blocks; b += pass) {
                const int width = blocks - b < pass ? blocks - b : pass;
                expand(rows, row, height, b, width, scratch.weights);
                const ptrdiff_t w_stride = static_cast<ptrdiff_t>(width) * kTileBlockBytes;
                for (int r = 0; r < height; r += kMicroRows) {
                    const uint8_t *w = scratch.weights + r * w_stride;
                    float *lanes = scratch.lanes + static_cast<ptrdiff_t>(r) * kTileTokens * kLanes;
                    int t = 0;
                    for (; t + 2 <= count; t += 2) micro<2, kAllDigits>(w, w_stride, x + first + t, b, width, lanes + t * kLanes);
                    if (t < count) micro<1, kAllDigits>(w, w_stride, x + first + t, b, width, lanes + t * kLanes);
                }
            }
            for (int r = 0; r < height; ++r)
                for (int t = 0; t < count; ++t) {
                    const float *lanes = scratch.lanes + (static_cast<ptrdiff_t>(r) * kTileTokens + t) * kLanes;
                    y[(first + t) * stride + row + r] = add_lanes(_mm256_loadu_ps(lanes), _mm256_loadu_ps(lanes + 8));
                }
        }
    }
}

void tile(const Rows &rows, const TileToken *x, int tokens, bool all_digits, float *y, ptrdiff_t stride, const TileScratch &scratch) {
    if (all_digits)
        tile_rows<true>(rows, x, tokens, y, stride, scratch);
    else
        tile_rows<false>(rows, x, tokens, y, stride, scratch);
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

bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

}  // namespace

const Kernels kAvx2 = {"avx2", "AVX2 and FMA, 256-bit integer products", supported, peaks, vector, tile, read};

}  // namespace evrun

#endif
