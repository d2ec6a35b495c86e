// Whose the remote directory is: its file `.holdfast/cluster`, looked at before anything else there
// and again whenever it has changed.
#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "tiers/durable/copy_store_impl.h"

namespace holdfast {
namespace {

std::string Now() {
  const std::time_t now = Clock::System()->UnixMillis() / 1000;
  std::tm utc = {};
  ::gmtime_r(&now, &utc);
  char text[32] = {};
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M UTC", &utc);
  return text;
}

}  // namespace

std::string CopyStore::Impl::ClusterPath() const {
  return JoinPath(JoinPath(options.dir, kHomeName), kHomeClusterName);
}

ClusterIdentity CopyStore::Impl::Us() {
  ClusterIdentity us = *options.cluster;
  MutexLock hold(mutex);
  if (!cluster_id.empty()) {
    us.mark.id = cluster_id;
  }
  return us;
}

absl::StatusOr<std::optional<ClusterMark>> CopyStore::Impl::ReadCluster() {
  const absl::StatusOr<std::string> text = ReadSmallFile(ClusterPath(), kClusterMarkBytesMax);
  if (absl::IsNotFound(text.status())) {
    return std::nullopt;
  }
  if (absl::IsResourceExhausted(text.status())) {
    return text.status();  // memory, file descriptors
  }
  absl::StatusOr<ClusterMark> mark = text.ok() ? DecodeClusterMark(*text) : text.status();
  if (!mark.ok()) {
    return absl::UnavailableError(absl::StrCat(
        "'", ClusterPath(),
        "', which says whose the directory is, cannot be read: ", Message(mark.status()),
        ". Until it can the directory is not used. If it is this cluster's ",
        "and the file is damaged: rm '", ClusterPath(), "', and ckptd writes it again"));
  }
  return *std::move(mark);
}

absl::Status CopyStore::Impl::WriteCluster(ClusterMark mark, bool replace) {
  HF_RETURN_IF_ERROR(MakeOwn(home));
  mark.time = Now();
  const std::string text = EncodeClusterMark(mark);
  if (!replace) {
    return PublishInHome(ClusterPath(), text).status();  // another may have been first
  }
  return ReplaceInHome(ClusterPath(), text);
}

absl::Status CopyStore::Impl::Refused(const ClusterMark& noted, const ClusterIdentity& us) const {
  return absl::UnavailableError(ClusterRefusal(options.dir, noted, us));
}

absl::Status CopyStore::Impl::ClaimCluster(Claiming why) {
  ClusterIdentity us = Us();
  // 1. Whose it is.
  HF_ASSIGN_OR_RETURN(std::optional<ClusterMark> noted, ReadCluster());
  ClusterVerdict verdict = JudgeCluster(noted, us);
  if (verdict == ClusterVerdict::kRefuse) {
    return Refused(*noted, us);
  }
  // 2. Whether it is the directory that the cluster has, and no empty mount point.
  std::string id;
  bool first = false;
  {
    MutexLock hold(mutex);
    id = directory_id;
    first = cluster_id.empty();
  }
  if (!us.remote_id.empty() && id != us.remote_id) {
    return absl::UnavailableError(RemoteIdRefusal(options.dir, id, us));
  }
  // 3. What is to be written; by daemons without a cluster only before they write anything else.
  // One that cannot be written (read-only, full) may be read all the same, if nobody else has it:
  // whatever writes tries again, and says why not.
  absl::Status written = absl::UnknownError("nobody has it yet");
  const bool takes = why == Claiming::kWrites || us.mark.kind != ClusterKind::kAlone;
  if (verdict == ClusterVerdict::kTake && takes) {
    written = WriteCluster(us.mark, false);
    HF_ASSIGN_OR_RETURN(noted, ReadCluster());
    verdict = JudgeCluster(noted, us);  // another may have been first
  }
  if (verdict == ClusterVerdict::kRefuse) {
    return Refused(*noted, us);
  }
  if (verdict == ClusterVerdict::kAdopt) {
    us.mark.id = noted->id;
    verdict = JudgeCluster(noted, us);
  }
  if (verdict == ClusterVerdict::kRenew && first) {  // (not in turn with one of an older list)
    WriteCluster(us.mark, true).IgnoreError();
  }
  if (noted && id.empty()) {
    MakeId().IgnoreError();  // what writes says why it cannot be
  }
  const absl::StatusOr<FileInfo> file = env.Info(ClusterPath());
  MutexLock hold(mutex);
  cluster_id = us.mark.id;
  cluster_unmarked = noted ? absl::OkStatus() : written;
  cluster_file = file.ok() ? *file : FileInfo();
  return absl::OkStatus();
}

absl::Status CopyStore::Impl::MarkCluster() {
  if (!options.cluster) {
    return absl::OkStatus();
  }
  HF_RETURN_IF_ERROR(ClaimCluster(Claiming::kWrites));
  MutexLock hold(mutex);
  return cluster_unmarked;
}

absl::Status CopyStore::Impl::CheckCluster() {
  if (!options.cluster) {
    return absl::OkStatus();
  }
  const absl::StatusOr<FileInfo> file = env.Info(ClusterPath());
  if (!file.ok() && !absl::IsNotFound(file.status())) {
    return file.status();
  }
  {
    MutexLock hold(mutex);
    const bool unchanged = file.ok() && file->inode == cluster_file.inode &&
                           file->born_ns == cluster_file.born_ns &&
                           file->bytes == cluster_file.bytes;
    if (unchanged || (!file.ok() && !cluster_unmarked.ok())) {
      return absl::OkStatus();
    }
  }
  if (!file.ok()) {
    HF_RETURN_IF_ERROR(CheckMount());  // another directory is not to be taken
  }
  MutexLock prepare(preparing);
  return ClaimCluster(Claiming::kReads);
}

// ---- CopyStore ----

std::string CopyStore::cluster_id() const {
  MutexLock hold(impl_->mutex);
  return impl_->cluster_id;
}

absl::Status CopyStore::CheckCluster() {
  return impl_->CheckCluster();
}

absl::Status CopyStore::Adopt(const Options& options, const std::string& from) {
  Impl impl(options);
  HF_RETURN_IF_ERROR(impl.See());
  const ClusterIdentity us = impl.Us();
  HF_ASSIGN_OR_RETURN(const std::optional<ClusterMark> noted, impl.ReadCluster());
  std::string id;
  {
    MutexLock hold(impl.mutex);
    id = impl.directory_id;
  }
  const bool ours = noted && noted->id == us.mark.id;
  const bool replaces = !us.remote_id.empty() && from == us.remote_id && id != us.remote_id;
  if (!(noted && !ours && noted->id == from) && !(replaces && (!noted || ours))) {
    return absl::FailedPreconditionError(absl::StrCat(
        "adopt-remote: nothing was changed: '", options.dir, "' ",
        ours ? "is this cluster's already"
        : !noted
            ? "is no other cluster's"
            : absl::StrCat("belongs to ", DescribeCluster(*noted), ", not to '", from,
                           "'. If that one is gone for good: ckptctl adopt-remote ", noted->id)));
  }
  MutexLock prepare(impl.preparing);
  HF_RETURN_IF_ERROR(impl.WriteCluster(us.mark, true));
  return id.empty() ? impl.MakeId() : absl::OkStatus();
}

}  // namespace holdfast
