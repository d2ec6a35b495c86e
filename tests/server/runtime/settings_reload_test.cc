#include "server/runtime/settings_reload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>

#include "base/status.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

// A file system that answers when the test lets it. Outlives the threads that wait for it.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  int open = 0;  // so many reads may go through
  int begun = 0;

  void Open(int reads) {
    const std::lock_guard<std::mutex> lock(mutex);
    open += reads;
    changed.notify_all();
  }
  int Pass() {
    std::unique_lock<std::mutex> lock(mutex);
    const int number = ++begun;
    changed.notify_all();
    changed.wait(lock, [&] { return open > 0; });
    --open;
    return number;
  }
  void AwaitBegun(int reads) {
    std::unique_lock<std::mutex> lock(mutex);
    ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(60), [&] { return begun >= reads; }));
  }
};

class SettingsReloadTest : public ::testing::Test {
 protected:
  SettingsReloadTest()
      : limit_(reactor_->AddTimer([this] {
          ADD_FAILURE() << "nothing came";
          reactor_->Stop();
        })) {}
  // What hangs must end before the test's objects do.
  ~SettingsReloadTest() override { gate_->Open(1000); }

  void Make(Duration deadline = std::chrono::seconds(60)) {
    reload_ = std::make_unique<SettingsReload>(SettingsReload::Options{
        .read = [gate = gate_]() -> absl::StatusOr<v1::DaemonConfig> {
          v1::DaemonConfig config;
          config.set_node_name(std::to_string(gate->Pass()));
          return config;
        },
        .reactor = *reactor_,
        .done =
            [this](const absl::StatusOr<v1::DaemonConfig>& read) {
              answers_.push_back(read.ok() ? read->node_name() : Message(read.status()));
              then_();
            },
        .deadline = deadline});
  }
  // `then` after each answer; until it stops the reactor.
  void Run(std::function<void()> then) {
    then_ = std::move(then);
    reactor_->Arm(limit_, reactor_->clock().Now() + std::chrono::seconds(60));
    reactor_->Run();
  }

  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  std::unique_ptr<Reactor> reactor_ = *Reactor::Create(Clock::System());
  const Reactor::TimerId limit_;
  std::function<void()> then_;
  std::vector<std::string> answers_;
  std::unique_ptr<SettingsReload> reload_;
};

TEST_F(SettingsReloadTest, WhoAsksMeanwhileHasThemReadOnceMore) {
  Make();
  reload_->Ask();
  gate_->AwaitBegun(1);
  reload_->Ask();
  reload_->Ask();
  gate_->Open(3);
  Run([this] {
    if (answers_.size() == 2) {
      reactor_->Stop();
    }
  });
  EXPECT_THAT(answers_, ::testing::ElementsAre("1", "2"));
  EXPECT_EQ(gate_->open, 1) << "twice, not for each who asked";
}

TEST_F(SettingsReloadTest, AFileSystemThatHangsIsAnErrorAndItsAnswerComesTooLate) {
  Make(std::chrono::seconds(3));
  reload_->Ask();
  Run([this] {
    if (answers_.size() == 2) {
      return reactor_->Stop();
    }
    gate_->Open(2);  // for the one that nobody waits for any more, too
    reload_->Ask();
  });
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_THAT(answers_[0], HasSubstr("were not read within 3 s"));
  EXPECT_EQ(answers_[1], "2");
}

TEST_F(SettingsReloadTest, ThreadsThatHangAreNotAddedToForEver) {
  Make(std::chrono::milliseconds(5));
  reload_->Ask();
  Run([this] {
    answers_.size() > SettingsReload::kHangingMax ? reactor_->Stop() : reload_->Ask();
  });
  EXPECT_THAT(answers_.back(), HasSubstr("4 threads that read them before still hang"));
  EXPECT_THAT(answers_[SettingsReload::kHangingMax - 1], HasSubstr("were not read within"));
}

}  // namespace
}  // namespace holdfast
