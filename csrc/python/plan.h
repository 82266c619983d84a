// The Python object `Plan`, and how put_many and get_many take one.
#pragma once

#include <vector>

#include "core/window.h"
#include "python/operations.h"

namespace onesided::python {

struct PyPlan {
  // Not changed once it is here: operations in other threads read it without the GIL.
  std::shared_ptr<const std::vector<Piece>> pieces;
  nb::tuple hold;               // of (buffer, offset_bytes)
  std::vector<Keepalive> kept;  // of views and of tensors' storages
  std::uint64_t nbytes = 0, largest = 0;
  std::optional<std::size_t> first_read_only;
  bool identified = false;

  // `lasts`: it will be used more than once, so that its memory must stay where it is. `outlives_call`: it is for one operation that
  // goes on after its call.
  PyPlan(nb::handle given, bool lasts, bool outlives_call);
  PyPlan(PyPlan&&) = default;
  ~PyPlan();

  // Finds out what the pieces are parts of. Runs Python.
  void identify();

 private:
  void look(const std::vector<std::uint64_t>& offsets, bool keeps_storages);
};

// A Plan, or one for this call only.
struct Pieces {
  nb::object object;
  PyPlan& plan;

  Pieces(nb::handle pieces, bool async_op)
      : object(nb::isinstance<PyPlan>(pieces) ? nb::borrow(pieces) : nb::cast(PyPlan(pieces, false, async_op))),
        plan(to_instance<PyPlan>(object, "pieces", "Plan that was initialized")) {}

  // `move` is Target::write_many or read_many.
  template <class Move>
  nb::object run_on(const std::shared_ptr<Window>& window, Target& target, bool reads, bool async_op,
                    const Deadline& deadline, Move&& move) {
    if (reads && plan.first_read_only) {
      fail(ErrorKind::Layout, "piece ", *plan.first_read_only, " is read-only and would be written");
    }
    const std::shared_ptr<Window> alive = window;  // what follows runs Python, which may close it
    if (target.wants_allocation(plan.largest, reads)) plan.identify();
    How how;
    how.async = async_op;
    how.deadline = deadline;
    if (async_op) how.keep = keep_object(object);
    const auto pieces = plan.pieces;
    return run(true, alive, [&] { return move(std::span<const Piece>(*pieces), how); });
  }
};

}  // namespace onesided::python
