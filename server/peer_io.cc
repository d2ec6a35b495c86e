#include "server/peer_io.h"

#include <google/protobuf/descriptor.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/image/layout_rules.h"
#include "tiers/image/wire.h"

namespace holdfast::peer_internal {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using image_internal::WireField;
using image_internal::WireReader;
using image_internal::WireType;

constexpr int kStatusCodeMax = static_cast<int>(absl::StatusCode::kUnauthenticated);
constexpr uint64_t kAgeMsMax = kPeerAgeMax / std::chrono::milliseconds(1);
constexpr int64_t kNsPerMs = 1'000'000;

// Length-delimited values that become objects of their own. (Texts are checked here, since protobuf
// logs each that is not UTF-8, and does not say which.)
absl::Status CountParts(const Descriptor* type, std::string_view bytes, size_t& parts) {
  WireReader reader(type->name(), bytes);
  for (WireField wire; reader.Next(wire);) {
    const FieldDescriptor* field = type->FindFieldByNumber(static_cast<int>(wire.number));
    const bool message = field != nullptr && field->type() == FieldDescriptor::TYPE_MESSAGE;
    const bool list_of_strings = field != nullptr && field->is_repeated() && !field->is_packable();
    if (field == nullptr || message || list_of_strings) {
      if (++parts > kPeerPartsMax) {
        return absl::InvalidArgumentError(
            absl::StrCat("peer message: it has more than ", kPeerPartsMax, " parts"));
      }
    }
    if (field != nullptr && field->type() == FieldDescriptor::TYPE_STRING &&
        wire.type == WireType::kBytes && !IsUtf8(wire.bytes)) {
      return absl::InvalidArgumentError(
          absl::StrCat("peer message ", type->name(), ": ", field->name(), ": it is not UTF-8"));
    }
    if (message && wire.type == WireType::kBytes) {
      HF_RETURN_IF_ERROR(CountParts(field->message_type(), wire.bytes, parts));
    }
  }
  return reader.status();
}

// Of a memory copy or a durable one.
SealedCopy& CopyOf(DurableCopy& row) {
  return row.copy;
}
SealedCopy& CopyOf(FoundShard& row) {
  return row.copy;
}
const SealedCopy& CopyOf(const DurableCopy& row) {
  return row.copy;
}
const SealedCopy& CopyOf(const FoundShard& row) {
  return row.copy;
}

// The columns that both kinds have but for the rank and the layout's hash; for both directions.
template <typename Io, typename Rows, typename Run>
void CopyColumns(Io& io, Rows& rows, Run& run) {
  io.Column(
      rows, [](auto& row) -> auto& { return CopyOf(row).generation; }, *run.mutable_generation(),
      "generation");
  io.Column(
      rows, [](auto& row) -> auto& { return CopyOf(row).image_bytes; }, *run.mutable_image_bytes(),
      "image_bytes");
  io.Column(
      rows, [](auto& row) -> auto& { return CopyOf(row).sealed_unix_ms; },
      *run.mutable_sealed_unix_ms(), "sealed_unix_ms");
  io.Likenesses(
      rows, [](auto& row) -> auto& { return CopyOf(row).likeness; }, *run.mutable_likeness());
}

template <typename Io, typename Rows, typename Run>
void DurableColumns(Io& io, Rows& rows, Run& run) {
  io.Column(
      rows, [](auto& row) -> auto& { return row.record_bytes; }, *run.mutable_record_bytes(),
      "record_bytes");
  io.Column(
      rows, [](auto& row) -> auto& { return row.from_manifest; }, *run.mutable_from_manifest(),
      "from_manifest");
  io.Column(
      rows, [](auto& row) -> auto& { return row.file_bytes; }, *run.mutable_file_bytes(),
      "file_bytes");
  io.Hashes(
      rows, [](auto& row) -> auto& { return row.plan; }, *run.mutable_plan(), "plan");
}

}  // namespace

std::string MendText(std::string_view text) {
  std::string mended(text);
  if (!IsUtf8(mended)) {
    std::replace_if(
        mended.begin(), mended.end(), [](char c) { return static_cast<unsigned char>(c) >= 0x80; },
        '?');
  }
  if (mended.size() > kPeerTextBytesMax) {
    size_t end = kPeerTextBytesMax;
    while (end > 0 && (static_cast<unsigned char>(mended[end]) & 0xC0) == 0x80) {
      --end;  // not in the middle of a character
    }
    mended.resize(end);
  }
  return mended;
}

