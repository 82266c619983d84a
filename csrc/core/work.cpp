#include "core/work.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <thread>

#include "core/process.h"

namespace onesided {
namespace {

// The threads that run strands: as many as can copy at full speed side by side on an ordinary machine, so never more
// than two. Idle they sleep.
class Pool {
 public:
  static Pool& instance() {
    static std::atomic<Pool*> pool{nullptr};
    Pool* present = pool.load();
    if (present == nullptr || present->made_in_ != fork_generation()) {
      auto* made = new Pool;  // never destroyed: its threads may outlive static destructors
      if (pool.compare_exchange_strong(present, made)) {
        for (unsigned i = 0; i < kThreads; ++i) std::thread([made] { made->run(); }).detach();
        return *made;
      }
      delete made;
    }
    return *present;
  }

  void post(std::shared_ptr<Strand> strand) {
    {
      std::lock_guard lock(mutex_);
      ready_.push_back(std::move(strand));
    }
    posted_.notify_one();
  }

 private:
  static constexpr unsigned kThreads = 2;

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

  const std::uint32_t made_in_ = fork_generation();
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
  static const auto* const work = [] {
    auto* made = new std::shared_ptr<Work>(std::make_shared<Work>(nullptr));
    (*made)->state_.store(Succeeded);
    return made;
  }();
  return *work;
}

void Work::finish(std::optional<Error> error) {
  const State outcome = error ? Failed : Succeeded;
  error_ = std::move(error);
  state_.store(outcome, std::memory_order_seq_cst);
  finished_.notify();
}

void Work::wait(const Deadline& deadline) {
  if (!done()) {
    check_not_forked(strand_->made_in_, "this operation");
    if (!finished_.await([this] { return done(); }, deadline)) strand_->cancel(shared_from_this());
  }
  observed_.store(true);
  if (state_.load(std::memory_order_acquire) == Failed) throw *error_;
}

std::optional<Error> Work::error() {
  if (state_.load(std::memory_order_acquire) != Failed) return std::nullopt;
  observed_.store(true);
  return error_;
}

// ---- Strand -------------------------------------------------------------------------------------------------------

std::shared_ptr<Work> Strand::submit(Work::Body body, const Deadline& deadline) {
  check_not_forked(made_in_, "this window");
  auto work = std::make_shared<Work>(shared_from_this());
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
  queue_.push_back(work);
  unsettled_.fetch_add(1);
  if (!scheduled_) {
    scheduled_ = true;
    lock.unlock();
    Pool::instance().post(shared_from_this());
  }
  return work;
}

bool Strand::run_one() {
  std::shared_ptr<Work> work;
  {
    std::lock_guard lock(mutex_);
    if (queue_.empty()) {
      scheduled_ = false;
      return false;
    }
    work = running_ = queue_.front();
    queue_.pop_front();
    work->state_.store(Work::Running);
  }
  changed_.notify();

  struct Cancellable final : Checkpoint {
    Work& work;
    explicit Cancellable(Work& running) : work(running) {}
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
  const Work::Body body = std::move(work->body_);  // destroyed last: it may own the object that owns this strand
  work->finish(std::move(error));
  bool more;
  {
    std::lock_guard lock(mutex_);
    running_ = nullptr;
    settle(work);
    more = scheduled_ = !queue_.empty();
  }
  changed_.notify();
  return more;
}

// With mutex_ held: `work` has finished.
void Strand::settle(const std::shared_ptr<Work>& work) {
  failures_ += work->error_.has_value();
  if (work->error_ && failed_.size() < kMostQueued) {
    failed_.push_back(work);
  } else {
    unsettled_.fetch_sub(1);
  }
}

// With mutex_ held: all but the oldest `but`.
void Strand::forget_failures(std::size_t but) {
  while (failed_.size() > but) {
    failed_.pop_back();
    unsettled_.fetch_sub(1);
  }
}

std::uint64_t Strand::failures_told() {
  std::lock_guard lock(mutex_);
  return failures_ - static_cast<std::uint64_t>(std::count_if(
                         failed_.begin(), failed_.end(), [](const auto& work) { return !work->observed_.load(); }));
}

bool Strand::failed_beyond(std::uint64_t told) {
  std::lock_guard lock(mutex_);
  return failures_ > told;
}

void Strand::cancel(const std::shared_ptr<Work>& work) {
  std::unique_lock lock(mutex_);
  if (work->done()) return;
  if (running_ == work) {
    work->cancelled_.store(true);
    end_queued(lock, queue_.begin());
  } else {
    end_queued(lock, std::find(queue_.begin(), queue_.end(), work));
  }
  // Not to be interrupted: until it has ended, the source may still be read. It ends within one piece.
  InterruptScope undisturbed(nullptr);
  work->finished_.await([&] { return work->done(); }, Deadline::never());
}

// Fails the queued operations from `first` on and lets go of the lock.
void Strand::end_queued(std::unique_lock<std::mutex>& lock, Queue::iterator first) {
  const Queue ended(first, queue_.end());
  queue_.erase(first, queue_.end());
  for (const auto& work : ended) {
    work->finish(cancelled_error());
    settle(work);
  }
  lock.unlock();
  changed_.notify();
  for (const auto& work : ended) work->body_ = nullptr;
}

bool Strand::empty() {
  std::lock_guard lock(mutex_);
  return queue_.empty() && running_ == nullptr;
}

// Ends everything that is queued or running, and returns when it has ended.
void Strand::cancel_all() {
  std::unique_lock lock(mutex_);
  if (running_ != nullptr) running_->cancelled_.store(true);
  end_queued(lock, queue_.begin());
  InterruptScope undisturbed(nullptr);
  changed_.await([this] { return empty(); }, Deadline::never());
}

void Strand::drain(const Deadline& deadline) {
  check_not_forked(made_in_, "this window");
  if (idle()) return;
  if (!changed_.await([this] { return empty(); }, deadline)) {
    std::unique_lock lock(mutex_);
    const std::size_t before = failed_.size();  // what fails from here on is told by the error below
    lock.unlock();
    cancel_all();
    lock.lock();
    forget_failures(before);
    fail(ErrorKind::DeadlineExceeded,
         "the deadline passed before all earlier operations were complete; the rest are cancelled");
  }
  std::unique_lock lock(mutex_);
  const Queue failed = failed_;
  forget_failures(0);
  lock.unlock();
  for (const auto& work : failed) {
    if (!work->observed_.exchange(true)) throw *work->error_;
  }
}

void Strand::close(const Deadline& deadline) {
  std::exception_ptr interrupted;
  try {
    drain(deadline);
  } catch (const Error&) {
    // Each Work carries its own error.
  } catch (...) {
    interrupted = std::current_exception();
    cancel_all();
  }
  if (made_in_ == fork_generation()) {
    std::lock_guard lock(mutex_);
    forget_failures(0);
  }
  if (interrupted != nullptr) std::rethrow_exception(interrupted);
}

}  // namespace onesided
