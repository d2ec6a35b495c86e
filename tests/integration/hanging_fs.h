// A file system that hangs when the test says so, as a network mount does whose server is gone:
// FUSE, served by a thread of this process from a directory of its own.
//
//   HangingMount mount;
//   if (!mount.mounted()) GTEST_SKIP();
//   mount.HangAtWrite();     // the next write gets no answer, nor anything after it
//   mount.AwaitHanging();
//   mount.Release();         // now all of them are answered
//
// A process that is killed meanwhile ends: its calls are interrupted. After IgnoreInterrupts() it
// stays until Release(), as where a server's mount is "hard", or a drive is gone. Mounted in a
// mount namespace of the thread that made it, which its children share; that thread must not touch
// it while it hangs.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {

class HangingMount {
 public:
  HangingMount();
  ~HangingMount();
  HangingMount(const HangingMount&) = delete;
  HangingMount& operator=(const HangingMount&) = delete;

  bool mounted() const { return mounted_; }
  std::string path() const { return directory_.Path("mount"); }
  void HangAtWrite();
  bool AwaitHanging();  // within the tests' patience
  void IgnoreInterrupts();
  void Release();

 private:
  using Request = std::vector<char>;

  void Serve();
  void Take(Request request);
  void Interrupted(uint64_t unique);
  void Perform(const Request& request);
  void Reply(uint64_t unique, int error, const void* data, size_t bytes);
  void ReplyTo(const Request& request, int64_t result);  // -1: errno
  void ReplyEntry(const Request& request, const std::string& path, const void* more, size_t bytes);
  void ReplyAttributes(const Request& request, int error, const std::string& path, int fd);
  void SetAttributes(const Request& request);
  void ReadDirectory(const Request& request);
  void Rename(const Request& request, const std::string& from, const std::string& to,
              uint32_t flags);
  std::string PathOf(uint64_t node) const { return paths_.at(node); }
  uint64_t NodeOf(const std::string& path);

  TemporaryDirectory directory_;
  UniqueFd device_;
  bool mounted_ = false;
  std::map<uint64_t, std::string> paths_;  // the serving thread's, like nodes_
  std::map<std::string, uint64_t> nodes_;
  uint64_t last_node_ = 1;

  std::mutex mutex_;
  std::condition_variable hung_;
  bool armed_ = false;
  bool interrupts_ = true;
  bool hanging_ = false;
  std::vector<Request> waiting_;
  std::mutex serving_;  // what Perform uses: Release answers from the test's thread
  std::thread thread_;
};

}  // namespace holdfast