bool IsUtf8(std::string_view text) {
  return image_internal::IsValidUtf8(text);
}

absl::Status Prescan(std::string_view bytes) {
  size_t parts = 0;
  return CountParts(v1::PeerMessage::descriptor(), bytes, parts);
}

// ---- What both directions check ----

void IoBase::Fail(std::string_view field, std::string_view what) {
  if (status_.ok()) {
    status_ = absl::InvalidArgumentError(
        absl::StrCat("peer message ", message_, ": ", ToAbsl(field), ": ", ToAbsl(what)));
  }
}

void IoBase::CheckWithin(uint64_t value, std::string_view field, uint64_t min, uint64_t max) {
  if (value < min || value > max) {
    Fail(field, absl::StrCat(value, " is not within ", min, " to ", max));
  }
}

void IoBase::CheckText(std::string_view text, std::string_view field) {
  if (text.size() > kPeerTextBytesMax) {
    Fail(field, absl::StrCat("it has ", text.size(), " bytes, at most ", kPeerTextBytesMax,
                             " are allowed"));
  }
}

void IoBase::CheckPath(std::string_view path, std::string_view field) {
  if (path.size() > kPeerPathBytesMax) {
    Fail(field, absl::StrCat("it has ", path.size(), " bytes, at most ", kPeerPathBytesMax,
                             " are allowed"));
  }
  Require(IsUtf8(path), field, "it is not UTF-8");
}

// Every attempt comes from an older one, and the list follows the parents without a gap.
void IoBase::CheckLine(const std::vector<Descent>& line, std::string_view field) {
  if (line.size() > kDescentMax) {
    return Fail(field, absl::StrCat("it has more than ", kDescentMax, " attempts"));
  }
  for (size_t i = 0; i < line.size(); ++i) {
    const Descent& d = line[i];
    if (d.attempt == 0 || d.parent.attempt >= d.attempt ||
        (i > 0 && line[i - 1].parent.attempt != d.attempt)) {
      return Fail(field, absl::StrCat("attempt ", d.attempt, " from attempt ", d.parent.attempt,
                                      " is not where it belongs"));
    }
  }
}

void IoBase::CheckCopy(const SealedCopy& copy, std::string_view field) {
  if (copy.id.attempt == 0 || copy.world_size > kWorldSizeMax || copy.id.rank >= copy.world_size ||
      copy.image_bytes > kImageBytesMax ||
      (!copy.descent.empty() && copy.descent.front().attempt != copy.id.attempt)) {
    Fail(field, absl::StrCat("the copy of attempt ", copy.id.attempt, " step ", copy.id.step,
                             " rank ", copy.id.rank, " contradicts itself (world size ",
                             copy.world_size, ", ", copy.image_bytes, " bytes)"));
  }
  if (copy.id.job != header_.job || copy.job_name != header_.job_name) {
    Fail(field, "a copy of another job than the message is about");
  }
  Require(!header_.job.IsZero(), field, "a copy of no job");
}

void IoBase::CheckFileBytes(const DurableCopy& copy) {
  Require(copy.file_bytes == 0 || copy.file_bytes < copy.copy.image_bytes, "file_bytes",
          "a file that leaves slices out is shorter than the image");
  Require(copy.file_bytes != 0 || copy.plan == LayoutHash{}, "plan",
          "of a file that leaves nothing out");
}

// ---- Out ----

v1::Tier Writer::WireOf(TierKind tier, std::string_view field) {
  for (const TierNumber& t : kTiers) {
    if (t.tier == tier) {
      return t.wire;
    }
  }
  Fail(field, "its value is unknown");
  return v1::TIER_UNSPECIFIED;
}

void Writer::Process(const ProcessId& process, v1::Process& p) {
  Require(process.node == kHere, "process", "it is not of this node");
  CheckWithin(static_cast<uint64_t>(int64_t{process.pid}), "process", 0, INT32_MAX);
  p.set_pid(process.pid);
  p.set_start_ticks(process.start_ticks);
}

void Writer::PutStatus(const absl::Status& status, v1::Failure& p) {
  p.set_code(static_cast<int>(status.code()));
  p.set_message(MendText(FromAbsl(status.message())));
}

