// The way from this process to one peer on the same host.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "shm/hub.h"
#include "shm/target.h"

namespace onesided::shm {

class ShmConnection final : public Connection, public std::enable_shared_from_this<ShmConnection> {
 public:
  static std::shared_ptr<ShmConnection> open(std::shared_ptr<Hub> hub, const Endpoint& peer, const std::string& name,
                                             const Deadline& deadline);
  ~ShmConnection() override;

  std::shared_ptr<Target> target(const RemoteMemory& remote, const Deadline& deadline) override;
  std::shared_ptr<Target> attach(const RemoteMemory& remote, const Deadline& deadline) override;
  const PeerState& peer() const override { return *peer_; }
  void close(const Deadline& deadline) override;
  Description describe() const override;

  int pidfd() const { return pidfd_.get(); }
  // From the hub's thread: the process died, or only this connection ended.
  void lose_peer(bool process_ended);

 private:
  ShmConnection(std::shared_ptr<Hub> hub, const Endpoint& peer, const std::string& name, Fd socket,
                PeerCredentials credentials);

  std::shared_ptr<ShmTarget> open_memory(const RemoteMemory& remote, bool whole, const Deadline& deadline);
  std::shared_ptr<ShmTarget> known_target(const RemoteMemory& remote, const Deadline& deadline);
  Reply ask(Request request, std::vector<Fd>* fds, const Deadline& deadline);
  void check_handle(const RemoteMemory& remote) const;
  void give_back(std::uint64_t memory_id, std::uint32_t slot);

  const std::shared_ptr<Hub> hub_;
  const Token transport_;  // the peer's
  const pid_t pid_;
  const std::shared_ptr<PeerState> peer_;
  const std::shared_ptr<Counters> counters_;
  Fd socket_;  // open until nothing uses this object any more: the peer takes its end as leave to reuse the slots
  Fd pidfd_;
  std::atomic<bool> closed_{false};  // becomes true with targets_mutex_ held
  std::atomic<bool> asking_{false};  // one question at a time
  Event asked_;
  std::uint64_t next_request_ = 1;
  std::mutex targets_mutex_;
  std::map<std::pair<std::uint64_t, Token>, std::shared_ptr<ShmTarget>> targets_;  // by memory and key
  std::vector<std::weak_ptr<Target>> attached_;
};

}  // namespace onesided::shm
