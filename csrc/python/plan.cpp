// Scatter and gather: many pieces in one call, described once or for this call only.
#include "python/plan.h"

namespace onesided::python {
namespace {

constexpr Purpose kPiecePurpose{"a piece", "describe it row by row, or with Plan.strided",
                                "pass x.resolve_conj().resolve_neg()"};

// As onesided::at_piece, for errors of Python's, too.
template <class Look>
auto at_python_piece(std::size_t i, Look&& look) {
  try {
    return at_piece(i, look);
  } catch (const nb::builtin_exception& error) {
    throw nb::type_error(text("piece ", i, ": ", error.what()).c_str());
  }
}

}  // namespace

PyPlan::PyPlan(nb::handle given, bool lasts, bool outlives_call)
    // Tuples, so that nobody changes them, or lets go of what they hold, while they are in use.
    : hold(to_tuple(given, "pieces must be a Plan or (buffer, offset_bytes) pairs")) {
  // First: converting an offset may run any Python, which might give a buffer other bytes.
  std::vector<std::uint64_t> offsets;
  offsets.reserve(hold.size());
  for (const nb::handle pair : hold) {
    const std::size_t i = offsets.size();
    if (!PyTuple_CheckExact(pair.ptr()) || PyTuple_GET_SIZE(pair.ptr()) != 2) {
      throw nb::type_error(text("piece ", i, " must be a tuple (buffer, offset_bytes), not ", type_of(pair)).c_str());
    }
    offsets.push_back(at_python_piece(i, [&] { return to_u64(PyTuple_GET_ITEM(pair.ptr(), 1), "offset_bytes"); }));
  }
  look(offsets, outlives_call);
  if (!lasts) return;
  // Only now, when all of them are known to be good. What they are is looked at again: the first time they could still be resized.
  for (const nb::handle pair : hold) keep_in_place(PyTuple_GET_ITEM(pair.ptr(), 0));
  look(offsets, true);
}

void PyPlan::look(const std::vector<std::uint64_t>& offsets, bool keeps_storages) {
  std::vector<Piece> found;
  found.reserve(hold.size());
  std::vector<Keepalive> keeping;
  nbytes = largest = 0;
  first_read_only.reset();
  for (const nb::handle pair : hold) {
    const std::size_t i = found.size();
    at_python_piece(i, [&] {
      Buffer buffer(PyTuple_GET_ITEM(pair.ptr(), 0), kPiecePurpose, false);
      found.push_back({buffer.data(), buffer.nbytes(), offsets[i]});
      if (buffer.read_only() && !first_read_only) first_read_only = i;
      nbytes += buffer.nbytes();
      largest = std::max(largest, buffer.nbytes());
      if (buffer.has_view() || (keeps_storages && buffer.is_tensor())) keeping.push_back(buffer.keep());
    });
  }
  pieces = std::make_shared<const std::vector<Piece>>(std::move(found));
  kept = std::move(keeping);
}

// In whatever thread: buffers are free again when this is over.
PyPlan::~PyPlan() {
  if (kept.empty()) return;
  kept.clear();
  release_kept_objects();
}

void PyPlan::identify() {
  if (identified) return;
  std::vector<Piece> better = *pieces;
  for (std::size_t i = 0; i < better.size(); ++i) {
    How how;
    python::identify(PyTuple_GET_ITEM(PyTuple_GET_ITEM(hold.ptr(), static_cast<Py_ssize_t>(i)), 0), how);
    better[i].memory = how.memory;
    better[i].allocation = std::move(how.allocation);
  }
  pieces = std::make_shared<const std::vector<Piece>>(std::move(better));
  identified = true;
}

void register_plan(nb::module_& m) {
  nb::class_<PyPlan>(m, "Plan",
                     R"(Pieces of memory here, each with its place in a window: what put_many() and get_many() move.

Made once and used again and again. It keeps its buffers alive and where they are: tensors in it cannot be resized any more, nor
arrays as long as it lives. Pieces are unordered; where they overlap at their goal, either may win.)")
      .def(
          "__init__", [](PyPlan* self, nb::handle pieces) { new (self) PyPlan(pieces, true, true); }, nb::arg("pieces"),
          nb::sig("def __init__(self, pieces: collections.abc.Iterable[tuple[object, int]]) -> None"),
          R"(`pieces`: pairs of a contiguous tensor, array or buffer and an offset in bytes.

Raises LayoutError, BoundsError and TypeError that name the piece.)")
      .def(
          "__len__", [](const PyPlan& self) { return self.pieces->size(); }, nb::sig("def __len__(self) -> int"))
      .def_prop_ro("nbytes", [](const PyPlan& self) { return self.nbytes; }, "Of all pieces together.");
}

}  // namespace onesided::python
