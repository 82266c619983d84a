#include "core/event.h"

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "core/control.h"
#include "tests/support.h"

namespace onesided::tests {
namespace {

constexpr std::chrono::nanoseconds kNoSpin{0};
constexpr std::chrono::nanoseconds kLongSpin{60'000'000'000};

struct Turn {
  std::atomic<std::uint64_t> value{0};
  Event event;

  void set(std::uint64_t now) {
    value.store(now, std::memory_order_seq_cst);
    event.notify();
  }
  bool await(std::uint64_t at_least, const Deadline& deadline, std::chrono::nanoseconds spin) {
    return event.await([&] { return value.load(std::memory_order_seq_cst) >= at_least; }, deadline, spin);
  }
};

double cpu_seconds_of_this_thread() {
  timespec used{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

struct Pressed {};  // Ctrl-C

TEST_CASE("event: no wake-up is lost between two threads") {
  for (const auto spin : {kNoSpin, std::chrono::nanoseconds(2'000), kSpin}) {
    CAPTURE(spin.count());
    Turn ping, pong;
    const unsigned n = rounds(4000);
    unsigned missed = 0;
    side_by_side({[&] {
                    for (unsigned i = 1; i <= n; ++i) {
                      ping.set(i);
                      missed += !pong.await(i, patience(), spin);
                    }
                  },
                  [&] {
                    for (unsigned i = 1; i <= n; ++i) {
                      if (!ping.await(i, patience(), spin)) return;
                      pong.set(i);
                    }
                  }});
    CHECK(missed == 0);
  }
}

TEST_CASE("event: no wake-up is lost with many waiters and many changers on one event") {
  constexpr unsigned kThreads = 6;
  const unsigned n = rounds(800);
  Event event;
  std::atomic<std::uint64_t> arrived{0};
  std::atomic<unsigned> missed{0};
  side_by_side(kThreads, [&](unsigned thread) {
    for (unsigned round = 1; round <= n; ++round) {
      arrived.fetch_add(1, std::memory_order_seq_cst);
      event.notify();
      const auto all = [&] { return arrived.load(std::memory_order_seq_cst) >= std::uint64_t{round} * kThreads; };
      if (!event.await(all, patience(), thread % 2 == 0 ? kNoSpin : std::chrono::nanoseconds(5'000))) ++missed;
    }
  });
  CHECK(missed == 0);
  CHECK(arrived == std::uint64_t{kThreads} * n);
}

TEST_CASE("event: a deadline ends the wait, and not before") {
  Turn turn;
  for (const auto spin : {kNoSpin, kSpin, kLongSpin}) {
    const Stopwatch watch;
    CHECK_FALSE(turn.await(1, Deadline::after(0.03), spin));
    CHECK(watch.seconds() >= 0.03);
    CHECK(watch.seconds() < 5);
    CHECK_FALSE(turn.await(1, Deadline::after(0), spin));
    CHECK_FALSE(turn.await(1, Deadline::after(-1), spin));
  }
  turn.set(1);
  CHECK(turn.await(1, Deadline::after(0), kNoSpin));  // what is true already needs no time
  CHECK(Deadline::after(1e300).is_never());
  CHECK_FALSE(Deadline::never().passed());
  CHECK(Deadline::after(-5).passed());
}

TEST_CASE("event: an interrupt and a failing condition leave the wait, whether it spins or sleeps") {
  Turn turn;
  {
    static std::atomic<unsigned> looked{0};
    InterruptScope scope([] {
      if (++looked >= 3) throw Pressed{};
    });
    for (const auto spin : {kNoSpin, kLongSpin}) {
      looked = 0;
      const Stopwatch watch;
      CHECK_THROWS_AS(turn.await(1, Deadline::never(), spin), Pressed);
      CHECK(watch.seconds() < 10);
    }
    {
      InterruptScope masked(nullptr);
      looked = 0;
      CHECK_FALSE(interruptible());
      CHECK_FALSE(turn.await(1, Deadline::after(0.12), kNoSpin));
      CHECK(looked == 0);
    }
    CHECK(interruptible());
  }
  CHECK_FALSE(interruptible());
  CHECK(raised([&] {
          turn.event.await([]() -> bool { fail(ErrorKind::StaleHandle, "gone"); }, Deadline::never(), kNoSpin);
        }) == "StaleHandle");
  // Those who left are not counted as waiters any more: a plain notify finds none, and the event still works.
  side_by_side({[&] { turn.set(7); }, [&] { CHECK(turn.await(7, patience(), kNoSpin)); }});
}

TEST_CASE("event: who waits uses no CPU") {
  Turn turn;
  for (const bool with_scope : {false, true}) {
    double used = 1;
    const auto wait = [&] {
      const double before = cpu_seconds_of_this_thread();
      turn.await(1, Deadline::after(0.7), kSpin);
      used = cpu_seconds_of_this_thread() - before;
    };
    std::thread([&] {
      if (with_scope) {
        InterruptScope scope([] {});
        wait();
      } else {
        wait();
      }
    }).join();
    CHECK(used < 0.035);  // a twentieth; it spins for 50 microseconds
  }
}

struct Shared {
  Turn ping, pong;
};

TEST_CASE("event: wakes another process through memory that both map") {
  const Fd file(::memfd_create("onesided-test", MFD_CLOEXEC));
  REQUIRE(::ftruncate(file.get(), 4096) == 0);
  void* const page = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  REQUIRE(page != MAP_FAILED);
  auto& shared = *static_cast<Shared*>(page);
  Process other("event", file.get());
  unsigned missed = 0;
  for (unsigned i = 1; i <= 1000; ++i) {
    shared.ping.set(i);
    missed += !shared.pong.await(i, patience(), i % 2 == 0 ? kNoSpin : kSpin);
    if (missed != 0) break;
  }
  CHECK(missed == 0);
  CHECK(other.ended() == 0);
  ::munmap(page, 4096);
}

TEST_CASE("control: counters are compared across the wrap") {
  constexpr std::uint64_t top = UINT64_MAX, half = std::uint64_t{1} << 63;
  CHECK(reached(0, 0));
  CHECK(reached(5, 4));
  CHECK_FALSE(reached(4, 5));
  CHECK(reached(0, top));
  CHECK(reached(3, top - 3));
  CHECK_FALSE(reached(top, 0));
  CHECK_FALSE(reached(top - 3, 3));
  CHECK(reached((std::uint64_t{1} << 32) + 1, UINT32_MAX));
  CHECK(reached(half - 1, 0));
  CHECK_FALSE(reached(half, 0));
}

TEST_CASE("control: its parts do not overlap") {
  for (const std::uint32_t slots : {0u, 1u, 7u, 300u}) {
    for (const std::uint32_t signals : {0u, 1u, 5u, 1000u}) {
      std::vector<char> bytes(Control::size_for(slots, signals) + 64);
      char* const base = bytes.data() + 64 - reinterpret_cast<std::uintptr_t>(bytes.data()) % 64;
      const Control control(base, slots, signals);
      char* end = base + sizeof(ControlHeader);
      const auto follows = [&](void* part, std::size_t nbytes) {
        const bool after = static_cast<char*>(part) >= end;
        end = static_cast<char*>(part) + nbytes;
        return after;
      };
      CHECK(follows(&control.event(), sizeof(Event)));
      for (std::uint32_t i = 0; i < slots; ++i) CHECK(follows(&control.slot(i), sizeof(Slot)));
      for (std::uint32_t i = 0; i < signals; ++i) CHECK(follows(&control.signal(i), sizeof(std::uint64_t)));
      CHECK(end <= base + Control::size_for(slots, signals));
    }
  }
}

}  // namespace

// The other side of the ping-pong between processes; the memory is descriptor 3.
int event_role() {
  void* const page = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, 3, 0);
  if (page == MAP_FAILED) return 3;
  auto& shared = *static_cast<Shared*>(page);
  for (unsigned i = 1; i <= 1000; ++i) {
    if (!shared.ping.await(i, patience(), i % 3 == 0 ? kNoSpin : kSpin)) return 4;
    shared.pong.set(i);
  }
  return 0;
}

}  // namespace onesided::tests
