#include "ckptctl/text.h"

#include <array>
#include <cstdint>

#include "absl/strings/str_cat.h"

namespace holdfast {
namespace {

struct CodeRange {
  uint32_t first;
  uint32_t last;
};

template <size_t N>
bool In(const std::array<CodeRange, N>& ranges, uint32_t c) {
  for (const CodeRange& range : ranges) {
    if (c >= range.first && c <= range.last) {
      return true;
    }
  }
  return false;
}

// Controls, and characters that show nothing or reorder others: with them one name can pass for
// another.
constexpr std::array<CodeRange, 23> kUnprintable = {{
    {0x00, 0x1F},       {0x7F, 0x9F},       {0xAD, 0xAD},         {0x34F, 0x34F},
    {0x61C, 0x61C},     {0x115F, 0x1160},   {0x17B4, 0x17B5},     {0x180B, 0x180F},
    {0x200B, 0x200F},   {0x2028, 0x202E},   {0x2060, 0x206F},     {0x3164, 0x3164},
    {0xD800, 0xF8FF},   {0xFDD0, 0xFDEF},   {0xFE00, 0xFE0F},     {0xFEFF, 0xFEFF},
    {0xFFA0, 0xFFA0},   {0xFFF0, 0xFFFB},   {0xFFFE, 0xFFFF},     {0x1D173, 0x1D17A},
    {0xE0000, 0xE0FFF}, {0xF0000, 0xFFFFF}, {0x100000, 0x10FFFF},
}};
constexpr std::array<CodeRange, 10> kWide = {{
    {0x1100, 0x115E},
    {0x2E80, 0x303E},
    {0x3041, 0xA4CF},
    {0xAC00, 0xD7A3},
    {0xF900, 0xFAFF},
    {0xFE30, 0xFE6F},
    {0xFF00, 0xFF60},
    {0xFFE0, 0xFFE6},
    {0x1F300, 0x1FAFF},
    {0x20000, 0x3FFFD},
}};
constexpr std::array<CodeRange, 5> kCombining = {{
    {0x300, 0x36F},
    {0x483, 0x489},
    {0x1AB0, 0x1AFF},
    {0x1DC0, 0x1DFF},
    {0x20D0, 0x20FF},
}};

struct Decoded {
  uint32_t code = 0;
  size_t bytes = 0;  // 0: not UTF-8 here
};

// One character of strict UTF-8: no overlong form, no surrogate, nothing above U+10FFFF.
Decoded DecodeAt(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[at + i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) {
    return {lead, 1};
  }
  const size_t length = lead >= 0xF0 && lead <= 0xF4   ? 4
                        : lead >= 0xE0 && lead <= 0xEF ? 3
                        : lead >= 0xC2 && lead <= 0xDF ? 2
                                                       : 0;
  if (length == 0 || text.size() - at < length) {
    return {};
  }
  uint32_t code = lead & (0xFFu >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) {
      return {};
    }
    code = (code << 6) | (byte(i) & 0x3Fu);
  }
  constexpr std::array<uint32_t, 5> kSmallest = {0, 0, 0x80, 0x800, 0x10000};
  if (code < kSmallest[length] || (code >= 0xD800 && code <= 0xDFFF) || code > 0x10FFFF) {
    return {};
  }
  return {code, length};
}

size_t WidthOf(uint32_t code) {
  if (In(kCombining, code)) {
    return 0;
  }
  return In(kWide, code) ? 2 : 1;
}

std::string EscapeCode(uint32_t code) {
  switch (code) {
    case '\n':
      return "\\n";
    case '\t':
      return "\\t";
    case '\r':
      return "\\r";
    case '\\':
      return "\\\\";
    default:
      return code < 0x80 ? absl::StrCat("\\x", absl::Hex(code, absl::kZeroPad2))
                         : absl::StrCat("\\u{", absl::Hex(code), "}");
  }
}

}  // namespace

std::string EscapeText(std::string_view text, size_t columns_max) {
  std::string out;
  size_t columns = 0;
  for (size_t at = 0; at < text.size();) {
    const Decoded c = DecodeAt(text, at);
    std::string piece;
    size_t width = 0;
    if (c.bytes == 0) {
      piece = absl::StrCat("\\x", absl::Hex(static_cast<uint8_t>(text[at]), absl::kZeroPad2));
      width = piece.size();
    } else if (c.code == '\\' || In(kUnprintable, c.code)) {
      piece = EscapeCode(c.code);
      width = piece.size();
    } else {
      piece = std::string(text.substr(at, c.bytes));
      width = WidthOf(c.code);
    }
    // Combining marks take no column, but a thousand of them on one letter paint over other lines.
    const size_t cost = width == 0 ? 1 : width;
    if (columns + cost > columns_max) {
      return absl::StrCat(out, "…(", text.size(), " bytes)");
    }
    out += piece;
    columns += cost;
    at += c.bytes == 0 ? 1 : c.bytes;
  }
  return out;
}

size_t DisplayWidth(std::string_view text) {
  size_t columns = 0;
  for (size_t at = 0; at < text.size();) {
    const Decoded c = DecodeAt(text, at);
    columns += c.bytes == 0 ? 1 : WidthOf(c.code);
    at += c.bytes == 0 ? 1 : c.bytes;
  }
  return columns;
}

std::string AsciiText(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const Decoded c = DecodeAt(text, at);
    if (c.bytes == 1) {
      out += text[at];
    } else if (c.bytes == 0) {
      absl::StrAppend(&out, "\\x", absl::Hex(static_cast<uint8_t>(text[at]), absl::kZeroPad2));
    } else {
      absl::StrAppend(&out, "\\u{", absl::Hex(c.code), "}");
    }
    at += c.bytes == 0 ? 1 : c.bytes;
  }
  return out;
}

std::string CutText(std::string_view text, size_t columns_max, std::string_view mark) {
  if (DisplayWidth(text) <= columns_max) {
    return std::string(text);
  }
  const size_t mark_width = DisplayWidth(mark);
  if (mark_width > columns_max) {
    return "";
  }
  size_t columns = mark_width;
  size_t end = 0;
  while (end < text.size()) {
    const Decoded c = DecodeAt(text, end);
    columns += c.bytes == 0 ? 1 : WidthOf(c.code);
    if (columns > columns_max) {
      break;
    }
    end += c.bytes == 0 ? 1 : c.bytes;
  }
  return absl::StrCat(std::string(text.substr(0, end)), std::string(mark));
}

}  // namespace holdfast
