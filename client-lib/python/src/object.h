// Python's objects in C++, by the limited API alone: one module serves every CPython from 3.10 on.
//
//   Ref pair = Tuple({ToPython(step), ToPython(name)});   // owns; throws Raised when Python fails
//   const auto n = From<uint64_t>(object);                // throws WrongType
//
// Everything here is called with the GIL. Raised carries a Python exception through C++ frames, and
// never leaves the module: Guarded() gives it back to Python.
#pragma once

#include <Python.h>

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace holdfast::python {

// Owns a reference, or none.
class Ref {
 public:
  Ref() = default;
  // What a function of Python's returned: null means that it raised, and throws Raised.
  static Ref Checked(PyObject* owned);
  static Ref Owned(PyObject* owned) { return Ref(owned); }  // may be null
  static Ref Borrowed(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Ref(borrowed);
  }
  Ref(const Ref& other) : Ref(Borrowed(other.object_)) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* Release() { return std::exchange(object_, nullptr); }

 private:
  explicit Ref(PyObject* owned) : object_(owned) {}

  PyObject* object_ = nullptr;
};

// A Python exception on its way through C++. As it is made, it takes over what is pending.
class Raised : public std::exception {
 public:
  Raised();
  // Pending again; this one is empty then.
  void Restore();
  bool Matches(PyObject* type) const { return PyErr_GivenExceptionMatches(type_.get(), type) != 0; }
  PyObject* value() const { return value_.get(); }
  // str() of it, or the name of its type when that says nothing.
  std::string Words() const;
  const char* what() const noexcept override { return "a Python exception"; }

 private:
  Ref type_;
  Ref value_;
  Ref trace_;
};

// A TypeError: an object is not what a conversion wants.
class WrongType : public Raised {
 public:
  explicit WrongType(const std::string& message);
};

// Throws Raised if something is pending.
void ThrowIfPending();
[[noreturn]] void RaiseError(PyObject* type, const std::string& message);

Ref Attribute(PyObject* object, const char* name);
Ref Import(const char* module);
Ref Call(PyObject* callable, std::initializer_list<Ref> arguments);

Ref None();
Ref ToPython(bool value);
Ref ToPython(uint64_t value);
Ref ToPython(double value);
Ref ToPython(std::string_view text);
inline Ref ToPython(uint32_t value) {
  return ToPython(uint64_t{value});
}
inline Ref ToPython(const std::string& text) {
  return ToPython(std::string_view(text));
}
inline Ref ToPython(const char* text) {
  return ToPython(std::string_view(text));
}
Ref ToBytes(std::string_view bytes);
Ref Tuple(std::initializer_list<Ref> items);
template <typename Items, typename Convert>
Ref ToList(const Items& items, const Convert& convert) {
  Ref list = Ref::Checked(PyList_New(static_cast<Py_ssize_t>(items.size())));
  Py_ssize_t at = 0;
  for (const auto& item : items) {
    PyList_SetItem(list.get(), at++, convert(item).Release());
  }
  return list;
}
template <typename T>
Ref ToList(const std::vector<T>& items) {
  return ToList(items, [](const T& item) { return ToPython(item); });
}

// From an object to a value of C++; WrongType says what was expected.
template <typename T>
struct Conversion;
template <typename T>
T From(PyObject* object) {
  return Conversion<T>::From(object);
}

std::string TypeNameOf(PyObject* object);
[[noreturn]] void Expected(const char* what, PyObject* object);
uint64_t ToUnsigned(PyObject* object, uint64_t max);
int64_t ToSigned(PyObject* object, int64_t min, int64_t max);
// A list, a tuple or the like; no text and no bytes. Its length.
Py_ssize_t SequenceLength(PyObject* object);
Ref SequenceItem(PyObject* sequence, Py_ssize_t at);

template <>
struct Conversion<uint64_t> {
  static uint64_t From(PyObject* object) { return ToUnsigned(object, UINT64_MAX); }
};
template <>
struct Conversion<uint32_t> {
  static uint32_t From(PyObject* object) {
    return static_cast<uint32_t>(ToUnsigned(object, UINT32_MAX));
  }
};
template <>
struct Conversion<int32_t> {
  static int32_t From(PyObject* object) {
    return static_cast<int32_t>(ToSigned(object, INT32_MIN, INT32_MAX));
  }
};
template <>
struct Conversion<double> {
  static double From(PyObject* object);
};
template <>
struct Conversion<bool> {
  static bool From(PyObject* object);
};
template <>
struct Conversion<std::string> {
  static std::string From(PyObject* object);  // str or bytes
};
template <>
struct Conversion<Ref> {  // takes any object
  static Ref From(PyObject* object) { return Ref::Borrowed(object); }
};
template <typename T>
struct Conversion<std::optional<T>> {
  static std::optional<T> From(PyObject* object) {
    return object == Py_None ? std::nullopt : std::optional<T>(Conversion<T>::From(object));
  }
};
template <typename T>
struct Conversion<std::vector<T>> {
  static std::vector<T> From(PyObject* object) {
    const Py_ssize_t length = SequenceLength(object);
    std::vector<T> out;
    out.reserve(static_cast<size_t>(length));
    for (Py_ssize_t i = 0; i < length; ++i) {
      out.push_back(Conversion<T>::From(SequenceItem(object, i).get()));
    }
    return out;
  }
};
template <typename A, typename B>
struct Conversion<std::pair<A, B>> {
  static std::pair<A, B> From(PyObject* object) {
    if (SequenceLength(object) != 2) {
      Expected("a pair", object);
    }
    A first = Conversion<A>::From(SequenceItem(object, 0).get());
    return {std::move(first), Conversion<B>::From(SequenceItem(object, 1).get())};
  }
};
template <typename T>
struct Conversion<std::map<std::string, T>> {
  static std::map<std::string, T> From(PyObject* object) {
    if (PyDict_Check(object) == 0) {
      Expected("a dict", object);
    }
    std::map<std::string, T> out;
    Py_ssize_t at = 0;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    while (PyDict_Next(object, &at, &key, &value) != 0) {
      out.emplace(Conversion<std::string>::From(key), Conversion<T>::From(value));
    }
    return out;
  }
};

// What a function takes, as Python writes it: the parameters' names in the order of their
// positions, those behind "*" by name only, and what is taken for one that is left out. Also its
// docstring, of which inspect.signature() reads the same. The text must outlive it.
class Signature {
 public:
  Signature() = default;
  // `self`: "$self, /", "$module, /", or nothing.
  Signature(const char* function, const char* self, std::string_view parameters);
  const std::string& function() const { return function_; }
  const char* doc() const { return doc_.c_str(); }
  const std::vector<std::string_view>& names() const { return names_; }
  size_t positions() const { return positions_; }  // so many of the names may be given without

 private:
  std::string function_;
  std::string doc_;
  std::vector<std::string_view> names_;
  size_t positions_ = 0;
};

// The arguments of a call.
//
//   given.Get<uint64_t>("step"); given.Get<bool>("hold", false);
class Arguments {
 public:
  Arguments(const Signature& signature, PyObject* args, PyObject* kwargs);
  template <typename T>
  T Get(std::string_view name) const {
    PyObject* const given = Find(name);
    if (given == nullptr) {
      Missing(name);
    }
    return Converted<T>(name, given);
  }
  template <typename T>
  T Get(std::string_view name, T otherwise) const {
    PyObject* const given = Find(name);
    return given == nullptr ? std::move(otherwise) : Converted<T>(name, given);
  }

 private:
  template <typename T>
  T Converted(std::string_view name, PyObject* given) const {
    try {
      return From<T>(given);
    } catch (const WrongType& wrong) {
      Wrong(name, wrong);
    }
  }
  PyObject* Find(std::string_view name) const;  // borrowed from the call
  [[noreturn]] void Missing(std::string_view name) const;
  [[noreturn]] void Wrong(std::string_view name, const WrongType& wrong) const;

  const Signature& signature_;
  std::vector<PyObject*> given_;  // as signature_.names(); null: left out
};

// What a function of the module returns to Python: a new reference, or null with what was raised.
template <typename Body>
PyObject* Guarded(const Body& body) noexcept {
  try {
    return body().Release();
  } catch (Raised& raised) {
    raised.Restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace holdfast::python
