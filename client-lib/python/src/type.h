// Types of the module: an instance holds a C++ value by a shared pointer.
//
//   Ref Verify(PyView& view, const Arguments& given) { …; return None(); }
//
//   static PyMethodDef methods[] = {Method<PyView, Verify>("verify", ""), {}};
//   MakeType<PyView>(module, "View", {.methods = methods});
//   return Wrap(std::make_shared<PyView>(...));        // a new instance
//
// With the GIL. A value may let it go as it ends.
#pragma once

#include <Python.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client-lib/python/src/object.h"

namespace holdfast::python {

template <typename T>
struct Instance {
  PyObject ob_base;  // (PyObject_HEAD)
  std::shared_ptr<T> value;
};

template <typename T>
inline PyTypeObject* type_of = nullptr;  // set once, by MakeType

template <typename T>
std::shared_ptr<T>& ValueOf(PyObject* self) {
  return reinterpret_cast<Instance<T>*>(self)->value;
}

template <typename T>
Ref Wrap(std::shared_ptr<T> value, PyTypeObject* type = type_of<T>) {
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  Ref made = Ref::Checked(allocate(type, 0));
  new (&ValueOf<T>(made.get())) std::shared_ptr<T>(std::move(value));
  return made;
}

template <typename T>
void Deallocate(PyObject* self) {
  // What is pending is not this object's: its value's end neither sees nor loses it.
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  using Value = std::shared_ptr<T>;
  ValueOf<T>(self).~Value();
  PyErr_Restore(type, value, trace);
  PyTypeObject* const own = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(own, Py_tp_free))(self);
  Py_DECREF(own);
}

struct TypeParts {
  PyMethodDef* methods = nullptr;
  PyGetSetDef* attributes = nullptr;
  newfunc make = nullptr;       // MakeOf; null: no instance is made from Python
  const char* parameters = "";  // of `make`
  reprfunc represent = nullptr;
  lenfunc length = nullptr;
  int (*buffer)(PyObject* self, Py_buffer* view, int flags) = nullptr;
};

inline PyObject* NothingIsMade(PyTypeObject* /*type*/, PyObject* /*args*/, PyObject* /*kwargs*/) {
  PyErr_SetString(PyExc_TypeError, "no instance of this type is made from Python");
  return nullptr;
}

template <auto Run>
inline Signature signature_of;  // set once, where the function's row or type is made

// What makes an instance from Python: Run is given the arguments and returns a std::shared_ptr<T>.
template <typename T, auto Run>
PyObject* MakeOf(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return Guarded(
      [&] { return Wrap<T>(Run(Arguments(signature_of<&type_of<T>>, args, kwargs)), type); });
}

template <typename T>
void MakeType(PyObject* module, const char* name, const TypeParts& parts) {
  static const std::string full_name = std::string("holdfast._core.") + name;
  Signature& signature = signature_of<&type_of<T>>;
  signature = Signature(name, "", parts.parameters);
  std::vector<PyType_Slot> slots = {
      {Py_tp_dealloc, reinterpret_cast<void*>(&Deallocate<T>)},
      {Py_tp_new, reinterpret_cast<void*>(parts.make != nullptr ? parts.make : &NothingIsMade)},
  };
  const auto add = [&](int slot, auto part) {
    if (part != nullptr) {
      slots.push_back({slot, reinterpret_cast<void*>(part)});
    }
  };
  if (parts.make != nullptr) {
    slots.push_back({Py_tp_doc, const_cast<char*>(signature.doc())});
  }
  add(Py_tp_methods, parts.methods);
  add(Py_tp_getset, parts.attributes);
  add(Py_tp_repr, parts.represent);
  add(Py_sq_length, parts.length);
  // The limited API has it from 3.11 on. CPython 3.10 takes the same slot and the same Py_buffer.
  add(Py_bf_getbuffer, parts.buffer);
  slots.push_back({0, nullptr});
  PyType_Spec spec = {full_name.c_str(), sizeof(Instance<T>), 0, Py_TPFLAGS_DEFAULT, slots.data()};
  Ref type = Ref::Checked(PyType_FromSpec(&spec));
  type_of<T> = reinterpret_cast<PyTypeObject*>(Ref(type).Release());
  if (PyObject_SetAttrString(module, name, type.get()) != 0) {
    throw Raised();
  }
}

// A row of a type's attributes: what Get returns of the value.
template <typename T, auto Get>
PyGetSetDef Getter(const char* name) {
  return {name,
          [](PyObject* self, void* /*unused*/) {
            return Guarded([&] { return Get(*ValueOf<T>(self)); });
          },
          nullptr, nullptr, nullptr};
}

// A row of a type's methods. Run is given the value and the arguments; `parameters` as in
// Signature.
template <typename T, auto Run>
PyMethodDef Method(const char* name, const char* parameters) {
  const PyCFunctionWithKeywords function = [](PyObject* self, PyObject* args, PyObject* kwargs) {
    return Guarded(
        [&] { return Run(*ValueOf<T>(self), Arguments(signature_of<Run>, args, kwargs)); });
  };
  signature_of<Run> = Signature(name, "$self, /", parameters);
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_VARARGS | METH_KEYWORDS, signature_of<Run>.doc()};
}

// The same of a function of the module.
template <auto Run>
PyMethodDef Function(const char* name, const char* parameters) {
  const PyCFunctionWithKeywords function = [](PyObject* /*module*/, PyObject* args,
                                              PyObject* kwargs) {
    return Guarded([&] { return Run(Arguments(signature_of<Run>, args, kwargs)); });
  };
  signature_of<Run> = Signature(name, "$module, /", parameters);
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_VARARGS | METH_KEYWORDS, signature_of<Run>.doc()};
}

}  // namespace holdfast::python
