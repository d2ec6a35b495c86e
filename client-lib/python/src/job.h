// holdfast._core.Job and Save over holdfast::Job and SaveHandle.
#pragma once

#include <pybind11/pybind11.h>

namespace holdfast::python {

void BindJob(pybind11::module_& module);

}  // namespace holdfast::python
