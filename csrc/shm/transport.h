// The shm kind: peers on one host.
#pragma once

#include "shm/connection.h"
#include "shm/hub.h"

namespace onesided::shm {

class ShmTransport final : public Transport {
 public:
  // Why this system cannot have a shm transport; empty if it can. Without side effect.
  static std::string unsupported_reason();

  ShmTransport();
  ~ShmTransport() override;

  TransportKind kind() const override { return TransportKind::Shm; }
  std::shared_ptr<Memory> allocate(std::uint64_t nbytes, Access access, std::uint32_t signals,
                                   std::uint32_t slots) override;
  std::shared_ptr<Memory> register_memory(void* data, std::uint64_t nbytes, Access access, std::uint32_t signals,
                                          std::uint32_t slots, Keepalive keep) override;
  std::shared_ptr<Target> loop_back(const std::shared_ptr<Memory>& memory, const std::string& name) override;
  Endpoint bind(bool shared, const std::string& peer = {}) override;
  std::shared_ptr<Connection> connect(const Endpoint& peer, const std::string& name, const Deadline& deadline) override;
  void close(const Deadline& deadline) override;
  bool closed() const override { return hub_->stopped(); }
  Description describe() const override;

 private:
  std::shared_ptr<Memory> make_memory(void* data, std::uint64_t nbytes, Access access, std::uint32_t signals,
                                      std::uint32_t slots, std::shared_ptr<Segment> segment, Keepalive keep);

  const std::shared_ptr<Hub> hub_;
};

}  // namespace onesided::shm
