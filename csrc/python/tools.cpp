#include <nanobind/stl/pair.h>

#include "core/bench.h"
#include "core/copy.h"
#include "python/operations.h"
#include "shm/hub.h"

namespace onesided::python {

std::shared_ptr<Window> window_of(nb::handle window);

namespace {

unsigned to_iterations(nb::handle value) {
  return to_u32(value, "iterations");
}

// As an operation of Python would tell it of its buffer.
How known_of(const std::shared_ptr<Window>& window, const char* operation, unsigned peer, const Buffer& buffer) {
  std::optional<How> better;
  std::shared_ptr<Window> alive;
  return identified(How{}, buffer.object(), buffer.nbytes(), window, window->target(operation, peer), better, alive);
}

void register_bench(nb::module_& m) {
  m.def(
      "bench_put",
      [](nb::handle window, unsigned peer, nb::handle source, nb::handle iterations) {
        const auto core = window_of(window);
        Buffer buffer(source, kSource, false);
        const unsigned rounds = to_iterations(iterations);
        const How how = known_of(core, "put", peer, buffer);
        Blocking blocking;
        return bench_put(*core, peer, buffer.data(), buffer.nbytes(), how, rounds);
      },
      nb::sig("def bench_put(window: Window, peer: int, source: object, iterations: int) -> float"),
      "Seconds for a put and a flush, looped in C++.");
  m.def(
      "bench_get",
      [](nb::handle window, unsigned peer, nb::handle destination, nb::handle iterations) {
        const auto core = window_of(window);
        Buffer buffer(destination, kDestination, true);
        const unsigned rounds = to_iterations(iterations);
        const How how = known_of(core, "get", peer, buffer);
        Blocking blocking;
        return bench_get(*core, peer, buffer.data(), buffer.nbytes(), how, rounds);
      },
      nb::sig("def bench_get(window: Window, peer: int, destination: object, iterations: int) -> float"),
      "Seconds for a get, looped in C++.");
  m.def(
      "bench_fetch_add",
      [](nb::handle window, unsigned peer, nb::handle iterations) {
        const auto core = window_of(window);
        const unsigned rounds = to_iterations(iterations);
        Blocking blocking;
        return bench_fetch_add(*core, peer, rounds);
      },
      nb::sig("def bench_fetch_add(window: Window, peer: int, iterations: int) -> float"),
      "Seconds for a fetch_add on the first word, looped in C++.");
  m.def(
      "bench_put_latency",
      [](nb::handle window, unsigned peer, nb::handle source, nb::handle iterations, bool first, bool flushes) {
        const auto core = window_of(window);
        Buffer buffer(source, kSource, true);
        const unsigned rounds = to_iterations(iterations);
        const How how = known_of(core, "put", peer, buffer);
        Blocking blocking;
        return bench_put_latency(*core, peer, buffer.data(), buffer.nbytes(), how, rounds, first, flushes);
      },
      nb::sig("def bench_put_latency(window: Window, peer: int, source: object, iterations: int, first: bool, flushes: "
              "bool) -> float"),
      "Half a round trip of puts, each flushed or not, in seconds; both ranks call it, one with `first`, their memory "
      "zeroed.");
  m.def(
      "bench_signal_latency",
      [](nb::handle window, unsigned peer, nb::handle source, nb::handle iterations, bool first, nb::handle already) {
        const auto core = window_of(window);
        Buffer buffer(source, kSource, false);
        const unsigned rounds = to_iterations(iterations);
        const std::uint64_t count = to_u64(already, "already");
        const How how = known_of(core, "put", peer, buffer);
        Blocking blocking;
        return bench_signal_latency(*core, peer, buffer.data(), buffer.nbytes(), how, rounds, first, count);
      },
      nb::sig("def bench_signal_latency(window: Window, peer: int, source: object, iterations: int, first: bool, "
              "already: int) -> float"),
      "Half a round trip of puts with signal 0, which stands at `already`, that is waited for; in seconds.");
  m.def(
      "bench_memcpy",
      [](nb::handle target, nb::handle source, nb::handle iterations) {
        Buffer to(target, kDestination, true), from(source, kSource, false);
        if (to.nbytes() != from.nbytes())
          fail(ErrorKind::Bounds, "memcpy of ", from.nbytes(), " bytes into ", to.nbytes());
        const unsigned rounds = to_iterations(iterations);
        Blocking blocking;
        return bench_memcpy(to.data(), from.data(), from.nbytes(), rounds);
      },
      nb::sig("def bench_memcpy(target: object, source: object, iterations: int) -> float"),
      "Seconds for a one-thread memcpy of buffers of one size: the limit that a put is compared with.");
}

}  // namespace

void register_tools(nb::module_& m) {
  m.def(
      "host_token",
      [] {
        const Token token = shm::host_token();
        return nb::bytes(reinterpret_cast<const char*>(token.data()), token.size());
      },
      nb::sig("def host_token() -> bytes"), "16 bytes that processes have in common which can share memory.");
  m.def(
      "stats_snapshot",
      [] {
        nb::list rows;
        for (const StatsRow& row : stats_snapshot()) {
          nb::dict counts;
          for (const auto& [name, value] : row.counts) counts[name.c_str()] = value;
          rows.append(nb::make_tuple(row.transport, row.peer, counts));
        }
        return rows;
      },
      nb::sig("def stats_snapshot() -> list[tuple[str, str, dict[str, int]]]"),
      "All counters: (transport, peer, counts). See onesided.stats.");
  m.def(
      "copy_measurements",
      [] {
        nb::list rows;
        for (const CopyMeasurement& row : copy_measurements()) {
          nb::dict entry;
          entry["sizes"] = row.sizes;
          entry["method"] = row.method;
          entry["gbps"] = row.gigabytes_per_second;
          entry["chosen"] = row.chosen;
          rows.append(entry);
        }
        return rows;
      },
      nb::sig("def copy_measurements() -> list[dict[str, object]]"),
      "How fast each way of copying was lately on this machine (GB/s, 1e9 bytes), and which is in use.");
  register_bench(m);
}

}  // namespace onesided::python
