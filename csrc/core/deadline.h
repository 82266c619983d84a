// A point in time after which a blocking call gives up.
#pragma once

#include <algorithm>
#include <chrono>

namespace onesided {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline never() { return Deadline(Clock::time_point::max()); }
  static Deadline after(double seconds) {
    // Beyond a century is never; the conversion to ticks would overflow.
    if (!(seconds < 3e9)) return never();
    return Deadline(Clock::now() +
                    std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::max(seconds, 0.0))));
  }

  Deadline sooner(const Deadline& other) const { return Deadline(std::min(at_, other.at_)); }
  // The sooner one of this and `from_now`.
  Deadline at_most(std::chrono::nanoseconds from_now) const {
    return Deadline(std::min(at_, Clock::now() + std::chrono::duration_cast<Clock::duration>(from_now)));
  }

  bool is_never() const { return at_ == Clock::time_point::max(); }
  bool passed() const { return !is_never() && Clock::now() >= at_; }

  // What is left, at least zero and at most `limit`.
  std::chrono::nanoseconds left(std::chrono::nanoseconds limit) const {
    if (is_never()) return limit;
    auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(at_ - Clock::now());
    return std::clamp(left, std::chrono::nanoseconds(0), limit);
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace onesided
