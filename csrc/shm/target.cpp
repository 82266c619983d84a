#include "shm/target.h"

#include <poll.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "core/copy.h"
#include "core/process.h"

namespace onesided::shm {
namespace {

// Many small pieces come up for breath (deadline, cancel, Ctrl-C) after so many bytes; each piece counts as some more.
constexpr std::uint64_t kBreath = 4 << 20, kBreathPerPiece = 256;

std::uint64_t total(std::span<const Piece> pieces) {
  std::uint64_t nbytes = 0;
  for (const Piece& piece : pieces) nbytes += piece.nbytes;
  return nbytes;
}

bool process_ended(int pidfd) {
  pollfd watched{pidfd, POLLIN, 0};
  return pidfd >= 0 && ::poll(&watched, 1, 0) > 0;
}

std::string why_not_permitted(int error) {
  std::string why = text("process_vm_readv: ", std::strerror(error));
  if (error == EPERM)
    why +=
        " (a ptrace permission: kernel.yama.ptrace_scope must be 0, both processes of one user, and not in a container "
        "without CAP_SYS_PTRACE)";
  if (error == ENOSYS) why += " (the kernel has no CONFIG_CROSS_MEMORY_ATTACH)";
  return why;
}

}  // namespace

std::string probe_cross_memory(pid_t pid, std::uint64_t probe_address, const Token& expected) {
  if (pid == 0) return "the peer's process is not visible from this PID namespace";
  Token seen{};
  iovec local{seen.data(), seen.size()};
  iovec remote{reinterpret_cast<void*>(probe_address), seen.size()};
  const ssize_t got = ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
  if (got < 0) return why_not_permitted(errno);
  return seen == expected ? "" : text("process ", pid, " is not the peer (another PID namespace?)");
}

// Counts an operation as under way for as long as it lives, so that the owner's close() waits for it. The order matters:
// first count, then look whether the memory is closed (see Slot).
class ShmTarget::UnderWay {
 public:
  UnderWay(ShmTarget& target, const char* operation)
      : slot_(target.at_.control.slot(target.at_.slot)), owner_(target.owner_.is_me()) {
    // An exchange is as good as a fence here, and cheaper than an add and a fence.
    if (owner_) {
      slot_.by_owner_thread.exchange(slot_.by_owner_thread.load(std::memory_order_relaxed) + 1,
                                     std::memory_order_seq_cst);
    } else {
      slot_.by_others.fetch_add(1, std::memory_order_seq_cst);
    }
    try {
      look(target, operation);
    } catch (...) {
      end();
      throw;
    }
  }
  ~UnderWay() { end(); }
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;

  static void look(const ShmTarget& target, const char* operation) {
    if (const auto closed = target.at_.control.header().closed.load(std::memory_order_seq_cst); closed != 0)
        [[unlikely]] {
      if ((closed & ControlHeader::kClosed) != 0)
        fail(ErrorKind::StaleHandle, operation, ": the memory of ", target.peer().name(), " was closed");
      if (target.at_.control.header().is_revoked(target.at_.slot))
        fail(ErrorKind::StaleHandle, operation, ": the access to the memory of ", target.peer().name(), " was revoked");
    }
    if (target.closed_.load(std::memory_order_seq_cst))
      fail(ErrorKind::StaleHandle, operation, ": this window is closed");
    if (target.peer().lost()) target.peer().fail_lost(operation);
  }

 private:
  void end() {
    if (owner_) {
      slot_.by_owner_thread.store(slot_.by_owner_thread.load(std::memory_order_relaxed) - 1, std::memory_order_release);
    } else {
      slot_.by_others.fetch_sub(1, std::memory_order_release);
    }
  }

  Slot& slot_;
  const bool owner_;
};

// What is looked at between the pieces of a long operation.
class ShmTarget::Between final : public Checkpoint {
 public:
  Between(const char* operation, const ShmTarget& target, const Deadline& deadline)
      : operation_(operation), target_(target), deadline_(deadline) {}

