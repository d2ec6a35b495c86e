// holdfast._core.attach, View and list_checkpoints over holdfast/view.h.
#pragma once

#include <Python.h>

#include "client-lib/python/src/object.h"

namespace holdfast::python {

void BindView(PyObject* module);

// The module's functions `attach` and `list_checkpoints`.
Ref AttachOf(const Arguments& given);
Ref ListOf(const Arguments& given);

}  // namespace holdfast::python
