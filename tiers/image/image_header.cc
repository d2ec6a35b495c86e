#include "tiers/image/image_header.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>

#include "base/units.h"
#include "tiers/image/layout_rules.h"

namespace holdfast::image_internal {
namespace {

// The same code runs over two sinks: one counts, so that a header over the limit is refused before
// anything is allocated for it and the string is allocated once; the other writes.
class CountingSink {
 public:
  void Put(std::string_view text) { bytes_ += text.size(); }
  uint64_t bytes() const { return bytes_; }
  bool Full() const { return bytes_ > kHeaderBytesMax; }

 private:
  uint64_t bytes_ = 0;
};

class StringSink {
 public:
  explicit StringSink(std::string& out) : out_(out) {}
  void Put(std::string_view text) { out_.append(text); }
  static constexpr bool Full() { return false; }

 private:
  std::string& out_;
};

// The shortest valid JSON: only what must be escaped is. The text is valid UTF-8 already.
template <class Sink>
void PutEscaped(Sink& sink, std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  size_t plain = 0;  // start of the run that needs no escape
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c >= 0x20 && c != '"' && c != '\\') {
      continue;
    }
    sink.Put(text.substr(plain, i - plain));
    plain = i + 1;
    switch (c) {
      case '"':
        sink.Put("\\\"");
        break;
      case '\\':
        sink.Put("\\\\");
        break;
      case '\n':
        sink.Put("\\n");
        break;
      case '\r':
        sink.Put("\\r");
        break;
      case '\t':
        sink.Put("\\t");
        break;
      default: {
        const std::array<char, 6> escape = {'\\', 'u', '0', '0', kHex[c >> 4], kHex[c & 15]};
        sink.Put(std::string_view(escape.data(), escape.size()));
      }
    }
  }
  sink.Put(text.substr(plain));
}

// Writes JSON that is itself the content of a JSON string.
template <class Sink>
class EscapingSink {
 public:
  explicit EscapingSink(Sink& sink) : sink_(sink) {}
  void Put(std::string_view text) { PutEscaped(sink_, text); }
  bool Full() const { return sink_.Full(); }

 private:
  Sink& sink_;
};

template <class Sink>
void PutNumber(Sink& sink, uint64_t value) {
  std::array<char, 20> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  sink.Put(std::string_view(digits.data(), static_cast<size_t>(end - digits.data())));
}

template <class Sink>
void PutNumbers(Sink& sink, const std::vector<uint64_t>& values) {
  sink.Put("[");
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) {
      sink.Put(",");
    }
    PutNumber(sink, values[i]);
  }
  sink.Put("]");
}

template <class Sink>
void PutKey(Sink& sink, const Slice& slice, std::string_view key_prefix) {
  sink.Put("\"");
  if (!slice.key.empty()) {
    sink.Put(key_prefix);
    sink.Put(slice.key);
    sink.Put(":");
  }
  PutEscaped(sink, slice.name);
  sink.Put("\"");
}

// Where the key's data begins in the tensor of that name: the box's place for a tensor's first
// slice; nothing but zeros for a key of its own, which names no tensor but itself.
template <class Sink>
void PutShardingInfo(Sink& sink, const std::vector<Slice>& slices, std::string_view key_prefix) {
  sink.Put("{");
  for (size_t i = 0; i < slices.size() && !sink.Full(); ++i) {
    sink.Put(i == 0 ? "" : ",");
    PutKey(sink, slices[i], key_prefix);
    sink.Put(":{\"saved_offsets\":");
    const auto* box = std::get_if<BoxPlace>(&slices[i].place);
    if (box != nullptr && slices[i].key.empty()) {
      PutNumbers(sink, box->offset);
    } else {
      PutNumbers(sink, std::vector<uint64_t>(LocalShape(slices[i]).size(), 0));
    }
    sink.Put("}");
  }
  sink.Put("}");
}

template <class Sink>
void PutHeaderJson(Sink& sink, const std::vector<Slice>& slices, std::string_view key_prefix) {
  sink.Put("{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"");
  EscapingSink<Sink> inner(sink);
  PutShardingInfo(inner, slices, key_prefix);
  sink.Put("\",\"DCP_VERSION\":\"1.0\",\"format\":\"pt\"}");
  uint64_t begin = 0;
  for (size_t i = 0; i < slices.size() && !sink.Full(); ++i) {
    const Slice& slice = slices[i];
    sink.Put(",");
    PutKey(sink, slice, key_prefix);
    sink.Put(":{\"dtype\":\"");
    sink.Put(DTypeName(slice.dtype));
    sink.Put("\",\"shape\":");
    PutNumbers(sink, LocalShape(slice));
    sink.Put(",\"data_offsets\":[");
    PutNumber(sink, begin);
    sink.Put(",");
    PutNumber(sink, begin + slice.bytes);
    sink.Put("]}");
    begin += slice.bytes;
  }
  sink.Put("}");
}

}  // namespace

std::string KeyPrefix(Rank rank) {
  std::array<char, kRankDigits> digits;
  digits.fill('0');
  uint64_t rest = rank;
  for (auto digit = digits.rbegin(); digit != digits.rend(); ++digit, rest /= 10) {
    *digit = static_cast<char>('0' + rest % 10);
  }
  return std::string(kReservedPrefix).append(digits.data(), digits.size()).append(":");
}

uint64_t ImageHeaderBytes(const std::vector<Slice>& slices, Rank rank) {
  CountingSink sink;
  PutHeaderJson(sink, slices, KeyPrefix(rank));
  return RoundUp(sizeof(uint64_t) + sink.bytes(), kImageAlignment);
}

std::string BuildImageHeader(const std::vector<Slice>& slices, Rank rank, uint64_t header_bytes) {
  std::string header;
  header.reserve(header_bytes);
  for (size_t i = 0; i < sizeof(uint64_t); ++i) {
    header.push_back(static_cast<char>((header_bytes - sizeof(uint64_t)) >> (8 * i)));
  }
  StringSink sink(header);
  PutHeaderJson(sink, slices, KeyPrefix(rank));
  header.resize(header_bytes, ' ');
  return header;
}

}  // namespace holdfast::image_internal

namespace holdfast {

std::string HeaderKey(const Slice& slice, Rank rank) {
  return slice.key.empty() ? slice.name
                           : image_internal::KeyPrefix(rank) + slice.key + ":" + slice.name;
}

}  // namespace holdfast
