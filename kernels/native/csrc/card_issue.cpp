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
using Record = int (*)(void *event, void *stream);
using WaitFor = int (*)(void *stream, void *event, unsigned);

struct Card {  // issue.NativeIssue
    Launch launch;  // cooperative
    CopyIn copy_in;
    Record record;
    WaitFor wait_for;
    OfStream query, synchronize;
    void *stream;
    Launched *parameters;
    const Kernel *kernels;  // those of few experts first
    Row *rows;              // by slot
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

// Launch what the token draws of these experts, `before` of which have been launched already. How many, or the driver's
// error as a negative number.
int32_t issue(const Card &card, const int32_t *ids, const float *weights, const int32_t *experts, const int32_t *slots, int32_t count,
              uint64_t out, int32_t exact, int32_t before = 0) {
    Launched *one = card.parameters;
    int32_t total = 0;
    for (int32_t e = 0; e < count; ++e) total += place_of(experts[e], ids, card.top_k) >= 0;
    const Kernel *kernel = card.kernels;
    while (kernel + 1 < card.kernels + card.num_kernels && kernel->experts_at_once < total) ++kernel;
    one->out = out, one->exact = exact, one->accumulate = before > 0;
    int32_t done = 0, filled = 0;
    for (int32_t e = 0; e < count; ++e) {
        const int32_t place = place_of(experts[e], ids, card.top_k);
        if (place < 0) continue;
        one->drawn[filled].row = card.rows[slots[e]];
        one->drawn[filled++].route = weights[place];
        if (filled < kernel->experts_at_once && done + filled < total) continue;
        one->num_experts = filled, one->first_place = before + done;
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

constexpr int kPieces = 2;

struct Source {  // issue.SOURCE
    uint64_t address[kPieces];
    int32_t size_bytes[kPieces], to[kPieces];  // no size: no such piece
    int64_t layout;
};

struct Staging {  // issue.Staging
    const Source *sources;  // [layers, experts]
    const int64_t (*layouts)[6];
    const int32_t *num_free;
    void *copies, *arrived[2];
    uint64_t base;
    int64_t slot_bytes, first_slot, slots;
    int64_t *link_bytes, *misses;
};

struct Worker {  // issue.WithoutPython
    const Card *card;
    Staging staging;
    const int32_t *slot_of;  // [layers, experts]; -1: not on the card
    int64_t layers, experts;
    int32_t *used, *num_used;  // rows that calls used, layer * experts + expert, since Python last took note
    int64_t capacity;          // of used
    uint64_t out;
    const volatile uint32_t *status;  // not 0: the kernels found something
    int64_t row_bytes, *card_bytes, *hits;
    int64_t exact;
};

// The rows of a call: where each lies on the card or is about to, and which have to be brought in.
struct Rows {
    int32_t slots[kMostExperts];
    int32_t missing[kMostExperts];  // places in the call
    int32_t num_missing = 0;
};

// Whether all is known that it takes to have the rows on the card. Nothing has happened yet.
bool find(const Worker &lane, const OneToken &call, Rows &rows) {
    const Staging &staging = lane.staging;
    for (int32_t i = 0; i < call.count; ++i) {
        const int64_t row = call.layer * lane.experts + call.experts[i];
        rows.slots[i] = lane.slot_of[row];
        if (rows.slots[i] >= 0) continue;
        if (*staging.num_free > 0 || !staging.sources[row].size_bytes[0] || rows.num_missing == staging.slots) return false;
        rows.slots[i] = static_cast<int32_t>(staging.first_slot + rows.num_missing);
        rows.missing[rows.num_missing++] = i;
    }
    return true;
}

// Ask for the missing rows from `begin` to `end`, and let what is launched later wait for them. 0, or the driver's error.
int bring_in(const Worker &lane, const OneToken &call, const Rows &rows, int32_t begin, int32_t end, void *arrived) {
    const Staging &staging = lane.staging;
    for (int32_t m = begin; m < end; ++m) {
        const Source &source = staging.sources[call.layer * lane.experts + call.experts[rows.missing[m]]];
        const uint64_t to = staging.base + m * staging.slot_bytes;
        for (int i = 0; i < 6; ++i) lane.card->rows[staging.first_slot + m].tensors[i] = to + staging.layouts[source.layout][i];
        for (int p = 0; p < kPieces && source.size_bytes[p]; ++p) {
            const void *from = reinterpret_cast<const void *>(source.address[p]);
            const int error = lane.card->copy_in(to + source.to[p], from, source.size_bytes[p], staging.copies);
            if (error) return error;
        }
    }
    const int error = lane.card->record(arrived, staging.copies);
    return error ? error : lane.card->wait_for(lane.card->stream, arrived, 0);
}

// The whole call on the streams: the activations, which behind rows would arrive last; all rows but the last that is
// missing, and their kernel; that row and the rest, whose kernel is all that is left to do once the last byte has come.
// How many experts are drawn, or a negative number.
int32_t issue_all(const Worker &lane, const OneToken &call, const Rows &rows) {
    const Card &card = *lane.card;
    const int32_t count = static_cast<int32_t>(call.count), exact = static_cast<int32_t>(lane.exact), last = rows.num_missing - 1;
    if (load(card, call.x)) return -1;
    int32_t split = 0, drawn = 0;
    if (last > 0) {
        split = rows.missing[last];
        if (bring_in(lane, call, rows, 0, last, lane.staging.arrived[0])) return -1;
        drawn = issue(card, call.ids, call.weights, call.experts, rows.slots, split, lane.out, exact);
        if (drawn < 0) return -1;
    }
    if (last >= 0 && bring_in(lane, call, rows, last > 0 ? last : 0, last + 1, lane.staging.arrived[1])) return -1;
    const int32_t more = issue(card, call.ids, call.weights, call.experts + split, rows.slots + split, count - split, lane.out, exact, drawn);
    return more < 0 ? -1 : drawn + more;
}

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

// A worker's call of one token without Python. Rows computed; -1 when the call needs the lane's Python: a row that is not on
// the card and should be kept there or whose place is not known, no expert drawn, anything the kernels or the driver say, no
// room to note what was used.
EXPORT int64_t evrun_card_one_token(void *memory, const OneToken *call) {
    const Worker &lane = *static_cast<Worker *>(memory);
    if (call->layer < 0 || call->layer >= lane.layers || call->count > kMostExperts || *lane.num_used + call->count > lane.capacity) return -1;
    Rows rows;
    if (!find(lane, *call, rows)) return -1;
    const int32_t drawn = issue_all(lane, *call, rows);
    if (wait(*lane.card) || drawn <= 0 || *lane.status) return -1;
    for (int64_t i = 0; i < call->count; ++i) lane.used[(*lane.num_used)++] = static_cast<int32_t>(call->layer * lane.experts + call->experts[i]);
    const int64_t resident = call->count - rows.num_missing;
    *lane.card_bytes += resident * lane.row_bytes;
    *lane.hits += resident;
    *lane.staging.link_bytes += rows.num_missing * lane.row_bytes;
    if (lane.staging.misses) *lane.staging.misses += rows.num_missing;
    return drawn;
}
