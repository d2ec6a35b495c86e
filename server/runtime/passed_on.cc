#include "server/runtime/passed_on.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_guard.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr uint64_t kPartBytes = uint64_t{1} << 20;
constexpr Duration kGoneLook =
    std::chrono::milliseconds(100);  // between looks whether who asks is gone

}  // namespace

PassedOnFile::PassedOnFile(std::shared_ptr<SlotStore> slots, SlotId slot, Generation generation,
                           std::shared_ptr<const ImageMap> places,
                           std::shared_ptr<RevocableMemory> memory)
    : slots_(std::move(slots)),
      slot_(slot),
      generation_(generation),
      places_(std::move(places)),
      memory_(std::move(memory)),
      arrived_((places_->image_bytes + kPartBytes - 1) / kPartBytes) {}

bool PassedOnFile::lives(const ShardId& shard) {
  {
    MutexLock lock(mutex_);
    if (state_ != State::kSealed) {
      return state_ == State::kArriving;
    }
  }
  const absl::StatusOr<StoredSlot> stored = slots_->Find(shard);
  return stored.ok() && stored->slot == slot_ && stored->record &&
         stored->record->generation == generation_;
}

void PassedOnFile::Arrived(uint64_t offset, uint64_t bytes) {
  MutexLock lock(mutex_);
  for (const uint64_t end = std::min(offset + bytes, this->bytes()); offset < end;) {
    const uint64_t part = offset / kPartBytes;
    const uint64_t now = std::min(end, (part + 1) * kPartBytes) - offset;
    arrived_[part] += static_cast<uint32_t>(now);
    offset += now;
  }
  changed_.NotifyAll();
}

void PassedOnFile::End(bool sealed) {
  MutexLock lock(mutex_);
  state_ = sealed ? State::kSealed : State::kGone;
  memory_.reset();
  changed_.NotifyAll();
}

bool PassedOnFile::Has(uint64_t offset, uint64_t bytes) const {
  for (uint64_t part = offset / kPartBytes; part * kPartBytes < offset + bytes; ++part) {
    if (arrived_[part] < std::min(kPartBytes, this->bytes() - part * kPartBytes)) {
      return false;
    }
  }
  return true;
}

absl::StatusOr<PassedOnFile::State> PassedOnFile::Wait(uint64_t offset, uint64_t bytes,
                                                       MonotonicTime until,
                                                       const std::function<bool()>& gone) {
  for (;;) {
    {
      MutexLock lock(mutex_);
      if (state_ != State::kArriving || Has(offset, bytes)) {
        return state_;
      }
      changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + kGoneLook);
    }
    if (gone()) {
      return absl::CancelledError("who asked for it has gone");
    }
    if (Clock::System()->Now() >= until) {
      return absl::UnavailableError("it has not been read here in time");
    }
  }
}

absl::Status PassedOnFile::FromMemory(uint64_t offset, std::span<std::byte> out) {
  std::shared_ptr<RevocableMemory> memory;
  {
    MutexLock lock(mutex_);
    memory = memory_;
  }
  if (memory == nullptr) {
    return absl::AbortedError("it has just ended");
  }
  absl::Status status;
  const auto copy = [&](uint64_t at, uint64_t bytes, std::optional<uint32_t> source,
                        uint64_t from) {
    const RevocableMemory::Access access = memory->Enter();
    if (!source || !access) {
      status = absl::UnavailableError(source ? "its slot was taken back" : "nobody needs headers");
      return false;
    }
    const FaultGuard guard(access.data() + from, bytes);
    std::memcpy(out.data() + (at - offset), access.data() + from, bytes);
    if (guard.faulted()) {
      status = absl::UnavailableError("its slot was cut short");
    }
    return status.ok();
  };
  places_->ForEach(offset, out.size(), copy);
  return status;
}

// (What it read counts only if the slot still was of that filling after the last byte.)
absl::Status PassedOnFile::FromSlot(uint64_t offset, std::span<std::byte> out) {
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> image, slots_->OpenImageFile(slot_, false));
  absl::Status status;
  const auto read = [&](uint64_t at, uint64_t bytes, std::optional<uint32_t> source,
                        uint64_t from) {
    status = source ? image->ReadAt(from, out.subspan(at - offset, bytes))
                    : absl::UnavailableError("nobody needs headers");
    return status.ok();
  };
  places_->ForEach(offset, out.size(), read);
  HF_RETURN_IF_ERROR(status);
  return slots_->Confirm(slot_, generation_, *image);
}

absl::Status PassedOnFile::Read(uint64_t offset, std::span<std::byte> out, MonotonicTime until,
                                const std::function<bool()>& gone) {
  if (offset > bytes() || out.size() > bytes() - offset) {
    return absl::InvalidArgumentError("more is wanted than the file has");
  }
  HF_ASSIGN_OR_RETURN(State state, Wait(offset, out.size(), until, gone));
  if (state == State::kArriving) {
    const absl::Status copied = FromMemory(offset, out);
    if (!absl::IsAborted(copied)) {
      return copied;
    }
    MutexLock lock(mutex_);
    state = state_;
  }
  if (state == State::kGone) {
    return absl::UnavailableError("it could not be read here");
  }
  const absl::Status read = FromSlot(offset, out);
  return read.ok() ? read : absl::UnavailableError(Message(read));
}

void PassedOn::Begin(const ShardId& shard, std::shared_ptr<PassedOnFile> file) {
  MutexLock lock(mutex_);
  if (files_.insert_or_assign(shard, std::move(file)).second) {
    order_.push_back(shard);
  }
  if (order_.size() > kKnownMax) {
    files_.erase(order_.front());
    order_.pop_front();
  }
  changed_.NotifyAll();
}

absl::StatusOr<std::shared_ptr<PassedOnFile>> PassedOn::Await(const ShardId& shard,
                                                              MonotonicTime until,
                                                              const std::function<bool()>& gone) {
  for (;;) {
    {
      MutexLock lock(mutex_);
      if (const auto it = files_.find(shard); it != files_.end() && it->second->lives(shard)) {
        return it->second;
      }
      changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + kGoneLook);
    }
    if (gone()) {
      return absl::CancelledError("who asked for it has gone");
    }
    if (Clock::System()->Now() >= until) {
      return absl::UnavailableError(absl::StrCat("nobody reads rank ", shard.rank, "'s file here"));
    }
  }
}

}  // namespace holdfast
