// A restore out of several ranks' shards: of a step that another number of ranks saved, or as many
// in another parallel layout (docs/elastic.md).
#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/sync_point.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/reshard.h"
#include "client-lib/src/restore.h"
#include "client-lib/src/state_plan.h"
#include "tiers/image/layout_rules.h"

namespace holdfast::client {
namespace {

using Clock = std::chrono::steady_clock;

bool Has(const std::vector<uint32_t>& ranks, Rank rank) {
  return std::binary_search(ranks.begin(), ranks.end(), rank);
}

}  // namespace

Result<Answer<wire::SessionOutcome>> RestoreRun::ReshardAndReport(const wire::SessionOutcome& offer,
                                                                  Deadline deadline) {
  meter_.Begin({offer.attempt, offer.step});
  const Clock::time_point began = Clock::now();
  Load load = NoThrow([&] {
    return Reshard({offer.attempt, offer.step}, offer.reshard, deadline);
  });
  restored_.copied += Clock::now() - began;
  if (!load.status.ok() && deadline.interrupted()) {
    return load.status;  // as in LoadAndReport
  }
  return ReportAndRelease(ReportOf(offer, load, deadline), std::nullopt, nullptr, deadline);
}

RestoreRun::Load RestoreRun::Reshard(CheckpointId checkpoint, uint32_t saved_by,
                                     Deadline deadline) {
  const auto came_of = [](Status status) {
    // A step that is not there (any more) has lost a copy that nobody else has.
    if (status.code() == Code::kNotFound) {
      status = Status(Code::kCorrupt, status.message());
    }
    const bool mismatch = status.code() == Code::kInvalidArgument;
    Load load(std::move(status), mismatch);
    load.resharded = true;
    return load;
  };
  // 1. Whatever there is, and what of it is wanted.
  Result<StepShards> shards =
      StepShards::Read({link_.identity().socket, connection_, nullptr}, link_.identity().job,
                       checkpoint, saved_by, deadline);
  if (!shards.ok()) {
    return came_of(shards.status());
  }
  HF_SYNC_POINT("client.restore.shards_known");
  Status unread;
  const Result<Wanted> wanted = wants_([&]() -> Result<Saved> {
    Result<Saved> saved = SavedByAll(*shards, deadline);
    unread = saved.status();
    return saved;
  });
  if (!unread.ok()) {
    return came_of(unread);
  }
  if (!wanted.ok() && IsOfAnotherRun(wanted.status())) {
    Load load(wanted.status(), /*is_mismatch=*/true);
    load.resharded = load.of_another_run = true;
    return load;
  }
  if (!wanted.ok()) {
    const Code code = wanted.status().code();
    const bool passes =
        CopyIsBad(wanted.status()) || code == Code::kUnavailable || code == Code::kDeadlineExceeded;
    return came_of(passes ? wanted.status()
                          : Status(Code::kInvalidArgument, wanted.status().message()));
  }
  // 2. From whom.
  Resharding resharding(
      *shards, engine_,
      {link_.identity().rank, saved_by == link_.identity().world_size, options_.convert_types},
      meter_);
  if (Status planned = resharding.Plan(*wanted->state); !planned.ok()) {
    return came_of(std::move(planned));
  }
  // 3. Objects first: to have none of them is found before a byte is copied.
  Result<std::vector<Object>> objects = std::vector<Object>();
  if (wanted->objects) {
    objects = ObjectsOf(*wanted->state, *shards, deadline);
  }
  if (!objects.ok()) {
    return came_of(objects.status());
  }
  // 4. The bytes.
  const Result<std::shared_ptr<DeviceFence>> fence = fences_(*wanted->state);
  if (!fence.ok()) {
    Load load = came_of(fence.status());
    load.mismatch = false;
    return load;
  }
  if (Status copied = resharding.Copy(fence->get(), deadline); !copied.ok()) {
    return came_of(std::move(copied));
  }
  restored_.bytes = resharding.bytes();
  for (const Object& object : *objects) {
    restored_.bytes += object.bytes.size();
  }
  restored_.source = resharding.farthest();
  restored_.why = absl::StrCat("resharded from ", saved_by,
                               saved_by == 1 ? " rank: " : " ranks: ", resharding.Told());
  restored_.resharded_from = saved_by;
  objects_ = *std::move(objects);
  return came_of(Status());
}

Result<Saved> RestoreRun::SavedByAll(const StepShards& shards, Deadline deadline) {
  Saved saved;
  saved.attempt = shards.checkpoint().attempt;
  saved.step = shards.checkpoint().step;
  saved.saved_by = shards.saved_by();
  saved.tensors = shards.Tensors();
  saved.tensor_ranks = shards.TensorRanks();
  std::vector<size_t> all(shards.objects().size());
  std::iota(all.begin(), all.end(), size_t{0});
  HF_TRY_ASSIGN(saved.of_all, shards.ReadObjects(all, engine_, deadline));
  if (shards.saved_by() == link_.identity().world_size) {
    for (const SavedObject& content : saved.of_all) {
      if (Has(content.ranks, link_.identity().rank)) {
        saved.objects.push_back(content.object);
      }
    }
  }
  return saved;
}

// Those that are named, or all.
Result<std::vector<Object>> RestoreRun::ObjectsOf(const State& wanted, const StepShards& shards,
                                                  Deadline deadline) {
  std::map<std::string, std::vector<size_t>> contents;  // by name
  for (size_t i = 0; i < shards.objects().size(); ++i) {
    contents[shards.objects()[i].content.object.name].push_back(i);
  }
  std::vector<Object> named = wanted.objects;
  if (named.empty()) {
    for (const auto& [name, indices] : contents) {
      named.push_back(shards.objects()[indices.front()].content.object);
    }
  }
  std::vector<Object> objects;
  for (const Object& object : named) {
    HF_TRY_ASSIGN(objects.emplace_back(), Merged(object, contents[object.name], shards, deadline));
  }
  return objects;
}

Result<Object> RestoreRun::Merged(const Object& wanted, const std::vector<size_t>& contents,
                                  const StepShards& shards, Deadline deadline) {
  const std::string name = NameOf(wanted);
  if (contents.empty()) {
    return Status(Code::kInvalidArgument,
                  absl::StrCat(name, " was not saved by any of the ", shards.saved_by(), " ranks"));
  }
  std::vector<size_t> which = contents;
  if (shards.saved_by() == link_.identity().world_size) {
    // As many ranks as then: each has its own, if it had one.
    const auto own = std::find_if(contents.begin(), contents.end(), [&](size_t i) {
      return Has(shards.objects()[i].content.ranks, link_.identity().rank);
    });
    which = own != contents.end() ? std::vector<size_t>{*own} : contents;
  }
  if (which.size() > 1 && !options_.merge) {
    return Status(Code::kInvalidArgument,
                  absl::StrCat(name, " is not the same in all ranks that saved it (", which.size(),
                               " contents in ", shards.saved_by(), " shards), and rank ",
                               link_.identity().rank,
                               " saved none: RestoreOptions::merge says what it gets"));
  }
  HF_TRY_ASSIGN(std::vector<SavedObject> read, shards.ReadObjects(which, engine_, deadline));
  Object object = read.front().object;
  const bool alike = std::all_of(read.begin(), read.end(), [&](const SavedObject& each) {
    return each.object.json == object.json && each.object.codec == object.codec;
  });
  if (!alike) {
    return Status(Code::kInvalidArgument,
                  absl::StrCat(name, " was saved with different codecs by different ranks"));
  }
  if (!wanted.json && !wanted.codec.empty() && wanted.codec != object.codec) {
    return Status(Code::kInvalidArgument,
                  absl::StrCat(name, " was saved with codec '", object.codec, "', wanted is '",
                               ForWire(wanted.codec, kCodecBytesMax), "'"));
  }
  if (read.size() > 1) {
    Result<std::string> merged = options_.merge(object.name, read);
    if (!merged.ok()) {
      return Status(Code::kInvalidArgument,
                    absl::StrCat(name, ": merging what ", shards.saved_by(),
                                 " ranks saved failed: ", merged.status().message()));
    }
    object.bytes = *std::move(merged);
  }
  return object;
}

}  // namespace holdfast::client
