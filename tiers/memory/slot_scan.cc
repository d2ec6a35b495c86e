#include "tiers/memory/slot_scan.h"

#include <sys/stat.h>

#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/image/frame.h"
#include "tiers/memory/slot_files.h"
#include "tiers/memory/slot_note.h"
#include "tiers/memory/slot_record.h"

namespace holdfast {
namespace {

// What a file turned out to be. Broken ones hold nothing for anybody; untouchable ones may hold
// something good that this program cannot judge: of a newer version, of another boot, unreadable
// just now.
enum class State { kAbsent, kGood, kBroken, kUntouchable };

template <typename T>
struct Found {
  State state = State::kAbsent;
  T value{};
  absl::Status why;
};

class Scanner {
 public:
  explicit Scanner(const SlotScanInput& input) : in_(input) {}

  absl::StatusOr<SlotScanResult> Run() {
    HF_ASSIGN_OR_RETURN(const std::vector<std::string> names, in_.env->List(in_.dir));
    std::set<SlotId> slots;
    for (const std::string& name : names) {
      const ParsedName parsed = ParseFileName(name);
      switch (parsed.role) {
        case FileRole::kLock:
        case FileRole::kReserve:
          break;
        case FileRole::kImage:
        case FileRole::kNote:
        case FileRole::kRecord:
          slots.insert(parsed.slot);
          break;
        case FileRole::kJobState:
          ReadJobState(name, parsed.job);
          break;
        case FileRole::kTemporary:  // a write that was interrupted: it was never true
          if (absl::Status status = in_.env->Unlink(Path(name));
              !status.ok() && !absl::IsNotFound(status)) {
            Problem(Path(name), status);
          }
          break;
        case FileRole::kUnknown:
          Problem(
              Path(name),
              absl::UnknownError("not a name of the memory tier's; left alone, move it elsewhere"));
          break;
      }
    }
    // After the job states: records are checked against them.
    for (const SlotId slot : slots) {
      ReadSlot(slot);
    }
    return std::move(out_);
  }

 private:
  std::string Path(std::string_view name) const { return JoinPath(in_.dir, name); }

  void Problem(const std::string& path, const absl::Status& why) {
    out_.scan.problems.push_back(absl::StrCat(path, ": ", why.message()));
  }
  void UnreadableCopyAt(SlotId slot, const absl::Status& why) {
    Problem(Path(ImageName(slot)), why);
    out_.scan.unreadable.push_back({Path(ImageName(slot)), why});
  }

  void ReadJobState(const std::string& name, const JobUuid& job) {
    const absl::StatusOr<std::string> bytes = ReadFile(*in_.env, Path(name), kJobStateBytesMax);
    if (!bytes.ok()) {
      return Problem(Path(name), bytes.status());
    }
    const absl::StatusOr<std::string_view> body = DecodeFrame(FrameKind::kJobState, *bytes);
    if (!body.ok()) {
      return Problem(Path(name), Annotate(body.status(), "left alone"));
    }
    const absl::StatusOr<JobIdentity> identity = DecodeJobIdentity(*body);
    if (!identity.ok()) {
      return Problem(Path(name), Annotate(identity.status(), "left alone"));
    }
    if (identity->job != job) {
      return Problem(Path(name), absl::DataLossError(
                                     absl::StrCat("left alone: it is the state of another job, '",
                                                  identity->name, "' ", identity->job.ToString())));
    }
    job_names_[job] = identity->name;
    out_.scan.job_states.emplace_back(*body);
  }

  Found<FileInfo> LookAtImage(SlotId slot) {
    const absl::StatusOr<FileInfo> info = in_.env->Info(Path(ImageName(slot)));
    if (absl::IsNotFound(info.status())) {
      return {};
    }
    if (!info.ok()) {
      return {State::kUntouchable, {}, info.status()};
    }
    if (!S_ISREG(info->mode)) {
      return {State::kUntouchable, {}, absl::FailedPreconditionError("not a regular file")};
    }
    return {State::kGood, *info, absl::OkStatus()};
  }

