#include "shm/transport.h"

#include <nanobind/stl/vector.h>

#include "core/mixed.h"
#include "python/operations.h"
#include "verbs/transport.h"

namespace onesided::python {
namespace {

const RemoteMemory& to_remote(nb::handle remote) {
  return to_instance<RemoteMemory>(remote, "remote", "RemoteMemory");
}

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
  std::uint64_t atomic(nb::handle of, const ReadModifyWrite& arguments) const {
    const RemoteMemory& remote = to_remote(of);
    check(arguments.what.name(), remote, arguments.what.offset, arguments.what.word_nbytes);
    const auto there = target(remote, arguments.deadline);
    return arguments.run_on(there, *there, remote.offset);
  }
};

struct PyTransport {
  std::shared_ptr<Transport> core;

  explicit PyTransport(std::shared_ptr<Transport> transport) : core(std::move(transport)) {}
  PyTransport(PyTransport&&) = default;
  ~PyTransport() {
    if (core == nullptr) return;
    ReleasedGil released;
    core = nullptr;
  }
};
struct PyShmTransport : PyTransport {
  PyShmTransport() : PyTransport(std::make_shared<shm::ShmTransport>()) {}
};
struct PyRdmaTransport : PyTransport {
  using PyTransport::PyTransport;
};

std::optional<std::string> reason_or_none(std::string reason) {
  return reason.empty() ? std::nullopt : std::optional(std::move(reason));
}

struct RdmaArguments {
  std::vector<std::string> nics;
  std::string address;
  unsigned depth, timeout, retries, mtu, traffic_class, service_level;
};

#if ONESIDED_HAS_VERBS
std::string rdma_unsupported_reason(const std::vector<std::string>& nics) {
  return verbs::RdmaTransport::unsupported_reason(nics);
}
std::shared_ptr<Transport> make_rdma(const RdmaArguments& given) {
  verbs::RdmaOptions options;
  options.rails.nics = given.nics;
  options.address = given.address;
  options.tuning = {given.depth, given.timeout, given.retries, given.mtu, given.traffic_class, given.service_level};
  return std::make_shared<verbs::RdmaTransport>(options);
}
#else
std::string rdma_unsupported_reason(const std::vector<std::string>&) {
  return verbs::unavailable();
}
std::shared_ptr<Transport> make_rdma(const RdmaArguments&) {
  fail(ErrorKind::Unsupported, verbs::unavailable());
}
#endif

constexpr std::uint32_t kDefaultSlots = 256;

}  // namespace

std::string_view bytes_of(nb::handle object, const char* what);

