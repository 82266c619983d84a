#include "verbs/target.h"

#if ONESIDED_HAS_VERBS
#include <algorithm>
#include <cerrno>
#include <cstring>

namespace onesided::verbs {
namespace {

// From here on an operation is spread over all lanes: below, starting a second device costs more than it brings.
constexpr std::uint64_t kStriped = 128 << 10;
constexpr std::uint64_t kStripeUnit = 4096;
// After so many of many pieces a deadline and Ctrl-C are looked at.
constexpr std::size_t kBreath = 256;

// Numbers of work requests have 40 bits: a year of a million a second.
constexpr unsigned kNumberBits = 40;
constexpr std::uint64_t kNumberMask = (std::uint64_t{1} << kNumberBits) - 1;

std::uint64_t tagged(const Channel& channel, std::uint64_t number) {
  return std::uint64_t{channel.generation()} << kNumberBits | (number & kNumberMask);
}

// The number if it is of this generation, else 0.
std::uint64_t number_in(const Channel& channel, const std::atomic<std::uint64_t>& last) {
  const std::uint64_t number = last.load(std::memory_order_seq_cst);
  return number >> kNumberBits == channel.generation() ? number & kNumberMask : 0;
}

// A thread may come late with a number of a generation that is over: the larger generation wins.
[[gnu::always_inline]] inline void raise_to(std::atomic<std::uint64_t>& last, std::uint64_t number) {
  std::uint64_t before = last.load(std::memory_order_relaxed);
  while (before < number && !last.compare_exchange_weak(before, number, std::memory_order_seq_cst)) continue;
}

void check_deadline(const char* operation, const std::string& peer, const Deadline& deadline) {
  if (deadline.passed()) fail_late(operation, peer);
}

}  // namespace

class RdmaTarget::RdmaWork final : public Work {
 public:
  RdmaWork(std::shared_ptr<RdmaTarget> target, Channel& channel, const char* operation, const Ticket& first,
           const Ticket& last, const Deadline& deadline)
      : target_(std::move(target)),
        channel_(channel),
        operation_(operation),
        first_(first),
        last_(last),
        deadline_(deadline) {
    std::lock_guard lock(target_->works_mutex_);
    next_ = std::exchange(target_->works_, this);
    if (next_ != nullptr) next_->at_ = &next_;
    at_ = &target_->works_;
    if (channel.ended()) {  // since it was posted: somebody may have looked for what was lost before this was here
      target_->owing_.store(true);
      target_->unflushed_.store(true);
    }
  }
  ~RdmaWork() override {
    if (target_->made_in_ != fork_generation()) return;
    {
      std::lock_guard lock(target_->works_mutex_);
      if (next_ != nullptr) next_->at_ = at_;
      *at_ = next_;
    }
    if (told_.load() || channel_.complete(last_)) return;
    // Nobody can ask any more.
    for (std::size_t lane = 0; lane < channel_.lanes(); ++lane) {
      if (last_[lane] != 0) target_->track_silent(channel_, lane, last_[lane]);
    }
  }

  bool done() override {
    if (over()) return true;
    channel_.poll();
    channel_.end_if_failed();
    if (!over() && deadline_.passed()) cancel();
    return over();
  }

  void wait(const Deadline& deadline) override {
    const Deadline until = deadline.sooner(deadline_);
    if (!over() && !channel_.await(last_, until)) cancel();
    if (channel_.complete(last_)) return;
    throw cause();
  }

  std::optional<Error> error() override {
    if (!done() || channel_.complete(last_)) return std::nullopt;
    return cause();
  }

  // With works_mutex_. True if it was lost and nobody was told; from here on somebody is.
  bool tell() { return channel_.ended() && !channel_.complete(last_) && !told_.exchange(true); }
  RdmaWork* next() const { return next_; }
  const Channel& channel() const { return channel_; }
  const Ticket& last() const { return last_; }

 private:
  bool over() const { return channel_.complete(last_) || channel_.ended(); }
  void cancel() {
    channel_.end(ErrorKind::DeadlineExceeded,
                 "the deadline passed, and all that was under way to this peer was cancelled; no source is read, and "
                 "no destination written, again");
  }
  Error cause() {
    told_.store(true);
    return target_->explain(channel_, operation_, first_, last_);
  }

  const std::shared_ptr<RdmaTarget> target_;
  Channel& channel_;  // the target's connection keeps it
  const char* const operation_;
  const Ticket first_, last_;
  const Deadline deadline_;
  std::atomic<bool> told_{false};
  // The works of a target that somebody may still ask; `at_` is where the pointer to this one is. With works_mutex_.
  RdmaWork* next_ = nullptr;
  RdmaWork** at_ = nullptr;
};

// Counts an operation as under way, so that the owner of the memory is not told that all is quiet.
class RdmaTarget::UnderWay {
 public:
  [[gnu::always_inline]] UnderWay(RdmaTarget& target, const char* operation, const Deadline& deadline,
                                  bool revoked_too = false)
      : target_(target) {
    target.under_way_.fetch_add(1, std::memory_order_seq_cst);
    if (target.barred_.load(std::memory_order_seq_cst) != kFree || target.closed_.load(std::memory_order_relaxed) ||
        target.peer().lost()) [[unlikely]] {
      look(operation, deadline, revoked_too);
    }
  }
  ~UnderWay() { end(); }
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;

 private:
  void look(const char* operation, const Deadline& deadline, bool revoked_too) {
    try {
      for (;;) {
        if (target_.closed_.load()) fail(ErrorKind::StaleHandle, operation, ": this window is closed");
        if (target_.revoked() && !revoked_too) target_.fail_revoked(operation);
        if (target_.peer().lost()) target_.peer().fail_lost(operation);
        if (target_.barred_.load() <= kRevoked) return;
        end();
        struct Again {
          RdmaTarget& target;
          ~Again() { target.under_way_.fetch_add(1, std::memory_order_seq_cst); }
        } again{target_};
        target_.renew(operation, deadline);
      }
    } catch (...) {
      end();
      throw;
    }
  }
  void end() { target_.under_way_.fetch_sub(1, std::memory_order_seq_cst); }

