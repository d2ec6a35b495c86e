#include "server/runtime/tiers/slot_source.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/runtime/fabric_port.h"
#include "server/runtime/found_state.h"

namespace holdfast {

absl::StatusOr<SlotImage> OpenSealedSlot(SlotStore& slots, Env& env, const FlushShard& action) {
  SlotImage opened;
  HF_ASSIGN_OR_RETURN(opened.record_file, slots.ReadRecord(action.slot));
  HF_ASSIGN_OR_RETURN(RecordAndLayout image, DecodeRecordAndLayout(opened.record_file));
  if (image.record.id != action.key.id || image.record.generation != action.generation) {
    return absl::AbortedError(absl::StrCat("flush of ", action.key.id.ToString(), ": slot ",
                                           action.slot, " holds ", image.record.id.ToString(),
                                           " by now"));
  }
  HF_ASSIGN_OR_RETURN(opened.file, slots.OpenImageFile(action.slot, true));
  HF_ASSIGN_OR_RETURN(const FileInfo info, opened.file->Info());
  if (info.bytes < image.record.image_bytes) {
    return absl::DataLossError(absl::StrCat("slot ", action.slot, " was cut to ", info.bytes,
                                            " bytes; its image has ", image.record.image_bytes));
  }
  HF_ASSIGN_OR_RETURN(opened.mapping, env.Map(*opened.file, 0, info.bytes, true));
  opened.image = std::make_shared<const RecordAndLayout>(std::move(image));
  return opened;
}

absl::StatusOr<SlotToFill> OpenSlotToFill(DrainContext& context, const FetchShard& action) {
  SlotStore& slots = *context.slots;
  if (context.fabric != nullptr) {
    context.fabric->BecomesOf(action.slot, action.key.id.job);
  }
  SlotToFill opened;
  HF_ASSIGN_OR_RETURN(opened.file, slots.OpenImageFile(action.slot, true));
  HF_ASSIGN_OR_RETURN(const FileInfo info, opened.file->Info());
  if (info.bytes < action.slot_bytes) {
    return absl::DataLossError(
        absl::StrCat("slot ", action.slot, " was cut to ", info.bytes, " bytes"));
  }
  HF_ASSIGN_OR_RETURN(opened.mapping, context.env->Map(*opened.file, 0, action.slot_bytes, true));
  return opened;
}

absl::StatusOr<FetchEnded> PublishFetched(SlotStore& slots, const FetchShard& action,
                                          const ShardRecord& record) {
  ShardRecord in_slot = record;
  in_slot.generation = action.generation;
  if (action.replaces) {
    const absl::Status removed = slots.RemoveRecord(*action.replaces);
    if (!removed.ok() && !absl::IsNotFound(removed)) {
      return removed;
    }
  }
  const RecordExpectation expected{action.key.id, action.key.job_name, in_slot.world_size,
                                   action.generation, in_slot.descent};
  const std::string bytes = EncodeRecord(in_slot);
  HF_ASSIGN_OR_RETURN(const ShardRecord published,
                      slots.PublishRecordBytes(action.slot, expected, bytes));
  FetchEnded ended{action.drain,     action.slot, action.generation,
                   absl::OkStatus(), false,       ToSealedCopy(published)};
  ended.record_bytes = bytes.size();
  return ended;
}

}  // namespace holdfast
