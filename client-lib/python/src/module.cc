// The extension module holdfast._core; its contract is holdfast/_core.pyi.
#include <pybind11/pybind11.h>

#include "client-lib/python/src/job.h"
#include "client-lib/python/src/tensors.h"
#include "client-lib/python/src/view.h"
#include "client-lib/python/src/wait.h"
#include "holdfast/version.h"

PYBIND11_MODULE(_core, module) {
  module.attr("__version__") = HOLDFAST_VERSION_STRING;
  holdfast::python::NoteMainThread(pybind11::module_::import("threading")
                                       .attr("main_thread")()
                                       .attr("ident")
                                       .cast<unsigned long>());
  // Registered before anything of the package, and so run after it.
  pybind11::module_::import("atexit").attr("register")(
      pybind11::cpp_function(&holdfast::python::EndOfInterpreter));
  holdfast::python::BindTensors(module);
  holdfast::python::BindJob(module);
  holdfast::python::BindView(module);
}
