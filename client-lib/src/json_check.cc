#include "client-lib/src/json_check.h"

#include <bitset>

#include "absl/strings/str_cat.h"
#include "tiers/image/layout_rules.h"

namespace holdfast::client {
namespace {

class Checker {
 public:
  explicit Checker(std::string_view text) : text_(text) {}

  Status Run() {
    // What is open, innermost last: an object or (array) not.
    std::bitset<kJsonDepthMax> is_object;
    int depth = 0;
    const char* expected = ReadValue(is_object, depth);
    while (expected == nullptr && depth > 0) {
      SkipSpace();
      const bool object = is_object[static_cast<size_t>(depth - 1)];
      if (Take(object ? '}' : ']')) {
        --depth;
      } else if (!Take(',')) {
        expected = object ? "',' or '}'" : "',' or ']'";
      } else {
        expected = object ? ReadKey() : nullptr;
        expected = expected == nullptr ? ReadValue(is_object, depth) : expected;
      }
    }
    SkipSpace();
    if (expected == nullptr && at_ != text_.size()) {
      expected = "the end";
    }
    return expected == nullptr
               ? Status()
               : Status(Code::kInvalidArgument, absl::StrCat("this is not JSON: at byte ", at_, " ",
                                                             expected, " was expected"));
  }

 private:
  void SkipSpace() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r')) {
      ++at_;
    }
  }
  bool Take(char c) {
    if (at_ < text_.size() && text_[at_] == c) {
      ++at_;
      return true;
    }
    return false;
  }
  bool TakeDigits() {
    const size_t before = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      ++at_;
    }
    return at_ > before;
  }

  // A whole value; or, for an object or array that is not empty, all up to its first member's
  // value, which may be one again.
  const char* ReadValue(std::bitset<kJsonDepthMax>& is_object, int& depth) {
    while (true) {
      SkipSpace();
      const bool object = at_ < text_.size() && text_[at_] == '{';
      if (!object && (at_ == text_.size() || text_[at_] != '[')) {
        return ReadScalar();
      }
      ++at_;
      SkipSpace();
      if (Take(object ? '}' : ']')) {
        return nullptr;
      }
      if (depth == kJsonDepthMax) {
        return "an end to so many nested values";
      }
      is_object[static_cast<size_t>(depth++)] = object;
      if (object) {
        if (const char* expected = ReadKey(); expected != nullptr) {
          return expected;
        }
      }
    }
  }

  const char* ReadKey() {
    SkipSpace();
    if (at_ == text_.size() || text_[at_] != '"') {
      return "a member's name";
    }
    if (const char* expected = ReadString(); expected != nullptr) {
      return expected;
    }
    SkipSpace();
    return Take(':') ? nullptr : "':'";
  }

  const char* ReadScalar() {
    const std::string_view rest = text_.substr(at_);
    for (const std::string_view word : {"true", "false", "null"}) {
      if (rest.starts_with(word)) {
        at_ += word.size();
        return nullptr;
      }
    }
    return rest.starts_with('"') ? ReadString() : ReadNumber();
  }

  const char* ReadString() {
    ++at_;
    while (at_ < text_.size()) {
      const auto c = static_cast<unsigned char>(text_[at_]);
      if (c == '"') {
        ++at_;
        return nullptr;
      }
      if (c < 0x20) {
        return "an escape in place of a control character";
      }
      ++at_;
      if (c == '\\' && !TakeEscape()) {
        return "an escape";
      }
    }
    return "'\"'";
  }

  bool TakeEscape() {
    if (at_ == text_.size()) {
      return false;
    }
    const char c = text_[at_++];
    if (c != 'u') {
      return std::string_view("\"\\/bfnrt").find(c) != std::string_view::npos;
    }
    for (int i = 0; i < 4; ++i, ++at_) {
      if (at_ == text_.size() ||
          std::string_view("0123456789abcdefABCDEF").find(text_[at_]) == std::string_view::npos) {
        return false;
      }
    }
    return true;
  }

  const char* ReadNumber() {
    Take('-');
    if (!Take('0') && !TakeDigits()) {
      return "a value";
    }
    if (Take('.') && !TakeDigits()) {
      return "a digit";
    }
    if (Take('e') || Take('E')) {
      if (!Take('+')) {
        Take('-');
      }
      if (!TakeDigits()) {
        return "a digit";
      }
    }
    return nullptr;
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

Status CheckJson(std::string_view text) {
  if (!image_internal::IsValidUtf8(text)) {
    return Status(Code::kInvalidArgument, "this is not JSON: it is not valid UTF-8");
  }
  return Checker(text).Run();
}

}  // namespace holdfast::client
