// put, get and signal as the bindings of windows and of connections share them.
#pragma once

#include "python/common.h"

namespace onesided::python {

inline std::optional<Signal> to_signal(nb::handle index, nb::handle add) {
  if (index.is_none()) return std::nullopt;
  return Signal{to_u32(index, "signal index"), to_word(add, "add")};
}

// Small copies stay under the GIL; long ones, and whatever may have to wait, let go of it. `owner` then stays alive even
// if another thread closes it.
template <class Owner, class Operation>
nb::object run(bool lets_go, const std::shared_ptr<Owner>& owner, Operation&& operation) {
  std::shared_ptr<Work> work;
  if (lets_go) {
    const std::shared_ptr<Owner> held = owner;
    Blocking blocking;
    work = operation();
  } else {
    work = operation();
  }
  return to_python(work);
}

inline How how(bool async_op, const Deadline& deadline, Buffer& buffer) {
  How how;
  how.async = async_op;
  how.deadline = deadline;
  if (async_op) how.keep = buffer.keep();
  return how;
}

template <class Owner>
nb::object put(const std::shared_ptr<Owner>& owner, Target& target, nb::handle source, nb::handle offset_bytes, nb::handle signal, nb::handle add,
                      bool async_op, const Deadline& deadline) {
  Buffer buffer(source, "the source", false);
  const std::uint64_t offset = to_u64(offset_bytes, "offset_bytes");
  const std::optional<Signal> then = to_signal(signal, add);
  const How options = how(async_op, deadline, buffer);
  return run(async_op || buffer.nbytes() > kCopyUnderGil || (then && target.busy()), owner,
             [&] { return target.write(buffer.data(), buffer.nbytes(), offset, then, options); });
}

template <class Owner>
nb::object get(const std::shared_ptr<Owner>& owner, Target& target, nb::handle destination, nb::handle offset_bytes, bool async_op,
                      const Deadline& deadline) {
  Buffer buffer(destination, "the destination", true);
  const std::uint64_t offset = to_u64(offset_bytes, "offset_bytes");
  const How options = how(async_op, deadline, buffer);
  return run(async_op || buffer.nbytes() > kCopyUnderGil, owner,
             [&] { return target.read(buffer.data(), buffer.nbytes(), offset, options); });
}

template <class Owner>
nb::object signal(const std::shared_ptr<Owner>& owner, Target& target, nb::handle index, nb::handle add, bool async_op, const Deadline& deadline) {
  const Signal then{to_u32(index, "signal index"), to_word(add, "add")};
  How how;
  how.async = async_op;
  how.deadline = deadline;
  return run(async_op || target.busy(), owner, [&] { return target.signal(then, how); });
}

}  // namespace onesided::python
