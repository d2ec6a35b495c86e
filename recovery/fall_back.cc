#include "recovery/fall_back.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/units.h"

namespace holdfast {
namespace {

constexpr size_t kPlacesNamed = 8;

std::string PlacesOf(const NewerStep& newer) {
  std::vector<std::string> places = newer.coming;
  places.insert(places.end(), newer.unread.begin(), newer.unread.end());
  const size_t more = places.size() - std::min(places.size(), kPlacesNamed);
  places.resize(places.size() - more);
  return absl::StrCat(absl::StrJoin(places, "; "),
                      more == 0 ? "" : absl::StrCat("; and ", more, " more"));
}

// What is left of the time that the step is waited for; not positive: none.
Duration Left(const NewerStep& newer, Duration waited, MonotonicTime now,
              std::optional<MonotonicTime> deadline, const FallBackRule::Settings& settings) {
  const bool coming = !newer.coming.empty();
  const Duration left = (coming ? std::max(settings.wait, kComingWait) : settings.wait) - waited;
  if (!deadline) {
    return left;
  }
  if (settings.hurried) {
    return std::min(left, now < *deadline ? *deadline - now : kWaitIsTold);
  }
  return std::min(left, *deadline - now - kLeftForRestore);
}

}  // namespace

FallBackRule::Decision FallBackRule::Judge(const NewerStep& newer, MonotonicTime now,
                                           std::optional<MonotonicTime> deadline,
                                           const Settings& settings) {
  const bool all_read = newer.coming.empty() && newer.unread.empty();
  if (waited_.id != newer.id) {
    Stop(now);
    waited_ = {newer.id, {}};
  }
  const Duration waited = SoFar(now).time;
  const Duration left = all_read ? Duration{} : Left(newer, waited, now, deadline, settings);
  if (left > Duration{}) {
    const bool tell = !told_ || *told_ + kWaitIsTold <= now;
    since_ = since_.value_or(now);
    told_ = tell ? now : *told_;
    places_ = PlacesOf(newer);
    wake_ = std::min(now + left, *told_ + kWaitIsTold);
    return {
        Kind::kWait,
        absl::StrCat(NameOf(newer.id), " may be whole with what cannot be read now: ", places_,
                     "; it is waited for up to ",
                     FormatDuration(std::max(left, Duration(std::chrono::seconds(1)))), " more"),
        tell};
  }
  Stop(now);
  return {settings.allowed ? Kind::kUse : Kind::kRefuse,
          all_read ? newer.why
                   : absl::StrCat(PlacesOf(newer), "; it was waited for ", FormatDuration(waited),
                                  newer.why.empty() ? "" : absl::StrCat("; ", newer.why)),
          false};
}

std::string FallBackRule::NameOf(CheckpointId id) {
  return id.attempt == 0 ? "a newer step"
                         : absl::StrCat("the newer step ", id.step, " of attempt ", id.attempt);
}

void FallBackRule::Stop(MonotonicTime now) {
  waited_ = SoFar(now);
  since_.reset();
  told_.reset();
}

void FallBackRule::Forget() {
  *this = FallBackRule();
}

FallBackRule::Waited FallBackRule::SoFar(MonotonicTime now) const {
  return {waited_.id, waited_.time + (since_ ? now - *since_ : Duration{})};
}

}  // namespace holdfast
