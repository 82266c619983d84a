#include "python/common.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

namespace onesided::python {
namespace {

// ---- Objects that other threads let go of ---------------------------------------------------------------------------

struct Held {
  PyObject* object;
  Py_buffer* view;  // or null
};

struct Released {
  std::mutex mutex;
  std::vector<Held> waiting;
  std::atomic<bool> any{false};
};
Released& released() {
  static auto* const instance = [] {
    auto* made = new Released;  // never destroyed: threads may outlive static destructors
    hold_over_fork(made->mutex);
    return made;
  }();
  return *instance;
}

void let_go(const Held& held) {
  if (held.view != nullptr) {
    PyBuffer_Release(held.view);
    delete held.view;
  }
  Py_DECREF(held.object);
}

// With the GIL.
int let_go_of_all(void*) {
  std::vector<Held> waiting;
  {
    std::lock_guard lock(released().mutex);
    waiting.swap(released().waiting);
    released().any.store(false);
  }
  for (const Held& held : waiting) let_go(held);
  return 0;
}

Keepalive keep(PyObject* object, Py_buffer* view) {
  if (released().any.load(std::memory_order_relaxed)) let_go_of_all(nullptr);
  Py_INCREF(object);
  // Not let go of here even if this thread holds the GIL: a destructor of the object may call back into the library,
  // whose locks this thread may hold.
  return Keepalive(static_cast<void*>(object), [view](void* kept) {
    bool first;
    {
      std::lock_guard lock(released().mutex);
      released().waiting.push_back({static_cast<PyObject*>(kept), view});
      first = !released().any.exchange(true);
    }
    if (first && !Settling::here()) Py_AddPendingCall(let_go_of_all, nullptr);
  });
}

// ---- Tensors ----------------------------------------------------------------------------------------------------------

// The part of DLPack's exchange table that is used here (dlpack.h 1.2 and newer, "DLPackExchangeAPI"): the type of a tensor
// offers it as the capsule __dlpack_c_exchange_api__, and it describes a tensor without allocating or synchronizing.
struct ExchangeTable {
  std::uint32_t major, minor;
  ExchangeTable* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*describe)(void* object, nb::dlpack::dltensor* out);  // may be null
  void* current_stream;
};

constexpr std::uint8_t kFloat = 2, kComplex = 5;  // DLDataTypeCode

using Describe = int (*)(void*, nb::dlpack::dltensor*);

// What a type of tensors offers; null where it does not. The methods are torch's: they stay as long as the type is known.
struct TensorType {
  PyTypeObject* type = nullptr;
  Describe describe = nullptr;
  PyObject* is_neg = nullptr;
  PyObject* is_conj = nullptr;
};

// Cached for the last type seen: programs put tensors, and then more tensors.
const TensorType& tensor_type(PyTypeObject* type) {
  static TensorType last;
  if (type == last.type) return last;
  TensorType found;
  nb::object capsule =
      nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), "__dlpack_c_exchange_api__", nb::none());
  if (PyCapsule_CheckExact(capsule.ptr())) {
    auto* table = static_cast<ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (table == nullptr) nb::raise_python_error();
    while (table != nullptr && table->major != 1) table = table->previous;
    if (table != nullptr) found.describe = table->describe;
  }
  const auto method = [type](const char* name) -> PyObject* {
    const nb::handle object(reinterpret_cast<PyObject*>(type));
    nb::object found = nb::getattr(object, name, nb::none());
    return found.is_none() ? nullptr : found.release().ptr();
  };
  if (found.describe != nullptr) {
    found.is_neg = method("is_neg");
    found.is_conj = method("is_conj");
  }
  Py_INCREF(type);
  found.type = type;
  const TensorType before = std::exchange(last, found);  // first: what is let go of may run Python
  Py_XDECREF(before.is_neg);
  Py_XDECREF(before.is_conj);
  Py_XDECREF(before.type);
  return last;
}

