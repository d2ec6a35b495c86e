#include "tiers/compressed/seek_table.h"

#include <algorithm>
#include <span>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"

namespace holdfast {
namespace {

// Zstandard's seekable format, version 0.1.0. Numbers are little-endian, of four bytes.
constexpr uint32_t kSkippableMagic = 0x184D2A5E;
constexpr uint32_t kSeekableMagic = 0x8F92EAB1;
constexpr uint64_t kHeaderBytes = 8;                 // magic, length of what follows
constexpr uint64_t kEntryBytes = 8;                  // length in the file, length of what it holds
constexpr uint64_t kFooterBytes = 9;                 // frames, descriptor, magic
constexpr uint64_t kReadBytes = kEntryBytes * 8192;  // of the entries at once
constexpr char kDescriptor = 0;  // entries have no checksums: the frames have, and the image

void PutNumber(uint64_t number, std::string& out) {
  for (int shift = 0; shift < 32; shift += 8) {
    out.push_back(static_cast<char>((number >> shift) & 0xff));
  }
}

uint32_t NumberAt(std::string_view bytes, uint64_t at) {
  uint32_t number = 0;
  for (int i = 3; i >= 0; --i) {
    number = (number << 8) | static_cast<uint8_t>(bytes[at + static_cast<uint64_t>(i)]);
  }
  return number;
}

absl::Status Wrong(std::string_view what) {
  return absl::DataLossError(absl::StrCat("its seek table is damaged: ", ToAbsl(what)));
}

// What a table says against the lengths of file and image, part by part: footer, header, entries.
class TableCheck {
 public:
  TableCheck(uint64_t stored_bytes, uint64_t image_bytes)
      : stored_bytes_(stored_bytes), image_bytes_(image_bytes) {}

  uint64_t table_bytes() const { return SeekTableBytes(FramesOf(image_bytes_)); }

  absl::Status Footer(std::string_view footer) const {
    if (NumberAt(footer, 5) != kSeekableMagic) {
      return Wrong("the file does not end with one");
    }
    if (footer[4] != kDescriptor) {
      return Wrong("it is of a kind that is not written here");
    }
    return NumberAt(footer, 0) == FramesOf(image_bytes_) ? absl::OkStatus() : OtherFrames();
  }

  absl::Status Header(std::string_view header) const {
    return NumberAt(header, 0) == kSkippableMagic &&
                   NumberAt(header, 4) == table_bytes() - kHeaderBytes
               ? absl::OkStatus()
               : OtherFrames();
  }