  void pass() override {
    check_deadline();
    UnderWay::look(target_, operation_);
    if (begun_) check_interrupt();  // it takes the GIL: not for a copy of one piece
    begun_ = true;
  }
  void check_deadline() const {
    if (deadline_.passed()) fail_late(operation_, target_.peer().name());
  }

 private:
  const char* operation_;
  const ShmTarget& target_;
  const Deadline& deadline_;
  bool begun_ = false;
};

// The slot goes back only here: whoever may still count on it holds this object.
ShmTarget::~ShmTarget() {
  InterruptScope undisturbed(nullptr);  // Ctrl-C ends waits of the caller's, not this
  try {
    close(Deadline::after(5));
  } catch (const Error&) {
    // It is closed all the same.
  }
  if (at_.made_in == fork_generation() && at_.detach) at_.detach();
}

void ShmTarget::check(const char* operation, Access wanted, std::uint64_t offset, std::uint64_t nbytes) const {
  check_not_forked(at_.made_in, "this window");
  check_bounds(operation, at_.peer->name(), offset, nbytes, at_.nbytes);
  if (!permits(at_.access, wanted)) {
    fail(ErrorKind::RemoteAccess, operation, ": the memory of ", at_.peer->name(), " permits '", name_of(at_.access),
         "' only");
  }
}

void ShmTarget::check_all(const char* operation, Access wanted, std::span<const Piece> pieces) const {
  check(operation, wanted, 0, 0);  // of no pieces, too
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    at_piece(i, [&] { check(operation, wanted, pieces[i].offset, pieces[i].nbytes); });
  }
}

// ---- Operations ---------------------------------------------------------------------------------------------------

// Runs an operation of the caller's; counts it as one to flush, or as an error.
template <class Operation>
auto ShmTarget::counted(Operation&& operation) {
  try {
    auto result = operation();
    unflushed_.store(true, std::memory_order_relaxed);
    return result;
  } catch (const Error&) {
    at_.counters->add(Count::Errors);
    throw;
  }
}

// Runs `now` at once, or later in its turn: behind what it has to be behind.
template <class Now>
std::shared_ptr<Work> ShmTarget::issue(const char* operation, const std::optional<Signal>& signal, const How& how,
                                       Now&& now) {
  if (how.async) {
    const std::uint64_t told = signal ? strand_->failures_told() : 0;
    return run_later(how, [signal, told, now = std::forward<Now>(now)](ShmTarget& target, Checkpoint& between) {
      if (signal) target.check_earlier("put with a signal", told);
      now(target, between);
    });
  }
  Between between(operation, *this, how.deadline);
  between.check_deadline();
  keep_behind_fence(how.deadline);
  if (signal) settle_before_signal(how);
  now(*this, between);
  return nullptr;
}

std::shared_ptr<Work> ShmTarget::write(const void* source, std::uint64_t nbytes, std::uint64_t offset,
                                       const std::optional<Signal>& signal, const How& how) {
  return counted([&] {
    check("put", Access::Write, offset, nbytes);
    if (signal) check_signal("put", at_.peer->name(), signal->index, at_.control.signals());
    return issue("put", signal, how, [=](ShmTarget& target, Checkpoint& between) {
      target.write_now(source, nbytes, offset, signal, between);
    });
  });
}

std::shared_ptr<Work> ShmTarget::read(void* destination, std::uint64_t nbytes, std::uint64_t offset, const How& how) {
  return counted([&] {
    check("get", Access::Read, offset, nbytes);
    return issue("get", std::nullopt, how, [=](ShmTarget& target, Checkpoint& between) {
      target.read_now(destination, nbytes, offset, between);
    });
  });
}

// What runs later needs pieces of its own.
std::shared_ptr<Work> ShmTarget::write_many(std::span<const Piece> pieces, const std::optional<Signal>& signal,
                                            const How& how) {
  return counted([&] {
    check_all("put", Access::Write, pieces);
    if (signal) check_signal("put", at_.peer->name(), signal->index, at_.control.signals());
    const std::vector<Piece> own(pieces.begin(), how.async ? pieces.end() : pieces.begin());
    return issue("put", signal, how, [=](ShmTarget& target, Checkpoint& between) {
      target.write_now(own.empty() ? pieces : own, signal, between);
    });
  });
}

