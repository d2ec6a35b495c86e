// SIGKILL at every sync point of the memory tier, in a process of its own on shared memory; then a
// scan must find what was acknowledged, bit for bit, and no trace of the rest.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tests/tiers/memory/memory_harness.h"
#include "tiers/memory/slot_files.h"

namespace holdfast {
namespace {

constexpr char kDirectoryVariable[] = "HOLDFAST_TEST_DIRECTORY";

std::string DirOf(const std::string& place) {
  return place + "/holdfast";
}
std::string LedgerOf(const std::string& place) {
  return place + "/ledger";
}

// ---- The victim: this program again, with a sync point set ----

// One line per fact, appended in one call: "begin|sealed|removed <step>".
class LedgerFile {
 public:
  explicit LedgerFile(const std::string& path)
      : fd_(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)) {}
  ~LedgerFile() { ::close(fd_); }
  void Say(const std::string& what, Step step) {
    const std::string line = absl::StrCat(what, " ", step, "\n");
    if (::write(fd_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
      std::abort();
    }
  }

 private:
  int fd_;
};

void RunVictim(const std::string& place) {
  LedgerFile ledger(LedgerOf(place));
  const std::unique_ptr<SlotStore> store =
      SlotStore::Open(StoreOptions(*Env::System(), DirOf(place))).value();
  ASSERT_TRUE(store->Scan().ok());
  const auto fill = [&](SlotId slot, Step step, Generation generation) {
    const SlotContent content = MakeSlotContent(step, generation);
    ASSERT_TRUE(store->WriteNote(slot, NoteOf(generation, kSlot)).ok());
    ASSERT_TRUE(FillSlot(*store, slot, content).ok());
    ledger.Say("begin", step);
    ASSERT_TRUE(PublishSlot(*store, slot, content).ok());
    ledger.Say("sealed", step);
  };
  const auto remove = [&](SlotId slot, Step step, bool with_slot) {
    ledger.Say("begin", step);
    ASSERT_TRUE((with_slot ? store->Delete(slot) : store->RemoveRecord(slot)).ok());
    ledger.Say("removed", step);
  };
  ASSERT_TRUE(store->Create(1, kSlot).ok());
  fill(1, 100, 1);
  ASSERT_TRUE(store->Create(2, kSlot).ok());
  fill(2, 200, 1);
  remove(1, 100, false);
  fill(1, 300, 2);
  remove(2, 200, true);
  ASSERT_TRUE(store->Create(2, kSlot).ok());
  fill(2, 400, 1);
  remove(1, 300, false);
}

// Run by MemoryKillTest only.
TEST(MemoryKillVictim, DISABLED_Run) {
  const char* place = ::getenv(kDirectoryVariable);
  ASSERT_NE(place, nullptr);
  RunVictim(place);
}

#ifdef HOLDFAST_SYNC_POINTS

// ---- The judge ----

std::vector<std::string> MemorySyncPoints() {
  std::vector<std::string> names;
  std::ifstream list(std::string(HOLDFAST_SOURCE_DIR) + "/tests/sync_points.txt");
  for (std::string name; std::getline(list, name);) {
    if (name.starts_with("memory.")) {
      names.push_back(name);
    }
  }
  return names;
}

// The victim's wait status.
int RunVictimProcess(const std::string& place, const std::string& sync_point) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv(kDirectoryVariable, place.c_str(), 1);
    ::setenv("HOLDFAST_SYNC_POINT", sync_point.c_str(), 1);
    const int silence = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
    ::dup2(silence, STDOUT_FILENO);
    ::execl("/proc/self/exe", "victim", "--gtest_filter=MemoryKillVictim.*",
            "--gtest_also_run_disabled_tests", static_cast<char*>(nullptr));
    ::_exit(127);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

std::map<Step, std::string> ReadLedger(const std::string& place) {
  std::map<Step, std::string> last;
  std::ifstream lines(LedgerOf(place));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string what;
    Step step = 0;
    words >> what >> step;
    last[step] = what;
  }
  return last;
}

void CheckWhatIsLeft(const std::string& place) {
  const std::map<Step, std::string> ledger = ReadLedger(place);
  absl::StatusOr<std::unique_ptr<SlotStore>> store =
      SlotStore::Open(StoreOptions(*Env::System(), DirOf(place)));
  ASSERT_TRUE(store.ok()) << ToString(store.status());
  const MemoryScan scan = (*store)->Scan().value();
  EXPECT_TRUE(scan.problems.empty()) << scan.problems[0];
  std::set<Step> found;
  for (const StoredSlot& slot : scan.slots) {
    if (!slot.record.has_value()) {
      continue;
    }
    const Step step = slot.record->id.step;
    found.insert(step);
    const SlotContent content = MakeSlotContent(step, slot.record->generation);
    EXPECT_EQ((*store)->ReadRecord(slot.slot).value(), content.sample.record_file) << step;
    std::string image(content.sample.image.size(), '\0');
    EXPECT_TRUE(
        (*store)->ReadAt(slot.slot, 0, std::as_writable_bytes(std::span<char>(image))).ok());
    EXPECT_EQ(image, content.sample.image) << step;
  }
  for (const Step step : {100, 200, 300, 400}) {
    const auto said = ledger.find(step);
    if (said == ledger.end() || said->second == "removed") {
      EXPECT_FALSE(found.contains(step)) << "step " << step << " must not be there";
    } else if (said->second == "sealed") {
      EXPECT_TRUE(found.contains(step)) << "step " << step << " was acknowledged";
    }
  }
  // Nothing is left over: whatever lies there belongs to a slot that the scan told of.
  const std::vector<std::string> names = Env::System()->List(DirOf(place)).value();
  for (const std::string& name : names) {
    EXPECT_FALSE(name.ends_with(".tmp")) << name;
  }
  EXPECT_EQ((*store)->bytes_used(), scan.slots.size() * kSlot);
  // And all of it can be had back.
  for (const StoredSlot& slot : scan.slots) {
    EXPECT_TRUE((*store)->Delete(slot.slot).ok());
  }
  EXPECT_EQ(Env::System()->List(DirOf(place)).value(),
            (std::vector<std::string>{"lock", "reserve"}));
}

TEST(MemoryKillTest, AtEverySyncPoint) {
  const std::vector<std::string> names = MemorySyncPoints();
  ASSERT_GE(names.size(), 9u) << "tests/sync_points.txt lists the memory tier's sync points";
  for (const std::string& name : names) {
    bool killed = true;
    int pass = 0;
    while (killed) {
      ++pass;
      SCOPED_TRACE(absl::StrCat(name, " pass ", pass));
      const SharedMemoryDirectory place;
      const int status = RunVictimProcess(place.path(), absl::StrCat(name, ":kill@", pass));
      killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
      EXPECT_TRUE(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) << status;
      CheckWhatIsLeft(place.path());
      if (testing::Test::HasFailure()) {
        return;
      }
    }
    EXPECT_GE(pass, 2) << name << " is never passed";
  }
}

#endif  // HOLDFAST_SYNC_POINTS

}  // namespace
}  // namespace holdfast
