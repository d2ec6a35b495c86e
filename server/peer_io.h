// How one field goes from a message of server/messages.h into a protobuf message, and back. Writer
// and reader have the same functions, so that peer_codec.cc says once, for both directions, which
// fields a message has and what they may be: `io.Within(HF_FIELD(rank), …)`. What is wrong is kept
// in status(), the first time; reading goes on with what is harmless.
//
// For peer_codec.cc alone. Not thread-safe.
#pragma once

#include <google/protobuf/repeated_field.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "holdfast/v1/peer.pb.h"
#include "server/peer_codec.h"

namespace holdfast::peer_internal {

// A field of the protobuf message.
template <typename Get, typename Set>
struct Field {
  std::string_view name;
  Get get;
  Set set;
};
template <typename Get, typename Set>
Field(std::string_view, Get, Set) -> Field<Get, Set>;

// The member of `m` and the field of `p` that belong together.
#define HF_FIELD_AS(member, field)                                                         \
  member, ::holdfast::peer_internal::Field {                                               \
#field, [&p] { return p.field(); }, [&p](const auto& value) { p.set_##field(value); }, \
  }
#define HF_FIELD(field) HF_FIELD_AS(m.field, field)

using Column64 = google::protobuf::RepeatedField<int64_t>;

// Numbers on the wire and here.
struct TierNumber {
  v1::Tier wire;
  TierKind tier;
};
inline constexpr TierNumber kTiers[] = {{v1::TIER_MEMORY, TierKind::kMemory},
                                        {v1::TIER_NVME, TierKind::kNvme},
                                        {v1::TIER_PEER, TierKind::kPeer},
                                        {v1::TIER_REMOTE, TierKind::kRemote}};
static_assert(std::size(kTiers) == kTierKinds);

// UTF-8 of at most kPeerTextBytesMax bytes.
std::string MendText(std::string_view text);
bool IsUtf8(std::string_view text);
// Before anything is parsed: InvalidArgument, if there are more parts than a message may have (each
// may take far more memory than it has bytes), if a text is not UTF-8, or the bytes are damaged.
absl::Status Prescan(std::string_view bytes);

// What both directions have.
class IoBase {
 public:
  IoBase(std::string_view message, const PeerHeader& header) : message_(message), header_(header) {}

  const absl::Status& status() const { return status_; }
  bool ok() const { return status_.ok(); }
  const PeerHeader& header() const { return header_; }
  void Require(bool holds, std::string_view field, std::string_view what) {
    if (!holds) {
      Fail(field, what);
    }
  }

 protected:
  void Fail(std::string_view field, std::string_view what);
  void CheckWithin(uint64_t value, std::string_view field, uint64_t min, uint64_t max);
  void CheckText(std::string_view text, std::string_view field);
  void CheckPath(std::string_view path, std::string_view field);
  void CheckLine(const std::vector<Descent>& line, std::string_view field);
  void CheckCopy(const SealedCopy& copy, std::string_view field);
  void CheckFileBytes(const DurableCopy& copy);

  const std::string message_;
  const PeerHeader& header_;
  absl::Status status_;
};

class Writer : public IoBase {
 public:
  static constexpr bool kWriting = true;

  Writer(std::string_view message, const PeerHeader& header, EventTime now)
      : IoBase(message, header), now_(now) {}

  template <typename T, typename F>
  void Any(const T& value, F field) {
    field.set(value);
  }
  template <typename T, typename F>
  void Within(const T& value, F field, uint64_t min, uint64_t max) {
    CheckWithin(value, field.name, min, max);
    field.set(value);
  }
  template <typename F>
  void Text(const std::string& text, F field) {
    field.set(MendText(text));
  }
  template <typename F>
  void Path(const std::string& path, F field) {
    CheckPath(path, field.name);
    field.set(path);
  }
  template <typename F>
  void Tier(TierKind tier, F field) {
    field.set(WireOf(tier, field.name));
  }
  template <typename T, typename Wire, size_t n, typename F>
  void Enum(T value, F field, const std::pair<T, Wire> (&names)[n]) {
    for (const auto& [here, wire] : names) {
      if (here == value) {
        return field.set(wire);
      }
    }
    Fail(field.name, "its value is unknown");
  }
  // (What this daemon does not know no other one needs to: UNSPECIFIED.)
  template <typename T, typename F>
  void ProtoEnum(T value, F field, bool (*known)(int)) {
    field.set(known(value) ? value : T{});
  }
  template <typename M>
  void Message(const M& value, M& p) {
    p = value;
  }
  template <typename T, typename F, typename Has>
  void Optional(const std::optional<T>& value, F field, Has) {
    if (value) {
      field.set(*value);
    }
  }
  template <typename F, typename Has>
  void Time(MonotonicTime time, F field, Has) {
    if (time != MonotonicTime{}) {
      field.set(AgeMs(time, field.name));
    }
  }
  void Process(const ProcessId& process, v1::Process& p);
  template <typename Has, typename P>
  void Status(const absl::Status& status, Has, P mutable_p) {
    if (!status.ok()) {
      PutStatus(status, *mutable_p());
    }
  }
  void FailureOf(const Failure& failure, v1::Failure& p);
  void Line(const std::vector<Descent>& line, v1::Line& p);

