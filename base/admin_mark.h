// What tells the daemon's own answers from those that gRPC makes up, on the admin socket: both use
// the same codes, and UNAVAILABLE may be a tier that does not answer or a connection that was lost.
// The daemon puts this key into the trailing metadata of each call that it answers with an error.
#pragma once

namespace holdfast {

inline constexpr char kAnswerMark[] = "holdfast-answer";
inline constexpr char kAnswerMarkValue[] = "1";

}  // namespace holdfast
