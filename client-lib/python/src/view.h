// holdfast._core.attach, View and list_checkpoints over holdfast/view.h.
#pragma once

#include <pybind11/pybind11.h>

namespace holdfast::python {

void BindView(pybind11::module_& module);

}  // namespace holdfast::python