std::shared_ptr<Work> ShmTarget::read_many(std::span<const Piece> pieces, const How& how) {
  return counted([&] {
    check_all("get", Access::Read, pieces);
    const std::vector<Piece> own(pieces.begin(), how.async ? pieces.end() : pieces.begin());
    return issue("get", std::nullopt, how,
                 [=](ShmTarget& target, Checkpoint& between) { target.read_now(own.empty() ? pieces : own, between); });
  });
}

std::shared_ptr<Work> ShmTarget::signal(const Signal& signal, const How& how) {
  return counted([&] {
    check_not_forked(at_.made_in, "this window");
    check_signal("signal", at_.peer->name(), signal.index, at_.control.signals());
    if (how.async) {
      return run_later(how, [=, told = strand_->failures_told()](ShmTarget& target, Checkpoint&) {
        target.check_earlier("signal", told);
        UnderWay under_way(target, "signal");
        target.signal_now(signal);
      });
    }
    settle_before_signal(how);
    UnderWay under_way(*this, "signal");
    signal_now(signal);
    return std::shared_ptr<Work>();
  });
}

void ShmTarget::write_now(const void* source, std::uint64_t nbytes, std::uint64_t offset,
                          const std::optional<Signal>& signal, Checkpoint& between) {
  UnderWay under_way(*this, "put");
  if (at_.mapped != nullptr) {
    copy_memory(at_.mapped + offset, source, nbytes, &between);
  } else {
    cross_copy("put", true, const_cast<char*>(static_cast<const char*>(source)), nbytes, offset, between);
  }
  Counters& counters = *at_.counters;
  counters.add(Count::Puts);
  counters.add(Count::BytesPut, nbytes);
  counters.add(Count::Copies);
  if (signal) signal_now(*signal);
}

void ShmTarget::read_now(void* destination, std::uint64_t nbytes, std::uint64_t offset, Checkpoint& between) {
  UnderWay under_way(*this, "get");
  // What the owner wrote before the signal that led here is seen: the wait for that signal was an acquire.
  if (at_.mapped != nullptr) {
    copy_memory(destination, at_.mapped + offset, nbytes, &between);
  } else {
    cross_copy("get", false, static_cast<char*>(destination), nbytes, offset, between);
  }
  at_.counters->add(Count::Gets);
  at_.counters->add(Count::BytesGot, nbytes);
  at_.counters->add(Count::Copies);
}

void ShmTarget::write_now(std::span<const Piece> pieces, const std::optional<Signal>& signal, Checkpoint& between) {
  UnderWay under_way(*this, "put");
  move("put", true, pieces, between);
  Counters& counters = *at_.counters;
  counters.add(Count::Puts, pieces.size());
  counters.add(Count::BytesPut, total(pieces));
  counters.add(Count::Copies, pieces.size());
  if (signal) signal_now(*signal);
}

void ShmTarget::read_now(std::span<const Piece> pieces, Checkpoint& between) {
  UnderWay under_way(*this, "get");
  move("get", false, pieces, between);
  at_.counters->add(Count::Gets, pieces.size());
  at_.counters->add(Count::BytesGot, total(pieces));
  at_.counters->add(Count::Copies, pieces.size());
}

void ShmTarget::move(const char* operation, bool writing, std::span<const Piece> pieces, Checkpoint& between) {
  std::uint64_t since = 0;
  for (const Piece& piece : pieces) {
    if (since > kBreath) {
      between.pass();
      since = 0;
    }
    since += piece.nbytes + kBreathPerPiece;
    char* const there = at_.mapped + piece.offset;
    if (at_.mapped == nullptr) {
      cross_copy(operation, writing, static_cast<char*>(piece.data), piece.nbytes, piece.offset, between);
    } else if (writing) {
      copy_memory(there, piece.data, piece.nbytes, &between);
    } else {
      copy_memory(piece.data, there, piece.nbytes, &between);
    }
  }
}

