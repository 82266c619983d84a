// put, get and signal as the bindings of windows and of connections share them.
#pragma once

#include "python/common.h"

namespace onesided::python {

// No transport cares where so few bytes lie, unless they are to land there later.
inline constexpr std::uint64_t kNeverIdentified = 4096;

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
    BlockingIfItWaits<Owner> blocking(owner);
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

// For so few bytes of an allocation that is larger, they are registered alone.
inline constexpr std::uint64_t kLargeForFew = 1 << 20;

// The same with what can be known of the buffer's memory, where that makes a difference. Finding out runs Python, which may close
// `owner` and let go of it: it is held in `alive` from before.
template <class Owner>
const How& identified(const How& how, nb::handle object, std::uint64_t nbytes, const std::shared_ptr<Owner>& owner,
                      const Target& target, std::optional<How>& better, std::shared_ptr<Owner>& alive,
                      bool reads = false) {
  const bool few = nbytes <= kNeverIdentified, lands = reads && how.async;
  if ((few && !lands) || !target.wants_allocation(nbytes, lands)) return how;
  alive = owner;
  better = how;
  identify(object, *better);
  if (few && better->allocation != nullptr && better->allocation->nbytes() > kLargeForFew) better->allocation = nullptr;
  return *better;
}

// The arguments of an operation as values. Converting them may run any Python (__index__, __float__, destructors), which
// may even close the window: so everything is converted first, and the window is looked at after that.
struct Put {
  const std::uint64_t offset;
  const std::optional<Signal> then;
  Buffer buffer;  // last: converting the others might give it other bytes
  const How options;

  Put(nb::handle source, nb::handle offset_bytes, nb::handle signal, nb::handle add, bool async_op,
      const Deadline& deadline)
      : offset(to_u64(offset_bytes, "offset_bytes")),
        then(to_signal(signal, add)),
        buffer(source, kSource, false),
        options(how(async_op, deadline, buffer)) {}

  template <class Owner>
  nb::object run_on(const std::shared_ptr<Owner>& owner, Target& target, std::uint64_t base = 0) const {
    std::optional<How> better;
    std::shared_ptr<Owner> alive;
    const How& how = identified(options, buffer.object(), buffer.nbytes(), owner, target, better, alive);
    return run(options.async || buffer.nbytes() > kCopyUnderGil || (then && target.busy()), alive ? alive : owner,
               [&] { return target.write(buffer.data(), buffer.nbytes(), base + offset, then, how); });
  }
};

struct Get {
  const std::uint64_t offset;
  Buffer buffer;
  const How options;

  Get(nb::handle destination, nb::handle offset_bytes, bool async_op, const Deadline& deadline)
      : offset(to_u64(offset_bytes, "offset_bytes")),
        buffer(destination, kDestination, true),
        options(how(async_op, deadline, buffer)) {}

  template <class Owner>
  nb::object run_on(const std::shared_ptr<Owner>& owner, Target& target, std::uint64_t base = 0) const {
    std::optional<How> better;
    std::shared_ptr<Owner> alive;
    const How& how = identified(options, buffer.object(), buffer.nbytes(), owner, target, better, alive, true);
    return run(options.async || buffer.nbytes() > kCopyUnderGil, alive ? alive : owner,
               [&] { return target.read(buffer.data(), buffer.nbytes(), base + offset, how); });
  }
};

struct SignalOnly {
  const Signal then;
  How options;

  SignalOnly(nb::handle index, nb::handle add, bool async_op, const Deadline& deadline)
      : then{to_u32(index, "signal index"), to_word(add, "add")} {
    options.async = async_op;
    options.deadline = deadline;
  }

  template <class Owner>
  nb::object run_on(const std::shared_ptr<Owner>& owner, Target& target) const {
    return run(options.async || target.busy(), owner, [&] { return target.signal(then, options); });
  }
};

// fetch_add, compare_swap and swap. `expected` is for compare_swap only.
struct ReadModifyWrite {
  Atomic what;
  const Deadline deadline;

  ReadModifyWrite(Atomic::Kind kind, nb::handle offset_bytes, nb::handle operand, nb::handle expected,
                  nb::handle word_nbytes, nb::handle timeout_s)
      : what{kind, to_u64(offset_bytes, "offset_bytes"), 0, 0, to_word_nbytes(word_nbytes)},
        deadline(to_deadline(timeout_s)) {
    const char* const name = kind == Atomic::Kind::FetchAdd ? "add" : kind == Atomic::Kind::Swap ? "value" : "desired";
    what.operand = to_word(operand, name, what.word_nbytes);
    if (kind == Atomic::Kind::CompareSwap) what.expected = to_word(expected, "expected", what.word_nbytes);
  }

  template <class Owner>
  std::uint64_t run_on(const std::shared_ptr<Owner>& owner, Target& target, std::uint64_t base = 0) const {
    BlockingIfItWaits<Owner> blocking(owner);
    Atomic there = what;
    there.offset += base;
    return target.atomic(there, deadline);
  }
};

}  // namespace onesided::python
