#include "shm/transport.h"
#include "python/operations.h"

namespace onesided::python {
namespace {

struct PyConnection {
  std::shared_ptr<Connection> core;

  explicit PyConnection(std::shared_ptr<Connection> connection) : core(std::move(connection)) {}
  PyConnection(PyConnection&&) = default;
  // Its targets hold the connection, and it holds them: the end of the Python object ends both.
  ~PyConnection() {
    if (core == nullptr) return;
    ReleasedGil released;
    try {
      core->close(Deadline::after(5));
    } catch (const Error&) {
      // Operations were cancelled: each Work carries its own error.
    }
  }

  std::shared_ptr<Target> target(const RemoteMemory& remote, const Deadline& deadline) const {
    Blocking blocking;
    return core->target(remote, deadline);
  }
  // The target of a memory is the whole of it: what `remote` describes is bounded here.
  void check(const char* operation, const RemoteMemory& remote, std::uint64_t offset, std::uint64_t nbytes) const {
    check_bounds(operation, core->peer().name(), offset, nbytes, remote.nbytes);
  }
};

struct PyShmTransport {
  std::shared_ptr<shm::ShmTransport> core = std::make_shared<shm::ShmTransport>();

  ~PyShmTransport() {
    ReleasedGil released;
    core = nullptr;
  }
};

constexpr std::uint32_t kDefaultSlots = 256;

}  // namespace

std::string_view bytes_of(nb::handle object, const char* what);

void register_transport(nb::module_& m) {
  nb::class_<PyConnection>(m, "Connection", R"(The way to one peer. Operations take a RemoteMemory of that peer.

Thread-safe. Once lost it stays lost: make a new one.)")
      .def(
          "write",
          [](PyConnection& self, nb::handle source, RemoteMemory& remote, nb::handle offset_bytes, nb::handle signal,
             nb::handle add, bool async_op, nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            const Put put(source, offset_bytes, signal, add, async_op, deadline);
            self.check("write", remote, put.offset, put.buffer.nbytes());
            const auto target = self.target(remote, deadline);
            return put.run_on(target, *target, remote.offset);
          },
          nb::arg("source"), nb::arg("remote"), nb::arg("offset_bytes") = 0, nb::kw_only(),
          nb::arg("signal").none() = nb::none(), nb::arg("add") = 1, nb::arg("async_op") = false,
          nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def write(self, source: object, remote: RemoteMemory, offset_bytes: int = 0, *, signal: int | None "
                  "= None, add: int = 1, async_op: bool = False, timeout_s: float | None = None) -> Work"),
          "Writes all of `source` to `remote` from `offset_bytes` on, then adds `add` to signal `signal` if one is "
          "given.")
      .def(
          "read",
          [](PyConnection& self, nb::handle destination, RemoteMemory& remote, nb::handle offset_bytes, bool async_op,
             nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            const Get get(destination, offset_bytes, async_op, deadline);
            self.check("read", remote, get.offset, get.buffer.nbytes());
            const auto target = self.target(remote, deadline);
            return get.run_on(target, *target, remote.offset);
          },
          nb::arg("destination"), nb::arg("remote"), nb::arg("offset_bytes") = 0, nb::kw_only(),
          nb::arg("async_op") = false, nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def read(self, destination: object, remote: RemoteMemory, offset_bytes: int = 0, *, async_op: bool "
                  "= False, timeout_s: float | None = None) -> Work"),
          "Fills `destination` from `remote`, beginning at `offset_bytes` there.")
      .def(
          "signal",
          [](PyConnection& self, RemoteMemory& remote, nb::handle index, nb::handle add, nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            const SignalOnly signal(index, add, false, deadline);
            const auto target = self.target(remote, deadline);
            return signal.run_on(target, *target);
          },
          nb::arg("remote"), nb::arg("index"), nb::arg("add") = 1, nb::kw_only(),
          nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def signal(self, remote: RemoteMemory, index: int, add: int = 1, *, timeout_s: float | None = None) "
                  "-> Work"),
          "Adds to a signal of `remote` when all earlier writes to it are visible.")
      .def(
          "fetch_add",
          [](PyConnection& self, RemoteMemory& remote, nb::handle offset_bytes, nb::handle add, nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            const std::uint64_t offset = to_u64(offset_bytes, "offset_bytes"), value = to_word(add, "add");
            self.check("fetch_add", remote, offset, sizeof value);
            return self.target(remote, deadline)->fetch_add(remote.offset + offset, value);
          },
          nb::arg("remote"), nb::arg("offset_bytes"), nb::arg("add"), nb::kw_only(),
          nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def fetch_add(self, remote: RemoteMemory, offset_bytes: int, add: int, *, "
                  "timeout_s: float | None = None) -> int"),
          "Adds to an aligned 8-byte word atomically; returns what it held, in [0, 2**64).")
      .def(
          "compare_swap",
          [](PyConnection& self, RemoteMemory& remote, nb::handle offset_bytes, nb::handle expected, nb::handle desired,
             nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            const std::uint64_t offset = to_u64(offset_bytes, "offset_bytes");
            const std::uint64_t from = to_word(expected, "expected"), to = to_word(desired, "desired");
            self.check("compare_swap", remote, offset, sizeof from);
            return self.target(remote, deadline)->compare_swap(remote.offset + offset, from, to);
          },
          nb::arg("remote"), nb::arg("offset_bytes"), nb::arg("expected"), nb::arg("desired"), nb::kw_only(),
          nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def compare_swap(self, remote: RemoteMemory, offset_bytes: int, expected: int, desired: int, *, "
                  "timeout_s: float | None = None) -> int"),
          "Sets an aligned 8-byte word to `desired` if it holds `expected`; returns what it held, in [0, 2**64).")
      .def(
          "flush",
          [](PyConnection& self, RemoteMemory& remote, nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            const auto target = self.target(remote, deadline);
            Blocking blocking;
            target->flush(deadline);
          },
          nb::arg("remote"), nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def flush(self, remote: RemoteMemory, timeout_s: float | None = None) -> None"),
          "Returns when all earlier operations on `remote` are visible there.")
      .def(
          "attach",
          [](PyConnection& self, RemoteMemory& remote, nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            Blocking blocking;
            return self.core->attach(remote, deadline);
          },
          nb::arg("remote"), nb::arg("timeout_s").none() = 30.0,
          nb::sig("def attach(self, remote: RemoteMemory, timeout_s: float | None = 30.0) -> Target"),
          "Opens `remote` for a window. What it returns is only good for Window.")
      .def(
          "close",
          [](PyConnection& self, nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            const auto connection = self.core;
            Blocking blocking;
            connection->close(deadline);
          },
          nb::arg("timeout_s").none() = 5.0, nb::sig("def close(self, timeout_s: float | None = 5.0) -> None"),
          R"(Ends it, after what is under way. Closing twice is legal.

What is still under way when the deadline passes is cancelled, and DeadlineExceeded raised; it is closed all the same.)")
      .def_prop_ro(
          "peer", [](PyConnection& self) { return self.core->peer().name(); }, "The name given to connect().")
      .def_prop_ro(
          "connected", [](PyConnection& self) { return !self.core->peer().lost(); },
          "False once it was closed or the peer is lost.")
      .def(
          "describe", [](PyConnection& self) { return to_dict(self.core->describe()); },
          nb::sig("def describe(self) -> dict[str, str]"), "The peer, how it is reached, and its state.")
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> Connection"))
      .def(
          "__exit__",
          [](PyConnection& self, nb::args) {
            Blocking blocking;
            self.core->close(Deadline::after(5));
          },
          nb::sig("def __exit__(self, *exception: object) -> None"));

