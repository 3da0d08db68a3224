// The issue of one token's call on a card without Python in between: copy the input, hand rows and weights to the launch,
// wait. Links nothing of CUDA: the driver's functions come as addresses. Memory belongs to the caller; nothing here
// allocates or keeps anything. The structures are those of kernels/cuda/issue.py and kernels/cuda/params.py.
#include "one_token.h"
#include "spin.h"

#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY

struct Row {
    uint64_t tensors[6];
};

struct Drawn {
    Row row;
    float route;
    int32_t unused;
};

struct Launched {  // params.OneToken
    uint64_t x, out, status, act, arrivals;
    int32_t num_experts, first_place, exact, accumulate, byte, unused;
    Drawn drawn[1];
};

struct Kernel {
    void *function;
    uint32_t blocks, threads, shared_bytes;
    int32_t experts_at_once;
};

using Launch = int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **);
using CopyIn = int (*)(uint64_t, const void *, size_t, void *);
using OfStream = int (*)(void *);

struct Card {  // issue.NativeIssue
    Launch launch;  // cooperative
    CopyIn copy_in;
    OfStream query, synchronize;
    void *stream;
    Launched *parameters;
    const Kernel *kernels;  // those of few experts first
    const Row *rows;        // by slot
    void *pinned_x;
    uint64_t card_x;        // where pinned_x is copied to; 0: the kernels read it where it is
    int64_t x_bytes, spin_ns;
    int32_t num_kernels, top_k;
};

// Bring the token's activations to where the kernels read them. 0, or the driver's error.
int load(const Card &card, const void *x) {
    std::memcpy(card.pinned_x, x, card.x_bytes);
    return card.card_x ? card.copy_in(card.card_x, card.pinned_x, card.x_bytes, card.stream) : 0;
}

// The first place of `id` among the token's draws, or -1.
int32_t place_of(int32_t id, const int32_t *ids, int32_t top_k) {
    for (int32_t k = 0; k < top_k; ++k)
        if (ids[k] == id) return k;
    return -1;
}

int32_t issue(const Card &card, const int32_t *ids, const float *weights, const int32_t *experts, const int32_t *slots, int32_t count,
              uint64_t out, int32_t exact) {
    Launched *one = card.parameters;
    int32_t total = 0;
    for (int32_t e = 0; e < count; ++e) total += place_of(experts[e], ids, card.top_k) >= 0;
    const Kernel *kernel = card.kernels;
    while (kernel + 1 < card.kernels + card.num_kernels && kernel->experts_at_once < total) ++kernel;
    one->out = out, one->exact = exact, one->accumulate = 0;
    int32_t done = 0, filled = 0;
    for (int32_t e = 0; e < count; ++e) {
        const int32_t place = place_of(experts[e], ids, card.top_k);
        if (place < 0) continue;
        one->drawn[filled].row = card.rows[slots[e]];
        one->drawn[filled++].route = weights[place];
        if (filled < kernel->experts_at_once && done + filled < total) continue;
        one->num_experts = filled, one->first_place = done;
        void *parameters[] = {one};
        const int error = card.launch(kernel->function, kernel->blocks, 1, 1, kernel->threads, 1, 1, kernel->shared_bytes, card.stream, parameters);
        if (error) return -error;
        one->accumulate = 1;
        done += filled, filled = 0;
    }
    return total;
}

// Until the stream is done: asking again and again for at most spin_ns, then as the driver waits. 0, or the driver's error.
int wait(const Card &card) {
    const int64_t until = card.spin_ns ? now_ns() + card.spin_ns : 0;
    while (until) {
        const int error = card.query(card.stream);
        if (error != kNotReady) return error;
        if (now_ns() > until) break;
        for (int i = 0; i < 8; ++i) relax();
    }
    return card.synchronize(card.stream);
}

constexpr int kMostExperts = 64;

struct Resident {  // issue.ResidentIssue
    const Card *card;
    const int32_t *slot_of;  // [layers, experts]; -1: not on the card
    int64_t layers, experts;
    int32_t *used, *num_used;  // rows that calls used, layer * experts + expert, since Python last took note
    int64_t capacity;          // of used
    uint64_t out;
    const volatile uint32_t *status;  // not 0: the kernels found something
    int64_t row_bytes, *card_bytes, *hits;
    int64_t exact;
};

}  // namespace

// One token's call for `count` experts, ascending, whose rows lie on the card in these slots; those that the token does not
// draw are left out. `out` as in params.OneToken. The number of experts drawn, or the driver's error as a negative number.
EXPORT int32_t evrun_card_call(const Card *card, const void *x, const int32_t *ids, const float *weights, const int32_t *experts,
                               const int32_t *slots, int32_t count, uint64_t out, int32_t exact) {
    int error = load(*card, x);
    if (error) return -error;
    const int32_t drawn = issue(*card, ids, weights, experts, slots, count, out, exact);
    if (drawn < 0) return drawn;
    error = wait(*card);
    return error ? -error : drawn;
}

// A worker's call of one token whose rows all lie on the card, without Python. Rows computed; -1 when
// the call needs the lane's Python: a row that is not there, no expert drawn, anything the kernels or the driver say, no room
// to note what was used.
EXPORT int64_t evrun_card_one_token(void *memory, const OneToken *call) {
    const Resident &lane = *static_cast<Resident *>(memory);
    if (call->layer < 0 || call->layer >= lane.layers || call->count > kMostExperts || *lane.num_used + call->count > lane.capacity) return -1;
    int32_t slots[kMostExperts];
    const int64_t first = call->layer * lane.experts;
    for (int64_t i = 0; i < call->count; ++i)
        if ((slots[i] = lane.slot_of[first + call->experts[i]]) < 0) return -1;
    const int32_t drawn = evrun_card_call(lane.card, call->x, call->ids, call->weights, call->experts, slots,
                                          static_cast<int32_t>(call->count), lane.out, static_cast<int32_t>(lane.exact));
    if (drawn <= 0 || *lane.status) return -1;
    for (int64_t i = 0; i < call->count; ++i) lane.used[(*lane.num_used)++] = static_cast<int32_t>(first + call->experts[i]);
    *lane.card_bytes += call->count * lane.row_bytes;
    *lane.hits += call->count;
    return drawn;
}