  RdmaTarget& target_;
};

// The caller's buffer, with keys for it: those of a memory of this transport, those of an object that are kept while it
// lives, or new ones for this operation only.
class RdmaTarget::Local {
 public:
  Local(Hub& hub, const void* data, std::uint64_t nbytes, const How& how, bool written) {
    if (const auto* memory = dynamic_cast<const RdmaMemory*>(how.memory);
        memory != nullptr && memory->hub() == &hub && (!written || permits(memory->access(), Access::Write))) {
      hold_ = memory->registration();
      if (hold_ != nullptr && hold_->contains(data, nbytes)) return;
    }
    if (how.allocation != nullptr) {
      try {
        hold_ = hub.registration_of(how.allocation);
        if (hold_->contains(data, nbytes)) return;
      } catch (const Error&) {
        // The whole of it cannot be registered: read-only, or more than is allowed. What is needed perhaps can.
      }
    }
    HostMemory memory(const_cast<void*>(data));
    hold_ = std::make_shared<Registration>(hub.devices(), memory, reinterpret_cast<std::uint64_t>(data), nbytes,
                                           written ? kDestination : kSourceOnly);
    hub.counters()->add(Count::Registrations);
  }

  std::uint32_t key(std::size_t rail, const char* data) const { return hold_->lkey(rail, offset(data)); }
  std::uint64_t to_end_of_piece(const char* data) const {
    return hold_->piece_nbytes() - offset(data) % hold_->piece_nbytes();
  }
  const std::shared_ptr<Registration>& hold() const { return hold_; }

 private:
  std::uint64_t offset(const char* data) const { return reinterpret_cast<std::uint64_t>(data) - hold_->address(); }
  std::shared_ptr<Registration> hold_;
};

RdmaTarget::RdmaTarget(std::shared_ptr<RdmaConnection> connection, const RemoteMemory& remote, Reach reach,
                       std::uint64_t offset, std::uint64_t nbytes, Access access)
    : connection_(std::move(connection)),
      made_in_(fork_generation()),
      memory_id_(remote.memory_id),
      key_(remote.key),
      reach_(std::move(reach)),
      signals_(reach_.signals),
      offset_(offset),
      nbytes_(nbytes),
      access_(access),
      one_piece_(reach_.piece_nbytes >= reach_.nbytes) {}

RdmaTarget::~RdmaTarget() {
  if (made_in_ != fork_generation()) return;
  InterruptScope undisturbed(nullptr);
  try {
    close(Deadline::after(5));
  } catch (const Error&) {
    // It is closed all the same.
  }
}

// Asks for the keys again that the owner has changed. What began before it did so ends with the old ones first.
void RdmaTarget::renew(const char* operation, const Deadline& deadline) {
  BlockingHook::before_waiting();
  const Turn::Hold turn(renewing_, operation, deadline);
  std::uint64_t renewal = barred_.load();
  if (renewal <= kRevoked) return;
  Event never;
  while (under_way_.load() != 0) {  // looked at every millisecond: operations of other threads end without telling
    if (deadline.passed()) {
      fail(ErrorKind::DeadlineExceeded, operation, " to ", peer().name(), ": earlier operations are not over");
    }
    never.await([this] { return under_way_.load() == 0; }, deadline.at_most(std::chrono::milliseconds(1)));
  }
  Reach reach = connection_->ask_reach(memory_id_, key_, deadline);
  if (reach.nbytes != reach_.nbytes || reach.address != reach_.address || reach.piece_nbytes != reach_.piece_nbytes ||
      reach.signals != signals_) {
    fail(ErrorKind::ConnectionLost, operation, ": ", peer().name(), " described its memory wrongly");
  }
  reach_ = std::move(reach);
  barred_.compare_exchange_strong(renewal, kFree);  // unless they have been changed again, or it was closed
}

[[gnu::always_inline]] inline void RdmaTarget::check(const char* operation, Access wanted, std::uint64_t offset,
                                                     std::uint64_t nbytes) const {
  if (made_in_ != fork_generation() || offset > nbytes_ || nbytes > nbytes_ - offset || !permits(access_, wanted))
      [[unlikely]] {
    refuse(operation, wanted, offset, nbytes);
  }
}

void RdmaTarget::fail_revoked(const char* operation) const {
  fail(ErrorKind::StaleHandle, operation, ": the memory of ", peer().name(),
       " was closed, or the access to it revoked");
}

void RdmaTarget::refuse(const char* operation, Access wanted, std::uint64_t offset, std::uint64_t nbytes) const {
  check_not_forked(made_in_, "this window");
  check_bounds(operation, peer().name(), offset, nbytes, nbytes_);
  if (!permits(access_, wanted)) {
    fail(ErrorKind::RemoteAccess, operation, ": the memory of ", peer().name(), " permits '", name_of(access_),
         "' only");
  }
}

// An asynchronous operation that could not even begin, because of something at the peer.
class RdmaTarget::FailedWork final : public Work {
 public:
  explicit FailedWork(Error error) : error_(std::move(error)) {}

  bool done() override { return true; }
  void wait(const Deadline&) override {
    told.store(true);
    throw error_;
  }
  std::optional<Error> error() override {
    told.store(true);
    return error_;
  }
  const Error& cause() const { return error_; }

  std::atomic<bool> told{false};

