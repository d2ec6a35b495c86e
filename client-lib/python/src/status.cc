#include "client-lib/python/src/status.h"

#include "client-lib/python/src/object.h"

namespace holdfast::python {

void Raise(const Status& status) {
  ThrowIfPending();
  const Ref error = Call(Attribute(Import("holdfast._errors").get(), "error_of").get(),
                         {ToPython(CodeName(status.code())), ToPython(status.message()),
                          ToPython(ReasonName(status.reason()))});
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
  throw Raised();
}

}  // namespace holdfast::python
