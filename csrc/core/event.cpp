#include "core/event.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace onesided {

std::chrono::nanoseconds useful_spin(std::chrono::nanoseconds asked) {
  static const bool alone = usable_processors() == 1;
  return alone ? std::chrono::nanoseconds(0) : asked;
}

void yield_cpu() {
  ::sched_yield();
}

// Not FUTEX_PRIVATE: the waiter and the waker may be different processes that map the same page.
void Event::wake() {
  sequence_.fetch_add(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, &sequence_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Returns early on a wake, a changed sequence or a signal; the caller looks at its condition again in every case.
void Event::sleep(std::uint32_t seen, std::chrono::nanoseconds at_most) {
  const timespec timeout{static_cast<time_t>(at_most.count() / 1'000'000'000),
                         static_cast<long>(at_most.count() % 1'000'000'000)};
  ::syscall(SYS_futex, &sequence_, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

}  // namespace onesided
