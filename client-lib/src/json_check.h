// Whether a text is JSON (RFC 8259): so that an object that says so is read back by every reader.
// Pure, thread-safe, without recursion; nothing is kept of what was read.
//
//   HF_TRY(CheckJson(object.bytes));   // "byte 17: expected ',' or '}'"
#pragma once

#include <string_view>

#include "holdfast/status.h"

namespace holdfast::client {

inline constexpr int kJsonDepthMax = 512;

Status CheckJson(std::string_view text);

}  // namespace holdfast::client