void Writer::FailureOf(const Failure& failure, v1::Failure& p) {
  const int code = static_cast<int>(failure.code);
  Require(code >= 1 && code <= kStatusCodeMax, "failure.code", "it is unknown");
  Require(v1::Failure::Reason_IsValid(failure.reason), "failure.reason", "it is unknown");
  p.set_code(code);
  p.set_reason(failure.reason);
  p.set_message(MendText(failure.message));
}

void Writer::Line(const std::vector<Descent>& line, v1::Line& p) {
  CheckLine(line, "descent");
  BaseColumn(
      line, 0, kDescentMax, [](const Descent& d) { return d.attempt; }, *p.mutable_attempt(),
      "descent");
  Column(
      line, [](const Descent& d) { return d.parent.attempt; }, *p.mutable_parent_attempt(),
      "descent");
  Column(
      line, [](const Descent& d) { return d.parent.step; }, *p.mutable_parent_step(), "descent");
}

// Rounded up, so that it is never told as later than it was.
uint64_t Writer::AgeMs(MonotonicTime time, std::string_view field) {
  if (time >= now_.now) {
    return 0;
  }
  const uint64_t ns = static_cast<uint64_t>(now_.now.ns) - static_cast<uint64_t>(time.ns);
  const uint64_t ms = ns / kNsPerMs + (ns % kNsPerMs != 0 ? 1 : 0);
  CheckWithin(ms, field, 0, kAgeMsMax);
  return ms;
}

void Writer::Location(const std::string& location, v1::CopyRun& run) {
  CheckPath(location, "location");
  run.mutable_locations()->append(location);
}

template <typename Row>
void Writer::Runs(const std::vector<Row>& rows, v1::CopySet& p) {
  CheckWithin(rows.size(), "copies", 0, kPeerCopiesMax);
  std::map<std::string, uint32_t> lines;  // their bytes, and their places
  size_t descents = 0;
  for (size_t first = 0; first < rows.size() && ok();) {
    // 1. How far the run goes.
    const SealedCopy& copy = CopyOf(rows[first]);
    size_t end = first + 1;
    while (end < rows.size() && CopyOf(rows[end]).id.checkpoint() == copy.id.checkpoint() &&
           CopyOf(rows[end]).world_size == copy.world_size &&
           CopyOf(rows[end]).descent == copy.descent) {
      ++end;
    }
    const std::vector<Row> run_rows(rows.begin() + static_cast<std::ptrdiff_t>(first),
                                    rows.begin() + static_cast<std::ptrdiff_t>(end));
    descents += copy.descent.size() * run_rows.size();
    CheckWithin(descents, "descent", 0, kPeerDescentsMax);
    first = end;

    // 2. What its copies have in common.
    v1::CopyRun& run = *p.add_runs();
    run.set_attempt(copy.id.attempt);
    run.set_step(copy.id.step);
    run.set_world_size(copy.world_size);
    if (!copy.descent.empty()) {
      v1::Line line;
      Line(copy.descent, line);
      const auto [known, fresh] = lines.try_emplace(line.SerializeAsString(), lines.size() + 1);
      if (fresh) {
        *p.add_lines() = std::move(line);
      }
      run.set_line(known->second);
    }

    // 3. The columns.
    bool hashes = false;
    for (const Row& row : run_rows) {
      CheckCopy(CopyOf(row), "copies");
      hashes = hashes || CopyOf(row).layout_hash != LayoutHash{};
    }
    BaseColumn(
        run_rows, 1, kPeerCopiesMax, [](const Row& row) { return CopyOf(row).id.rank; },
        *run.mutable_rank(), "rank");
    CopyColumns(*this, run_rows, run);
    for (const Row& row : run_rows) {
      const LayoutHash& hash = CopyOf(row).layout_hash;
      if (hashes) {
        run.mutable_layout_hash()->append(reinterpret_cast<const char*>(hash.data()), hash.size());
      }
    }
    if constexpr (std::is_same_v<Row, DurableCopy>) {
      DurableColumns(*this, run_rows, run);
      const bool crcs = std::any_of(run_rows.begin(), run_rows.end(),
                                    [](const Row& row) { return row.record_crc != 0; });
      for (const Row& row : run_rows) {
        CheckWithin(row.record_bytes, "record_bytes", 0, kRecordBytesMax);
        CheckFileBytes(row);
        if (crcs) {
          run.add_record_crc(row.record_crc);
        }
        Location(row.location, run);
      }
      Column(
          run_rows, [](const Row& row) { return row.location.size(); },
          *run.mutable_location_bytes(), "location");
    } else {
      for (const Row& row : run_rows) {
        if (row.writer) {
          v1::Process checked;
          Process(*row.writer, checked);
        }
      }
      Column(
          run_rows,
          [](const Row& row) { return row.writer ? uint64_t(row.writer->pid) + 1 : uint64_t{0}; },
          *run.mutable_writer(), "writer");
      Column(
          run_rows, [](const Row& row) { return row.writer ? row.writer->start_ticks : 0; },
          *run.mutable_writer_start_ticks(), "writer_start_ticks");
      Column(
          run_rows, [](const Row& row) { return row.replica ? 1 : 0; }, *run.mutable_replica(),
          "replica");
    }
  }
}

