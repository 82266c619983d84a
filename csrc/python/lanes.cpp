// Spans, Lanes and Messages: what onesided.collectives is written with.
#include "collectives/lanes.h"
#include "collectives/messages.h"
#include "core/copy.h"

#include "python/common.h"

namespace onesided::python {

std::shared_ptr<Window> window_of(nb::handle window);
nb::object python_error_of(const Error& error);

namespace {

// Elements of a tensor, array or buffer that algorithms cut into parts.
struct PySpan {
  struct Root {
    Keepalive keep;
    How how;  // what the bytes are a part of
    bool writable;
    std::uint64_t itemsize;
  };
  std::shared_ptr<const Root> root;
  char* data;
  std::uint64_t nbytes;

  std::uint64_t count() const { return nbytes / root->itemsize; }
};

constexpr Purpose kInput{"the input", "pass x.contiguous()", "pass x.resolve_conj().resolve_neg()"};
constexpr Purpose kOutput{"the output", "receive into a contiguous tensor, then x.copy_(it)",
                          "receive into a plain tensor, then x.copy_(it)"};

PySpan make_span(nb::handle object, std::uint64_t itemsize, bool writable, bool identified) {
  Buffer buffer(object, writable ? kOutput : kInput, writable);
  if (itemsize == 0 || buffer.nbytes() % itemsize != 0) {
    fail(ErrorKind::Bounds, "a span of ", buffer.nbytes(), " bytes has no elements of ", itemsize, " bytes");
  }
  auto root = std::make_shared<PySpan::Root>();
  root->keep = buffer.keep();
  root->writable = writable;
  root->itemsize = itemsize;
  if (identified) identify(object, root->how);
  return {std::move(root), static_cast<char*>(buffer.data()), buffer.nbytes()};
}

PySpan part_of(const PySpan& span, std::uint64_t begin, std::uint64_t end) {
  if (begin > end || end > span.count()) {
    fail(ErrorKind::Bounds, "elements ", begin, " to ", end, " are not within a span of ", span.count());
  }
  return {span.root, span.data + begin * span.root->itemsize, (end - begin) * span.root->itemsize};
}

Element element_of(nb::handle name) {
  const std::string said = to_string(name, "element");
  const auto found = element_named(said);
  if (!found) fail(ErrorKind::Unsupported, "elements of type ", said, " cannot be reduced");
  return *found;
}

Reduction reduction_of(nb::handle name) {
  const std::string said = to_string(name, "reduction");
  const auto found = reduction_named(said);
  if (!found) fail(ErrorKind::Unsupported, "there is no reduction ", said);
  return *found;
}

struct PyLanes {
  std::shared_ptr<Lanes> core;
};

struct PyMessage {
  std::shared_ptr<Messages> messages;
  std::shared_ptr<Message> core;
};

struct PyMessages {
  std::shared_ptr<Messages> core;