 private:
  const Error error_;
};

// The caller could not know: its Work tells, or the next flush if nobody asks.
std::shared_ptr<Work> RdmaTarget::fail_later(const Error& error) {
  auto work = std::make_shared<FailedWork>(error);
  std::lock_guard lock(change_mutex_);
  if (failed_.size() < kMostFailed) {
    failed_.push_back(work);
  } else {
    untold_ = error;  // whoever asks the work hears of it, too
  }
  owing_.store(true);
  unflushed_.store(true);
  return work;
}

template <class Operation>
[[gnu::always_inline]] inline auto RdmaTarget::counted(Operation&& operation) {
  try {
    auto result = operation();
    unflushed_.store(true, std::memory_order_relaxed);
    return result;
  } catch (const Error& error) {
    counters().add(Count::Errors);
    // A part of the operation may be under way, and its buffer goes back to the caller.
    if (Channel* const used = used_.load(); used != nullptr) used->end_if_failed();
    throw seen_from_here(error);
  }
}

template <class Operation>
std::shared_ptr<Work> RdmaTarget::counted(const How& how, Operation&& operation) {
  if (!how.async) return counted(operation);
  try {
    return counted(operation);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::StaleHandle || closed_.load()) throw;
    return fail_later(error);
  }
}

// What a device reports because a memory is no longer there, in the words of who uses it.
Error RdmaTarget::seen_from_here(const Error& error) const {
  if (error.kind() != ErrorKind::RemoteAccess && error.kind() != ErrorKind::ConnectionLost) return error;
  if (revoked()) {
    return Error(ErrorKind::StaleHandle,
                 text("the memory of ", peer().name(), " was closed meanwhile: ", error.what()));
  }
  if (closed_.load()) return Error(ErrorKind::StaleHandle, text("this window was closed meanwhile: ", error.what()));
  return error;
}

// ---- Generations ----------------------------------------------------------------------------------------------------

[[gnu::always_inline]] inline Channel& RdmaTarget::begin(bool signals, const Deadline& deadline) {
  Channel& channel = *connection_->channel(deadline);
  if (used_.load(std::memory_order_acquire) != &channel ||
      fences_.load(std::memory_order_relaxed) != fenced_.load(std::memory_order_relaxed) ||
      (signals && owing_.load(std::memory_order_relaxed))) [[unlikely]] {
    adapt(channel, signals, deadline);
  }
  return channel;
}

// What comes behind all before it fails with the generation: that tells of what was lost. Of a deadline the caller hears that this
// operation is late, not that earlier ones are lost.
template <class Operation>
auto RdmaTarget::telling(Channel& channel, bool signals, Operation&& operation) {
  try {
    return operation();
  } catch (const Error& error) {
    if (signals && channel.ended() && !channel.ended_by_deadline() && error.kind() == channel.end_kind() &&
        error.error_number() == 0) {  // what a registration fails with has one
      take_untold();
    }
    throw;
  }
}

void RdmaTarget::adapt(Channel& channel, bool signals, const Deadline& deadline) {
  const std::uint32_t fences = fences_.load(), fenced = fenced_.load();
  if (used_.load() != &channel) change_channel(channel);
  if ((signals || fences != fenced) && owing_.load()) {
    if (const auto error = take_untold()) {
      throw Error(error->kind(), text("a signal or what comes after a fence was not sent: ", error->what()));
    }
  }
  if (fences == fenced) return;
  // A queue pair does its writes in order, but the memory they go to is registered for relaxed ordering: there they may overtake
  // each other. And a write may overtake a read before it.
  telling(channel, true, [&] { push("fence", channel, 0, deadline); });
  fenced_.store(fences);
}

void RdmaTarget::change_channel(Channel& channel) {
  std::lock_guard lock(change_mutex_);
  Channel* const before = used_.load();
  if (before == &channel) return;
  if (before != nullptr) look_for_lost(*before);
  used_.store(&channel, std::memory_order_release);
}

void RdmaTarget::owe(Error error) {
  std::lock_guard lock(change_mutex_);
  untold_ = std::move(error);
  owing_.store(true);
  unflushed_.store(true);
}

// With change_mutex_: what was silent and was lost with a generation that has ended is to be told.
void RdmaTarget::look_for_lost(const Channel& channel) {
  owing_.store(true);  // perhaps only works
  if (told_ == channel.generation()) return;
  for (std::size_t lane = 0; lane < channel.lanes(); ++lane) {
    if (channel.complete(lane, number_in(channel, silent_[lane]))) continue;
    told_ = channel.generation();
    untold_ = what_was_lost(channel, tracked(channel));
  }
}

// What was lost since the last time, of which nobody was told. It is from here on.
std::optional<Error> RdmaTarget::take_untold() {
  std::lock_guard lock(change_mutex_);
  if (const Channel* const used = used_.load(); used != nullptr && used->ended()) look_for_lost(*used);
  owing_.store(false);
  auto error = std::exchange(untold_, std::nullopt);
  for (const auto& work : failed_) {
    if (!work->told.exchange(true) && !error) error = work->cause();
  }
  failed_.clear();
  std::lock_guard works_lock(works_mutex_);
  for (RdmaWork* work = works_; work != nullptr; work = work->next()) {
    if (work->tell() && !error) error = what_was_lost(work->channel(), work->last());
  }
  return error;
}

void RdmaTarget::track(const Channel& channel, std::size_t lane, std::uint64_t number) {
  raise_to(last_[lane], tagged(channel, number));
}

void RdmaTarget::track_silent(const Channel& channel, std::size_t lane, std::uint64_t number) {
  raise_to(silent_[lane], tagged(channel, number));
  // Since it was posted, another thread may have ended the generation and looked for what was lost.
  if (channel.ended()) [[unlikely]]
    track_late(channel, lane, number);
}

void RdmaTarget::track_late(const Channel& channel, std::size_t lane, std::uint64_t number) {
  if (channel.complete(lane, number)) return;
  Ticket ticket{};
  ticket[lane] = number;
  owe(what_was_lost(channel, ticket));
}