void register_transport(nb::module_& m) {
  nb::class_<PyConnection>(m, "Connection", R"(The way to one peer. Operations take a RemoteMemory of that peer.

Thread-safe. Once lost it stays lost: make a new one.)")
      .def(
          "write",
          [](PyConnection& self, nb::handle source, nb::handle of, nb::handle offset_bytes, nb::handle signal,
             nb::handle add, nb::handle async_op, nb::handle timeout_s) {
            const RemoteMemory& remote = to_remote(of);
            const Deadline deadline = to_deadline(timeout_s);
            const Put put(source, offset_bytes, signal, add, to_flag(async_op, "async_op"), deadline);
            self.check("write", remote, put.offset, put.buffer.nbytes());
            const auto target = self.target(remote, deadline);
            return put.run_on(target, *target, remote.offset);
          },
          nb::arg("source").none(), nb::arg("remote").none(), nb::arg("offset_bytes").none() = 0, nb::kw_only(),
          nb::arg("signal").none() = nb::none(), nb::arg("add").none() = 1, nb::arg("async_op").none() = false,
          nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def write(self, source: object, remote: RemoteMemory, offset_bytes: int = 0, *, signal: int | None "
                  "= None, add: int = 1, async_op: bool = False, timeout_s: float | None = None) -> Work"),
          "Writes all of `source` to `remote` from `offset_bytes` on, then adds `add` to signal `signal` if one is "
          "given.")
      .def(
          "read",
          [](PyConnection& self, nb::handle destination, nb::handle of, nb::handle offset_bytes, nb::handle async_op,
             nb::handle timeout_s) {
            const RemoteMemory& remote = to_remote(of);
            const Deadline deadline = to_deadline(timeout_s);
            const Get get(destination, offset_bytes, to_flag(async_op, "async_op"), deadline);
            self.check("read", remote, get.offset, get.buffer.nbytes());
            const auto target = self.target(remote, deadline);
            return get.run_on(target, *target, remote.offset);
          },
          nb::arg("destination").none(), nb::arg("remote").none(), nb::arg("offset_bytes").none() = 0, nb::kw_only(),
          nb::arg("async_op").none() = false, nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def read(self, destination: object, remote: RemoteMemory, offset_bytes: int = 0, *, async_op: bool "
                  "= False, timeout_s: float | None = None) -> Work"),
          "Fills `destination` from `remote`, beginning at `offset_bytes` there.")
      .def(
          "signal",
          [](PyConnection& self, nb::handle of, nb::handle index, nb::handle add, nb::handle timeout_s) {
            const RemoteMemory& remote = to_remote(of);
            const Deadline deadline = to_deadline(timeout_s);
            const SignalOnly signal(index, add, false, deadline);
            const auto target = self.target(remote, deadline);
            return signal.run_on(target, *target);
          },
          nb::arg("remote").none(), nb::arg("index").none(), nb::arg("add").none() = 1, nb::kw_only(),
          nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def signal(self, remote: RemoteMemory, index: int, add: int = 1, *, timeout_s: float | None = None) "
                  "-> Work"),
          "Adds to a signal of `remote` when all earlier writes to it are visible.")
      .def(
          "fetch_add",
          [](PyConnection& self, nb::handle of, nb::handle offset_bytes, nb::handle add, nb::handle word_nbytes,
             nb::handle timeout_s) {
            return self.atomic(of, {Atomic::Kind::FetchAdd, offset_bytes, add, nb::none(), word_nbytes, timeout_s});
          },
          nb::arg("remote").none(), nb::arg("offset_bytes").none(), nb::arg("add").none(), nb::kw_only(),
          nb::arg("word_nbytes").none() = 8, nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def fetch_add(self, remote: RemoteMemory, offset_bytes: int, add: int, *, word_nbytes: int = 8, "
                  "timeout_s: float | None = None) -> int"),
          "Adds to an aligned word of 8 bytes, or of 4, atomically; returns what it held, as an unsigned number.")
      .def(
          "compare_swap",
          [](PyConnection& self, nb::handle of, nb::handle offset_bytes, nb::handle expected, nb::handle desired,
             nb::handle word_nbytes, nb::handle timeout_s) {
            return self.atomic(of,
                               {Atomic::Kind::CompareSwap, offset_bytes, desired, expected, word_nbytes, timeout_s});
          },
          nb::arg("remote").none(), nb::arg("offset_bytes").none(), nb::arg("expected").none(),
          nb::arg("desired").none(), nb::kw_only(), nb::arg("word_nbytes").none() = 8,
          nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def compare_swap(self, remote: RemoteMemory, offset_bytes: int, expected: int, desired: int, *, "
                  "word_nbytes: int = 8, timeout_s: float | None = None) -> int"),
          "Sets an aligned word to `desired` if it holds `expected`; returns what it held.")
      .def(
          "swap",
          [](PyConnection& self, nb::handle of, nb::handle offset_bytes, nb::handle value, nb::handle word_nbytes,
             nb::handle timeout_s) {
            return self.atomic(of, {Atomic::Kind::Swap, offset_bytes, value, nb::none(), word_nbytes, timeout_s});
          },
          nb::arg("remote").none(), nb::arg("offset_bytes").none(), nb::arg("value").none(), nb::kw_only(),
          nb::arg("word_nbytes").none() = 8, nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def swap(self, remote: RemoteMemory, offset_bytes: int, value: int, *, word_nbytes: int = 8, "
                  "timeout_s: float | None = None) -> int"),
          "Sets an aligned word to `value`; returns what it held.")
      .def(
          "flush",
          [](PyConnection& self, nb::handle of, nb::handle timeout_s) {
            const RemoteMemory& remote = to_remote(of);
            const Deadline deadline = to_deadline(timeout_s);
            const auto target = self.target(remote, deadline);
            Blocking blocking;
            target->flush(deadline);
          },
          nb::arg("remote").none(), nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def flush(self, remote: RemoteMemory, timeout_s: float | None = None) -> None"),
          "Returns when all earlier operations on `remote` are visible there.")
      .def(
          "attach",
          [](PyConnection& self, nb::handle of, nb::handle timeout_s) {
            const RemoteMemory& remote = to_remote(of);
            const Deadline deadline = to_deadline(timeout_s);
            Blocking blocking;
            return self.core->attach(remote, deadline);
          },
          nb::arg("remote").none(), nb::arg("timeout_s").none() = 30.0,
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

  m.def(
      "mixed_target",
      [](const std::shared_ptr<Target>& mapped, const std::shared_ptr<Target>& device) -> std::shared_ptr<Target> {
        return std::make_shared<MixedTarget>(mapped, device);
      },
      nb::arg("mapped"), nb::arg("device"), nb::sig("def mixed_target(mapped: Target, device: Target) -> Target"),
      "A peer on this host in a window that spans hosts: bytes by `mapped`, signals and atomics by `device`.");

  nb::class_<PyTransport>(m, "Transport", "What every kind of transport has. See onesided.transport.Transport.")
      .def_prop_ro(
          "kind", [](PyTransport& self) { return name_of(self.core->kind()); }, "'shm', 'rdma'.")
      .def_prop_ro(
          "closed", [](PyTransport& self) { return self.core->closed(); }, "True once close() was called.")
      .def(
          "allocate",
          [](PyTransport& self, nb::handle nbytes, nb::handle access, nb::handle signals, nb::handle slots) {
            const std::uint64_t size = to_u64(nbytes, "nbytes");
            const Access permitted = parse_access(to_string(access, "access"));
            const std::uint32_t counters = to_u32(signals, "signals"), peers = to_u32(slots, "max_peers");
            const auto transport = self.core;
            Blocking blocking;
            return PyMemory(transport->allocate(size, permitted, counters, peers));
          },
          nb::keep_alive<0, 1>(), nb::arg("nbytes").none(), nb::arg("access").none() = "rw", nb::kw_only(),
          nb::arg("signals").none() = 0, nb::arg("max_peers").none() = kDefaultSlots,
          nb::sig("def allocate(self, nbytes: int, access: str = 'rw', *, signals: int = 0, max_peers: int = 256) -> "
                  "Memory"),
          R"(New memory that peers map: zeroed, its pages present, gone with its last user however that ends.

`max_peers` bounds how many connections may open it at once. RegistrationError names what there is not enough of.)")
      .def(
          "register_memory",
          [](PyTransport& self, nb::handle buffer, nb::handle access, nb::handle signals, nb::handle slots) {
            const Access permitted = parse_access(to_string(access, "access"));
            const std::uint32_t counters = to_u32(signals, "signals"), peers = to_u32(slots, "max_peers");
            // Looked at first, so that what cannot be registered stays as it was.
            {
              const Buffer checked(buffer, kWindowMemory, permits(permitted, Access::Write));
            }
            keep_in_place(buffer);
            Buffer bytes(buffer, kWindowMemory, permits(permitted, Access::Write));
            const bool read_only = bytes.read_only();
            void* const data = bytes.data();
            const Keepalive keep = bytes.keep();
            const auto transport = self.core;
            std::shared_ptr<Memory> memory;
            {
              Blocking blocking;
              memory = transport->register_memory(data, bytes.nbytes(), permitted, counters, peers, keep);
            }
            return PyMemory(std::move(memory), keep, read_only);
          },
          nb::keep_alive<0, 1>(), nb::arg("buffer").none(), nb::arg("access").none() = "rw", nb::kw_only(),
          nb::arg("signals").none() = 0, nb::arg("max_peers").none() = kDefaultSlots,
          nb::sig("def register_memory(self, buffer: object, access: str = 'rw', *, signals: int = 0, max_peers: int = "
                  "256) -> Memory"),
          R"(Makes a tensor or buffer known to peers, without a copy, and keeps it alive until the Memory is closed.

Memory from allocate() is recognised in any view of it. Any other stays private: peers reach it by cross-memory attach,
where the system permits that (they are told at their first operation if not), and atomics are Unsupported.)")
      .def(
          "bind",
          [](PyTransport& self, nb::handle shared, nb::handle peer) {
            const std::string endpoint = self.core->bind(to_flag(shared, "shared"), to_string(peer, "peer")).to_bytes();
            return nb::bytes(endpoint.data(), endpoint.size());
          },
          nb::kw_only(), nb::arg("shared").none() = false, nb::arg("peer").none() = "",
          nb::sig("def bind(self, *, shared: bool = False, peer: str = '') -> bytes"),
          R"(An endpoint to give to a peer for connect(): good for one connection, or for any number if `shared`.

Whoever connects with it is known as `peer` to Memory.permit() and revoke(). It is a secret: do not publish one that was made for
somebody.)")
      .def(
          "connect",
          [](PyTransport& self, nb::handle endpoint, nb::handle name, nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            const Endpoint peer = Endpoint::from_bytes(bytes_of(endpoint, "an endpoint"));
            const std::string given = to_string(name, "name");
            const std::string label = given.empty() ? text("process ", peer.pid) : given;
            const auto transport = self.core;
            Blocking blocking;
            return PyConnection(transport->connect(peer, label, deadline));
          },
          nb::keep_alive<0, 1>(), nb::arg("endpoint").none(), nb::kw_only(), nb::arg("name").none() = "",
          nb::arg("timeout_s").none() = 30.0,
          nb::sig(
              "def connect(self, endpoint: bytes, *, name: str = '', timeout_s: float | None = 30.0) -> Connection"),
          R"(Connects to the peer that bound `endpoint`, in any order with its own connect(). `name` is used in messages.

HandleError for bytes that are no endpoint, StaleHandle for one that was used, ConnectionLost if nobody is there any more,
DeadlineExceeded if nobody answers, Unsupported if the peer is on another host.)")
      .def(
          "loop_back",
          [](PyTransport& self, nb::handle memory, nb::handle name) {
            const auto own = to_instance<PyMemory>(memory, "memory", "Memory").core;
            const std::string label = to_string(name, "name");
            const auto transport = self.core;
            Blocking blocking;
            return transport->loop_back(own, label);
          },
          nb::arg("memory").none(), nb::arg("name").none() = "this rank",
          nb::sig("def loop_back(self, memory: Memory, name: str = 'this rank') -> Target"),
          "Opens this process's own memory for a window.")
      .def(
          "close",
          [](PyTransport& self, nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            const auto transport = self.core;
            Blocking blocking;
            transport->close(deadline);
          },
          nb::arg("timeout_s").none() = 5.0, nb::sig("def close(self, timeout_s: float | None = 5.0) -> None"),
          "Closes connections, then memories, then itself. Closing twice is legal.")
      .def(
          "describe", [](PyTransport& self) { return to_dict(self.core->describe()); },
          nb::sig("def describe(self) -> dict[str, str]"), "Its state and what it holds.");

  nb::class_<PyShmTransport, PyTransport>(m, "ShmTransport",
                                          "Shared memory: peers on one host. See onesided.transport.ShmTransport.")
      .def(nb::init<>())
      .def_static(
          "supported", [] { return shm::ShmTransport::unsupported_reason().empty(); },
          nb::sig("def supported() -> bool"), "Whether this system can have one. Cheap, without side effect.")
      .def_static(
          "unsupported_reason", [] { return reason_or_none(shm::ShmTransport::unsupported_reason()); },
          nb::sig("def unsupported_reason() -> str | None"), "Why it cannot; None if it can.");

  nb::class_<PyRdmaTransport, PyTransport>(m, "RdmaTransport",
                                           "Peers that a verbs device reaches. See onesided.transport.RdmaTransport.")
      .def(
          "__init__",
          [](PyRdmaTransport* self, nb::handle nics, nb::handle address, nb::handle depth, nb::handle timeout,
             nb::handle retries, nb::handle mtu, nb::handle traffic_class, nb::handle service_level) {
            RdmaArguments arguments;
            for (const nb::handle name : nb::borrow<nb::iterable>(nics)) {
              arguments.nics.push_back(to_string(name, "a name in nics"));
            }
            arguments.address = to_string(address, "address");
            arguments.depth = to_u32(depth, "depth");
            arguments.timeout = to_u32(timeout, "timeout");
            arguments.retries = to_u32(retries, "retries");
            arguments.mtu = to_u32(mtu, "mtu");
            arguments.traffic_class = to_u32(traffic_class, "traffic_class");
            arguments.service_level = to_u32(service_level, "service_level");
            std::shared_ptr<Transport> made;
            {
              Blocking blocking;
              made = make_rdma(arguments);
            }
            new (self) PyRdmaTransport(std::move(made));
          },
          nb::kw_only(), nb::arg("nics").none(), nb::arg("address").none(), nb::arg("depth").none(),
          nb::arg("timeout").none(), nb::arg("retries").none(), nb::arg("mtu").none(), nb::arg("traffic_class").none(),
          nb::arg("service_level").none(),
          nb::sig("def __init__(self, *, nics: list[str], address: str, depth: int, timeout: int, retries: int, mtu: "
                  "int, traffic_class: int, service_level: int) -> None"));

  m.def(
      "rdma_unsupported_reason",
      [](const std::vector<std::string>& nics) { return reason_or_none(rdma_unsupported_reason(nics)); },
      nb::arg("nics"), nb::sig("def rdma_unsupported_reason(nics: list[str]) -> str | None"),
      "Why there can be no rdma transport over these ports, or over any if none is named. Opens every device once.");
}

}  // namespace onesided::python
