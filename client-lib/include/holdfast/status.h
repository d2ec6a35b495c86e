// Errors as values, without any dependency: what the public C++ interface returns. Nothing here
// throws.
//
//   holdfast::Result<holdfast::Restored> last = job->Restore(state);
//   if (last.ok()) { step = last->step + 1; }
//   else if (last.status().code() == holdfast::Code::kNothingToRestore) { step = 0; }  // a first
//   start else { std::cerr << last.status().ToString() << "\n"; return 1; }                  //
//   never "start from scratch"
#pragma once

#include <string>
#include <utility>
#include <variant>

namespace holdfast {

enum class Code {
  kOk = 0,
  kInvalidArgument,   // what was asked for makes no sense; nothing was touched
  kNothingToRestore,  // the job has never committed anything on this line of descent: start from
                      // scratch
  kUnreadable,        // there are checkpoints, but none can be read now
  kCorrupt,           // bytes contradict their digests
  kSuperseded,        // a newer attempt of this job is running: end this process
  kShed,              // this step was given up to make room for a newer one
  kAbandoned,         // this step can never become complete (a rank died or skipped it)
  kNoRoom,            // no slot for this save, or it is larger than the budget
  kRefused,   // not allowed: another user's job, a rank that is alive elsewhere, a wrong order of
              // calls
  kTopology,  // ranks or world sizes contradict each other
  kUnavailable,  // the daemon cannot be reached, or went away during the call
  kDeadlineExceeded,
  kForked,  // this process was forked from the one that opened the job; it has no part in it
  kNotFound,
  kInternal,
};
const char* CodeName(Code code);

// The cause of a failure, where one code has several and the caller may act differently.
enum class Reason {
  kNone = 0,
  kNotRestored,  // kRefused: the job has committed steps, and this attempt has not restored
  kOtherOwner,   // kRefused: the job belongs to another user
  kTooLarge,     // kNoRoom: larger than all slots together may be
  kNoDriver,     // kInternal: the driver of a tensor's device cannot be loaded or started
  kNotYet,       // kDeadlineExceeded: the daemon answered that the save has not come that far
  kCopying,      // kDeadlineExceeded: the tensors are still being copied
};
const char* ReasonName(Reason reason);  // "TOO_LARGE"; "" for kNone

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message, Reason reason = Reason::kNone)
      : code_(code), reason_(reason), message_(std::move(message)) {}
  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  Reason reason() const { return reason_; }
  const std::string& message() const { return message_; }  // operation, thing, cause, way out
  std::string ToString() const;                            // "NO_ROOM: save step 12 …"

 private:
  Code code_ = Code::kOk;
  Reason reason_ = Reason::kNone;
  std::string message_;
};

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value)
      : state_(std::in_place_index<0>, std::move(value)) {}  // NOLINT: implicit on purpose
  Result(Status status)
      : state_(std::in_place_index<1>, std::move(status)) {}  // NOLINT: implicit on purpose
  bool ok() const { return state_.index() == 0; }
  Status status() const { return ok() ? Status() : std::get<1>(state_); }
  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  T& operator*() & { return value(); }
  T&& operator*() && { return std::get<0>(std::move(state_)); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace holdfast
