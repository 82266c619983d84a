// Which object of the caller's a buffer lies in, from its birth to its death: see Allocation in core/transport.h.
#include <cstring>
#include <unordered_map>

#include "python/common.h"

namespace onesided::python {
namespace {

struct Tracked {
  PyObject* watch;  // a weak reference whose callback takes the entry out
  std::shared_ptr<Allocation> allocation;
};

// By object. Under the GIL.
std::unordered_map<PyObject*, Tracked>& tracked() {
  static auto* const all = new std::unordered_map<PyObject*, Tracked>;
  return *all;
}

// Called while the object dies, before its memory is freed: what devices know of it ends first.
PyObject* forget(PyObject* key, PyObject*) {
  auto* const object = static_cast<PyObject*>(PyLong_AsVoidPtr(key));
  if (const auto found = tracked().find(object); found != tracked().end()) {
    const Tracked gone = std::move(found->second);
    tracked().erase(found);
    Py_DECREF(gone.watch);
  }
  Py_RETURN_NONE;
}
PyMethodDef forget_method{"onesided_forget", forget, METH_O, nullptr};

// The allocation of `object`, whose bytes are [data, data + nbytes). Null if its end cannot be watched, or, if it is `resizable`, a
// change of its memory in between.
std::shared_ptr<Allocation> allocation_of(nb::handle object, void* data, std::uint64_t nbytes, bool resizable) {
  auto& all = tracked();
  if (const auto found = all.find(object.ptr()); found != all.end()) {
    const auto& known = found->second.allocation;
    if (known->data() == data && known->nbytes() == nbytes && known->intact()) return known;
    // It has been resized, to another size or to nothing and back: what is known of its former memory must not be used again.
    const Tracked gone = std::move(found->second);
    all.erase(found);
    Py_DECREF(gone.watch);
  }
  std::unique_ptr<Residence> residence = resizable ? Residence::claim(data, nbytes) : nullptr;
  if (resizable && residence == nullptr) return nullptr;
  const nb::object key = nb::steal(PyLong_FromVoidPtr(object.ptr()));
  const nb::object callback = nb::steal(PyCFunction_New(&forget_method, key.ptr()));
  PyObject* const watch = PyWeakref_NewRef(object.ptr(), callback.ptr());
  if (watch == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  return all.emplace(object.ptr(), Tracked{watch, std::make_shared<Allocation>(data, nbytes, std::move(residence))})
      .first->second.allocation;
}

bool is_array(nb::handle object) {
  static PyTypeObject* type = nullptr;
  PyTypeObject* const its = Py_TYPE(object.ptr());
  if (its == type) return true;
  if (std::strcmp(its->tp_name, "numpy.ndarray") != 0) return false;
  type = its;
  return true;
}

// The allocation that an array or a view of one lies in. What it is a view of, if that is something else.
nb::object identify_array(nb::object owner, How& how) {
  while (is_array(owner)) {
    // numpy refuses to resize what is weakly referenced, as arrays are that are known here: one look is enough.
    if (const auto known = tracked().find(owner.ptr()); known != tracked().end()) {
      how.allocation = known->second.allocation;
      return nb::object();
    }
    nb::object base = owner.attr("base");
    if (base.is_none()) {
      const auto data = nb::cast<std::uintptr_t>(owner.attr("__array_interface__")["data"][0]);
      how.allocation =
          allocation_of(owner, reinterpret_cast<void*>(data), nb::cast<std::uint64_t>(owner.attr("nbytes")), false);
      return nb::object();
    }
    owner = std::move(base);
  }
  return owner;
}

}  // namespace

void keep_in_place(nb::handle object) {
  if (!is_torch_tensor(object)) return;
  // There is no call for it, but torch does it for whatever it shares with numpy ("Trying to resize storage that is not
  // resizable"). The bytes are shared as such: numpy does not know all of torch's types.
  try {
    const nb::module_ torch = nb::module_::import_("torch");
    nb::object bytes = torch.attr("empty")(0, nb::arg("dtype") = torch.attr("uint8"), nb::arg("device") = "cpu");
    bytes.attr("set_")(object.attr("untyped_storage")()).attr("numpy")();
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;
    // A tensor without a storage that can be resized, on another device for instance: what it is good for is told elsewhere.
  }
}

void identify(nb::handle object, How& how) {
  static const nb::handle view_type = nb::type<PyView>(), memory_type = nb::type<PyMemory>();
  if (object.type().is(memory_type)) {
    how.memory = nb::inst_ptr<PyMemory>(object)->core.get();
    return;
  }
  if (object.type().is(view_type)) {
    how.memory = nb::inst_ptr<PyView>(object)->owner().core.get();
    return;
  }
  try {
    nb::object owner = nb::borrow(object);
    if (is_array(object)) {
      owner = identify_array(std::move(owner), how);
      if (!owner.is_valid()) return;
    } else if (nb::hasattr(object, "untyped_storage")) {
      // The Python object of a storage lives as long as the storage itself, whoever else uses that.
      const nb::object storage = object.attr("untyped_storage")();
      const auto data = nb::cast<std::uintptr_t>(storage.attr("data_ptr")());
      how.allocation = allocation_of(storage, reinterpret_cast<void*>(data),
                                     nb::cast<std::uint64_t>(storage.attr("nbytes")()), true);
      return;
    }
    while (PyMemoryView_Check(owner.ptr())) owner = nb::borrow(owner.attr("obj"));
    if (owner.type().is(memory_type) || owner.type().is(view_type)) identify(owner, how);
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;  // Ctrl-C
    // Something else that looks like a tensor: it is registered for each operation.
  } catch (const nb::cast_error&) {
  }
}

}  // namespace onesided::python
