#include "python/common.h"

namespace onesided::python {
namespace {

// Buffer protocol of Memory and View: one dimension of bytes, valid for as long as the object lives.
int fill(PyObject* self, Py_buffer* view, int flags, PyMemory& memory, std::uint64_t offset, std::uint64_t nbytes) {
  try {
    return PyBuffer_FillInfo(view, self, memory.lend() + offset, static_cast<Py_ssize_t>(nbytes), memory.read_only,
                             flags);
  } catch (const Error& error) {
    view->obj = nullptr;
    PyErr_SetString(PyExc_BufferError, error.what());
    return -1;
  }
}

// One that came from __new__ alone has no memory.
bool is_made(PyObject* self, Py_buffer* view) {
  if (nb::inst_ready(self)) return true;
  view->obj = nullptr;
  PyErr_SetString(PyExc_BufferError, "this object was never initialized");
  return false;
}

int get_memory_buffer(PyObject* self, Py_buffer* view, int flags) {
  if (!is_made(self, view)) return -1;
  PyMemory& memory = *nb::inst_ptr<PyMemory>(nb::handle(self));
  return fill(self, view, flags, memory, 0, memory.core->nbytes());
}

int get_view_buffer(PyObject* self, Py_buffer* view, int flags) {
  if (!is_made(self, view)) return -1;
  PyView& bytes = *nb::inst_ptr<PyView>(nb::handle(self));
  return fill(self, view, flags, bytes.owner(), bytes.offset, bytes.nbytes);
}

PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_memory_buffer)}, {0, nullptr}};
PyType_Slot view_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_view_buffer)}, {0, nullptr}};

// [offset, offset + nbytes) in `limit` bytes; without `nbytes`, up to the end.
std::pair<std::uint64_t, std::uint64_t> to_range(nb::handle offset_bytes, nb::handle nbytes, std::uint64_t limit) {
  const std::uint64_t offset = to_u64(offset_bytes, "offset_bytes");
  const std::uint64_t length = nbytes.is_none() ? limit - std::min(offset, limit) : to_u64(nbytes, "nbytes");
  check_bounds("view", "this memory", offset, length, limit);
  return {offset, length};
}

nb::bytes to_bytes(const std::string& bytes) {
  return nb::bytes(bytes.data(), bytes.size());
}

}  // namespace

std::string_view bytes_of(nb::handle object, const char* what) {
  if (!PyBytes_Check(object.ptr())) throw nb::type_error(text(what, " must be bytes, not ", type_of(object)).c_str());
  return {PyBytes_AS_STRING(object.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(object.ptr()))};
}

