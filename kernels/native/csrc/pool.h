// Threads made once; the calling thread is number 0.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace evrun {

// Where the threads of one run meet. Waits spin for some microseconds only if every thread can have a core.
class Barrier {
   public:
    explicit Barrier(bool may_spin) : may_spin_(may_spin) {}
    void reset(int threads) { threads_ = threads; }

    // The last to arrive runs `last` while the others wait.
    template <typename Last>
    void meet(const Last &last) {
        const uint64_t round = round_.load(std::memory_order_relaxed);
        const int threads = threads_;  // read before arriving: then a next run may begin, and set it anew
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            last();
            arrived_.store(0, std::memory_order_relaxed);
            {
                std::lock_guard<std::mutex> lock(mutex_);
                round_.store(round + 1, std::memory_order_release);
            }
            wake_.notify_all();
            return;
        }
        wait(round);
    }

   private:
    void wait(uint64_t round);

    const bool may_spin_;
    int threads_ = 1;
    std::atomic<int> arrived_{0};
    std::atomic<uint64_t> round_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
};

class Pool {
   public:
    // `cpus` null, or one a thread: threads 1.. are pinned. Throws std::system_error when a thread cannot be made.
    Pool(int threads, const int32_t *cpus);
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }
    Barrier &barrier() { return barrier_; }

    // work(context, thread) on threads 0 .. count - 1, with the processor's default rounding; returns when all are done.
    void run(int count, void (*work)(void *context, int thread), void *context);

   private:
    void serve(int thread, int cpu);
    void stop();

    Barrier barrier_, done_;
    std::mutex mutex_;
    std::condition_variable wake_;
    uint64_t round_ = 0;
    int count_ = 0;
    bool stopping_ = false;
    void (*work_)(void *, int) = nullptr;
    void *context_ = nullptr;
    std::vector<std::thread> workers_;
};

}  // namespace evrun
