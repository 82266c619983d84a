#include "core/mixed.h"

#include "core/error.h"

namespace onesided {

// The signal follows when the bytes are there: the copy is over, and the processor's writes are seen by all before what the
// device does because of a later request.
std::shared_ptr<Work> MixedTarget::write(const void* source, std::uint64_t nbytes, std::uint64_t offset,
                                         const std::optional<Signal>& signal, const How& how) {
  keep_behind_fence(how.deadline);
  if (!signal) return mapped_->write(source, nbytes, offset, std::nullopt, how);
  // A signal that cannot be sent must not leave bytes behind.
  check_signal("put", device_->peer().name(), signal->index, device_->signals());
  How now = how;
  now.async = false;
  mapped_->write(source, nbytes, offset, std::nullopt, now);
  return this->signal(*signal, how);
}

std::shared_ptr<Work> MixedTarget::read(void* destination, std::uint64_t nbytes, std::uint64_t offset, const How& how) {
  keep_behind_fence(how.deadline);
  return mapped_->read(destination, nbytes, offset, how);
}

std::shared_ptr<Work> MixedTarget::write_many(std::span<const Piece> pieces, const std::optional<Signal>& signal,
                                              const How& how) {
  keep_behind_fence(how.deadline);
  if (!signal) return mapped_->write_many(pieces, std::nullopt, how);
  check_signal("put", device_->peer().name(), signal->index, device_->signals());
  How now = how;
  now.async = false;
  mapped_->write_many(pieces, std::nullopt, now);
  return this->signal(*signal, how);
}

std::shared_ptr<Work> MixedTarget::read_many(std::span<const Piece> pieces, const How& how) {
  keep_behind_fence(how.deadline);
  return mapped_->read_many(pieces, how);
}

std::shared_ptr<Work> MixedTarget::signal(const Signal& signal, const How& how) {
  keep_behind_fence(how.deadline);
  if (mapped_->busy()) mapped_->flush(how.deadline);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return device_->signal(signal, how);
}

std::uint64_t MixedTarget::atomic(const Atomic& what, const Deadline& deadline) {
  keep_behind_fence(deadline);
  return device_->atomic(what, deadline);
}

void MixedTarget::flush(const Deadline& deadline) {
  mapped_->flush(deadline);
  if (device_->unflushed()) device_->flush(deadline);
}

void MixedTarget::fence() {
  mapped_->fence();  // refuses what is closed or lost
  fences_.fetch_add(1);
}

// The two ways know nothing of each other: the first operation behind a fence waits for what either has under way.
void MixedTarget::keep_behind_fence(const Deadline& deadline) {
  const std::uint32_t fences = fences_.load();
  if (fences == fenced_.load()) return;
  flush(deadline);
  fenced_.store(fences);
}

void MixedTarget::close(const Deadline& deadline) {
  FirstFailure failure;
  failure.attempt([&] { mapped_->close(deadline); });
  failure.attempt([&] { device_->close(deadline); });
  failure.rethrow();
}

Description MixedTarget::describe() const {
  Description rows = mapped_->describe();
  for (auto& [key, value] : rows) {
    if (key == "kind") value = "shm, signals and atomics over rdma";
  }
  return rows;
}

}  // namespace onesided