// The last request on lane 0 of an operation that is over for its caller now, unless it has a Work.
void RdmaTarget::track_for(const How& how, const Channel& channel, std::uint64_t number) {
  if (how.async) {
    track(channel, 0, number);
  } else {
    track_silent(channel, 0, number);
  }
}

Ticket RdmaTarget::tracked(const Channel& channel) const {
  Ticket ticket{};
  for (std::size_t lane = 0; lane < channel.lanes(); ++lane) {
    ticket[lane] = std::max(number_in(channel, last_[lane]), number_in(channel, silent_[lane]));
  }
  return ticket;
}

Error RdmaTarget::what_was_lost(const Channel& channel, const Ticket& last) const {
  const Error error = explain(channel, "an earlier operation", Ticket{}, last);
  if (error.kind() != ErrorKind::DeadlineExceeded) return error;
  // It was another operation's.
  return Error(ErrorKind::ConnectionLost,
               text("an earlier operation to ", peer().name(), " was lost: ", channel.cause()));
}

Error RdmaTarget::explain(const Channel& channel, const char* what, const Ticket& first, const Ticket& last) const {
  return seen_from_here(channel.error_for(what, first, last));
}

void RdmaTarget::await(const char* operation, Channel& channel, const Ticket& first, const Ticket& last,
                       const Deadline& deadline) {
  bool in_time = false;
  try {
    in_time = channel.await(last, deadline);
  } catch (...) {
    // Ctrl-C. The caller is about to have its buffer back.
    channel.end(ErrorKind::ConnectionLost, "an operation was interrupted, and all that was under way was cancelled");
    throw;
  }
  if (!in_time) {
    channel.end(ErrorKind::DeadlineExceeded,
                "the deadline passed, and all that was under way to this peer was cancelled; no source is read, and no "
                "destination written, again");
  }
  if (channel.complete(last)) return;
  throw explain(channel, operation, first, last);
}

// ---- Addresses ------------------------------------------------------------------------------------------------------

std::uint32_t RdmaTarget::key(const Channel& channel, std::size_t lane, std::uint64_t offset) const {
  const std::uint64_t pieces = reach_.piece_nbytes >= reach_.nbytes ? 1 : (reach_.nbytes - 1) / reach_.piece_nbytes + 1;
  const std::uint64_t piece = pieces == 1 ? 0 : (offset_ + offset) / reach_.piece_nbytes;
  return reach_.keys[channel.remote_rail(lane) * pieces + piece];
}

std::uint64_t RdmaTarget::to_end_of_piece(std::uint64_t offset) const {
  return reach_.piece_nbytes >= reach_.nbytes ? reach_.nbytes
                                              : reach_.piece_nbytes - (offset_ + offset) % reach_.piece_nbytes;
}

Channel::Word RdmaTarget::word(const Channel& channel, const Signal& signal) const {
  return {reach_.words_address + sizeof(std::uint64_t) * (std::uint64_t{signal.index} + 1),
          reach_.words_keys[channel.remote_rail(0)], signal.add};
}

// An operation fails when a part of it was posted: the caller gets its buffer back, and what was posted still uses it.
void RdmaTarget::give_up(Channel& channel) {
  channel.end(ErrorKind::DeadlineExceeded, "an operation was given up when a part of it was under way");
}

// Cuts `nbytes` into shares, one a lane. Calls `post(lane, at, end of the share, number)`, which posts as much from `at` on as
// one work request can take, sets its number, and returns how much that was.
template <class Post>
std::pair<Ticket, Ticket> RdmaTarget::in_parts(const char* operation, Channel& channel, std::uint64_t nbytes,
                                               bool one_lane, const Deadline& deadline, const Post& post) {
  const std::size_t lanes = one_lane || nbytes < kStriped ? 1 : channel.lanes();
  const std::uint64_t share = lanes == 1 ? nbytes : (nbytes / lanes + kStripeUnit - 1) / kStripeUnit * kStripeUnit;
  Ticket first{}, last{};
  try {
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      std::uint64_t at = std::min(nbytes, lane * share);
      const std::uint64_t end = lane + 1 == lanes ? nbytes : std::min(nbytes, at + share);
      while (at < end) {
        at += post(lane, at, end, last[lane]);
        if (first[lane] == 0) first[lane] = last[lane];
        track(channel, lane, last[lane]);
        if (at == end) break;
        check_deadline(operation, peer().name(), deadline);
        check_interrupt();
      }
    }
  } catch (...) {
    if (first != Ticket{}) give_up(channel);
    throw;
  }
  return {first, last};
}

// Returns when everything that was posted before, on the lanes from `first_lane` on, is in the peer's memory. An acknowledged
// write may still be on its way there from the peer's device. A read behind it on the same queue pair comes back only when it
// has arrived (PCI Express: the completion of a read does not pass the writes before it).
void RdmaTarget::push(const char* operation, Channel& channel, std::size_t first_lane, const Deadline& deadline) {
  const Ticket before = tracked(channel);
  Ticket ticket{};
  std::optional<Channel::Slot> slot;
  std::array<std::uint64_t, kMostLanes> flushed{};
  for (std::size_t lane = first_lane; lane < channel.lanes(); ++lane) {
    const std::uint64_t last = tagged(channel, before[lane]);
    if (before[lane] == 0 || flushed_[lane].load() == last) continue;
    if (barred_.load() != kFree) {  // its owner takes the keys away; it waits for what is under way
      ticket[lane] = channel.marker(lane, deadline);
      continue;
    }
    if (!slot) slot.emplace(channel, deadline);
    ticket[lane] = channel.read(lane, slot->data(), sizeof(std::uint64_t), slot->lkey(lane), reach_.words_address,
                                reach_.words_keys[channel.remote_rail(lane)], true, deadline);
    flushed[lane] = last;
  }
  if (ticket == Ticket{}) return;
  await(operation, channel, Ticket{}, ticket, deadline);
  for (std::size_t lane = 0; lane < channel.lanes(); ++lane) {
    if (flushed[lane] != 0) flushed_[lane].store(flushed[lane]);
  }
}

