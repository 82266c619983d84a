// The rdma kind: peers that a verbs device reaches.
#pragma once

#include "core/transport.h"
#include "verbs/api.h"

#if ONESIDED_HAS_VERBS
#include "verbs/hub.h"

namespace onesided::verbs {

struct RdmaOptions {
  RailChoice rails;
  Tuning tuning;
  std::string address;  // where peers introduce themselves; empty: chosen, see Hub
};

class RdmaTransport final : public Transport {
 public:
  // Why there can be none here; empty if there can. Opens every device once and changes nothing.
  static std::string unsupported_reason(const std::vector<std::string>& nics);

  explicit RdmaTransport(const RdmaOptions& options);
  ~RdmaTransport() override;

  TransportKind kind() const override { return TransportKind::Rdma; }
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
  std::mutex loop_mutex_;
  std::shared_ptr<RdmaConnection> loop_;  // to itself, made when it is first needed
};

}  // namespace onesided::verbs
#endif
