// Tensors and objects between Python and the library: metadata is made once, addresses come with
// each call.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client-lib/python/src/object.h"
#include "holdfast/job.h"
#include "holdfast/state.h"

namespace holdfast::python {

class TensorList {
 public:
  void Add(std::string name, const std::string& dtype, std::vector<uint64_t> shape,
           std::optional<std::vector<uint64_t>> offset,
           std::optional<std::vector<uint64_t>> local_shape,
           std::optional<std::pair<uint64_t, uint64_t>> flat, int32_t device);
  size_t size() const { return state_.tensors.size(); }
  const std::vector<Tensor>& tensors() const { return state_.tensors; }

  // The same, with memory: `addresses` has one integer for each tensor. One use at a time: another
  // thread's is refused.
  class Use {
   public:
    Use(TensorList& list, PyObject* addresses);
    ~Use() { list_.used_ = false; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    State& state() const { return list_.state_; }

   private:
    TensorList& list_;
  };

 private:
  void SetAddresses(PyObject* addresses);

  State state_;
  bool used_ = false;  // changed with the GIL
};

template <>
struct Conversion<std::shared_ptr<TensorList>> {
  static std::shared_ptr<TensorList> From(PyObject* object);
};

// (name, bytes, codec or None) each.
std::vector<Object> ToObjects(PyObject* objects);
Ref FromObjects(const std::vector<Object>& objects);
// (name, bytes, codec or None, ranks) each.
Ref FromSavedObjects(const std::vector<SavedObject>& objects);

// What holdfast._core.TensorInfo shows.
Ref FromTensor(const Tensor& tensor);

void BindTensors(PyObject* module);

}  // namespace holdfast::python