// ---- Operations -----------------------------------------------------------------------------------------------------

std::shared_ptr<Work> RdmaTarget::later(const char* operation, Channel& channel, const Ticket& first,
                                        const Ticket& last, const How& how, std::shared_ptr<void> registration) {
  channel.keep_until(last, how.keep, std::move(registration));
  return std::make_shared<RdmaWork>(std::static_pointer_cast<RdmaTarget>(shared_from_this()), channel, operation, first,
                                    last, how.deadline);
}

std::shared_ptr<Work> RdmaTarget::write(const void* source, std::uint64_t nbytes, std::uint64_t offset,
                                        const std::optional<Signal>& signal, const How& how) {
  if (how.async || signal || nbytes == 0 || nbytes > Channel::kStaged || !one_piece_) {
    return write_any(source, nbytes, offset, signal, how);
  }
  // What most operations are, apart from the rest for its sake: tests/test_put_cost.py counts its instructions.
  counted([&] {
    check("put", Access::Write, offset, nbytes);
    if (!how.deadline.is_never()) check_deadline("put", peer().name(), how.deadline);
    UnderWay under_way(*this, "put", how.deadline);
    Channel& channel = begin(false, how.deadline);
    connection_->counters()->add_all(std::pair(Count::Puts, 1), std::pair(Count::BytesPut, nbytes),
                                     std::pair(Count::Copies, 1));
    track_silent(channel, 0,
                 channel.write_small(source, static_cast<std::uint32_t>(nbytes), reach_.address + offset_ + offset,
                                     reach_.keys[channel.remote_rail(0)], how.deadline));
    return 0;
  });
  return nullptr;
}

std::shared_ptr<Work> RdmaTarget::write_any(const void* source, std::uint64_t nbytes, std::uint64_t offset,
                                            const std::optional<Signal>& signal, const How& how) {
  return counted(how, [&]() -> std::shared_ptr<Work> {
    check("put", Access::Write, offset, nbytes);
    if (signal) check_signal("put", peer().name(), signal->index, signals_);
    check_deadline("put", peer().name(), how.deadline);
    UnderWay under_way(*this, "put", how.deadline);
    Channel& channel = begin(signal.has_value(), how.deadline);
    return telling(channel, signal.has_value(),
                   [&] { return write_over(channel, source, nbytes, offset, signal, how); });
  });
}

std::shared_ptr<Work> RdmaTarget::write_over(Channel& channel, const void* source, std::uint64_t nbytes,
                                             std::uint64_t offset, const std::optional<Signal>& signal,
                                             const How& how) {
  // A queue pair does the signal's fetch-add after its writes; it says nothing of the other lanes'.
  if (signal) push("put", channel, 1, how.deadline);
  Channel::Word then{};
  if (signal) then = word(channel, *signal);
  counters().add(Count::Puts);
  counters().add(Count::BytesPut, nbytes);
  if (signal) counters().add(Count::Signals);

  if (nbytes <= Channel::kStaged && (nbytes == 0 || nbytes <= to_end_of_piece(offset))) {
    Ticket ticket{};
    if (nbytes != 0) {
      counters().add(Count::Copies);
      ticket[0] = channel.write_staged(0, source, static_cast<std::uint32_t>(nbytes), reach_.address + offset_ + offset,
                                       key(channel, 0, offset), signal ? &then : nullptr, how.async, how.deadline);
    } else if (signal) {
      ticket[0] = channel.signal(0, then, how.async, how.deadline);
    } else {
      return nullptr;
    }
    track_for(how, channel, ticket[0]);
    Ticket first = ticket;
    if (signal && nbytes != 0) --first[0];
    return how.async ? later("put", channel, first, ticket, how, nullptr) : nullptr;
  }

  const char* const from = static_cast<const char*>(source);
  std::optional<Local> found;
  try {
    found.emplace(connection_->hub(), source, nbytes, how, false);
  } catch (const Error& error) {
    // Read-only memory that is shared (a mapped file) cannot be registered on Linux before 6.2, only copied.
    if (error.error_number() != EFAULT) throw;
    const Ticket last = write_copied(channel, from, nbytes, offset, signal ? &then : nullptr, how);
    return how.async ? later("put", channel, Ticket{}, last, how, nullptr) : nullptr;
  }
  const Local& local = *found;
  // An asynchronous signal stays behind its bytes only on one queue pair; nobody is there to send it later.
  const bool one_lane = signal && (how.async || channel.lanes() == 1);
  auto [first, last] = in_parts(
      "put", channel, nbytes, one_lane, how.deadline,
      [&](std::size_t lane, std::uint64_t at, std::uint64_t end, std::uint64_t& number) {
        const std::uint64_t part = std::min({end - at, to_end_of_piece(offset + at), local.to_end_of_piece(from + at),
                                             std::uint64_t{channel.longest_message()}});
        const bool is_last = at + part == end;
        number = channel.write(lane, from + at, static_cast<std::uint32_t>(part),
                               local.key(channel.local_rail(lane), from + at), reach_.address + offset_ + offset + at,
                               key(channel, lane, offset + at), one_lane && is_last ? &then : nullptr, is_last,
                               how.deadline);
        return part;
      });
  if (one_lane && first == last) --first[0];  // the number is that of the signal, with the bytes right before it
  if (how.async) return later("put", channel, first, last, how, local.hold());
  std::uint64_t signal_number = 0;
  if (signal && !one_lane) {
    try {
      push("put", channel, 1, how.deadline);
      signal_number = channel.signal(0, then, false, how.deadline);
      track(channel, 0, signal_number);
    } catch (...) {
      give_up(channel);
      throw;
    }
  }
  await("put", channel, first, last, how.deadline);
  if (signal_number != 0) track_silent(channel, 0, signal_number);
  return nullptr;
}

