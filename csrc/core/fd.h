// File descriptors: owned, and waited for.
#pragma once

#include <cstdint>

#include "core/deadline.h"

namespace onesided {

// A descriptor that is closed with its owner.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

// Has epoll_wait() report `events` of `fd`, and its number.
void add_to_epoll(int epoll, int fd, std::uint32_t events);

// Waits until poll() reports one of `events` (or an error) on `fd`; false at the deadline. Throws what an interrupt throws.
bool wait_for(int fd, short events, const Deadline& deadline);

}  // namespace onesided
