// The C interface: which instruction sets there are, and engines.
#include <new>
#include <system_error>

#include "engine.h"
#include "expert_ffn.h"
#include "kernels.h"

struct evrun_engine {
    evrun::Engine engine;
};

namespace {

const evrun::Kernels *const kVariants[] = {
    &evrun::kScalar,
#if defined(__x86_64__)
    &evrun::kAvx2,
    &evrun::kAvx512,
#endif
};

constexpr int32_t kCount = sizeof kVariants / sizeof kVariants[0];

bool known(int32_t variant) { return variant >= 0 && variant < kCount; }

}  // namespace

int32_t evrun_abi(void) { return EVRUN_ABI; }

int32_t evrun_variants(void) { return kCount; }

const char *evrun_variant_name(int32_t variant) { return known(variant) ? kVariants[variant]->name : nullptr; }

const char *evrun_variant_description(int32_t variant) { return known(variant) ? kVariants[variant]->description : nullptr; }

int32_t evrun_variant_supported(int32_t variant) { return known(variant) && kVariants[variant]->supported(); }

evrun_engine *evrun_create(int32_t variant, const evrun_config *config) {
    if (!evrun_variant_supported(variant)) return nullptr;
    try {
        return new evrun_engine{{*kVariants[variant], *config}};
    } catch (const std::system_error &) {
        return nullptr;
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

void evrun_destroy(evrun_engine *engine) { delete engine; }

int64_t evrun_run(evrun_engine *engine, const evrun_call *call, evrun_fault *fault) { return engine->engine.run(*call, fault); }

void evrun_dequantise_fp8(int32_t variant, const uint8_t *codes, const float *scales, int64_t rows, int64_t columns, float *out) {
    const int64_t tiles = (columns + evrun::kGroup - 1) / evrun::kGroup;
    for (int64_t r = 0; r < rows; ++r)
        kVariants[variant]->dequantise(codes + r * columns, scales + r / evrun::kGroup * tiles, columns, out + r * columns);
}

uint64_t evrun_read(evrun_engine *engine, const uint8_t *const *starts, const int64_t *bytes, int32_t ranges) {
    return engine->engine.read(starts, bytes, ranges);
}

uint64_t evrun_multiply_add(evrun_engine *engine, uint64_t steps) { return engine->engine.multiply_add(steps); }
