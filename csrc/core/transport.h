// The transport contract: what every kind of transport gives to windows and to the bindings.
//
// The path of a put: Window::put -> Target::write -> one copy (shm) or one posted work request (rdma).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/control.h"
#include "core/deadline.h"
#include "core/handle.h"
#include "core/residence.h"
#include "core/stats.h"
#include "core/work.h"

namespace onesided {

// Keeps something of the caller's alive, a tensor for instance.
using Keepalive = std::shared_ptr<void>;

using Description = std::vector<std::pair<std::string, std::string>>;

// A count to add to one of the target's signals when the operation's bytes are visible there.
struct Signal {
  std::uint32_t index;
  std::uint64_t add;
};

// One part of a scatter or a gather: bytes here, and where they go to or come from.
struct Piece {
  void* data;
  std::uint64_t nbytes;
  std::uint64_t offset;
  // What the bytes here are a part of, as in How.
  const class Memory* memory = nullptr;
  std::shared_ptr<class Allocation> allocation = nullptr;
};

// A read-modify-write of an aligned word. What it held is returned.
struct Atomic {
  enum class Kind : std::uint8_t { FetchAdd, CompareSwap, Swap };

  Kind kind;
  std::uint64_t offset;
  std::uint64_t operand;       // to add, or the new value
  std::uint64_t expected = 0;  // CompareSwap: only if it holds this
  unsigned word_nbytes = 8;    // 8 or 4

  const char* name() const {
    return kind == Kind::FetchAdd ? "fetch_add" : kind == Kind::CompareSwap ? "compare_swap" : "swap";
  }
  // What a word that holds `held` holds afterwards.
  std::uint64_t applied_to(std::uint64_t held) const {
    if (kind == Kind::FetchAdd) return held + operand;
    return kind == Kind::Swap || held == expected ? operand : held;
  }
};

// Runs `look`; what it throws names piece `i`.
template <class Look>
auto at_piece(std::size_t i, Look&& look) {
  try {
    return look();
  } catch (const Error& error) {
    throw Error(error.kind(), text("piece ", i, ": ", error.what()), error.error_number());
  }
}

class Memory;

// The memory of one object of the caller's, a tensor's storage for instance, from its birth to its death. What transports keep
// of it (a registration) is found by this and never by an address: the same address may be another object's tomorrow.
class Allocation {
 public:
  Allocation(void* data, std::uint64_t nbytes, std::unique_ptr<Residence> residence = nullptr)
      : data_(static_cast<char*>(data)), nbytes_(nbytes), residence_(std::move(residence)) {}

  char* data() const { return data_; }
  std::uint64_t nbytes() const { return nbytes_; }
  // False if the object has other memory at this address now.
  bool intact() const { return residence_ == nullptr || residence_->intact(); }
  // What the transport `owner` keeps here; made by `make` the first time. It goes with the object.
  std::shared_ptr<void> kept(const void* owner, const std::function<std::shared_ptr<void>()>& make);
  void forget(const void* owner);

 private:
  char* const data_;
  const std::uint64_t nbytes_;
  const std::unique_ptr<Residence> residence_;  // of memory whose object may free it and allocate it again
  std::mutex mutex_;
  std::vector<std::pair<const void*, std::shared_ptr<void>>> kept_;
};

// How an operation is to run. `keep` holds the buffer of an asynchronous one. `memory` or `allocation` is what the buffer
// is a part of, if that is known; both may be null.
struct How {
  bool async = false;
  Deadline deadline = Deadline::never();
  Keepalive keep;
  const Memory* memory = nullptr;
  std::shared_ptr<Allocation> allocation;
};

// Whether the process at the other end is still there. Written by the transport's own thread, read on every operation.
class PeerState {
 public:
  explicit PeerState(std::string name) : name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  std::string reason() const;
  // The first reason given stays.
  void lose(std::string reason);
  [[noreturn]] void fail_lost(const char* operation) const;

 private:
  const std::string name_;
  mutable std::mutex mutex_;
  std::string reason_;
  std::atomic<bool> lost_{false};
};

// Memory of this process that peers may reach.
class Memory {
 public:
  virtual ~Memory() = default;

