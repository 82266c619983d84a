// What all bindings share: errors, arguments, buffers of the caller, and waiting without the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/process.h"
#include "core/transport.h"

namespace nb = nanobind;

namespace onesided::python {

void register_errors(nb::module_& m);
void register_work(nb::module_& m);
void register_memory(nb::module_& m);
void register_transport(nb::module_& m);
void register_window(nb::module_& m);
void register_plan(nb::module_& m);
void register_tools(nb::module_& m);
void register_doctor(nb::module_& m);
void register_lanes(nb::module_& m);

// ---- Waiting --------------------------------------------------------------------------------------------------------

// Takes the GIL. While the interpreter ends, CPython ends other threads that ask for it by pthread_exit, whose forced
// unwinding no destructor and no `catch (...)` of C++ survives: such a thread rests until the process is gone.
template <class Take>
void take_gil(Take&& take) noexcept {
  try {
    take();
  } catch (...) {
    for (;;) ::pause();
  }
}

// Lets go of the GIL while it lives.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    take_gil([this] { PyEval_RestoreThread(state_); });
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* const state_;
};

// Releases what was let go of so far (see keep_object). No lock of the library may be held.
void release_kept_objects();

// The objects that the data plane lets go of on this thread while it lives are released at its end, under the GIL. Elsewhere the
// interpreter has to be asked to do that, which costs more than a small put.
class Settling {
 public:
  Settling() : outer_(here_) { here_ = true; }
  ~Settling() {
    here_ = outer_;
    take_gil(release_kept_objects);  // it is held, but what is released may run Python, which gives it away for a while
  }
  Settling(const Settling&) = delete;
  Settling& operator=(const Settling&) = delete;
  static bool here() { return here_; }

 private:
  static inline thread_local bool here_ = false;
  const bool outer_;
};

// Lets go of the GIL, and lets Ctrl-C through, while it lives. Nothing of Python may be touched meanwhile.
class Blocking {
 public:
  Blocking() : interruptible_(check_signals) {}

 private:
  static void check_signals();

  Settling settling_;
  ReleasedGil released_;
  InterruptScope interruptible_;
};

// The same, but only when and if the data plane comes to a point where it has to wait. `owner` is held on to then: another
// thread may let go of it.
template <class Owner>
class BlockingIfItWaits {
 public:
  explicit BlockingIfItWaits(const std::shared_ptr<Owner>& owner) : owner_(owner), hook_(begin, this) {}

 private:
  static void begin(void* self) {
    auto& me = *static_cast<BlockingIfItWaits*>(self);
    me.held_ = me.owner_;
    me.blocking_.emplace();
  }

  Settling settling_;
  const std::shared_ptr<Owner>& owner_;
  std::shared_ptr<Owner> held_;
  std::optional<Blocking> blocking_;
  BlockingHook hook_;
};

// Letting go of the GIL costs about as much as copying this much.
inline constexpr std::uint64_t kCopyUnderGil = 32 << 10;

// ---- Arguments ------------------------------------------------------------------------------------------------------

// An integer in [0, 2^64): TypeError for anything else than an integer, BoundsError that names `what` outside.
std::uint64_t to_u64(nb::handle value, const char* what);
std::uint32_t to_u32(nb::handle value, const char* what);
// An integer that stands for 64 bits, [-2^63, 2^64), or for 32; negative ones as two's complement.
std::uint64_t to_word(nb::handle value, const char* what, unsigned word_nbytes = 8);
unsigned to_word_nbytes(nb::handle value);  // 4 or 8
// A rank; whether it exists is for the window to say.
std::int64_t to_rank(nb::handle value);
// True or False.
bool to_flag(nb::handle value, const char* what);
std::string to_string(nb::handle value, const char* what);
// All items of an iterable, which nobody can change; TypeError that says what it must be.
nb::tuple to_tuple(nb::handle iterable, const char* must_be);
// None or a number of seconds, at least 0.
Deadline to_deadline(nb::handle timeout_s);

// "None", or the name of the type: what was given in place of what `must be`.
std::string type_of(nb::handle object);

// The C++ object behind `object`; TypeError that names both if it is of another type, None included.
template <class T>
T& to_instance(nb::handle object, const char* what, const char* type) {
  if (!nb::isinstance<T>(object) || !nb::inst_ready(object))
    throw nb::type_error(text(what, " must be a ", type, ", not ", type_of(object)).c_str());
  return *nb::inst_ptr<T>(object);
}

