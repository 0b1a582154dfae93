// The one pool of threads: every thread runs the same function, and they meet at barriers.
//
// The threads claim pieces of work from counters, phase by phase. In `run` they wait for each other at barriers. In
// `run_phases` they wait for the work and not for each other: a phase ends when its items are done, and a thread that the
// system took off its core comes back to phases without items until it has caught up. A step has hundreds of phases, and
// a time slice lost in one of them would hold all threads up.
//
// Waiting spins for a bounded time, because the next phase is microseconds away, and then sleeps, because on a shared core
// the thread waited for may need the very core that the waiting one burns. Between two runs it spins for longer, and lets
// whoever needs the core have it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace kvist {

class Pool;

// What a function run by the pool knows of its thread.
class Worker {
 public:
  int index() const { return index_; }
  int count() const { return count_; }

  // Claims the next of `total` items of the current phase, dynamically: [0, total) each exactly once over all threads,
  // -1 when none is left. An item is done when its thread claims again or ends the phase.
  int claim(int total);

  // Begins a new phase once every thread of the run has called it; for `run` only.
  void barrier();

  // Begins a new phase once all items of this one are done, whoever did them. What the thread computed for itself before
  // its claims may be wrong if it came late, and is then of no use to anybody: it will find no item.
  void end_phase();

 private:
  friend class Pool;
  Worker(Pool& pool, int index, int count) : pool_(&pool), index_(index), count_(count) {}
  Pool* pool_;
  int index_;
  int count_;
  std::size_t phase_ = 0;
  int total_ = 0;  // items of the current phase
  bool has_item_ = false;
};

class Pool {
 public:
  // Starts num_threads - 1 threads; the caller of `run` is the other one. num_threads >= 1.
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }

  // Says that a run is near: threads that sleep wake up, and spin for longer than usual. Waking takes a thread about as
  // long as the caller needs to prepare the run. Returns at once.
  void wake();

  // Runs body(worker) on every thread, denormals flushed to zero, and returns when all are done. One run at a time:
  // callers on several threads take turns. `body` must not throw.
  template <typename Body>
  void run(const Body& body) {
    run_raw(&call<Body>, &body, 0, {});
  }

  // The same for a body that ends its phases with end_phase, at most num_phases of them. Returns when thread 0 is through
  // and the others have left; threads that never woke take no part. Thread 0, the caller, does `meanwhile` first, if it is
  // not empty, and then takes up the body wherever the others are; it must not throw.
  template <typename Body>
  void run_phases(const Body& body, std::size_t num_phases, const std::function<void()>& meanwhile) {
    run_raw(&call<Body>, &body, num_phases, meanwhile);
  }

 private:
  friend class Worker;
  using Function = void (*)(const void*, Worker&);

  struct alignas(64) Phase {
    std::atomic<int> next{0};
    std::atomic<int> done{0};
  };

  template <typename Body>
  static void call(const void* context, Worker& worker) {
    (*static_cast<const Body*>(context))(worker);
  }

  // num_phases 0: all threads take part, and phases end at barriers.
  void run_raw(Function function, const void* context, std::size_t num_phases, const std::function<void()>& meanwhile);
  void serve(int index);
  template <typename Value, typename IsReached>
  void wait_until(const std::atomic<Value>& value, IsReached is_reached);
  template <typename Value, typename IsReached>
  static bool spin(const std::atomic<Value>& value, IsReached is_reached, int num_spins);

  int num_threads_;
  std::vector<std::thread> threads_;
  // Odd while a run may be entered; each run has numbers of its own, and so has each call of `wake`.
  alignas(64) std::atomic<std::uint32_t> run_{0};
  alignas(64) std::atomic<std::uint32_t> barrier_epoch_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> inside_{0};  // threads other than the caller's that are in a run, or about to look
  alignas(64) std::atomic<std::uint32_t> sleepers_{0};
  std::vector<Phase> phases_;
  bool waits_for_all_ = true;
  Function function_ = nullptr;
  const void* context_ = nullptr;
  std::atomic<bool> stopping_{false};
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

}  // namespace kvist
