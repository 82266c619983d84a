#include "core/transport.h"

#include <algorithm>

namespace onesided {
namespace {
std::atomic<std::uint64_t> loss_count{0};

// Where a device writes the signals, the waiter looks every now and then: after a 32nd of the time it has waited, so that no
// wait becomes longer by more than that, and within these.
constexpr std::chrono::nanoseconds kShortestLook{20'000};
constexpr std::chrono::nanoseconds kLongestLook{10'000'000};
}  // namespace

std::shared_ptr<void> Allocation::kept(const void* owner, const std::function<std::shared_ptr<void>()>& make) {
  std::lock_guard lock(mutex_);
  for (const auto& [keeper, thing] : kept_) {
    if (keeper == owner) return thing;
  }
  return kept_.emplace_back(owner, make()).second;
}

void Allocation::forget(const void* owner) {
  std::shared_ptr<void> thing;  // outlives the lock
  std::lock_guard lock(mutex_);
  for (auto& [keeper, kept] : kept_) {
    if (keeper == owner) thing = std::move(kept);
  }
  std::erase_if(kept_, [&](const auto& pair) { return pair.first == owner; });
}

std::uint64_t losses() {
  return loss_count.load(std::memory_order_seq_cst);
}

std::string PeerState::reason() const {
  std::lock_guard lock(mutex_);
  return reason_;
}

void PeerState::lose(std::string reason) {
  {
    std::lock_guard lock(mutex_);
    if (lost()) return;
    reason_ = std::move(reason);
    lost_.store(true, std::memory_order_seq_cst);
  }
  loss_count.fetch_add(1, std::memory_order_seq_cst);
}

void PeerState::fail_lost(const char* operation) const {
  fail(ErrorKind::ConnectionLost, operation, ": the connection to ", name_, " is lost: ", reason());
}

void check_signal(const char* operation, const std::string& owner, std::uint32_t index, std::uint32_t signals) {
  if (index >= signals) {
    fail(ErrorKind::Bounds, operation, ": signal ", index, " does not exist: ", owner, " has ", signals, " signals");
  }
}

void fail_late(const char* operation, const std::string& peer) {
  const bool gets = std::string_view(operation) == "get";
  fail(ErrorKind::DeadlineExceeded, operation, " to ", peer, ": the deadline passed; ",
       gets ? "its destination is not written again" : "its source is not read again");
}

void check_aligned(const char* operation, const std::string& owner, std::uint64_t address, std::uint64_t offset,
                   unsigned word_nbytes) {
  if (address % word_nbytes == 0) return;
  fail(ErrorKind::Bounds, operation, ": the word at offset ", offset, " is not aligned to ", word_nbytes,
       " bytes in the memory of ", owner);
}

Reached wait_signals(const Memory& memory, Counters& counters, std::span<const Wanted> wanted, const Deadline& deadline,
                     std::chrono::nanoseconds spin, const std::string& from, const std::function<void()>& watch) {
  memory.check_usable("this memory");
  const Control& control = memory.control();
  static const std::string owner = "this memory";
  for (const Wanted& one : wanted) check_signal("wait_signal", owner, one.index, control.signals());
  counters.add(Count::Waits);
  Reached reached_one{};
  std::uint64_t watched = losses() - 1;
  const auto come = [&] {
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const std::uint64_t value = control.signal(wanted[i].index).load(std::memory_order_seq_cst);
      if (!reached(value, wanted[i].at_least)) continue;
      reached_one = {i, value};
      return true;
    }
    return false;
  };
  const auto ready = [&] {
    if (come()) return true;
    if (memory.closed()) fail(ErrorKind::StaleHandle, "wait_signal: the memory was closed during the wait");
    if (const std::uint64_t now = losses(); now != watched) {
      watched = now;
      try {
        watch();
      } catch (const Error&) {
        if (!come()) throw;  // it may have signalled before it was lost
        return true;
      }
    }
    return false;
  };
  bool slept = false;
  const Deadline first = memory.silent() ? deadline.at_most(spin + kShortestLook) : deadline;
  bool in_time = control.event().await(ready, first, spin, &slept);
  for (const auto begin = Deadline::Clock::now(); !in_time && memory.silent() && !deadline.passed();) {
    const std::chrono::nanoseconds waited = Deadline::Clock::now() - begin;
    const auto look = std::clamp(waited / 32, kShortestLook, kLongestLook);
    in_time = control.event().await(ready, deadline.at_most(look), std::chrono::nanoseconds(0), &slept);
  }
  if (slept) counters.add(Count::Sleeps);
  if (in_time) return reached_one;
  constexpr std::size_t kMostNamed = 8;
  std::string standing;
  for (std::size_t i = 0; i < std::min(wanted.size(), kMostNamed); ++i) {
    standing += text(i == 0 ? "" : ", ", "signal ", wanted[i].index, " stands at ",
                     control.signal(wanted[i].index).load(), ", waited for ", wanted[i].at_least);
  }
  if (wanted.size() > kMostNamed) standing += text(", and ", wanted.size() - kMostNamed, " more");
  fail(ErrorKind::DeadlineExceeded, "wait_signal: the deadline passed; ", standing, " from ", from);
}

}  // namespace onesided
