#include "core/fd.h"

#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

#include "core/error.h"
#include "core/event.h"
#include "core/process.h"

namespace onesided {

void Fd::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

void add_to_epoll(int epoll, int fd, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) fail_errno(ErrorKind::Onesided, errno, "epoll_ctl failed");
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
