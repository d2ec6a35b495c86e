// From the library's Status to a Python exception of holdfast._errors.
#pragma once

#include <Python.h>

#include <utility>

#include "holdfast/status.h"

namespace holdfast::python {

// Throws it. An exception that Python has pending (KeyboardInterrupt, what `choose` raised) goes
// before. With the GIL.
[[noreturn]] void Raise(const Status& status);

inline void RaiseUnlessOk(const Status& status) {
  if (!status.ok() || PyErr_Occurred() != nullptr) {
    Raise(status);
  }
}

template <typename T>
T ValueOrRaise(Result<T> result) {
  RaiseUnlessOk(result.status());
  return *std::move(result);
}

}  // namespace holdfast::python