  virtual void* data() const = 0;
  virtual std::uint64_t nbytes() const = 0;
  virtual Access access() const = 0;
  virtual RemoteMemory remote() const = 0;  // what its handle says
  virtual const Control& control() const = 0;
  // True if its signals are written by devices, which wake nobody: who waits for one has to look now and then.
  virtual bool silent() const { return false; }
  virtual bool closed() const = 0;
  // Throws if this process may not use it (it was made before a fork). `what` names it.
  virtual void check_usable(const char* what) const = 0;
  // Ends all access: later operations of peers fail with StaleHandle, and when this returns none is under way. Throws
  // DeadlineExceeded, and stays open for another try, if a peer is stuck in the middle of an operation (it was stopped).
  virtual void close(const Deadline& deadline) = 0;
  // What a peer may do that opens it from now on, known by the name that its endpoint was bound for: a part of access(), or
  // nothing. The empty name stands for all others.
  virtual void permit(const std::string& peer, Access access) = 0;
  // Ends a peer's access, for good: when this returns none of its operations is under way, and none succeeds any more. Others
  // are not disturbed. DeadlineExceeded as for close(); later operations fail in any case.
  virtual void revoke(const std::string& peer, const Deadline& deadline) = 0;
  virtual Description describe() const = 0;
};

// One remote memory as reached over one connection: what a put or a get is posted to. Thread-safe.
//
// Bounds, permission and alignment are checked before anything is touched. A signal is strong: it is added when all
// earlier operations through this target are visible at the peer. An operation that is over when it returns gives no Work.
class Target : public std::enable_shared_from_this<Target> {
 public:
  virtual ~Target() = default;

  virtual std::shared_ptr<Work> write(const void* source, std::uint64_t nbytes, std::uint64_t offset,
                                      const std::optional<Signal>& signal, const How& how) = 0;
  virtual std::shared_ptr<Work> read(void* destination, std::uint64_t nbytes, std::uint64_t offset, const How& how) = 0;
  // All pieces, and then the signal. All are checked before anything is touched. `pieces` need not outlive the call; what they
  // point to must, as with write and read.
  virtual std::shared_ptr<Work> write_many(std::span<const Piece> pieces, const std::optional<Signal>& signal,
                                           const How& how) = 0;
  virtual std::shared_ptr<Work> read_many(std::span<const Piece> pieces, const How& how) = 0;
  virtual std::shared_ptr<Work> signal(const Signal& signal, const How& how) = 0;
  virtual std::uint64_t atomic(const Atomic& what, const Deadline& deadline) = 0;
  virtual void flush(const Deadline& deadline) = 0;
  // What is issued from here on takes effect after all that was issued before. Waits for nothing itself.
  virtual void fence() = 0;
  // Waits for asynchronous operations until the deadline, then cancels the rest. It is closed in every case;
  // DeadlineExceeded if something had to be cancelled.
  virtual void close(const Deadline& deadline) = 0;

  // True if a signal, a flush or a close would wait: for asynchronous operations that are not over, or for the network.
  virtual bool busy() const = 0;
  // True if an operation of so many bytes is faster when How::allocation is given; `lands`: an asynchronous read.
  virtual bool wants_allocation(std::uint64_t /*nbytes*/, bool /*lands*/) const { return false; }
  // True if a device moves the bytes of an asynchronous write while this process does other things.
  virtual bool offloads() const { return false; }
  // True if an operation was issued since the last flush.
  virtual bool unflushed() const = 0;
  virtual std::uint64_t nbytes() const = 0;
  virtual std::uint32_t signals() const = 0;
  virtual const PeerState& peer() const = 0;
  virtual Counters& counters() const = 0;
  virtual Description describe() const = 0;

  std::uint64_t fetch_add(std::uint64_t offset, std::uint64_t add, const Deadline& deadline = Deadline::never()) {
    return atomic({Atomic::Kind::FetchAdd, offset, add}, deadline);
  }
  std::uint64_t compare_swap(std::uint64_t offset, std::uint64_t expected, std::uint64_t desired,
                             const Deadline& deadline = Deadline::never()) {
    return atomic({Atomic::Kind::CompareSwap, offset, desired, expected}, deadline);
  }
};

class Connection {
 public:
  virtual ~Connection() = default;

