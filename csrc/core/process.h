// What the data plane knows of the process it runs in: forks, processors, and how a wait is interrupted.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace onesided {

// Grows by one in every forked child. An object that was made under another number belongs to the parent: its
// threads do not exist here, and its locks may be held for ever.
std::uint32_t fork_generation();

// Raises OnesidedError if `made_in` is not the present fork generation. `what` names the object.
void check_not_forked(std::uint32_t made_in, const char* what);

// Descriptors that a forked child must not keep open, so that a peer sees the end of a connection when the parent ends.
void close_in_forked_child(int fd);
void forget_in_forked_child(int fd);

// A mutex of the process's own: nobody holds it at the moment of a fork, so that the child can use what it guards. It must
// live for ever, and no other such mutex may be taken while it is held.
void hold_over_fork(std::mutex& mutex);

// A thread of the data plane's own. OnesidedError if there can be none.
std::thread start_thread(std::function<void()> run);

// Processors that this process may run on, at least 1.
unsigned usable_processors();

// Ctrl-C. While a scope lives, every wait and every long copy of its thread calls `check` about every 50 ms, without any
// lock held; `check` may throw, which ends the wait. Threads of the data plane's own have no scope and sleep undisturbed.
using InterruptCheck = void (*)();
class InterruptScope {
 public:
  explicit InterruptScope(InterruptCheck check);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  InterruptCheck outer_;
};
bool interruptible();
void check_interrupt();

// A caller that holds an interpreter's lock and hopes that an operation ends at once: while this lives, `begin` is called once
// if the operation has to wait after all, just before it does.
class BlockingHook {
 public:
  using Begin = void (*)(void*);
  BlockingHook(Begin begin, void* with) : outer_begin_(begin_), outer_with_(with_) {
    begin_ = begin;
    with_ = with;
  }
  ~BlockingHook() {
    begin_ = outer_begin_;
    with_ = outer_with_;
  }
  BlockingHook(const BlockingHook&) = delete;
  BlockingHook& operator=(const BlockingHook&) = delete;

  static void before_waiting() {
    if (begin_ == nullptr) return;
    const Begin begin = begin_;
    begin_ = nullptr;
    begin(with_);
  }

 private:
  static inline thread_local Begin begin_ = nullptr;
  static inline thread_local void* with_ = nullptr;
  Begin outer_begin_;
  void* outer_with_;
};

}  // namespace onesided
