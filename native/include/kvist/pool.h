// The one pool of threads: every thread runs the same function, and they meet at barriers.
//
// A step is one `run`: the threads claim pieces of work from counters and wait for each other between phases. Waiting
// spins for a bounded time, because the next phase is microseconds away, and then sleeps, because on a shared core the
// thread waited for may need the very core that the waiting one burns.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace kvist {

class Pool;

// What a function run by the pool knows of its thread.
class Worker {
 public:
  int index() const { return index_; }
  int count() const { return count_; }

  // Returns once every thread of the run has called it. The last to arrive resets the claim counter.
  void barrier();

  // Claims the next of `total` items of the current phase, dynamically: [0, total) each exactly once over all threads,
  // -1 when none is left. A barrier begins a new phase.
  int claim(int total);

 private:
  friend class Pool;
  Worker(Pool& pool, int index, int count) : pool_(&pool), index_(index), count_(count) {}
  Pool* pool_;
  int index_;
  int count_;
};

class Pool {
 public:
  // Starts num_threads - 1 threads; the caller of `run` is the other one. num_threads >= 1.
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }

  // Runs body(worker) on every thread, denormals flushed to zero, and returns when all are done. One run at a time:
  // callers on several threads take turns. `body` must not throw.
  template <typename Body>
  void run(const Body& body) {
    run_raw([](const void* context, Worker& worker) { (*static_cast<const Body*>(context))(worker); }, &body);
  }

 private:
  friend class Worker;
  using Function = void (*)(const void*, Worker&);
  void run_raw(Function function, const void* context);
  void serve(int index);
  void wait_change(const std::atomic<std::uint32_t>& value, std::uint32_t old);

  int num_threads_;
  std::vector<std::thread> threads_;
  alignas(64) std::atomic<std::uint32_t> run_epoch_{0};
  alignas(64) std::atomic<std::uint32_t> barrier_epoch_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> next_item_{0};
  alignas(64) std::atomic<std::uint32_t> sleepers_{0};
  Function function_ = nullptr;
  const void* context_ = nullptr;
  std::atomic<bool> stopping_{false};
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

}  // namespace kvist
