#include <array>
#include <cstring>
#include <exception>

#include "python/common.h"

namespace onesided::python {
namespace {

// The classes of onesided.errors, in the order of ErrorKind. Held for ever: the translator may run until the very end.
constexpr std::array<const char*, kErrorKinds> kClassNames{
    "OnesidedError", "ConnectionLost", "DeadlineExceeded",  "RemoteAccessError", "BoundsError",
    "LayoutError",   "HandleError",    "RegistrationError", "StaleHandle",       "Unsupported"};
std::array<PyObject*, kErrorKinds> classes{};

void raise_in_python(const Error& error) {
  PyObject* type = classes[static_cast<unsigned>(error.kind())];
  // A message may quote bytes of a peer, or be cut in the middle of a letter.
  PyObject* message =
      PyUnicode_DecodeUTF8(error.what(), static_cast<Py_ssize_t>(std::strlen(error.what())), "backslashreplace");
  if (message == nullptr) return;
  if (error.error_number() != 0 &&
      PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type), reinterpret_cast<PyTypeObject*>(PyExc_OSError))) {
    // Two arguments set errno of an OSError.
    if (PyObject* arguments = Py_BuildValue("(iO)", error.error_number(), message)) {
      PyErr_SetObject(type, arguments);
      Py_DECREF(arguments);
    }
  } else {
    PyErr_SetObject(type, message);
  }
  Py_DECREF(message);
}

}  // namespace

nb::object python_error_of(const Error& error) {
  raise_in_python(error);
  nb::python_error raised;
  return nb::borrow(raised.value());
}

void register_errors(nb::module_&) {
  nb::module_ errors = nb::module_::import_("onesided.errors");
  for (unsigned i = 0; i < kErrorKinds; ++i) classes[i] = nb::object(errors.attr(kClassNames[i])).release().ptr();
  nb::register_exception_translator([](const std::exception_ptr& raised, void*) {
    try {
      std::rethrow_exception(raised);
    } catch (const Error& error) {
      raise_in_python(error);
    }
  });
}

}  // namespace onesided::python
