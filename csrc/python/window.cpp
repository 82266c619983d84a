#include <nanobind/stl/vector.h>

#include <cmath>

#include "core/window.h"
#include "python/plan.h"

namespace onesided::python {
namespace {

// The Python object. close() lets go of the core; an operation in another thread keeps its own hold on it meanwhile. All
// access to `core` is under the GIL.
struct PyWindow {
  std::string name;
  std::shared_ptr<Window> core;

  // An operation that lets go of the GIL copies the pointer first.
  const std::shared_ptr<Window>& open(const char* operation) const {
    if (core == nullptr || core->closed()) fail(ErrorKind::StaleHandle, operation, ": window '", name, "' is closed");
    return core;
  }

  std::uint64_t atomic(nb::handle peer, const ReadModifyWrite& arguments) const {
    const std::int64_t rank = to_rank(peer);
    const char* const name = arguments.what.name();
    const auto& window = open(name);
    return arguments.run_on(window, window->target(name, rank));
  }
};

std::chrono::nanoseconds to_spin(nb::handle spin_s) {
  const double seconds = PyFloat_AsDouble(spin_s.ptr());
  if (seconds == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    throw nb::type_error(text("spin_s must be a number of seconds, not ", type_of(spin_s)).c_str());
  }
  if (!(seconds >= 0)) fail(ErrorKind::Bounds, "spin_s must be at least 0, not ", seconds);
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, 3600.0) * 1e9));
}

std::vector<Wanted> to_wanted(nb::handle signals) {
  std::vector<Wanted> wanted;
  for (const nb::handle pair : to_tuple(signals, "signals must be pairs (index, at_least)")) {
    if (!PyTuple_Check(pair.ptr()) || PyTuple_GET_SIZE(pair.ptr()) != 2) {
      throw nb::type_error(text("signals must be pairs (index, at_least), not ", type_of(pair)).c_str());
    }
    const std::uint32_t index = to_u32(PyTuple_GET_ITEM(pair.ptr(), 0), "signal index");
    wanted.push_back({index, to_u64(PyTuple_GET_ITEM(pair.ptr(), 1), "at_least")});
  }
  return wanted;
}

template <class T, class Convert>
std::optional<T> optionally(nb::handle value, Convert&& convert) {
  return value.is_none() ? std::nullopt : std::optional<T>(convert(value));
}

}  // namespace

std::shared_ptr<Window> window_of(nb::handle window) {
  return nb::cast<PyWindow&>(window).open("bench");
}

