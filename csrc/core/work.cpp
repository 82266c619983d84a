#include "core/work.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <iterator>

#include "core/background.h"
#include "core/process.h"

namespace onesided {
namespace {

// The threads that run strands: as many as can copy at full speed side by side on an ordinary machine, so never more
// than two. Idle they sleep.
class Pool {
 public:
  static constexpr unsigned kThreads = 2;

  void post(std::shared_ptr<Strand> strand) {
    {
      std::lock_guard lock(mutex_);
      ready_.push_back(std::move(strand));
    }
    posted_.notify_one();
  }

  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      posted_.wait(lock, [this] { return !ready_.empty(); });
      std::shared_ptr<Strand> strand = std::move(ready_.front());
      ready_.pop_front();
      lock.unlock();
      // Behind the others after each operation, so that a long queue to one peer does not hold up the rest.
      if (strand->run_one()) post(std::move(strand));
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<std::shared_ptr<Strand>> ready_;
};

Error cancelled_error() {
  return Error(ErrorKind::DeadlineExceeded, "the operation was cancelled at its deadline");
}

}  // namespace

// ---- Work ---------------------------------------------------------------------------------------------------------

const std::shared_ptr<Work>& Work::completed() {
  struct Completed final : Work {
    bool done() override { return true; }
    void wait(const Deadline&) override {}
    std::optional<Error> error() override { return std::nullopt; }
  };
  static const auto* const work = new std::shared_ptr<Work>(std::make_shared<Completed>());
  return *work;
}

void StrandWork::finish(std::optional<Error> error) {
  const State outcome = error ? Failed : Succeeded;
  error_ = std::move(error);
  state_.store(outcome, std::memory_order_seq_cst);
  finished_.notify();
}

void StrandWork::wait(const Deadline& deadline) {
  if (!done()) {
    check_not_forked(strand_->made_in_, "this operation");
    if (!finished_.await([this] { return done(); }, deadline)) strand_->cancel(shared_from_this());
  }
  observed_.store(true);
  if (state_.load(std::memory_order_acquire) == Failed) throw *error_;
}

std::optional<Error> StrandWork::error() {
  if (state_.load(std::memory_order_acquire) != Failed) return std::nullopt;
  observed_.store(true);
  return error_;
}

// ---- Strand -------------------------------------------------------------------------------------------------------

std::shared_ptr<StrandWork> Strand::submit(StrandWork::Body body, const Deadline& deadline) {
  check_not_forked(made_in_, "this window");
  Pool& pool = background<Pool>();  // first, as it may fail
  auto work = std::make_shared<StrandWork>(shared_from_this());
  work->body_ = std::move(body);
  std::unique_lock lock(mutex_);
  while (queue_.size() >= kMostQueued) {
    lock.unlock();
    const bool room = changed_.await(
        [this] {
          std::lock_guard look(mutex_);
          return queue_.size() < kMostQueued;
        },
        deadline);
    if (!room) {
      fail(ErrorKind::DeadlineExceeded, "no room for another operation: ", kMostQueued, " are queued for this peer");
    }
    lock.lock();
  }
  if (closing_) fail(ErrorKind::StaleHandle, "this window is closed");
  work->number_ = issued_.fetch_add(1) + 1;
  queue_.push_back(work);
  unsettled_.fetch_add(1);
  if (!scheduled_) {
    scheduled_ = true;
    lock.unlock();
    pool.post(shared_from_this());
  }
  return work;
}

bool Strand::run_one() {
  std::shared_ptr<StrandWork> work;
  {
    std::lock_guard lock(mutex_);
    if (queue_.empty()) {
      scheduled_ = false;
      return false;
    }
    work = running_ = queue_.front();
    queue_.pop_front();
    work->state_.store(StrandWork::Running);
  }
  changed_.notify();

  struct Cancellable final : Checkpoint {
    StrandWork& work;
    explicit Cancellable(StrandWork& running) : work(running) {}
    void pass() override {
      if (work.cancelled_.load(std::memory_order_relaxed)) throw cancelled_error();
    }
  } checkpoint(*work);
  std::optional<Error> error;
  try {
    work->body_(checkpoint);
  } catch (const Error& raised) {
    error = raised;
  } catch (const std::exception& raised) {
    error = Error(ErrorKind::Onesided, raised.what());
  }
  const StrandWork::Body body = std::move(work->body_);  // destroyed last: it may own the object that owns this strand
  bool more;
  {
    std::lock_guard lock(mutex_);
    running_ = nullptr;
    settle(work, std::move(error));
    more = scheduled_ = !queue_.empty();
  }
  changed_.notify();
  return more;
}

// With mutex_ held, so that who is told the outcome and then asks this strand finds it counted.
void Strand::settle(const std::shared_ptr<StrandWork>& work, std::optional<Error> error) {
  failures_ += error.has_value();
  const bool failed = error.has_value(), remember = failed && failed_.size() < kMostQueued;
  work->finish(std::move(error));
  if (remember) {
    failed_.push_back(work);
  } else if (!failed || uncounted_++ != 0) {
    unsettled_.fetch_sub(1);
  }
}

// With mutex_ held.
template <class Which>
void Strand::forget_failures(Which&& which) {
  unsettled_.fetch_sub(std::erase_if(failed_, which));
}

// With mutex_ held. Whether there were failures beyond those that are remembered; there are none from here on.
bool Strand::forget_uncounted() {
  if (uncounted_ == 0) return false;
  uncounted_ = 0;
  unsettled_.fetch_sub(1);
  return true;
}

std::uint64_t Strand::failures_told() {
  std::lock_guard lock(mutex_);
  return failures_ - uncounted_ -
         static_cast<std::uint64_t>(
             std::count_if(failed_.begin(), failed_.end(), [](const auto& work) { return !work->observed_.load(); }));
}

std::optional<std::string> Strand::failed_beyond(std::uint64_t told) {
  std::lock_guard lock(mutex_);
  if (failures_ <= told) return std::nullopt;
  std::string first;
  for (const auto& work : failed_) {
    if (!work->observed_.exchange(true) && first.empty()) first = text(": ", work->error_->what());
  }
  forget_uncounted();
  return first;
}

void Strand::cancel(const std::shared_ptr<StrandWork>& work) {
  std::unique_lock lock(mutex_);
  if (work->done()) return;
  if (running_ == work) {
    work->cancelled_.store(true);
    end_queued(lock, queue_.begin(), queue_.end());
  } else {
    end_queued(lock, std::find(queue_.begin(), queue_.end(), work), queue_.end());
  }
  // Not to be interrupted: until it has ended, the source may still be read. It ends within one piece.
  InterruptScope undisturbed(nullptr);
  work->finished_.await([&] { return work->done(); }, Deadline::never());
}

// Fails the queued operations from `first` to before `last` and lets go of the lock.
void Strand::end_queued(std::unique_lock<std::mutex>& lock, Queue::iterator first, Queue::iterator last) {
  const Queue ended(first, last);
  queue_.erase(first, last);
  for (const auto& work : ended) settle(work, cancelled_error());
  lock.unlock();
  changed_.notify();
  for (const auto& work : ended) work->body_ = nullptr;
}

// Whether all operations up to number `last` are over: they begin and end in the order of their numbers.
bool Strand::over(std::uint64_t last) {
  std::lock_guard lock(mutex_);
  return (running_ == nullptr || running_->number_ > last) && (queue_.empty() || queue_.front()->number_ > last);
}

// Ends what is queued or running up to number `last`, and returns when it has ended.
void Strand::cancel_up_to(std::uint64_t last) {
  std::unique_lock lock(mutex_);
  if (running_ != nullptr && running_->number_ <= last) running_->cancelled_.store(true);
  const auto end = std::find_if(queue_.begin(), queue_.end(), [&](const auto& work) { return work->number_ > last; });
  end_queued(lock, queue_.begin(), end);
  InterruptScope undisturbed(nullptr);
  changed_.await([&] { return over(last); }, Deadline::never());
}

void Strand::drain(const Deadline& deadline) {
  check_not_forked(made_in_, "this window");
  if (idle()) return;
  const std::uint64_t last = issued_.load();
  if (!changed_.await([&] { return over(last); }, deadline)) {
    cancel_up_to(last);
    // Who only tries again does not hear of what was cancelled: the next time that is told.
    fail(ErrorKind::DeadlineExceeded,
         "the deadline passed before all earlier operations were complete; the rest are cancelled");
  }
  Queue failed;
  bool others;
  {
    const auto earlier = [&](const auto& work) { return work->number_ <= last; };
    std::lock_guard lock(mutex_);
    std::copy_if(failed_.begin(), failed_.end(), std::back_inserter(failed), earlier);
    forget_failures(earlier);
    others = forget_uncounted();
  }
  for (const auto& work : failed) {
    if (work->observed_.exchange(true)) continue;
    if (work->error_->kind() != ErrorKind::DeadlineExceeded) throw *work->error_;
    fail(ErrorKind::ConnectionLost, "an earlier operation was lost: ", work->error_->what());
  }
  if (others)
    fail(ErrorKind::ConnectionLost, "more than ", kMostQueued, " earlier operations failed, one after the other");
}

bool Strand::close(const Deadline& deadline) {
  if (made_in_ != fork_generation()) return true;
  constexpr std::uint64_t everything = UINT64_MAX;
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  bool in_time = false;
  std::exception_ptr interrupted;
  try {
    in_time = changed_.await([&] { return over(everything); }, deadline);
  } catch (...) {
    interrupted = std::current_exception();
  }
  if (!in_time) cancel_up_to(everything);
  {
    std::lock_guard lock(mutex_);
    forget_failures([](const auto&) { return true; });
    forget_uncounted();
  }
  if (interrupted != nullptr) std::rethrow_exception(interrupted);
  return in_time;
}

}  // namespace onesided
