#include "client-lib/python/src/view.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client-lib/python/src/status.h"
#include "client-lib/python/src/tensors.h"
#include "client-lib/python/src/wait.h"
#include "holdfast/view.h"

namespace py = pybind11;

namespace holdfast::python {
namespace {

// One tensor's bytes as they lie in the slot or file: what a memoryview of View.memory() is of.
class TensorBuffer {
 public:
  TensorBuffer(std::shared_ptr<View> view, const Tensor& tensor)
      : view_(std::move(view)), data_(tensor.data), bytes_(tensor.bytes) {}
  ~TensorBuffer() { LetGo(view_); }  // the last one unmaps, and tells the daemon
  py::buffer_info Info() const {
    return py::buffer_info(data_, 1, "B", 1, {static_cast<py::ssize_t>(bytes_)}, {1},
                           /*readonly=*/true);
  }

 private:
  std::shared_ptr<View> view_;
  void* const data_;
  const uint64_t bytes_;
};

class PyView {
 public:
  explicit PyView(std::shared_ptr<View> view) : view_(std::move(view)) {}
  ~PyView() { LetGo(view_); }

  const View& view() const { return *view_; }
  py::list Tensors() const {
    py::list infos(view_->tensors().size());
    for (size_t i = 0; i < view_->tensors().size(); ++i) {
      infos[i] = FromTensor(view_->tensors()[i]);
    }
    return infos;
  }
  void Read(size_t tensor, uint64_t address, std::optional<uint64_t> nbytes) {
    Check(tensor);
    if (nbytes.has_value() && *nbytes != view_->tensors()[tensor].bytes) {
      Raise(Status(Code::kInvalidArgument,
                   "read: tensor '" + view_->tensors()[tensor].name + "' has " +
                       std::to_string(view_->tensors()[tensor].bytes) +
                       " bytes, there is room for " + std::to_string(*nbytes)));
    }
    Unlocked([&] { return view_->Read(tensor, reinterpret_cast<void*>(address)); });
  }
  py::memoryview Memory(size_t tensor) const {
    Check(tensor);
    const Tensor& info = view_->tensors()[tensor];
    if (info.data == nullptr && info.bytes > 0) {
      Raise(Status(Code::kInvalidArgument,
                   "memory: tensor '" + info.name +
                       "' lies on another node (tier peer): read() brings it here"));
    }
    return py::memoryview(
        py::cast(std::make_shared<TensorBuffer>(view_, view_->tensors()[tensor])));
  }
  void Verify() {
    Unlocked([&] { return view_->Verify(); });
  }

 private:
  void Check(size_t tensor) const {
    if (tensor >= view_->tensors().size()) {
      throw py::index_error("tensor " + std::to_string(tensor) + " of " +
                            std::to_string(view_->tensors().size()));
    }
  }
  template <typename Call>
  static void Unlocked(const Call& call) {
    Status status;
    {
      const GilReleased released;
      status = call();
    }
    RaiseUnlessOk(status);
  }

  std::shared_ptr<View> view_;
};

std::shared_ptr<PyView> AttachTo(const std::string& job, uint32_t rank,
                                 std::optional<uint64_t> step, uint64_t attempt,
                                 const std::string& socket, double timeout,
                                 const std::vector<std::string>& without) {
  AttachOptions options;
  options.job = job;
  options.rank = rank;
  options.newest = !step.has_value();
  options.step = step.value_or(0);
  options.attempt = attempt;
  options.socket = socket;
  options.deadline = ToMilliseconds(timeout);
  options.without = without;
  options.interrupted = SignalRaised;
  Result<std::unique_ptr<View>> view = [&] {
    const GilReleased released;
    return Attach(options);
  }();
  if (!view.ok()) {
    Raise(view.status());
  }
  auto attached = std::make_shared<PyView>(*std::move(view));
  RaiseUnlessOk(Status());  // a signal that came at the last moment
  return attached;
}

std::vector<CheckpointInfo> List(const std::string& job, const std::string& socket,
                                 double timeout) {
  ListOptions options;
  options.job = job;
  options.socket = socket;
  options.deadline = ToMilliseconds(timeout);
  options.interrupted = SignalRaised;
  Result<std::vector<CheckpointInfo>> list = [&] {
    const GilReleased released;
    return ListCheckpoints(options);
  }();
  return ValueOrRaise(std::move(list));
}

}  // namespace

void BindView(py::module_& module) {
  py::class_<TensorBuffer, std::shared_ptr<TensorBuffer>>(module, "_TensorBuffer",
                                                          py::buffer_protocol())
      .def_buffer(&TensorBuffer::Info);
  py::class_<PyView, std::shared_ptr<PyView>>(module, "View")
      .def_property_readonly("attempt", [](const PyView& v) { return v.view().attempt(); })
      .def_property_readonly("step", [](const PyView& v) { return v.view().step(); })
      .def_property_readonly("world_size", [](const PyView& v) { return v.view().world_size(); })
      .def_property_readonly("tier", [](const PyView& v) { return v.view().tier(); })
      .def_property_readonly("why", [](const PyView& v) { return v.view().why(); })
      .def_property_readonly("tensors", &PyView::Tensors)
      .def_property_readonly("objects",
                             [](const PyView& v) { return FromObjects(v.view().objects()); })
      .def("read", &PyView::Read, py::arg("tensor"), py::arg("address"),
           py::arg("nbytes") = py::none())
      .def("memory", &PyView::Memory, py::arg("tensor"))
      .def("verify", &PyView::Verify);
  py::class_<CheckpointInfo>(module, "CheckpointInfo")
      .def_readonly("attempt", &CheckpointInfo::attempt)
      .def_readonly("step", &CheckpointInfo::step)
      .def_readonly("world_size", &CheckpointInfo::world_size)
      .def_readonly("on_line", &CheckpointInfo::on_line)
      .def_readonly("tiers", &CheckpointInfo::tiers)
      .def_readonly("bytes", &CheckpointInfo::bytes)
      .def_property_readonly(
          "saved_unix",
          [](const CheckpointInfo& c) { return static_cast<double>(c.saved_unix_ms) * 1e-3; })
      .def("__repr__", [](const CheckpointInfo& c) {
        return "<CheckpointInfo step " + std::to_string(c.step) + " of attempt " +
               std::to_string(c.attempt) + ">";
      });
  module.def("attach", &AttachTo, py::arg("job"), py::kw_only(), py::arg("rank") = 0,
             py::arg("step") = py::none(), py::arg("attempt") = 0, py::arg("socket") = "",
             py::arg("timeout") = 30.0, py::arg("without") = std::vector<std::string>());
  module.def("list_checkpoints", &List, py::arg("job"), py::kw_only(), py::arg("socket") = "",
             py::arg("timeout") = 30.0);
}

}  // namespace holdfast::python
