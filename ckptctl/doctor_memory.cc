// Where the memory of checkpoints lies, who is charged for it, and whether it stays there
// (docs/operations.md, "Memory: who is charged").
#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/env.h"
#include "base/units.h"
#include "ckptctl/doctor.h"
#include "ckptctl/doctor_findings.h"

namespace holdfast {
namespace {

// Control groups without a limit show a number near 2^63 (version 1).
constexpr uint64_t kCgroupNoLimit = uint64_t{1} << 60;
// What ckptd takes beside the slots: parts of other nodes' shards, RocksDB, gRPC, buffers.
constexpr uint64_t kDaemonItselfBytes = 2 * kGiB;
constexpr size_t kNodesMax = 1024;
constexpr size_t kGroupsMax = 64;  // from a process up to the root

// ---- Collecting ----

std::optional<uint64_t> NumberIn(const std::string& path) {
  uint64_t value = 0;
  if (!absl::SimpleAtoi(KernelText(path), &value) || value >= kCgroupNoLimit) {
    return std::nullopt;
  }
  return value;
}

// "  Node 0 MemTotal:  22112460 kB", "MemTotal:  22112460 kB".
uint64_t KibAfter(const std::string& text, std::string_view key) {
  const size_t at = text.find(key);
  if (at == std::string::npos) {
    return 0;
  }
  const std::vector<std::string> words =
      absl::StrSplit(text.substr(at + key.size(), 64), absl::ByAnyChar(" \t\n"), absl::SkipEmpty());
  uint64_t kib = 0;
  return !words.empty() && absl::SimpleAtoi(words[0], &kib) && kib <= UINT64_MAX / kKiB ? kib * kKiB
                                                                                        : 0;
}

void Tighter(const std::string& group, std::optional<uint64_t> limit, GroupLimit& least) {
  if (limit && (!least.bytes || *limit < *least.bytes)) {
    least = {group, limit};
  }
}

// All on the way from the process's group up to the root bind it.
void CollectGroups(const std::string& root, const std::string& process, MemoryFacts& facts) {
  const std::string groups = KernelText(process + "/cgroup");
  for (const absl::string_view line : absl::StrSplit(groups, '\n', absl::SkipEmpty())) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) {
      continue;
    }
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    const bool v2 = parts[1].empty();
    if (!v2 && std::find(controllers.begin(), controllers.end(), "memory") == controllers.end()) {
      continue;
    }
    const std::string base = root + (v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
    std::string group = parts[2];
    for (size_t i = 0; i < kGroupsMax && !group.empty(); ++i) {
      const std::string path = group == "/" ? base : base + group;
      const std::string shown = absl::StrCat(group, v2 ? " (cgroup v2)" : " (cgroup v1)");
      if (v2) {
        Tighter(shown, NumberIn(path + "/memory.max"), facts.limit);
        Tighter(shown, NumberIn(path + "/memory.high"), facts.high);
        const auto swap = NumberIn(path + "/memory.swap.max");
        facts.group_never_swaps = facts.group_never_swaps || (swap && *swap == 0);
      } else {
        Tighter(shown, NumberIn(path + "/memory.limit_in_bytes"), facts.limit);
      }
      group = group == "/" ? "" : group.substr(0, group.rfind('/'));
    }
  }
}

void CollectNodes(const std::string& root, const std::string& process, MemoryFacts& facts) {
  const std::string base = root + "/sys/devices/system/node";
  const std::string status = KernelText(process + "/status");
  const size_t at = status.find("Mems_allowed_list:");
  std::vector<uint32_t> allowed;
  if (at != std::string::npos) {
    const size_t begin = at + sizeof("Mems_allowed_list:") - 1;
    allowed = ParseNumberList(status.substr(begin, status.find('\n', begin) - begin));
  }
  for (const uint32_t id : ParseNumberList(KernelText(base + "/has_memory"))) {
    if (!allowed.empty() && std::find(allowed.begin(), allowed.end(), id) == allowed.end()) {
      continue;
    }
    const std::string meminfo = KernelText(absl::StrCat(base, "/node", id, "/meminfo"));
    facts.nodes.push_back({id, KibAfter(meminfo, "MemTotal:"), KibAfter(meminfo, " Shmem:")});
  }
}

// ---- Judging ----

void MemoryLimit(const Facts& facts, Findings& findings) {
  const MemoryFacts& memory = facts.memory;
  const uint64_t wanted = facts.daemon.memory_bytes_max;
  if (wanted == 0) {
    return;
  }
  const std::string raise = absl::StrCat(
      "raise the group's limit (systemd: sudo systemctl set-property ckptd "
      "MemoryMax=infinity MemoryHigh=infinity), or lower memory.bytes_max");
  if (memory.limit.bytes) {
    const uint64_t limit = *memory.limit.bytes;
    const std::string who = absl::StrCat(
        "the control group of ", facts.limits.of, ", ", memory.limit.group, ", may use ",
        FormatBytes(limit), ", and ckptd is charged for the slots: ", FormatBytes(wanted),
        " (memory.bytes_max)");
    if (limit < wanted) {
      Add(findings, "memory limit", Verdict::kBroken,
          absl::StrCat(who, "; it would be killed while it reserves them"), raise);
    } else if (limit - wanted < kDaemonItselfBytes) {
      Add(findings, "memory limit", Verdict::kSlow,
          absl::StrCat(who, "; ", FormatBytes(limit - wanted), " are left for itself, of ",
                       FormatBytes(kDaemonItselfBytes), " that it may need"),
          raise);
    } else {
      Add(findings, "memory limit", Verdict::kOk, who);
    }
  } else {
    Add(findings, "memory limit", Verdict::kOk,
        absl::StrCat("no control group of ", facts.limits.of,
                     " has one; ckptd is charged for the slots"));
  }
  if (memory.high.bytes && *memory.high.bytes < wanted) {
    Add(findings, "memory throttle", Verdict::kSlow,
        absl::StrCat(memory.high.group, " has memory.high ", FormatBytes(*memory.high.bytes),
                     ", below the slots' ", FormatBytes(wanted),
                     ": the kernel holds ckptd up, and pushes slots out to swap where there is "
                     "any"),
        raise);
  }
}

void Swap(const Facts& facts, Findings& findings) {
  const MemoryFacts& memory = facts.memory;
  if (memory.swap_bytes == 0) {
    return Add(findings, "swap", Verdict::kOk, "off: checkpoints in memory stay there");
  }
  if (memory.mount_noswap) {
    return Add(findings, "swap", Verdict::kOk,
               "on, but not for checkpoints: their tmpfs is mounted with noswap");
  }
  if (memory.group_never_swaps) {
    return Add(findings, "swap", Verdict::kOk,
               "on, but not for checkpoints: ckptd's control group has memory.swap.max 0");
  }
  const std::string noswap =
      facts.noswap_known
          ? "or give memory.dir a tmpfs of its own that is mounted with noswap   (not by remount: "
            "the kernel refuses that)"
          : "or for ckptd alone: sudo systemctl set-property ckptd MemorySwapMax=0";
  Add(findings, "swap", Verdict::kSlow,
      absl::StrCat("swap is on (", FormatBytes(memory.swap_bytes),
                   memory.swappiness ? absl::StrCat(", vm.swappiness ", *memory.swappiness) : "",
                   "): checkpoints in memory may be pushed out to it, but for what network cards "
                   "and drives have registered"),
      absl::StrCat("sudo swapoff -a, ", noswap));
}

std::string NodesText(const std::vector<NumaNode>& nodes) {
  return absl::StrJoin(nodes, ", ", [](std::string* out, const NumaNode& node) {
    absl::StrAppend(out, "node ", node.id, ": ", FormatBytes(node.shared_bytes), " of ",
                    FormatBytes(node.bytes_total));
  });
}

void Numa(const Facts& facts, Findings& findings) {
  const MemoryFacts& memory = facts.memory;
  if (memory.nodes.empty()) {
    return;
  }
  if (memory.nodes.size() == 1) {
    return Add(findings, "numa", Verdict::kOk, "one node: all memory is as near");
  }
  const uint64_t wanted = facts.daemon.memory_bytes_max;
  const std::string shared = absl::StrCat("shared memory lies on ", NodesText(memory.nodes));
  const std::string mount = facts.tmpfs.empty() ? kSharedMemory : facts.tmpfs.back().mount_point;
  const std::string spread = absl::StrCat("sudo mount -o remount,mpol=interleave ",
                                          QuoteForShell(mount), "   (for slots made from then on)");
  const std::string policy = memory.mpol.substr(0, memory.mpol.find_first_of(":="));
  if (policy == "interleave" || policy == "weighted") {
    return Add(
        findings, "numa", Verdict::kOk,
        absl::StrCat("the tmpfs spreads slots over the nodes (mpol=", memory.mpol, "); ", shared));
  }
  if (policy == "bind") {
    const size_t colon = memory.mpol.rfind(':');  // "bind=static:0-1"
    const std::vector<uint32_t> ids =
        ParseNumberList(colon == std::string::npos ? "" : memory.mpol.substr(colon + 1));
    uint64_t room = 0;
    for (const NumaNode& node : memory.nodes) {
      room += std::find(ids.begin(), ids.end(), node.id) != ids.end() ? node.bytes_total : 0;
    }
    if (wanted > room) {
      return Add(findings, "numa", Verdict::kBroken,
                 absl::StrCat("the tmpfs takes memory of some nodes only (mpol=", memory.mpol,
                              "), which have ", FormatBytes(room), "; memory.bytes_max is ",
                              FormatBytes(wanted)),
                 spread);
    }
    return Add(
        findings, "numa", Verdict::kOk,
        absl::StrCat("the tmpfs takes memory of some nodes (mpol=", memory.mpol, "); ", shared));
  }
  const NumaNode& smallest = *std::min_element(
      memory.nodes.begin(), memory.nodes.end(),
      [](const NumaNode& a, const NumaNode& b) { return a.bytes_total < b.bytes_total; });
  Add(findings, "numa", Verdict::kSlow,
      absl::StrCat(
          memory.nodes.size(),
          " nodes, and slots lie where ckptd's threads run as they make them, not where the ranks "
          "are",
          wanted > smallest.bytes_total
              ? absl::StrCat("; node ", smallest.id, " is smaller (",
                             FormatBytes(smallest.bytes_total), ") than memory.bytes_max (",
                             FormatBytes(wanted), "), and what else runs there is pushed away")
              : "",
          "; ", shared),
      spread);
}

}  // namespace

