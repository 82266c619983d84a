// Steps in which ranks move bytes to each other, and reduce them: what collectives are made of.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collectives/inboxes.h"
#include "collectives/reduce.h"

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
  // Over inboxes that nobody else uses.
  explicit Lanes(std::shared_ptr<Inboxes> inboxes) : inboxes_(std::move(inboxes)) {}

  // All moves at once; returns when all are over: what was received is there, what was sent may be changed. Moves of one
  // direction with one rank happen in the order given, and so do those next to each other that have the same `into`. Every
  // rank that a move names must make the opposite one of the same size in its own step of the same label.
  //
  // A step that fails is the end of these lanes, here and, being told, at every other rank: ConnectionLost if a rank that is waited
  // for is lost, DeadlineExceeded, OnesidedError if a peer is in another operation or sends another size; the message names it.
  void step(const Step& step, std::span<const Move> moves);

  // Ends them for all ranks: every step under way, and every later one, fails and tells `reason`. Any thread; never waits for long.
  void end(ErrorKind kind, const std::string& reason) { inboxes_->end(kind, reason); }
  bool ended() const { return inboxes_->ended(); }

  // The label of the operation that `rank` has begun last, read from its memory without its help.
  std::uint64_t progress_of(unsigned rank, const Deadline& deadline) { return inboxes_->told_by(rank, deadline); }

 private:
  struct Running;

  bool send_some(const Step& step, Running& move);
  bool receive_some(const Step& step, Running& move, std::uint64_t at_most);
  void wait_for_any(const Step& step, std::span<Running> moves);

  const std::shared_ptr<Inboxes> inboxes_;
  std::vector<std::shared_ptr<Work>> works_;  // of the step under way
};

}  // namespace onesided
