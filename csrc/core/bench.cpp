#include "core/bench.h"

#include <chrono>
#include <cstring>

namespace onesided {
namespace {

template <class Operation>
double seconds_each(unsigned iterations, Operation&& operation) {
  const auto begin = std::chrono::steady_clock::now();
  for (unsigned i = 0; i < iterations; ++i) operation(i);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  return took.count() / std::max(iterations, 1u);
}

// A side that waits for its peer for longer than this has lost it.
constexpr double kPatience = 30;
// The waiter of a ping-pong spins, so that the signal is timed and not the scheduler.
constexpr std::chrono::seconds kSpinning{1};

}  // namespace

double bench_put(Window& window, unsigned peer, const void* source, std::uint64_t nbytes, const How& how,
                 unsigned iterations) {
  Target& target = window.target("put", peer);
  return seconds_each(iterations, [&](unsigned) {
    target.write(source, nbytes, 0, std::nullopt, how);
    target.flush(Deadline::never());
  });
}

double bench_get(Window& window, unsigned peer, void* destination, std::uint64_t nbytes, const How& how,
                 unsigned iterations) {
  Target& target = window.target("get", peer);
  return seconds_each(iterations, [&](unsigned) { target.read(destination, nbytes, 0, how); });
}

double bench_fetch_add(Window& window, unsigned peer, unsigned iterations) {
  Target& target = window.target("fetch_add", peer);
  return seconds_each(iterations, [&](unsigned) { target.fetch_add(0, 1); });
}

double bench_put_latency(Window& window, unsigned peer, const void* source, std::uint64_t nbytes, const How& how,
                         unsigned iterations, bool first, bool flushes) {
  Target& target = window.target("put", peer);
  if (window.memory() == nullptr) fail(ErrorKind::Unsupported, "a latency needs a window with memory of its own");
  const Memory& memory = *window.memory();
  if (nbytes < 8 || nbytes > memory.nbytes()) fail(ErrorKind::Bounds, "a latency needs 8 bytes or more of the window");
  auto& mine = *reinterpret_cast<std::uint64_t*>(static_cast<char*>(memory.data()) + (nbytes - 8) / 8 * 8);
  auto& last = *reinterpret_cast<std::uint64_t*>(static_cast<char*>(const_cast<void*>(source)) + (nbytes - 8) / 8 * 8);
  return seconds_each(iterations,
                      [&](unsigned round) {
                        const auto send = [&] {
                          last = round + 1;
                          target.write(source, nbytes, 0, std::nullopt, how);
                          if (flushes) target.flush(Deadline::never());
                        };
                        if (first) send();
                        const Deadline patience = Deadline::after(kPatience);
                        for (unsigned spins = 1; std::atomic_ref(mine).load(std::memory_order_acquire) != round + 1;
                             ++spins) {
                          pause_cpu();
                          if (spins % (1u << 20) == 0) {
                            check_interrupt();
                            if (patience.passed())
                              fail(ErrorKind::DeadlineExceeded, "the other side of the ping-pong does not answer");
                          }
                        }
                        if (!first) send();
                      }) /
         2;
}

double bench_signal_latency(Window& window, unsigned peer, const void* source, std::uint64_t nbytes, const How& how,
                            unsigned iterations, bool first, std::uint64_t already) {
  Target& target = window.target("put", peer);
  return seconds_each(iterations,
                      [&](unsigned round) {
                        if (first) target.write(source, nbytes, 0, Signal{0, 1}, how);
                        window.wait_signal(0, already + round + 1, peer, Deadline::after(kPatience), kSpinning);
                        if (!first) target.write(source, nbytes, 0, Signal{0, 1}, how);
                      }) /
         2;
}

double bench_memcpy(void* target, const void* source, std::uint64_t nbytes, unsigned iterations) {
  return seconds_each(iterations, [&](unsigned) {
    std::memcpy(target, source, nbytes);
    asm volatile("" : : "r"(target) : "memory");
  });
}

}  // namespace onesided