nb::dict to_dict(const Description& description);

// ---- Memory of the caller ---------------------------------------------------------------------------------------------

// Keeps a Python object alive from C++. It may be let go of on any thread without the GIL: the object is then released by
// the next call into this library, or by the interpreter as soon as it looks.
Keepalive keep_object(nb::handle object);

// What a buffer is for: its name in messages, and what helps if its bytes are strided, or not its values.
struct Purpose {
  const char* name;
  const char* if_strided;
  const char* if_lazy;
};
inline constexpr Purpose kSource{"the source",
                                 "pass x.contiguous() (numpy: np.ascontiguousarray(x)), or put it row by row",
                                 "pass x.resolve_conj().resolve_neg()"};
// A copy would be filled here, and lost.
inline constexpr Purpose kDestination{"the destination", "get into a contiguous tensor, then x.copy_(it)",
                                      "get into a plain tensor, then x.copy_(it)"};
// A window over a copy would never be seen in x.
inline constexpr Purpose kWindowMemory{
    "the memory to register", "make the window over a contiguous tensor and use that one from then on, in place of x",
    "make the window over x.resolve_conj().resolve_neg() and use that one from then on, in place of x"};

bool is_torch_tensor(nb::handle object);

// Has torch refuse to resize the storage of a tensor from here on, as memory that others know of must stay where it is. (Arrays and
// buffers refuse by themselves as long as somebody holds their bytes.)
void keep_in_place(nb::handle object);

// Tells `how` of which memory or allocation the buffer of `object` is a part, as far as that can be known.
void identify(nb::handle object, How& how);

// The bytes of a Memory, a View, a tensor or any object with the buffer protocol, for the length of one call.
class Buffer {
 public:
  // Throws TypeError if `object` has no bytes; LayoutError, naming `what`, if they are strided, of Python objects, or
  // read-only where `writable` is asked; Unsupported if they are not in host memory.
  Buffer(nb::handle object, const Purpose& what, bool writable);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  std::uint64_t nbytes() const { return nbytes_; }
  bool read_only() const { return read_only_; }
  // True if the bytes stay there only for as long as this does.
  bool has_view() const { return has_view_; }
  // True if the object may get other bytes while it lives.
  bool is_tensor() const { return is_tensor_; }
  nb::handle object() const { return object_; }
  // Keeps the bytes beyond the call, with what they belong to.
  Keepalive keep();

 private:
  bool from_own(nb::handle object);
  bool from_exchange(nb::handle object, const Purpose& what);
  void from_torch(nb::handle object, const Purpose& what);
  void set(void* data, std::uint64_t nbytes, nb::handle object, const Purpose& what);
  void from_protocol(nb::handle object, const Purpose& what, bool writable);

  PyObject* const object_;
  void* data_ = nullptr;
  std::uint64_t nbytes_ = 0;
  bool read_only_ = false;
  Py_buffer view_;
  bool has_view_ = false;
  bool is_tensor_ = false;
};

// ---- Objects --------------------------------------------------------------------------------------------------------

// The Python objects `Memory` and `View`. Memory holds on to its bytes for as long as the object lives, also after
// close(): arrays and tensors over it may still be in use. Only if nobody ever asked for them does close() let go.
struct PyMemory {
  std::shared_ptr<Memory> core;
  Keepalive keep = nullptr;  // of memory that was registered
  bool read_only = false;
  bool lent = false;  // somebody has the address
  bool let_go = false;

  PyMemory(std::shared_ptr<Memory> memory, Keepalive kept = nullptr, bool only_read = false)
      : core(std::move(memory)), keep(std::move(kept)), read_only(only_read) {}
  PyMemory(PyMemory&&) = default;
  ~PyMemory();

  // The bytes, for use by others. StaleHandle after a close() that has let go of them.
  char* lend();
  void close(const Deadline& deadline);
};

struct PyView {
  nb::object memory;  // a PyMemory
  std::uint64_t offset;
  std::uint64_t nbytes;

  PyMemory& owner() const { return *nb::inst_ptr<PyMemory>(memory); }
};

// The Python object for an operation; for one that is over (null), always the same finished Work.
nb::object to_python(const std::shared_ptr<Work>& work);

}  // namespace onesided::python
