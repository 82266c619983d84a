// The way from this process to one peer, through one or more generations of queue pairs.
#pragma once

#include "verbs/hub.h"

#if ONESIDED_HAS_VERBS
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace onesided::verbs {

class RdmaTarget;

class RdmaConnection final : public Connection, public std::enable_shared_from_this<RdmaConnection> {
 public:
  static std::shared_ptr<RdmaConnection> open(std::shared_ptr<Hub> hub, const Endpoint& peer, const std::string& name,
                                              const Deadline& deadline);
  // To this process's own memories, through the device's own loop-back.
  ~RdmaConnection() override;

  std::shared_ptr<Target> target(const RemoteMemory& remote, const Deadline& deadline) override;
  std::shared_ptr<Target> attach(const RemoteMemory& remote, const Deadline& deadline) override;
  const PeerState& peer() const override { return *peer_; }
  void close(const Deadline& deadline) override;
  Description describe() const override;

  // The generation in use. After one has ended, the next is agreed upon with the peer, which first takes away the queue
  // pairs of the old one: nothing of the old can land any more when this returns.
  const std::shared_ptr<Channel>& channel(const Deadline& deadline) {
    const std::shared_ptr<Channel>* const present = present_.load(std::memory_order_acquire);
    if (present != nullptr && !(*present)->ended()) return *present;
    return reopen(deadline);
  }
  Hub& hub() const { return *hub_; }
  const std::shared_ptr<PeerState>& peer_state() const { return peer_; }
  const std::shared_ptr<Counters>& counters() const { return counters_; }
  // Where a memory of the peer's is; it counts how often.
  Reach ask_reach(std::uint64_t memory_id, const Token& key, const Deadline& deadline);
  void give_back(std::uint64_t memory_id);

  // From the hub's thread.
  net::FramedSocket& socket() { return *socket_; }
  void hear(const Message& message);
  void lose_peer(const std::string& reason);
  void end_channels(ErrorKind kind, const std::string& cause, const std::function<bool(const Channel&)>& which,
                    bool completions_come = true);
  // Whether there is something left to finish; tries to.
  bool finish_revocations();

 private:
  struct Revocation {
    std::uint64_t memory_id;
    std::vector<std::shared_ptr<RdmaTarget>> targets;
  };

  RdmaConnection(std::shared_ptr<Hub> hub, const Endpoint& peer, const std::string& name, Fd socket);

  const std::shared_ptr<Channel>& reopen(const Deadline& deadline);
  bool retire_ended(const Deadline& deadline);
  std::shared_ptr<Channel> make_channel(const Deadline& deadline);
  std::vector<Channel::LanePlan> plan_lanes() const;
  std::vector<QueueAddress> ask_open(std::uint32_t generation, const Channel* channel, const Deadline& deadline);
  std::shared_ptr<RdmaTarget> open_memory(const RemoteMemory& remote, bool whole, const Deadline& deadline);
  Message ask(Message question, Say expected, const Deadline& deadline);
  void check_handle(const RemoteMemory& remote) const;
  void check_open() const;

  const std::shared_ptr<Hub> hub_;
  const Token transport_;  // the peer's
  const std::uint32_t pid_;
  const std::shared_ptr<PeerState> peer_;
  const std::shared_ptr<Counters> counters_;
  const std::unique_ptr<net::FramedSocket> socket_;
  std::vector<RailAddress> peer_rails_;
  std::atomic<bool> closing_{false};
  std::atomic<bool> closed_{false};

  std::atomic<const std::shared_ptr<Channel>*> present_{nullptr};
  mutable std::mutex channels_mutex_;
  std::deque<std::shared_ptr<Channel>> channels_;  // every generation; an ended one is small. References stay good.
  std::atomic<bool> opening_{false};
  std::atomic<const Channel*> retired_{nullptr};  // the peer was told of its end
  Event opened_;
  std::uint32_t generation_ = 0;
  std::set<std::pair<std::size_t, std::size_t>> unreachable_;  // pairs of rails, here and there; with opening_
  unsigned quick_ends_ = 0;
  Deadline::Clock::time_point opened_at_{};

  mutable std::mutex mutex_;
  std::uint64_t next_request_ = 1;
  std::map<std::uint64_t, std::optional<Message>> asked_;
  Event answered_;
  std::map<std::pair<std::uint64_t, Token>, std::shared_ptr<RdmaTarget>> targets_;
  std::vector<std::weak_ptr<RdmaTarget>> attached_;
  std::vector<Revocation> revocations_;
};

}  // namespace onesided::verbs
#endif
