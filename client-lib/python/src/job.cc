#include "client-lib/python/src/job.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client-lib/python/src/status.h"
#include "client-lib/python/src/tensors.h"
#include "client-lib/python/src/wait.h"
#include "holdfast/job.h"

namespace py = pybind11;

namespace holdfast::python {
namespace {

constexpr std::chrono::milliseconds kBetweenProgress{250};

using Streams = std::vector<std::pair<int32_t, uint64_t>>;

Stage StageNamed(const std::string& name) {
  for (const Stage stage : {Stage::kSnapshot, Stage::kSealed, Stage::kCommitted, Stage::kPeer,
                            Stage::kNvme, Stage::kRemote}) {
    if (name == StageName(stage)) {
      return stage;
    }
  }
  Raise(Status(Code::kInvalidArgument, "there is no stage '" + name +
                                           "': snapshot, sealed, committed, peer, nvme, remote"));
}

std::vector<DeviceStream> ToStreams(const Streams& streams) {
  std::vector<DeviceStream> out;
  for (const auto& [device, stream] : streams) {
    out.push_back({device, reinterpret_cast<void*>(stream)});
  }
  return out;
}

TierPolicy ToPolicy(const std::map<std::string, uint64_t>& fields) {
  TierPolicy policy;
  for (const auto& [name, value] : fields) {
    if (name == "every_steps") {
      policy.every_steps = value;
    } else if (name == "every_ms") {
      policy.every = Milliseconds(static_cast<int64_t>(std::min<uint64_t>(value, INT64_MAX)));
    } else if (name == "keep_last") {
      policy.keep_last = static_cast<uint32_t>(std::min<uint64_t>(value, UINT32_MAX));
    } else if (name == "keep_every_steps") {
      policy.keep_every_steps = value;
    } else if (name == "bytes_max") {
      policy.bytes_max = value;
    } else {
      Raise(Status(Code::kInvalidArgument, "a policy has no '" + name + "'"));
    }
  }
  return policy;
}

std::optional<uint32_t> ToReplicas(const std::map<std::string, uint64_t>& fields) {
  std::optional<uint32_t> replicas;
  for (const auto& [name, value] : fields) {
    if (name != "replicas") {
      Raise(Status(Code::kInvalidArgument, "a policy of peers has no '" + name + "'"));
    }
    replicas = static_cast<uint32_t>(std::min<uint64_t>(value, UINT32_MAX));
  }
  return replicas;
}

// Calls without the GIL; raises what went wrong.
template <typename Call>
auto Unlocked(const Call& call) {
  auto result = [&] {
    const GilReleased released;
    return call();
  }();
  return ValueOrRaise(std::move(result));
}

// The slot's memory from the first of a save's copies to the last: what the memoryview of
// Save.staged() is of.
class StagedBuffer {
 public:
  explicit StagedBuffer(std::shared_ptr<const StagedTensors> staged) : staged_(std::move(staged)) {
    for (const std::span<const std::byte>& bytes : staged_->bytes()) {
      if (bytes.empty()) {
        continue;
      }
      begin_ = begin_ == nullptr ? bytes.data() : std::min(begin_, bytes.data());
      end_ = std::max(end_, bytes.data() + bytes.size());
    }
  }
  const std::byte* begin() const { return begin_; }
  py::buffer_info Info() const {
    return py::buffer_info(const_cast<std::byte*>(begin_), 1, "B", 1,
                           {static_cast<py::ssize_t>(end_ - begin_)}, {1}, /*readonly=*/true);
  }