bool is_compact(const nb::dlpack::dltensor& tensor) {
  if (tensor.strides == nullptr) return true;
  if (std::find(tensor.shape, tensor.shape + tensor.ndim, 0) != tensor.shape + tensor.ndim) return true;  // no bytes
  std::int64_t expected = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

[[noreturn]] void refuse_strided(const Purpose& what) {
  fail(ErrorKind::Layout, what.name, " is not contiguous: no hidden copy is made; ", what.if_strided);
}

[[noreturn]] void refuse_read_only(const Purpose& what) {
  fail(ErrorKind::Layout, what.name, " is read-only and would be written");
}

[[noreturn]] void refuse_device(const Purpose& what, const std::string& device) {
  fail(ErrorKind::Unsupported, what.name, " lies in memory of device '", device,
       "', which this transport cannot reach yet; copy it to the CPU first");
}

std::string spelled(const nb::object& object) {
  return nb::str(object).c_str();
}

// A torch tensor whose bytes are not its values: lazily conjugated or negated. DLPack's table does not tell. Complex ones
// are conjugated, and imaginary parts of those are negated, of any shape. So only these two types are asked: it takes 0.1 µs
// of the 0.2 of a small put, and no cheaper sign is public and sure. (`torch._neg_view` negates integers too; it is private.)
bool is_lazy(nb::handle tensor, const TensorType& type, bool complex) {
  const auto says = [&](PyObject* question) {
    if (question == nullptr) return false;  // another library's tensor, which has no such thing
    PyObject* answer = PyObject_CallOneArg(question, tensor.ptr());
    if (answer == nullptr) nb::raise_python_error();
    Py_DECREF(answer);
    return answer == Py_True;
  };
  return says(type.is_neg) || (complex && says(type.is_conj));
}

[[noreturn]] void refuse_lazy(const Purpose& what) {
  fail(ErrorKind::Layout, what.name, " is a lazy conjugate or negative view, its bytes are not its values; ",
       what.if_lazy);
}

}  // namespace

bool is_torch_tensor(nb::handle object) {
  // Never imports torch: without it in sys.modules there is no tensor.
  PyObject* torch = PyImport_GetModule(nb::str("torch").ptr());
  if (torch == nullptr) return false;
  nb::object module = nb::steal(torch);
  nb::object type = nb::getattr(module, "Tensor", nb::none());
  return !type.is_none() && PyObject_IsInstance(object.ptr(), type.ptr()) == 1;
}

std::string type_of(nb::handle object) {
  return object.is_none() ? "None" : Py_TYPE(object.ptr())->tp_name;
}

void Blocking::check_signals() {
  struct Held {
    PyGILState_STATE state;
    Held() {
      take_gil([this] { state = PyGILState_Ensure(); });
    }
    ~Held() { PyGILState_Release(state); }
  } held;
  if (PyErr_CheckSignals() != 0) nb::raise_python_error();
  release_kept_objects();
}

PyMemory::~PyMemory() {
  if (core != nullptr) {
    ReleasedGil released;  // its end may have to wait for peers
    core = nullptr;
  }
  if (keep == nullptr) return;
  keep = nullptr;
  release_kept_objects();
}

char* PyMemory::lend() {
  if (let_go) fail(ErrorKind::StaleHandle, "this memory is closed");
  lent = true;
  return static_cast<char*>(core->data());
}

void PyMemory::close(const Deadline& deadline) {
  const auto memory = core;
  {
    Blocking blocking;
    memory->close(deadline);
  }
  if (!lent && keep != nullptr) {
    let_go = true;
    keep = nullptr;
  }
  release_kept_objects();
}

void release_kept_objects() {
  if (released().any.load()) let_go_of_all(nullptr);
}

Keepalive keep_object(nb::handle object) {
  return keep(object.ptr(), nullptr);
}

// ---- Arguments ------------------------------------------------------------------------------------------------------

namespace {

nb::object to_integer(nb::handle value, const char* what) {
  if (PyLong_Check(value.ptr())) return nb::borrow(value);
  PyObject* index = PyNumber_Index(value.ptr());
  if (index == nullptr) {
    PyErr_Clear();
    throw nb::type_error(text(what, " must be an integer, not ", type_of(value)).c_str());
  }
  return nb::steal(index);
}

std::uint64_t unsigned_of(const nb::object& integer, const char* what, const char* range) {
  const std::uint64_t number = PyLong_AsUnsignedLongLong(integer.ptr());
  if (number == static_cast<std::uint64_t>(-1) && PyErr_Occurred()) {
    PyErr_Clear();
    fail(ErrorKind::Bounds, what, " must lie in ", range, ", not ", nb::str(integer).c_str());
  }
  return number;
}

}  // namespace

std::uint64_t to_u64(nb::handle value, const char* what) {
  return unsigned_of(to_integer(value, what), what, "[0, 2**64)");
}

std::uint32_t to_u32(nb::handle value, const char* what) {
  const std::uint64_t number = to_u64(value, what);
  if (number > UINT32_MAX) fail(ErrorKind::Bounds, what, " must lie in [0, 2**32), not ", number);
  return static_cast<std::uint32_t>(number);
}

