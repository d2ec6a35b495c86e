#include "server/links.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

namespace holdfast {

void SendLink::Say(std::string message, MonotonicTime now) {
  wanted_ = true;
  if (channel_ == 0) {
    return Pump(now);  // who begins anew says everything again
  }
  queue_bytes_ += message.size();
  queue_.push_back(std::move(message));
  if (queue_.size() > limits_.queue_messages_max || queue_bytes_ > limits_.queue_bytes_max) {
    return GiveUp(absl::StrCat(queue_.size(), " messages (", queue_bytes_,
                               " bytes) wait to be taken: it is too slow, or hangs"),
                  now);
  }
  Pump(now);
}

void SendLink::Connect(MonotonicTime now) {
  wanted_ = true;
  if (not_before_) {  // somebody waits for it: not for as long as after many failures
    not_before_ = std::min(*not_before_, now + limits_.retry_min);
  }
  Pump(now);
}

void SendLink::Close() {
  wanted_ = false;
  channel_ = in_flight_ = 0;
  batch_.clear();
  queue_.clear();
  queue_bytes_ = 0;
  unanswered_since_.reset();
  backoff_ = {};
  not_before_.reset();
  requests_.clear();
}

// Sends what may be sent: one call at a time.
void SendLink::Pump(MonotonicTime now) {
  if (!wanted_ || in_flight_ != 0 || (not_before_ && now < *not_before_)) {
    return;
  }
  not_before_.reset();
  if (channel_ == 0) {
    in_flight_ = next_request_++;
    requests_.push_back(OpenChannel{in_flight_});
    return;
  }
  if (batch_.empty()) {
    size_t bytes = 0;
    while (!queue_.empty() && batch_.size() < limits_.batch_messages_max &&
           (batch_.empty() || bytes + queue_.front().size() <= limits_.batch_bytes_max)) {
      bytes += queue_.front().size();
      batch_.push_back(std::move(queue_.front()));
      queue_.pop_front();
    }
    queue_bytes_ -= bytes;
    batch_first_ = next_number_;
    next_number_ += batch_.size();
  }
  if (!batch_.empty() || silent_since_ + limits_.keep_alive <= now) {
    unanswered_since_ = unanswered_since_.value_or(now);
    in_flight_ = next_request_++;
    requests_.push_back(SendBatch{in_flight_, channel_, batch_first_, batch_});
  }
}

void SendLink::OnOpened(uint64_t request, uint64_t channel, MonotonicTime now) {
  if (request != in_flight_ || channel_ != 0) {
    return;
  }
  if (channel == 0) {
    return OnFailed(request, "its answer names no channel", now);
  }
  in_flight_ = 0;
  channel_ = channel;
  next_number_ = 1;
  silent_since_ = now;
  backoff_ = {};
  problem_.clear();
  changes_.push_back(Change::kReached);
  Pump(now);
}

void SendLink::OnBatchAnswered(uint64_t request, BatchAnswer answer, MonotonicTime now) {
  if (request != in_flight_) {
    return;
  }
  in_flight_ = 0;
  if (answer == BatchAnswer::kUnknownChannel) {
    backoff_ = {};  // it lives
    return GiveUp("it does not know the channel any more: it was started anew", now);
  }
  batch_.clear();
  unanswered_since_.reset();
  silent_since_ = now;
  backoff_ = {};
  problem_.clear();
  Pump(now);
}

void SendLink::OnRefused(uint64_t request, const std::string& why, MonotonicTime now) {
  if (request == in_flight_ && channel_ != 0) {
    return GiveUp(why, now);
  }
  OnFailed(request, why, now);
}

void SendLink::OnFailed(uint64_t request, const std::string& why, MonotonicTime now) {
  if (request != in_flight_) {
    return;
  }
  in_flight_ = 0;
  problem_ = why;
  Backoff(now);
  if (channel_ != 0 && unanswered_since_ && *unanswered_since_ + limits_.deadline <= now) {
    GiveUp(why, now);
  }
}

void SendLink::OnTime(MonotonicTime now) {
  Pump(now);
}

void SendLink::Backoff(MonotonicTime now) {
  backoff_ = std::clamp(backoff_ * 2, limits_.retry_min, limits_.retry_max);
  not_before_ = now + backoff_;
}

// What was said is not said again by itself: whoever speaks hears that it is lost.
void SendLink::GiveUp(const std::string& why, MonotonicTime now) {
  problem_ = why;
  channel_ = in_flight_ = 0;
  batch_.clear();
  unanswered_since_.reset();
  queue_.clear();
  queue_bytes_ = 0;
  std::erase_if(requests_,
                [](const LinkRequest& r) { return std::holds_alternative<SendBatch>(r); });
  changes_.push_back(Change::kLost);
  if (!not_before_) {
    Backoff(now);
  }
}

std::vector<LinkRequest> SendLink::TakeRequests() {
  return std::exchange(requests_, {});
}

std::optional<MonotonicTime> SendLink::NextTime() const {
  if (!wanted_ || in_flight_ != 0) {
    return std::nullopt;
  }
  return not_before_ || channel_ == 0 ? not_before_
                                      : std::optional(silent_since_ + limits_.keep_alive);
}

std::vector<SendLink::Change> SendLink::TakeChanges() {
  return std::exchange(changes_, {});
}

uint64_t ReceiveLink::Open() {
  expected_ = 1;
  ticks_ = 0;
  return ++channel_ != 0 ? channel_ : ++channel_;
}

bool ReceiveLink::OnTick() {
  if (expected_ == 0 || ++ticks_ < kSilentTicks) {
    return false;
  }
  expected_ = 0;
  return true;
}

BatchAnswer ReceiveLink::Take(SendBatch batch, std::vector<std::string>& messages) {
  if (expected_ == 0 || batch.channel != channel_ || batch.first == 0 || batch.first > expected_) {
    return BatchAnswer::kUnknownChannel;
  }
  ticks_ = 0;
  const uint64_t known = std::min<uint64_t>(expected_ - batch.first, batch.messages.size());
  messages.insert(messages.end(),
                  std::make_move_iterator(batch.messages.begin() + static_cast<ptrdiff_t>(known)),
                  std::make_move_iterator(batch.messages.end()));
  expected_ += batch.messages.size() - known;
  return BatchAnswer::kTaken;
}

}  // namespace holdfast
