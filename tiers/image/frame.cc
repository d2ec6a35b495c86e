#include "tiers/image/frame.h"

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr size_t kMagicBytes = 8;
constexpr size_t kHeaderBytes = 24;
constexpr size_t kCrcBytes = 8;
static_assert(kHeaderBytes + kCrcBytes == kFrameOverheadBytes);

struct Kind {
  std::string_view magic;
  std::string_view name;
};
Kind Describe(FrameKind kind) {
  switch (kind) {
    case FrameKind::kSlotNote:
      return {"HFSLNOTE", "slot note"};
    case FrameKind::kJobState:
      return {"HFJOBSTA", "job state"};
    case FrameKind::kIntent:
      return {"HFINTENT", "intent"};
    case FrameKind::kJobIdentity:
      return {"HFJOBIDN", "job identity"};
    case FrameKind::kAttemptClaim:
      return {"HFATCLAI", "attempt claim"};
    case FrameKind::kManifest:
      return {"HFMANIFE", "manifest"};
    case FrameKind::kMembership:
      return {"HFMEMBER", "membership note"};
    case FrameKind::kWitness:
      return {"HFWITNES", "witness"};
  }
  return {};
}

void AppendLittleEndian(std::string& out, uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    out.push_back(static_cast<char>((value >> (8 * i)) & 0xff));
  }
}

uint64_t LittleEndian(std::string_view in, size_t offset, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) {
    value |= static_cast<uint64_t>(static_cast<unsigned char>(in[offset + i])) << (8 * i);
  }
  return value;
}

}  // namespace

std::string EncodeFrame(FrameKind kind, std::string_view body) {
  std::string out(Describe(kind).magic);
  out.reserve(kFrameOverheadBytes + body.size());
  AppendLittleEndian(out, kFrameFormatVersion, 4);
  AppendLittleEndian(out, 0, 4);
  AppendLittleEndian(out, body.size(), 8);
  out.append(body);
  AppendLittleEndian(out, Crc64(out), kCrcBytes);
  return out;
}

absl::StatusOr<std::string_view> DecodeFrame(FrameKind kind, std::string_view bytes) {
  const absl::string_view name = ToAbsl(Describe(kind).name);
  if (bytes.size() < kMagicBytes + 4 || bytes.substr(0, kMagicBytes) != Describe(kind).magic) {
    return absl::DataLossError(absl::StrCat(name, ": torn or damaged: it does not begin as one"));
  }
  // The version decides what the rest means, so it comes before every other check.
  const uint64_t version = LittleEndian(bytes, 8, 4);
  if (version > kFrameFormatVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat(name, ": format version ", version, ", this program reads up to ",
                     kFrameFormatVersion, "; use the newer program that wrote it"));
  }
  if (version == 0) {
    return absl::DataLossError(absl::StrCat(name, ": damaged: format version 0"));
  }
  if (bytes.size() < kFrameOverheadBytes ||
      LittleEndian(bytes, 16, 8) != bytes.size() - kFrameOverheadBytes) {
    return absl::DataLossError(
        absl::StrCat(name, ": torn: its length of ", bytes.size(), " bytes is not what it says"));
  }
  const size_t crc_offset = bytes.size() - kCrcBytes;
  const uint64_t expected = LittleEndian(bytes, crc_offset, kCrcBytes);
  const uint64_t actual = Crc64(bytes.substr(0, crc_offset));
  if (expected != actual) {
    return absl::DataLossError(absl::StrCat(name, ": damaged: CRC ",
                                            absl::Hex(actual, absl::kZeroPad16), ", it says ",
                                            absl::Hex(expected, absl::kZeroPad16)));
  }
  if (LittleEndian(bytes, 12, 4) != 0) {
    return absl::DataLossError(absl::StrCat(name, ": damaged: bytes 12 to 15 are not zero"));
  }
  return bytes.substr(kHeaderBytes, bytes.size() - kFrameOverheadBytes);
}

}  // namespace holdfast
