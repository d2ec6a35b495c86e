// <state_dir>/membership: what this node must remember of its membership (docs/formats.md).
//
// Plain functions; each blocks as long as the disk does.
#pragma once

#include <string>

#include "server/membership/membership_records.h"

namespace holdfast {

class Env;

std::string MembershipNotePath(const std::string& state_dir);
// Empty when there is none, or when it is of a node of another name.
absl::StatusOr<MembershipNoteData> ReadMembershipNote(Env& env, const std::string& path,
                                                      const std::string& node);
absl::Status WriteNote(Env& env, const std::string& path, const MembershipNoteData& note);

}  // namespace holdfast
