// Waiting for a condition over memory that other threads or other processes change: spin briefly, then sleep on a futex.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "core/deadline.h"
#include "core/process.h"

namespace onesided {

// A waiter burns a core for at most this long unless it asks for more (design: 50 microseconds).
inline constexpr std::chrono::nanoseconds kSpin{50'000};
// Asleep, a waiter that can be interrupted looks up this often: Ctrl-C must get through within 100 ms even when the
// kernel gave the signal to another thread.
inline constexpr std::chrono::nanoseconds kNap{50'000'000};
inline constexpr std::chrono::nanoseconds kLongNap{3600'000'000'000};

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Lets another thread have this processor, if one wants it.
void yield_cpu();

// The spin that makes sense here: none where a spinning waiter only keeps the one processor from its peer.
std::chrono::nanoseconds useful_spin(std::chrono::nanoseconds asked);

// An event count. It may lie in memory that several processes map, and all bytes zero is its initial state.
//
// The protocol is Dekker's: the changer writes the condition, then reads `waiters`; the waiter writes `waiters`, then
// reads the condition; both sequentially consistent, so at least one sees the other. A changer that sees no waiter makes
// no system call. `sequence` only carries the sleep: its value means nothing.
class Event {
 public:
  // Call after the condition was changed by a sequentially consistent store or read-modify-write.
  void notify() {
    if (waiters_.load(std::memory_order_seq_cst) != 0) wake();
  }

  // Waits until `ready()` is true and returns true, or false when the deadline passed first. `ready` may throw. `slept`
  // becomes true if the wait outlasted its spin.
  template <class Ready>
  bool await(Ready&& ready, const Deadline& deadline, std::chrono::nanoseconds spin = kSpin, bool* slept = nullptr);

 private:
  void wake();
  void sleep(std::uint32_t seen, std::chrono::nanoseconds at_most);

  std::atomic<std::uint32_t> waiters_{0};
  std::atomic<std::uint32_t> sequence_{0};
};
static_assert(sizeof(Event) == 8, "Event is part of the layout of shared memory");

template <class Ready>
bool Event::await(Ready&& ready, const Deadline& deadline, std::chrono::nanoseconds spin, bool* slept) {
  if (ready()) return true;
  BlockingHook::before_waiting();
  if (spin = useful_spin(spin); spin.count() > 0) {
    // The clock is read after the first microsecond or so: until then it would only delay the answer.
    const auto rounds = [&] {
      for (int round = 0; round < 32; ++round) {
        if (ready()) return true;
        pause_cpu();
      }
      return false;
    };
    if (rounds()) return true;
    const auto begin = Deadline::Clock::now();
    const auto until = begin + deadline.left(spin);
    auto look_up = begin + kNap;
    for (auto now = begin; now < until; now = Deadline::Clock::now()) {
      if (rounds()) return true;
      if (now - begin > kSpin) yield_cpu();  // asked to spin for longer: not against whom it waits for
      if (now >= look_up) {
        check_interrupt();
        look_up = now + kNap;
      }
    }
  }
  struct Registered {
    std::atomic<std::uint32_t>& waiters;
    explicit Registered(std::atomic<std::uint32_t>& count) : waiters(count) { waiters.fetch_add(1); }
    ~Registered() { waiters.fetch_sub(1); }
  } registered(waiters_);
  for (;;) {
    const std::uint32_t seen = sequence_.load(std::memory_order_seq_cst);
    if (ready()) return true;
    const auto nap = deadline.left(interruptible() ? kNap : kLongNap);
    if (nap.count() == 0) return false;
    if (slept != nullptr) *slept = true;
    sleep(seen, nap);
    check_interrupt();
  }
}

}  // namespace onesided