  // A column that says how many rows there are.
  template <typename Rows, typename Ref>
  void BaseColumn(const Rows& rows, size_t min, size_t max, Ref ref, Column64& column,
                  std::string_view name) {
    CheckWithin(rows.size(), name, min, max);
    uint64_t before = 0;
    for (const auto& row : rows) {
      const uint64_t value = static_cast<uint64_t>(ref(row));
      column.Add(static_cast<int64_t>(value - before));
      before = value;
    }
  }
  template <typename Rows, typename Ref>
  void Column(const Rows& rows, Ref ref, Column64& column, std::string_view name) {
    const bool zeros =
        std::all_of(rows.begin(), rows.end(), [&](const auto& row) { return ref(row) == 0; });
    if (!zeros) {
      BaseColumn(rows, 0, std::numeric_limits<uint64_t>::max(), ref, column, name);
    }
  }

  // Hashes of 16 bytes, one a row, one behind the other; left out where all are 0.
  template <typename Rows, typename Ref>
  void Hashes(const Rows& rows, Ref ref, std::string& column, std::string_view /*name*/) {
    if (std::any_of(rows.begin(), rows.end(),
                    [&](const auto& row) { return ref(row) != LayoutHash{}; })) {
      for (const auto& row : rows) {
        PutHash(ref(row), column);
      }
    }
  }
  template <typename Rows, typename Ref>
  void Likenesses(const Rows& rows, Ref ref, std::string& column) {
    if (std::any_of(rows.begin(), rows.end(),
                    [&](const auto& row) { return ref(row) != Likeness{}; })) {
      for (const auto& row : rows) {
        PutHash(ref(row).tensors, column);
        PutHash(ref(row).content, column);
      }
    }
  }

  void Copies(const std::vector<DurableCopy>& copies, v1::CopySet& p);
  void Shards(const std::vector<FoundShard>& shards, v1::CopySet& p);
  v1::Tier WireOf(TierKind tier, std::string_view field);

 private:
  static void PutHash(const LayoutHash& hash, std::string& column) {
    column.append(reinterpret_cast<const char*>(hash.data()), hash.size());
  }
  uint64_t AgeMs(MonotonicTime time, std::string_view field);
  void PutStatus(const absl::Status& status, v1::Failure& p);
  void Location(const std::string& location, v1::CopyRun& run);
  template <typename Row>
  void Runs(const std::vector<Row>& rows, v1::CopySet& p);

  const EventTime now_;
};

class Reader : public IoBase {
 public:
  static constexpr bool kWriting = false;

  Reader(std::string_view message, const PeerHeader& header, const PeerContext& context)
      : IoBase(message, header), context_(context) {}