// In pieces that are copied first; the signal is on the last.
Ticket RdmaTarget::write_copied(Channel& channel, const char* source, std::uint64_t nbytes, std::uint64_t offset,
                                const Channel::Word* then, const How& how) {
  Ticket last{};
  for (std::uint64_t at = 0; at < nbytes;) {
    const std::uint64_t part = std::min({nbytes - at, std::uint64_t{Channel::kStaged}, to_end_of_piece(offset + at)});
    const bool is_last = at + part == nbytes;
    last[0] = channel.write_staged(0, source + at, static_cast<std::uint32_t>(part),
                                   reach_.address + offset_ + offset + at, key(channel, 0, offset + at),
                                   is_last ? then : nullptr, is_last && how.async, how.deadline);
    track(channel, 0, last[0]);
    at += part;
  }
  track_for(how, channel, last[0]);
  counters().add(Count::Copies);
  return last;
}

std::shared_ptr<Work> RdmaTarget::read(void* destination, std::uint64_t nbytes, std::uint64_t offset, const How& how) {
  return counted(how, [&]() -> std::shared_ptr<Work> {
    check("get", Access::Read, offset, nbytes);
    check_deadline("get", peer().name(), how.deadline);
    UnderWay under_way(*this, "get", how.deadline);
    Channel& channel = begin(false, how.deadline);
    counters().add(Count::Gets);
    counters().add(Count::BytesGot, nbytes);
    if (nbytes == 0) return nullptr;
    if (!how.async && nbytes <= Channel::kStaged && nbytes <= to_end_of_piece(offset)) {
      const Channel::Slot slot(channel, how.deadline);
      Ticket ticket{};
      ticket[0] = channel.read(0, slot.data(), static_cast<std::uint32_t>(nbytes), slot.lkey(0),
                               reach_.address + offset_ + offset, key(channel, 0, offset), true, how.deadline);
      track(channel, 0, ticket[0]);
      await("get", channel, ticket, ticket, how.deadline);
      std::memcpy(destination, slot.data(), nbytes);
      counters().add(Count::Copies);
      return nullptr;
    }
    const Local local(connection_->hub(), destination, nbytes, how, true);
    char* const to = static_cast<char*>(destination);
    const auto [first, last] = in_parts(
        "get", channel, nbytes, false, how.deadline,
        [&](std::size_t lane, std::uint64_t at, std::uint64_t end, std::uint64_t& number) {
          const std::uint64_t part = std::min({end - at, to_end_of_piece(offset + at), local.to_end_of_piece(to + at),
                                               std::uint64_t{channel.longest_message()}});
          number = channel.read(lane, to + at, static_cast<std::uint32_t>(part),
                                local.key(channel.local_rail(lane), to + at), reach_.address + offset_ + offset + at,
                                key(channel, lane, offset + at), at + part == end, how.deadline);
          return part;
        });
    if (how.async) return later("get", channel, first, last, how, local.hold());
    await("get", channel, first, last, how.deadline);
    return nullptr;
  });
}

// What a scatter or gather has under way.
struct RdmaTarget::Posted {
  Ticket first{}, last{};
  Ticket from_source{};      // the last on each lane that reads or writes the caller's memory itself
  std::uint64_t silent = 0;  // the last that was copied, or a signal, on lane 0
  std::vector<std::shared_ptr<Registration>> registrations;
  bool one_lane = false;

  void add(std::size_t lane, std::uint64_t number) {
    if (first[lane] == 0) first[lane] = number;
    last[lane] = number;
  }
};

// Posts one piece: copied if it is a small write, else straight from or into the caller's memory.
void RdmaTarget::post_piece(Channel& channel, const Piece& piece, bool reads, const How& how, Posted& posted) {
  if (piece.nbytes == 0) return;
  const std::uint64_t there = reach_.address + offset_ + piece.offset;
  char* const here = static_cast<char*>(piece.data);
  const auto copied = [&] {
    for (std::uint64_t at = 0; at < piece.nbytes;) {
      const auto part = static_cast<std::uint32_t>(
          std::min({piece.nbytes - at, std::uint64_t{Channel::kStaged}, to_end_of_piece(piece.offset + at)}));
      posted.add(0, channel.write_staged(0, here + at, part, there + at, key(channel, 0, piece.offset + at), nullptr,
                                         false, how.deadline));
      posted.silent = posted.last[0];
      track(channel, 0, posted.silent);
      at += part;
    }
    counters().add(Count::Copies);
  };
  if (!reads && piece.nbytes <= Channel::kStaged) return copied();
  auto& known = posted.registrations;
  if (known.empty() || !known.back()->contains(here, piece.nbytes)) {
    How of = how;
    of.memory = piece.memory;
    of.allocation = piece.allocation;
    try {
      known.push_back(Local(connection_->hub(), here, piece.nbytes, of, reads).hold());
    } catch (const Error& error) {
      if (reads || error.error_number() != EFAULT) throw;  // see write_any
      return copied();
    }
  }
  const Registration& local = *known.back();
  in_parts(
      reads ? "get" : "put", channel, piece.nbytes, posted.one_lane, how.deadline,
      [&](std::size_t lane, std::uint64_t at, std::uint64_t end, std::uint64_t& number) {
        const std::uint64_t from = reinterpret_cast<std::uint64_t>(here) + at - local.address();
        const std::uint64_t part =
            std::min({end - at, to_end_of_piece(piece.offset + at), local.piece_nbytes() - from % local.piece_nbytes(),
                      std::uint64_t{channel.longest_message()}});
        const std::uint32_t lkey = local.lkey(channel.local_rail(lane), from);
        const std::uint32_t rkey = key(channel, lane, piece.offset + at), length = static_cast<std::uint32_t>(part);
        number = reads ? channel.read(lane, here + at, length, lkey, there + at, rkey, false, how.deadline)
                       : channel.write(lane, here + at, length, lkey, there + at, rkey, nullptr, false, how.deadline);
        posted.add(lane, number);
        posted.from_source[lane] = number;
        return part;
      });
}

