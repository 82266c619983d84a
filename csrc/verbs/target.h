// A peer's memory as operations reach it.
#pragma once

#include "verbs/connection.h"

#if ONESIDED_HAS_VERBS
#include <array>
#include <memory>

namespace onesided::verbs {

class RdmaTarget final : public Target {
 public:
  // [offset, offset + nbytes) of the memory that `reach` tells of.
  RdmaTarget(std::shared_ptr<RdmaConnection> connection, std::uint64_t memory_id, Reach reach, std::uint64_t offset,
             std::uint64_t nbytes, Access access);
  ~RdmaTarget() override;

  std::shared_ptr<Work> write(const void* source, std::uint64_t nbytes, std::uint64_t offset,
                              const std::optional<Signal>& signal, const How& how) override;
  std::shared_ptr<Work> read(void* destination, std::uint64_t nbytes, std::uint64_t offset, const How& how) override;
  std::shared_ptr<Work> signal(const Signal& signal, const How& how) override;
  std::uint64_t fetch_add(std::uint64_t offset, std::uint64_t add, const Deadline& deadline) override;
  std::uint64_t compare_swap(std::uint64_t offset, std::uint64_t expected, std::uint64_t desired,
                             const Deadline& deadline) override;
  void flush(const Deadline& deadline) override;
  void close(const Deadline& deadline) override;

  bool busy() const override { return unflushed_.load(std::memory_order_relaxed); }
  bool wants_allocation(std::uint64_t nbytes, bool lands) const override { return lands || nbytes > Channel::kStaged; }
  bool unflushed() const override { return unflushed_.load(std::memory_order_relaxed); }
  std::uint64_t nbytes() const override { return nbytes_; }
  std::uint32_t signals() const override { return reach_.signals; }
  const PeerState& peer() const override { return connection_->peer(); }
  Counters& counters() const override { return *connection_->counters(); }
  Description describe() const override;

  // From the hub's thread: its owner closes the memory. quiet() is true when nothing is under way any more.
  void revoke() { revoked_.store(true, std::memory_order_seq_cst); }
  bool ended() const { return revoked_.load() || closed_.load(); }
  bool quiet();
  std::uint64_t memory_id() const { return memory_id_; }

  // For RdmaWork: the failure of this generation is known to the caller.
  void told(const Channel& channel) { told_.store(channel.generation(), std::memory_order_relaxed); }
  Error explain(const Channel& channel, const char* what, const Ticket& first, const Ticket& last) const;

 private:
  class FailedWork;
  class UnderWay;
  class Local;

  void check(const char* operation, Access wanted, std::uint64_t offset, std::uint64_t nbytes) const;
  void refuse(const char* operation, Access wanted, std::uint64_t offset, std::uint64_t nbytes) const;
  std::shared_ptr<Work> write_any(const void* source, std::uint64_t nbytes, std::uint64_t offset,
                                  const std::optional<Signal>& signal, const How& how);
  Channel& begin(bool signals, const Deadline& deadline);
  void change_channel(Channel& channel, bool signals);
  void track(const Channel& channel, std::size_t lane, std::uint64_t number);
  Ticket tracked(const Channel& channel) const;
  void await(const char* operation, Channel& channel, const Ticket& first, const Ticket& last,
             const Deadline& deadline);
  void settle_other_lanes(const char* operation, Channel& channel, const Deadline& deadline);
  std::uint32_t key(const Channel& channel, std::size_t lane, std::uint64_t offset) const;
  std::uint64_t to_end_of_piece(std::uint64_t offset) const;
  Channel::Word word(const Channel& channel, const Signal& signal) const;
  template <class Post>
  std::pair<Ticket, Ticket> in_parts(const char* operation, Channel& channel, std::uint64_t nbytes, bool one_lane,
                                     const Deadline& deadline, const Post& post);
  Ticket write_copied(Channel& channel, const char* source, std::uint64_t nbytes, std::uint64_t offset,
                      const Channel::Word* then, const How& how);
  std::shared_ptr<Work> later(const char* operation, Channel& channel, const Ticket& first, const Ticket& last,
                              const How& how, std::shared_ptr<void> registration);
  template <class Operation>
  auto counted(Operation&& operation);
  template <class Operation>
  std::shared_ptr<Work> counted(const How& how, Operation&& operation);
  std::shared_ptr<Work> fail_later(const Error& error);
  std::uint64_t atomic_address(const char* operation, std::uint64_t offset) const;
  std::optional<Error> take_untold();
  Error seen_from_here(const Error& error) const;
  bool settle(const Deadline& deadline);

  const std::shared_ptr<RdmaConnection> connection_;
  const std::uint32_t made_in_;
  const std::uint64_t memory_id_;
  const Reach reach_;
  const std::uint64_t offset_;
  const std::uint64_t nbytes_;
  const Access access_;
  const bool one_piece_;  // one key a rail is for all of the memory

  std::atomic<unsigned> under_way_{0};
  std::atomic<bool> revoked_{false};
  std::atomic<bool> closed_{false};
  std::atomic<bool> unflushed_{false};
  // The last work request of this target's on each lane, with its generation in the upper bits: see track().
  std::array<std::atomic<std::uint64_t>, kMostLanes> last_{};
  std::array<std::atomic<std::uint64_t>, kMostLanes> flushed_{};
  // The generation used last. If it ended with something not complete, that is told once: by the operation itself, by the
  // next flush, or by the next signal, which is then not sent.
  std::atomic<Channel*> used_{nullptr};
  std::atomic<std::uint32_t> told_{0};
  std::mutex change_mutex_;
  std::optional<Error> untold_;
  static constexpr std::size_t kMostFailed = 4096;
  std::deque<std::shared_ptr<FailedWork>> failed_;  // since the last flush
};

}  // namespace onesided::verbs
#endif