 private:
  const std::shared_ptr<const StagedTensors> staged_;
  const std::byte* begin_ = nullptr;
  const std::byte* end_ = nullptr;
};

// What was raised, for the daemon to tell others: without the frames of this program.
std::string Words(const py::error_already_set& raised) {
  try {
    const std::string words = py::str(raised.value());
    return words.empty() ? std::string(py::str(raised.type().attr("__name__"))) : words;
  } catch (const py::error_already_set&) {  // its __str__ raises, too
    return std::string(py::str(raised.type().attr("__name__")));
  }
}

// Whether this rank's shard does not have it, and others' may (holdfast._errors.not_in_shard).
bool MayBeElsewhere(const py::error_already_set& raised) {
  return py::hasattr(raised.value(), "may_be_elsewhere");
}

// What the session makes of it. Of all ranks' shards: what was found when they were read is no
// mistake of the caller's.
Code CodeOf(const py::error_already_set& raised, bool of_all) {
  if (!of_all) {
    return MayBeElsewhere(raised) ? Code::kNotFound : Code::kInvalidArgument;
  }
  const std::string name = py::str(py::getattr(raised.value(), "code", py::str("")));
  for (const Code code :
       {Code::kUnavailable, Code::kDeadlineExceeded, Code::kCorrupt, Code::kUnreadable}) {
    if (name == CodeName(code)) {
      return code;
    }
  }
  return Code::kInvalidArgument;
}

class PySave {
 public:
  explicit PySave(std::unique_ptr<SaveHandle> handle) : handle_(std::move(handle)) {}
  ~PySave() { LetGo(handle_); }

  void Wait(const std::string& stage, double timeout) {
    const Stage wanted = StageNamed(stage);
    RaiseUnlessOk(WaitInSlices(timeout, [&](Milliseconds slice) {
      const Status status = handle_->Wait(wanted, slice);
      // That the daemon does not answer within a slice says little: it is busy, or being restarted.
      // What has been sealed stays so, and the caller has said how long to wait.
      if (status.code() == Code::kUnavailable && wanted > Stage::kSealed &&
          handle_->Wait(Stage::kSealed, Milliseconds(0)).ok()) {
        return Status(Code::kDeadlineExceeded, std::string(status.message()));
      }
      return status;
    }));
  }
  void WaitFirst(double timeout) {
    RaiseUnlessOk(
        WaitInSlices(timeout, [&](Milliseconds slice) { return handle_->WaitFirst(slice); }));
  }
  bool Done(const std::string& stage) {
    const Stage wanted = StageNamed(stage);
    if (wanted > Stage::kSealed) {
      Raise(Status(Code::kInvalidArgument,
                   "done() asks nobody, and so knows no stage after "
                   "'sealed': wait(stage, 0) asks the daemon"));
    }
    const GilReleased released;
    return handle_->Wait(wanted, Milliseconds(0)).code() != Code::kDeadlineExceeded;
  }
  void Fence(const Streams& streams, double timeout) {
    const std::vector<DeviceStream> fenced = ToStreams(streams);
    RaiseUnlessOk(WaitInSlices(
        timeout, [&](Milliseconds slice) { return handle_->FenceStreams(fenced, slice); }));
  }
  void Seal(double timeout) {
    RaiseUnlessOk(WaitInSlices(timeout, [&](Milliseconds slice) { return handle_->Seal(slice); }));
  }
  void Discard() {
    {
      const GilReleased released;
      handle_->Discard();
    }
    RaiseUnlessOk(Status());
  }
  py::tuple Staged() {
    // Without the GIL: whoever has the job's turn may need it.
    std::shared_ptr<const StagedTensors> staged = Unlocked([&] { return handle_->Staged(); });
    const auto buffer = std::make_shared<StagedBuffer>(staged);
    const size_t count = staged->bytes().size();
    py::list offsets(count);
    py::list sizes(count);
    for (size_t i = 0; i < count; ++i) {
      const std::span<const std::byte> bytes = staged->bytes()[i];
      offsets[i] = bytes.empty() ? 0 : bytes.data() - buffer->begin();
      sizes[i] = bytes.size();
    }
    return py::make_tuple(py::memoryview(py::cast(buffer)), offsets, sizes);
  }
  py::dict Times() const {
    const StageTimes times = handle_->times();
    py::dict seconds;
    for (const auto& [stage, time] :
         {std::pair(Stage::kSnapshot, times.snapshot), std::pair(Stage::kSealed, times.sealed),
          std::pair(Stage::kCommitted, times.committed), std::pair(Stage::kNvme, times.nvme),
          std::pair(Stage::kRemote, times.remote), std::pair(Stage::kPeer, times.peer)}) {
      if (time.count() >= 0) {
        seconds[StageName(stage)] = static_cast<double>(time.count()) * 1e-9;
      }
    }
    return seconds;
  }
  uint64_t bytes() const { return handle_->times().bytes; }

