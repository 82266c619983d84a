#include "python/common.h"

namespace onesided::python {

nb::object python_error_of(const Error& error);

nb::object to_python(const std::shared_ptr<Work>& work) {
  static nb::handle completed;  // made once: most operations are over when they return
  if (work == nullptr) {
    if (!completed.is_valid()) completed = nb::cast(Work::completed()).release();
    return nb::borrow(completed);
  }
  return nb::cast(work);
}

// A Work is held by the call of its method.
static const std::shared_ptr<Work> kByItsCaller;

void register_work(nb::module_& m) {
  nb::class_<Work>(m, "Work", R"(An operation that was started.

Done means complete at both ends: the source may be reused, and the bytes are visible to the target. A Work keeps its
source, its window and its connection alive until then. It may be used from any thread.)")
      .def(
          "done",
          [](Work& work) {
            BlockingIfItWaits<Work> blocking(kByItsCaller);
            return work.done();
          },
          nb::sig("def done(self) -> bool"), "True if the operation succeeded or failed. Never blocks.")
      .def(
          "wait",
          [](Work& work, nb::handle timeout_s) {
            const Deadline deadline = to_deadline(timeout_s);
            BlockingIfItWaits<Work> blocking(kByItsCaller);
            work.wait(deadline);
          },
          nb::arg("timeout_s").none() = nb::none(), nb::sig("def wait(self, timeout_s: float | None = None) -> None"),
          R"(Returns when the operation has succeeded, and raises its error if it failed.

A deadline is a fence: when it passes, the operation is cancelled, with all that were issued behind it for the same peer,
and DeadlineExceeded is raised only when the source will not be read again. What was already copied stays at the target.
Ctrl-C ends the wait, not the operation. To look without cancelling, use done().)")
      .def(
          "exception",
          [](Work& work) -> nb::object {
            std::optional<Error> error;
            {
              BlockingIfItWaits<Work> blocking(kByItsCaller);
              error = work.error();
            }
            return error ? python_error_of(*error) : nb::none();
          },
          nb::sig("def exception(self) -> onesided.errors.OnesidedError | None"),
          "The error of an operation that failed; None if it succeeded or is not done. Never blocks.");
}

}  // namespace onesided::python