// Asks for a completion behind all that was posted, and waits for it or says how to.
std::shared_ptr<Work> RdmaTarget::finish_many(const char* operation, Channel& channel, Posted& posted, const How& how) {
  Ticket wanted = how.async ? posted.last : posted.from_source;
  for (std::size_t lane = 0; lane < channel.lanes(); ++lane) {
    if (wanted[lane] != 0) wanted[lane] = std::max(wanted[lane], channel.marker(lane, how.deadline));
  }
  if (how.async) {
    auto registrations = std::make_shared<decltype(posted.registrations)>(std::move(posted.registrations));
    return later(operation, channel, posted.first, wanted, how, std::move(registrations));
  }
  if (wanted != Ticket{}) await(operation, channel, posted.first, wanted, how.deadline);
  if (posted.silent != 0) track_silent(channel, 0, posted.silent);
  return nullptr;
}

std::shared_ptr<Work> RdmaTarget::write_many(std::span<const Piece> pieces, const std::optional<Signal>& signal,
                                             const How& how) {
  return many("put", false, pieces, signal, how);
}

std::shared_ptr<Work> RdmaTarget::read_many(std::span<const Piece> pieces, const How& how) {
  return many("get", true, pieces, std::nullopt, how);
}

std::shared_ptr<Work> RdmaTarget::many(const char* operation, bool reads, std::span<const Piece> pieces,
                                       const std::optional<Signal>& signal, const How& how) {
  return counted(how, [&]() -> std::shared_ptr<Work> {
    const Access wanted = reads ? Access::Read : Access::Write;
    check(operation, wanted, 0, 0);  // of no pieces, too
    std::uint64_t nbytes = 0;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      at_piece(i, [&] { check(operation, wanted, pieces[i].offset, pieces[i].nbytes); });
      nbytes += pieces[i].nbytes;
    }
    if (signal) check_signal(operation, peer().name(), signal->index, signals_);
    check_deadline(operation, peer().name(), how.deadline);
    UnderWay under_way(*this, operation, how.deadline);
    Channel& channel = begin(signal.has_value(), how.deadline);
    return telling(channel, signal.has_value(),
                   [&] { return many_over(channel, operation, reads, pieces, nbytes, signal, how); });
  });
}

std::shared_ptr<Work> RdmaTarget::many_over(Channel& channel, const char* operation, bool reads,
                                            std::span<const Piece> pieces, std::uint64_t nbytes,
                                            const std::optional<Signal>& signal, const How& how) {
  counters().add(reads ? Count::Gets : Count::Puts, pieces.size());
  counters().add(reads ? Count::BytesGot : Count::BytesPut, nbytes);
  Posted posted;
  // As in write_any: an asynchronous signal stays behind its bytes only on one queue pair.
  posted.one_lane = signal && how.async;
  if (posted.one_lane) push(operation, channel, 1, how.deadline);
  try {
    std::size_t since = 0;
    for (const Piece& piece : pieces) {
      if (++since == kBreath) {
        since = 0;
        check_deadline(operation, peer().name(), how.deadline);
        check_interrupt();
      }
      post_piece(channel, piece, reads, how, posted);
    }
    if (signal) {
      if (!posted.one_lane) push(operation, channel, 1, how.deadline);
      counters().add(Count::Signals);
      posted.silent = channel.signal(0, word(channel, *signal), false, how.deadline);
      posted.add(0, posted.silent);
      track(channel, 0, posted.silent);
    }
    return finish_many(operation, channel, posted, how);
  } catch (...) {
    if (posted.last != Ticket{}) give_up(channel);
    throw;
  }
}

std::shared_ptr<Work> RdmaTarget::signal(const Signal& signal, const How& how) {
  return counted(how, [&]() -> std::shared_ptr<Work> {
    check_not_forked(made_in_, "this window");
    check_signal("signal", peer().name(), signal.index, signals_);
    check_deadline("signal", peer().name(), how.deadline);
    UnderWay under_way(*this, "signal", how.deadline);
    Channel& channel = begin(true, how.deadline);
    counters().add(Count::Signals);
    Ticket ticket{};
    telling(channel, true, [&] {
      push("signal", channel, 1, how.deadline);
      ticket[0] = channel.signal(0, word(channel, signal), how.async, how.deadline);
    });
    track_for(how, channel, ticket[0]);
    return how.async ? later("signal", channel, ticket, ticket, how, nullptr) : nullptr;
  });
}

// One that devices do: an add to or a compare and swap of 8 bytes.
std::uint64_t RdmaTarget::whole_word(Channel& channel, const Atomic& what, const Deadline& deadline) {
  const Channel::Slot slot(channel, deadline);
  const std::uint64_t address = reach_.address + offset_ + what.offset;
  const std::uint32_t rkey = key(channel, 0, what.offset);
  Ticket ticket{};
  ticket[0] = what.kind == Atomic::Kind::FetchAdd
                  ? channel.fetch_add(0, slot.index(), {address, rkey, what.operand}, deadline)
                  : channel.compare_swap(0, slot.index(), address, rkey, what.expected, what.operand, deadline);
  track(channel, 0, ticket[0]);
  await(what.name(), channel, ticket, ticket, deadline);
  std::uint64_t held;
  std::memcpy(&held, slot.data(), sizeof held);
  return held;
}

