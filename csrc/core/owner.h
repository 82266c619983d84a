// Counting without locked instructions on the thread that does most of it.
#pragma once

#include <atomic>

namespace onesided {

// Remembers the first thread that asked. What only that thread writes needs no read-modify-write; all others use a second,
// shared word. A locked add costs 8 ns, a third of a small put.
class OwnedBy {
 public:
  bool is_me() {
    const void* const me = name();
    const void* owner = owner_.load(std::memory_order_relaxed);
    if (owner == nullptr && owner_.compare_exchange_strong(owner, me, std::memory_order_relaxed)) return true;
    return owner == me;
  }

 private:
  // An address that is a thread's own is its name. One that is made after another has ended may take over its name with its
  // words. The thread pointer is such an address, and at hand; that of a variable takes a call from within a library.
  static const void* name() {
#if defined(__GNUC__) && __GNUC__ >= 11 && !defined(__clang__) || defined(__clang__) && __clang_major__ >= 14
    return __builtin_thread_pointer();
#else
    static thread_local char here = 0;
    return &here;
#endif
  }
  std::atomic<const void*> owner_{nullptr};
};

}  // namespace onesided
