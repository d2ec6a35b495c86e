// What this daemon says to others, in order, nothing twice, nothing left out; and where that cannot
// be kept up, both ends hear of it and begin anew (docs/protocol.md §14).
//
// A channel leads one way, from a sender to a receiver. The receiver numbers the channels that it
// opens and takes messages of the last one only; so whatever was on its way in an older one, or
// from an earlier life of the sender, is never taken. One batch of a channel is under way at a
// time: what is said meanwhile goes with the next one, so a slow receiver gets fewer and larger
// ones. A batch that is not answered is sent again, and messages that had come already are not
// taken twice. Who has nothing to say sends empty batches: an old call that comes late may have
// opened another channel, or the receiver may have been started anew, and nothing else would ever
// tell.
//
//   SendLink link(limits);                    // one for each node that is spoken to
//   link.Say(bytes, now);                     // → link.TakeRequests(): OpenChannel or SendBatch
//   link.OnOpened(request, 7, now);           // as the node has answered
//   link.OnBatchAnswered(request, BatchAnswer::kTaken, now);
//
//   ReceiveLink in;                           // one for each node that speaks
//   const uint64_t channel = in.Open();       // what it is answered; never 0
//   in.Take(batch, messages) == BatchAnswer::kTaken
//
// Pure: no I/O, no clock. Owned by one thread.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/clock.h"

namespace holdfast {

struct LinkLimits {
  size_t batch_messages_max = 4096;
  size_t batch_bytes_max = 1u << 20;
  size_t queue_messages_max = 65'536;  // said and not taken; beyond it the channel is given up
  size_t queue_bytes_max = 64u << 20;
  Duration deadline = std::chrono::seconds(10);   // without an answer; then the channel is given up
  Duration keep_alive = std::chrono::seconds(2);  // an empty batch, when there is nothing to say
  Duration retry_min = std::chrono::milliseconds(50);
  Duration retry_max = std::chrono::seconds(5);
};

// ---- Sender → receiver, each a call with an answer ----

struct OpenChannel {
  uint64_t request = 0;  // names the call here
};
struct SendBatch {
  uint64_t request = 0;
  uint64_t channel = 0;
  uint64_t first = 0;  // number of the first message; the channel's first has 1
  std::vector<std::string> messages;
};
enum class BatchAnswer {
  kTaken,
  kUnknownChannel,  // it was opened anew, or the receiver was started anew
};
using LinkRequest = std::variant<OpenChannel, SendBatch>;

class SendLink {
 public:
  explicit SendLink(const LinkLimits& limits) : limits_(limits) {}

  // Takes care of it, or gives the channel up because it has too much to say.
  void Say(std::string message, MonotonicTime now);
  // A channel is wanted, whether or not anything is to be said: tried for soon, however often that
  // has failed.
  void Connect(MonotonicTime now);
  // Nothing is said any more.
  void Close();

  void OnOpened(uint64_t request, uint64_t channel, MonotonicTime now);
  void OnBatchAnswered(uint64_t request, BatchAnswer answer, MonotonicTime now);
  // It will never take it (another node listens there): a channel that is open is given up at once.
  void OnRefused(uint64_t request, const std::string& why, MonotonicTime now);
  // The call could not be made, or was not answered in time.
  void OnFailed(uint64_t request, const std::string& why, MonotonicTime now);
  void OnTime(MonotonicTime now);

  // What is to be sent now, in order.
  std::vector<LinkRequest> TakeRequests();
  std::optional<MonotonicTime> NextTime() const;

  // What has changed since it was last asked.
  enum class Change {
    kReached,  // a fresh channel: nothing that was said before the last kLost will come
    kLost,     // the channel was given up, with what was not taken yet
  };
  std::vector<Change> TakeChanges();
  bool reached() const { return channel_ != 0; }
  const std::string& problem() const { return problem_; }  // why it is not; of the last failure

 private:
  void Pump(MonotonicTime now);
  void GiveUp(const std::string& why, MonotonicTime now);
  void Backoff(MonotonicTime now);

  const LinkLimits limits_;
  bool wanted_ = false;
  uint64_t channel_ = 0;  // 0: none is open
  uint64_t next_request_ = 1;
  uint64_t in_flight_ = 0;          // the request that is not answered; 0: none
  std::vector<std::string> batch_;  // that is in flight, or is sent again
  uint64_t batch_first_ = 0;
  uint64_t next_number_ = 1;
  std::deque<std::string> queue_;
  size_t queue_bytes_ = 0;
  std::optional<MonotonicTime> unanswered_since_;  // of batches
  MonotonicTime silent_since_{};                   // nothing is under way, and nothing to be said
  Duration backoff_{};
  std::optional<MonotonicTime> not_before_;
  std::string problem_;
  std::vector<LinkRequest> requests_;
  std::vector<Change> changes_;
};

// A receiver counts them: after so many, a few seconds apart, without anything that came the
// channel is over. (Counted, so that a receiver that was suspended itself calls nobody silent.)
inline constexpr Duration kHearingTick = std::chrono::seconds(5);
inline constexpr int kSilentTicks = 4;

class ReceiveLink {
 public:
  // `life`: random, so that no channel of this daemon's earlier lives has the number of one of
  // this.
  explicit ReceiveLink(uint64_t life) : channel_(life) {}

  // The number of a fresh channel: what comes in any older one is not taken any more.
  uint64_t Open();
  // Appends those messages of the batch that have not come before.
  BatchAnswer Take(SendBatch batch, std::vector<std::string>& messages);
  // Something has come that is not taken yet.
  void Hear() { ticks_ = 0; }
  // Every kHearingTick. True: the channel is over, since nothing comes in it any more.
  bool OnTick();
  bool open() const { return expected_ != 0; }

 private:
  uint64_t channel_;
  uint64_t expected_ = 0;  // number of the next message; 0: no channel is open
  int ticks_ = 0;          // since anything came
};

}  // namespace holdfast
