// A daemon for tests of the client library: one thread, a unix socket in a directory of its own,
// slots in memfds. By default it does what docs/protocol.md says, for one rank and one attempt
// after another; a hook lets a test misbehave at any request.
//
//   FakeDaemon daemon;
//   daemon.SetHook([](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
//     if (!frame.has_seal()) return false;    // the usual answer
//     peer.Close();                           // or Send, SendRaw, or nothing: never answered
//     return true;
//   });
//   auto job = Job::Open(daemon.Options());
//
// The hook runs on the daemon's thread. Everything else may be called from any thread. The wire
// side is protobuf's generated code, which shares nothing with the client's codec.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/unique_fd.h"
#include "holdfast/job.h"
#include "holdfast/v1/client.pb.h"
#include "holdfast/view.h"
#include "tiers/image/record.h"

namespace holdfast {

class FakeDaemon {
 public:
  // The connection that a request came on.
  class Peer {
   public:
    explicit Peer(int fd) : fd_(fd) {}
    void Send(const v1::DaemonFrame& frame, const std::vector<int>& descriptors = {});
    void SendRaw(const std::string& bytes, const std::vector<int>& descriptors = {});
    void Close();

   private:
    int fd_;
  };
  using Hook =
      std::function<bool(const v1::ClientFrame&, Peer&)>;  // true: the hook has dealt with it

  struct Slot {
    UniqueFd image;
    uint64_t bytes = 0;
    uint64_t generation = 0;
    bool mapped = false;  // the client has a mapping: no descriptor comes with the next grant
    bool writing = false;
    bool sealed = false;
    uint64_t attempt = 0;
    uint64_t step = 0;
    std::string record;
  };

  // Which process listens, for whoever asks the kernel.
  enum class Listens { kThisProcess, kAnother };

  explicit FakeDaemon(Listens listens = Listens::kThisProcess);
  ~FakeDaemon();
  FakeDaemon(const FakeDaemon&) = delete;
  FakeDaemon& operator=(const FakeDaemon&) = delete;

  JobOptions Options() const;  // job "test", rank 0 of 1, short deadlines
  const std::string& socket() const { return socket_; }

  void SetHook(Hook hook) EXCLUDES(mutex_);
  // The usual answer, for a request that a hook has kept.
  void AnswerLate(const v1::ClientFrame& frame, Peer& peer) { Answer(frame, peer); }
  // From now on sessions offer the newest step, whatever was asked for.
  void OfferTheNewestAlways() EXCLUDES(mutex_);
  // Closes the listener and every connection; slots stay. Start: a new one at the same path, with
  // the same slots.
  void Stop();
  void Start();
  // Clients that look for that one at its path find this one, as after a restart; those that are
  // connected stay so.
  void TakePathOf(const FakeDaemon& other);

  int Accepted() EXCLUDES(mutex_);  // connections
  // What has come, by the request's name in the protocol ("begin_save"), and every frame whole.
  int Count(const std::string& request) EXCLUDES(mutex_);
  std::vector<v1::ClientFrame> Frames(const std::string& request) EXCLUDES(mutex_);
  // Copies that readers hold, as far as this daemon knows.
  size_t Holds() EXCLUDES(mutex_);
  // Waits until that many of them have come.
  bool WaitForCount(const std::string& request, int count) EXCLUDES(mutex_);

  // The newest sealed slot's record, and its image.
  ShardRecord LastRecord() EXCLUDES(mutex_);
  std::string LastImage() EXCLUDES(mutex_);
  // Changes sealed bytes behind everybody's back; the newest sealed slot.
  void FlipImageByte(uint64_t offset) EXCLUDES(mutex_);
  void TruncateImage(uint64_t bytes) EXCLUDES(mutex_);
  void ReplaceRecord(const std::string& record) EXCLUDES(mutex_);
  // The newest sealed slot's copy in a durable tier, as a flush leaves it there.
  void CopyToTier(const std::string& tier) EXCLUDES(mutex_);
  // Whatever lies in slots is gone.
  void LoseMemory() EXCLUDES(mutex_);
  // As one that was started anew: it knows of no step that was begun, and passes descriptors again.
  void ForgetSteps() EXCLUDES(mutex_);
  struct TierCopy {
    std::string tier;
    uint64_t attempt = 0;
    uint64_t step = 0;
    UniqueFd image;
    std::string record;
  };
  // The copies in durable tiers; only while no request is under way.
  std::vector<TierCopy>& tier_copies() { return tier_copies_; }
  // Cuts short whatever is granted now, or mapped.
  void TruncateAll(uint64_t bytes) EXCLUDES(mutex_);
  uint64_t attempt() EXCLUDES(mutex_);

 private:
  void Serve(int listener);
  bool ServeOne(int fd);
  void Answer(const v1::ClientFrame& frame, Peer& peer) EXCLUDES(mutex_);
  void Grant(const v1::ClientFrame& frame, v1::DaemonFrame& reply, std::vector<int>& descriptors)
      REQUIRES(mutex_);
  void Seal(const v1::ClientFrame& frame) REQUIRES(mutex_);
  // The step that was asked for, or the newest that was not passed over.
  bool Offer(std::optional<uint64_t> step, uint64_t hold, v1::DaemonFrame& reply,
             std::vector<UniqueFd>& descriptors) REQUIRES(mutex_);
  void AnswerAttach(const v1::Attach& attach, v1::DaemonFrame& reply,
                    std::vector<UniqueFd>& descriptors) REQUIRES(mutex_);
  void AnswerList(const v1::List& list, v1::Listing& listing) REQUIRES(mutex_);
  void AnswerReserve(const v1::ClientFrame& frame, v1::DaemonFrame& reply,
                     std::vector<int>& descriptors) REQUIRES(mutex_);
  void AnswerSession(const v1::ClientFrame& frame, v1::DaemonFrame& reply,
                     std::vector<UniqueFd>& descriptors) REQUIRES(mutex_);
  Slot* Newest() REQUIRES(mutex_);

  const Listens listens_;
  std::string directory_;
  std::string socket_;
  int stop_pipe_[2] = {-1, -1};
  std::thread thread_;
  std::map<int, std::string> inboxes_;  // by connection; the thread's own

  Mutex mutex_;
  CondVar changed_;
  int accepted_ GUARDED_BY(mutex_) = 0;
  std::shared_ptr<const Hook> hook_ GUARDED_BY(mutex_);  // one for all requests: a hook may count
  std::vector<v1::ClientFrame> frames_ GUARDED_BY(mutex_);
  std::map<uint32_t, Slot> slots_ GUARDED_BY(mutex_);
  std::vector<TierCopy> tier_copies_;  // in the order of the tiers
  uint64_t attempt_ GUARDED_BY(mutex_) = 0;
  std::optional<uint64_t> last_step_ GUARDED_BY(mutex_);
  std::set<uint64_t> holds_ GUARDED_BY(mutex_);
  std::optional<v1::SessionOutcome> offered_ GUARDED_BY(mutex_);
  std::optional<uint64_t> passed_over_
      GUARDED_BY(mutex_);  // step whose copy turned out bad in this session
  uint32_t round_ GUARDED_BY(mutex_) = 0;
  bool newest_always_ GUARDED_BY(mutex_) = false;
};

// "begin_save" and so on; "ask" is the question whether the daemon answers (Connection::Ask).
std::string RequestName(const v1::ClientFrame& frame);

}  // namespace holdfast