  nb::class_<Target>(m, "Target", "A peer's memory, opened for a window.")
      .def(
          "describe", [](Target& self) { return to_dict(self.describe()); },
          nb::sig("def describe(self) -> dict[str, str]"), "The peer, the path to its memory, and its state.");

  nb::class_<PyShmTransport>(m, "ShmTransport",
                             "Shared memory: peers on one host. See onesided.transport.ShmTransport.")
      .def(nb::init<>())
      .def_static(
          "supported", [] { return shm::ShmTransport::unsupported_reason().empty(); },
          nb::sig("def supported() -> bool"), "Whether this system can have one. Cheap, without side effect.")
      .def_static(
          "unsupported_reason",
          []() -> std::optional<std::string> {
            const std::string reason = shm::ShmTransport::unsupported_reason();
            return reason.empty() ? std::nullopt : std::optional(reason);
          },
          nb::sig("def unsupported_reason() -> str | None"), "Why it cannot; None if it can.")
      .def_prop_ro(
          "kind", [](PyShmTransport&) { return "shm"; }, "'shm'.")
      .def_prop_ro(
          "closed", [](PyShmTransport& self) { return self.core->closed(); }, "True once close() was called.")
      .def(
          "allocate",
          [](PyShmTransport& self, nb::handle nbytes, const std::string& access, nb::handle signals, nb::handle slots) {
            const std::uint64_t size = to_u64(nbytes, "nbytes");
            const Access permitted = parse_access(access);
            const std::uint32_t counters = to_u32(signals, "signals"), peers = to_u32(slots, "max_peers");
            const auto transport = self.core;
            Blocking blocking;
            return PyMemory(transport->allocate(size, permitted, counters, peers));
          },
          nb::keep_alive<0, 1>(), nb::arg("nbytes"), nb::arg("access") = "rw", nb::kw_only(), nb::arg("signals") = 0,
          nb::arg("max_peers") = kDefaultSlots,
          nb::sig("def allocate(self, nbytes: int, access: str = 'rw', *, signals: int = 0, max_peers: int = 256) -> "
                  "Memory"),
          R"(New memory that peers map: zeroed, its pages present, gone with its last user however that ends.

`max_peers` bounds how many connections may open it at once. RegistrationError names what there is not enough of.)")
      .def(
          "register_memory",
          [](PyShmTransport& self, nb::handle buffer, const std::string& access, nb::handle signals, nb::handle slots) {
            const Access permitted = parse_access(access);
            const std::uint32_t counters = to_u32(signals, "signals"), peers = to_u32(slots, "max_peers");
            Buffer bytes(buffer, "the memory to register", permits(permitted, Access::Write));
            const bool read_only = bytes.read_only();
            void* const data = bytes.data();
            const Keepalive keep = bytes.keep();
            return PyMemory(self.core->register_memory(data, bytes.nbytes(), permitted, counters, peers, keep), keep,
                            read_only);
          },
          nb::keep_alive<0, 1>(), nb::arg("buffer"), nb::arg("access") = "rw", nb::kw_only(), nb::arg("signals") = 0,
          nb::arg("max_peers") = kDefaultSlots,
          nb::sig("def register_memory(self, buffer: object, access: str = 'rw', *, signals: int = 0, max_peers: int = "
                  "256) -> Memory"),
          R"(Makes a tensor or buffer known to peers, without a copy, and keeps it alive until the Memory is closed.

Memory from allocate() is recognised in any view of it. Any other stays private: peers reach it by cross-memory attach,
where the system permits that (they are told at their first operation if not), and atomics are Unsupported.)")
      .def(
          "bind",
          [](PyShmTransport& self, bool shared) {
            const std::string endpoint = self.core->bind(shared).to_bytes();
            return nb::bytes(endpoint.data(), endpoint.size());
          },
          nb::kw_only(), nb::arg("shared") = false, nb::sig("def bind(self, *, shared: bool = False) -> bytes"),
          "An endpoint to give to a peer for connect(): good for one connection, or for any number if `shared`.")
      .def(
          "connect",
          [](PyShmTransport& self, nb::handle endpoint, const std::string& name, nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            const Endpoint peer = Endpoint::from_bytes(bytes_of(endpoint, "an endpoint"));
            const std::string label = name.empty() ? text("process ", peer.pid) : name;
            const auto transport = self.core;
            Blocking blocking;
            return PyConnection(transport->connect(peer, label, deadline));
          },
          nb::keep_alive<0, 1>(), nb::arg("endpoint"), nb::kw_only(), nb::arg("name") = "",
          nb::arg("timeout_s").none() = 30.0,
          nb::sig(
              "def connect(self, endpoint: bytes, *, name: str = '', timeout_s: float | None = 30.0) -> Connection"),
          R"(Connects to the peer that bound `endpoint`, in any order with its own connect(). `name` is used in messages.

HandleError for bytes that are no endpoint, StaleHandle for one that was used, ConnectionLost if nobody is there any more,
DeadlineExceeded if nobody answers, Unsupported if the peer is on another host.)")
      .def(
          "loop_back",
          [](PyShmTransport& self, PyMemory& memory, const std::string& name) {
            return self.core->loop_back(memory.core, name);
          },
          nb::arg("memory"), nb::arg("name") = "this rank",
          nb::sig("def loop_back(self, memory: Memory, name: str = 'this rank') -> Target"),
          "Opens this process's own memory for a window.")
      .def(
          "close",
          [](PyShmTransport& self, nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            const auto transport = self.core;
            Blocking blocking;
            transport->close(deadline);
          },
          nb::arg("timeout_s").none() = 5.0, nb::sig("def close(self, timeout_s: float | None = 5.0) -> None"),
          "Closes connections, then memories, then itself. Closing twice is legal.")
      .def(
          "describe", [](PyShmTransport& self) { return to_dict(self.core->describe()); },
          nb::sig("def describe(self) -> dict[str, str]"), "Its state and what it holds.");
}

}  // namespace onesided::python