std::uint64_t to_word(nb::handle value, const char* what, unsigned word_nbytes) {
  nb::object integer = to_integer(value, what);
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
  if (word_nbytes == 4) {
    if (overflow != 0 || number < INT32_MIN || number > UINT32_MAX) {
      fail(ErrorKind::Bounds, what, " must be in [-2**31, 2**32) for a word of 4 bytes, not ",
           nb::str(integer).c_str());
    }
    return static_cast<std::uint32_t>(number);
  }
  if (overflow == 0) return static_cast<std::uint64_t>(number);
  return unsigned_of(integer, what, "[-2**63, 2**64)");
}

unsigned to_word_nbytes(nb::handle value) {
  const std::uint64_t nbytes = to_u64(value, "word_nbytes");
  if (nbytes != 4 && nbytes != 8) fail(ErrorKind::Bounds, "word_nbytes must be 4 or 8, not ", nbytes);
  return static_cast<unsigned>(nbytes);
}

std::int64_t to_rank(nb::handle value) {
  nb::object integer = to_integer(value, "peer");
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
  if (overflow != 0) fail(ErrorKind::Bounds, "rank ", nb::str(integer).c_str(), " does not exist");
  return number;
}

bool to_flag(nb::handle value, const char* what) {
  if (value.ptr() != Py_True && value.ptr() != Py_False)
    throw nb::type_error(text(what, " must be True or False, not ", type_of(value)).c_str());
  return value.ptr() == Py_True;
}

std::string to_string(nb::handle value, const char* what) {
  std::string string;
  if (!nb::try_cast(value, string)) throw nb::type_error(text(what, " must be a str, not ", type_of(value)).c_str());
  return string;
}

nb::tuple to_tuple(nb::handle iterable, const char* must_be) {
  PyObject* const tuple = PySequence_Tuple(iterable.ptr());
  if (tuple != nullptr) return nb::steal<nb::tuple>(tuple);
  if (PyErr_ExceptionMatches(PyExc_TypeError) && Py_TYPE(iterable.ptr())->tp_iter == nullptr) {
    PyErr_Clear();
    throw nb::type_error(text(must_be, ", not ", type_of(iterable)).c_str());
  }
  nb::raise_python_error();  // what its iterator raised
}

Deadline to_deadline(nb::handle timeout_s) {
  if (timeout_s.is_none()) return Deadline::never();
  const double seconds = PyFloat_AsDouble(timeout_s.ptr());
  if (seconds == -1.0 && PyErr_Occurred()) {
    const bool large = PyErr_ExceptionMatches(PyExc_OverflowError) != 0;
    PyErr_Clear();
    if (large) fail(ErrorKind::Bounds, "timeout_s must be a number that a float can be, or None");
    throw nb::type_error(text("timeout_s must be a number of seconds or None, not ", type_of(timeout_s)).c_str());
  }
  if (!(seconds >= 0)) fail(ErrorKind::Bounds, "timeout_s must be at least 0, not ", seconds);
  return Deadline::after(seconds);
}

nb::dict to_dict(const Description& description) {
  nb::dict dict;
  for (const auto& [key, value] : description) dict[key.c_str()] = value;
  return dict;
}

// ---- Buffer -----------------------------------------------------------------------------------------------------------

Buffer::Buffer(nb::handle object, const Purpose& what, bool writable) : object_(object.ptr()) {
  if (from_own(object)) {
    if (writable && read_only_) refuse_read_only(what);
    return;
  }
  if (from_exchange(object, what)) return;
  if (PyObject_CheckBuffer(object.ptr())) {
    from_protocol(object, what, writable);
  } else if (is_torch_tensor(object)) {
    from_torch(object, what);
  } else {
    throw nb::type_error(
        text(what.name, " must be a tensor, an array, a Memory, a View or an object with the buffer protocol, not ",
             type_of(object))
            .c_str());
  }
}

namespace {

// Invalid for a tensor that has none: of another library, for instance.
nb::object storage_of(nb::handle tensor) {
  PyObject* const storage = PyObject_CallMethod(tensor.ptr(), "untyped_storage", nullptr);
  if (storage == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) nb::raise_python_error();
    PyErr_Clear();
  }
  return nb::steal(storage);
}

}  // namespace

Buffer::~Buffer() {
  if (has_view_) PyBuffer_Release(&view_);
}

Keepalive Buffer::keep() {
  // A tensor may be given another storage at any time (`tensor.data = ...`); what is kept is the one that these bytes are in.
  if (nb::object storage; is_tensor_ && (storage = storage_of(object_)).is_valid()) {
    return python::keep(storage.ptr(), nullptr);
  }
  Py_buffer* view = has_view_ ? new Py_buffer(view_) : nullptr;
  has_view_ = false;
  return python::keep(object_, view);
}

