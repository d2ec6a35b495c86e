#include "client-lib/python/src/object.h"

#include <algorithm>

namespace holdfast::python {

Ref Ref::Checked(PyObject* owned) {
  if (owned == nullptr) {
    throw Raised();
  }
  return Ref(owned);
}

Raised::Raised() {
  if (PyErr_Occurred() == nullptr) {
    PyErr_SetString(PyExc_SystemError, "a call failed and raised nothing");
  }
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  type_ = Ref::Owned(type);
  value_ = Ref::Owned(value);
  trace_ = Ref::Owned(trace);
}

void Raised::Restore() {
  PyErr_Restore(type_.Release(), value_.Release(), trace_.Release());
}

std::string Raised::Words() const {
  const Ref text = Ref::Owned(PyObject_Str(value_.get()));
  const char* const words =
      text.get() == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(text.get(), nullptr);
  PyErr_Clear();  // its __str__ raises, too
  return words != nullptr && *words != '\0'
             ? words
             : From<std::string>(Attribute(type_.get(), "__name__").get());
}

WrongType::WrongType(const std::string& message)
    : Raised((PyErr_SetString(PyExc_TypeError, message.c_str()), Raised())) {}

void ThrowIfPending() {
  if (PyErr_Occurred() != nullptr) {
    throw Raised();
  }
}

void RaiseError(PyObject* type, const std::string& message) {
  PyErr_SetString(type, message.c_str());
  throw Raised();
}

Ref Attribute(PyObject* object, const char* name) {
  return Ref::Checked(PyObject_GetAttrString(object, name));
}

Ref Import(const char* module) {
  return Ref::Checked(PyImport_ImportModule(module));
}

Ref Call(PyObject* callable, std::initializer_list<Ref> arguments) {
  return Ref::Checked(PyObject_CallObject(callable, Tuple(arguments).get()));
}

Ref None() {
  return Ref::Borrowed(Py_None);
}

Ref ToPython(bool value) {
  return Ref::Borrowed(value ? Py_True : Py_False);
}

Ref ToPython(uint64_t value) {
  return Ref::Checked(PyLong_FromUnsignedLongLong(value));
}

Ref ToPython(double value) {
  return Ref::Checked(PyFloat_FromDouble(value));
}

Ref ToPython(std::string_view text) {
  return Ref::Checked(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
}

Ref ToBytes(std::string_view bytes) {
  return Ref::Checked(
      PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size())));
}

Ref Tuple(std::initializer_list<Ref> items) {
  Ref tuple = Ref::Checked(PyTuple_New(static_cast<Py_ssize_t>(items.size())));
  Py_ssize_t at = 0;
  for (const Ref& item : items) {
    PyTuple_SetItem(tuple.get(), at++, Ref(item).Release());
  }
  return tuple;
}

std::string TypeNameOf(PyObject* object) {
  const Ref name =
      Ref::Owned(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__"));
  const char* const text =
      name.get() == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(name.get(), nullptr);
  PyErr_Clear();
  return text == nullptr ? "?" : text;
}

void Expected(const char* what, PyObject* object) {
  throw WrongType("expected " + std::string(what) + ", not " + TypeNameOf(object));
}

uint64_t ToUnsigned(PyObject* object, uint64_t max) {
  const Ref number = Ref::Owned(PyNumber_Index(object));
  if (number.get() == nullptr) {
    PyErr_Clear();
    Expected("an integer", object);
  }
  const uint64_t value = PyLong_AsUnsignedLongLong(number.get());
  if (PyErr_Occurred() != nullptr || value > max) {
    PyErr_Clear();
    throw WrongType("expected an integer from 0 to " + std::to_string(max));
  }
  return value;
}

int64_t ToSigned(PyObject* object, int64_t min, int64_t max) {
  const Ref number = Ref::Owned(PyNumber_Index(object));
  if (number.get() == nullptr) {
    PyErr_Clear();
    Expected("an integer", object);
  }
  const int64_t value = PyLong_AsLongLong(number.get());
  if (PyErr_Occurred() != nullptr || value < min || value > max) {
    PyErr_Clear();
    throw WrongType("expected an integer from " + std::to_string(min) + " to " +
                    std::to_string(max));
  }
  return value;
}

double Conversion<double>::From(PyObject* object) {
  const double value = PyFloat_AsDouble(object);
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    Expected("a number", object);
  }
  return value;
}

