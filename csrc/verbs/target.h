// A peer's memory as operations reach it.
#pragma once

#include "core/turn.h"
#include "verbs/connection.h"

#if ONESIDED_HAS_VERBS
#include <array>
#include <memory>

namespace onesided::verbs {

class RdmaTarget final : public Target {
 public:
  // [offset, offset + nbytes) of the memory that `reach` tells of.
  RdmaTarget(std::shared_ptr<RdmaConnection> connection, const RemoteMemory& remote, Reach reach, std::uint64_t offset,
             std::uint64_t nbytes, Access access);
  ~RdmaTarget() override;

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

  bool busy() const override { return unflushed(); }
  bool wants_allocation(std::uint64_t nbytes, bool lands) const override { return lands || nbytes > Channel::kStaged; }
  bool offloads() const override { return true; }
  bool unflushed() const override { return unflushed_.load(std::memory_order_relaxed) || flushing_.load() != 0; }
  std::uint64_t nbytes() const override { return nbytes_; }
  std::uint32_t signals() const override { return signals_; }
  const PeerState& peer() const override { return connection_->peer(); }
  Counters& counters() const override { return *connection_->counters(); }
  Description describe() const override;

  // From the hub's thread: its owner closes the memory, or changes its keys. quiet() is true when nothing is under way any more.
  void bar(bool renews) {
    if (!revoked()) barred_.store(renews ? ++renewals_ : kRevoked, std::memory_order_seq_cst);
  }
  bool revoked() const { return barred_.load(std::memory_order_seq_cst) == kRevoked; }
  bool ended() const { return revoked() || closed_.load(); }
  bool quiet();
  std::uint64_t memory_id() const { return memory_id_; }

  Error explain(const Channel& channel, const char* what, const Ticket& first, const Ticket& last) const;

 private:
  class RdmaWork;
  class FailedWork;
  class UnderWay;
  class Local;

  void renew(const char* operation, const Deadline& deadline);
  void check(const char* operation, Access wanted, std::uint64_t offset, std::uint64_t nbytes) const;
  [[noreturn]] void fail_revoked(const char* operation) const;
  void refuse(const char* operation, Access wanted, std::uint64_t offset, std::uint64_t nbytes) const;
  std::shared_ptr<Work> write_any(const void* source, std::uint64_t nbytes, std::uint64_t offset,
                                  const std::optional<Signal>& signal, const How& how);
  std::shared_ptr<Work> write_over(Channel& channel, const void* source, std::uint64_t nbytes, std::uint64_t offset,
                                   const std::optional<Signal>& signal, const How& how);
  Channel& begin(bool signals, const Deadline& deadline);
  void adapt(Channel& channel, bool signals, const Deadline& deadline);
  template <class Operation>
  auto telling(Channel& channel, bool signals, Operation&& operation);
  void change_channel(Channel& channel);
  void look_for_lost(const Channel& channel);
  void owe(Error error);
  void track(const Channel& channel, std::size_t lane, std::uint64_t number);
  void track_silent(const Channel& channel, std::size_t lane, std::uint64_t number);
  void track_late(const Channel& channel, std::size_t lane, std::uint64_t number);
  void track_for(const How& how, const Channel& channel, std::uint64_t number);
  Ticket tracked(const Channel& channel) const;
  Error what_was_lost(const Channel& channel, const Ticket& last) const;
  void await(const char* operation, Channel& channel, const Ticket& first, const Ticket& last,
             const Deadline& deadline);
  void push(const char* operation, Channel& channel, std::size_t first_lane, const Deadline& deadline);
  std::uint32_t key(const Channel& channel, std::size_t lane, std::uint64_t offset) const;
  std::uint64_t to_end_of_piece(std::uint64_t offset) const;
  Channel::Word word(const Channel& channel, const Signal& signal) const;
  void give_up(Channel& channel);
  template <class Post>
  std::pair<Ticket, Ticket> in_parts(const char* operation, Channel& channel, std::uint64_t nbytes, bool one_lane,
                                     const Deadline& deadline, const Post& post);
  Ticket write_copied(Channel& channel, const char* source, std::uint64_t nbytes, std::uint64_t offset,
                      const Channel::Word* then, const How& how);
  std::shared_ptr<Work> later(const char* operation, Channel& channel, const Ticket& first, const Ticket& last,
                              const How& how, std::shared_ptr<void> registration);
  struct Posted;
  std::shared_ptr<Work> many(const char* operation, bool reads, std::span<const Piece> pieces,
                             const std::optional<Signal>& signal, const How& how);
  std::shared_ptr<Work> many_over(Channel& channel, const char* operation, bool reads, std::span<const Piece> pieces,
                                  std::uint64_t nbytes, const std::optional<Signal>& signal, const How& how);
  void post_piece(Channel& channel, const Piece& piece, bool reads, const How& how, Posted& posted);
  std::shared_ptr<Work> finish_many(const char* operation, Channel& channel, Posted& posted, const How& how);
  template <class Operation>
  auto counted(Operation&& operation);
  template <class Operation>
  std::shared_ptr<Work> counted(const How& how, Operation&& operation);
  std::shared_ptr<Work> fail_later(const Error& error);
  std::uint64_t whole_word(Channel& channel, const Atomic& what, const Deadline& deadline);
  std::optional<Error> take_untold();
  Error seen_from_here(const Error& error) const;
  bool settle(const Deadline& deadline);

  const std::shared_ptr<RdmaConnection> connection_;
  const std::uint32_t made_in_;
  const std::uint64_t memory_id_;
  const Token key_;
  Reach reach_;  // changed by renew() only, when nothing is under way
  const std::uint32_t signals_;
  const std::uint64_t offset_;
  const std::uint64_t nbytes_;
  const Access access_;
  const bool one_piece_;  // one key a rail is for all of the memory

  std::atomic<unsigned> under_way_{0};
  // Whether operations may begin; from 2 on, the number of the change of keys that has to be seen to first.
  static constexpr std::uint64_t kFree = 0, kRevoked = 1;
  std::atomic<std::uint64_t> barred_{kFree};
  std::uint64_t renewals_ = kRevoked;  // the hub's thread only
  Turn renewing_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> unflushed_{false};
  std::atomic<unsigned> flushing_{0};  // until it is over, another flush has to wait, too
  // The last work request of this target's on each lane, with its generation in the upper bits: see track(). Silent ones are of
  // operations that were over for their caller when they were posted, and of works that nobody has any more.
  std::array<std::atomic<std::uint64_t>, kMostLanes> last_{}, silent_{};
  std::array<std::atomic<std::uint64_t>, kMostLanes> flushed_{};
  // The generation used last. Of what was lost with one, synchronous operations and works tell themselves. If there was something
  // else, or a work that was not asked, the next flush tells, or the next signal, which is then not sent: once.
  std::atomic<Channel*> used_{nullptr};
  std::atomic<bool> owing_{false};  // there may be something to tell
  mutable std::mutex works_mutex_;
  RdmaWork* works_ = nullptr;
  // fence() counts up; the next operation sees to it, and then says so.
  std::atomic<std::uint32_t> fences_{0}, fenced_{0};
  std::mutex change_mutex_;
  std::optional<Error> untold_;
  std::uint32_t told_ = 0;  // the generation of what was put there last
  static constexpr std::size_t kMostFailed = 4096;
  std::deque<std::shared_ptr<FailedWork>> failed_;  // since the last flush
};

}  // namespace onesided::verbs
#endif
