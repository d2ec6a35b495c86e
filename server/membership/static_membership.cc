#include "server/membership/static_membership.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/ids.h"
#include "base/status.h"
#include "holdfast/v1/config.pb.h"
#include "server/membership/cluster_config.h"
#include "server/membership/membership_note.h"
#include "server/membership/task_thread.h"

namespace holdfast {
namespace {

constexpr Duration kRetry = std::chrono::seconds(1);

class StaticMembership final : public Membership {
 public:
  explicit StaticMembership(const MembershipOptions& options)
      : env_(*options.env),
        clock_(options.clock == nullptr ? *Clock::System() : *options.clock),
        note_path_(MembershipNotePath(options.state_dir)),
        self_(options.self),
        thread_([this] { Begin(); }) {
    for (const v1::ClusterMember& member : options.config.members()) {
      members_.push_back({member.name(), member.address(), LabelsOf(member.labels())});
      if (member.name() == self_.name) {
        members_.back() = self_;
      }
    }
    if (members_.empty()) {
      members_.push_back(self_);
    }
    first_ = members_.front();
    std::sort(members_.begin(), members_.end(),
              [](const NodeInfo& a, const NodeInfo& b) { return a.name < b.name; });
  }
  ~StaticMembership() override { thread_.Stop(); }

  void Start(MembershipObserver observer) override {
    thread_.Post([this, observer = std::move(observer)] {
      observer_ = observer;
      Begin();
    });
  }
  void Leave() override {
    thread_.Post([this] { observer_(Left{}); });
  }
  void WatchHost(const std::string& job) override {
    WhenBegun([this, job] {
      const auto hosted = hosted_.find(job);
      if (!IsFirst()) {
        observer_(HostIs{job, {first_.name, 0, 0}});
      } else if (hosted != hosted_.end()) {
        observer_(HostIs{job, {self_.name, self_.incarnation, hosted->second}});
      } else {
        observer_(NoHost{job});
      }
      watched_.insert(job);
    });
  }
  void UnwatchHost(const std::string& job) override {
    WhenBegun([this, job] { watched_.erase(job); });
  }
  void Campaign(const std::string& job, Epoch floor) override {
    WhenBegun([this, job, floor] {
      if (const absl::Status name = CheckJobName(job); !name.ok() || floor >= kEpochMax) {
        observer_(CampaignLost{
            job, {}, name.ok() ? absl::StrCat("no epoch is left above ", floor) : Message(name)});
      } else if (!IsFirst()) {
        observer_(CampaignLost{job, {first_.name, 0, 0}, ""});
      } else if (!hosted_.contains(job)) {
        campaigns_[job] = floor;
        Elect();
      }
    });
  }
  void Resign(const std::string& job) override {
    WhenBegun([this, job] {
      campaigns_.erase(job);
      EndHosting(job);
    });
  }
  // The daemon keeps every job's state itself.
  void StoreState(const std::string& job, Epoch epoch, uint64_t version,
                  std::string state) override {
    WhenBegun([this, job, epoch, version, bytes = state.size()] {
      if (bytes > kAgreedStateBytesMax) {
        observer_(StateFailed{
            job, epoch, version,
            absl::StrCat(bytes, " bytes; at most ", kAgreedStateBytesMax, " can be stored")});
      } else if (Hosts(job, epoch)) {
        observer_(StateStored{job, epoch, version});
      } else {
        observer_(StateFenced{job, epoch, version});
      }
    });
  }
  void ReadState(const std::string& job) override {
    WhenBegun([this, job] { observer_(StateIs{job, 0, 0, "", ""}); });
  }
  void ForgetJob(const std::string& job, Epoch epoch) override {
    WhenBegun([this, job, epoch] {
      const bool hosts = Hosts(job, epoch);
      if (hosts) {
        EndHosting(job);
      }
      observer_(JobForgotten{job, epoch, hosts});
    });
  }

 private:
  bool IsFirst() const { return first_.name == self_.name; }
  bool Hosts(const std::string& job, Epoch epoch) const {
    const auto hosted = hosted_.find(job);
    return hosted != hosted_.end() && hosted->second == epoch;
  }
  void EndHosting(const std::string& job) {
    if (hosted_.erase(job) != 0 && watched_.contains(job)) {
      observer_(NoHost{job});
    }
  }

  void WhenBegun(std::function<void()> task) {
    thread_.Post([this, task = std::move(task)] {
      if (begun_) {
        task();
      } else {
        waiting_.push_back(task);
      }
    });
  }

  // Everything waits for the note: who gives epochs must know which ones were given. Tried again
  // until it can be had. (One that is damaged never can: it is as if it were lost. The nodes know
  // the epochs of their jobs, and have higher ones given.)
  void Begin() {
    thread_.WakeAt({INT64_MAX});
    if (begun_) {
      Elect();
      return;
    }
    absl::Status status;
    if (IsFirst()) {
      const absl::StatusOr<MembershipNoteData> note =
          ReadMembershipNote(env_, note_path_, self_.name);
      if (absl::IsDataLoss(note.status())) {
        SetProblem(absl::StrCat("the membership note is passed over: ", note.status().message()));
      } else {
        status = note.status();
      }
      if (status.ok()) {
        epoch_ = note.ok() ? note->epoch : 0;
        status = GiveEpoch(epoch_ + 1);
      }
    }
    if (!status.ok()) {
      Wait(status);
      return;
    }
    SetProblem("");
    begun_ = true;
    observer_(MembersAre{members_});
    observer_(LeaseHolds{MonotonicTime{INT64_MAX}});
    for (const std::function<void()>& task : std::exchange(waiting_, {})) {
      task();
    }
  }

  void Wait(const absl::Status& status) {
    SetProblem(absl::StrCat("membership waits until its note can be read and written: ",
                            status.message()));
    thread_.WakeAt(clock_.Now() + kRetry);
  }

  // Durable before anybody hears of it.
  absl::Status GiveEpoch(Epoch epoch) {
    HF_RETURN_IF_ERROR(WriteNote(env_, note_path_, {self_.name, {}, epoch}));
    epoch_ = epoch;
    return absl::OkStatus();
  }

  void Elect() {
    while (!campaigns_.empty()) {
      const auto [job, floor] = *campaigns_.begin();
      // Each election has an epoch of its own, in all jobs together.
      const Epoch last = std::max(epoch_, floor);
      if (const absl::Status given = GiveEpoch(last + 1); !given.ok()) {
        Wait(given);
        return;
      }
      SetProblem("");
      campaigns_.erase(job);
      hosted_[job] = epoch_;
      observer_(Elected{job, epoch_, 0, 0, ""});
      if (watched_.contains(job)) {
        observer_(HostIs{job, {self_.name, self_.incarnation, epoch_}});
      }
    }
  }

  void SetProblem(const std::string& text) {
    if (problem_ != text) {
      problem_ = text;
      observer_(MembershipProblem{text});
    }
  }

  Env& env_;
  const Clock& clock_;
  const std::string note_path_;
  NodeInfo self_;
  NodeInfo first_;
  std::vector<NodeInfo> members_;
  // The thread's.
  MembershipObserver observer_;
  bool begun_ = false;
  Epoch epoch_ = 0;
  std::string problem_;
  std::vector<std::function<void()>> waiting_;
  std::map<std::string, Epoch> hosted_;
  std::map<std::string, Epoch> campaigns_;  // with their floors
  std::set<std::string> watched_;
  TaskThread thread_;
};

}  // namespace

std::unique_ptr<Membership> MakeStaticMembership(const MembershipOptions& options) {
  return std::make_unique<StaticMembership>(options);
}

}  // namespace holdfast
