// The loops that `onesided bench` times, in C++: what an operation costs without Python around it.
#pragma once

#include <cstdint>

#include "core/window.h"

namespace onesided {

// Each returns seconds for one operation, the mean over `iterations`. `how` says what is known of the buffer's memory.
double bench_put(Window& window, unsigned peer, const void* source, std::uint64_t nbytes, const How& how,
                 unsigned iterations);
double bench_get(Window& window, unsigned peer, void* destination, std::uint64_t nbytes, const How& how,
                 unsigned iterations);
double bench_fetch_add(Window& window, unsigned peer, unsigned iterations);

// Both sides of a ping-pong run at the same time with the same arguments, one of them with `first`. Half a round trip.
// put_latency watches the last whole word of the window's own memory, which must be zero, and flushes after each put or not;
// signal_latency waits for signal 0, which stands at `already` on both sides.
double bench_put_latency(Window& window, unsigned peer, const void* source, std::uint64_t nbytes, const How& how,
                         unsigned iterations, bool first, bool flushes);
double bench_signal_latency(Window& window, unsigned peer, const void* source, std::uint64_t nbytes, const How& how,
                            unsigned iterations, bool first, std::uint64_t already);

// One-thread memcpy, the limit.
double bench_memcpy(void* target, const void* source, std::uint64_t nbytes, unsigned iterations);

}  // namespace onesided
