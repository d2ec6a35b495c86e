#include "server/membership/membership_note.h"

#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/status.h"

namespace holdfast {

std::string MembershipNotePath(const std::string& state_dir) {
  return JoinPath(state_dir, "membership");
}

absl::StatusOr<MembershipNoteData> ReadMembershipNote(Env& env, const std::string& path,
                                                      const std::string& node) {
  const absl::StatusOr<std::string> bytes = ReadFile(env, path, kMembershipNoteBytesMax);
  if (absl::IsNotFound(bytes.status())) {
    return MembershipNoteData{node, {}, 0};
  }
  HF_RETURN_IF_ERROR(bytes.status());
  absl::StatusOr<MembershipNoteData> note = DecodeMembershipNote(*bytes);
  if (!note.ok()) {
    return Annotate(note.status(), absl::StrCat("'", path, "'"));
  }
  if (note->node != node) {
    return MembershipNoteData{node, {}, note->epoch};
  }
  return note;
}

absl::Status WriteNote(Env& env, const std::string& path, const MembershipNoteData& note) {
  return WriteFileAtomically(env, path, EncodeMembershipNote(note));
}

}  // namespace holdfast
