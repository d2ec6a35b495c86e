#include "client-lib/python/src/tensors.h"

#include <pybind11/stl.h>

#include <map>

#include "client-lib/python/src/status.h"

namespace py = pybind11;

namespace holdfast::python {
namespace {

Type TypeNamed(const std::string& name) {
  static const auto* const types = [] {
    auto* all = new std::map<std::string, Type>;
    for (uint8_t i = static_cast<uint8_t>(Type::kBool);
         i <= static_cast<uint8_t>(Type::kF8E5M2Fnuz); ++i) {
      all->emplace(TypeName(static_cast<Type>(i)), static_cast<Type>(i));
    }
    return all;
  }();
  const auto found = types->find(name);
  if (found == types->end()) {
    Raise(Status(Code::kInvalidArgument, "there is no dtype '" + name + "' in safetensors"));
  }
  return found->second;
}

py::tuple ToTuple(const std::vector<uint64_t>& numbers) {
  py::tuple tuple(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    tuple[i] = numbers[i];
  }
  return tuple;
}

struct TensorInfo {
  Tensor tensor;
};

}  // namespace

void TensorList::Add(std::string name, const std::string& dtype, std::vector<uint64_t> shape,
                     std::optional<std::vector<uint64_t>> offset,
                     std::optional<std::vector<uint64_t>> local_shape,
                     std::optional<std::pair<uint64_t, uint64_t>> flat, int32_t device) {
  if (used_) {
    Raise(Status(Code::kRefused, "this TensorList is being used by another thread's call"));
  }
  if (offset.has_value() != local_shape.has_value() || (offset.has_value() && flat.has_value())) {
    Raise(Status(Code::kInvalidArgument,
                 "tensor '" + name + "': offset and local_shape go together, and not with flat"));
  }
  const Type type = TypeNamed(dtype);
  Tensor tensor(std::move(name), type, std::move(shape), nullptr);
  if (offset.has_value()) {
    tensor = Tensor::Box(std::move(tensor.name), type, std::move(tensor.global_shape),
                         *std::move(offset), *std::move(local_shape), nullptr);
  } else if (flat.has_value()) {
    tensor = Tensor::Flat(std::move(tensor.name), type, std::move(tensor.global_shape), flat->first,
                          flat->second, nullptr);
  }
  tensor.device = device;
  state_.tensors.push_back(std::move(tensor));
}

TensorList::Use::Use(TensorList& list, const py::sequence& addresses) : list_(list) {
  if (list.used_) {
    Raise(Status(Code::kRefused, "this TensorList is being used by another thread's call"));
  }
  list.SetAddresses(addresses);
  list.used_ = true;
}

void TensorList::SetAddresses(const py::sequence& addresses) {
  PyObject* const fast = PySequence_Fast(addresses.ptr(), "addresses must be a sequence");
  if (fast == nullptr) {
    throw py::error_already_set();
  }
  const py::object keep = py::reinterpret_steal<py::object>(fast);
  if (static_cast<size_t>(PySequence_Fast_GET_SIZE(fast)) != state_.tensors.size()) {
    Raise(Status(Code::kInvalidArgument, std::to_string(PySequence_Fast_GET_SIZE(fast)) +
                                             " addresses for " +
                                             std::to_string(state_.tensors.size()) + " tensors"));
  }
  PyObject** const items = PySequence_Fast_ITEMS(fast);
  for (size_t i = 0; i < state_.tensors.size(); ++i) {
    state_.tensors[i].data = PyLong_AsVoidPtr(items[i]);
  }
  if (PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
}

std::vector<Object> ToObjects(const py::sequence& objects) {
  std::vector<Object> out;
  out.reserve(objects.size());
  for (const py::handle& item : objects) {
    const auto [name, bytes, codec] =
        item.cast<std::tuple<std::string, py::bytes, std::optional<std::string>>>();
    out.push_back({name, std::string(bytes), !codec.has_value(), codec.value_or("")});
  }
  return out;
}

py::list FromObjects(const std::vector<Object>& objects) {
  py::list out(objects.size());
  for (size_t i = 0; i < objects.size(); ++i) {
    const Object& object = objects[i];
    out[i] = py::make_tuple(object.name, py::bytes(object.bytes),
                            object.json ? py::object(py::none()) : py::str(object.codec));
  }
  return out;
}

py::list FromSavedObjects(const std::vector<SavedObject>& objects) {
  py::list out(objects.size());
  for (size_t i = 0; i < objects.size(); ++i) {
    const Object& object = objects[i].object;
    out[i] = py::make_tuple(object.name, py::bytes(object.bytes),
                            object.json ? py::object(py::none()) : py::str(object.codec),
                            objects[i].ranks);
  }
  return out;
}

py::object FromTensor(const Tensor& tensor) {
  return py::cast(TensorInfo{tensor});
}

void BindTensors(py::module_& module) {
  py::class_<TensorList>(module, "TensorList")
      .def(py::init<>())
      .def("add", &TensorList::Add, py::arg("name"), py::arg("dtype"), py::arg("shape"),
           py::kw_only(), py::arg("offset") = py::none(), py::arg("local_shape") = py::none(),
           py::arg("flat") = py::none(), py::arg("device") = -1)
      .def("__len__", &TensorList::size);

  py::class_<TensorInfo>(module, "TensorInfo")
      .def_property_readonly("name", [](const TensorInfo& i) { return i.tensor.name; })
      .def_property_readonly("dtype", [](const TensorInfo& i) { return TypeName(i.tensor.type); })
      .def_property_readonly("shape",
                             [](const TensorInfo& i) { return ToTuple(i.tensor.global_shape); })
      .def_property_readonly("offset",
                             [](const TensorInfo& i) -> py::object {
                               return i.tensor.place == Tensor::Place::kBox
                                          ? py::object(ToTuple(i.tensor.box_offset))
                                          : py::none();
                             })
      .def_property_readonly("local_shape",
                             [](const TensorInfo& i) -> py::object {
                               return i.tensor.place == Tensor::Place::kBox
                                          ? py::object(ToTuple(i.tensor.box_shape))
                                          : py::none();
                             })
      .def_property_readonly(
          "flat",
          [](const TensorInfo& i) -> py::object {
            return i.tensor.place == Tensor::Place::kFlat
                       ? py::object(py::make_tuple(i.tensor.flat_start, i.tensor.flat_length))
                       : py::none();
          })
      .def_property_readonly("nbytes", [](const TensorInfo& i) { return i.tensor.bytes; })
      .def("__repr__", [](const TensorInfo& i) {
        return "<TensorInfo '" + i.tensor.name + "' " + TypeName(i.tensor.type) + ">";
      });
}

}  // namespace holdfast::python
