// Streams of chunks between the ranks of a window, with credits, and their common end: what lanes and messages are made of.
//
// The window of each rank begins with the words of Inboxes::Head; behind them lies an inbox for every rank. An inbox has `slots` slots, which one
// sender fills in turn. A chunk is one put with a signal: a ChunkHead, the bytes, and one more in the sender's counter. Who has
// taken some out gives credit by a signal to the sender's window. So nobody writes what was not read, and there is no barrier.
//
// Counters of a window (its shared signals, then its signals for each origin): kEnds, kWakes; then, for each origin, chunks; then
// credits.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/window.h"

namespace onesided {

// What begins a chunk: two words that say to sender and receiver what it is a part of.
struct ChunkHead {
  std::uint64_t label;
  std::uint64_t nbytes;  // of the whole transfer
};

class Inboxes {
 public:
  static constexpr std::uint32_t kEnds = 0;           // the shared signal: somebody has ended them
  static constexpr std::uint32_t kWakes = 1;          // another one, from this rank to itself
  static constexpr std::uint32_t kSharedSignals = 2;  // what the window must have
  static constexpr std::uint32_t kOriginSignals = 2;

  // Bytes that the window of each rank must have.
  static std::uint64_t window_nbytes(unsigned ranks, std::uint32_t slots, std::uint64_t slot_nbytes);

  // `window` has memory here, zeroed, and the counters above. Used by this only. BoundsError if its size does not fit.
  Inboxes(std::shared_ptr<Window> window, std::uint32_t slots, std::uint64_t slot_nbytes);

  unsigned size() const { return static_cast<unsigned>(streams_.size()); }
  unsigned rank() const { return rank_; }
  std::uint64_t slot_nbytes() const { return slot_nbytes_; }

  // ---- Chunks. One thread at a time. ----

  // Whether there is room at `rank` for one chunk more.
  bool may_send(unsigned rank);
  // Sends it: `nbytes` of `from`, at most slot_nbytes(). Null, or what must be waited for before `from` may change; a `how` of
  // how.async is taken as a wish.
  std::shared_ptr<Work> send(const char* operation, unsigned rank, const ChunkHead& head, const void* from,
                             std::uint64_t nbytes, How how);
  // Whether a chunk of `rank` is there to be taken; its head; its bytes, if they are `nbytes`.
  bool arrived(unsigned rank) const;
  ChunkHead head(unsigned rank) const;
  const char* payload(unsigned rank, std::uint64_t nbytes) const;
  // Gives its place back.
  void take(unsigned rank);

  // What to wait for until may_send() or arrived().
  Wanted room(unsigned rank) const;
  Wanted arrival(unsigned rank) const;
  Wanted wake() const { return {kWakes, wakes_seen_ + 1}; }

  // Returns when something of `wanted` has come, or somebody has ended these inboxes. `watch` is called when peers were lost and at the
  // start: it throws to end the wait.
  void wait(std::span<const Wanted> wanted, const Deadline& deadline, const std::function<void()>& watch);
  // Has a wait() for wake() return, now or the next time. Any thread.
  void wake_up();
  void woken() { wakes_seen_ = signal(kWakes); }

  // ---- Any thread ----

  bool lost(unsigned rank) const { return window_->target("wait", rank).peer().lost(); }
  [[noreturn]] void fail_lost(const char* operation, unsigned rank) const;

  // Ends them for all ranks: check_ended() throws from then on, and tells `reason`. Never waits for long.
  void end(ErrorKind kind, const std::string& reason);
  bool ended() const;
  void check_ended(const char* operation);
  // Of an operation that failed with `error`: throws as check_ended() does if the end was told before, or, where a peer has gone, is told
  // within a moment: it may have gone because of that.
  void check_ended_after(const Error& error, const char* operation);

  // A word that this rank tells, and that of another, read without its help.
  void tell(std::uint64_t word);
  std::uint64_t told_by(unsigned rank, const Deadline& deadline);

 private:
  struct Head;
  struct Stream {
    std::uint64_t sent = 0, credit = 0;        // chunks; credit counts all that ever could be sent
    std::uint64_t received = 0, returned = 0;  // chunks
  };

  Head& head_here() const;
  std::uint64_t slot_offset(unsigned origin, std::uint64_t chunk) const;
  const char* slot_here(unsigned origin, std::uint64_t chunk) const;
  std::uint32_t chunks_signal(unsigned origin) const { return kSharedSignals + origin; }
  std::uint32_t credits_signal(unsigned origin) const { return kSharedSignals + size() + origin; }
  std::uint64_t signal(std::uint32_t index) const;

  const std::shared_ptr<Window> window_;
  const std::uint32_t slots_;
  const std::uint64_t slot_nbytes_;
  const unsigned rank_;
  const std::shared_ptr<Counters> waits_;
  const bool crowded_;  // more ranks share this host than it has processors: spinning would keep them from running
  std::vector<Stream> streams_;
  std::uint64_t wakes_seen_ = 0;
  mutable std::mutex mutex_;  // of what follows
  std::optional<Error> end_;
};

}  // namespace onesided
