#include "tiers/memory/slot_note.h"

#include <limits>
#include <protozero/pbf_writer.hpp>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/image/frame.h"
#include "tiers/image/wire.h"

namespace holdfast {
namespace {

using image_internal::WireField;
using image_internal::WireReader;

// Field numbers of holdfast.v1.SlotNote, Process, Reader (a Process with a hold) and JobState.
enum NoteField : uint32_t {
  kBootId = 1,
  kGeneration = 2,
  kWriter = 3,
  kReaders = 4,
  kSlotBytes = 5,
  kReplica = 6
};
enum ProcessField : uint32_t { kPid = 1, kStartTicks = 2, kHold = 3 };
enum JobField : uint32_t { kJobUuid = 1, kJobName = 2 };

std::string EncodeProcess(const ProcessId& process, uint64_t hold = 0) {
  std::string out;
  protozero::pbf_writer writer(out);
  if (process.pid != 0) {
    writer.add_int32(kPid, process.pid);
  }
  if (process.start_ticks != 0) {
    writer.add_uint64(kStartTicks, process.start_ticks);
  }
  if (hold != 0) {
    writer.add_uint64(kHold, hold);
  }
  return out;
}

absl::StatusOr<ReadHold> DecodeReader(std::string_view bytes) {
  uint64_t pid = 0;
  uint64_t start_ticks = 0;
  uint64_t hold = 0;
  WireReader reader("Process", bytes);
  for (WireField field; reader.Next(field);) {
    switch (field.number) {
      case kPid:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, std::numeric_limits<int32_t>::max(), pid));
        break;
      case kStartTicks:
        HF_RETURN_IF_ERROR(
            reader.Unsigned(field, std::numeric_limits<uint64_t>::max(), start_ticks));
        break;
      case kHold:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, std::numeric_limits<uint64_t>::max(), hold));
        break;
      default:
        break;  // of a later version
    }
  }
  HF_RETURN_IF_ERROR(reader.status());
  if (pid == 0) {
    return absl::InvalidArgumentError("read Process: it has no pid");
  }
  return ReadHold{{static_cast<int32_t>(pid), start_ticks}, hold};
}

absl::StatusOr<SlotNote> DecodeBody(std::string_view body) {
  SlotNote note;
  std::string_view process;
  WireReader reader("SlotNote", body);
  for (WireField field; reader.Next(field);) {
    switch (field.number) {
      case kBootId:
        HF_RETURN_IF_ERROR(reader.Bytes(field, note.boot_id));
        break;
      case kGeneration:
        HF_RETURN_IF_ERROR(
            reader.Unsigned(field, std::numeric_limits<uint64_t>::max(), note.generation));
        break;
      case kWriter: {
        HF_RETURN_IF_ERROR(reader.Bytes(field, process));
        HF_ASSIGN_OR_RETURN(const ReadHold one, DecodeReader(process));
        note.writer = one.process;
        break;
      }
      case kReaders: {
        HF_RETURN_IF_ERROR(reader.Repeated(field, process));
        if (note.readers.size() == kNoteReadersMax) {
          return absl::InvalidArgumentError(
              absl::StrCat("read SlotNote: more than ", kNoteReadersMax, " readers"));
        }
        HF_ASSIGN_OR_RETURN(const ReadHold one, DecodeReader(process));
        note.readers.push_back(one);
        break;
      }
      case kSlotBytes:
        HF_RETURN_IF_ERROR(
            reader.Unsigned(field, std::numeric_limits<uint64_t>::max(), note.slot_bytes));
        break;
      case kReplica: {
        uint64_t replica = 0;
        HF_RETURN_IF_ERROR(reader.Unsigned(field, 1, replica));
        note.replica = replica == 1;
        break;
      }
      default:
        break;
    }
  }
  HF_RETURN_IF_ERROR(reader.status());
  if (note.boot_id.empty() || note.boot_id.size() > kBootIdBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("read SlotNote: a boot id of ", note.boot_id.size(), " bytes"));
  }
  return note;
}

}  // namespace

absl::StatusOr<std::string> EncodeSlotNote(const SlotNote& note) {
  if (note.boot_id.empty() || note.boot_id.size() > kBootIdBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("slot note: a boot id of ", note.boot_id.size(),
                                                   " bytes; 1 to ", kBootIdBytesMax,
                                                   " are allowed"));
  }
  if (note.readers.size() > kNoteReadersMax) {
    return absl::ResourceExhaustedError(absl::StrCat("slot note: ", note.readers.size(),
                                                     " readers; at most ", kNoteReadersMax,
                                                     " may have one slot attached"));
  }
  std::string body;
  protozero::pbf_writer writer(body);
  writer.add_string(kBootId, note.boot_id);
  if (note.generation != 0) {
    writer.add_uint64(kGeneration, note.generation);
  }
  if (note.writer.has_value()) {
    writer.add_message(kWriter, EncodeProcess(*note.writer));
  }
  for (const ReadHold& reader : note.readers) {
    writer.add_message(kReaders, EncodeProcess(reader.process, reader.id));
  }
  if (note.slot_bytes != 0) {
    writer.add_uint64(kSlotBytes, note.slot_bytes);
  }
  if (note.replica) {
    writer.add_bool(kReplica, true);
  }
  return EncodeFrame(FrameKind::kSlotNote, body);
}

absl::StatusOr<SlotNote> DecodeSlotNote(std::string_view bytes) {
  HF_ASSIGN_OR_RETURN(const std::string_view body, DecodeFrame(FrameKind::kSlotNote, bytes));
  absl::StatusOr<SlotNote> note = DecodeBody(body);
  if (!note.ok()) {
    return absl::DataLossError(note.status().message());
  }
  return note;
}

absl::StatusOr<JobIdentity> DecodeJobIdentity(std::string_view job_state) {
  JobIdentity identity;
  std::string_view uuid;
  WireReader reader("JobState", job_state);
  for (WireField field; reader.Next(field);) {
    switch (field.number) {
      case kJobUuid:
        HF_RETURN_IF_ERROR(reader.Bytes(field, uuid));
        break;
      case kJobName:
        HF_RETURN_IF_ERROR(reader.Bytes(field, identity.name));
        break;
      default:
        break;  // the rest is the core's
    }
  }
  HF_RETURN_IF_ERROR(reader.status());
  HF_ASSIGN_OR_RETURN(identity.job, JobUuid::FromBytes(uuid));
  return identity;
}

}  // namespace holdfast
