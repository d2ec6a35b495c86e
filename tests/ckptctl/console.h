// What the command tests share: a place for output, a gate between threads, and a daemon with two
// jobs.
//
//   Console console(admin.socket());
//   EXPECT_EQ(RunStatus(console.context(), {}), ExitCode::kOk) << console.err();
//
// One test thread uses a Console; a Gate is thread-safe.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "base/mutex.h"
#include "ckptctl/commands.h"
#include "tests/ckptctl/fake_admin.h"

namespace holdfast {

// A context whose output the test reads.
class Console {
 public:
  explicit Console(std::string socket) { context_.socket = std::move(socket); }
  Context& context() { return context_; }
  const Context& Json() {
    context_.json = true;
    return context_;
  }
  std::string out() const { return out_.str(); }
  std::string err() const { return err_.str(); }
  // The one line of JSON; a parse error fails the test by what it returns.
  nlohmann::json Parsed() const {
    const std::string text = out_.str();
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
    return nlohmann::json::parse(text, nullptr, false);
  }

 private:
  std::ostringstream out_;
  std::ostringstream err_;
  Context context_{.out = &out_, .err = &err_};
};

// Lets an answer wait until the test has seen what it wanted.
class Gate {
 public:
  void Wait() {
    MutexLock lock(mutex_);
    while (!open_) {
      cv_.Wait(mutex_);
    }
  }
  void Open() {
    MutexLock lock(mutex_);
    open_ = true;
    cv_.NotifyAll();
  }

 private:
  Mutex mutex_;
  CondVar cv_;
  bool open_ GUARDED_BY(mutex_) = false;
};

inline FakeAdmin::Answers TwoJobs() {
  return {.get_status = [](const v1::GetStatusRequest& request, v1::GetStatusReply& reply) {
    if (!request.job().empty() && request.job() != "llama") {
      return absl::NotFoundError("no job '" + request.job() + "' of yours\x1b[2J");
    }
    reply.mutable_daemon()->set_version("0.1.0");
    reply.mutable_daemon()->set_memory_dir("/dev/shm");
    reply.add_jobs()->set_name("llama");
    if (request.job().empty()) {
      reply.add_jobs()->set_name("mistral");
    }
    return absl::OkStatus();
  }};
}

}  // namespace holdfast
