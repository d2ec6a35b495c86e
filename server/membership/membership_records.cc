#include "server/membership/membership_records.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/ids.h"
#include "base/status.h"
#include "base/utf8.h"
#include "holdfast/v1/membership.pb.h"
#include "tiers/image/frame.h"

namespace holdfast {
namespace {

absl::Status Bad(std::string_view what) {
  return absl::InvalidArgumentError(ToAbsl(what));
}

// Text that goes into statuses and messages: bounded, and UTF-8.
absl::Status CheckText(std::string_view what, const std::string& text) {
  if (text.size() > kNodeTextBytesMax) {
    return Bad(absl::StrCat(ToAbsl(what), ": ", text.size(), " bytes; at most ", kNodeTextBytesMax,
                            " are allowed"));
  }
  if (!IsUtf8(text) || std::any_of(text.begin(), text.end(), [](const char c) {
        return static_cast<unsigned char>(c) < ' ';
      })) {
    return Bad(absl::StrCat(ToAbsl(what), ": not printable text"));
  }
  return absl::OkStatus();
}

template <typename Message>
absl::Status Parse(std::string_view value, size_t bytes_max, Message* message) {
  if (value.size() > bytes_max) {
    return Bad(absl::StrCat(value.size(), " bytes; at most ", bytes_max, " are allowed"));
  }
  if (!message->ParseFromArray(value.data(), static_cast<int>(value.size()))) {
    return Bad("not a record of ours");
  }
  return absl::OkStatus();
}

constexpr size_t kSmallRecordBytesMax = 1024;

}  // namespace

std::string EndOfPrefix(std::string prefix) {
  while (!prefix.empty()) {
    auto& last = reinterpret_cast<unsigned char&>(prefix.back());
    if (last != 0xff) {
      ++last;
      return prefix;
    }
    prefix.pop_back();
  }
  return std::string(1, '\0');
}

absl::Status CheckAddress(std::string_view address) {
  HF_RETURN_IF_ERROR(CheckText("address", std::string(address)));
  const size_t colon = address.rfind(':');
  const std::string_view host = colon == std::string_view::npos ? "" : address.substr(0, colon);
  uint32_t port = 0;
  const std::string_view digits = colon == std::string_view::npos ? "" : address.substr(colon + 1);
  const bool good_port = !digits.empty() &&
                         digits.find_first_not_of("0123456789") == std::string_view::npos &&
                         absl::SimpleAtoi(ToAbsl(digits), &port) && port >= 1 && port <= 65'535;
  const bool v6 = host.size() > 2 && host.front() == '[' && host.back() == ']' &&
                  host.find_first_not_of("0123456789abcdefABCDEF:.%", 1) == host.size() - 1;
  const bool name = !host.empty() && std::all_of(host.begin(), host.end(), [](const char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-' || c == '_';
  });
  if (!good_port || !(v6 || name)) {
    return Bad(absl::StrCat("'", ToAbsl(address), "' is not HOST:PORT with a port of 1 to 65535"));
  }
  return absl::OkStatus();
}

absl::Status CheckNode(const NodeInfo& node) {
  if (const absl::Status name = CheckJobName(node.name); !name.ok()) {
    return Bad(absl::StrCat("node name '", Utf8Text(node.name.substr(0, kNodeTextBytesMax)),
                            "': it must be as a job's name: ", name.message()));
  }
  HF_RETURN_IF_ERROR(CheckAddress(node.address));
  HF_RETURN_IF_ERROR(CheckText("version", node.version));
  if (node.labels.size() > kNodeLabelsMax) {
    return Bad(
        absl::StrCat(node.labels.size(), " labels; at most ", kNodeLabelsMax, " are allowed"));
  }
  for (size_t i = 0; i < node.labels.size(); ++i) {
    const NodeLabel& label = node.labels[i];
    HF_RETURN_IF_ERROR(CheckText("label", label.name));
    HF_RETURN_IF_ERROR(CheckText("label", label.value));
    if (label.name.empty() || label.value.empty()) {
      return Bad("a label needs a name and a value");
    }
    if (i > 0 && node.labels[i - 1].name >= label.name) {
      return Bad(absl::StrCat("label '", label.name, "' ",
                              node.labels[i - 1].name == label.name
                                  ? "twice: a node has one value of it"
                                  : "is out of order"));
    }
  }
  return absl::OkStatus();
}

std::string EncodeNode(const NodeInfo& node) {
  v1::NodeRecord record;
  record.set_name(node.name);
  record.set_address(node.address);
  for (const NodeLabel& label : node.labels) {
    v1::NodeLabelRecord* added = record.add_labels();
    added->set_name(label.name);
    added->set_value(label.value);
  }
  record.set_capacity_bytes(node.capacity_bytes);
  record.set_version(node.version);
  record.set_incarnation(node.incarnation);
  return record.SerializeAsString();
}

absl::StatusOr<NodeInfo> DecodeNode(std::string_view name, std::string_view value) {
  v1::NodeRecord record;
  HF_RETURN_IF_ERROR(Parse(value, kNodeRecordBytesMax, &record));
  NodeInfo node;
  node.name = record.name();
  node.address = record.address();
  for (const v1::NodeLabelRecord& label : record.labels()) {
    node.labels.push_back({label.name(), label.value()});
  }
  std::sort(node.labels.begin(), node.labels.end());
  node.capacity_bytes = record.capacity_bytes();
  node.version = record.version();
  node.incarnation = record.incarnation();
  HF_RETURN_IF_ERROR(CheckNode(node));
  if (node.name != name) {
    return Bad(absl::StrCat("it says that it is '", node.name, "'"));
  }
  return node;
}

std::string EncodeHost(const JobHost& host) {
  v1::HostRecord record;
  record.set_node(host.node);
  record.set_incarnation(host.incarnation);
  record.set_epoch(host.epoch);
  return record.SerializeAsString();
}

absl::StatusOr<JobHost> DecodeHost(std::string_view value) {
  v1::HostRecord record;
  HF_RETURN_IF_ERROR(Parse(value, kSmallRecordBytesMax, &record));
  HF_RETURN_IF_ERROR(CheckJobName(record.node()));
  if (record.epoch() == 0 || record.epoch() > kEpochMax) {
    return Bad(absl::StrCat("epoch ", record.epoch()));
  }
  return JobHost{record.node(), record.incarnation(), record.epoch()};
}

std::string EncodeEpoch(Epoch epoch) {
  v1::EpochRecord record;
  record.set_epoch(epoch);
  return record.SerializeAsString();
}

absl::StatusOr<Epoch> DecodeEpoch(std::string_view value) {
  v1::EpochRecord record;
  HF_RETURN_IF_ERROR(Parse(value, kSmallRecordBytesMax, &record));
  if (record.epoch() == 0 || record.epoch() > kEpochMax) {
    return Bad(absl::StrCat("epoch ", record.epoch()));
  }
  return record.epoch();
}

std::string EncodeState(const StoredState& state) {
  v1::AgreedState record;
  record.set_epoch(state.epoch);
  record.set_version(state.version);
  record.set_state(state.state);
  return record.SerializeAsString();
}

absl::StatusOr<StoredState> DecodeState(std::string_view value) {
  v1::AgreedState record;
  HF_RETURN_IF_ERROR(Parse(value, kAgreedStateBytesMax + kSmallRecordBytesMax, &record));
  if (record.epoch() == 0 || record.epoch() > kEpochMax || record.version() == 0 ||
      record.state().size() > kAgreedStateBytesMax) {
    return Bad("epoch, version or size out of range");
  }
  return StoredState{record.epoch(), record.version(), std::move(*record.mutable_state())};
}

std::string EncodeMembershipNote(const MembershipNoteData& note) {
  v1::MembershipNote record;
  record.set_node(note.node);
  for (const int64_t lease : note.leases) {
    record.add_leases(lease);
  }
  record.set_epoch(note.epoch);
  return EncodeFrame(FrameKind::kMembership, record.SerializeAsString());
}

absl::StatusOr<MembershipNoteData> DecodeMembershipNote(std::string_view bytes) {
  HF_ASSIGN_OR_RETURN(const std::string_view body, DecodeFrame(FrameKind::kMembership, bytes));
  v1::MembershipNote record;
  if (!record.ParseFromArray(body.data(), static_cast<int>(body.size())) ||
      static_cast<size_t>(record.leases_size()) > kNotedLeasesMax || record.epoch() > kEpochMax) {
    return absl::DataLossError("membership note: damaged");
  }
  return MembershipNoteData{
      record.node(), {record.leases().begin(), record.leases().end()}, record.epoch()};
}

}  // namespace holdfast