  // The target for the whole of the memory that `remote` is a part of. The first time, the peer is asked for it; later the
  // same one is returned, so that all parts of a memory share one mapping and one order of operations. HandleError if
  // `remote` is not within it.
  virtual std::shared_ptr<Target> target(const RemoteMemory& remote, const Deadline& deadline) = 0;
  // A target of its own, that can be closed without ending any other.
  virtual std::shared_ptr<Target> attach(const RemoteMemory& remote, const Deadline& deadline) = 0;
  virtual const PeerState& peer() const = 0;
  // Closes its targets, as they do; it is closed in every case.
  virtual void close(const Deadline& deadline) = 0;
  virtual Description describe() const = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual TransportKind kind() const = 0;
  // New memory that peers can reach in the best way of this transport.
  virtual std::shared_ptr<Memory> allocate(std::uint64_t nbytes, Access access, std::uint32_t signals,
                                           std::uint32_t slots) = 0;
  // Makes [data, data + nbytes) known; `keep` is held until the memory is closed.
  virtual std::shared_ptr<Memory> register_memory(void* data, std::uint64_t nbytes, Access access,
                                                  std::uint32_t signals, std::uint32_t slots, Keepalive keep) = 0;
  // A target for this process's own memory.
  virtual std::shared_ptr<Target> loop_back(const std::shared_ptr<Memory>& memory, const std::string& name) = 0;
  // An endpoint for `peer`, a name that permissions refer to; for anybody if it is empty.
  virtual Endpoint bind(bool shared, const std::string& peer = {}) = 0;
  virtual std::shared_ptr<Connection> connect(const Endpoint& peer, const std::string& name,
                                              const Deadline& deadline = Deadline::never()) = 0;
  // Closes connections, then memories, then itself. It stays open for another try if a memory does (see Memory::close).
  virtual void close(const Deadline& deadline) = 0;
  virtual bool closed() const = 0;
  virtual Description describe() const = 0;
};

// Grows whenever any peer is lost: a cheap way to see that nothing has happened.
std::uint64_t losses();

// A signal and the count that is waited for.
struct Wanted {
  std::uint32_t index;
  std::uint64_t at_least;
};
// Which of several it was, and its value.
struct Reached {
  std::size_t position;
  std::uint64_t value;
};
// Waits until one of these signals of `memory` has reached its count; the first in order, if there are several. `from` says in
// messages who is waited for. `watch` is called when peers were lost, and once at the start: it throws if one of them ends the
// wait. Throws DeadlineExceeded, and StaleHandle if the memory is closed meanwhile.
Reached wait_signals(const Memory& memory, Counters& counters, std::span<const Wanted> wanted, const Deadline& deadline,
                     std::chrono::nanoseconds spin, const std::string& from, const std::function<void()>& watch);
// The same for one signal; returns its value.
inline std::uint64_t wait_signal(const Memory& memory, Counters& counters, std::uint32_t index, std::uint64_t at_least,
                                 const Deadline& deadline, std::chrono::nanoseconds spin, const std::string& from,
                                 const std::function<void()>& watch) {
  const Wanted wanted{index, at_least};
  return wait_signals(memory, counters, {&wanted, 1}, deadline, spin, from, watch).value;
}
void check_signal(const char* operation, const std::string& owner, std::uint32_t index, std::uint32_t signals);

// DeadlineExceeded of a "put" or "get" whose deadline has passed, with what that spares.
[[noreturn]] void fail_late(const char* operation, const std::string& peer);

// BoundsError unless the word that `offset` names is aligned where it lies.
void check_aligned(const char* operation, const std::string& owner, std::uint64_t address, std::uint64_t offset,
                   unsigned word_nbytes);

// Throws BoundsError unless [offset, offset + nbytes) lies in `limit` bytes.
inline void check_bounds(const char* operation, const std::string& peer, std::uint64_t offset, std::uint64_t nbytes,
                         std::uint64_t limit) {
  if (offset > limit || nbytes > limit - offset) {
    fail(ErrorKind::Bounds, operation, " of ", nbytes, " bytes at offset ", offset, " does not fit the ", limit,
         " bytes of ", peer);
  }
}

}  // namespace onesided
