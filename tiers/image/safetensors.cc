#include "tiers/image/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/image/layout_rules.h"

namespace holdfast {
namespace {

using image_internal::QuoteName;

// Takes the parser's events one by one instead of building a tree: duplicate keys show, depth is
// bounded by the states below, and nothing is kept but the result. Each callback returns false to
// stop the parse, after Refuse().
class HeaderHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderHandler(SafetensorsHeader& header) : header_(header) {}

  const std::string& why() const { return why_; }

  bool null() override { return Refuse("null has no place in a header"); }
  bool boolean(bool) override { return Refuse("a boolean has no place in a header"); }
  bool number_integer(number_integer_t) override {
    return Refuse("a negative number has no place in a header");
  }
  bool number_float(number_float_t, const string_t&) override {
    return Refuse("a number is not a whole one, or too large");
  }
  bool binary(binary_t&) override { return Refuse("binary data has no place in a header"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (state_ == State::kShape) {
      entry_.shape.push_back(value);
      return entry_.shape.size() <= kDimensionsMax ||
             Refuse(absl::StrCat("more than ", kDimensionsMax, " dimensions"));
    }
    if (state_ == State::kOffsets && offsets_ < 2) {
      (offsets_++ == 0 ? entry_.begin : entry_.end) = value;
      return true;
    }
    return Refuse("a number where none is expected");
  }

  bool string(string_t& value) override {
    if (state_ == State::kMetadata) {
      header_.metadata[key_] = value;
      return true;
    }
    if (state_ == State::kEntry && field_ == "dtype") {
      absl::StatusOr<DType> dtype = ParseDType(value);
      if (!dtype.ok()) {
        return Refuse(Message(dtype.status()));
      }
      entry_.dtype = *dtype;
      return true;
    }
    return Refuse("a string where none is expected");
  }

  bool start_object(std::size_t) override {
    switch (state_) {
      case State::kStart:
        state_ = State::kTop;
        return true;
      case State::kTop:
        state_ = key_ == image_internal::kMetadataKey ? State::kMetadata : State::kEntry;
        entry_ = {};
        entry_.key = key_;
        fields_.clear();
        offsets_ = 0;
        return true;
      default:
        return Refuse("an object where none is expected");
    }
  }

  bool end_object() override {
    if (state_ == State::kTop) {
      state_ = State::kEnd;
      return true;
    }
    if (state_ == State::kEntry) {
      if (fields_.size() != 3 || offsets_ != 2) {
        return Refuse("it needs dtype, shape and two data_offsets");
      }
      header_.entries.push_back(std::move(entry_));
    }
    state_ = State::kTop;
    return true;
  }

  bool start_array(std::size_t) override {
    if (state_ == State::kEntry && field_ == "shape") {
      state_ = State::kShape;
      return true;
    }
    if (state_ == State::kEntry && field_ == "data_offsets") {
      state_ = State::kOffsets;
      return true;
    }
    return Refuse("an array where none is expected");
  }

  bool end_array() override {
    state_ = State::kEntry;
    return true;
  }

  bool key(string_t& key) override {
    switch (state_) {
      case State::kTop:
        key_ = key;
        // Only now: entries are compared with each other when all are there.
        if (key == image_internal::kMetadataKey && std::exchange(has_metadata_, true)) {
          return Refuse("it is there twice");
        }
        return true;
      case State::kMetadata:
        key_ = key;
        return header_.metadata.count(key) == 0 || Refuse("it is there twice");
      case State::kEntry:
        field_ = key;
        if (key != "dtype" && key != "shape" && key != "data_offsets") {
          return Refuse(absl::StrCat("unknown field ", QuoteName(key)));
        }
        return fields_.insert(key).second ||
               Refuse(absl::StrCat("field ", QuoteName(key), " is there twice"));
      default:
        return Refuse("a key where none is expected");
    }
  }

  // The parser's own message quotes raw bytes, which need not be UTF-8.
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    why_ = absl::StrCat("it is not valid JSON in UTF-8 at byte ", position);
    return false;
  }

 private:
  enum class State { kStart, kTop, kMetadata, kEntry, kShape, kOffsets, kEnd };

  bool Refuse(std::string_view why) {
    why_ = absl::StrCat(QuoteName(key_), ": ", ToAbsl(why));
    return false;
  }

  SafetensorsHeader& header_;
  State state_ = State::kStart;
  std::string key_;    // the last one outside an entry
  std::string field_;  // the last one inside an entry
  std::set<std::string> fields_;
  SafetensorsEntry entry_;
  int offsets_ = 0;
  bool has_metadata_ = false;
  std::string why_;
};

absl::Status Refuse(std::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("read safetensors header: ", ToAbsl(why)));
}