void Writer::Copies(const std::vector<DurableCopy>& copies, v1::CopySet& p) {
  Runs(copies, p);
}
void Writer::Shards(const std::vector<FoundShard>& shards, v1::CopySet& p) {
  Runs(shards, p);
}

// ---- In ----

TierKind Reader::TierOf(int wire, std::string_view field) {
  for (const TierNumber& t : kTiers) {
    if (t.wire == wire) {
      return t.tier;
    }
  }
  Fail(field, absl::StrCat("tier ", wire, " is unknown"));
  return TierKind::kMemory;
}

void Reader::Process(ProcessId& process, const v1::Process& p) {
  CheckWithin(static_cast<uint64_t>(int64_t{p.pid()}), "process", 0, INT32_MAX);
  process = {p.pid(), p.start_ticks(), context_.from};
}

void Reader::TakeStatus(const v1::Failure& p, absl::Status& status) {
  Require(p.code() >= 1 && p.code() <= kStatusCodeMax, "status", "its code is unknown");
  Require(p.reason() == v1::Failure::REASON_UNSPECIFIED, "status", "it has a reason");
  CheckText(p.message(), "status");
  if (ok()) {
    status = absl::Status(static_cast<absl::StatusCode>(p.code()), p.message());
  }
}

void Reader::FailureOf(Failure& failure, const v1::Failure& p) {
  Require(p.code() >= 1 && p.code() <= kStatusCodeMax, "failure.code", "it is unknown");
  Require(v1::Failure::Reason_IsValid(p.reason()), "failure.reason", "it is unknown");
  CheckText(p.message(), "failure.message");
  if (ok()) {
    failure = {static_cast<absl::StatusCode>(p.code()), p.reason(), p.message()};
  }
}

void Reader::Line(std::vector<Descent>& line, const v1::Line& p) {
  BaseColumn(
      line, 0, kDescentMax, [](Descent & d) -> auto& { return d.attempt; }, p.attempt(), "descent");
  Column(
      line, [](Descent & d) -> auto& { return d.parent.attempt; }, p.parent_attempt(), "descent");
  Column(
      line, [](Descent & d) -> auto& { return d.parent.step; }, p.parent_step(), "descent");
  if (ok()) {
    CheckLine(line, "descent");
  }
}

MonotonicTime Reader::TimeOf(uint64_t age_ms, std::string_view field) {
  CheckWithin(age_ms, field, 0, kAgeMsMax);
  if (!ok()) {
    return {};
  }
  const MonotonicTime time{context_.now.now.ns - static_cast<int64_t>(age_ms) * kNsPerMs -
                           context_.slack.count()};
  return time == MonotonicTime{} ? MonotonicTime{-1} : time;  // 0 says that it is not set
}