  // A failure to read says nothing about what is there, so only what was read and does not decode
  // is broken.
  Found<SlotNote> LookAtNote(SlotId slot) {
    const absl::StatusOr<std::string> bytes =
        ReadFile(*in_.env, Path(NoteName(slot)), kNoteBytesMax);
    if (!bytes.ok()) {
      return {absl::IsNotFound(bytes.status()) ? State::kAbsent : State::kUntouchable,
              {},
              bytes.status()};
    }
    absl::StatusOr<SlotNote> note = DecodeSlotNote(*bytes);
    if (!note.ok()) {
      return {absl::IsDataLoss(note.status()) ? State::kBroken : State::kUntouchable,
              {},
              note.status()};
    }
    if (note->boot_id != in_.boot_id) {
      return {State::kUntouchable,
              {},
              absl::FailedPreconditionError("its note is of another boot of this machine, so it "
                                            "was put here by hand; nothing says who may write it")};
    }
    return {State::kGood, *std::move(note), absl::OkStatus()};
  }

  Found<ShardRecord> LookAtRecord(SlotId slot) {
    const absl::StatusOr<std::string> bytes =
        ReadFile(*in_.env, Path(RecordName(slot)), kRecordBytesMax);
    if (!bytes.ok()) {
      return {absl::IsNotFound(bytes.status()) ? State::kAbsent : State::kUntouchable,
              {},
              bytes.status()};
    }
    absl::StatusOr<ShardRecord> record = DecodeSlotRecord(*bytes);
    if (!record.ok()) {
      return {absl::IsFailedPrecondition(record.status()) ? State::kUntouchable : State::kBroken,
              {},
              record.status()};
    }
    return {State::kGood, *std::move(record), absl::OkStatus()};
  }

  void ReadSlot(SlotId slot) {
    const Found<FileInfo> image = LookAtImage(slot);
    const Found<SlotNote> note = LookAtNote(slot);
    Found<ShardRecord> record = LookAtRecord(slot);

    // 1. What cannot be judged is not touched, nor anything beside it.
    for (const absl::Status& why :
         {image.state == State::kUntouchable ? image.why : absl::OkStatus(),
          note.state == State::kUntouchable ? note.why : absl::OkStatus(),
          record.state == State::kUntouchable ? record.why : absl::OkStatus()}) {
      if (!why.ok()) {
        return LeaveAlone(slot, image, record, why);
      }
    }
    // 2. A record without its bytes is not a copy.
    if (record.state == State::kGood && record.value.image_bytes > image.value.bytes) {
      record.state = State::kBroken;
      record.why = absl::DataLossError(
          image.state == State::kAbsent
              ? absl::StrCat("the slot file of ", record.value.id.ToString(),
                             " was deleted; its copy here is lost")
              : absl::StrCat("the slot file was cut to ", image.value.bytes,
                             " bytes, the image of ", record.value.id.ToString(), " has ",
                             record.value.image_bytes, "; its copy here is lost"));
    }
    if (image.state == State::kAbsent) {
      return Discard(slot, image, record,
                     absl::DataLossError(
                         "the slot file was deleted while it was in use; its note was removed"));
    }
    // 3. Without a note that reads, nothing says whose filling the bytes are.
    if (note.state != State::kGood) {
      return ReadSlotWithoutNote(slot, image, note, record);
    }
    ReadSlotWithNote(slot, image, note.value, record);
  }

  void ReadSlotWithoutNote(SlotId slot, const Found<FileInfo>& image, const Found<SlotNote>& note,
                           const Found<ShardRecord>& record) {
    const absl::string_view what =
        note.state == State::kAbsent ? "its note is gone" : note.why.message();
    if (record.state == State::kGood) {
      return LeaveAlone(slot, image, record,
                        absl::DataLossError(absl::StrCat(
                            what, ", so nothing says that the bytes are still those of ",
                            record.value.id.ToString(), "; remove ", Path(ImageName(slot)),
                            "* to have the memory back")));
    }
    if (note.state == State::kAbsent && record.state == State::kAbsent) {
      if (in_.awaits_note(slot)) {
        SlotNote empty;
        empty.slot_bytes = image.value.bytes;
        out_.scan.slots.push_back({slot, image.value.bytes, empty, std::nullopt});
        return;
      }
      // An interrupted Create or Delete: nobody ever had, or has, a sealed copy here. No news to
      // anybody.
      return Discard(slot, image, record, absl::OkStatus());
    }
    Discard(
        slot, image, record,
        absl::DataLossError(absl::StrCat(what, "; the slot held no sealed copy and was removed")));
  }

