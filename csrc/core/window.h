// A window: one memory on every rank of a group, and the operations on it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/transport.h"

namespace onesided {

class Window {
 public:
  // `targets[rank]` reaches the memory of that rank; `rank` is this process's own. An attached window has one target, its
  // owner, no memory here and no rank. An exposed window has its own memory as the only target.
  Window(std::string name, std::shared_ptr<Memory> memory, std::vector<std::shared_ptr<Target>> targets,
         std::optional<unsigned> rank);

  const std::string& name() const { return name_; }
  unsigned size() const { return static_cast<unsigned>(targets_.size()); }
  std::optional<unsigned> rank() const { return rank_; }
  const std::shared_ptr<Memory>& memory() const { return memory_; }

  Target& target(const char* operation, std::int64_t peer) const {
    if (peer < 0 || static_cast<std::uint64_t>(peer) >= targets_.size()) refuse_rank(operation, peer);
    return *targets_[static_cast<std::size_t>(peer)];
  }

  // Everything below may be called from any thread.

  // `source`: wait for signals of this rank only, and fail at once when it is lost. Without it the signal may come from
  // anybody, and the wait fails as soon as anybody is lost who was not acknowledged (see acknowledge_lost). Without
  // `at_least`, consumes one: waits for one more than all such waits on this index have consumed. A wait that fails
  // consumes nothing.
  std::uint64_t wait_signal(std::uint32_t index, std::optional<std::uint64_t> at_least,
                            std::optional<std::int64_t> source, const Deadline& deadline,
                            std::chrono::nanoseconds spin);
  // Waits until one of several has reached its count. Returns which.
  std::size_t wait_any(std::span<const Wanted> wanted, std::optional<std::int64_t> source, const Deadline& deadline,
                       std::chrono::nanoseconds spin);
  std::uint64_t signal_value(std::uint32_t index) const;

  // What an aligned word of this rank's own memory holds.
  std::uint64_t atomic_load(std::uint64_t offset, unsigned word_nbytes) const;

  void flush(std::int64_t peer, const Deadline& deadline);
  // All peers that operations were issued to since the last flush; if some fail, the others are still flushed and the first
  // failure is thrown. Of a lost one, what was issued can never be seen to be there: it fails every time. Ranks that were
  // acknowledged as lost do not count.
  void flush_all(const Deadline& deadline);

  // The ranks that are lost now. From here on, waits without `source` and flush_all do not fail because of them.
  std::vector<unsigned> acknowledge_lost();
  std::vector<unsigned> lost() const;

  // Ends access to this rank's memory and lets go of the others', after what is under way: asynchronous operations that are
  // not over at the deadline are cancelled, and DeadlineExceeded is thrown when the rest is closed. A window whose memory
  // does not close (see Memory::close) stays open for another try.
  void close(const Deadline& deadline);
  bool closed() const { return closed_.load(std::memory_order_acquire); }

 private:
  [[noreturn]] void refuse_rank(const char* operation, std::int64_t peer) const;
  Memory& own_memory(const char* operation) const;
  Reached wait(Memory& memory, std::span<const Wanted> wanted, const std::optional<std::int64_t>& source,
               const Deadline& deadline, std::chrono::nanoseconds spin);
  void check_sources(const std::optional<std::int64_t>& source) const;

  const std::string name_;
  const std::shared_ptr<Memory> memory_;
  const std::vector<std::shared_ptr<Target>> targets_;
  const std::optional<unsigned> rank_;
  const std::shared_ptr<Counters> waits_;
  const std::uint32_t made_in_;
  std::atomic<bool> closed_{false};
  std::vector<std::atomic<bool>> acknowledged_;
  std::vector<std::atomic<bool>> unsettled_;  // a flush of this rank failed because it is lost
  std::mutex consumed_mutex_;
  std::map<std::uint32_t, std::uint64_t> consumed_;
};

}  // namespace onesided
