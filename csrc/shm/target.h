// A memory of another process on this host (or of this one), as operations reach it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "core/segment.h"
#include "core/transport.h"

namespace onesided::shm {

// Access to a private memory of another process through the kernel (process_vm_readv and process_vm_writev).
struct CrossMemory {
  pid_t pid = 0;
  int pidfd = -1;  // not owned; tells a recycled pid from the process meant
  std::uint64_t address = 0;
};

// Why cross-memory attach to `pid` does not work; empty if it does: `expected` was read at `probe_address`.
std::string probe_cross_memory(pid_t pid, std::uint64_t probe_address, const Token& expected);

class ShmTarget final : public Target {
 public:
  struct Parts {
    std::shared_ptr<PeerState> peer;
    std::shared_ptr<Counters> counters;
    std::uint32_t made_in = 0;  // fork generation
    Access access{};
    std::uint64_t nbytes = 0;
    char* mapped = nullptr;  // where the bytes are in this process; null if they are reached through `cross`
    CrossMemory cross;
    bool shareable = true;  // the bytes lie in shared memory, so that atomics work from everywhere
    Control control;
    std::uint32_t slot = 0;
    std::vector<std::shared_ptr<void>> keep;  // the mappings, the connection
    std::function<void()> detach;             // gives the slot back, when nobody can count on it any more
  };

  explicit ShmTarget(Parts parts) : at_(std::move(parts)), strand_(std::make_shared<Strand>()) {}
  ~ShmTarget() override;

  std::shared_ptr<Work> write(const void* source, std::uint64_t nbytes, std::uint64_t offset,
                              const std::optional<Signal>& signal, const How& how) override;
  std::shared_ptr<Work> read(void* destination, std::uint64_t nbytes, std::uint64_t offset, const How& how) override;
  std::shared_ptr<Work> write_many(std::span<const Piece> pieces, const std::optional<Signal>& signal,
                                   const How& how) override;
  std::shared_ptr<Work> read_many(std::span<const Piece> pieces, const How& how) override;
  std::shared_ptr<Work> signal(const Signal& signal, const How& how) override;
  std::uint64_t atomic(const Atomic& what, const Deadline& deadline) override;
  void flush(const Deadline& deadline) override;
  void fence() override;
  void close(const Deadline& deadline) override;

  bool busy() const override { return !strand_->idle(); }
  bool unflushed() const override { return unflushed_.load(std::memory_order_relaxed); }
  std::uint64_t nbytes() const override { return at_.nbytes; }
  std::uint32_t signals() const override { return at_.control.signals(); }
  const PeerState& peer() const override { return *at_.peer; }
  Counters& counters() const override { return *at_.counters; }
  Description describe() const override;
  // True once it was closed, here or by the memory's owner.
  bool ended() const { return closed_.load() || at_.control.header().closed.load() & ControlHeader::kClosed; }

 private:
  class UnderWay;
  class Between;

  template <class Operation>
  auto counted(Operation&& operation);
  template <class Now>
  std::shared_ptr<Work> issue(const char* operation, const std::optional<Signal>& signal, const How& how, Now&& now);
  void check(const char* operation, Access wanted, std::uint64_t offset, std::uint64_t nbytes) const;
  void check_all(const char* operation, Access wanted, std::span<const Piece> pieces) const;
  void write_now(const void* source, std::uint64_t nbytes, std::uint64_t offset, const std::optional<Signal>& signal,
                 Checkpoint& between);
  void read_now(void* destination, std::uint64_t nbytes, std::uint64_t offset, Checkpoint& between);
  void write_now(std::span<const Piece> pieces, const std::optional<Signal>& signal, Checkpoint& between);
  void read_now(std::span<const Piece> pieces, Checkpoint& between);
  void move(const char* operation, bool writing, std::span<const Piece> pieces, Checkpoint& between);
  void signal_now(const Signal& signal);
  void cross_copy(const char* operation, bool writing, char* local, std::uint64_t nbytes, std::uint64_t offset,
                  Checkpoint& between);
  template <class Word>
  std::uint64_t atomic_on(const Atomic& what);
  void settle_before_signal(const How& how);
  void keep_behind_fence(const Deadline& deadline);
  void check_earlier(const char* operation, std::uint64_t told);
  std::shared_ptr<Work> run_later(const How& how, std::function<void(ShmTarget&, Checkpoint&)> operation);

  const Parts at_;
  const std::shared_ptr<Strand> strand_;
  OwnedBy owner_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> unflushed_{false};
  std::atomic<std::uint32_t> fences_{0}, fenced_{0};  // as of fence(), and as of the operation that saw to it
};

}  // namespace onesided::shm
