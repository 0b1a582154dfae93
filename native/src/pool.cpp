#include "kvist/pool.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvist {
namespace {

// About 20 microseconds of pauses: longer than a phase of a decode step is late by, far shorter than a time slice.
constexpr int kSpins = 600;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Denormals as zeros while a kernel runs: a product of two tiny numbers must not cost a hundred cycles. The state is
// the thread's; the caller's is put back.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : old_(_mm_getcsr()) { _mm_setcsr(old_ | 0x8040U); }
  ~FlushDenormals() { _mm_setcsr(old_); }

 private:
  unsigned old_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(old_));
    asm volatile("msr fpcr, %0" ::"r"(old_ | (1UL << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(old_)); }

 private:
  unsigned long old_;
#endif
};

}  // namespace

void Pool::wait_change(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (value.load(std::memory_order_acquire) != old) {
      return;
    }
    relax();
  }
  // Counted before the value is looked at again: whoever changes it afterwards sees the sleeper and wakes it.
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value.load(std::memory_order_seq_cst) == old) {
    value.wait(old, std::memory_order_seq_cst);
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void Worker::barrier() {
  Pool& pool = *pool_;
  const std::uint32_t epoch = pool.barrier_epoch_.load(std::memory_order_acquire);
  if (pool.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
    pool.arrived_.store(0, std::memory_order_relaxed);
    pool.next_item_.store(0, std::memory_order_relaxed);
    pool.barrier_epoch_.store(epoch + 1, std::memory_order_seq_cst);
    if (pool.sleepers_.load(std::memory_order_seq_cst) != 0) {
      pool.barrier_epoch_.notify_all();
    }
    return;
  }
  pool.wait_change(pool.barrier_epoch_, epoch);
}

int Worker::claim(int total) {
  if (total <= 0) {
    return -1;
  }
  const int item = pool_->next_item_.fetch_add(1, std::memory_order_relaxed);
  return item < total ? item : -1;
}

Pool::Pool(int num_threads) : num_threads_(std::max(1, num_threads)) {
  threads_.reserve(static_cast<std::size_t>(num_threads_ - 1));
  for (int index = 1; index < num_threads_; ++index) {
    threads_.emplace_back([this, index] { serve(index); });
  }
}

Pool::~Pool() {
  stopping_.store(true, std::memory_order_release);
  run_epoch_.fetch_add(1, std::memory_order_seq_cst);
  run_epoch_.notify_all();
  for (auto& thread : threads_) {
    thread.join();
  }
}

void Pool::serve(int index) {
  const FlushDenormals flush;
  std::uint32_t seen = 0;
  while (true) {
    wait_change(run_epoch_, seen);
    seen = run_epoch_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_acquire)) {
      return;
    }
    Worker worker(*this, index, num_threads_);
    function_(context_, worker);
    worker.barrier();
  }
}

void Pool::run_raw(Function function, const void* context) {
  while (busy_.test_and_set(std::memory_order_acquire)) {
    busy_.wait(true, std::memory_order_relaxed);
  }
  {
    const FlushDenormals flush;
    next_item_.store(0, std::memory_order_relaxed);
    function_ = function;
    context_ = context;
    run_epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) {
      run_epoch_.notify_all();
    }
    Worker worker(*this, 0, num_threads_);
    function(context, worker);
    worker.barrier();
  }
  busy_.clear(std::memory_order_release);
  busy_.notify_one();
}

}  // namespace kvist
