// holdfast._core.open_step, OpenStep and KeptParts over client-lib/src/kept_parts.h.
#pragma once

#include <Python.h>

#include "client-lib/python/src/object.h"

namespace holdfast::python {

void BindStep(PyObject* module);

// The module's function `open_step`.
Ref OpenStepOf(const Arguments& given);

}  // namespace holdfast::python
