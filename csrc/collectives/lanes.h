// Streams of bytes between the ranks of a window, with credits: what collectives are made of.
//
// The window of each rank begins with the words of Lanes::Head; behind them lies an inbox for every rank. An inbox has `slots` slots, which one
// sender fills in turn. A chunk is one put with a signal: a SlotHead, the bytes, and one more in the sender's counter. Who has
// taken some out gives credit by a signal to the sender's window. So nobody writes what was not read, and there is no barrier.
//
// Counters of a window (its shared signals, then its signals for each origin): kEnds; then, for each origin, chunks; then credits.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/reduce.h"
#include "core/window.h"

namespace onesided {

// One transfer of a step, or a computation that stands between transfers.
struct Move {
  enum class Kind : std::uint8_t {
    Send,     // `from` goes to `rank`
    Receive,  // `into` comes from `rank`
    Reduce,   // into = operand op what comes from `rank`
    Combine,  // into = operand op from; no rank
  };
  Kind kind;
  unsigned rank;
  std::uint64_t nbytes;
  void* into;
  const void* from;
  const void* operand;
  // What `from` is a part of, as in How.
  const Memory* memory = nullptr;
  std::shared_ptr<Allocation> allocation = nullptr;
};

// What a step does and how: `label` is the same number on all ranks that take part, and another one in the next operation.
struct Step {
  const char* operation;
  std::uint64_t label;
  Element element = Element::UInt8;
  Reduction reduction = Reduction::Sum;
  Deadline deadline = Deadline::never();
};

class Lanes {
 public:
  static constexpr std::uint32_t kEnds = 0;           // the shared signal: somebody has ended it
  static constexpr std::uint32_t kSharedSignals = 1;  // what the window must have
  static constexpr std::uint32_t kOriginSignals = 2;

  // Bytes that the window of each rank must have.
  static std::uint64_t window_nbytes(unsigned ranks, std::uint32_t slots, std::uint64_t slot_nbytes);

  // `window` has memory here, zeroed, and the counters above. Used by this only. BoundsError if its size does not fit.
  Lanes(std::shared_ptr<Window> window, std::uint32_t slots, std::uint64_t slot_nbytes);

  // All moves at once; returns when all are over: what was received is there, what was sent may be changed. Moves of one
  // direction with one rank happen in the order given, and so do those next to each other that have the same `into`. Every
  // rank that a move names must make the opposite one of the same size in its own step of the same label.
  //
  // A step that fails is the end of these lanes, here and, being told, at every other rank: ConnectionLost if a rank that is waited
  // for is lost, DeadlineExceeded, OnesidedError if a peer is in another operation or sends another size; the message names it.
  void step(const Step& step, std::span<const Move> moves);

  // Ends them for all ranks: every step under way, and every later one, fails and tells `reason`. Any thread; never waits for long.
  void end(ErrorKind kind, const std::string& reason);
  bool ended() const;

  // The label of the operation that `rank` has begun last, read from its memory without its help.
  std::uint64_t progress_of(unsigned rank, const Deadline& deadline);

  unsigned size() const { return static_cast<unsigned>(lanes_.size()); }
  unsigned rank() const { return rank_; }

 private:
  struct Head;
  struct SlotHead;
  struct Lane {
    std::uint64_t sent = 0, credit = 0;        // chunks; credit counts all that ever could be sent
    std::uint64_t received = 0, returned = 0;  // chunks
  };
  struct Running;

  bool send_some(const Step& step, Running& move);
  bool receive_some(const Step& step, Running& move, std::uint64_t at_most);
  void give_credit(unsigned rank, bool all);
  void wait_for_any(const Step& step, std::span<Running> moves);
  void check_ended(const char* operation);
  Head& head() const;
  char* slot_here(unsigned origin, std::uint64_t chunk) const;
  std::uint64_t slot_offset(unsigned origin, std::uint64_t chunk) const;
  std::uint32_t chunks_signal(unsigned origin) const { return kSharedSignals + origin; }
  std::uint32_t credits_signal(unsigned origin) const { return kSharedSignals + size() + origin; }
  std::uint64_t signal(std::uint32_t index) const;

  const std::shared_ptr<Window> window_;
  const std::uint32_t slots_;
  const std::uint64_t slot_nbytes_;
  const unsigned rank_;
  const std::shared_ptr<Counters> waits_;
  const bool crowded_;  // more ranks share this host than it has processors: spinning would keep them from running
  std::vector<Lane> lanes_;
  std::vector<std::shared_ptr<Work>> works_;  // of the step under way
  mutable std::mutex mutex_;                  // of what follows
  std::optional<Error> end_;
};

}  // namespace onesided
