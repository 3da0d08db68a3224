#include "pool.h"

#include <pthread.h>
#include <sched.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace evrun {

namespace {

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

bool cores_for(int threads) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) >= threads;
}

// Round to nearest, subnormals kept, whatever the caller's process has set.
class DefaultRounding {
   public:
#if defined(__x86_64__)
    DefaultRounding() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~DefaultRounding() { _mm_setcsr(saved_); }

   private:
    unsigned saved_;
#endif
};

constexpr int kSpins = 2000;

}  // namespace

void Barrier::wait(uint64_t round) {
    const auto passed = [&] { return round_.load(std::memory_order_acquire) != round; };
    for (int i = 0; may_spin_ && i < kSpins; ++i) {
        if (passed()) return;
        relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, passed);
}

Pool::Pool(int threads, const int32_t *cpus) : barrier_(cores_for(threads)), done_(cores_for(threads)) {
    workers_.reserve(static_cast<size_t>(threads - 1));
    try {
        for (int i = 1; i < threads; ++i) workers_.emplace_back(&Pool::serve, this, i, cpus ? cpus[i] : -1);
    } catch (...) {
        stop();
        throw;
    }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (auto &worker : workers_) worker.join();
}

void Pool::run(int count, void (*work)(void *, int), void *context) {
    const DefaultRounding rounding;
    barrier_.reset(count);
    if (count == 1) return work(context, 0);
    done_.reset(count);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        work_ = work;
        context_ = context;
        count_ = count;
        ++round_;
    }
    wake_.notify_all();
    work(context, 0);
    done_.meet([] {});
}

void Pool::serve(int thread, int cpu) {
    if (cpu >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(static_cast<unsigned>(cpu), &set);
        pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // refused: it runs where it may
    }
    const DefaultRounding rounding;
    uint64_t seen = 0;
    for (;;) {
        void (*work)(void *, int);
        void *context;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return stopping_ || (round_ != seen && thread < count_); });
            if (stopping_) return;
            seen = round_;
            work = work_;
            context = context_;
        }
        work(context, thread);
        done_.meet([] {});
    }
}

}  // namespace evrun
