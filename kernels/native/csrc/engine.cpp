#include "engine.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "numbers.h"

namespace evrun {

namespace {

// Rows that a thread takes at once, whole groups of w2's input. One token: long linear stretches of one matrix. More tokens than
// the second-level cache holds: as many rows as they are worth reading again for.
constexpr int32_t kFirstRowsLong = 128, kFirstRowsShort = 32;
constexpr int32_t kSecondRowsFew = 256, kSecondRowsMany = 64;
constexpr int32_t kSecondFew = 8;  // tokens an expert
constexpr int64_t kWorthThreads = 256 << 10;  // bytes of packed rows below which waking threads costs more than they do
constexpr int64_t kReadChunk = 1 << 20;

int32_t pair_capacity(const evrun_config &c) {
    return std::max({c.max_tokens, c.top_k, std::min(c.max_tokens * c.top_k, 64)});
}

int32_t pieces(int32_t all, int32_t piece) { return (all + piece - 1) / piece; }

int32_t first_rows(int32_t count) { return count == 1 || count > kTokensAtOnce ? kFirstRowsLong : kFirstRowsShort; }

Rows part(const uint8_t *codes, const uint8_t *scales, int32_t k, int32_t first, int32_t count) {
    codes += static_cast<ptrdiff_t>(first) * (k / 2);
    scales += static_cast<ptrdiff_t>(first) * (k / kGroup);
    return {codes, scales, count, k, codes, scales};
}

void follow(Rows *rows, const Rows &next) {
    rows->next_codes = next.codes;
    rows->next_scales = next.scales;
}

}  // namespace

Engine::Engine(const Kernels &kernels, const evrun_config &config)
    : kernels_(kernels),
      config_(config),
      pair_capacity_(pair_capacity(config)),
      x_(kernels.layout, config.hidden, config.max_tokens),
      a_(kernels.layout, config.intermediate, pair_capacity_),
      group_of_(config.quantise ? kernels.quantise : kernels.fix),
      buffers_(static_cast<size_t>(config.threads)),
      pair_token_(static_cast<size_t>(config.max_tokens) * static_cast<size_t>(config.top_k)),
      pair_index_(static_cast<size_t>(pair_capacity_)),
      pair_weight_(pair_token_.size()),
      needed_(static_cast<size_t>(config.max_tokens)),
      pool_(config.threads, config.cpus) {
    if (!x_.store.valid() || !a_.store.valid()) throw std::bad_alloc();
    for (int32_t i = 0; i < pair_capacity_; ++i) pair_index_[static_cast<size_t>(i)] = i;
    used_.reserve(pair_token_.size());
    const int32_t tokens = config.max_tokens;
    for (Buffers &s : buffers_) {
        s.g.resize(static_cast<size_t>(tokens) * kFirstRowsLong);
        s.u.resize(s.g.size());
        s.y.resize(static_cast<size_t>(std::max(tokens * kSecondRowsMany, kSecondFew * kSecondRowsFew)));
        s.tokens.resize(static_cast<size_t>(tokens));
        s.rows.resize(static_cast<size_t>(kManyRows) * kManyBlocks * kRowBlock);
        s.lanes.resize(static_cast<size_t>(kManyRows * kRowLanes));
    }
}

void Engine::Inputs::put(int32_t index, int32_t group, const Group &value) {
    store.put(index, group, value);
    const int32_t range = value.range;
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
    std::fill_n(needed_.begin(), call.tokens, uint8_t{0});
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
            needed_[static_cast<size_t>(token)] = 1;
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
    Buffers &buffers = buffers_[static_cast<size_t>(thread)];
    const auto next_phase = [&] { next_item_.store(0, std::memory_order_relaxed); };
    take(thread, call_->tokens, [&](int32_t i) { prepare(i); });
    pool_.barrier().meet(next_phase);
    while (batch_begin_ < used_.size()) {
        take(thread, first_items_, [&](int32_t i) { first_products(i, buffers); });
        pool_.barrier().meet(next_phase);
        take(thread, second_items_, [&](int32_t i) { second_products(i, buffers); });
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
    call_->beat(call_->record);
}

void Engine::prepare(int32_t token) {
    if (!needed_[static_cast<size_t>(token)]) return;
    x_.ranges[static_cast<size_t>(token)].store(kNothing, std::memory_order_relaxed);
    const size_t start = static_cast<size_t>(token) * static_cast<size_t>(config_.hidden);
    for (int32_t g = 0; g < config_.hidden / kGroup; ++g) {
        float x[kGroup];
        for (size_t i = 0; i < kGroup; ++i) {
            const size_t at = start + static_cast<size_t>(g) * kGroup + i;
            x[i] = config_.bfloat16 ? from_bfloat16(static_cast<const uint16_t *>(call_->x)[at]) : static_cast<const float *>(call_->x)[at];
        }
        Group group;
        group_of_(x, &group);
        x_.put(token, g, group);
    }
}

void Engine::first_products(int32_t item, Buffers &buffers) {
    size_t at = batch_end_ - 1;
    while (used_[at].first_item > item) --at;
    const Used &used = used_[at];
    const evrun_row &row = call_->rows[used.position];
    const int32_t piece = first_rows(used.count), first = (item - used.first_item) * piece;
    const int32_t count = std::min(piece, config_.intermediate - first);
    Rows w1 = part(row.w1, row.s1, config_.hidden, first, count), w3 = part(row.w3, row.s3, config_.hidden, first, count);
    follow(&w1, w3);
    const evrun_row &later = call_->rows[used_[at + 1 < batch_end_ ? at + 1 : batch_begin_].position];
    if (first + count < config_.intermediate)
        follow(&w3, part(row.w1, row.s1, config_.hidden, first + count, count));
    else if (at + 1 < batch_end_)
        follow(&w3, part(later.w1, later.s1, config_.hidden, 0, count));
    else
        follow(&w3, part(later.w2, later.s2, config_.intermediate, 0, count));
    const int32_t *tokens = &pair_token_[static_cast<size_t>(used.first)];
    if (multiply(w1, x_, tokens, used.count, buffers.g.data(), buffers) && multiply(w3, x_, tokens, used.count, buffers.u.data(), buffers))
        activate(used, first, count, buffers);
}

// g, u -> the input of w2, whole groups of it.
void Engine::activate(const Used &used, int32_t first_row, int32_t rows, const Buffers &buffers) {
    const int32_t batch_first = used_[batch_begin_].first;
    for (int32_t i = 0; i < used.count; ++i) {
        const int32_t index = used.first - batch_first + i;
        const float route = pair_weight_[static_cast<size_t>(used.first + i)];
        const float *g = &buffers.g[static_cast<size_t>(i * rows)], *u = &buffers.u[static_cast<size_t>(i * rows)];
        for (int32_t start = 0; start < rows; start += kGroup) {
            float a[kGroup];
            kernels_.swiglu(g + start, u + start, config_.swiglu_limit, route, config_.bfloat16, a);
            Group group;
            group_of_(a, &group);
            a_.put(index, (first_row + start) / kGroup, group);
        }
    }
}

void Engine::second_products(int32_t item, Buffers &buffers) {
    const int32_t first = item * second_rows_, count = std::min(second_rows_, config_.hidden - first);
    const int32_t batch_first = used_[batch_begin_].first;
    if (!call_->exact && batch_begin_ == 0)
        for (int32_t t = 0; t < call_->tokens; ++t)
            std::fill_n(static_cast<float *>(call_->out) + static_cast<ptrdiff_t>(t) * config_.hidden + first, count, 0.0f);
    for (size_t at = batch_begin_; at < batch_end_; ++at) {
        const Used &used = used_[at];
        const evrun_row &row = call_->rows[used.position];
        Rows w2 = part(row.w2, row.s2, config_.intermediate, first, count);
        const bool last = at + 1 == batch_end_;
        if (const int32_t then = last ? first + count : first; then < config_.hidden) {
            const evrun_row &next = call_->rows[used_[last ? batch_begin_ : at + 1].position];
            follow(&w2, part(next.w2, next.s2, config_.intermediate, then, count));
        }
        if (!multiply(w2, a_, &pair_index_[static_cast<size_t>(used.first - batch_first)], used.count, buffers.y.data(), buffers)) return;
        emit(used, first, count, buffers.y.data());
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
bool Engine::multiply(const Rows &rows, const Inputs &inputs, const int32_t *indices, int32_t count, float *y, Buffers &buffers) {
    uint8_t least, most;
    kernels_.extremes(rows.scales, static_cast<size_t>(rows.count) * static_cast<size_t>(rows.k / kGroup), &least, &most);
    if (most == 255) {
        faulted_.store(true, std::memory_order_relaxed);
        return false;
    }
    for (int32_t i = 0; i < count; ++i) buffers.tokens[static_cast<size_t>(i)] = inputs.store.token(indices[i]);
    kernels_.multiply(rows, buffers.tokens.data(), count, y, {buffers.rows.data(), buffers.lanes.data()});
    for (int32_t i = 0; i < count; ++i) mend(rows, inputs, indices[i], least, most, y + static_cast<ptrdiff_t>(i) * rows.count);
    return true;
}

// Inputs that are not finite, and rows whose scales leave what fp32 lanes hold, in double and rounded once.
void Engine::mend(const Rows &rows, const Inputs &inputs, int32_t index, uint8_t least, uint8_t most, float *y) const {
    const int32_t range = inputs.ranges[static_cast<size_t>(index)].load(std::memory_order_relaxed);
    if (range == kNothing) return;
    if (range == kNotFinite) {
        std::fill_n(y, rows.count, std::nanf(""));
        return;
    }
    // A lane adds at most k / 32 sums below 2^32 units of 2^(range - 1 + byte - 127); below `low`, terms could vanish that
    // matter to the sum.
    const int top = 126 - 32 - static_cast<int>(std::ceil(std::log2(rows.k / kGroup + 1)));
    const int high = top + 128 - range, low = -90 + 128 - range;
    if (most <= high && least >= low) return;
    for (int32_t r = 0; r < rows.count; ++r) {
        const uint8_t *first = rows.scales + static_cast<ptrdiff_t>(r) * (rows.k / kGroup);
        const int peak = *std::max_element(first, first + rows.k / kGroup);
        if (peak <= high && peak >= low) continue;
        const uint8_t *codes = rows.codes + static_cast<ptrdiff_t>(r) * (rows.k / 2);
        double sum = 0;
        for (int g = 0; g < rows.k / kGroup; ++g) {
            const Group x = inputs.store.get(index, g);
            int64_t products = 0;
            for (int i = 0; i < kGroup; ++i) {
                const uint8_t pair = codes[(g * kGroup + i) / 2];
                products += static_cast<int64_t>(x.value[i]) * kCodeValues[i % 2 ? pair >> 4 : pair & 15];
            }
            sum += std::ldexp(static_cast<double>(products), x.exponent - 1 + first[g] - 127);
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

uint64_t Engine::multiply_add(uint64_t steps) {
    struct Job {
        const Kernels &kernels;
        uint64_t steps;
        std::atomic<uint64_t> operations{0};
    } job = {kernels_, steps, {}};
    pool_.run(pool_.threads(), [](void *context, int) {
        Job &j = *static_cast<Job *>(context);
        j.operations += j.kernels.multiply_add(j.steps);
    }, &job);
    return job.operations.load();
}

}  // namespace evrun
