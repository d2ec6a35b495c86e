#include "client-lib/python/src/tensors.h"

#include <map>

#include "client-lib/python/src/status.h"
#include "client-lib/python/src/type.h"

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

Ref ToTuple(const std::vector<uint64_t>& numbers) {
  Ref tuple = Ref::Checked(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  for (size_t i = 0; i < numbers.size(); ++i) {
    PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), ToPython(numbers[i]).Release());
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

TensorList::Use::Use(TensorList& list, PyObject* addresses) : list_(list) {
  if (list.used_) {
    Raise(Status(Code::kRefused, "this TensorList is being used by another thread's call"));
  }
  list.SetAddresses(addresses);
  list.used_ = true;
}

void TensorList::SetAddresses(PyObject* addresses) {
  const auto count = static_cast<size_t>(SequenceLength(addresses));
  if (count != state_.tensors.size()) {
    Raise(Status(Code::kInvalidArgument, std::to_string(count) + " addresses for " +
                                             std::to_string(state_.tensors.size()) + " tensors"));
  }
  for (size_t i = 0; i < count; ++i) {
    state_.tensors[i].data =
        PyLong_AsVoidPtr(SequenceItem(addresses, static_cast<Py_ssize_t>(i)).get());
    ThrowIfPending();
  }
}

std::shared_ptr<TensorList> Conversion<std::shared_ptr<TensorList>>::From(PyObject* object) {
  if (Py_TYPE(object) != type_of<TensorList>) {
    Expected("a TensorList", object);
  }
  return ValueOf<TensorList>(object);
}

std::vector<Object> ToObjects(PyObject* objects) {
  const Py_ssize_t count = SequenceLength(objects);
  std::vector<Object> out;
  out.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Ref item = SequenceItem(objects, i);
    if (SequenceLength(item.get()) != 3) {
      Expected("(name, bytes, codec or None)", item.get());
    }
    const Ref bytes = SequenceItem(item.get(), 1);
    if (PyBytes_Check(bytes.get()) == 0) {
      Expected("bytes", bytes.get());
    }
    const auto codec = From<std::optional<std::string>>(SequenceItem(item.get(), 2).get());
    out.push_back({From<std::string>(SequenceItem(item.get(), 0).get()),
                   From<std::string>(bytes.get()), !codec.has_value(), codec.value_or("")});
  }
  return out;
}

namespace {

Ref CodecOf(const Object& object) {
  return object.json ? None() : ToPython(object.codec);
}

}  // namespace

Ref FromObjects(const std::vector<Object>& objects) {
  return ToList(objects, [](const Object& object) {
    return Tuple({ToPython(object.name), ToBytes(object.bytes), CodecOf(object)});
  });
}

Ref FromSavedObjects(const std::vector<SavedObject>& objects) {
  return ToList(objects, [](const SavedObject& saved) {
    return Tuple({ToPython(saved.object.name), ToBytes(saved.object.bytes), CodecOf(saved.object),
                  ToList(saved.ranks)});
  });
}

Ref FromTensor(const Tensor& tensor) {
  return Wrap(std::make_shared<TensorInfo>(TensorInfo{tensor}));
}

namespace {

std::shared_ptr<TensorList> MakeTensorList(const Arguments& /*none*/) {
  return std::make_shared<TensorList>();
}

Ref Add(TensorList& list, const Arguments& given) {
  using Numbers = std::vector<uint64_t>;
  list.Add(given.Get<std::string>("name"), given.Get<std::string>("dtype"),
           given.Get<Numbers>("shape"), given.Get<std::optional<Numbers>>("offset", std::nullopt),
           given.Get<std::optional<Numbers>>("local_shape", std::nullopt),
           given.Get<std::optional<std::pair<uint64_t, uint64_t>>>("flat", std::nullopt),
           given.Get<int32_t>("device", -1));
  return None();
}

Py_ssize_t Length(PyObject* self) {
  return static_cast<Py_ssize_t>(ValueOf<TensorList>(self)->size());
}

Ref Flat(const TensorInfo& info) {
  return info.tensor.place == Tensor::Place::kFlat
             ? Tuple({ToPython(info.tensor.flat_start), ToPython(info.tensor.flat_length)})
             : None();
}

Ref OfBox(const Tensor& tensor, const std::vector<uint64_t>& numbers) {
  return tensor.place == Tensor::Place::kBox ? ToTuple(numbers) : None();
}

PyObject* Represent(PyObject* self) {
  return Guarded([&] {
    const Tensor& tensor = ValueOf<TensorInfo>(self)->tensor;
    return ToPython("<TensorInfo '" + tensor.name + "' " + TypeName(tensor.type) + ">");
  });
}

}  // namespace

void BindTensors(PyObject* module) {
  static PyMethodDef methods[] = {
      Method<TensorList, Add>(
          "add", "name, dtype, shape, *, offset=None, local_shape=None, flat=None, device=-1"),
      {}};
  MakeType<TensorList>(
      module, "TensorList",
      {.methods = methods, .make = MakeOf<TensorList, MakeTensorList>, .length = Length});

  using I = TensorInfo;
  static PyGetSetDef attributes[] = {
      Getter<I, [](const I& i) { return ToPython(i.tensor.name); }>("name"),
      Getter<I, [](const I& i) { return ToPython(TypeName(i.tensor.type)); }>("dtype"),
      Getter<I, [](const I& i) { return ToTuple(i.tensor.global_shape); }>("shape"),
      Getter<I, [](const I& i) { return OfBox(i.tensor, i.tensor.box_offset); }>("offset"),
      Getter<I, [](const I& i) { return OfBox(i.tensor, i.tensor.box_shape); }>("local_shape"),
      Getter<I, Flat>("flat"),
      Getter<I, [](const I& i) { return ToPython(i.tensor.bytes); }>("nbytes"),
      {}};
  MakeType<I>(module, "TensorInfo", {.attributes = attributes, .represent = Represent});
}

}  // namespace holdfast::python
