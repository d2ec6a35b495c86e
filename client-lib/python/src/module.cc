// The extension module holdfast._core; its contract is holdfast/_core.pyi.
#include <Python.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "base/dying.h"
#include "base/filesystem.h"
#include "base/status.h"
#include "client-lib/python/src/job.h"
#include "client-lib/python/src/object.h"
#include "client-lib/python/src/step.h"
#include "client-lib/python/src/tensors.h"
#include "client-lib/python/src/type.h"
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

Ref FilesystemType(const Arguments& given) {
  const absl::StatusOr<FilesystemInfo> info = Ask(given.Get<std::string>("path"));
  if (!info.ok()) {
    RaiseError(PyExc_OSError, Message(info.status()));
  }
  return ToPython(info->type);
}

Ref IsDying(const Arguments& given) {
  return ToPython(FindDying(given.Get<int32_t>("pid")).has_value());
}

Ref AtExit(const Arguments& /*none*/) {
  EndOfInterpreter();
  return None();
}

Ref MakeModule() {
  static PyMethodDef functions[] = {
      Function<FilesystemType>("filesystem_type", "path"),
      Function<IsDying>("is_dying", "pid"),
      Function<AttachOf>("attach",
                         "job, *, rank=0, step=None, attempt=0, socket='', timeout=30.0, "
                         "without=()"),
      Function<ListOf>("list_checkpoints", "job, *, socket='', timeout=30.0"),
      Function<OpenStepOf>("open_step",
                           "job, *, step, attempt, world_size, socket='', timeout=30.0"),
      {}};
  static PyMethodDef at_exit = Function<AtExit>("_at_exit", "");
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                   "holdfast._core",
                                   nullptr,
                                   -1,
                                   functions,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};
  Ref module = Ref::Checked(PyModule_Create(&definition));
  if (PyModule_AddStringConstant(module.get(), "__version__", HOLDFAST_VERSION_STRING) != 0) {
    throw Raised();
  }
  const Ref thread = Call(Attribute(Import("threading").get(), "main_thread").get(), {});
  NoteMainThread(From<uint64_t>(Attribute(thread.get(), "ident").get()));
  client::SetDefaultWarn(WarnInPython);
  // Registered before anything of the package, and so run after it.
  Call(Attribute(Import("atexit").get(), "register").get(),
       {Ref::Checked(PyCFunction_NewEx(&at_exit, nullptr, nullptr))});
  BindTensors(module.get());
  BindJob(module.get());
  BindView(module.get());
  BindStep(module.get());
  return module;
}

}  // namespace
}  // namespace holdfast::python

// Exported from a library that hides everything else.
PyMODINIT_FUNC PyInit__core() {
  return holdfast::python::Guarded(holdfast::python::MakeModule);
}
