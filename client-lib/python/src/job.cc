#include "client-lib/python/src/job.h"

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client-lib/python/src/status.h"
#include "client-lib/python/src/tensors.h"
#include "client-lib/python/src/type.h"
#include "client-lib/python/src/wait.h"
#include "holdfast/job.h"

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
  size_t size() const { return static_cast<size_t>(end_ - begin_); }

 private:
  const std::shared_ptr<const StagedTensors> staged_;
  const std::byte* begin_ = nullptr;
  const std::byte* end_ = nullptr;
};

// Whether this rank's shard does not have it, and others' may (holdfast._errors.not_in_shard).
bool MayBeElsewhere(const Raised& raised) {
  const Ref found = Ref::Owned(PyObject_GetAttrString(raised.value(), "may_be_elsewhere"));
  PyErr_Clear();
  return found.get() != nullptr;
}

// Whether it says that the step is of another run of the job (holdfast._fresh).
bool IsOfAnotherRun(const Raised& raised) {
  const Ref found = Ref::Owned(PyObject_GetAttrString(raised.value(), "of_another_run"));
  PyErr_Clear();
  return found.get() != nullptr;
}

// What the session makes of it. Of all ranks' shards: what was found when they were read is no
// mistake of the caller's.
Code CodeOf(const Raised& raised, bool of_all) {
  if (IsOfAnotherRun(raised)) {
    return Code::kNothingToRestore;
  }
  if (!of_all) {
    return MayBeElsewhere(raised) ? Code::kNotFound : Code::kInvalidArgument;
  }
  const Ref code = Ref::Owned(PyObject_GetAttrString(raised.value(), "code"));
  const Ref name = Ref::Owned(code.get() == nullptr ? nullptr : PyObject_Str(code.get()));
  PyErr_Clear();
  for (const Code known :
       {Code::kUnavailable, Code::kDeadlineExceeded, Code::kCorrupt, Code::kUnreadable}) {
    if (name.get() != nullptr && From<std::string>(name.get()) == CodeName(known)) {
      return known;
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
  Ref Staged() {
    // Without the GIL: whoever has the job's turn may need it.
    std::shared_ptr<const StagedTensors> staged = Unlocked([&] { return handle_->Staged(); });
    const auto buffer = std::make_shared<StagedBuffer>(staged);
    const Ref offsets = ToList(staged->bytes(), [&](const std::span<const std::byte>& bytes) {
      return ToPython(bytes.empty() ? uint64_t{0}
                                    : static_cast<uint64_t>(bytes.data() - buffer->begin()));
    });
    const Ref sizes = ToList(staged->bytes(), [](const std::span<const std::byte>& bytes) {
      return ToPython(uint64_t{bytes.size()});
    });
    return Tuple({Ref::Checked(PyMemoryView_FromObject(Wrap(buffer).get())), offsets, sizes});
  }
  Ref Times() const {
    const StageTimes times = handle_->times();
    Ref seconds = Ref::Checked(PyDict_New());
    for (const auto& [stage, time] :
         {std::pair(Stage::kSnapshot, times.snapshot), std::pair(Stage::kSealed, times.sealed),
          std::pair(Stage::kCommitted, times.committed), std::pair(Stage::kNvme, times.nvme),
          std::pair(Stage::kRemote, times.remote), std::pair(Stage::kPeer, times.peer)}) {
      if (time.count() >= 0 &&
          PyDict_SetItemString(seconds.get(), StageName(stage),
                               ToPython(static_cast<double>(time.count()) * 1e-9).get()) != 0) {
        throw Raised();
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
    ThrowIfPending();
    return last;
  }
  void NoticeStop(double grace) { Open()->NoticeStop(ToMilliseconds(grace)); }
  std::optional<double> stop_left() {
    const std::optional<Milliseconds> left = Open()->stop_left();
    return left ? std::optional(static_cast<double>(left->count()) * 1e-3) : std::nullopt;
  }

  Ref Reserve(TensorList& tensors, PyObject* addresses, PyObject* objects, double timeout) {
    const std::shared_ptr<Job> job = Open();
    const TensorList::Use use(tensors, addresses);
    use.state().objects = ToObjects(objects);
    const ReserveReport report =
        Unlocked([&] { return job->Reserve(use.state(), ToMilliseconds(timeout)); });
    return Tuple(
        {ToPython(report.slots_ready), ToPython(report.slots_wanted), ToPython(report.slot_bytes)});
  }

  std::shared_ptr<PySave> Save(uint64_t step, TensorList& tensors, PyObject* addresses,
                               PyObject* objects, const std::vector<size_t>& copy_first, bool hold,
                               bool wait_first, const Streams& streams, double wait_for_room) {
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
    ThrowIfPending();
    if (!wait_first) {
      return save;
    }
    try {
      save->WaitFirst(HUGE_VAL);
      return save;
    } catch (Raised& raised) {
      // Nobody will have the save. Its end sees what is pending, and waits for no slot.
      raised.Restore();
      save.reset();
      static_cast<void>(SignalRaised());  // takes back what was left to be raised
      throw Raised();
    }
  }

  Restored Restore(const Ref& choose, std::optional<uint64_t> step, uint64_t attempt,
                   double timeout, const Streams& streams, bool convert,
                   const std::optional<Ref>& progress, const std::string& label) {
    RestoreOptions options;
    options.label = label;
    options.streams = ToStreams(streams);
    options.convert_types = convert;
    options.newest = !step.has_value();
    options.step = step.value_or(0);
    options.attempt = attempt;
    options.deadline = ToMilliseconds(timeout);
    const std::shared_ptr<Job> job = Open();
    std::optional<Raised> raised_by_choose;
    std::optional<Raised> raised_by_progress;
    bool interrupted = false;  // by the former
    std::optional<GilReleased> released;
    // Called by this thread, which has let the GIL go.
    const auto ask = [&](const Saved& saved) -> Result<State> {
      const GilReleased::Held held(*released);
      try {
        const Ref infos = ToList(saved.tensors, FromTensor);
        const Ref chosen = Call(choose.get(), {infos, FromObjects(saved.objects), OfAll(saved)});
        const auto [tensors, addresses] =
            From<std::pair<std::shared_ptr<TensorList>, Ref>>(chosen.get());
        State wanted(TensorList::Use(*tensors, addresses.get()).state());
        raised_by_choose.reset();
        return wanted;
      } catch (const WrongType& wrong) {
        return Status(Code::kInvalidArgument,
                      "choose must return (TensorList, addresses): " + wrong.Words());
      } catch (const Raised& raised) {
        raised_by_choose = raised;
        interrupted = !raised.Matches(PyExc_Exception);  // (KeyboardInterrupt)
        return Status(interrupted ? Code::kInvalidArgument : CodeOf(raised, saved.saved_by > 0),
                      raised.Words());
      }
    };
    if (progress.has_value()) {
      // By this thread, too; seldom, for it takes the GIL.
      options.progress = [&, next = std::chrono::steady_clock::time_point()](
                             const RestoreProgress& now) mutable {
        if (std::chrono::steady_clock::now() < next) {
          return true;
        }
        const GilReleased::Held held(*released);
        try {
          Call(progress->get(), {ToPython(now.loading), ToPython(now.step), ToPython(now.attempt),
                                 ToPython(now.bytes), ToPython(now.bytes_of)});
        } catch (const Raised& raised) {
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
      raised_by_progress->Restore();  // it has what it wanted by then
      RaiseLater();
    }
    ThrowIfPending();  // (an interrupt: what follows asks Python, and would lose it)
    // What it raised is what is wrong, if that is what ended the restore. (Where others' shards
    // were looked at, too, the status says both.)
    if (interrupted) {
      throw *raised_by_choose;
    }
    if (!restored.ok() && raised_by_choose.has_value() && !MayBeElsewhere(*raised_by_choose) &&
        !IsOfAnotherRun(*raised_by_choose) &&
        restored.status().message().find(raised_by_choose->Words()) != std::string::npos) {
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
  // holdfast._core.SavedByAll, or None.
  static Ref OfAll(const Saved& saved) {
    if (saved.saved_by == 0) {
      return None();
    }
    const Ref of_every_rank = Ref::Checked(PySet_New(nullptr));
    for (size_t i = 0; i < saved.tensors.size(); ++i) {
      if (saved.tensor_ranks[i] == saved.saved_by &&
          PySet_Add(of_every_rank.get(), ToPython(saved.tensors[i].name).get()) != 0) {
        throw Raised();
      }
    }
    return Tuple({ToPython(saved.attempt), ToPython(saved.step), ToPython(saved.saved_by),
                  FromSavedObjects(saved.of_all), of_every_rank});
  }
  std::shared_ptr<Job> Open() {
    if (job_ == nullptr) {
      Raise(Status(Code::kRefused, "the job was closed in this process"));
    }
    return job_;
  }

  std::shared_ptr<Job> job_;  // shared with the calls that other threads are in
};

Ref Seconds(std::chrono::nanoseconds time) {
  return ToPython(static_cast<double>(time.count()) * 1e-9);
}

void BindRestored(PyObject* module) {
  using R = Restored;
  static PyGetSetDef attributes[] = {
      Getter<R, [](const R& r) { return ToPython(r.attempt); }>("attempt"),
      Getter<R, [](const R& r) { return ToPython(r.step); }>("step"),
      Getter<R, [](const R& r) { return ToPython(r.bytes); }>("bytes"),
      Getter<R, [](const R& r) { return ToPython(r.source); }>("source"),
      Getter<R, [](const R& r) { return ToPython(r.why); }>("why"),
      Getter<R, [](const R& r) { return ToList(r.notes); }>("notes"),
      Getter<R, [](const R& r) { return ToPython(r.resharded_from); }>("resharded_from"),
      Getter<R, [](const R& r) { return Seconds(r.waited); }>("waited_s"),
      Getter<R, [](const R& r) { return Seconds(r.copied); }>("copied_s"),
      {}};
  MakeType<R>(module, "Restored", {.attributes = attributes});
}

int GetStagedBuffer(PyObject* self, Py_buffer* view, int flags) {
  const StagedBuffer& buffer = *ValueOf<StagedBuffer>(self);
  return PyBuffer_FillInfo(view, self, const_cast<std::byte*>(buffer.begin()),
                           static_cast<Py_ssize_t>(buffer.size()), /*readonly=*/1, flags);
}

// The rows of Save.

Ref Wait(PySave& save, const Arguments& given) {
  save.Wait(given.Get<std::string>("stage"), given.Get<double>("timeout"));
  return None();
}

Ref WaitFirst(PySave& save, const Arguments& given) {
  save.WaitFirst(given.Get<double>("timeout"));
  return None();
}

Ref Done(PySave& save, const Arguments& given) {
  return ToPython(save.Done(given.Get<std::string>("stage")));
}

Ref Fence(PySave& save, const Arguments& given) {
  save.Fence(given.Get<Streams>("streams"), given.Get<double>("timeout"));
  return None();
}

Ref Seal(PySave& save, const Arguments& given) {
  save.Seal(given.Get<double>("timeout"));
  return None();
}

Ref Discard(PySave& save, const Arguments& /*none*/) {
  save.Discard();
  return None();
}

Ref Staged(PySave& save, const Arguments& /*none*/) {
  return save.Staged();
}

Ref Times(PySave& save, const Arguments& /*none*/) {
  return save.Times();
}

void BindSave(PyObject* module) {
  static PyMethodDef methods[] = {Method<PySave, Wait>("wait", "stage, timeout"),
                                  Method<PySave, WaitFirst>("wait_first", "timeout"),
                                  Method<PySave, Done>("done", "stage"),
                                  Method<PySave, Fence>("fence", "streams, timeout"),
                                  Method<PySave, Seal>("seal", "timeout"),
                                  Method<PySave, Discard>("discard", ""),
                                  Method<PySave, Staged>("staged", ""),
                                  Method<PySave, Times>("times", ""),
                                  {}};
  static PyGetSetDef attributes[] = {
      Getter<PySave, [](const PySave& save) { return ToPython(save.bytes()); }>("nbytes"), {}};
  MakeType<PySave>(module, "Save", {.methods = methods, .attributes = attributes});
  MakeType<StagedBuffer>(module, "_StagedBuffer", {.buffer = GetStagedBuffer});
}

// The rows of Job.

std::shared_ptr<PyJob> MakeJob(const Arguments& given) {
  using Policies = std::map<std::string, std::map<std::string, uint64_t>>;
  return std::make_shared<PyJob>(
      given.Get<std::string>("job"), given.Get<uint32_t>("rank"), given.Get<uint32_t>("world_size"),
      given.Get<std::string>("launch", ""), given.Get<std::string>("socket", ""),
      given.Get<uint32_t>("copy_threads", 0), given.Get<Policies>("policy", {}),
      given.Get<double>("open_timeout", 60.0), given.Get<double>("call_timeout", 30.0));
}

Ref Preempted(PyJob& job, const Arguments& given) {
  return ToPython(job.Preempted(given.Get<uint64_t>("step")));
}

Ref NoticeStop(PyJob& job, const Arguments& given) {
  job.NoticeStop(given.Get<double>("grace"));
  return None();
}

Ref Reserve(PyJob& job, const Arguments& given) {
  return job.Reserve(*given.Get<std::shared_ptr<TensorList>>("tensors"),
                     given.Get<Ref>("addresses").get(), given.Get<Ref>("objects").get(),
                     given.Get<double>("timeout"));
}

Ref Save(PyJob& job, const Arguments& given) {
  return Wrap(job.Save(given.Get<uint64_t>("step"),
                       *given.Get<std::shared_ptr<TensorList>>("tensors"),
                       given.Get<Ref>("addresses").get(), given.Get<Ref>("objects").get(),
                       given.Get<std::vector<size_t>>("copy_first", {}),
                       given.Get<bool>("hold", false), given.Get<bool>("wait_first", true),
                       given.Get<Streams>("streams", {}), given.Get<double>("wait_for_room", 0.0)));
}

Ref Restore(PyJob& job, const Arguments& given) {
  const Ref choose = given.Get<Ref>("choose");
  const auto progress = given.Get<std::optional<Ref>>("progress", std::nullopt);
  for (PyObject* const called : {choose.get(), progress ? progress->get() : choose.get()}) {
    if (PyCallable_Check(called) == 0) {
      Expected("a callable", called);
    }
  }
  return Wrap(std::make_shared<Restored>(
      job.Restore(choose, given.Get<std::optional<uint64_t>>("step", std::nullopt),
                  given.Get<uint64_t>("attempt", 0), given.Get<double>("timeout", 600.0),
                  given.Get<Streams>("streams", {}), given.Get<bool>("convert", false), progress,
                  given.Get<std::string>("label", ""))));
}

Ref Adopt(PyJob& job, const Arguments& given) {
  return Wrap(std::make_shared<Restored>(
      job.Adopt(given.Get<std::optional<uint64_t>>("step", std::nullopt),
                given.Get<uint64_t>("attempt", 0), given.Get<double>("timeout", 600.0))));
}

Ref EnterNetworkBusy(PyJob& job, const Arguments& /*none*/) {
  job.EnterNetworkBusy();
  return None();
}

Ref LeaveNetworkBusy(PyJob& job, const Arguments& /*none*/) {
  job.LeaveNetworkBusy();
  return None();
}

Ref Close(PyJob& job, const Arguments& /*none*/) {
  job.Close();
  return None();
}

Ref StopLeft(PyJob& job) {
  const std::optional<double> left = job.stop_left();
  return left ? ToPython(*left) : None();
}

}  // namespace

void BindJob(PyObject* module) {
  BindRestored(module);
  BindSave(module);
  using J = PyJob;
  static PyMethodDef methods[] = {
      Method<J, Preempted>("preempted", "step"),
      Method<J, NoticeStop>("notice_stop", "grace"),
      Method<J, Reserve>("reserve", "tensors, addresses, objects, timeout"),
      Method<J, Save>("save",
                      "step, tensors, addresses, objects, *, copy_first=(), hold=False, "
                      "wait_first=True, streams=(), wait_for_room=0.0"),
      Method<J, Restore>("restore",
                         "choose, *, step=None, attempt=0, timeout=600.0, streams=(), "
                         "convert=False, progress=None, label=''"),
      Method<J, Adopt>("adopt", "*, step=None, attempt=0, timeout=600.0"),
      Method<J, EnterNetworkBusy>("enter_network_busy", ""),
      Method<J, LeaveNetworkBusy>("leave_network_busy", ""),
      Method<J, Close>("close", ""),
      {}};
  static PyGetSetDef attributes[] = {
      Getter<J, [](J& job) { return ToPython(job.attempt()); }>("attempt"),
      Getter<J, [](J& job) { return ToPython(job.failed_saves()); }>("failed_saves"),
      Getter<J, StopLeft>("stop_left"),
      {}};
  MakeType<J>(module, "Job",
              {.methods = methods,
               .attributes = attributes,
               .make = MakeOf<J, MakeJob>,
               .parameters = "job, *, rank, world_size, launch='', socket='', copy_threads=0, "
                             "policy={}, open_timeout=60.0, call_timeout=30.0"});
}

}  // namespace holdfast::python
