#include "client-lib/python/src/status.h"

namespace py = pybind11;

namespace holdfast::python {

void Raise(const Status& status) {
  if (PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  const py::object error = py::module_::import("holdfast._errors")
                               .attr("error_of")(CodeName(status.code()), status.message());
  PyErr_SetObject(py::type::of(error).ptr(), error.ptr());
  throw py::error_already_set();
}

}  // namespace holdfast::python