  template <typename T, typename F>
  void Any(T& value, F field) {
    value = field.get();
  }
  template <typename T, typename F>
  void Within(T& value, F field, uint64_t min, uint64_t max) {
    CheckWithin(field.get(), field.name, min, max);
    value = field.get();
  }
  template <typename F>
  void Text(std::string& text, F field) {
    text = field.get();
    CheckText(text, field.name);
  }
  template <typename F>
  void Path(std::string& path, F field) {
    path = field.get();
    CheckPath(path, field.name);
  }
  template <typename F>
  void Tier(TierKind& tier, F field) {
    tier = TierOf(field.get(), field.name);
  }
  template <typename T, typename Wire, size_t n, typename F>
  void Enum(T& value, F field, const std::pair<T, Wire> (&names)[n]) {
    for (const auto& [here, wire] : names) {
      if (wire == field.get()) {
        value = here;
        return;
      }
    }
    Fail(field.name, "its value is unknown");
  }
  template <typename T, typename F>
  void ProtoEnum(T& value, F field, bool (*known)(int)) {
    Require(known(field.get()), field.name, "its value is unknown");
    value = field.get();
  }
  template <typename M>
  void Message(M& value, M& p) {
    value = std::move(p);
  }
  template <typename T, typename F, typename Has>
  void Optional(std::optional<T>& value, F field, Has has) {
    if (has()) {
      value = field.get();
    }
  }
  template <typename F, typename Has>
  void Time(MonotonicTime& time, F field, Has has) {
    if (has()) {
      time = TimeOf(field.get(), field.name);
    }
  }
  void Process(ProcessId& process, const v1::Process& p);
  template <typename Has, typename P>
  void Status(absl::Status& status, Has has, P mutable_p) {
    if (has()) {
      TakeStatus(*mutable_p(), status);
    }
  }
  void FailureOf(Failure& failure, const v1::Failure& p);
  void Line(std::vector<Descent>& line, const v1::Line& p);

  template <typename Rows, typename Ref>
  void BaseColumn(Rows& rows, size_t min, size_t max, Ref ref, const Column64& column,
                  std::string_view name) {
    CheckWithin(static_cast<uint64_t>(column.size()), name, min, max);
    if (ok()) {
      rows.resize(static_cast<size_t>(column.size()));
      TakeColumn(rows, ref, column, name);
    }
  }
  template <typename Rows, typename Ref>
  void Column(Rows& rows, Ref ref, const Column64& column, std::string_view name) {
    if (!column.empty()) {
      Require(static_cast<size_t>(column.size()) == rows.size(), name,
              "it has not as many entries as there are rows");
      TakeColumn(rows, ref, column, name);
    }
  }

  template <typename Rows, typename Ref>
  void Hashes(Rows& rows, Ref ref, const std::string& column, std::string_view name) {
    std::string_view rest = column;
    Require(rest.empty() || rest.size() == rows.size() * sizeof(LayoutHash), name,
            "it has not 16 bytes a row");
    for (auto& row : rows) {
      if (ok() && !rest.empty()) {
        TakeHash(rest, ref(row));
      }
    }
  }
  template <typename Rows, typename Ref>
  void Likenesses(Rows& rows, Ref ref, const std::string& column) {
    std::string_view rest = column;
    Require(rest.empty() || rest.size() == rows.size() * 2 * sizeof(LayoutHash), "likeness",
            "it has not 32 bytes a row");
    for (auto& row : rows) {
      if (ok() && !rest.empty()) {
        TakeHash(rest, ref(row).tensors);
        TakeHash(rest, ref(row).content);
      }
    }
  }

  void Copies(std::vector<DurableCopy>& copies, v1::CopySet& p);
  void Shards(std::vector<FoundShard>& shards, v1::CopySet& p);
  TierKind TierOf(int wire, std::string_view field);

 private:
  template <typename Rows, typename Ref>
  void TakeColumn(Rows& rows, Ref ref, const Column64& column, std::string_view name) {
    uint64_t value = 0;
    auto entry = column.begin();
    for (auto& row : rows) {
      if (!ok()) {
        return;
      }
      value += static_cast<uint64_t>(*entry++);
      using T = std::remove_reference_t<decltype(ref(row))>;
      if constexpr (!std::is_same_v<T, int64_t>) {
        CheckWithin(value, name, 0, std::numeric_limits<T>::max());
      }
      ref(row) = static_cast<T>(value);
    }
  }
  static void TakeHash(std::string_view& rest, LayoutHash& hash) {
    std::copy_n(rest.begin(), hash.size(), reinterpret_cast<char*>(hash.data()));
    rest.remove_prefix(hash.size());
  }
  MonotonicTime TimeOf(uint64_t age_ms, std::string_view field);
  void TakeStatus(const v1::Failure& p, absl::Status& status);
  template <typename Row>
  void Runs(std::vector<Row>& rows, v1::CopySet& p);

  const PeerContext& context_;
};

}  // namespace holdfast::peer_internal
