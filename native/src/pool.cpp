#include "kvist/pool.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvist {
namespace {

// About 20 microseconds of pauses: longer than a phase of a decode step is late by, far shorter than a time slice.
constexpr int kSpins = 600;
// After a run, half a millisecond: while anything is generated the next run is nearer than that, and to fall asleep and be
// woken takes the caller and the thread longer than to wait. Whoever needs the core gets it every few microseconds.
constexpr int kSpinsBetween = 15000;
constexpr int kSpinsBetweenYields = 100;
// After a thread was woken for nothing: what preparing a run takes after `wake`, on slow days.
constexpr int kSpinsAwake = 6000;

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

template <typename Value, typename IsReached>
void Pool::wait_until(const std::atomic<Value>& value, IsReached is_reached) {
  if (spin(value, is_reached, kSpins)) {
    return;
  }
  // Counted before the value is looked at again: whoever changes it afterwards sees the sleeper and wakes it.
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  for (Value seen = value.load(std::memory_order_seq_cst); !is_reached(seen);
       seen = value.load(std::memory_order_seq_cst)) {
    value.wait(seen, std::memory_order_seq_cst);
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

template <typename Value, typename IsReached>
bool Pool::spin(const std::atomic<Value>& value, IsReached is_reached, int num_spins) {
  for (int spin = 0; spin < num_spins; ++spin) {
    if (is_reached(value.load(std::memory_order_acquire))) {
      return true;
    }
    relax();
  }
  return false;
}

void Pool::wake() {
  std::uint32_t now = run_.load(std::memory_order_seq_cst);
  // While a run is open nobody needs to be woken, and its number must not change.
  if (now % 2 == 0 && sleepers_.load(std::memory_order_seq_cst) != 0 && run_.compare_exchange_strong(now, now + 2)) {
    run_.notify_all();
  }
}

void Worker::barrier() {
  Pool& pool = *pool_;
  has_item_ = false;
  const std::uint32_t epoch = pool.barrier_epoch_.load(std::memory_order_acquire);
  phase_ = (phase_ + 1) % pool.phases_.size();
  if (pool.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
    pool.arrived_.store(0, std::memory_order_relaxed);
    pool.phases_[phase_].next.store(0, std::memory_order_relaxed);
    pool.phases_[phase_].done.store(0, std::memory_order_relaxed);
    pool.barrier_epoch_.store(epoch + 1, std::memory_order_seq_cst);
    if (pool.sleepers_.load(std::memory_order_seq_cst) != 0) {
      pool.barrier_epoch_.notify_all();
    }
    return;
  }
  pool.wait_until(pool.barrier_epoch_, [&](std::uint32_t now) { return now != epoch; });
}

int Worker::claim(int total) {
  Pool::Phase& phase = pool_->phases_[phase_];
  total_ = total;
  if (has_item_) {
    has_item_ = false;
    phase.done.fetch_add(1, std::memory_order_seq_cst);
    if (pool_->sleepers_.load(std::memory_order_seq_cst) != 0) {
      phase.done.notify_all();
    }
  }
  // Looked at first: threads that come late should not write what others read.
  if (phase.next.load(std::memory_order_relaxed) >= total) {
    return -1;
  }
  const int item = phase.next.fetch_add(1, std::memory_order_relaxed);
  has_item_ = item < total;
  return has_item_ ? item : -1;
}

void Worker::end_phase() {
  Pool::Phase& phase = pool_->phases_[phase_];
  const int total = total_;
  if (has_item_) {
    claim(0);
  }
  pool_->wait_until(phase.done, [&](int done) { return done >= total; });
  ++phase_;
  total_ = 0;
}

Pool::Pool(int num_threads) : num_threads_(std::max(1, num_threads)), phases_(2) {
  threads_.reserve(static_cast<std::size_t>(num_threads_ - 1));
  for (int index = 1; index < num_threads_; ++index) {
    threads_.emplace_back([this, index] { serve(index); });
  }
}

Pool::~Pool() {
  stopping_.store(true, std::memory_order_release);
  run_.fetch_add(2, std::memory_order_seq_cst);
  run_.notify_all();
  for (auto& thread : threads_) {
    thread.join();
  }
}

void Pool::serve(int index) {
  const FlushDenormals flush;
  std::uint32_t seen = 0;  // even: what `run_` is until something begins
  while (true) {
    // The run before that number may still be open: this thread has been in it.
    const auto has_begun = [&](std::uint32_t now) { return now != seen && now != seen - 1; };
    for (int spins = 0; seen != 0 && spins < kSpinsBetween && !spin(run_, has_begun, kSpinsBetweenYields);
         spins += kSpinsBetweenYields) {
      std::this_thread::yield();
    }
    wait_until(run_, has_begun);
    if (stopping_.load(std::memory_order_acquire)) {
      return;
    }
    std::uint32_t now = run_.load(std::memory_order_seq_cst);
    if (now % 2 == 0) {
      seen = now;
      spin(run_, [&](std::uint32_t later) { return later != seen; }, kSpinsAwake);
      continue;
    }
    // First counted, then looked: a caller that closes the run either is seen here or sees this thread.
    inside_.fetch_add(1, std::memory_order_seq_cst);
    // No run begins while a thread is inside an open one.
    now = run_.load(std::memory_order_seq_cst);
    if (now % 2 == 1) {
      Worker worker(*this, index, num_threads_);
      function_(context_, worker);
      if (waits_for_all_) {
        worker.barrier();
      }
    }
    seen = now + now % 2;
    inside_.fetch_sub(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) {
      inside_.notify_all();
    }
  }
}

void Pool::run_raw(Function function, const void* context, std::size_t num_phases,
                   const std::function<void()>& meanwhile) {
  while (busy_.test_and_set(std::memory_order_acquire)) {
    busy_.wait(true, std::memory_order_relaxed);
  }
  if (phases_.size() < num_phases + 1) {
    phases_ = std::vector<Phase>(num_phases + 1);
  }
  for (Phase& phase : phases_) {
    phase.next.store(0, std::memory_order_relaxed);
    phase.done.store(0, std::memory_order_relaxed);
  }
  function_ = function;
  context_ = context;
  waits_for_all_ = num_phases == 0;
  run_.fetch_add(1, std::memory_order_seq_cst);  // odd: open
  if (sleepers_.load(std::memory_order_seq_cst) != 0) {
    run_.notify_all();
  }
  if (meanwhile) {
    meanwhile();
  }
  {
    const FlushDenormals flush;
    Worker worker(*this, 0, num_threads_);
    function(context, worker);
    if (waits_for_all_) {
      worker.barrier();
    }
  }
  run_.fetch_add(1, std::memory_order_seq_cst);
  wait_until(inside_, [](int inside) { return inside == 0; });
  busy_.clear(std::memory_order_release);
  busy_.notify_one();
}

}  // namespace kvist