 private:
  std::unique_ptr<SaveHandle> handle_;
};

class PyJob {
 public:
  PyJob(const std::string& name, uint32_t rank, uint32_t world_size, const std::string& launch,
        const std::string& socket, uint32_t copy_threads,
        const std::map<std::string, std::map<std::string, uint64_t>>& policy, double open_timeout,
        double call_timeout) {
    JobOptions options;
    options.job = name;
    options.rank = rank;
    options.world_size = world_size;
    options.launch = launch;
    options.socket = socket;
    options.copy_threads = copy_threads;
    for (const auto& [tier, fields] : policy) {
      if (tier == "peer") {
        options.policy.replicas = ToReplicas(fields);
        continue;
      }
      if (tier != "nvme" && tier != "remote") {
        Raise(Status(Code::kInvalidArgument, "a policy has no tier '" + tier + "'"));
      }
      (tier == "nvme" ? options.policy.nvme : options.policy.remote) = ToPolicy(fields);
    }
    options.open_deadline = ToMilliseconds(open_timeout);
    options.call_deadline = ToMilliseconds(call_timeout);
    options.interrupted = SignalRaised;
    options.warn = WarnInPython;
    job_ = Unlocked([&] { return Job::Open(options); });
  }
  ~PyJob() { LetGo(job_); }

  uint64_t attempt() { return Open()->attempt(); }
  uint64_t failed_saves() { return Open()->failed_saves(); }