template <typename Row>
void Reader::Runs(std::vector<Row>& rows, v1::CopySet& p) {
  std::vector<std::vector<Descent>> lines(static_cast<size_t>(p.lines_size()));
  size_t descents = 0;
  for (size_t i = 0; i < lines.size() && ok(); ++i) {
    Line(lines[i], p.lines(static_cast<int>(i)));
    descents += lines[i].size();
    CheckWithin(descents, "lines", 0, kPeerDescentsMax);
  }
  descents = 0;
  for (v1::CopyRun& run : *p.mutable_runs()) {
    if (!ok()) {
      return;
    }
    // 1. How much it is.
    const size_t count = static_cast<size_t>(run.rank_size());
    CheckWithin(count, "rank", 1, kPeerCopiesMax - rows.size());
    CheckWithin(run.line(), "line", 0, lines.size());
    if (!ok()) {
      return;
    }
    const std::vector<Descent> none;
    const std::vector<Descent>& line = run.line() == 0 ? none : lines[run.line() - 1];
    descents += line.size() * count;
    CheckWithin(descents, "descent", 0, kPeerDescentsMax);
    Require(run.layout_hash().empty() || run.layout_hash().size() == count * sizeof(LayoutHash),
            "layout_hash", "it has not 16 bytes a copy");
    if (!ok()) {
      return;
    }

    // 2. The columns.
    std::vector<Row> run_rows;
    BaseColumn(
        run_rows, 1, kPeerCopiesMax, [](Row & row) -> auto& { return CopyOf(row).id.rank; },
        run.rank(), "rank");
    CopyColumns(*this, run_rows, run);
    if constexpr (std::is_same_v<Row, DurableCopy>) {
      DurableColumns(*this, run_rows, run);
    }
    if (!ok()) {
      return;
    }
    if constexpr (std::is_same_v<Row, DurableCopy>) {
      Require(run.writer().empty() && run.writer_start_ticks().empty() && run.replica().empty(),
              "writer", "a durable copy has none");
      Require(run.record_crc().empty() || static_cast<size_t>(run.record_crc_size()) == count,
              "record_crc", "it has not as many entries as there are rows");
      std::vector<uint64_t> lengths(count);
      Column(
          lengths, [](uint64_t & length) -> auto& { return length; }, run.location_bytes(),
          "location_bytes");
      std::string_view locations = run.locations();
      for (size_t i = 0; i < count && ok(); ++i) {
        CheckWithin(run_rows[i].record_bytes, "record_bytes", 0, kRecordBytesMax);
        CheckFileBytes(run_rows[i]);
        CheckWithin(lengths[i], "location_bytes", 0, std::min(kPeerPathBytesMax, locations.size()));
        if (ok()) {
          run_rows[i].location = locations.substr(0, lengths[i]);
          locations.remove_prefix(lengths[i]);
          CheckPath(run_rows[i].location, "location");
          run_rows[i].record_crc =
              run.record_crc().empty() ? 0 : run.record_crc(static_cast<int>(i));
        }
      }
      Require(locations.empty(), "locations", "it has more bytes than its copies");
    } else {
      Require(run.record_bytes().empty() && run.record_crc().empty() &&
                  run.from_manifest().empty() && run.location_bytes().empty() &&
                  run.locations().empty() && run.file_bytes().empty() && run.plan().empty(),
              "record_bytes", "a copy in memory has none");
      std::vector<uint64_t> pids(count);
      std::vector<uint64_t> ticks(count);
      Column(
          pids, [](uint64_t & pid) -> auto& { return pid; }, run.writer(), "writer");
      Column(
          ticks, [](uint64_t & tick) -> auto& { return tick; }, run.writer_start_ticks(),
          "writer_start_ticks");
      std::vector<uint64_t> replicas(count);
      Column(
          replicas, [](uint64_t & replica) -> auto& { return replica; }, run.replica(), "replica");
      for (size_t i = 0; i < count && ok(); ++i) {
        CheckWithin(pids[i], "writer", 0, uint64_t{INT32_MAX} + 1);
        Require(pids[i] != 0 || ticks[i] == 0, "writer_start_ticks", "of nobody");
        if (pids[i] != 0) {
          run_rows[i].writer = {static_cast<int32_t>(pids[i] - 1), ticks[i], context_.from};
        }
        CheckWithin(replicas[i], "replica", 0, 1);
        run_rows[i].replica = replicas[i] == 1;
      }
    }

    // 3. What its copies have in common.
    for (size_t i = 0; i < count && ok(); ++i) {
      SealedCopy& copy = CopyOf(run_rows[i]);
      copy.id = {header_.job, run.attempt(), run.step(), copy.id.rank};
      copy.job_name = header_.job_name;
      copy.world_size = run.world_size();
      copy.descent = line;
      if (!run.layout_hash().empty()) {
        std::memcpy(copy.layout_hash.data(), run.layout_hash().data() + i * sizeof(LayoutHash),
                    sizeof(LayoutHash));
      }
      CheckCopy(copy, "copies");
    }
    std::move(run_rows.begin(), run_rows.end(), std::back_inserter(rows));
  }
}

void Reader::Copies(std::vector<DurableCopy>& copies, v1::CopySet& p) {
  Runs(copies, p);
}
void Reader::Shards(std::vector<FoundShard>& shards, v1::CopySet& p) {
  Runs(shards, p);
}

}  // namespace holdfast::peer_internal
