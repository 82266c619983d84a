// A peer on this host, in a window that also has peers elsewhere.
//
// Its memory is mapped, so bytes are copied; but its words are also written by devices on behalf of the others, and what a
// device does is not atomic against what a processor does (verbs: IBV_ATOMIC_HCA). So signals and atomics take the device, too.
#pragma once

#include "core/transport.h"

namespace onesided {

class MixedTarget final : public Target {
 public:
  // Both reach the same memory.
  MixedTarget(std::shared_ptr<Target> mapped, std::shared_ptr<Target> device)
      : mapped_(std::move(mapped)), device_(std::move(device)) {}

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

  bool busy() const override { return mapped_->busy() || device_->busy(); }
  bool unflushed() const override { return mapped_->unflushed() || device_->unflushed(); }
  std::uint64_t nbytes() const override { return mapped_->nbytes(); }
  std::uint32_t signals() const override { return device_->signals(); }
  const PeerState& peer() const override { return mapped_->peer().lost() ? mapped_->peer() : device_->peer(); }
  Counters& counters() const override { return mapped_->counters(); }
  Description describe() const override;

 private:
  void keep_behind_fence(const Deadline& deadline);

  const std::shared_ptr<Target> mapped_, device_;
  std::atomic<std::uint32_t> fences_{0}, fenced_{0};  // as of fence(), and as of the operation that saw to it
};

}  // namespace onesided
