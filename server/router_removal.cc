// Jobs that are removed (docs/protocol.md §18): at the host, the other nodes are told to let go of
// them; elsewhere, the host's word is taken, and what came of it told. And what both leave behind:
// names that nobody keeps anything of are hosted by nobody.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/router.h"

namespace holdfast {

// ---- At the host ----

// Before it acts: if what it begins with says that the job was removed, that has to be agreed on.
// (What a node keeps may never have been.)
bool Router::RemovalIsAgreed(const std::string& name, Hosting& hosting) {
  if (!hosting.best || !hosting.best->removed()) {
    return true;
  }
  if (v1::JobState& state = *hosting.best; state.epoch() != hosting.epoch) {
    hosting.writing = std::max(hosting.writing, state.version()) + 1;
    state.set_version(hosting.writing);
    state.set_epoch(hosting.epoch);
    state.set_highest_epoch(hosting.epoch);
    owner_.Act(StoreAgreedState{name, hosting.epoch, hosting.writing, state.SerializeAsString()});
  }
  return hosting.stored == hosting.writing;
}

// Also over each new channel: what was said in the one before may be lost.
void Router::TellRemoved(const std::string& name, Job& job, const std::string& node) {
  JobsRemoved removed{owner_.RemovedBefore(name)};
  if (job.hosting->removing) {
    removed.jobs.insert(removed.jobs.begin(), job.hosting->removing->job);
    removed.jobs.resize(std::min(removed.jobs.size(), kRemovedBeforeMax));
  }
  if (removed.jobs.empty()) {
    return;
  }
  if (ChannelTo(node) == 0) {
    return owner_.Act(ConnectPeer{node});
  }
  Say(node, PeerHeader{name, {}, job.hosting->epoch}, NodeMessage(std::move(removed)));
}

void Router::On(const JobRemovalAgreed& e) {
  Job* job = Find(e.name);
  if (job == nullptr || !job->hosting || job->hosting->job != e.uuid) {
    return;
  }
  const uint64_t bytes = job->hosting->removing ? job->hosting->removing->bytes : 0;
  Removing& removing = job->hosting->removing.emplace(Removing());
  removing.job = e.uuid;
  removing.bytes = bytes;
  for (const auto& [node, peer] : peers_) {
    removing.waits_for.insert(node);
  }
  for (const auto& [node, peer] : peers_) {
    TellRemoved(e.name, *job, node);
  }
  MaybeRemoveHere(*job);
}

void Router::On(const std::string& node, const PeerHeader& header, const JobLetGo& m) {
  Job* job = Find(header.job_name);
  if (job == nullptr || !job->hosting || job->hosting->epoch != header.epoch ||
      !job->hosting->removing || job->hosting->removing->job != m.job) {
    return;
  }
  if (!m.status.ok()) {
    return owner_.OthersAreLate(m.job, Annotate(m.status, node));
  }
  job->hosting->removing->bytes += m.bytes;
  NeedsNoWord(*job, node);
}

// It has let go, or is away: then it does when it is back.
void Router::NeedsNoWord(Job& job, const std::string& node) {
  if (job.hosting && job.hosting->removing && job.hosting->removing->waits_for.erase(node) > 0) {
    MaybeRemoveHere(job);
  }
}

void Router::MaybeRemoveHere(Job& job) {
  if (job.hosting->removing->waits_for.empty()) {
    const Removing removing = *std::exchange(job.hosting->removing, std::nullopt);
    owner_.OthersLetGo(removing.job, removing.bytes);
  }
}

// ---- At any other node ----

void Router::On(const std::string& node, const PeerHeader& header, const JobsRemoved& m) {
  const Job* job = Find(header.job_name);
  if (job != nullptr && (header.epoch < job->highest || job->hosting)) {
    return;
  }
  for (const JobUuid& uuid : m.jobs) {
    letting_go_[uuid] = {node, header.epoch};
  }
  owner_.LetGo(header.job_name, m.jobs);
}

void Router::On(const JobGoing& e) {
  const auto asked = letting_go_.find(e.uuid);
  if (asked == letting_go_.end()) {
    return;
  }
  const auto [node, epoch] = asked->second;
  if (e.status.ok()) {
    letting_go_.erase(asked);
  }
  Answer(node, PeerHeader{e.name, {}, epoch}, NodeMessage(JobLetGo{e.uuid, e.bytes, e.status}));
}

// ---- What is left ----

void Router::On(const JobGone& e) {
  Job* job = Find(e.name);
  if (job == nullptr) {
    return;
  }
  if (job->uuid == e.uuid) {
    RefuseUnanswered(e.name, *job);
    Unmeet(*job);
    job->uuid.reset();
  }
  if (job->hosting && job->hosting->job && job->hosting->job != e.uuid) {
    return;  // its name is another's since
  }
  Retire(e.name, *job);
}

// Nobody hosts a name that nobody keeps anything of, and that nobody asks for. (What is agreed on
// of it stays: that its jobs were removed.)
void Router::Retire(const std::string& name, Job& job) {
  if (job.wanted && !owner_.JoinsWait(name)) {
    job.wanted.reset();
  }
  job.read = job.read && owner_.ReadersWait(name);
  job.watched = job.wanted || job.read || !job.sought.empty() || owner_.KeptState(name);
  if (job.hosting && !job.watched) {
    StepDown(name, job, true);
  } else if (job.hosting && job.hosting->acts && job.hosting->job) {
    StepDown(name, job, true);  // who wants it gets another job: it begins anew
  }
}

}  // namespace holdfast
