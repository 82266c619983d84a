#include "core/fd.h"

#include <poll.h>
#include <unistd.h>

#include <chrono>

#include "core/event.h"
#include "core/process.h"

namespace onesided {

void Fd::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

bool wait_for(int fd, short events, const Deadline& deadline) {
  BlockingHook::before_waiting();
  for (;;) {
    pollfd watched{fd, events, 0};
    const auto nap = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline.left(interruptible() ? kNap : kLongNap) + std::chrono::microseconds(999));
    if (::poll(&watched, 1, static_cast<int>(nap.count())) > 0) return true;
    check_interrupt();
    if (deadline.passed()) return false;
  }
}

}  // namespace onesided