void register_window(nb::module_& m) {
  nb::class_<PyWindow>(m, "Window", nb::is_weak_referenceable(), "The data path of onesided.windows.Window, which see.")
      .def(
          "__init__",
          [](PyWindow* self, std::string name, PyMemory* memory, std::vector<std::shared_ptr<Target>> targets,
             std::optional<unsigned> rank) {
            auto core =
                std::make_shared<Window>(name, memory == nullptr ? nullptr : memory->core, std::move(targets), rank);
            new (self) PyWindow{std::move(name), std::move(core)};
          },
          nb::arg("name"), nb::arg("memory").none(), nb::arg("targets"), nb::arg("rank").none() = nb::none(),
          nb::sig("def __init__(self, name: str, memory: Memory | None, targets: list[Target], rank: int | None = "
                  "None) -> None"))
      .def(
          "put",
          [](PyWindow& self, nb::handle source, nb::handle peer, nb::handle offset_bytes, nb::handle signal,
             nb::handle add, nb::handle async_op, nb::handle timeout_s) {
            const std::int64_t rank = to_rank(peer);
            const Put put(source, offset_bytes, signal, add, to_flag(async_op, "async_op"), to_deadline(timeout_s));
            const auto& window = self.open("put");
            return put.run_on(window, window->target("put", rank));
          },
          nb::arg("source").none(), nb::arg("peer").none(), nb::arg("offset_bytes").none() = 0, nb::kw_only(),
          nb::arg("signal").none() = nb::none(), nb::arg("add").none() = 1, nb::arg("async_op").none() = false,
          nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def put(self, source: object, peer: int, offset_bytes: int = 0, *, signal: int | None = None, add: "
                  "int = 1, async_op: bool = False, timeout_s: float | None = None) -> Work"),
          R"(Writes all bytes of `source` into the window of rank `peer`, from `offset_bytes` on.

`source` is any contiguous tensor, array or buffer; it need not be shared or registered. Zero bytes are legal. With
`signal`, adds `add` to that signal of `peer` when this and every earlier put from here to `peer` on this window is visible
there. Operations on one peer are otherwise unordered: flush() and fence() put those that follow behind those before.

Without `async_op` the source is free when this returns. On shm the bytes are then there, too; on rdma a put of up to 4 KiB
may still be on its way: flush() or a signal makes it visible. With `async_op`, the source must not be changed until the
returned Work is done, which means complete at both ends. An asynchronous one runs beside the caller, in issue order per peer.

Raises BoundsError, LayoutError, RemoteAccessError (the window is read-only), StaleHandle (closed here or at the peer),
ConnectionLost, DeadlineExceeded; the source is not read after that. After an error the target's bytes in the range of this
put are undefined. Others are unchanged; but on rdma all that is under way to that peer ends with an operation that fails or
is cancelled. What nobody else tells of then, such as a small put that had returned, the next flush() or signal does.)")
      .def(
          "get",
          [](PyWindow& self, nb::handle destination, nb::handle peer, nb::handle offset_bytes, nb::handle async_op,
             nb::handle timeout_s) {
            const std::int64_t rank = to_rank(peer);
            const Get get(destination, offset_bytes, to_flag(async_op, "async_op"), to_deadline(timeout_s));
            const auto& window = self.open("get");
            return get.run_on(window, window->target("get", rank));
          },
          nb::arg("destination").none(), nb::arg("peer").none(), nb::arg("offset_bytes").none() = 0, nb::kw_only(),
          nb::arg("async_op").none() = false, nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def get(self, destination: object, peer: int, offset_bytes: int = 0, *, async_op: bool = False, "
                  "timeout_s: float | None = None) -> Work"),
          R"(Fills `destination` with bytes of the window of rank `peer`, from `offset_bytes` on. Errors as for put().

A get is not ordered against a put of somebody else: wait for a signal that says that the bytes are there.)")
      .def(
          "put_many",
          [](PyWindow& self, nb::handle pieces, nb::handle peer, nb::handle signal, nb::handle add, nb::handle async_op,
             nb::handle timeout_s) {
            const std::int64_t rank = to_rank(peer);
            const std::optional<Signal> then = to_signal(signal, add);
            const bool later = to_flag(async_op, "async_op");
            const Deadline deadline = to_deadline(timeout_s);
            Pieces all(pieces, later);
            const auto& window = self.open("put_many");
            Target& target = window->target("put_many", rank);
            return all.run_on(
                window, target, false, later, deadline,
                [&](std::span<const Piece> parts, const How& how) { return target.write_many(parts, then, how); });
          },
          nb::arg("pieces").none(), nb::arg("peer").none(), nb::kw_only(), nb::arg("signal").none() = nb::none(),
          nb::arg("add").none() = 1, nb::arg("async_op").none() = false, nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def put_many(self, pieces: Plan | collections.abc.Iterable[tuple[object, int]], peer: int, *, "
                  "signal: int | None = "
                  "None, add: int = 1, async_op: bool = False, timeout_s: float | None = None) -> Work"),
          R"(Writes many pieces in one call: a Plan, or pairs of a buffer and its offset in bytes in the window of rank `peer`.

All are checked before any byte moves. They are unordered among each other; `signal` comes after all of them, and of all
puts before. Otherwise as put().)")
      .def(
          "get_many",
          [](PyWindow& self, nb::handle pieces, nb::handle peer, nb::handle async_op, nb::handle timeout_s) {
            const std::int64_t rank = to_rank(peer);
            const bool later = to_flag(async_op, "async_op");
            const Deadline deadline = to_deadline(timeout_s);
            Pieces all(pieces, later);
            const auto& window = self.open("get_many");
            Target& target = window->target("get_many", rank);
            return all.run_on(window, target, true, later, deadline, [&](std::span<const Piece> parts, const How& how) {
              return target.read_many(parts, how);
            });
          },
          nb::arg("pieces").none(), nb::arg("peer").none(), nb::kw_only(), nb::arg("async_op").none() = false,
          nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def get_many(self, pieces: Plan | collections.abc.Iterable[tuple[object, int]], peer: int, *, "
                  "async_op: bool = "
                  "False, timeout_s: float | None = None) -> Work"),
          "Fills many pieces in one call, each from its offset in bytes in the window of rank `peer`. Otherwise as "
          "get().")
      .def(
          "signal",
          [](PyWindow& self, nb::handle peer, nb::handle index, nb::handle add, nb::handle async_op,
             nb::handle timeout_s) {
            const std::int64_t rank = to_rank(peer);
            const SignalOnly signal(index, add, to_flag(async_op, "async_op"), to_deadline(timeout_s));
            const auto& window = self.open("signal");
            return signal.run_on(window, window->target("signal", rank));
          },
          nb::arg("peer").none(), nb::arg("index").none(), nb::arg("add").none() = 1, nb::kw_only(),
          nb::arg("async_op").none() = false, nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def signal(self, peer: int, index: int, add: int = 1, *, async_op: bool = False, timeout_s: float | "
                  "None = None) -> Work"),
          R"(Adds `add` to signal `index` of rank `peer`, when every earlier put from here to `peer` on this window is visible.

Counters have 64 bits and may wrap; a negative `add` subtracts.)")
      .def(
          "wait_signal",
          [](PyWindow& self, nb::handle index, nb::handle at_least, nb::handle source, nb::handle timeout_s,
             nb::handle spin_s) {
            const auto window = self.open("wait_signal");
            const std::uint32_t signal = to_u32(index, "signal index");
            const auto count =
                optionally<std::uint64_t>(at_least, [](nb::handle value) { return to_u64(value, "at_least"); });
            const auto from = optionally<std::int64_t>(source, to_rank);
            const Deadline deadline = to_deadline(timeout_s);
            const auto spin = to_spin(spin_s);
            Blocking blocking;
            return window->wait_signal(signal, count, from, deadline, spin);
          },
          nb::arg("index").none(), nb::arg("at_least").none() = nb::none(), nb::kw_only(),
          nb::arg("source").none() = nb::none(), nb::arg("timeout_s").none() = nb::none(),
          nb::arg("spin_s").none() = 50e-6,
          nb::sig("def wait_signal(self, index: int, at_least: int | None = None, *, source: int | None = None, "
                  "timeout_s: float | None = None, spin_s: float = 5e-05) -> int"),
          R"(Waits until signal `index` of this rank has reached `at_least`; returns its count.

Without `at_least`, consumes one: each such call on an index waits for one more than all earlier ones. Consuming is done
against a number kept here; the counter itself is never written by its owner. Comparison is wrap-safe: a count has reached
`at_least` if it is less than 2**63 steps past it.

With `source`, only that rank's loss ends the wait. Without, the signal may come from any rank, so the loss of any raises
ConnectionLost, except of those in acknowledge_lost(). Spins for `spin_s`, then sleeps without using the CPU. Raises
DeadlineExceeded, ConnectionLost, StaleHandle if the window is closed meanwhile, Unsupported on an attached window.)")
      .def(
          "wait_any",
          [](PyWindow& self, nb::handle signals, nb::handle source, nb::handle timeout_s, nb::handle spin_s) {
            const std::vector<Wanted> wanted = to_wanted(signals);
            const auto from = optionally<std::int64_t>(source, to_rank);
            const Deadline deadline = to_deadline(timeout_s);
            const auto spin = to_spin(spin_s);
            const auto window = self.open("wait_any");
            Blocking blocking;
            return window->wait_any(wanted, from, deadline, spin);
          },
          nb::arg("signals").none(), nb::kw_only(), nb::arg("source").none() = nb::none(),
          nb::arg("timeout_s").none() = nb::none(), nb::arg("spin_s").none() = 50e-6,
          nb::sig("def wait_any(self, signals: collections.abc.Iterable[tuple[int, int]], *, source: int | None = "
                  "None, timeout_s: float "
                  "| None = None, spin_s: float = 5e-05) -> int"),
          R"(Waits until one of several signals of this rank has reached its count; returns its place among them.

`signals`: pairs of an index and a count. If several have come, it is the first in order. Consumes nothing. Otherwise as
wait_signal().)")
      .def(
          "signal_value",
          [](PyWindow& self, nb::handle index) {
            const std::uint32_t signal = to_u32(index, "signal index");
            return self.open("signal_value")->signal_value(signal);
          },
          nb::arg("index").none(), nb::sig("def signal_value(self, index: int) -> int"),
          "The count of signal `index` of this rank now. What its signals announced is visible.")
      .def(
          "test_signal",
          [](PyWindow& self, nb::handle index, nb::handle at_least) {
            const std::uint32_t signal = to_u32(index, "signal index");
            const std::uint64_t count = to_u64(at_least, "at_least");
            return reached(self.open("test_signal")->signal_value(signal), count);
          },
          nb::arg("index").none(), nb::arg("at_least").none(),
          nb::sig("def test_signal(self, index: int, at_least: int) -> bool"),
          "True if signal `index` of this rank has reached `at_least`. Never blocks.")
      .def(
          "fetch_add",
          [](PyWindow& self, nb::handle peer, nb::handle offset_bytes, nb::handle add, nb::handle word_nbytes,
             nb::handle timeout_s) {
            return self.atomic(peer, {Atomic::Kind::FetchAdd, offset_bytes, add, nb::none(), word_nbytes, timeout_s});
          },
          nb::arg("peer").none(), nb::arg("offset_bytes").none(), nb::arg("add").none(), nb::kw_only(),
          nb::arg("word_nbytes").none() = 8, nb::arg("timeout_s").none() = nb::none(),
          nb::sig(
              "def fetch_add(self, peer: int, offset_bytes: int, add: int, *, word_nbytes: int = 8, timeout_s: float "
              "| None = None) -> int"),
          R"(Adds to the aligned word at `offset_bytes` of rank `peer`, atomically against all other atomics on it.

Returns what it held, as an unsigned number. Words have 8 bytes, or 4 with `word_nbytes`; over RDMA the aligned 8 bytes around
one of 4 must be within the window. `peer` may be this rank: its own words go the same way, which a plain `array[i] += 1` does
not. Unsupported on a window over a private tensor.)")
      .def(
          "compare_swap",
          [](PyWindow& self, nb::handle peer, nb::handle offset_bytes, nb::handle expected, nb::handle desired,
             nb::handle word_nbytes, nb::handle timeout_s) {
            return self.atomic(peer,
                               {Atomic::Kind::CompareSwap, offset_bytes, desired, expected, word_nbytes, timeout_s});
          },
          nb::arg("peer").none(), nb::arg("offset_bytes").none(), nb::arg("expected").none(), nb::arg("desired").none(),
          nb::kw_only(), nb::arg("word_nbytes").none() = 8, nb::arg("timeout_s").none() = nb::none(),
          nb::sig(
              "def compare_swap(self, peer: int, offset_bytes: int, expected: int, desired: int, *, word_nbytes: int "
              "= 8, timeout_s: float | None = None) -> int"),
          "Sets the aligned word to `desired` if it holds `expected`; returns what it held. Otherwise as fetch_add().")
      .def(
          "swap",
          [](PyWindow& self, nb::handle peer, nb::handle offset_bytes, nb::handle value, nb::handle word_nbytes,
             nb::handle timeout_s) {
            return self.atomic(peer, {Atomic::Kind::Swap, offset_bytes, value, nb::none(), word_nbytes, timeout_s});
          },
          nb::arg("peer").none(), nb::arg("offset_bytes").none(), nb::arg("value").none(), nb::kw_only(),
          nb::arg("word_nbytes").none() = 8, nb::arg("timeout_s").none() = nb::none(),
          nb::sig(
              "def swap(self, peer: int, offset_bytes: int, value: int, *, word_nbytes: int = 8, timeout_s: float | "
              "None = None) -> int"),
          "Sets the aligned word to `value`; returns what it held. Otherwise as fetch_add().")
      .def(
          "atomic_load",
          [](PyWindow& self, nb::handle offset_bytes, nb::handle word_nbytes) {
            const std::uint64_t offset = to_u64(offset_bytes, "offset_bytes");
            const unsigned size = to_word_nbytes(word_nbytes);
            return self.open("atomic_load")->atomic_load(offset, size);
          },
          nb::arg("offset_bytes").none(), nb::kw_only(), nb::arg("word_nbytes").none() = 8,
          nb::sig("def atomic_load(self, offset_bytes: int, *, word_nbytes: int = 8) -> int"),
          R"(What an aligned word of this rank's memory holds now, never torn.

What its value announces is visible: reads after this see what was put before the word was set by fetch_add, swap or
compare_swap behind a flush. Unsupported on an attached window.)")
      .def(
          "flush",
          [](PyWindow& self, nb::handle peer, nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            const std::optional<std::int64_t> one = optionally<std::int64_t>(peer, to_rank);
            if (one) {
              const auto& window = self.open("flush");
              BlockingIfItWaits<Window> blocking(window);
              return window->flush(*one, deadline);
            }
            const auto window = self.open("flush");
            Blocking blocking;
            window->flush_all(deadline);
          },
          nb::arg("peer").none() = nb::none(), nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def flush(self, peer: int | None = None, timeout_s: float | None = None) -> None"),
          R"(Returns when all earlier operations to `peer`, or to every rank that there were any to, are visible there to all.

The target need not call anything. Raises the first failure of an earlier operation that nobody was told of, and
ConnectionLost for a rank that is lost: every time, without `peer` until acknowledge_lost(), which says that the program
knows. When the deadline passes, what is left is cancelled and DeadlineExceeded is raised; the next flush tells what was.)")
      .def(
          "fence",
          [](PyWindow& self, nb::handle peer) {
            const std::int64_t rank = to_rank(peer);
            self.open("fence")->target("fence", rank).fence();
          },
          nb::arg("peer").none(), nb::sig("def fence(self, peer: int) -> None"),
          R"(Orders without waiting: what is issued to `peer` from here on takes effect after all that was issued before.

That is, whoever sees the effect of a later operation sees those of the earlier ones, and a put behind it does not change what a
get before it reads. The next operation may wait: on shm for asynchronous ones that are under way, over RDMA for a round trip. If
an earlier one has failed, and nobody was told, the next raises that and is not carried out.)")
      .def(
          "lost", [](PyWindow& self) { return self.open("lost")->lost(); }, nb::sig("def lost(self) -> list[int]"),
          "The ranks that are lost, in order.")
      .def(
          "acknowledge_lost", [](PyWindow& self) { return self.open("acknowledge_lost")->acknowledge_lost(); },
          nb::sig("def acknowledge_lost(self) -> list[int]"),
          R"(The ranks that are lost; from here on, waits without `source` and flushes without `peer` go on without them.

After MPI's MPIX_Comm_failure_ack (User Level Failure Mitigation): a wait for anybody cannot know whether the lost rank was
the one, so it fails once, and goes on when told to.)")
      .def(
          "close",
          [](PyWindow& self, nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            auto window = self.core;
            if (window == nullptr) return;
            {
              Blocking blocking;
              window->close(deadline);
              window = nullptr;
            }
            self.core = nullptr;
            release_kept_objects();
          },
          nb::arg("timeout_s").none() = 5.0, nb::sig("def close(self, timeout_s: float | None = 5.0) -> None"),
          "Ends access to this rank's memory; onesided.windows.Window.close says more.")
      .def_prop_ro(
          "closed", [](PyWindow& self) { return self.core == nullptr || self.core->closed(); },
          "True once close() has ended.")
      .def_prop_ro(
          "name", [](PyWindow& self) { return self.name; }, "The name of the window, the same on all ranks.")
      .def_prop_ro(
          "size", [](PyWindow& self) { return self.open("size")->size(); }, "The number of ranks.")
      .def_prop_ro(
          "rank", [](PyWindow& self) { return self.open("rank")->rank(); }, nb::sig("def rank(self) -> int | None"),
          "This process's rank; None on an attached window.");
}

}  // namespace onesided::python