bool Buffer::from_own(nb::handle object) {
  // Both types are final: comparing is enough, and on the path of every put.
  static const nb::handle view_type = nb::type<PyView>(), memory_type = nb::type<PyMemory>();
  const nb::handle type = object.type();
  if (!type.is(view_type) && !type.is(memory_type)) return false;
  if (!nb::inst_ready(object)) return false;
  if (type.is(view_type)) {
    const PyView& view = *nb::inst_ptr<PyView>(object);
    data_ = view.owner().lend() + view.offset;
    nbytes_ = view.nbytes;
    read_only_ = view.owner().read_only;
  } else {
    PyMemory& memory = *nb::inst_ptr<PyMemory>(object);
    data_ = memory.lend();
    nbytes_ = memory.core->nbytes();
    read_only_ = memory.read_only;
  }
  return true;
}

bool Buffer::from_exchange(nb::handle object, const Purpose& what) {
  const TensorType type = tensor_type(Py_TYPE(object.ptr()));  // a copy: asking may run Python
  if (type.describe == nullptr) return false;
  nb::dlpack::dltensor tensor{};
  if (type.describe(object.ptr(), &tensor) != 0) {
    PyErr_Clear();  // a tensor that DLPack does not describe, one on the meta device for instance: the slow way says why
    return false;
  }
  const int device = tensor.device.device_type;
  if (device != nb::device::cpu::value && device != nb::device::cuda_host::value) {
    refuse_device(what, spelled(nb::getattr(object, "device", nb::str("unknown"))));
  }
  if (!is_compact(tensor)) refuse_strided(what);
  std::uint64_t elements = 1;
  for (int i = 0; i < tensor.ndim; ++i) elements *= static_cast<std::uint64_t>(tensor.shape[i]);
  const bool complex = tensor.dtype.code == kComplex;
  if ((complex || tensor.dtype.code == kFloat) && is_lazy(object, type, complex)) refuse_lazy(what);
  is_tensor_ = true;
  set(static_cast<char*>(tensor.data) + tensor.byte_offset, (elements * tensor.dtype.bits * tensor.dtype.lanes + 7) / 8,
      object, what);
  return true;
}

void Buffer::from_torch(nb::handle object, const Purpose& what) {
  const std::string device = nb::cast<std::string>(object.attr("device").attr("type"));
  if (device != "cpu") refuse_device(what, spelled(object.attr("device")));
  if (const std::string layout = spelled(object.attr("layout")); layout != "torch.strided") {
    fail(ErrorKind::Layout, what.name, " has layout ", layout, "; a dense tensor is needed");
  }
  if (nb::cast<bool>(object.attr("is_neg")()) || nb::cast<bool>(object.attr("is_conj")())) refuse_lazy(what);
  if (!nb::cast<bool>(object.attr("is_contiguous")())) refuse_strided(what);
  is_tensor_ = true;
  set(reinterpret_cast<void*>(nb::cast<std::uintptr_t>(object.attr("data_ptr")())),
      nb::cast<std::uint64_t>(object.attr("numel")()) * nb::cast<std::uint64_t>(object.attr("element_size")()), object,
      what);
}

void Buffer::set(void* data, std::uint64_t nbytes, nb::handle object, const Purpose& what) {
  if (data == nullptr && nbytes != 0)
    fail(ErrorKind::Layout, what.name, " has no memory of its own (", type_of(object), ")");
  data_ = data;
  nbytes_ = nbytes;
}

void Buffer::from_protocol(nb::handle object, const Purpose& what, bool writable) {
  if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
    nb::python_error error;
    fail(ErrorKind::Layout, what.name, " cannot be read as bytes: ", nb::str(error.value()).c_str());
  }
  struct Release {  // an error thrown from a constructor does not come to the destructor
    Py_buffer* view;
    ~Release() {
      if (view != nullptr) PyBuffer_Release(view);
    }
  } release{&view_};
  if (!PyBuffer_IsContiguous(&view_, 'C')) refuse_strided(what);
  if (view_.format != nullptr && std::strchr(view_.format, 'O') != nullptr) {
    fail(ErrorKind::Layout, what.name, " holds Python objects; their addresses mean nothing elsewhere");
  }
  read_only_ = view_.readonly != 0;
  if (writable && read_only_) refuse_read_only(what);
  data_ = view_.buf;
  nbytes_ = static_cast<std::uint64_t>(view_.len);
  release.view = nullptr;
  has_view_ = true;
}

}  // namespace onesided::python
