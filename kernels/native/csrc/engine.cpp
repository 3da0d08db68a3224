#include "engine.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "numbers.h"

namespace evrun {

namespace {

// Rows that a thread takes at once. One token: long linear stretches of one matrix. Many: whole groups of w2's input.
constexpr int32_t kFirstRowsOne = 128, kFirstRowsMany = 32;
constexpr int32_t kSecondRowsFew = 256, kSecondRowsMany = 64;
constexpr int32_t kSecondFew = 8;  // tokens an expert
constexpr int64_t kWorthThreads = 256 << 10;  // bytes of packed rows below which waking threads costs more than they do
constexpr int64_t kReadChunk = 1 << 20;

constexpr uint8_t kNeedsVector = 1, kNeedsTile = 2;

int32_t pair_capacity(const evrun_config &c) {
    return std::max({c.max_tokens, c.top_k, std::min(c.max_tokens * c.top_k, 64)});
}

int32_t pieces(int32_t all, int32_t piece) { return (all + piece - 1) / piece; }

int32_t first_rows(int32_t count) { return count == 1 ? kFirstRowsOne : kFirstRowsMany; }

Rows part(const uint8_t *codes, const uint8_t *scales, int32_t k, int32_t first, int32_t count) {
    return {codes + static_cast<ptrdiff_t>(first) * (k / 2), scales + static_cast<ptrdiff_t>(first) * (k / kGroup), count, k, nullptr};
}

}  // namespace

Engine::Engine(const Kernels &kernels, const evrun_config &config)
    : kernels_(kernels),
      config_(config),
      pair_capacity_(pair_capacity(config)),
      x_(config.hidden, config.max_tokens, !config.quantise),
      a_(config.intermediate, pair_capacity_, !config.quantise),
      scratch_(static_cast<size_t>(config.threads)),
      pair_token_(static_cast<size_t>(config.max_tokens) * static_cast<size_t>(config.top_k)),
      pair_index_(static_cast<size_t>(pair_capacity_)),
      pair_weight_(pair_token_.size()),
      layouts_(static_cast<size_t>(config.max_tokens)),
      pool_(config.threads, config.cpus) {
    if (!x_.vectors.valid() || !x_.tiles.valid() || !a_.vectors.valid() || !a_.tiles.valid()) throw std::bad_alloc();
    for (int32_t i = 0; i < pair_capacity_; ++i) pair_index_[static_cast<size_t>(i)] = i;
    used_.reserve(pair_token_.size());
    const int32_t blocks = blocks_of(std::max(config.hidden, config.intermediate));
    const int32_t tokens = config.max_tokens;
    const int32_t expanded = std::max(kTileRows * std::min(kPassBlocks, blocks), kFewRows * blocks);
    for (Scratch &s : scratch_) {
        s.g.resize(static_cast<size_t>(std::max(tokens * kFirstRowsMany, kFirstRowsOne)));
        s.u.resize(s.g.size());
        s.y.resize(static_cast<size_t>(std::max(tokens * kSecondRowsMany, kSecondFew * kSecondRowsFew)));
        s.peaks.resize(kSecondRowsFew);
        s.tokens.resize(static_cast<size_t>(tokens));
        if (tokens > 1) {
            s.weights.resize(static_cast<size_t>(expanded) * kTileBlockBytes);
            s.lanes.resize(static_cast<size_t>(kTileRows) * kTileTokens * kLanes);
        }
    }
}

void Engine::Inputs::note(int32_t index, int32_t range) {
    std::atomic<int32_t> &largest = ranges[static_cast<size_t>(index)];
    int32_t old = largest.load(std::memory_order_relaxed);
    while (range > old && !largest.compare_exchange_weak(old, range, std::memory_order_relaxed)) {
    }
}

int64_t Engine::run(const evrun_call &call, evrun_fault *fault) {
    if (call.tokens > config_.max_tokens || call.slots > config_.top_k) return EVRUN_TOO_LARGE;
    call_ = &call;
    const int64_t pairs = pair_up(fault);
    if (pairs < 0) return pairs;
    if (call.out_rows < (call.exact ? pairs : call.tokens)) return EVRUN_TOO_LARGE;
    const int64_t hidden = config_.hidden, row_bytes = 3 * hidden * config_.intermediate / 2;
    if (pairs == 0) {
        if (!call.exact) std::fill_n(static_cast<float *>(call.out), call.tokens * hidden, 0.0f);
        return 0;
    }
    batch_end_ = 0;
    next_batch();
    faulted_.store(false);
    beaten_ = std::chrono::steady_clock::now();
    const bool worth = (static_cast<int64_t>(used_.size()) + pairs / 8) * row_bytes >= kWorthThreads;
    pool_.run(worth ? pool_.threads() : 1, [](void *self, int thread) { static_cast<Engine *>(self)->work(thread); }, this);
    if (!faulted_.load()) return pairs;
    find_fault(fault);
    return EVRUN_BAD_SCALE;
}

// Sorts the pairs by expert, then token.
int64_t Engine::pair_up(evrun_fault *fault) {
    const evrun_call &call = *call_;
    const int32_t *begin = call.experts, *end = begin + call.num_experts;
    const auto position = [&](int32_t id) {
        const int32_t *found = std::lower_bound(begin, end, id);
        return found != end && *found == id ? static_cast<int32_t>(found - begin) : -1;
    };
    const auto each = [&](const auto &visit) {
        for (int32_t t = 0; t < call.tokens; ++t)
            for (int32_t s = 0; s < call.slots; ++s) {
                const size_t at = static_cast<size_t>(t) * static_cast<size_t>(call.slots) + static_cast<size_t>(s);
                const int32_t p = position(call.ids[at]);
                if (p >= 0) visit(t, static_cast<size_t>(p), call.weights[at]);
            }
    };
    counts_.assign(static_cast<size_t>(call.num_experts), 0);
    each([&](int32_t, size_t p, float) { ++counts_[p]; });
    used_.clear();
    int32_t pairs = 0;
    for (int32_t p = 0; p < call.num_experts; ++p) {
        int32_t &count = counts_[static_cast<size_t>(p)];
        if (count) used_.push_back({p, pairs, count, 0});
        const int32_t first = pairs;
        pairs += count;
        count = first;  // from here on: where the expert's next pair goes
    }
    std::fill_n(layouts_.begin(), call.tokens, uint8_t{0});
    each([&](int32_t t, size_t p, float weight) {
        const size_t pair = static_cast<size_t>(counts_[p]++);
        pair_token_[pair] = t;
        pair_weight_[pair] = weight;
    });
    for (const Used &used : used_)
        for (int32_t i = used.first; i < used.first + used.count; ++i) {
            const int32_t token = pair_token_[static_cast<size_t>(i)];
            if (i > used.first && token == pair_token_[static_cast<size_t>(i) - 1]) {
                *fault = {used.position, 0, token};
                return EVRUN_DUPLICATE;
            }
            layouts_[static_cast<size_t>(token)] |= used.count == 1 ? kNeedsVector : kNeedsTile;
        }
    return pairs;
}

void Engine::next_batch() {
    next_item_.store(0, std::memory_order_relaxed);
    batch_begin_ = batch_end_;
    int32_t pairs = 0, most = 0;
    first_items_ = 0;
    while (batch_end_ < used_.size() && pairs + used_[batch_end_].count <= pair_capacity_) {
        Used &used = used_[batch_end_++];
        used.first_item = first_items_;
        first_items_ += pieces(config_.intermediate, first_rows(used.count));
        pairs += used.count;
        most = std::max(most, used.count);
    }
    second_rows_ = most <= kSecondFew ? kSecondRowsFew : kSecondRowsMany;
    second_items_ = pieces(config_.hidden, second_rows_);
    for (int32_t i = 0; i < pairs; ++i) a_.ranges[static_cast<size_t>(i)].store(kNothing, std::memory_order_relaxed);
}

void Engine::work(int thread) {
    Scratch &scratch = scratch_[static_cast<size_t>(thread)];
    const auto next_phase = [&] { next_item_.store(0, std::memory_order_relaxed); };
    take(thread, call_->tokens, [&](int32_t i) { prepare(i); });
    pool_.barrier().meet(next_phase);
    while (batch_begin_ < used_.size()) {
        take(thread, first_items_, [&](int32_t i) { first_products(i, scratch); });
        pool_.barrier().meet(next_phase);
        take(thread, second_items_, [&](int32_t i) { second_products(i, scratch); });
        pool_.barrier().meet([&] { next_batch(); });
    }
}

template <typename Work>
void Engine::take(int thread, int32_t items, const Work &work) {
    for (;;) {
        const int32_t item = next_item_.fetch_add(1, std::memory_order_relaxed);
        if (item >= items || faulted_.load(std::memory_order_relaxed)) return;
        work(item);
        if (thread == 0 && call_->beat) beat();
    }
}

void Engine::beat() {
    const auto now = std::chrono::steady_clock::now();
    if (now - beaten_ < std::chrono::milliseconds(20)) return;
    beaten_ = now;
    call_->beat();
}

void Engine::prepare(int32_t token) {
    const uint8_t layouts = layouts_[static_cast<size_t>(token)];
    x_.ranges[static_cast<size_t>(token)].store(kNothing, std::memory_order_relaxed);
    if (!layouts) return;
    const size_t start = static_cast<size_t>(token) * static_cast<size_t>(config_.hidden);
    for (int32_t g = 0; g < config_.hidden / kGroup; ++g) {
        float x[kGroup];
        for (size_t i = 0; i < kGroup; ++i) {
            const size_t at = start + static_cast<size_t>(g) * kGroup + i;
            x[i] = config_.bfloat16 ? from_bfloat16(static_cast<const uint16_t *>(call_->x)[at]) : static_cast<const float *>(call_->x)[at];
        }
        Group group;
        config_.quantise ? quantise(x, &group) : fix_point(x, &group);
        x_.note(token, group.range);
        if (layouts & kNeedsVector) x_.vectors.put(token, g, group);
        if (layouts & kNeedsTile) x_.tiles.put(token, g, group);
    }
}

void Engine::first_products(int32_t item, Scratch &scratch) {
    size_t at = batch_end_ - 1;
    while (used_[at].first_item > item) --at;
    const Used &used = used_[at];
    const evrun_row &row = call_->rows[used.position];
    const int32_t piece = first_rows(used.count), first = (item - used.first_item) * piece;
    const int32_t count = std::min(piece, config_.intermediate - first);
    Rows w1 = part(row.w1, row.s1, config_.hidden, first, count), w3 = part(row.w3, row.s3, config_.hidden, first, count);
    w1.next = w3.codes;
    w3.next = first + count < config_.intermediate ? w1.codes + static_cast<ptrdiff_t>(count) * (config_.hidden / 2)
              : at + 1 < batch_end_                ? call_->rows[used_[at + 1].position].w1
                                                   : call_->rows[used_[batch_begin_].position].w2;
    const int32_t *tokens = &pair_token_[static_cast<size_t>(used.first)];
    if (multiply(w1, x_, tokens, used.count, scratch.g.data(), scratch) && multiply(w3, x_, tokens, used.count, scratch.u.data(), scratch))
        activate(used, first, count, scratch);
}

// g, u -> the input of w2, whole groups of it.
void Engine::activate(const Used &used, int32_t first_row, int32_t rows, const Scratch &scratch) {
    const int32_t batch_first = used_[batch_begin_].first;
    const bool bf16 = config_.bfloat16;
    const float limit = config_.swiglu_limit;
    for (int32_t i = 0; i < used.count; ++i) {
        const int32_t index = used.first - batch_first + i;
        const float route = pair_weight_[static_cast<size_t>(used.first + i)];
        const float *g = &scratch.g[static_cast<size_t>(i * rows)], *u = &scratch.u[static_cast<size_t>(i * rows)];
        for (int32_t start = 0; start < rows; start += kGroup) {
            float a[kGroup];
            if (bf16)
                for (int32_t j = 0; j < kGroup; ++j)
                    a[j] = round_bfloat16(swiglu(round_bfloat16(g[start + j]), round_bfloat16(u[start + j]), limit, route));
            else
                for (int32_t j = 0; j < kGroup; ++j) a[j] = swiglu(g[start + j], u[start + j], limit, route);
            Group group;
            config_.quantise ? quantise(a, &group) : fix_point(a, &group);
            a_.note(index, group.range);
            (used.count == 1 ? a_.vectors : a_.tiles).put(index, (first_row + start) / kGroup, group);
        }
    }
}

void Engine::second_products(int32_t item, Scratch &scratch) {
    const int32_t first = item * second_rows_, count = std::min(second_rows_, config_.hidden - first);
    const int32_t batch_first = used_[batch_begin_].first;
    if (!call_->exact && batch_begin_ == 0)
        for (int32_t t = 0; t < call_->tokens; ++t)
            std::fill_n(static_cast<float *>(call_->out) + static_cast<ptrdiff_t>(t) * config_.hidden + first, count, 0.0f);
    for (size_t at = batch_begin_; at < batch_end_; ++at) {
        const Used &used = used_[at];
        const evrun_row &row = call_->rows[used.position];
        Rows w2 = part(row.w2, row.s2, config_.intermediate, first, count);
        if (at + 1 < batch_end_)
            w2.next = part(call_->rows[used_[at + 1].position].w2, row.s2, config_.intermediate, first, count).codes;
        else if (first + count < config_.hidden)
            w2.next = part(call_->rows[used_[batch_begin_].position].w2, row.s2, config_.intermediate, first + count, count).codes;
        if (!multiply(w2, a_, &pair_index_[static_cast<size_t>(used.first - batch_first)], used.count, scratch.y.data(), scratch)) return;
        emit(used, first, count, scratch.y.data());
    }
}

void Engine::emit(const Used &used, int32_t first_row, int32_t rows, const float *y) {
    for (int32_t i = 0; i < used.count; ++i, y += rows) {
        const int32_t to = call_->exact ? used.first + i : pair_token_[static_cast<size_t>(used.first + i)];
        const ptrdiff_t start = static_cast<ptrdiff_t>(to) * config_.hidden + first_row;
        float *sum = static_cast<float *>(call_->out) + start;
        uint16_t *bits = static_cast<uint16_t *>(call_->out) + start;
        if (call_->exact && config_.bfloat16)
            for (int32_t j = 0; j < rows; ++j) bits[j] = to_bfloat16(y[j]);
        else if (call_->exact)
            std::copy_n(y, rows, sum);
        else if (config_.bfloat16)
            for (int32_t j = 0; j < rows; ++j) sum[j] += round_bfloat16(y[j]);
        else
            for (int32_t j = 0; j < rows; ++j) sum[j] += y[j];
    }
}

// y[i * rows.count + r] = row r times input indices[i]; false on a bad scale byte.
bool Engine::multiply(const Rows &rows, const Inputs &inputs, const int32_t *indices, int32_t count, float *y, Scratch &scratch) {
    uint8_t *peaks = scratch.peaks.data();
    kernels_.peaks(rows.scales, rows.count, rows.k / kGroup, peaks);
    if (std::find(peaks, peaks + rows.count, uint8_t{255}) != peaks + rows.count) {
        faulted_.store(true, std::memory_order_relaxed);
        return false;
    }
    if (count == 1) {
        kernels_.vector(rows, inputs.vectors.vector(indices[0]), !config_.quantise, y);
    } else {
        for (int32_t i = 0; i < count; ++i) scratch.tokens[static_cast<size_t>(i)] = inputs.tiles.tile(indices[i]);
        kernels_.tile(rows, scratch.tokens.data(), count, !config_.quantise, y, rows.count, {scratch.weights.data(), scratch.lanes.data()});
    }
    for (int32_t i = 0; i < count; ++i) mend(rows, inputs, indices[i], count == 1, peaks, y + static_cast<ptrdiff_t>(i) * rows.count);
    return true;
}

// Inputs that are not finite, and rows whose scales leave what fp32 lanes hold, in double and rounded once.
void Engine::mend(const Rows &rows, const Inputs &inputs, int32_t index, bool vector, const uint8_t *peaks, float *y) const {
    const int32_t range = inputs.ranges[static_cast<size_t>(index)].load(std::memory_order_relaxed);
    if (range == kNothing) return;
    if (range == kNotFinite) {
        std::fill_n(y, rows.count, std::nanf(""));
        return;
    }
    // A lane adds fewer than k / 8 octets below 2^31 units of 2^(range - 1 + peak - 127); below `least`, terms could
    // vanish that matter to the sum.
    const int top = 126 - 31 - static_cast<int>(std::ceil(std::log2(rows.k / 8 + 1)));
    const int most = top + 128 - range, least = -90 + 128 - range;
    for (int32_t r = 0; r < rows.count; ++r) {
        if (peaks[r] <= most && peaks[r] >= least) continue;
        const uint8_t *codes = rows.codes + static_cast<ptrdiff_t>(r) * (rows.k / 2);
        const uint8_t *scales = rows.scales + static_cast<ptrdiff_t>(r) * (rows.k / kGroup);
        const TokenStore &store = vector ? inputs.vectors : inputs.tiles;
        double sum = 0;
        for (int g = 0; g < rows.k / kGroup; ++g) {
            int64_t products = 0;
            for (int k = g * kGroup; k < (g + 1) * kGroup; ++k)
                products += store.value(index, k) * kCodeValues[k % 2 ? codes[k / 2] >> 4 : codes[k / 2] & 15];
            sum += std::ldexp(static_cast<double>(products), store.exponent(index, g) - 1 + scales[g] - 127);
        }
        y[r] = static_cast<float>(sum);
    }
}

// The first bad byte in the order of experts, w1, w3, w2, rows: the same whichever thread met one.
void Engine::find_fault(evrun_fault *fault) const {
    for (const Used &used : used_) {
        const evrun_row &row = call_->rows[used.position];
        const struct {
            const uint8_t *scales;
            int32_t tensor, rows, groups;
        } tensors[] = {{row.s1, 1, config_.intermediate, config_.hidden / kGroup},
                       {row.s3, 3, config_.intermediate, config_.hidden / kGroup},
                       {row.s2, 2, config_.hidden, config_.intermediate / kGroup}};
        for (const auto &t : tensors) {
            const ptrdiff_t size = static_cast<ptrdiff_t>(t.rows) * t.groups;
            const uint8_t *bad = std::find(t.scales, t.scales + size, uint8_t{255});
            if (bad != t.scales + size) {
                *fault = {used.position, t.tensor, static_cast<int32_t>((bad - t.scales) / t.groups)};
                return;
            }
        }
    }
}

uint64_t Engine::read(const uint8_t *const *starts, const int64_t *bytes, int32_t ranges) {
    struct Job {
        Engine *engine;
        const uint8_t *const *starts;
        const int64_t *bytes;
        int32_t ranges;
        std::atomic<int64_t> next{0};
        std::atomic<uint64_t> sum{0};
    } job = {this, starts, bytes, ranges, {}, {}};
    pool_.run(pool_.threads(), [](void *context, int) {
        Job &j = *static_cast<Job *>(context);
        int32_t range = 0;
        int64_t before = 0;
        for (;;) {
            const int64_t chunk = j.next.fetch_add(1);
            while (range < j.ranges && chunk - before >= (j.bytes[range] + kReadChunk - 1) / kReadChunk)
                before += (j.bytes[range++] + kReadChunk - 1) / kReadChunk;
            if (range == j.ranges) return;
            const int64_t start = (chunk - before) * kReadChunk;
            j.sum += j.engine->kernels_.read(j.starts[range] + start, static_cast<size_t>(std::min(kReadChunk, j.bytes[range] - start)));
        }
    }, &job);
    return job.sum.load();
}

}  // namespace evrun
