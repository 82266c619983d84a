// The words beside a memory: its state, who is in the middle of an operation on it, and its signals.
//
// They lie in shared memory of their own, never in the user's:
//
//   first 64 KiB      ControlHeader        written by the owner only; peers map it read-only
//   then              Event                where the owner sleeps until a signal or a loss
//   64 bytes further  Slot[slots]          one a peer, on a cache line of its own
//   then              uint64[signals]      the counters
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/event.h"

namespace onesided {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

struct ControlHeader {
  static constexpr std::uint64_t kMagic = 0x314C5254434E4FULL;  // "ONCTRL1"

  std::uint64_t magic;
  std::uint32_t slots;
  std::uint32_t signals;
  // Written by the owner. Closed: no operation may begin. Revoked: none of those whose slot is in `revoked`.
  static constexpr std::uint32_t kClosed = 1, kRevoked = 2;
  std::atomic<std::uint32_t> closed;
  std::atomic<std::uint64_t> revoked[1024];  // a bit for each slot

  bool is_revoked(std::uint32_t slot) const {
    return (revoked[slot / 64].load(std::memory_order_seq_cst) >> slot % 64 & 1) != 0;
  }
  void set_revoked(std::uint32_t slot, bool value) {
    const std::uint64_t bit = std::uint64_t{1} << slot % 64;
    if (value) {
      revoked[slot / 64].fetch_or(bit, std::memory_order_seq_cst);
    } else {
      revoked[slot / 64].fetch_and(~bit, std::memory_order_seq_cst);
    }
  }
};

// How many operations a peer has under way. An operation first counts itself, then looks whether the memory is closed;
// the owner first closes, then waits until nobody counts (Dekker, so both are sequentially consistent). A slot belongs to
// one connection at a time, and is cleared by the owner when that connection ends.
struct alignas(64) Slot {
  std::atomic<std::uint32_t> by_owner_thread;  // see OwnedBy
  std::atomic<std::uint32_t> by_others;

  bool busy() const {
    return by_owner_thread.load(std::memory_order_seq_cst) != 0 || by_others.load(std::memory_order_seq_cst) != 0;
  }
  void clear() {
    by_owner_thread.store(0, std::memory_order_seq_cst);
    by_others.store(0, std::memory_order_seq_cst);
  }
};

// Where each part lies, and the memory itself once it is mapped. Does not own the mapping.
class Control {
 public:
  // What peers cannot write to: whole pages on every system, since the largest page is 64 KiB (aarch64).
  static constexpr std::size_t kOwnersBytes = 65536;
  static constexpr std::uint32_t kMostSignals = 1u << 20;
  static constexpr std::uint32_t kMostSlots = 1u << 16;
  static_assert(sizeof(ControlHeader) <= kOwnersBytes && kMostSlots == 64 * 1024);

  static std::size_t size_for(std::uint32_t slots, std::uint32_t signals) {
    return kOwnersBytes + sizeof(Slot) + slots * sizeof(Slot) + std::size_t{signals} * sizeof(std::uint64_t);
  }

  Control() = default;
  Control(void* base, std::uint32_t slots, std::uint32_t signals)
      : base_(static_cast<char*>(base)), slots_(slots), signals_(signals) {}

  explicit operator bool() const { return base_ != nullptr; }
  ControlHeader& header() const { return *reinterpret_cast<ControlHeader*>(base_); }
  Event& event() const { return *reinterpret_cast<Event*>(base_ + kOwnersBytes); }
  Slot& slot(std::uint32_t index) const {
    return *reinterpret_cast<Slot*>(base_ + kOwnersBytes + sizeof(Slot) + index * sizeof(Slot));
  }
  std::atomic<std::uint64_t>& signal(std::uint32_t index) const {
    return *reinterpret_cast<std::atomic<std::uint64_t>*>(base_ + kOwnersBytes + sizeof(Slot) + slots_ * sizeof(Slot) +
                                                          std::size_t{index} * sizeof(std::uint64_t));
  }
  std::uint32_t slots() const { return slots_; }
  std::uint32_t signals() const { return signals_; }

 private:
  char* base_ = nullptr;
  std::uint32_t slots_ = 0;
  std::uint32_t signals_ = 0;
};

// Counters may wrap: `value` has reached `at_least` if it is less than 2^63 steps past it.
inline bool reached(std::uint64_t value, std::uint64_t at_least) {
  return static_cast<std::int64_t>(value - at_least) >= 0;
}

}  // namespace onesided