void ShmTarget::signal_now(const Signal& signal) {
  at_.control.signal(signal.index).fetch_add(signal.add, std::memory_order_seq_cst);
  at_.control.event().notify();
  at_.counters->add(Count::Signals);
}

// Strong signals: what was issued asynchronously before must be visible first. If some of it failed and nobody has been
// told, this throws and the signal is not sent.
void ShmTarget::settle_before_signal(const How& how) {
  strand_->drain(how.deadline);
}

// The same for a signal that was itself issued asynchronously, when its turn has come: a signal that is sent says that all
// before it is there.
void ShmTarget::check_earlier(const char* operation, std::uint64_t told) {
  const auto cause = strand_->failed_beyond(told);
  if (!cause) return;
  fail(ErrorKind::ConnectionLost, operation, " to ", at_.peer->name(),
       ": not sent, because an operation that was issued before it failed", *cause);
}

void ShmTarget::cross_copy(const char* operation, bool writing, char* local, std::uint64_t nbytes, std::uint64_t offset,
                           Checkpoint& between) {
  std::uint64_t address = at_.cross.address + offset;
  while (nbytes > 0) {
    between.pass();
    // There is no form of these calls that takes a pidfd. Looking at it first leaves the moment between two system calls
    // for the process to end, be reaped, and its number to go round once: pids are handed out in order, so it cannot.
    if (process_ended(at_.cross.pidfd)) {
      fail(ErrorKind::ConnectionLost, operation, ": the process of ", at_.peer->name(), " has ended");
    }
    const std::size_t piece = std::min<std::uint64_t>(nbytes, kPiece);
    iovec here{local, piece};
    iovec there{reinterpret_cast<void*>(address), piece};
    const ssize_t moved = writing ? ::process_vm_writev(at_.cross.pid, &here, 1, &there, 1, 0)
                                  : ::process_vm_readv(at_.cross.pid, &here, 1, &there, 1, 0);
    if (moved > 0) {
      local += moved, address += moved, nbytes -= moved;
      continue;
    }
    switch (moved == 0 ? ESRCH : errno) {
      case EINTR: continue;
      case ESRCH: fail(ErrorKind::ConnectionLost, operation, ": the process of ", at_.peer->name(), " has ended");
      case EPERM: fail(ErrorKind::Unsupported, operation, " to ", at_.peer->name(), ": ", why_not_permitted(EPERM));
      default:
        fail_errno(ErrorKind::RemoteAccess, errno, operation, " to ", at_.peer->name(),
                   ": its memory (or the buffer here) is not mapped, or not writable");
    }
  }
}

// It orders everything before it on every processor: the read-modify-write is sequentially consistent, and the streaming copies
// end with a store fence.
template <class Word>
std::uint64_t ShmTarget::atomic_on(const Atomic& what) {
  check(what.name(), Access::ReadWrite, what.offset, sizeof(Word));
  if (!at_.shareable) {
    fail(ErrorKind::Unsupported, what.name(), ": the memory of ", at_.peer->name(),
         " is private and cannot be reached by atomics; use memory from Window.allocate or transport.allocate");
  }
  char* const address = at_.mapped + what.offset;
  check_aligned(what.name(), at_.peer->name(), reinterpret_cast<std::uintptr_t>(address), what.offset, sizeof(Word));
  UnderWay under_way(*this, what.name());
  at_.counters->add(Count::Atomics);
  const std::atomic_ref word(*reinterpret_cast<Word*>(address));
  const auto operand = static_cast<Word>(what.operand);
  auto seen = static_cast<Word>(what.expected);
  switch (what.kind) {
    case Atomic::Kind::FetchAdd: return word.fetch_add(operand, std::memory_order_seq_cst);
    case Atomic::Kind::Swap: return word.exchange(operand, std::memory_order_seq_cst);
    case Atomic::Kind::CompareSwap: word.compare_exchange_strong(seen, operand, std::memory_order_seq_cst); return seen;
  }
  return 0;
}

std::uint64_t ShmTarget::atomic(const Atomic& what, const Deadline& deadline) {
  return counted([&] {
    keep_behind_fence(deadline);
    return what.word_nbytes == 4 ? atomic_on<std::uint32_t>(what) : atomic_on<std::uint64_t>(what);
  });
}

