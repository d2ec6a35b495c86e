#include "tiers/durable/cluster_mark.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "base/utf8.h"
#include "tiers/durable/names.h"

namespace holdfast {
namespace {

constexpr size_t kShownBytesMax = 255;

constexpr auto kKinds = std::to_array<std::pair<ClusterKind, std::string_view>>({
    {ClusterKind::kAlone, "alone"},
    {ClusterKind::kList, "list"},
    {ClusterKind::kEtcd, "etcd"},
});

std::string Shown(const std::string& text) {
  std::string shown = Utf8Text(text.substr(0, kShownBytesMax));
  std::replace_if(
      shown.begin(), shown.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; }, '?');
  return shown;
}

std::string NameOf(const ClusterMark& mark) {
  return mark.kind == ClusterKind::kAlone ? "daemons without a cluster"
                                          : absl::StrCat("cluster '", Shown(mark.name), "'");
}

// Text of one line, whatever it came from.
std::string OneLine(std::string text) {
  text.resize(std::min(text.size(), 2 * kShownBytesMax));
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

}  // namespace

std::string EncodeClusterMark(const ClusterMark& mark) {
  std::string text = absl::StrCat("cluster ", mark.id, "\n");
  for (const auto& [kind, word] : kKinds) {
    if (kind == mark.kind) {
      absl::StrAppend(&text, "kind ", ToAbsl(word), "\n");
    }
  }
  for (const auto& [key, value] : {std::pair<const char*, const std::string&>("name ", mark.name),
                                   {"node ", mark.node},
                                   {"time ", mark.time}}) {
    if (!value.empty()) {
      absl::StrAppend(&text, key, OneLine(value), "\n");
    }
  }
  for (size_t i = 0; i < mark.peers.size() && i < kClusterMarkPeersMax; ++i) {
    absl::StrAppend(&text, "peer ", OneLine(mark.peers[i]), "\n");
  }
  return text;
}

absl::StatusOr<ClusterMark> DecodeClusterMark(std::string_view text) {
  ClusterMark mark;
  bool kind_known = false;
  for (absl::string_view line : absl::StrSplit(ToAbsl(text), '\n')) {
    if (absl::ConsumePrefix(&line, "cluster ")) {
      mark.id = std::string(line);
    } else if (absl::ConsumePrefix(&line, "kind ")) {
      for (const auto& [kind, word] : kKinds) {
        if (line == ToAbsl(word)) {
          mark.kind = kind;
          kind_known = true;
        }
      }
    } else if (absl::ConsumePrefix(&line, "name ")) {
      mark.name = std::string(line);
    } else if (absl::ConsumePrefix(&line, "node ")) {
      mark.node = std::string(line);
    } else if (absl::ConsumePrefix(&line, "time ")) {
      mark.time = std::string(line);
    } else if (absl::ConsumePrefix(&line, "peer ") && mark.peers.size() < kClusterMarkPeersMax) {
      mark.peers.emplace_back(line);
    }
  }
  if (!IsUnique(mark.id) || !kind_known || text.back() != '\n') {
    return absl::DataLossError("it does not say which cluster");
  }
  return mark;
}

bool SamePeers(const std::vector<std::string>& noted, const std::vector<std::string>& ours) {
  const auto there = std::count_if(noted.begin(), noted.end(), [&](const std::string& peer) {
    return std::find(ours.begin(), ours.end(), peer) != ours.end();
  });
  return 2 * static_cast<size_t>(there) > noted.size();
}

ClusterVerdict JudgeCluster(const std::optional<ClusterMark>& noted, const ClusterIdentity& us) {
  if (!noted) {
    return ClusterVerdict::kTake;
  }
  const ClusterMark& ours = us.mark;
  if (noted->id == ours.id) {
    const bool same =
        noted->kind == ours.kind && noted->name == ours.name && noted->peers == ours.peers;
    return same ? ClusterVerdict::kOurs : ClusterVerdict::kRenew;
  }
  // The members of a list have nothing that they agree on but the list itself, and the directory;
  // daemons without a cluster only that.
  const bool same_list = ours.kind == ClusterKind::kList && noted->name == ours.name &&
                         SamePeers(noted->peers, ours.peers);
  const bool adopts = noted->kind == ours.kind && (ours.kind == ClusterKind::kAlone || same_list);
  return adopts ? ClusterVerdict::kAdopt : ClusterVerdict::kRefuse;
}

std::string DescribeCluster(const ClusterMark& mark) {
  return absl::StrCat(NameOf(mark), " (id ", Shown(mark.id), ", written by node '",
                      Shown(mark.node), "', ", Shown(mark.time), ")");
}

std::string ClusterRefusal(const std::string& dir, const ClusterMark& noted,
                           const ClusterIdentity& us) {
  return absl::StrCat(
      "'", dir, "' belongs to ", DescribeCluster(noted), ", and this node to ", NameOf(us.mark),
      " (id ", us.mark.id,
      "). Nothing is read, written or removed there; saves continue in the other tiers. Give this ",
      "node's cluster a directory of its own (remote.dir). If the other is gone for good, or ",
      "has become this one",
      us.mark.kind == ClusterKind::kEtcd ? " (its etcd was set up anew): " : ": ",
      "ckptctl adopt-remote ", Shown(noted.id));
}

std::string RemoteIdRefusal(const std::string& dir, const std::string& found,
                            const ClusterIdentity& us) {
  return absl::StrCat(
      "'", dir, "' is not the remote directory of ", NameOf(us.mark),
      ": etcd has noted the one with id ", us.remote_id, ", this one has ",
      found.empty() ? "none, as an empty mount point has none" : absl::StrCat("id ", Shown(found)),
      ". Nothing is read or written there; saves continue in the other tiers. Mount it. If the ",
      "directory was replaced for good: ckptctl adopt-remote ", us.remote_id);
}

}  // namespace holdfast
