// Memory of this process that peers reach through their devices.
#pragma once

#include "verbs/registration.h"

#if ONESIDED_HAS_VERBS
#include <map>
#include <memory>

#include "core/permissions.h"
#include "core/segment.h"
#include "core/transport.h"
#include "core/turn.h"
#include "verbs/protocol.h"

namespace onesided::verbs {

class Hub;

class RdmaMemory final : public Memory, public std::enable_shared_from_this<RdmaMemory> {
 public:
  // `segment` is what the bytes lie in if they are memory of ours.
  RdmaMemory(std::shared_ptr<Hub> hub, std::uint64_t id, void* data, std::uint64_t nbytes, Access access,
             std::uint32_t signals, std::uint32_t most_peers, std::shared_ptr<Segment> segment, Keepalive keep);
  ~RdmaMemory() override;

  void* data() const override { return data_; }
  std::uint64_t nbytes() const override { return nbytes_; }
  Access access() const override { return access_; }
  RemoteMemory remote() const override;
  const Control& control() const override { return control_; }
  bool silent() const override { return true; }
  bool closed() const override { return control_.header().closed.load(std::memory_order_acquire) != 0; }
  void check_usable(const char* what) const override;
  // Peers that have it open are told, and say when nothing of theirs is under way. Of one that does not by the deadline (it
  // was stopped), the queue pairs are taken away: it can reach nothing of this transport until it asks again.
  void close(const Deadline& deadline) override;
  void permit(const std::string& peer, Access access) override;
  // All of it is registered anew, so that the keys that the peer knows are good for nothing; the others get the new ones when they
  // ask next. For a moment twice as much is registered.
  void revoke(const std::string& peer, const Deadline& deadline) override;
  Description describe() const override;

  std::uint64_t id() const { return id_; }
  std::uint32_t most_peers() const { return most_peers_; }
  const Token& key() const { return key_; }
  Hub* hub() const { return hub_.get(); }
  // Both with the hub's lock held.
  const Permissions& permissions() const { return permissions_; }
  Reach reach(Access access) const;
  // Null once it is closed.
  std::shared_ptr<Registration> registration() const { return registration_.load(std::memory_order_acquire); }

 private:
  using Registered = std::shared_ptr<Registration>;
  Registered register_bytes(Access access) const;
  Registered register_words() const;

  const std::shared_ptr<Hub> hub_;
  const std::uint64_t id_;
  const Token key_;
  void* const data_;
  const std::uint64_t nbytes_;
  const Access access_;
  const std::uint32_t most_peers_;
  const std::shared_ptr<Segment> segment_;
  const std::shared_ptr<Segment> control_segment_;
  Control control_;
  std::atomic<Registered> registration_;
  // The rest with the hub's lock.
  Registered words_;
  std::map<Access, Registered> narrower_;  // for peers that may do less than access_
  Permissions permissions_;
  Turn turn_;  // of close(), permit() and revoke()
  Keepalive keep_;
};

}  // namespace onesided::verbs
#endif