  bool Preempted(uint64_t step) {
    const std::shared_ptr<Job> job = Open();
    bool last = false;
    {
      const GilReleased released;
      last = job->Preempted(step);
    }
    if (PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    return last;
  }
  void NoticeStop(double grace) { Open()->NoticeStop(ToMilliseconds(grace)); }
  std::optional<double> stop_left() {
    const std::optional<Milliseconds> left = Open()->stop_left();
    return left ? std::optional(static_cast<double>(left->count()) * 1e-3) : std::nullopt;
  }

  py::tuple Reserve(TensorList& tensors, const py::sequence& addresses, const py::sequence& objects,
                    double timeout) {
    const std::shared_ptr<Job> job = Open();
    const TensorList::Use use(tensors, addresses);
    use.state().objects = ToObjects(objects);
    const ReserveReport report =
        Unlocked([&] { return job->Reserve(use.state(), ToMilliseconds(timeout)); });
    return py::make_tuple(report.slots_ready, report.slots_wanted, report.slot_bytes);
  }

  std::shared_ptr<PySave> Save(uint64_t step, TensorList& tensors, const py::sequence& addresses,
                               const py::sequence& objects, const std::vector<size_t>& copy_first,
                               bool hold, bool wait_first, const Streams& streams,
                               double wait_for_room) {
    const std::shared_ptr<Job> job = Open();
    const TensorList::Use use(tensors, addresses);
    use.state().objects = ToObjects(objects);
    SaveOptions options;
    options.copy_first = copy_first;
    options.hold = hold;
    options.return_at_once = true;  // in slices, so that Ctrl-C works
    options.streams = ToStreams(streams);
    options.wait_for_room = ToMilliseconds(wait_for_room);
    std::unique_ptr<SaveHandle> handle;
    {
      const GilReleased released;
      handle = job->SaveAsync(step, use.state(), options);
    }
    auto save = std::make_shared<PySave>(std::move(handle));
    if (PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    if (!wait_first) {
      return save;
    }
    try {
      save->WaitFirst(HUGE_VAL);
      return save;
    } catch (py::error_already_set& raised) {
      // Nobody will have the save. Its end sees what is pending, and waits for no slot.
      raised.restore();
      save.reset();
      static_cast<void>(SignalRaised());  // takes back what was left to be raised
      throw py::error_already_set();
    }
  }

  Restored Restore(const py::function& choose, std::optional<uint64_t> step, uint64_t attempt,
                   double timeout, const Streams& streams, bool convert,
                   const std::optional<py::function>& progress) {
    RestoreOptions options;
    options.streams = ToStreams(streams);
    options.convert_types = convert;
    options.newest = !step.has_value();
    options.step = step.value_or(0);
    options.attempt = attempt;
    options.deadline = ToMilliseconds(timeout);
    const std::shared_ptr<Job> job = Open();
    std::optional<py::error_already_set> raised_by_choose;
    std::optional<py::error_already_set> raised_by_progress;
    bool interrupted = false;  // by the former
    std::optional<GilReleased> released;
    // Called by this thread, which has let the GIL go.
    const auto ask = [&](const Saved& saved) -> Result<State> {
      const GilReleased::Held held(*released);
      try {
        py::list infos(saved.tensors.size());
        for (size_t i = 0; i < saved.tensors.size(); ++i) {
          infos[i] = FromTensor(saved.tensors[i]);
        }
        py::object of_all = py::none();
        if (saved.saved_by > 0) {
          py::set of_every_rank;
          for (size_t i = 0; i < saved.tensors.size(); ++i) {
            if (saved.tensor_ranks[i] == saved.saved_by) {
              of_every_rank.add(saved.tensors[i].name);
            }
          }
          of_all = py::make_tuple(saved.attempt, saved.step, saved.saved_by,
                                  FromSavedObjects(saved.of_all), of_every_rank);
        }
        const auto chosen = choose(infos, FromObjects(saved.objects), of_all)
                                .cast<std::pair<py::object, py::sequence>>();
        State wanted(TensorList::Use(chosen.first.cast<TensorList&>(), chosen.second).state());
        raised_by_choose.reset();
        return wanted;
      } catch (const py::error_already_set& raised) {
        raised_by_choose = raised;
        interrupted = !raised.matches(PyExc_Exception);  // (KeyboardInterrupt)
        return Status(interrupted ? Code::kInvalidArgument : CodeOf(raised, saved.saved_by > 0),
                      Words(raised));
      } catch (const py::cast_error& error) {
        return Status(Code::kInvalidArgument,
                      std::string("choose must return (TensorList, addresses): ") + error.what());
      }
    };
    if (progress.has_value()) {
      // By this thread, too; seldom, for it takes the GIL.
      options.progress =
          [&, next = std::chrono::steady_clock::time_point()](const RestoreProgress& now) mutable {
            if (std::chrono::steady_clock::now() < next) {
              return true;
            }
            const GilReleased::Held held(*released);
            try {
              (*progress)(now.loading, now.step, now.attempt, now.bytes, now.bytes_of);
            } catch (const py::error_already_set& raised) {
              raised_by_progress = raised;
              return false;
            }
            next = std::chrono::steady_clock::now() + kBetweenProgress;
            return true;
          };
    }
    released.emplace();
    Result<Restored> restored = job->Restore(Choose(ask), options);
    released.reset();
    if (raised_by_progress.has_value()) {
      if (!restored.ok() || !IsMainThread()) {
        throw *raised_by_progress;
      }
      raised_by_progress->restore();  // it has what it wanted by then
      RaiseLater();
    }
    // What it raised is what is wrong, if that is what ended the restore. (Where others' shards
    // were looked at, too, the status says both.)
    if (interrupted) {
      throw *raised_by_choose;
    }
    if (!restored.ok() && raised_by_choose.has_value() && !MayBeElsewhere(*raised_by_choose) &&
        restored.status().message().find(Words(*raised_by_choose)) != std::string::npos) {
      throw *raised_by_choose;
    }
    return ValueOrRaise(std::move(restored));
  }

  Restored Adopt(std::optional<uint64_t> step, uint64_t attempt, double timeout) {
    RestoreOptions options;
    options.newest = !step.has_value();
    options.step = step.value_or(0);
    options.attempt = attempt;
    options.deadline = ToMilliseconds(timeout);
    options.adopt_only = true;
    const std::shared_ptr<Job> job = Open();
    return Unlocked([&] {
      State nothing;
      return job->Restore(nothing, options);
    });
  }

  // With the GIL, which nobody can wait for here; of a job that was closed: nothing.
  void EnterNetworkBusy() {
    if (job_ != nullptr) {
      job_->EnterNetworkBusy();
    }
  }
  void LeaveNetworkBusy() {
    if (job_ != nullptr) {
      job_->LeaveNetworkBusy();
    }
  }

  void Close() {
    std::shared_ptr<Job> job = std::move(job_);
    {
      const GilReleased released;
      job.reset();
    }
    RaiseUnlessOk(Status());
  }

 private:
  std::shared_ptr<Job> Open() {
    if (job_ == nullptr) {
      Raise(Status(Code::kRefused, "the job was closed in this process"));
    }
    return job_;
  }

  std::shared_ptr<Job> job_;  // shared with the calls that other threads are in
};

void BindRestored(py::module_& module) {
  py::class_<Restored>(module, "Restored")
      .def_readonly("attempt", &Restored::attempt)
      .def_readonly("step", &Restored::step)
      .def_readonly("bytes", &Restored::bytes)
      .def_readonly("source", &Restored::source)
      .def_readonly("why", &Restored::why)
      .def_readonly("notes", &Restored::notes)
      .def_readonly("resharded_from", &Restored::resharded_from)
      .def_property_readonly(
          "waited_s",
          [](const Restored& r) { return static_cast<double>(r.waited.count()) * 1e-9; })
      .def_property_readonly("copied_s", [](const Restored& r) {
        return static_cast<double>(r.copied.count()) * 1e-9;
      });
}

}  // namespace

void BindJob(py::module_& module) {
  BindRestored(module);
  py::class_<StagedBuffer, std::shared_ptr<StagedBuffer>>(module, "_StagedBuffer",
                                                          py::buffer_protocol())
      .def_buffer(&StagedBuffer::Info);

  py::class_<PySave, std::shared_ptr<PySave>>(module, "Save")
      .def("wait", &PySave::Wait, py::arg("stage"), py::arg("timeout"))
      .def("wait_first", &PySave::WaitFirst, py::arg("timeout"))
      .def("done", &PySave::Done, py::arg("stage"))
      .def("fence", &PySave::Fence, py::arg("streams"), py::arg("timeout"))
      .def("seal", &PySave::Seal, py::arg("timeout"))
      .def("discard", &PySave::Discard)
      .def("staged", &PySave::Staged)
      .def("times", &PySave::Times)
      .def_property_readonly("nbytes", &PySave::bytes);

  py::class_<PyJob, std::shared_ptr<PyJob>>(module, "Job")
      .def(py::init<const std::string&, uint32_t, uint32_t, const std::string&, const std::string&,
                    uint32_t, const std::map<std::string, std::map<std::string, uint64_t>>&, double,
                    double>(),
           py::arg("job"), py::kw_only(), py::arg("rank"), py::arg("world_size"),
           py::arg("launch") = "", py::arg("socket") = "", py::arg("copy_threads") = 0,
           py::arg("policy") = std::map<std::string, std::map<std::string, uint64_t>>(),
           py::arg("open_timeout") = 60.0, py::arg("call_timeout") = 30.0)
      .def_property_readonly("attempt", &PyJob::attempt)
      .def_property_readonly("failed_saves", &PyJob::failed_saves)
      .def("preempted", &PyJob::Preempted, py::arg("step"))
      .def("notice_stop", &PyJob::NoticeStop, py::arg("grace"))
      .def_property_readonly("stop_left", &PyJob::stop_left)
      .def("reserve", &PyJob::Reserve, py::arg("tensors"), py::arg("addresses"), py::arg("objects"),
           py::arg("timeout"))
      .def("save", &PyJob::Save, py::arg("step"), py::arg("tensors"), py::arg("addresses"),
           py::arg("objects"), py::kw_only(), py::arg("copy_first") = std::vector<size_t>(),
           py::arg("hold") = false, py::arg("wait_first") = true, py::arg("streams") = Streams(),
           py::arg("wait_for_room") = 0.0)
      .def("restore", &PyJob::Restore, py::arg("choose"), py::kw_only(),
           py::arg("step") = py::none(), py::arg("attempt") = 0, py::arg("timeout") = 600.0,
           py::arg("streams") = Streams(), py::arg("convert") = false,
           py::arg("progress") = py::none())
      .def("adopt", &PyJob::Adopt, py::kw_only(), py::arg("step") = py::none(),
           py::arg("attempt") = 0, py::arg("timeout") = 600.0)
      .def("enter_network_busy", &PyJob::EnterNetworkBusy)
      .def("leave_network_busy", &PyJob::LeaveNetworkBusy)
      .def("close", &PyJob::Close);
}

}  // namespace holdfast::python
