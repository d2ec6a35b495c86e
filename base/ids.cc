#include "base/ids.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr size_t kUuidTextBytes = 36;
constexpr char kHexDigits[] = "0123456789abcdef";

bool HasDashBefore(size_t byte_index) {
  return byte_index == 4 || byte_index == 6 || byte_index == 8 || byte_index == 10;
}

int HexValue(char c) {
  if (c >= '0' && c <= '9')
    return c - '0';
  if (c >= 'a' && c <= 'f')
    return c - 'a' + 10;
  if (c >= 'A' && c <= 'F')
    return c - 'A' + 10;
  return -1;
}

absl::Status BadUuid(std::string_view text) {
  // Hostile text of any length goes into the message shortened and escaped.
  std::string shown;
  for (const char c : text.substr(0, 2 * kUuidTextBytes)) {
    shown.push_back(c >= 0x20 && c < 0x7f ? c : '?');
  }
  return absl::InvalidArgumentError(
      absl::StrCat("job uuid '", shown, text.size() > 2 * kUuidTextBytes ? "…" : "",
                   "': expected 32 hex digits in the form 8-4-4-4-12, as in "
                   "1b4e28ba-2fa1-41d2-883f-0016d3cca427"));
}

bool IsNameByte(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
         c == '_' || c == '-';
}

}  // namespace

std::string_view TierName(TierKind tier) {
  switch (tier) {
    case TierKind::kMemory:
      return "memory";
    case TierKind::kNvme:
      return "nvme";
    case TierKind::kPeer:
      return "peer";
    case TierKind::kRemote:
      return "remote";
  }
  return "unknown";
}

bool JobUuid::IsZero() const {
  return *this == JobUuid{};
}

std::string JobUuid::ToString() const {
  std::string text;
  text.reserve(kUuidTextBytes);
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (HasDashBefore(i)) {
      text.push_back('-');
    }
    text.push_back(kHexDigits[bytes[i] >> 4]);
    text.push_back(kHexDigits[bytes[i] & 15]);
  }
  return text;
}

std::string JobUuid::ToBytes() const {
  return std::string(bytes.begin(), bytes.end());
}

absl::StatusOr<JobUuid> JobUuid::FromString(std::string_view text) {
  if (text.size() != kUuidTextBytes) {
    return BadUuid(text);
  }
  JobUuid id;
  size_t at = 0;
  for (size_t i = 0; i < id.bytes.size(); ++i) {
    if (HasDashBefore(i) && text[at++] != '-') {
      return BadUuid(text);
    }
    const int high = HexValue(text[at]);
    const int low = HexValue(text[at + 1]);
    if (high < 0 || low < 0) {
      return BadUuid(text);
    }
    id.bytes[i] = static_cast<uint8_t>(high * 16 + low);
    at += 2;
  }
  return id;
}

absl::StatusOr<JobUuid> JobUuid::FromBytes(std::string_view bytes) {
  JobUuid id;
  if (bytes.size() != id.bytes.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("job uuid: expected 16 bytes, got ", bytes.size()));
  }
  std::memcpy(id.bytes.data(), bytes.data(), id.bytes.size());
  return id;
}

std::string ShardId::ToString() const {
  return absl::StrCat(job.ToString(), " attempt ", attempt, " step ", step, " rank ", rank);
}

std::string ProcessId::ToString() const {
  return absl::StrCat("pid ", pid);
}

absl::Status CheckJobName(std::string_view name) {
  if (name.empty()) {
    return absl::InvalidArgumentError("job name: must not be empty");
  }
  if (name.size() > kJobNameBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("job name: ", name.size(), " bytes; at most ",
                                                   kJobNameBytesMax, " are allowed"));
  }
  for (size_t i = 0; i < name.size(); ++i) {
    if (!IsNameByte(name[i])) {
      return absl::InvalidArgumentError(absl::StrCat(
          "job name: byte ", i, " (0x", absl::Hex(static_cast<uint8_t>(name[i]), absl::kZeroPad2),
          ") is not allowed; use letters, digits, '.', '_' and '-'"));
    }
  }
  if (name.front() == '.' || name.front() == '-') {
    return absl::InvalidArgumentError(
        absl::StrCat("job name '", ToAbsl(name), "': must start with a letter, a digit or '_'"));
  }
  return absl::OkStatus();
}

}  // namespace holdfast

size_t std::hash<holdfast::JobUuid>::operator()(const holdfast::JobUuid& id) const noexcept {
  // A uuid is random already; mixing the halves also spreads ids that were made up by a client.
  uint64_t high = 0;
  uint64_t low = 0;
  std::memcpy(&high, id.bytes.data(), 8);
  std::memcpy(&low, id.bytes.data() + 8, 8);
  uint64_t h = high ^ (low * 0x9e3779b97f4a7c15u);
  h ^= h >> 32;
  return static_cast<size_t>(h * 0xd6e8feb86659fd93u);
}
