// One token's call on the CPU without Python: rows by (layer, expert) from a table that the lane fills as it meets them.
#include "one_token.h"

#include "expert_ffn.h"

namespace {

constexpr int kMostExperts = 64;

struct Lane {  // one_token.OneToken
    evrun_engine *engine;
    const evrun_row *rows;  // [layers, experts]; w1 is null where the lane has not met the row yet
    int64_t layers, experts;
    int64_t row_bytes;
    int64_t *read;  // bytes of rows read so far
    int32_t top_k, exact;
};

}  // namespace

// Rows computed; -1 when this call needs the lane's Python: a row that is not in the table, or one that is at fault.
extern "C" EVRUN_API int64_t evrun_one_token(void *memory, const OneToken *call) {
    const Lane &lane = *static_cast<Lane *>(memory);
    if (call->layer < 0 || call->layer >= lane.layers || call->count > kMostExperts) return -1;
    evrun_row rows[kMostExperts];
    for (int64_t i = 0; i < call->count; ++i) {
        rows[i] = lane.rows[call->layer * lane.experts + call->experts[i]];
        if (!rows[i].w1) return -1;
    }
    const evrun_call all = {call->x,     call->ids, call->weights, 1,           lane.top_k,  call->experts, rows,
                            static_cast<int32_t>(call->count), lane.exact, call->out, call->count, call->beat, call->record};
    evrun_fault fault;
    const int64_t done = evrun_run(lane.engine, &all, &fault);
    if (done < 0) return -1;
    *lane.read += call->count * lane.row_bytes;
    return done;
}
