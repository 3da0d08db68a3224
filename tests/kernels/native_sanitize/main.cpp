// Calls of the C interface over many shapes, for a build with sanitizers: every buffer has exactly the size that the
// interface asks for, so that a byte read or written beyond one is seen. Exit status 0 when all variants, thread counts
// and groupings agreed bit for bit.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "expert_ffn.h"

namespace {

uint32_t state = 1;

uint32_t next() { return state = state * 1664525u + 1013904223u; }

// Of exactly this size, on the heap, at an odd address of its own.
struct Bytes {
    std::unique_ptr<uint8_t[]> memory;
    size_t size;
    explicit Bytes(size_t n) : memory(new uint8_t[n + 1]), size(n) {
        for (size_t i = 0; i < n; ++i) memory[i + 1] = static_cast<uint8_t>(next() >> 24);
    }
    uint8_t *data() { return memory.get() + 1; }
};

struct Expert {
    Bytes w1, s1, w3, s3, w2, s2;
    Expert(int h, int i, int low, int high)
        : w1(size_t(i) * h / 2), s1(size_t(i) * h / 32), w3(w1.size), s3(s1.size), w2(w1.size), s2(s1.size) {
        for (Bytes *s : {&s1, &s3, &s2})
            for (size_t j = 0; j < s->size; ++j) s->data()[j] = static_cast<uint8_t>(low + s->data()[j] % (high - low + 1));
    }
    evrun_row row() { return {w1.data(), s1.data(), w3.data(), s3.data(), w2.data(), s2.data()}; }
};

struct Shape {
    int hidden, intermediate, tokens, low, high;
};

int beats = 0;

std::vector<uint8_t> run(const Shape &shape, int variant, int threads, bool quantise, bool bf16, bool exact, std::vector<Expert> &experts) {
    const int slots = 3, count = static_cast<int>(experts.size());
    state = 7;
    const evrun_config config = {shape.hidden, shape.intermediate, 10.0f, quantise, bf16, shape.tokens, slots, threads, nullptr};
    evrun_engine *engine = evrun_create(variant, &config);
    if (!engine) std::abort();
    const size_t width = bf16 ? 2 : 4;
    std::vector<uint8_t> x(width * shape.tokens * shape.hidden);
    for (size_t i = 0; i < x.size() / width; ++i) {
        const float value = (static_cast<int32_t>(next()) / 2147483648.0f) * (next() % 7 ? 1.0f : 0.001f);
        std::memcpy(&x[i * width], reinterpret_cast<const uint8_t *>(&value) + 4 - width, width);
    }
    std::vector<int32_t> ids(shape.tokens * slots), names(count);
    std::vector<float> weights(ids.size());
    int64_t pairs = 0;
    for (int e = 0; e < count; ++e) names[e] = 2 * e;
    for (int t = 0; t < shape.tokens; ++t)
        for (int s = 0; s < slots; ++s) {
            ids[t * slots + s] = (t + 2 * s + t % 3) % (2 * count);  // two of one token differ by 2 or 4
            weights[t * slots + s] = 0.5f;
            pairs += ids[t * slots + s] % 2 == 0;
        }
    std::vector<evrun_row> rows;
    for (Expert &e : experts) rows.push_back(e.row());
    std::vector<uint8_t> out(exact ? width * pairs * shape.hidden : sizeof(float) * shape.tokens * shape.hidden, 0xA5);
    evrun_call call = {x.data(), ids.data(), weights.data(), shape.tokens, slots, names.data(), rows.data(), count, exact, out.data(),
                       exact ? pairs : shape.tokens, [](void *) { ++beats; }, nullptr};
    evrun_fault fault = {};
    if (evrun_run(engine, &call, &fault) != pairs) std::abort();

    // The same call with a bad scale must name it and leave the engine usable; then with too little room.
    if (pairs) {
        uint8_t *bad = experts[0].s3.data() + experts[0].s3.size - 1;
        const uint8_t good = *bad;
        bool used = false;
        for (int32_t id : ids) used |= id == 0;
        std::vector<uint8_t> scratch(out.size());
        call.out = scratch.data();
        *bad = 255;
        const int64_t code = evrun_run(engine, &call, &fault);
        if (used ? code != EVRUN_BAD_SCALE || fault.expert != 0 || fault.tensor != 3 || fault.row != shape.intermediate - 1 : code != pairs) std::abort();
        *bad = good;
        --call.out_rows;
        if (evrun_run(engine, &call, &fault) != EVRUN_TOO_LARGE) std::abort();
    }
    const uint8_t *starts[] = {experts[0].w1.data(), experts[0].w2.data()};
    const int64_t sizes[] = {static_cast<int64_t>(experts[0].w1.size), static_cast<int64_t>(experts[0].w2.size)};
    evrun_read(engine, starts, sizes, 2);
    if (evrun_multiply_add(engine, 10) == 0) std::abort();
    evrun_destroy(engine);
    return out;
}

}  // namespace

int main() {
    if (evrun_abi() != EVRUN_ABI) return 2;
    // One group; tails; whole blocks; more tokens than are taken at once; extreme scales; enough bytes for several threads.
    const Shape shapes[] = {{32, 32, 1, 118, 124}, {96, 160, 5, 118, 124}, {256, 288, 2, 118, 124}, {288, 96, 19, 118, 124}, {96, 64, 66, 118, 124},
                            {96, 160, 3, 0, 3},    {96, 160, 2, 240, 254}, {160, 96, 18, 0, 254},   {512, 320, 1, 118, 124}, {512, 320, 4, 118, 124},
                            {544, 160, 140, 118, 124}};
    int runs = 0, wrong = 0;
    for (const Shape &shape : shapes) {
        std::vector<Expert> experts;
        for (int e = 0; e < 3; ++e) experts.emplace_back(shape.hidden, shape.intermediate, shape.low, shape.high);
        for (int mode = 0; mode < 8; ++mode) {
            const bool quantise = mode & 1, bf16 = mode & 2, exact = mode & 4;
            std::vector<uint8_t> first;
            for (int variant = 0; variant < evrun_variants(); ++variant) {
                if (!evrun_variant_supported(variant)) continue;
                for (int threads = 1; threads <= 3; threads += 2, ++runs) {
                    const std::vector<uint8_t> out = run(shape, variant, threads, quantise, bf16, exact, experts);
                    if (first.empty()) first = out;
                    if (out != first) {
                        std::printf("differs: %d x %d, %d tokens, mode %d, %s, %d threads\n", shape.hidden, shape.intermediate, shape.tokens, mode,
                                    evrun_variant_name(variant), threads);
                        ++wrong;
                    }
                }
            }
        }
    }
    for (int variant = 0; variant < evrun_variants(); ++variant)
        std::printf("%s: %s\n", evrun_variant_name(variant), evrun_variant_supported(variant) ? "run" : "not supported here");
    std::printf("%d runs, %d wrong\n", runs, wrong);
    return wrong != 0;
}
