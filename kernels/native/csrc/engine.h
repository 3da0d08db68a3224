// One layer call: which token uses which expert, the pieces that threads take, SwiGLU between the products, the sum.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "activation.h"
#include "expert_ffn.h"
#include "kernels.h"
#include "pool.h"

namespace evrun {

class Engine {
   public:
    // Throws std::system_error or std::bad_alloc.
    Engine(const Kernels &kernels, const evrun_config &config);

    int64_t run(const evrun_call &call, evrun_fault *fault);
    uint64_t read(const uint8_t *const *starts, const int64_t *bytes, int32_t ranges);
    uint64_t multiply_add(uint64_t steps);

   private:
    // An expert of the call that some token uses; its pairs (token, expert) are first .. first + count - 1 of the call.
    struct Used {
        int32_t position;
        int32_t first, count;
        int32_t first_item;  // its share of the first products, among those of its batch
    };

    // Inputs of one of the products: tokens of the call for w1 and w3, pairs of the batch for w2.
    struct Inputs {
        Inputs(const Layout &layout, int k, int count) : store(layout, k, count), ranges(static_cast<size_t>(count)) {}
        TokenStore store;
        std::vector<std::atomic<int32_t>> ranges;  // largest exponent, kNothing or kNotFinite
        void put(int32_t index, int32_t group, const Group &value);
    };

    // Buffers of one thread.
    struct Buffers {
        std::vector<float> g, u, y, lanes;
        std::vector<uint8_t> rows;
        std::vector<Token> tokens;
    };

    int64_t pair_up(evrun_fault *fault);
    void next_batch();
    void work(int thread);
    template <typename Work>
    void take(int thread, int32_t items, const Work &work);
    void prepare(int32_t token);
    void first_products(int32_t item, Buffers &buffers);
    void activate(const Used &used, int32_t first_row, int32_t rows, const Buffers &buffers);
    void second_products(int32_t item, Buffers &buffers);
    void emit(const Used &used, int32_t first_row, int32_t rows, const float *y);
    bool multiply(const Rows &rows, const Inputs &inputs, const int32_t *indices, int32_t count, float *y, Buffers &buffers);
    void mend(const Rows &rows, const Inputs &inputs, int32_t index, uint8_t least, uint8_t most, float *y) const;
    void find_fault(evrun_fault *fault) const;
    void beat();

    const Kernels &kernels_;
    const evrun_config config_;
    const int32_t pair_capacity_;
    Inputs x_, a_;
    void (*const group_of_)(const float *, Group *);
    std::vector<Buffers> buffers_;
    std::vector<int32_t> pair_token_, pair_index_, counts_;
    std::vector<float> pair_weight_;
    std::vector<uint8_t> needed_;  // of a token of the call: some expert here uses it
    std::vector<Used> used_;
    Pool pool_;

    // The call and the batch at work: a batch is a stretch of used_ whose pairs fit into a_.
    const evrun_call *call_ = nullptr;
    size_t batch_begin_ = 0, batch_end_ = 0;
    int32_t first_items_ = 0, second_items_ = 0, second_rows_ = 0;
    std::atomic<int32_t> next_item_{0};
    std::atomic<bool> faulted_{false};
    std::chrono::steady_clock::time_point beaten_;
};

}  // namespace evrun
