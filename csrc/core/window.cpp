#include "core/window.h"

#include <exception>

#include "core/process.h"

namespace onesided {

Window::Window(std::string name, std::shared_ptr<Memory> memory, std::vector<std::shared_ptr<Target>> targets,
               std::optional<unsigned> rank)
    : name_(std::move(name)),
      memory_(std::move(memory)),
      targets_(std::move(targets)),
      rank_(rank),
      waits_(counters_for("window", name_)),
      made_in_(fork_generation()),
      acknowledged_(targets_.size()),
      unsettled_(targets_.size()) {
  for (std::size_t rank = 0; rank < targets_.size(); ++rank) {
    if (targets_[rank] == nullptr) fail(ErrorKind::Onesided, "window '", name_, "' has no target for rank ", rank);
  }
}

void Window::refuse_rank(const char* operation, std::int64_t peer) const {
  fail(ErrorKind::Bounds, operation, ": rank ", peer, " does not exist: window '", name_, "' has ", targets_.size(),
       targets_.size() == 1 ? " rank" : " ranks");
}

Memory& Window::own_memory(const char* operation) const {
  check_not_forked(made_in_, "this window");
  if (memory_ == nullptr) {
    fail(ErrorKind::Unsupported, operation, ": window '", name_,
         "' is attached: its memory and its signals belong to its owner");
  }
  return *memory_;
}

std::uint64_t Window::wait_signal(std::uint32_t index, std::optional<std::uint64_t> at_least,
                                  std::optional<std::int64_t> source, const Deadline& deadline,
                                  std::chrono::nanoseconds spin) {
  Memory& memory = own_memory("wait_signal");
  check_signal("wait_signal", name_, index, memory.control().signals());
  const auto until = [&](std::uint64_t count) {
    const Wanted wanted{index, count};
    return wait(memory, {&wanted, 1}, source, deadline, spin).value;
  };
  if (at_least) return until(*at_least);
  // Whoever of several threads sees the next signal first takes it; the others wait for the one after.
  std::unique_lock lock(consumed_mutex_);
  std::uint64_t& consumed = consumed_[index];
  for (;;) {
    const std::uint64_t wanted = consumed + 1;
    lock.unlock();
    const std::uint64_t value = until(wanted);
    lock.lock();
    if (!reached(value, consumed + 1)) continue;
    ++consumed;
    return value;
  }
}

std::size_t Window::wait_any(std::span<const Wanted> wanted, std::optional<std::int64_t> source,
                             const Deadline& deadline, std::chrono::nanoseconds spin) {
  Memory& memory = own_memory("wait_any");
  if (wanted.empty()) fail(ErrorKind::Bounds, "wait_any: there is no signal to wait for");
  for (const Wanted& one : wanted) check_signal("wait_any", name_, one.index, memory.control().signals());
  return wait(memory, wanted, source, deadline, spin).position;
}

Reached Window::wait(Memory& memory, std::span<const Wanted> wanted, const std::optional<std::int64_t>& source,
                     const Deadline& deadline, std::chrono::nanoseconds spin) {
  static const std::string anybody = "any rank";
  const std::string& from = source ? target("wait_signal", *source).peer().name() : anybody;
  return wait_signals(memory, *waits_, wanted, deadline, spin, from, [&] { check_sources(source); });
}

void Window::check_sources(const std::optional<std::int64_t>& source) const {
  for (std::size_t rank = 0; rank < targets_.size(); ++rank) {
    const PeerState& peer = targets_[rank]->peer();
    if (!peer.lost() || (source ? static_cast<std::size_t>(*source) != rank : acknowledged_[rank].load())) continue;
    peer.fail_lost("wait_signal");
  }
}

std::uint64_t Window::signal_value(std::uint32_t index) const {
  const Control& control = own_memory("signal_value").control();
  check_signal("signal_value", name_, index, control.signals());
  return control.signal(index).load(std::memory_order_seq_cst);
}

std::uint64_t Window::atomic_load(std::uint64_t offset, unsigned word_nbytes) const {
  const Memory& memory = own_memory("atomic_load");
  check_bounds("atomic_load", name_, offset, word_nbytes, memory.nbytes());
  char* const address = static_cast<char*>(memory.data()) + offset;
  check_aligned("atomic_load", "this rank", reinterpret_cast<std::uintptr_t>(address), offset, word_nbytes);
  if (word_nbytes == 4) return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(address)).load();
  return std::atomic_ref(*reinterpret_cast<std::uint64_t*>(address)).load();
}

void Window::flush(std::int64_t peer, const Deadline& deadline) {
  Target& target = this->target("flush", peer);
  try {
    target.flush(deadline);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::ConnectionLost || target.peer().lost()) {
      unsettled_[static_cast<std::size_t>(peer)].store(true);
    }
    throw;
  }
}

void Window::flush_all(const Deadline& deadline) {
  std::exception_ptr first;
  check_not_forked(made_in_, "this window");
  if (closed()) fail(ErrorKind::StaleHandle, "flush: this window is closed");
  for (std::size_t rank = 0; rank < targets_.size(); ++rank) {
    Target& target = *targets_[rank];
    if (!target.unflushed() && !target.busy() && !unsettled_[rank].load()) continue;
    try {
      flush(static_cast<std::int64_t>(rank), deadline);
    } catch (const Error&) {
      if (first == nullptr && !acknowledged_[rank].load()) first = std::current_exception();
    }
  }
  if (first != nullptr) std::rethrow_exception(first);
}

std::vector<unsigned> Window::lost() const {
  std::vector<unsigned> ranks;
  for (unsigned rank = 0; rank < targets_.size(); ++rank) {
    if (targets_[rank]->peer().lost()) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<unsigned> Window::acknowledge_lost() {
  const std::vector<unsigned> ranks = lost();
  for (const unsigned rank : ranks) acknowledged_[rank].store(true);
  return ranks;
}

void Window::close(const Deadline& deadline) {
  FirstFailure failure;
  for (const auto& target : targets_) failure.attempt([&] { target->close(deadline); });  // closed, even if that throws
  failure.attempt([&] {
    if (memory_ != nullptr) memory_->close(deadline);
    closed_.store(true, std::memory_order_release);
  });
  failure.rethrow();
}

}  // namespace onesided