bool Conversion<bool>::From(PyObject* object) {
  const int truth = PyObject_IsTrue(object);
  if (truth < 0) {
    PyErr_Clear();
    Expected("a bool", object);
  }
  return truth != 0;
}

std::string Conversion<std::string>::From(PyObject* object) {
  Py_ssize_t length = 0;
  if (PyBytes_Check(object) != 0) {
    char* bytes = nullptr;
    if (PyBytes_AsStringAndSize(object, &bytes, &length) < 0) {
      throw Raised();
    }
    return {bytes, static_cast<size_t>(length)};
  }
  const char* const text =
      PyUnicode_Check(object) != 0 ? PyUnicode_AsUTF8AndSize(object, &length) : nullptr;
  if (text == nullptr) {  // (a str of lone surrogates is no UTF-8)
    PyErr_Clear();
    Expected("a str that can be written as UTF-8", object);
  }
  return {text, static_cast<size_t>(length)};
}

Py_ssize_t SequenceLength(PyObject* object) {
  if (PySequence_Check(object) == 0 || PyUnicode_Check(object) != 0 || PyBytes_Check(object) != 0) {
    Expected("a sequence", object);
  }
  const Py_ssize_t length = PySequence_Size(object);
  if (length < 0) {
    throw Raised();
  }
  return length;
}

Ref SequenceItem(PyObject* sequence, Py_ssize_t at) {
  return Ref::Checked(PySequence_GetItem(sequence, at));
}

Signature::Signature(const char* function, const char* self, std::string_view parameters)
    : function_(function) {
  const char* const between = *self == '\0' || parameters.empty() ? "" : ", ";
  doc_ = function_ + "(" + self + between + std::string(parameters) + ")\n--\n\n";
  bool by_name = false;
  for (size_t begin = 0; begin < parameters.size();) {
    const size_t end = std::min(parameters.find(", ", begin), parameters.size());
    const std::string_view parameter = parameters.substr(begin, end - begin);
    if (parameter == "*") {
      by_name = true;
    } else {
      names_.push_back(parameter.substr(0, parameter.find('=')));
      positions_ += by_name ? 0 : 1;
    }
    begin = end + 2;
  }
}

Arguments::Arguments(const Signature& signature, PyObject* args, PyObject* kwargs)
    : signature_(signature), given_(signature.names().size()) {
  const std::vector<std::string_view>& names = signature.names();
  const auto positions = static_cast<size_t>(PyTuple_Size(args));
  if (positions > signature.positions()) {
    RaiseError(PyExc_TypeError, signature.function() + "() takes " +
                                    std::to_string(signature.positions()) +
                                    " arguments by position, not " + std::to_string(positions));
  }
  for (size_t i = 0; i < positions; ++i) {
    given_[i] = PyTuple_GetItem(args, static_cast<Py_ssize_t>(i));
  }
  Py_ssize_t at = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  while (kwargs != nullptr && PyDict_Next(kwargs, &at, &key, &value) != 0) {
    const std::string name = From<std::string>(key);
    const auto known = std::find(names.begin(), names.end(), name);
    if (known == names.end()) {
      RaiseError(PyExc_TypeError, signature.function() + "() has no argument '" + name + "'");
    }
    PyObject*& place = given_[static_cast<size_t>(known - names.begin())];
    if (place != nullptr) {
      RaiseError(PyExc_TypeError, signature.function() + "() was given '" + name + "' twice");
    }
    place = value;
  }
}

PyObject* Arguments::Find(std::string_view name) const {
  const std::vector<std::string_view>& names = signature_.names();
  const auto known = std::find(names.begin(), names.end(), name);
  return known == names.end() ? nullptr : given_[static_cast<size_t>(known - names.begin())];
}

void Arguments::Missing(std::string_view name) const {
  RaiseError(PyExc_TypeError,
             signature_.function() + "() needs the argument '" + std::string(name) + "'");
}

void Arguments::Wrong(std::string_view name, const WrongType& wrong) const {
  throw WrongType(signature_.function() + "(): argument '" + std::string(name) +
                  "': " + wrong.Words());
}

}  // namespace holdfast::python
