#include "core/process.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <system_error>
#include <vector>

#include "core/error.h"

namespace onesided {
namespace {

std::atomic<std::uint32_t> generation{0};
thread_local InterruptCheck interrupt = nullptr;

// Never destroyed: threads may outlive static destructors at exit.
struct Inherited {
  std::mutex mutex;
  std::vector<int> fds;
  std::vector<std::mutex*> held;

  void lock() {
    mutex.lock();
    for (auto* other : held) other->lock();
  }
  void unlock() {
    for (auto* other : held) other->unlock();
    mutex.unlock();
  }
};
Inherited& inherited() {
  static Inherited* const instance = [] {
    auto* made = new Inherited;
    pthread_atfork([] { inherited().lock(); }, [] { inherited().unlock(); },
                   [] {
                     generation.fetch_add(1);
                     for (int fd : inherited().fds) ::close(fd);
                     inherited().fds.clear();
                     inherited().unlock();
                   });
    return made;
  }();
  return *instance;
}
// From the start, so that every fork is counted.
[[maybe_unused]] const Inherited& registered = inherited();

}  // namespace

std::uint32_t fork_generation() {
  return generation.load(std::memory_order_relaxed);
}

void check_not_forked(std::uint32_t made_in, const char* what) {
  if (made_in != fork_generation()) {
    fail(ErrorKind::Onesided, what, " was made before a fork and cannot be used in the child (pid ", ::getpid(),
         "): open a new transport there, or start processes with the 'spawn' method");
  }
}

void close_in_forked_child(int fd) {
  std::lock_guard lock(inherited().mutex);
  inherited().fds.push_back(fd);
}

void forget_in_forked_child(int fd) {
  std::lock_guard lock(inherited().mutex);
  auto& fds = inherited().fds;
  fds.erase(std::remove(fds.begin(), fds.end(), fd), fds.end());
}

void hold_over_fork(std::mutex& mutex) {
  std::lock_guard lock(inherited().mutex);
  inherited().held.push_back(&mutex);
}

std::thread start_thread(std::function<void()> run) {
  try {
    return std::thread(std::move(run));
  } catch (const std::system_error& error) {
    fail(ErrorKind::Onesided, "cannot start a thread: ", error.what(),
         " (ulimit -u, or the pids limit of the control group)");
  }
}

unsigned usable_processors() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return static_cast<unsigned>(std::max(1, CPU_COUNT(&set)));
}

InterruptScope::InterruptScope(InterruptCheck check) : outer_(interrupt) {
  interrupt = check;
}

InterruptScope::~InterruptScope() {
  interrupt = outer_;
}

bool interruptible() {
  return interrupt != nullptr;
}

void check_interrupt() {
  if (interrupt != nullptr) interrupt();
}

}  // namespace onesided