  void ReadSlotWithNote(SlotId slot, const Found<FileInfo>& image, const SlotNote& note,
                        Found<ShardRecord>& record) {
    if (record.state == State::kGood && record.value.generation != note.generation) {
      // The bytes belong to the later filling by now.
      record.state = State::kBroken;
      record.why = absl::DataLossError(absl::StrCat("the record is of filling ",
                                                    record.value.generation, ", the slot is at ",
                                                    note.generation, "; the record was removed"));
    }
    if (record.state == State::kGood) {
      if (absl::Status foreign = CheckIdentity(slot, record.value); !foreign.ok()) {
        return LeaveAlone(slot, image, record, foreign);
      }
    }
    const bool full = image.value.bytes == note.slot_bytes;
    if (record.state != State::kGood && !full) {
      return Discard(slot, image, record,
                     absl::DataLossError(absl::StrCat("the slot file has ", image.value.bytes,
                                                      " bytes instead of ", note.slot_bytes,
                                                      ": it was cut or extended; it was removed")));
    }
    if (record.state == State::kBroken) {
      if (absl::Status status = Remove(RecordName(slot)); !status.ok()) {
        return LeaveAlone(slot, image, record, status);
      }
      UnreadableCopyAt(slot, record.why);
    }
    if (!full) {
      Problem(Path(ImageName(slot)),
              absl::DataLossError(absl::StrCat("the slot file has ", image.value.bytes,
                                               " bytes instead of ", note.slot_bytes,
                                               "; the image in it is whole")));
    }
    StoredSlot stored{slot, image.value.bytes, note, std::nullopt};
    if (record.state == State::kGood) {
      seen_[record.value.id] = slot;
      stored.record = std::move(record.value);
    }
    out_.scan.slots.push_back(std::move(stored));
  }

  // Whether a good record may stand where it lies.
  absl::Status CheckIdentity(SlotId slot, const ShardRecord& record) {
    const auto job = job_names_.find(record.id.job);
    if (job != job_names_.end() && job->second != record.job_name) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the record is of job '", record.job_name, "', but ", record.id.job.ToString(),
          " is job '", job->second, "': put here by hand; left alone"));
    }
    const auto twin = seen_.find(record.id);
    if (twin != seen_.end()) {
      return absl::AlreadyExistsError(absl::StrCat("slot ", slot, " says that it holds ",
                                                   record.id.ToString(), ", which slot ",
                                                   twin->second, " holds already; left alone"));
    }
    return absl::OkStatus();
  }

  void LeaveAlone(SlotId slot, const Found<FileInfo>& image, const Found<ShardRecord>& record,
                  const absl::Status& why) {
    if (record.state == State::kAbsent) {
      Problem(Path(ImageName(slot)), why);
    } else {
      UnreadableCopyAt(slot, why);
    }
    out_.scan.left_alone[slot] = image.value.bytes;
  }

  // Removes a slot without a good record: record, note, image, so that an interruption leaves what
  // is removed next time.
  void Discard(SlotId slot, const Found<FileInfo>& image, const Found<ShardRecord>& record,
               const absl::Status& why) {
    for (const std::string& name : {RecordName(slot), NoteName(slot), ImageName(slot)}) {
      if (absl::Status status = Remove(name); !status.ok()) {
        return LeaveAlone(slot, image, record, status);
      }
    }
    if (record.state != State::kAbsent) {
      UnreadableCopyAt(slot, record.why);
    } else if (!why.ok()) {
      Problem(Path(ImageName(slot)), why);
    }
  }

  absl::Status Remove(const std::string& name) {
    const absl::Status status = RemoveFile(*in_.env, Path(name));
    return absl::IsNotFound(status) ? absl::OkStatus() : status;
  }

  const SlotScanInput& in_;
  SlotScanResult out_;
  std::map<JobUuid, std::string> job_names_;
  std::map<ShardId, SlotId> seen_;
};

}  // namespace

absl::StatusOr<SlotScanResult> ScanSlots(const SlotScanInput& input) {
  return Scanner(input).Run();
}

}  // namespace holdfast