// The others are made of compare and swap, on the aligned 8 bytes that the word lies in: another try whenever somebody else
// was faster.
std::uint64_t RdmaTarget::atomic(const Atomic& what, const Deadline& deadline) {
  return counted([&] {
    check(what.name(), Access::ReadWrite, what.offset, what.word_nbytes);
    const std::uint64_t within = (reach_.address + offset_ + what.offset) % sizeof(std::uint64_t);
    check_aligned(what.name(), peer().name(), within, what.offset, what.word_nbytes);
    if (within > what.offset || what.offset - within + sizeof(std::uint64_t) > nbytes_) {
      fail(ErrorKind::Bounds, what.name(), " of 4 bytes at offset ", what.offset,
           ": over RDMA the aligned 8 bytes that ", "they lie in must be within the ", nbytes_, " bytes of ",
           peer().name());
    }
    check_deadline(what.name(), peer().name(), deadline);
    UnderWay under_way(*this, what.name(), deadline);
    Channel& channel = begin(false, deadline);
    counters().add(Count::Atomics);
    if (what.word_nbytes == 8 && what.kind != Atomic::Kind::Swap) return whole_word(channel, what, deadline);

    const unsigned shift = static_cast<unsigned>(8 * within);
    const std::uint64_t mask = what.word_nbytes == 8 ? ~std::uint64_t{0} : std::uint64_t{0xFFFFFFFF} << shift;
    Atomic attempt{Atomic::Kind::CompareSwap, what.offset - within, 0, 0};
    std::uint64_t seen = whole_word(channel, attempt, deadline);  // changes nothing
    for (;;) {
      const std::uint64_t held = (seen & mask) >> shift, next = what.applied_to(held) << shift & mask;
      if (next == (seen & mask)) return held;  // as it was at that moment
      attempt.expected = seen;
      attempt.operand = (seen & ~mask) | next;
      const std::uint64_t found = whole_word(channel, attempt, deadline);
      if (found == seen) return held;
      seen = found;
      check_deadline(what.name(), peer().name(), deadline);
    }
  });
}

void RdmaTarget::flush(const Deadline& deadline) {
  check_not_forked(made_in_, "this window");
  struct Flushing {
    std::atomic<unsigned>& count;
    explicit Flushing(std::atomic<unsigned>& flushing) : count(flushing) { count.fetch_add(1); }
    ~Flushing() { count.fetch_sub(1); }
  } flushing(flushing_);
  unflushed_.store(false);  // before it looks: what is issued from here on is for the next flush
  try {
    if (const auto error = take_untold()) throw *error;
    UnderWay under_way(*this, "flush", deadline, true);
    Channel* const channel = used_.load(std::memory_order_acquire);
    if (channel != nullptr && !channel->ended()) {
      telling(*channel, true, [&] { push("flush", *channel, 0, deadline); });
    }
    if (const auto error = take_untold()) throw *error;
  } catch (...) {
    unflushed_.store(true);  // there may be more to tell
    throw;
  }
  counters().add(Count::Flushes);
}

void RdmaTarget::fence() {
  check_not_forked(made_in_, "this window");
  if (closed_.load()) fail(ErrorKind::StaleHandle, "fence: this window is closed");
  if (revoked()) fail_revoked("fence");
  if (peer().lost()) peer().fail_lost("fence");
  fences_.fetch_add(1);
}

// ---- The end --------------------------------------------------------------------------------------------------------

bool RdmaTarget::quiet() {
  if (under_way_.load(std::memory_order_seq_cst) != 0) return false;
  Channel* const channel = used_.load(std::memory_order_acquire);
  if (channel == nullptr || channel->ended()) return true;
  Ticket ticket = tracked(*channel);
  if (channel->complete(ticket)) return true;
  try {
    for (std::size_t lane = 0; lane < channel->lanes(); ++lane) {
      if (ticket[lane] != 0 && !channel->complete(lane, ticket[lane])) channel->marker(lane, Deadline::after(0));
    }
  } catch (const Error&) {
    return channel->ended();  // no room at the moment
  }
  channel->poll();
  channel->end_if_failed();
  return channel->ended() || channel->complete(ticket);
}

// Waits until no operation is under way and all that were posted are complete. False at the deadline.
bool RdmaTarget::settle(const Deadline& deadline) {
  for (;;) {
    if (quiet()) return true;
    Channel* const channel = used_.load(std::memory_order_acquire);
    // Looked at every millisecond: operations of other threads end without telling.
    if (channel != nullptr && !channel->ended()) {
      channel->await(tracked(*channel), deadline.at_most(std::chrono::milliseconds(1)));
    }
    if (under_way_.load() != 0) {
      Event never;
      never.await([this] { return under_way_.load() == 0; }, deadline.at_most(std::chrono::milliseconds(1)));
    }
    if (deadline.passed()) return quiet();
  }
}

void RdmaTarget::close(const Deadline& deadline) {
  if (closed_.exchange(true) || made_in_ != fork_generation()) return;
  FirstFailure failure;
  failure.attempt([&] {
    if (settle(deadline)) return;
    const std::string cause = text("the deadline of a close passed before all operations to ", peer().name(),
                                   " were complete; the rest are cancelled");
    if (Channel* const channel = used_.load(); channel != nullptr) channel->end(ErrorKind::DeadlineExceeded, cause);
    fail(ErrorKind::DeadlineExceeded, "close: ", cause);
  });
  connection_->give_back(memory_id_);
  failure.rethrow();
}

Description RdmaTarget::describe() const {
  Description rows = connection_->describe();
  rows.emplace_back("path", "RDMA: the devices move the bytes");
  rows.emplace_back("nbytes", std::to_string(nbytes_));
  rows.emplace_back("access", name_of(access_));
  if (revoked()) rows.emplace_back("memory", "closed by its owner");
  return rows;
}

}  // namespace onesided::verbs
#endif
