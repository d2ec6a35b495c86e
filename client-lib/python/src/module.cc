// The extension module holdfast._core; its contract is holdfast/_core.pyi.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "base/dying.h"
#include "base/filesystem.h"
#include "base/status.h"
#include "client-lib/python/src/job.h"
#include "client-lib/python/src/tensors.h"
#include "client-lib/python/src/view.h"
#include "client-lib/python/src/wait.h"
#include "client-lib/src/wait_notice.h"
#include "holdfast/version.h"

namespace holdfast::python {
namespace {

// Without the GIL: a mount may hang.
absl::StatusOr<FilesystemInfo> Ask(const std::string& path) {
  const GilReleased released;
  return AskFilesystem(path);
}

std::string FilesystemType(const std::string& path) {
  const absl::StatusOr<FilesystemInfo> info = Ask(path);
  if (!info.ok()) {
    PyErr_SetString(PyExc_OSError, Message(info.status()).c_str());
    throw pybind11::error_already_set();
  }
  return info->type;
}

}  // namespace
}  // namespace holdfast::python

PYBIND11_MODULE(_core, module) {
  module.attr("__version__") = HOLDFAST_VERSION_STRING;
  holdfast::python::NoteMainThread(pybind11::module_::import("threading")
                                       .attr("main_thread")()
                                       .attr("ident")
                                       .cast<unsigned long>());
  holdfast::client::SetDefaultWarn(holdfast::python::WarnInPython);
  // Registered before anything of the package, and so run after it.
  pybind11::module_::import("atexit").attr("register")(
      pybind11::cpp_function(&holdfast::python::EndOfInterpreter));
  module.def("filesystem_type", &holdfast::python::FilesystemType, pybind11::arg("path"));
  module.def(
      "is_dying", [](int32_t pid) { return holdfast::FindDying(pid).has_value(); },
      pybind11::arg("pid"));
  holdfast::python::BindTensors(module);
  holdfast::python::BindJob(module);
  holdfast::python::BindView(module);
}
