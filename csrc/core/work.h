// Operations that run beside the caller, and the order they keep.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "core/copy.h"
#include "core/deadline.h"
#include "core/error.h"
#include "core/event.h"
#include "core/process.h"

namespace onesided {

// One operation. Done means complete at both ends: the source may be reused, and the bytes are visible to the target.
class Work {
 public:
  virtual ~Work() = default;

  // What an operation that was over when it returned hands out; always the same object.
  static const std::shared_ptr<Work>& completed();

  virtual bool done() = 0;
  // Returns when the operation succeeded; throws its error if it failed. A deadline is a fence: when it passes, the
  // operation is cancelled, with all that were queued behind it for the same peer (they may depend on it), and this
  // throws DeadlineExceeded only when the source will not be read again. If the operation succeeded in the last moment,
  // it returns. An interrupt (Ctrl-C) ends the wait, not the operation.
  virtual void wait(const Deadline& deadline) = 0;
  // The error of a failed operation; nothing if it succeeded or is still under way.
  virtual std::optional<Error> error() = 0;
};

class Strand;

// An operation that a thread of the pool runs.
class StrandWork final : public Work, public std::enable_shared_from_this<StrandWork> {
 public:
  // It owns whatever it captured (the source, the connection) until the operation is over. It calls Checkpoint::pass
  // between pieces.
  using Body = std::function<void(Checkpoint&)>;

  explicit StrandWork(std::shared_ptr<Strand> strand) : strand_(std::move(strand)) {}

  bool done() override { return state_.load(std::memory_order_seq_cst) >= Succeeded; }
  void wait(const Deadline& deadline) override;
  std::optional<Error> error() override;

 private:
  friend class Strand;
  enum State : unsigned { Queued, Running, Succeeded, Failed };

  void finish(std::optional<Error> error);

  std::uint64_t number_ = 0;  // its place in the order of its strand, from 1
  std::atomic<unsigned> state_{Queued};
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> observed_{false};  // somebody has been told the outcome
  std::optional<Error> error_;         // written before state_ becomes Failed
  Event finished_;
  Body body_;
  const std::shared_ptr<Strand> strand_;
};

// The operations towards one peer's memory that were issued asynchronously: they run one after the other in issue order,
// on a small pool of threads, so that a signal never overtakes the put before it.
class Strand : public std::enable_shared_from_this<Strand> {
 public:
  // So many operations wait in one strand; who issues more is held back until some are done.
  static constexpr std::size_t kMostQueued = 4096;

  // Queues `body`. Waits for room until the deadline. StaleHandle once close() has begun.
  std::shared_ptr<StrandWork> submit(StrandWork::Body body, const Deadline& deadline);

  // Waits until everything issued before is over; what is issued meanwhile is left alone. Throws the first failure that
  // nobody has been told of. When the deadline passes, cancels what is left and throws DeadlineExceeded.
  void drain(const Deadline& deadline);

  // For an operation that must not run if one before it failed. Asked when it is issued: how many failures somebody has
  // been told of. Asked when it runs, with that number: nothing, or that there were others and, if nobody was told of it since, what
  // the first of them was (": " and its error). All of them are told thereby.
  std::uint64_t failures_told();
  std::optional<std::string> failed_beyond(std::uint64_t told);

  // Waits for all operations until the deadline, then cancels; leaves none behind. False if it had to cancel. Throws only
  // what an interrupt throws, and then has cancelled too. Failures are not told: each Work carries its own.
  bool close(const Deadline& deadline);

  // Cheap: true if drain() has nothing to do.
  bool idle() const { return unsettled_.load(std::memory_order_acquire) == 0; }

  // Ends `work`, if it has not ended, and all that was queued after it. Returns when nothing of them runs any more.
  void cancel(const std::shared_ptr<StrandWork>& work);

  // One turn on a pool thread: runs the first operation; returns true if there are more.
  bool run_one();

 private:
  friend class StrandWork;
  using Queue = std::deque<std::shared_ptr<StrandWork>>;
  void settle(const std::shared_ptr<StrandWork>& work, std::optional<Error> error);
  void end_queued(std::unique_lock<std::mutex>& lock, Queue::iterator first, Queue::iterator last);
  template <class Which>
  void forget_failures(Which&& which);
  bool forget_uncounted();
  bool over(std::uint64_t last);
  void cancel_up_to(std::uint64_t last);

  const std::uint32_t made_in_ = fork_generation();
  std::mutex mutex_;
  Queue queue_;
  std::shared_ptr<StrandWork> running_;
  std::atomic<std::uint64_t> issued_{0};  // the number of the newest operation
  bool closing_ = false;
  bool scheduled_ = false;                 // a pool thread has this strand, or will
  Queue failed_;                           // since the last drain, oldest first, kMostQueued at most
  std::uint64_t uncounted_ = 0;            // failures beyond these; while there are some, one of unsettled_ is for them
  std::uint64_t failures_ = 0;             // ever
  std::atomic<std::size_t> unsettled_{0};  // operations not over, plus those in failed_
  Event changed_;
};

}  // namespace onesided
