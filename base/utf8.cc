#include "base/utf8.h"

#include <cstdint>

#include "absl/strings/str_cat.h"

namespace holdfast {

size_t Utf8SequenceBytes(std::string_view s) {
  const auto at = [&](size_t i) { return i < s.size() ? static_cast<unsigned char>(s[i]) : 0u; };
  const auto continues = [&](size_t i) { return (at(i) & 0xc0u) == 0x80u; };
  const unsigned first = at(0);
  if (s.empty()) {
    return 0;
  }
  if (first < 0x80) {
    return 1;
  }
  if (first >= 0xc2 && first <= 0xdf) {
    return continues(1) ? 2 : 0;
  }
  if ((first & 0xf0u) == 0xe0u) {
    const bool overlong = first == 0xe0 && at(1) < 0xa0;
    const bool surrogate = first == 0xed && at(1) >= 0xa0;
    return continues(1) && continues(2) && !overlong && !surrogate ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    const bool overlong = first == 0xf0 && at(1) < 0x90;
    const bool too_large = first == 0xf4 && at(1) >= 0x90;
    return continues(1) && continues(2) && continues(3) && !overlong && !too_large ? 4 : 0;
  }
  return 0;
}

bool IsUtf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const size_t bytes = Utf8SequenceBytes(text.substr(at));
    if (bytes == 0) {
      return false;
    }
    at += bytes;
  }
  return true;
}

namespace {

enum class Controls : uint8_t { kStay, kAreShown };

bool IsControl(char c) {
  return static_cast<unsigned char>(c) < ' ' || c == 0x7f;
}

std::string Shown(std::string_view text, Controls controls) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t bytes = Utf8SequenceBytes(text.substr(at));
    if (bytes == 0 || (controls == Controls::kAreShown && IsControl(text[at]))) {
      const auto byte = static_cast<uint8_t>(text[at]);
      absl::StrAppend(&out, "\\x", absl::Hex(byte, absl::kZeroPad2));
      ++at;
    } else {
      out.append(text.substr(at, bytes));
      at += bytes;
    }
  }
  return out;
}

}  // namespace

std::string Utf8Text(std::string_view text) {
  return Shown(text, Controls::kStay);
}

std::string PrintableText(std::string_view text) {
  return Shown(text, Controls::kAreShown);
}

}  // namespace holdfast
