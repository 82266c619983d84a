// Memory that a process lets its peers on the same host reach.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/permissions.h"
#include "core/segment.h"
#include "core/transport.h"

namespace onesided::shm {

class Hub;

// Either shared (its bytes lie in a Segment, peers map them) or private (peers go through cross-memory attach). Its control
// block, with the signals, is shared in both cases.
class ShmMemory final : public Memory, public std::enable_shared_from_this<ShmMemory> {
 public:
  // Who holds a slot: the descriptor of an accepted connection, or one of these.
  static constexpr int kFree = -1;
  static constexpr int kOwner = -2;

  ShmMemory(std::shared_ptr<Hub> hub, std::uint64_t id, void* data, std::uint64_t nbytes, Access access,
            std::uint32_t signals, std::uint32_t slots, std::shared_ptr<Segment> segment, Keepalive keep);
  ~ShmMemory() override;

  void* data() const override { return data_; }
  std::uint64_t nbytes() const override { return nbytes_; }
  Access access() const override { return access_; }
  RemoteMemory remote() const override;
  const Control& control() const override { return control_; }
  bool closed() const override {
    return control_.header().closed.load(std::memory_order_seq_cst) & ControlHeader::kClosed;
  }
  void check_usable(const char* what) const override;
  void close(const Deadline& deadline) override;
  void permit(const std::string& peer, Access access) override;
  // The peer's library is told by a word that only this process can write. A process that went on all the same could: it has
  // the memory mapped, and is of the same user.
  void revoke(const std::string& peer, const Deadline& deadline) override;
  Description describe() const override;

  std::uint64_t id() const { return id_; }
  const Token& key() const { return key_; }
  const std::shared_ptr<Segment>& segment() const { return segment_; }
  const std::shared_ptr<Segment>& control_segment() const { return control_segment_; }
  const std::shared_ptr<Hub>& hub() const { return hub_; }

  // Call with the hub's lock held.
  const Permissions& permissions() const { return permissions_; }
  std::uint32_t take_slot(int holder);  // throws Unsupported if all are taken
  void free_slot(std::uint32_t slot, int holder);
  void free_slots_of(int holder);

 private:
  std::string stuck_peers(const std::string* of = nullptr);
  void wait_until_quiet(const std::string* of, const char* operation, const Deadline& deadline);

  const std::shared_ptr<Hub> hub_;
  const std::uint64_t id_;
  const Token key_;
  void* const data_;
  const std::uint64_t nbytes_;
  const Access access_;
  const std::shared_ptr<Segment> segment_;
  const std::shared_ptr<Segment> control_segment_;
  Control control_;
  std::vector<int> holders_;
  Permissions permissions_;
  Keepalive keep_;
};

}  // namespace onesided::shm