void ShmTarget::flush(const Deadline& deadline) {
  check_not_forked(at_.made_in, "this window");
  unflushed_.store(false, std::memory_order_relaxed);  // first: what is issued from here on is for the next flush
  strand_->drain(deadline);
  if (closed_.load(std::memory_order_relaxed)) fail(ErrorKind::StaleHandle, "flush: this window is closed");
  if (at_.peer->lost()) at_.peer->fail_lost("flush");
  std::atomic_thread_fence(std::memory_order_seq_cst);
  at_.counters->add(Count::Flushes);
}

// Asynchronous operations run in the order they were issued; only one that runs at once could overtake them.
void ShmTarget::fence() {
  check_not_forked(at_.made_in, "this window");
  UnderWay::look(*this, "fence");
  if (busy()) fences_.fetch_add(1);
}

void ShmTarget::keep_behind_fence(const Deadline& deadline) {
  const std::uint32_t fences = fences_.load(std::memory_order_relaxed);
  if (fences == fenced_.load(std::memory_order_relaxed)) [[likely]]
    return;
  strand_->drain(deadline);
  fenced_.store(fences, std::memory_order_relaxed);
}

// ---- Asynchronous operations ----------------------------------------------------------------------------------------

std::shared_ptr<Work> ShmTarget::run_later(const How& how, std::function<void(ShmTarget&, Checkpoint&)> operation) {
  if (closed_.load()) fail(ErrorKind::StaleHandle, "this window is closed");
  if (at_.peer->lost()) at_.peer->fail_lost("put or get");
  auto self = std::static_pointer_cast<ShmTarget>(shared_from_this());
  return strand_->submit(
      [self = std::move(self), keep = how.keep, operation = std::move(operation),
       deadline = how.deadline](Checkpoint& cancel) mutable {
        const Keepalive kept = std::move(keep);  // let go before anybody sees that the operation is over
        struct Both final : Checkpoint {
          Checkpoint& cancel;
          Between between;
          Both(Checkpoint& cancelled, const ShmTarget& target, const Deadline& until)
              : cancel(cancelled), between("put or get", target, until) {}
          void pass() override {
            cancel.pass();
            between.pass();
          }
        } both(cancel, *self, deadline);
        try {
          both.between.check_deadline();
          operation(*self, both);
        } catch (const Error&) {
          self->at_.counters->add(Count::Errors);
          throw;
        }
      },
      how.deadline);
}

void ShmTarget::close(const Deadline& deadline) {
  if (closed_.load()) return;
  if (at_.made_in != fork_generation()) {  // the strand's thread and the peer's answers belong to the parent
    closed_.store(true);
    return;
  }
  FirstFailure failure;
  failure.attempt([&] {
    if (strand_->close(deadline)) return;
    fail(ErrorKind::DeadlineExceeded, "close: the deadline passed before all operations to ", at_.peer->name(),
         " were complete; the rest are cancelled");
  });
  closed_.store(true, std::memory_order_seq_cst);
  // As the owner does in ShmMemory::close: nothing is under way when this returns. An operation of this process ends
  // within a piece, unless it is this thread's own (close was called by the interrupt check in the middle of it).
  const Deadline patience = Deadline::after(1);
  const Slot& slot = at_.control.slot(at_.slot);
  while (slot.busy() && !patience.passed()) std::this_thread::yield();
  failure.rethrow();
}

Description ShmTarget::describe() const {
  const char* how = at_.mapped == nullptr ? "cross-memory attach: one copy by the kernel, no atomics"
                    : at_.shareable       ? "mapped: one copy by the calling thread"
                                          : "own memory: one copy by the calling thread, no atomics";
  return {
      {"peer", at_.peer->name()},
      {"kind", "shm"},
      {"path", how},
      {"nbytes", std::to_string(at_.nbytes)},
      {"access", name_of(at_.access)},
      {"state", at_.peer->lost() ? "lost: " + at_.peer->reason()
                : closed_.load() ? "closed"
                                 : "open"},
  };
}

}  // namespace onesided::shm
