#include "core/mixed.h"

#include "core/error.h"

namespace onesided {

// The signal follows when the bytes are there: the copy is over, and the processor's writes are seen by all before what the
// device does because of a later request.
std::shared_ptr<Work> MixedTarget::write(const void* source, std::uint64_t nbytes, std::uint64_t offset,
                                         const std::optional<Signal>& signal, const How& how) {
  if (!signal) return mapped_->write(source, nbytes, offset, std::nullopt, how);
  // A signal that cannot be sent must not leave bytes behind.
  check_signal("put", device_->peer().name(), signal->index, device_->signals());
  How now = how;
  now.async = false;
  mapped_->write(source, nbytes, offset, std::nullopt, now);
  return this->signal(*signal, how);
}

std::shared_ptr<Work> MixedTarget::read(void* destination, std::uint64_t nbytes, std::uint64_t offset, const How& how) {
  return mapped_->read(destination, nbytes, offset, how);
}

std::shared_ptr<Work> MixedTarget::signal(const Signal& signal, const How& how) {
  if (mapped_->busy()) mapped_->flush(how.deadline);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return device_->signal(signal, how);
}

std::uint64_t MixedTarget::fetch_add(std::uint64_t offset, std::uint64_t add, const Deadline& deadline) {
  return device_->fetch_add(offset, add, deadline);
}

std::uint64_t MixedTarget::compare_swap(std::uint64_t offset, std::uint64_t expected, std::uint64_t desired,
                                        const Deadline& deadline) {
  return device_->compare_swap(offset, expected, desired, deadline);
}

void MixedTarget::flush(const Deadline& deadline) {
  mapped_->flush(deadline);
  if (device_->unflushed()) device_->flush(deadline);
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
