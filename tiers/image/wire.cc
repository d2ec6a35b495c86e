#include "tiers/image/wire.h"

#include <algorithm>
#include <limits>
#include <protozero/exception.hpp>
#include <protozero/varint.hpp>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast::image_internal {
namespace {

bool TakeVarint(std::string_view& rest, uint64_t& out) {
  if (!rest.empty() && static_cast<unsigned char>(rest.front()) < 0x80) {  // nearly all are
    out = static_cast<unsigned char>(rest.front());
    rest.remove_prefix(1);
    return true;
  }
  const char* p = rest.data();
  try {
    out = protozero::decode_varint(&p, rest.data() + rest.size());
  } catch (const protozero::exception&) {
    return false;
  }
  rest.remove_prefix(static_cast<size_t>(p - rest.data()));
  return true;
}

bool TakeFixed(std::string_view& rest, size_t bytes, uint64_t& out) {
  if (rest.size() < bytes) {
    return false;
  }
  out = 0;
  for (size_t i = 0; i < bytes; ++i) {
    out |= static_cast<uint64_t>(static_cast<unsigned char>(rest[i])) << (8 * i);
  }
  rest.remove_prefix(bytes);
  return true;
}

}  // namespace

bool WireReader::Next(WireField& field) {
  if (rest_.empty() || !status_.ok()) {
    return false;
  }
  // 1. The field's key: number and wire type. Groups (3, 4) are not read by anyone any more.
  uint64_t key = 0;
  if (!TakeVarint(rest_, key) || key > std::numeric_limits<uint32_t>::max() || (key >> 3) == 0) {
    Stop("a field key is damaged");
    return false;
  }
  field = {static_cast<uint32_t>(key >> 3), static_cast<WireType>(key & 7), 0, {}};

  // 2. Its value.
  bool taken = false;
  switch (field.type) {
    case WireType::kVarint:
      taken = TakeVarint(rest_, field.value);
      break;
    case WireType::kFixed64:
      taken = TakeFixed(rest_, 8, field.value);
      break;
    case WireType::kFixed32:
      taken = TakeFixed(rest_, 4, field.value);
      break;
    case WireType::kBytes: {
      uint64_t length = 0;
      taken = TakeVarint(rest_, length) && length <= rest_.size();
      if (taken) {
        field.bytes = rest_.substr(0, length);
        rest_.remove_prefix(length);
      }
      break;
    }
  }
  if (!taken) {
    Stop(absl::StrCat("field ", field.number, " is damaged or cut short"));
  }
  return taken;
}

absl::Status WireReader::Unsigned(const WireField& field, uint64_t value_max, uint64_t& out) {
  HF_RETURN_IF_ERROR(Expect(field, WireType::kVarint));
  if (field.value > value_max) {
    return Malformed(field, absl::StrCat("its value ", field.value, " is above ", value_max));
  }
  out = field.value;
  return absl::OkStatus();
}

absl::Status WireReader::Bytes(const WireField& field, std::string_view& out) {
  HF_RETURN_IF_ERROR(Expect(field, WireType::kBytes));
  out = field.bytes;
  return absl::OkStatus();
}

absl::Status WireReader::Bytes(const WireField& field, std::string& out) {
  HF_RETURN_IF_ERROR(Expect(field, WireType::kBytes));
  out.assign(field.bytes);
  return absl::OkStatus();
}

absl::Status WireReader::PackedUnsigned(const WireField& field, size_t count_max,
                                        std::vector<uint64_t>& out) {
  HF_RETURN_IF_ERROR(Expect(field, WireType::kBytes));
  std::string_view rest = field.bytes;
  const auto numbers = std::count_if(rest.begin(), rest.end(),
                                     [](char c) { return static_cast<unsigned char>(c) < 0x80; });
  out.reserve(std::min(count_max, out.size() + static_cast<size_t>(numbers)));
  while (!rest.empty()) {
    uint64_t value = 0;
    if (out.size() == count_max) {
      return Malformed(field, absl::StrCat("it has more than ", count_max, " numbers"));
    }
    if (!TakeVarint(rest, value)) {
      return Malformed(field, "a number in it is damaged");
    }
    out.push_back(value);
  }
  return absl::OkStatus();
}

absl::Status WireReader::PackedFixed64(const WireField& field, std::vector<uint64_t>& out) {
  HF_RETURN_IF_ERROR(Expect(field, WireType::kBytes));
  std::string_view rest = field.bytes;
  if (rest.size() % 8 != 0) {
    return Malformed(field, "its length is not a multiple of 8");
  }
  out.resize(rest.size() / 8);
  for (uint64_t& value : out) {
    TakeFixed(rest, 8, value);
  }
  return absl::OkStatus();
}

absl::Status WireReader::Repeated(const WireField& field, std::string_view& out) const {
  if (field.type != WireType::kBytes) {
    return Malformed(field, "it has the wrong wire type");
  }
  out = field.bytes;
  return absl::OkStatus();
}

absl::Status WireReader::Expect(const WireField& field, WireType type) {
  if (field.type != type) {
    return Malformed(field, "it has the wrong wire type");
  }
  const uint64_t bit = uint64_t{1} << (field.number & 63);
  if ((seen_ & bit) != 0) {
    return Malformed(field, "it is given twice");
  }
  seen_ |= bit;
  return absl::OkStatus();
}

absl::Status WireReader::Malformed(const WireField& field, std::string_view why) const {
  return absl::InvalidArgumentError(
      absl::StrCat("read ", ToAbsl(message_), ": field ", field.number, ": ", ToAbsl(why)));
}

void WireReader::Stop(std::string_view why) {
  status_ = absl::InvalidArgumentError(absl::StrCat("read ", ToAbsl(message_), ": ", ToAbsl(why)));
}

}  // namespace holdfast::image_internal
