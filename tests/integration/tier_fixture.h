// A node with two drives and a remote directory, and a job of two ranks whose every step goes to
// all of them; what the tests of durable tiers share.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/integration/ctl.h"
#include "tests/integration/harness.h"

namespace holdfast {

inline NodeOptions TierNode() {
  NodeOptions options;
  options.drives = 2;
  options.remote = true;
  options.config =
      "policy: {nvme: {every_steps: 1, keep_last: 3}, "
      "remote: {every_steps: 1, every_ms: 0, keep_last: 3}}\n";
  return options;
}

class TierTest : public ::testing::Test {
 protected:
  explicit TierTest(const NodeOptions& options = TierNode()) : node_(options) {}

  void Launch(const std::string& job = "job", const std::string& policy = "") {
    ranks_ = StartRanks(node_, {.job = job, .bytes = bytes_, .policy = policy}, 2);
    ASSERT_THAT(DoAll(ranks_, "open"), ::testing::Each(::testing::HasSubstr("ok attempt=")));
  }
  // The first start of a job: there is nothing.
  void Begin(const std::string& job = "job", const std::string& policy = "") {
    ASSERT_NO_FATAL_FAILURE(Launch(job, policy));
    ASSERT_THAT(DoAll(ranks_, "restore"),
                ::testing::Each(::testing::HasSubstr("NOTHING_TO_RESTORE")));
  }
  // Saved by all, and whole in `tier` ("": committed in memory).
  void Save(uint64_t step, const std::string& tier) {
    ASSERT_THAT(DoAll(ranks_, "save " + std::to_string(step)), ::testing::Each("ok sealed"));
    ASSERT_THAT(DoAll(ranks_, "committed"), ::testing::Each("ok committed"));
    if (!tier.empty()) {
      ASSERT_THAT(DoAll(ranks_, "tier " + tier), ::testing::Each("ok " + tier));
    }
  }
  void SaveEverywhere(uint64_t step) {
    ASSERT_NO_FATAL_FAILURE(Save(step, "nvme"));
    ASSERT_THAT(DoAll(ranks_, "tier remote"), ::testing::Each("ok remote"));
  }
  void KillRanks() {
    for (const auto& rank : ranks_) {
      rank->Kill();
    }
    ranks_.clear();
  }
  // All processes die, and what the node's memory held is gone.
  void PowerCut() {
    KillRanks();
    node_.Kill();
    EmptyDirectory(node_.memory_dir());
  }
  std::vector<std::string> Restored() { return DoAll(ranks_, "restore"); }

  std::string StepName(uint64_t step, uint64_t attempt) const {
    return std::to_string(step) + "-a" + std::to_string(attempt);
  }
  // The image of a shard in a tier, on whatever drive it lies.
  std::string Image(const std::string& tier, uint64_t step, uint32_t rank, uint64_t attempt = 1,
                    const std::string& job = "job") const {
    const std::string below = "/" + job + "/" + StepName(step, attempt) + "/";
    if (tier == "remote") {
      return node_.remote_dir() + below + "shard-0000" + std::to_string(rank) +
             "-of-00002.safetensors";
    }
    for (uint32_t drive = 0; drive < node_.drives(); ++drive) {
      const std::string path =
          node_.nvme_dir(drive) + below + std::to_string(rank) + ".safetensors";
      if (std::filesystem::exists(path)) {
        return path;
      }
    }
    return "";
  }
  std::string Record(const std::string& tier, uint64_t step, uint32_t rank,
                     uint64_t attempt = 1) const {
    return std::filesystem::path(Image(tier, step, rank, attempt)).replace_extension("record");
  }
  // Of all copies; they are the same drives (others in their place would leave these missing).
  void EmptyDrives() {
    for (uint32_t drive = 0; drive < node_.drives(); ++drive) {
      for (const std::string& name : FilesIn(node_.nvme_dir(drive), "")) {
        if (name != ".holdfast") {
          std::filesystem::remove_all(node_.nvme_dir(drive) + "/" + name);
        }
      }
    }
  }

  // All that an operator is told: problems, events, explanations.
  std::string Told(const std::string& job = "job") {
    return Ctl(node_, {"status", "--json"}).text + Ctl(node_, {"explain", job, "--json"}).text;
  }
  // Files below the durable directories whose path contains `part`.
  std::vector<std::string> DurableFiles(const std::string& part) const {
    std::vector<std::string> found;
    std::vector<std::string> dirs;
    for (uint32_t drive = 0; drive < node_.drives(); ++drive) {
      dirs.push_back(node_.nvme_dir(drive));
    }
    dirs.push_back(node_.remote_dir());
    for (const std::string& dir : dirs) {
      std::error_code removed;  // by the daemon, under the listing: the rest is listed again
      do {
        std::erase_if(found, [&](const std::string& path) { return path.rfind(dir, 0) == 0; });
        removed.clear();
        std::filesystem::recursive_directory_iterator entry(dir, removed);
        for (; !removed && entry != std::filesystem::end(entry); entry.increment(removed)) {
          if (entry->path().string().find(part, dir.size()) != std::string::npos) {
            found.push_back(entry->path());
          }
        }
      } while (removed);
    }
    return found;
  }

  Node node_;
  uint64_t bytes_ = 300'000;  // of a rank's state
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace holdfast
