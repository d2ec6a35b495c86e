// Tensors and objects between Python and the library: metadata is made once, addresses come with
// each call.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

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

  // The same, with memory: `addresses` has one integer for each tensor. One use at a time: another
  // thread's is refused.
  class Use {
   public:
    Use(TensorList& list, const pybind11::sequence& addresses);
    ~Use() { list_.used_ = false; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    State& state() const { return list_.state_; }

   private:
    TensorList& list_;
  };

 private:
  void SetAddresses(const pybind11::sequence& addresses);

  State state_;
  bool used_ = false;  // changed with the GIL
};

// (name, bytes, codec or None) each.
std::vector<Object> ToObjects(const pybind11::sequence& objects);
pybind11::list FromObjects(const std::vector<Object>& objects);
// (name, bytes, codec or None, ranks) each.
pybind11::list FromSavedObjects(const std::vector<SavedObject>& objects);

// What holdfast._core.TensorInfo shows.
pybind11::object FromTensor(const Tensor& tensor);

void BindTensors(pybind11::module_& module);

}  // namespace holdfast::python
