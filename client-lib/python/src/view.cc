#include "client-lib/python/src/view.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client-lib/python/src/status.h"
#include "client-lib/python/src/tensors.h"
#include "client-lib/python/src/type.h"
#include "client-lib/python/src/wait.h"
#include "holdfast/view.h"

namespace holdfast::python {
namespace {

// One tensor's bytes as they lie in the slot or file: what a memoryview of View.memory() is of.
class TensorBuffer {
 public:
  TensorBuffer(std::shared_ptr<View> view, const Tensor& tensor)
      : view_(std::move(view)), data_(tensor.data), bytes_(tensor.bytes) {}
  ~TensorBuffer() { LetGo(view_); }  // the last one unmaps, and tells the daemon
  void* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

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
  Ref Tensors() const { return ToList(view_->tensors(), FromTensor); }
  Ref Digests() const {
    std::vector<uint64_t> digests(view_->tensors().size());
    for (size_t i = 0; i < digests.size(); ++i) {
      digests[i] = view_->digest(i);
    }
    return ToList(digests);
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
  Ref Memory(size_t tensor) const {
    Check(tensor);
    const Tensor& info = view_->tensors()[tensor];
    if (info.data == nullptr && info.bytes > 0) {
      Raise(Status(Code::kInvalidArgument,
                   "memory: tensor '" + info.name +
                       "' lies on another node (tier peer): read() brings it here"));
    }
    const Ref buffer = Wrap(std::make_shared<TensorBuffer>(view_, info));
    return Ref::Checked(PyMemoryView_FromObject(buffer.get()));
  }
  void Verify() {
    Unlocked([&] { return view_->Verify(); });
  }

 private:
  void Check(size_t tensor) const {
    if (tensor >= view_->tensors().size()) {
      RaiseError(PyExc_IndexError, "tensor " + std::to_string(tensor) + " of " +
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

int GetTensorBuffer(PyObject* self, Py_buffer* view, int flags) {
  const TensorBuffer& buffer = *ValueOf<TensorBuffer>(self);
  return PyBuffer_FillInfo(view, self, buffer.data(), static_cast<Py_ssize_t>(buffer.bytes()),
                           /*readonly=*/1, flags);
}

void BindInfo(PyObject* module) {
  using C = CheckpointInfo;
  static PyGetSetDef attributes[] = {
      Getter<C, [](const C& c) { return ToPython(c.attempt); }>("attempt"),
      Getter<C, [](const C& c) { return ToPython(c.step); }>("step"),
      Getter<C, [](const C& c) { return ToPython(c.world_size); }>("world_size"),
      Getter<C, [](const C& c) { return ToPython(c.on_line); }>("on_line"),
      Getter<C, [](const C& c) { return ToList(c.tiers); }>("tiers"),
      Getter<C, [](const C& c) { return ToPython(c.bytes); }>("bytes"),
      Getter<C, [](const C& c) { return ToPython(static_cast<double>(c.saved_unix_ms) * 1e-3); }>(
          "saved_unix"),
      {}};
  const reprfunc represent = [](PyObject* self) {
    return Guarded([&] {
      const C& info = *ValueOf<C>(self);
      return ToPython("<CheckpointInfo step " + std::to_string(info.step) + " of attempt " +
                      std::to_string(info.attempt) + ">");
    });
  };
  MakeType<C>(module, "CheckpointInfo", {.attributes = attributes, .represent = represent});
}

// The rows of View.

Ref Read(PyView& view, const Arguments& given) {
  view.Read(given.Get<uint64_t>("tensor"), given.Get<uint64_t>("address"),
            given.Get<std::optional<uint64_t>>("nbytes", std::nullopt));
  return None();
}

Ref Memory(PyView& view, const Arguments& given) {
  return view.Memory(given.Get<uint64_t>("tensor"));
}

Ref Verify(PyView& view, const Arguments& /*none*/) {
  view.Verify();
  return None();
}

}  // namespace

Ref AttachOf(const Arguments& given) {
  return Wrap(AttachTo(given.Get<std::string>("job"), given.Get<uint32_t>("rank", 0),
                       given.Get<std::optional<uint64_t>>("step", std::nullopt),
                       given.Get<uint64_t>("attempt", 0), given.Get<std::string>("socket", ""),
                       given.Get<double>("timeout", 30.0),
                       given.Get<std::vector<std::string>>("without", {})));
}

Ref ListOf(const Arguments& given) {
  const std::vector<CheckpointInfo> found =
      List(given.Get<std::string>("job"), given.Get<std::string>("socket", ""),
           given.Get<double>("timeout", 30.0));
  return ToList(found, [](const CheckpointInfo& info) {
    return Wrap(std::make_shared<CheckpointInfo>(info));
  });
}

void BindView(PyObject* module) {
  using V = PyView;
  static PyMethodDef methods[] = {Method<V, Read>("read", "tensor, address, nbytes=None"),
                                  Method<V, Memory>("memory", "tensor"),
                                  Method<V, Verify>("verify", ""),
                                  {}};
  static PyGetSetDef attributes[] = {
      Getter<V, [](const V& v) { return ToPython(v.view().attempt()); }>("attempt"),
      Getter<V, [](const V& v) { return ToPython(v.view().step()); }>("step"),
      Getter<V, [](const V& v) { return ToPython(v.view().world_size()); }>("world_size"),
      Getter<V, [](const V& v) { return ToPython(v.view().tier()); }>("tier"),
      Getter<V, [](const V& v) { return ToPython(v.view().why()); }>("why"),
      Getter<V, [](const V& v) { return v.Tensors(); }>("tensors"),
      Getter<V, [](const V& v) { return v.Digests(); }>("digests"),
      Getter<V, [](const V& v) { return FromObjects(v.view().objects()); }>("objects"),
      {}};
  MakeType<V>(module, "View", {.methods = methods, .attributes = attributes});
  MakeType<TensorBuffer>(module, "_TensorBuffer", {.buffer = GetTensorBuffer});
  BindInfo(module);
}

}  // namespace holdfast::python
