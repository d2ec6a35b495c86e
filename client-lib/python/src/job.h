// holdfast._core.Job and Save over holdfast::Job and SaveHandle.
#pragma once

#include <Python.h>

namespace holdfast::python {

void BindJob(PyObject* module);

}  // namespace holdfast::python