  // Starts it by `begin`, and waits if nobody else is to do so: then it must not go on without its caller.
  template <class Begin>
  PyMessage start(Begin&& begin, nb::handle async_op) const {
    const bool is_async = to_flag(async_op, "async_op");
    const std::shared_ptr<Messages> held = core;
    Blocking blocking;
    const std::shared_ptr<Message> message = begin(*held, is_async);
    if (!is_async) {
      try {
        held->wait(message, Deadline::never());
      } catch (...) {
        held->withdraw(message, "it was interrupted");
        throw;
      }
      if (message->error()) throw Error(*message->error());
    }
    return {held, message};
  }
};

How how_of(const PySpan& span, nb::handle timeout_s) {
  How how = span.root->how;
  how.keep = span.root->keep;
  how.deadline = to_deadline(timeout_s);
  return how;
}

const PySpan& span_at(PyObject* tuple, Py_ssize_t place, bool written) {
  const PySpan& span = to_instance<PySpan>(PyTuple_GET_ITEM(tuple, place), "a move's data", "Span");
  if (written && !span.root->writable) fail(ErrorKind::Layout, "a span that is only read cannot be received into");
  return span;
}

void check_sizes(const PySpan& left, const PySpan& right) {
  if (left.nbytes != right.nbytes)
    fail(ErrorKind::Bounds, "a move joins ", left.nbytes, " and ", right.nbytes, " bytes");
}

Move to_move(nb::handle given) {
  PyObject* const tuple = given.ptr();
  if (!PyTuple_CheckExact(tuple) || PyTuple_GET_SIZE(tuple) < 3)
    throw nb::type_error("a move must come from a Team's methods");
  const auto kind = to_u32(PyTuple_GET_ITEM(tuple, 0), "kind");
  const auto rank = static_cast<unsigned>(to_u32(PyTuple_GET_ITEM(tuple, 1), "rank"));
  const auto needs = [&](Py_ssize_t items) {
    if (PyTuple_GET_SIZE(tuple) != items) throw nb::type_error("a move must come from a Team's methods");
  };
  switch (static_cast<Move::Kind>(kind)) {
    case Move::Kind::Send: {
      needs(3);
      const PySpan& from = span_at(tuple, 2, false);
      return {Move::Kind::Send, rank,    from.nbytes,           nullptr,
              from.data,        nullptr, from.root->how.memory, from.root->how.allocation};
    }
    case Move::Kind::Receive: {
      needs(3);
      const PySpan& into = span_at(tuple, 2, true);
      return {Move::Kind::Receive, rank, into.nbytes, into.data, nullptr, nullptr};
    }
    case Move::Kind::Reduce: {
      needs(4);
      const PySpan &into = span_at(tuple, 2, true), &operand = span_at(tuple, 3, false);
      check_sizes(into, operand);
      return {Move::Kind::Reduce, rank, into.nbytes, into.data, nullptr, operand.data};
    }
    case Move::Kind::Combine: {
      needs(5);
      const PySpan &into = span_at(tuple, 2, true), &operand = span_at(tuple, 3, false),
                   &from = span_at(tuple, 4, false);
      check_sizes(into, operand);
      check_sizes(into, from);
      return {Move::Kind::Combine, 0, into.nbytes, into.data, from.data, operand.data};
    }
  }
  throw nb::type_error("a move must come from a Team's methods");
}

}  // namespace

void register_lanes(nb::module_& m) {
  m.def(
      "check_reducible",
      [](nb::handle element, nb::handle reduction) { check_reducible(element_of(element), reduction_of(reduction)); },
      nb::arg("element").none(), nb::arg("reduction").none(),
      nb::sig("def check_reducible(element: str, reduction: str) -> None"),
      "Unsupported if elements of this type cannot be reduced in this way.");
  nb::class_<PySpan>(m, "Span", R"(Elements of a tensor, array or buffer, to be cut into parts and moved by algorithms.

Keeps what it lies in alive. `span[a:b]` are the elements a to b of it, nothing is copied.)")
      .def(
          "__init__",
          [](PySpan* self, nb::handle buffer, nb::handle itemsize, nb::handle writable, nb::handle identified) {
            const std::uint64_t size = to_u64(itemsize, "itemsize");
            const bool writes = to_flag(writable, "writable"), identifies = to_flag(identified, "identified");
            new (self) PySpan(make_span(buffer, size, writes, identifies));
          },
          nb::arg("buffer").none(), nb::arg("itemsize").none() = 1, nb::arg("writable").none() = false,
          nb::arg("identified").none() = false,
          nb::sig("def __init__(self, buffer: object, itemsize: int = 1, writable: bool = False, identified: bool = "
                  "False) -> None"),
          "`identified`: find out what the bytes are a part of, which devices want to know.")
      .def(
          "part",
          [](const PySpan& self, nb::handle begin, nb::handle end) {
            return part_of(self, to_u64(begin, "begin"), to_u64(end, "end"));
          },
          nb::arg("begin").none(), nb::arg("end").none(), nb::sig("def part(self, begin: int, end: int) -> Span"),
          "The elements `begin` to `end`. BoundsError if they are not all there.")
      .def(
          "cast",
          [](const PySpan& self, nb::handle itemsize) {
            const std::uint64_t size = to_u64(itemsize, "itemsize");
            if (size == 0 || self.nbytes % size != 0) {
              fail(ErrorKind::Bounds, "a span of ", self.nbytes, " bytes has no elements of ", size, " bytes");
            }
            auto root = std::make_shared<PySpan::Root>(*self.root);
            root->itemsize = size;
            return PySpan{std::move(root), self.data, self.nbytes};
          },
          nb::arg("itemsize").none(), nb::sig("def cast(self, itemsize: int) -> Span"),
          "The same bytes as elements of another size.")
      .def(
          "__len__", [](const PySpan& self) { return self.count(); }, nb::sig("def __len__(self) -> int"))
      .def_prop_ro(
          "nbytes", [](const PySpan& self) { return self.nbytes; }, "Size in bytes.")
      .def(
          "copy_from",
          [](const PySpan& self, nb::handle other) {
            const PySpan& from = to_instance<PySpan>(other, "the source", "Span");
            check_sizes(self, from);
            if (!self.root->writable) fail(ErrorKind::Layout, "a span that is only read cannot be copied into");
            if (self.data == from.data) return;
            const PySpan into_held = self, from_held = from;
            Blocking blocking;
            copy_memory(into_held.data, from_held.data, into_held.nbytes);
          },
          nb::arg("other").none(), nb::sig("def copy_from(self, other: Span) -> None"),
          "Copies all bytes of `other` into this.")
      .def(
          "divide",
          [](const PySpan& self, nb::handle element, nb::handle divisor) {
            const Element kind = element_of(element);
            const std::uint64_t by = to_u64(divisor, "divisor");
            if (!self.root->writable || by == 0)
              fail(ErrorKind::Bounds, "divide: not a span to write, or a division by zero");
            const PySpan held = self;
            Blocking blocking;
            divide(held.data, held.data, held.nbytes / element_nbytes(kind), kind, by);
          },
          nb::arg("element").none(), nb::arg("divisor").none(),
          nb::sig("def divide(self, element: str, divisor: int) -> None"),
          "Divides each element; integers are truncated toward zero.");
  nb::class_<PyLanes>(m, "Lanes",
                      R"(Streams of bytes with credits between the ranks of a window: what collectives are made of.)")
      .def(
          "__init__",
          [](PyLanes* self, nb::handle window, nb::handle slots, nb::handle slot_nbytes) {
            const std::uint32_t count = to_u32(slots, "slots");
            const std::uint64_t nbytes = to_u64(slot_nbytes, "slot_nbytes");
            new (self) PyLanes{std::make_shared<Lanes>(std::make_shared<Inboxes>(window_of(window), count, nbytes))};
          },
          nb::arg("window").none(), nb::arg("slots").none(), nb::arg("slot_nbytes").none(),
          nb::sig("def __init__(self, window: Window, slots: int, slot_nbytes: int) -> None"),
          "Over a zeroed window of window_nbytes() bytes with 2 shared and 2 origin signals, used by nobody else.")
      .def_static(
          "window_nbytes",
          [](nb::handle ranks, nb::handle slots, nb::handle slot_nbytes) {
            return Inboxes::window_nbytes(to_u32(ranks, "ranks"), to_u32(slots, "slots"),
                                          to_u64(slot_nbytes, "slot_nbytes"));
          },
          nb::arg("ranks").none(), nb::arg("slots").none(), nb::arg("slot_nbytes").none(),
          nb::sig("def window_nbytes(ranks: int, slots: int, slot_nbytes: int) -> int"),
          "What the window of each rank must have.")
      .def(
          "step",
          [](PyLanes& self, nb::handle operation, nb::handle label, nb::handle moves, nb::handle element,
             nb::handle reduction, nb::handle timeout_s) {
            const std::string name = to_string(operation, "operation");
            Step step{name.c_str(), to_u64(label, "label")};
            step.deadline = to_deadline(timeout_s);
            if (!element.is_none()) step.element = element_of(element);
            if (!reduction.is_none()) step.reduction = reduction_of(reduction);
            const nb::tuple given = to_tuple(moves, "moves must be made by a Team's methods");  // holds the spans
            std::vector<Move> all;
            all.reserve(given.size());
            for (const nb::handle move : given) all.push_back(to_move(move));
            const std::shared_ptr<Lanes> core = self.core;
            Blocking blocking;
            core->step(step, all);
          },
          nb::arg("operation").none(), nb::arg("label").none(), nb::arg("moves").none(),
          nb::arg("element").none() = nb::none(), nb::arg("reduction").none() = nb::none(),
          nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def step(self, operation: str, label: int, moves: collections.abc.Iterable[tuple[object, ...]], "
                  "element: str | "
                  "None = None, reduction: str | None = None, timeout_s: float | None = None) -> None"),
          "Does all moves at once and returns when all are over; see csrc/collectives/lanes.h. One thread at a time.")
      .def(
          "end",
          [](PyLanes& self, nb::handle reason, nb::handle late) {
            const std::string said = to_string(reason, "reason");
            const auto kind = to_flag(late, "late") ? ErrorKind::DeadlineExceeded : ErrorKind::ConnectionLost;
            const std::shared_ptr<Lanes> core = self.core;
            Blocking blocking;
            core->end(kind, said);
          },
          nb::arg("reason").none(), nb::arg("late").none() = false,
          nb::sig("def end(self, reason: str, late: bool = False) -> None"),
          "Has every step, here and at the other ranks, under way and later, fail with `reason`. Any thread.")
      .def(
          "ended", [](PyLanes& self) { return self.core->ended(); }, nb::sig("def ended(self) -> bool"),
          "Whether they have ended.")
      .def(
          "progress_of",
          [](PyLanes& self, nb::handle rank, nb::handle timeout_s) {
            const std::uint32_t peer = to_u32(rank, "rank");
            const Deadline deadline = to_deadline(timeout_s);
            const std::shared_ptr<Lanes> core = self.core;
            Blocking blocking;
            return core->progress_of(peer, deadline);
          },
          nb::arg("rank").none(), nb::arg("timeout_s").none() = nb::none(),
          nb::sig("def progress_of(self, rank: int, timeout_s: float | None = None) -> int"),
          "The label of the operation that `rank` began last, read from its memory: it may be stopped.");
  nb::class_<PyMessage>(m, "Message", "A send or a receive that was started. Any thread.")
      .def(
          "done", [](PyMessage& self) { return self.core->over(); }, nb::sig("def done(self) -> bool"),
          "Whether it has succeeded or failed. Never blocks.")
      .def(
          "wait",
          [](PyMessage& self, nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            const PyMessage held = self;
            Blocking blocking;
            if (!held.messages->wait(held.core, deadline)) return false;
            if (held.core->error()) throw Error(*held.core->error());
            return true;
          },
          nb::arg("timeout_s").none() = nb::none(), nb::sig("def wait(self, timeout_s: float | None = None) -> bool"),
          "True when it has succeeded; raises its error if it failed. False at the deadline, and it goes on.")
      .def(
          "exception",
          [](PyMessage& self) -> nb::object {
            if (!self.core->over() || !self.core->error()) return nb::none();
            return python_error_of(*self.core->error());
          },
          nb::sig("def exception(self) -> onesided.errors.OnesidedError | None"),
          "The error of one that failed; None if it succeeded or is not over. Never blocks.")
      .def(
          "rank",
          [](PyMessage& self) -> nb::object {
            if (!self.core->over() || !self.core->rank()) return nb::none();
            return nb::int_(*self.core->rank());
          },
          nb::sig("def rank(self) -> int | None"), "The rank at the other end, once it is over.");
  nb::class_<PyMessages>(m, "Messages",
                         "Sends and receives between the ranks of a window; see csrc/collectives/messages.h.")
      .def(
          "__init__",
          [](PyMessages* self, nb::handle window, nb::handle slots, nb::handle slot_nbytes) {
            const std::uint32_t count = to_u32(slots, "slots");
            const std::uint64_t nbytes = to_u64(slot_nbytes, "slot_nbytes");
            new (self)
                PyMessages{std::make_shared<Messages>(std::make_shared<Inboxes>(window_of(window), count, nbytes))};
          },
          nb::arg("window").none(), nb::arg("slots").none(), nb::arg("slot_nbytes").none(),
          nb::sig("def __init__(self, window: Window, slots: int, slot_nbytes: int) -> None"),
          "As Lanes, over a window of their own.")
      .def(
          "send",
          [](PyMessages& self, nb::handle rank, nb::handle tag, nb::handle data, nb::handle timeout_s,
             nb::handle async_op) {
            const std::uint32_t to = to_u32(rank, "dst");
            const std::uint64_t label = to_u64(tag, "tag");
            const PySpan span = to_instance<PySpan>(data, "the data", "Span");
            const How how = how_of(span, timeout_s);
            return self.start(
                [&](Messages& core, bool served) { return core.send(to, label, span.data, span.nbytes, how, served); },
                async_op);
          },
          nb::arg("rank").none(), nb::arg("tag").none(), nb::arg("data").none(), nb::arg("timeout_s").none(),
          nb::arg("async_op").none(),
          nb::sig(
              "def send(self, rank: int, tag: int, data: Span, timeout_s: float | None, async_op: bool) -> Message"),
          "Sends it. Unless `async_op`, returns when it is over and raises its error; else somebody must be in "
          "serve().")
      .def(
          "receive",
          [](PyMessages& self, nb::handle rank, nb::handle tag, nb::handle into, nb::handle timeout_s,
             nb::handle async_op) {
            std::optional<unsigned> from;
            if (!rank.is_none()) from = to_u32(rank, "src");
            const std::uint64_t label = to_u64(tag, "tag");
            const PySpan span = to_instance<PySpan>(into, "the goal", "Span");
            if (!span.root->writable) fail(ErrorKind::Layout, "a span that is only read cannot be received into");
            const How how = how_of(span, timeout_s);
            return self.start(
                [&](Messages& core, bool served) {
                  return core.receive(from, label, span.data, span.nbytes, how, served);
                },
                async_op);
          },
          nb::arg("rank").none(), nb::arg("tag").none(), nb::arg("into").none(), nb::arg("timeout_s").none(),
          nb::arg("async_op").none(),
          nb::sig(
              "def receive(self, rank: int | None, tag: int, into: Span, timeout_s: float | None, async_op: bool) -> "
              "Message"),
          "Receives from `rank`, or from anybody. As send.")
      .def(
          "serve",
          [](PyMessages& self) {
            const std::shared_ptr<Messages> core = self.core;
            Blocking blocking;
            core->serve();
          },
          nb::sig("def serve(self) -> None"), "Moves what nobody waits for, until close(). One thread.")
      .def(
          "end",
          [](PyMessages& self, nb::handle reason) {
            const std::string said = to_string(reason, "reason");
            const std::shared_ptr<Messages> core = self.core;
            Blocking blocking;
            core->end(ErrorKind::ConnectionLost, said);
          },
          nb::arg("reason").none(), nb::sig("def end(self, reason: str) -> None"),
          "Has every message, here and at the other ranks, under way and later, fail with `reason`. Any thread.")
      .def(
          "close",
          [](PyMessages& self) {
            const std::shared_ptr<Messages> core = self.core;
            Blocking blocking;
            core->close();
          },
          nb::sig("def close(self) -> None"),
          "Fails what is not over, and has serve() return. Calling it twice is legal.");
}

}  // namespace onesided::python
