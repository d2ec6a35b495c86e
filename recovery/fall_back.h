// When a restore uses an older step than the newest that was saved (docs/deletion.md, "Passing over
// a newer step"): only when every place that may have the newer one has been read, or when it has
// been waited for long enough. The time counts once for one step, over all restarts.
//
//   FallBackRule fall_back;
//   const auto decision =
//       fall_back.Judge({{2, 40}, {}, {"remote cannot be read"}, ""}, now, deadline, settings);
//   if (decision.kind == FallBackRule::Kind::kWait) … again at NextWake(), or when something
//   changes
//
// A place counts as read when what failed there was read twice: whoever reads sees to that. No I/O,
// no clock. Not thread-safe.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"

namespace holdfast {

// The restore itself needs some of the callers' time.
inline constexpr Duration kLeftForRestore = std::chrono::seconds(30);
// What is being read just now, and nodes that went silent a moment ago, are waited for so long at
// least, whatever is set: they are about to answer.
inline constexpr Duration kComingWait = std::chrono::minutes(2);
inline constexpr Duration kWaitIsTold = std::chrono::seconds(10);  // anew

// Saved, newer than what could be restored, and not whole as far as is known.
struct NewerStep {
  CheckpointId id;                  // attempt 0: a place may have one, and nobody knows which
  std::vector<std::string> coming;  // places that may have what it lacks, and are being read
  std::vector<std::string> unread;  // those that cannot be read now
  std::string why;                  // what is wrong with it in all that has been read
};

class FallBackRule {
 public:
  struct Settings {
    Duration wait{};  // for places that cannot be read; 0: not at all
    bool allowed = true;
    bool hurried = false;  // the callers' whole time is no more than kLeftForRestore
  };
  struct Waited {
    CheckpointId id;
    Duration time{};
  };
  enum class Kind {
    kWait,    // `text` says for what; ask again at NextWake() at the latest
    kUse,     // the older step: `text` says why the newer one is passed over
    kRefuse,  // that step; `text` likewise
  };
  struct Decision {
    Kind kind = Kind::kUse;
    std::string text;   // for people, without a full stop
    bool tell = false;  // kWait: it is time to say so
  };

  // Whether to use what there is although `newer` was saved. `deadline`: the callers'; absent: not
  // known. The wait ends kLeftForRestore before that. Who is hurried hears at the deadline
  // what is missing, and that time counts, too: so this comes to an end after some restarts.
  Decision Judge(const NewerStep& newer, MonotonicTime now, std::optional<MonotonicTime> deadline,
                 const Settings& settings);
  // Nobody waits any more, or not for that.
  void Stop(MonotonicTime now);
  // The newest step was used: nothing has been waited for in vain.
  void Forget();
  bool waiting() const { return since_.has_value(); }
  const std::string& places() const { return places_; }  // that are waited for
  // Of the last decision to wait, while that lasts.
  std::optional<MonotonicTime> NextWake() const { return since_ ? wake_ : std::nullopt; }

  static std::string NameOf(CheckpointId id);  // "the newer step 40 of attempt 2"

  // Over restarts of the daemon. `id.attempt` 0 and no time: none has been waited for.
  void Load(const Waited& waited) { waited_ = waited; }
  Waited SoFar(MonotonicTime now) const;

 private:
  Waited waited_;  // until `since_`
  std::optional<MonotonicTime> since_;
  std::optional<MonotonicTime> told_;
  std::optional<MonotonicTime> wake_;
  std::string places_;
};

}  // namespace holdfast
