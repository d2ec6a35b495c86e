#include "client-lib/python/src/step.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client-lib/python/src/status.h"
#include "client-lib/python/src/tensors.h"
#include "client-lib/python/src/type.h"
#include "client-lib/python/src/wait.h"
#include "client-lib/src/kept_parts.h"
#include "client-lib/src/open_step.h"

namespace holdfast::python {
namespace {

// Calls without the GIL; raises what went wrong.
template <typename Call>
auto Unlocked(const Call& call) {
  auto result = [&] {
    const GilReleased released;
    return call();
  }();
  return ValueOrRaise(std::move(result));
}

class PyKeptParts {
 public:
  explicit PyKeptParts(std::unique_ptr<client::KeptParts> kept) : kept_(std::move(kept)) {}
  ~PyKeptParts() { LetGo(kept_); }  // and so the slots

  void Read(const std::vector<uint64_t>& addresses) {
    std::vector<void*> memory;
    memory.reserve(addresses.size());
    for (const uint64_t address : addresses) {
      memory.push_back(reinterpret_cast<void*>(address));
    }
    Status status;
    {
      const GilReleased released;
      status = kept_->CopyTo(memory);
    }
    RaiseUnlessOk(status);
  }

 private:
  std::unique_ptr<client::KeptParts> kept_;
};

class PyOpenStep {
 public:
  explicit PyOpenStep(std::shared_ptr<const client::OpenStep> open) : open_(std::move(open)) {}
  ~PyOpenStep() { LetGo(open_); }

  Ref Items() const {
    return ToList(open_->items.items(), [](const SavedItem& item) {
      const bool tensor = item.kind == SavedItem::Kind::kTensor;
      return Tuple({ToPython(item.name), tensor ? ToPython(TypeName(item.type)) : None(),
                    ToList(item.shape), ToList(item.ranks), ToPython(item.problem)});
    });
  }
  Ref Objects(const std::vector<uint64_t>& items) const {
    for (const uint64_t item : items) {
      if (item >= open_->items.items().size() ||
          open_->items.items()[item].kind == SavedItem::Kind::kTensor) {
        RaiseError(PyExc_IndexError, "item " + std::to_string(item) + " is no object");
      }
    }
    return FromObjects(Unlocked([&] { return open_->ReadObjects({items.begin(), items.end()}); }));
  }
  std::shared_ptr<PyKeptParts> Keep(const TensorList& parts) const {
    return std::make_shared<PyKeptParts>(
        Unlocked([&] { return client::KeptParts::Of(open_, parts.tensors()); }));
  }

 private:
  std::shared_ptr<const client::OpenStep> open_;
};

// The rows of the types.

Ref Objects(PyOpenStep& open, const Arguments& given) {
  return open.Objects(given.Get<std::vector<uint64_t>>("items"));
}

Ref Keep(PyOpenStep& open, const Arguments& given) {
  return Wrap(open.Keep(*given.Get<std::shared_ptr<TensorList>>("parts")));
}

Ref Read(PyKeptParts& kept, const Arguments& given) {
  kept.Read(given.Get<std::vector<uint64_t>>("addresses"));
  return None();
}

}  // namespace

Ref OpenStepOf(const Arguments& given) {
  CheckpointOptions options;
  options.job = given.Get<std::string>("job");
  options.socket = given.Get<std::string>("socket", "");
  options.window_deadline = ToMilliseconds(given.Get<double>("timeout", 30.0));
  options.interrupted = SignalRaised;
  CheckpointInfo info;
  info.step = given.Get<uint64_t>("step");
  info.attempt = given.Get<uint64_t>("attempt");
  info.world_size = given.Get<uint32_t>("world_size");
  return Wrap(
      std::make_shared<PyOpenStep>(Unlocked([&] { return client::OpenStep::Of(options, info); })));
}

void BindStep(PyObject* module) {
  static PyMethodDef open_methods[] = {Method<PyOpenStep, Objects>("objects", "items"),
                                       Method<PyOpenStep, Keep>("keep", "parts"),
                                       {}};
  static PyGetSetDef open_attributes[] = {
      Getter<PyOpenStep, [](const PyOpenStep& open) { return open.Items(); }>("items"), {}};
  MakeType<PyOpenStep>(module, "OpenStep",
                       {.methods = open_methods, .attributes = open_attributes});
  static PyMethodDef kept_methods[] = {Method<PyKeptParts, Read>("read", "addresses"), {}};
  MakeType<PyKeptParts>(module, "KeptParts", {.methods = kept_methods});
}

}  // namespace holdfast::python
