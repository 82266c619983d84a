// onesided._core: the data plane as Python sees it. One register function a concept.
#include "python/common.h"

NB_MODULE(_core, m) {
  using namespace onesided::python;
  m.doc() = "The data plane of onesided. Use it through onesided.transport and onesided.windows.";
  nb::set_leak_warnings(false);  // a window that lives until the interpreter ends is no leak
  register_errors(m);
  register_work(m);
  register_memory(m);
  register_transport(m);
  register_plan(m);
  register_window(m);
  register_lanes(m);
  register_tools(m);
  register_doctor(m);
}