std::vector<uint32_t> ParseNumberList(std::string_view text) {
  std::vector<uint32_t> numbers;
  for (absl::string_view part : absl::StrSplit(absl::string_view(text.data(), text.size()),
                                               absl::ByAnyChar(", \t\n"), absl::SkipEmpty())) {
    const std::pair<std::string, std::string> ends = absl::StrSplit(part, absl::MaxSplits('-', 1));
    uint32_t first = 0;
    uint32_t last = 0;
    if (!absl::SimpleAtoi(ends.first, &first)) {
      continue;
    }
    last = absl::SimpleAtoi(ends.second, &last) ? last : first;
    for (uint32_t number = first; number <= last && numbers.size() < kNodesMax; ++number) {
      numbers.push_back(number);
    }
  }
  return numbers;
}

MemoryFacts CollectMemory(const std::string& root, int32_t pid, const std::string& memory_dir) {
  MemoryFacts facts;
  std::string process = absl::StrCat(root, "/proc/", pid);
  if (pid <= 0 || KernelText(process + "/cgroup").empty()) {
    process = root + "/proc/self";
  }
  const std::string swaps = KernelText(root + "/proc/swaps");
  std::vector<std::string> areas = absl::StrSplit(swaps, '\n', absl::SkipEmpty());
  for (size_t i = 1; i < areas.size(); ++i) {  // (the first has the titles)
    const std::vector<std::string> words =
        absl::StrSplit(areas[i], absl::ByAnyChar(" \t"), absl::SkipEmpty());
    uint64_t kib = 0;
    if (words.size() >= 3 && absl::SimpleAtoi(words[2], &kib) && kib <= UINT64_MAX / kKiB / 64) {
      facts.swap_bytes += kib * kKiB;
    }
  }
  if (const auto swappiness = NumberIn(root + "/proc/sys/vm/swappiness")) {
    facts.swappiness = static_cast<uint32_t>(*swappiness);
  }
  const MountFacts mount = FindMount(KernelText(root + "/proc/self/mountinfo"),
                                     memory_dir.empty() ? kSharedMemory : memory_dir);
  facts.mount_noswap = mount.noswap;
  facts.mpol = mount.mpol;
  CollectGroups(root, process, facts);
  CollectNodes(root, process, facts);
  return facts;
}

void EvaluateMemory(const Facts& facts, std::vector<Finding>& findings) {
  Swap(facts, findings);
  MemoryLimit(facts, findings);
  Numa(facts, findings);
}

}  // namespace holdfast