void register_memory(nb::module_& m) {
  nb::class_<PyMemory>(m, "Memory", nb::is_final(), nb::type_slots(memory_slots), nb::is_weak_referenceable(),
                       R"(Memory of this process that peers can reach, with the signals beside it.

It has the buffer protocol: `numpy.frombuffer(memory, dtype)` and `memoryview(memory)` are views of it, never copies, and
stay valid after close() for as long as they live.)")
      .def_prop_ro(
          "nbytes", [](PyMemory& self) { return self.core->nbytes(); }, "Size in bytes.")
      .def_prop_ro(
          "access", [](PyMemory& self) { return name_of(self.core->access()); }, "What peers may do: 'r', 'w' or 'rw'.")
      .def_prop_ro(
          "signals", [](PyMemory& self) { return self.core->control().signals(); }, "How many signals it has.")
      .def_prop_ro(
          "closed", [](PyMemory& self) { return self.core->closed(); }, "True once close() was called.")
      .def_prop_ro(
          "address", [](PyMemory& self) { return reinterpret_cast<std::uintptr_t>(self.core->data()); },
          "Where it begins in this process.")
      .def(
          "view",
          [](nb::handle_t<PyMemory> self, nb::handle offset_bytes, nb::handle nbytes) {
            if (!nb::inst_ready(self)) throw nb::type_error("this object was never initialized");
            const auto [offset, length] = to_range(offset_bytes, nbytes, nb::inst_ptr<PyMemory>(self)->core->nbytes());
            return PyView{nb::borrow(self), offset, length};
          },
          nb::arg("offset_bytes").none() = 0, nb::arg("nbytes").none() = nb::none(),
          nb::sig("def view(self, offset_bytes: int = 0, nbytes: int | None = None) -> View"),
          "A part of it, up to the end without `nbytes`: the cheapest source and destination of operations.")
      .def(
          "handle",
          [](PyMemory& self) {
            self.core->check_usable("this memory");
            if (self.core->closed()) fail(ErrorKind::StaleHandle, "handle: this memory is closed");
            return to_bytes(self.core->remote().to_bytes());
          },
          nb::sig("def handle(self) -> bytes"), "The bytes to give to peers, for RemoteMemory.from_bytes.")
      .def(
          "wait_signal",
          [](PyMemory& self, nb::handle index, nb::handle at_least, nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            const std::uint32_t signal = to_u32(index, "signal index");
            const std::uint64_t count = to_u64(at_least, "at_least");
            self.core->check_usable("this memory");
            const auto memory = self.core;
            const auto counters = counters_for("memory", "");
            Blocking blocking;
            return wait_signal(*memory, *counters, signal, count, deadline, kSpin, "a peer", [] {});
          },
          nb::arg("index").none(), nb::arg("at_least").none(), nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def wait_signal(self, index: int, at_least: int, timeout_s: float | None = None) -> int"),
          "Waits until signal `index` has reached `at_least`, and returns its count. DeadlineExceeded, StaleHandle.")
      .def(
          "signal_value",
          [](PyMemory& self, nb::handle index) {
            const std::uint32_t signal = to_u32(index, "signal index");
            if (self.core->closed()) fail(ErrorKind::StaleHandle, "signal_value: this memory is closed");
            check_signal("signal_value", "this memory", signal, self.core->control().signals());
            return self.core->control().signal(signal).load();
          },
          nb::arg("index").none(), nb::sig("def signal_value(self, index: int) -> int"),
          "The count of signal `index` now.")
      .def(
          "permit",
          [](PyMemory& self, nb::handle peer, nb::handle access) {
            const std::string name = to_string(peer, "peer"), letters = to_string(access, "access");
            const Access permitted = letters.empty() ? Access::None : parse_access(letters);
            const auto memory = self.core;
            Blocking blocking;
            memory->permit(name, permitted);
          },
          nb::arg("peer").none(), nb::arg("access").none(), nb::sig("def permit(self, peer: str, access: str) -> None"),
          R"(What `peer` may do that opens this memory from now on: "r", "w", "rw" or "", nothing.

`peer` is the name that its endpoint was bound for (Transport.bind); "" stands for all who have no permission of their own, who
may do what the memory was made for. RemoteAccessError for more than that. Rights that a peer has already taken up stay; revoke()
ends them.)")
      .def(
          "revoke",
          [](PyMemory& self, nb::handle peer, nb::handle timeout_s) {
            const std::string name = to_string(peer, "peer");
            const Deadline deadline = to_deadline(timeout_s);
            const auto memory = self.core;
            Blocking blocking;
            memory->revoke(name, deadline);
          },
          nb::arg("peer").none(), nb::arg("timeout_s").none() = 5.0,
          nb::sig("def revoke(self, peer: str, timeout_s: float | None = 5.0) -> None"),
          R"(Ends the access of `peer`, for good. When it returns, none of its operations is under way and none succeeds any more.

Its operations fail with StaleHandle, its next attempt to open the memory with RemoteAccessError. Others are not disturbed: over
RDMA the memory is registered anew, and they get the new keys at their next operation. DeadlineExceeded if the peer was stopped
in the middle of an operation on shm; over RDMA its queue pairs are taken away instead. RegistrationError if there cannot be a
second registration; then nothing has changed.)")
      .def(
          "close",
          [](PyMemory& self, nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            self.close(deadline);
          },
          nb::arg("timeout_s").none() = 5.0, nb::sig("def close(self, timeout_s: float | None = 5.0) -> None"),
          R"(Ends all access. When it returns, no peer is in the middle of an operation, and later ones fail with StaleHandle.

DeadlineExceeded if a peer is stuck in one (its process was stopped): the memory then stays registered, close it again.
Closing twice is legal.)")
      .def(
          "describe", [](PyMemory& self) { return to_dict(self.core->describe()); },
          nb::sig("def describe(self) -> dict[str, str]"), "What it is and how peers reach it.")
      .def("__len__", [](PyMemory& self) { return self.core->nbytes(); })
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> Memory"))
      .def(
          "__exit__", [](PyMemory& self, nb::args) { self.close(Deadline::after(5)); },
          nb::sig("def __exit__(self, *exception: object) -> None"))
      .def("__repr__", [](PyMemory& self) {
        return text("<Memory of ", self.core->nbytes(), " bytes, access '", name_of(self.core->access()), "', ",
                    self.core->control().signals(), " signals", self.core->closed() ? ", closed>" : ">");
      });

  nb::class_<PyView>(m, "View", nb::is_final(), nb::type_slots(view_slots),
                     "A part of a Memory. It has the buffer protocol.")
      .def_prop_ro(
          "memory", [](PyView& self) { return self.memory; }, nb::sig("def memory(self) -> Memory"),
          "What it is a part of.")
      .def_ro("offset_bytes", &PyView::offset, "Where it begins in the memory.")
      .def_ro("nbytes", &PyView::nbytes, "Size in bytes.")
      .def(
          "view",
          [](PyView& self, nb::handle offset_bytes, nb::handle nbytes) {
            const auto [offset, length] = to_range(offset_bytes, nbytes, self.nbytes);
            return PyView{self.memory, self.offset + offset, length};
          },
          nb::arg("offset_bytes").none() = 0, nb::arg("nbytes").none() = nb::none(),
          nb::sig("def view(self, offset_bytes: int = 0, nbytes: int | None = None) -> View"), "A part of this part.")
      .def("__len__", [](PyView& self) { return self.nbytes; })
      .def("__repr__", [](PyView& self) { return text("<View of ", self.nbytes, " bytes at ", self.offset, ">"); });

  nb::class_<RemoteMemory>(m, "RemoteMemory", R"(What a handle describes: a range of a peer's memory.

It is a value: it can be pickled, compared and cut, and gives access to nothing without a connection to its peer.)")
      .def_static(
          "from_bytes", [](nb::handle handle) { return RemoteMemory::from_bytes(bytes_of(handle, "a handle")); },
          nb::arg("handle").none(), nb::sig("def from_bytes(handle: bytes) -> RemoteMemory"),
          "Reads what Memory.handle() wrote. HandleError for every other byte string.")
      .def(
          "to_bytes", [](RemoteMemory& self) { return to_bytes(self.to_bytes()); },
          nb::sig("def to_bytes(self) -> bytes"), "The handle.")
      .def_prop_ro(
          "kind", [](RemoteMemory& self) { return name_of(self.kind); }, "The kind of transport it is registered with.")
      .def_prop_ro(
          "access", [](RemoteMemory& self) { return name_of(self.access); }, "What is permitted: 'r', 'w' or 'rw'.")
      .def_ro("nbytes", &RemoteMemory::nbytes, "Size in bytes.")
      .def_ro("offset_bytes", &RemoteMemory::offset, "Where it begins in the peer's memory.")
      .def_ro("signals", &RemoteMemory::signals, "How many signals the peer's memory has.")
      .def(
          "view",
          [](RemoteMemory& self, nb::handle offset_bytes, nb::handle nbytes) {
            const auto [offset, length] = to_range(offset_bytes, nbytes, self.nbytes);
            RemoteMemory part = self;
            part.offset += offset;
            part.nbytes = length;
            return part;
          },
          nb::arg("offset_bytes").none() = 0, nb::arg("nbytes").none() = nb::none(),
          nb::sig("def view(self, offset_bytes: int = 0, nbytes: int | None = None) -> RemoteMemory"), "A part of it.")
      .def(
          "__eq__",
          [](RemoteMemory& self, nb::handle other) {
            return nb::isinstance<RemoteMemory>(other) && nb::inst_ready(other) &&
                   nb::inst_ptr<RemoteMemory>(other)->to_bytes() == self.to_bytes();
          },
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [](RemoteMemory& self) { return nb::hash(to_bytes(self.to_bytes())); })
      .def(
          "__reduce__",
          [](nb::handle_t<RemoteMemory> self) {
            // Functions of an extension cannot be pickled: copyreg makes the empty object, __setstate__ fills it.
            const nb::object make = nb::module_::import_("copyreg").attr("__newobj__");
            return nb::make_tuple(make, nb::make_tuple(self.type()), self.attr("to_bytes")());
          },
          nb::sig("def __reduce__(self) -> tuple[object, ...]"))
      .def(
          "__setstate__",
          [](RemoteMemory& self, nb::handle handle) {
            new (&self) RemoteMemory(RemoteMemory::from_bytes(bytes_of(handle, "a handle")));
          },
          nb::arg("handle").none(), nb::sig("def __setstate__(self, handle: bytes) -> None"))
      .def("__repr__", [](RemoteMemory& self) {
        return text("<RemoteMemory of ", self.nbytes, " bytes at ", self.offset, ", ", name_of(self.kind), ", access '",
                    name_of(self.access), "'>");
      });
}

}  // namespace onesided::python