// Length of the JSON with its padding, within the prefix, the file and the limit.
absl::StatusOr<uint64_t> JsonBytes(std::string_view prefix, uint64_t image_bytes) {
  if (prefix.size() < sizeof(uint64_t) || image_bytes < sizeof(uint64_t)) {
    return Refuse(absl::StrCat("the file has ", std::min<uint64_t>(prefix.size(), image_bytes),
                               " bytes, fewer than the length field's 8"));
  }
  uint64_t json_bytes = 0;
  for (size_t i = 0; i < sizeof(uint64_t); ++i) {
    json_bytes |= static_cast<uint64_t>(static_cast<unsigned char>(prefix[i])) << (8 * i);
  }
  if (json_bytes > kHeaderBytesMax) {
    return Refuse(absl::StrCat("its length ", json_bytes, " exceeds the limit of ", kHeaderBytesMax,
                               " bytes"));
  }
  if (json_bytes > image_bytes - sizeof(uint64_t) ||
      json_bytes > prefix.size() - sizeof(uint64_t)) {
    return Refuse(absl::StrCat("its length ", json_bytes, " leaves the file's ", image_bytes,
                               " bytes or the ", prefix.size(), " that were read"));
  }
  return json_bytes;
}

absl::Status CheckKeysDiffer(const std::vector<SafetensorsEntry>& entries) {
  std::vector<std::string_view> keys;
  keys.reserve(entries.size());
  for (const SafetensorsEntry& entry : entries) {
    keys.push_back(entry.key);
  }
  std::sort(keys.begin(), keys.end());
  const auto twice = std::adjacent_find(keys.begin(), keys.end());
  return twice == keys.end() ? absl::OkStatus()
                             : Refuse(absl::StrCat(QuoteName(*twice), ": it is there twice"));
}

// Sorted by begin, the entries must fill the data from 0 to its end without a hole.
absl::Status CheckOffsets(const std::vector<SafetensorsEntry>& entries, uint64_t data_bytes) {
  uint64_t expected = 0;
  for (const SafetensorsEntry& entry : entries) {
    uint64_t count = 0;
    if (!image_internal::CheckedElementCount(entry.shape, count)) {
      return Refuse(
          absl::StrCat(QuoteName(entry.key), ": its shape has more than 2^63 - 1 elements"));
    }
    if (entry.begin != expected || entry.end < entry.begin || entry.end > data_bytes) {
      return Refuse(absl::StrCat(QuoteName(entry.key), ": bytes ", entry.begin, " to ", entry.end,
                                 " leave a hole, overlap or leave the data; expected from ",
                                 expected, " within ", data_bytes));
    }
    const uint64_t bytes = entry.end - entry.begin;
    const uint64_t element_bytes = DTypeBytes(entry.dtype);
    if (bytes % element_bytes != 0 || bytes / element_bytes != count) {
      return Refuse(absl::StrCat(QuoteName(entry.key), ": its ", bytes, " bytes contradict ", count,
                                 " elements of ", ToAbsl(DTypeName(entry.dtype))));
    }
    expected = entry.end;
  }
  return expected == data_bytes ? absl::OkStatus()
                                : Refuse(absl::StrCat("its entries end at byte ", expected,
                                                      " of the data's ", data_bytes));
}

absl::Status ParseJson(std::string_view json, SafetensorsHeader& header) {
  // The format wants '{' first; the parser would skip a byte order mark or spaces.
  if (json.empty() || json.front() != '{') {
    return Refuse("it does not begin with '{'");
  }
  HeaderHandler handler(header);
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &handler)) {
    return Refuse(handler.why());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SafetensorsHeader> ParseSafetensors(std::string_view prefix, uint64_t image_bytes) {
  HF_ASSIGN_OR_RETURN(const uint64_t json_bytes, JsonBytes(prefix, image_bytes));
  SafetensorsHeader header;
  header.header_bytes = sizeof(uint64_t) + json_bytes;
  HF_RETURN_IF_ERROR(ParseJson(prefix.substr(sizeof(uint64_t), json_bytes), header));
  std::sort(header.entries.begin(), header.entries.end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
              return std::tie(a.begin, a.end, a.key) < std::tie(b.begin, b.end, b.key);
            });
  HF_RETURN_IF_ERROR(CheckKeysDiffer(header.entries));
  HF_RETURN_IF_ERROR(CheckOffsets(header.entries, image_bytes - header.header_bytes));
  return header;
}

}  // namespace holdfast