  // The next ones, whole.
  absl::Status Entries(std::string_view entries) {
    const uint64_t room = stored_bytes_ - table_bytes();
    for (uint64_t at = 0; at < entries.size(); at += kEntryBytes) {
      const uint64_t held = std::min(kFrameBytes, image_bytes_ - stored_.size() * kFrameBytes);
      const uint32_t bytes = NumberAt(entries, at);
      if (NumberAt(entries, at + 4) != held || bytes == 0 || bytes > kStoredFrameBytesMax) {
        return Wrong(absl::StrCat("frame ", stored_.size(), " cannot be as long as it says"));
      }
      stored_.push_back(bytes);
      sum_ += bytes;
      if (sum_ > room) {
        return Wrong(absl::StrCat("its first ", stored_.size(), " frames take ", sum_,
                                  " bytes, the file has ", room, " for all of them"));
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<SeekTable> End() const {
    const uint64_t room = stored_bytes_ - table_bytes();
    if (sum_ != room) {
      return Wrong(
          absl::StrCat("its frames take ", sum_, " bytes, the file has ", room, " for them"));
    }
    return SeekTable(image_bytes_, stored_);
  }

 private:
  static absl::Status OtherFrames() {
    return Wrong("it is of another number of frames than the image has");
  }

  const uint64_t stored_bytes_;
  const uint64_t image_bytes_;
  std::vector<uint32_t> stored_;
  uint64_t sum_ = 0;
};

}  // namespace

uint64_t FramesOf(uint64_t image_bytes) {
  return image_bytes / kFrameBytes + (image_bytes % kFrameBytes != 0 ? 1 : 0);
}

uint64_t SeekTableBytes(uint64_t frames) {
  return kHeaderBytes + frames * kEntryBytes + kFooterBytes;
}

SeekTable::SeekTable(uint64_t image_bytes, const std::vector<uint32_t>& stored)
    : image_bytes_(image_bytes) {
  offsets_.reserve(stored.size() + 1);
  uint64_t offset = 0;
  for (const uint32_t bytes : stored) {
    offsets_.push_back(offset);
    offset += bytes;
  }
  offsets_.push_back(offset);
}

StoredFrame SeekTable::frame(uint64_t i) const {
  return {offsets_[i], offsets_[i + 1] - offsets_[i],
          std::min(kFrameBytes, image_bytes_ - i * kFrameBytes)};
}

std::string EncodeSeekTable(uint64_t image_bytes, const std::vector<uint32_t>& stored) {
  const uint64_t table_bytes = SeekTableBytes(stored.size());
  std::string out;
  out.reserve(table_bytes);
  PutNumber(kSkippableMagic, out);
  PutNumber(table_bytes - kHeaderBytes, out);
  uint64_t left = image_bytes;
  for (const uint32_t bytes : stored) {
    const uint64_t held = std::min(kFrameBytes, left);
    PutNumber(bytes, out);
    PutNumber(held, out);
    left -= held;
  }
  PutNumber(stored.size(), out);
  out.push_back(kDescriptor);
  PutNumber(kSeekableMagic, out);
  return out;
}

absl::StatusOr<SeekTable> DecodeSeekTable(std::string_view table, uint64_t stored_bytes,
                                          uint64_t image_bytes) {
  TableCheck check(stored_bytes, image_bytes);
  if (table.size() != check.table_bytes() || stored_bytes < table.size()) {
    return Wrong("it is of another length than the image's frames need");
  }
  const uint64_t footer = table.size() - kFooterBytes;
  HF_RETURN_IF_ERROR(check.Footer(table.substr(footer)));
  HF_RETURN_IF_ERROR(check.Header(table.substr(0, kHeaderBytes)));
  HF_RETURN_IF_ERROR(check.Entries(table.substr(kHeaderBytes, footer - kHeaderBytes)));
  return check.End();
}

absl::StatusOr<SeekTable> ReadSeekTable(File& file, uint64_t stored_bytes, uint64_t image_bytes) {
  TableCheck check(stored_bytes, image_bytes);
  const uint64_t bytes = check.table_bytes();
  if (stored_bytes < bytes) {
    return absl::DataLossError(absl::StrCat("'", file.path(), "': it was cut to ", stored_bytes,
                                            " bytes: its seek table alone has ", bytes));
  }
  std::string part;
  // `length` bytes of the table, from `at` on, if they are what `judge` takes for right.
  const auto read = [&](uint64_t at, uint64_t length, const auto& judge) -> absl::Status {
    part.resize(length);
    const absl::Status status =
        file.ReadAt(stored_bytes - bytes + at, std::as_writable_bytes(std::span(part)));
    if (absl::IsOutOfRange(status)) {
      return absl::DataLossError(status.message());
    }
    HF_RETURN_IF_ERROR(status);
    return Annotate(judge(part), absl::StrCat("'", file.path(), "'"));
  };
  // 1. Its ends: a file that has no such table costs no more than these.
  const uint64_t footer = bytes - kFooterBytes;
  HF_RETURN_IF_ERROR(
      read(footer, kFooterBytes, [&](std::string_view text) { return check.Footer(text); }));
  HF_RETURN_IF_ERROR(
      read(0, kHeaderBytes, [&](std::string_view text) { return check.Header(text); }));
  // 2. The entries, some at a time: memory is taken for those that were right so far.
  for (uint64_t at = kHeaderBytes; at < footer; at += part.size()) {
    HF_RETURN_IF_ERROR(read(at, std::min(kReadBytes, footer - at),
                            [&](std::string_view text) { return check.Entries(text); }));
  }
  absl::StatusOr<SeekTable> table = check.End();
  if (!table.ok()) {
    return Annotate(table.status(), absl::StrCat("'", file.path(), "'"));
  }
  return table;
}

}  // namespace holdfast
