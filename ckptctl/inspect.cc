#include <nlohmann/json.hpp>
#include <ostream>
#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/digest.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/ask.h"
#include "ckptctl/commands.h"
#include "ckptctl/json.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"
#include "ckptctl/views.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

constexpr size_t kSlicesShown = 20;
constexpr size_t kDescentShown = 8;
constexpr size_t kNameColumnsMax = 120;  // in the table; --json has the whole name

std::string DigestText(uint64_t digest) {
  return absl::StrCat(absl::Hex(digest, absl::kZeroPad16));
}

std::string_view KindName(SliceKind kind) {
  switch (kind) {
    case SliceKind::kTensor:
      return "tensor";
    case SliceKind::kJson:
      return "json";
    case SliceKind::kOpaque:
      return "opaque";
  }
  return "?";
}

std::string NumbersText(const std::vector<uint64_t>& numbers) {
  return absl::StrCat("[", absl::StrJoin(numbers, ","), "]");
}

// Python's own notation for ranges, one per dimension: "[0:512,1024:2048]".
std::string PlaceText(const Slice& slice) {
  if (const auto* box = std::get_if<BoxPlace>(&slice.place)) {
    std::vector<std::string> ranges;
    for (size_t i = 0; i < box->offset.size() && i < box->shape.size(); ++i) {
      ranges.push_back(absl::StrCat(box->offset[i], ":", box->offset[i] + box->shape[i]));
    }
    return absl::StrCat("[", absl::StrJoin(ranges, ","), "]");
  }
  if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
    return absl::StrCat("flat ", flat->start, ":", flat->start + flat->length);
  }
  return "whole";
}

// The digest of a range's first block; none for a range without bytes.
std::optional<uint64_t> FirstDigest(const ShardRecord& record, const DigestedRange& range) {
  if (range.bytes == 0 || range.first_digest >= record.digests.size()) {
    return std::nullopt;
  }
  return record.digests[range.first_digest];
}

std::string DescentText(const ShardRecord& record) {
  std::string text = absl::StrCat("attempt ", record.id.attempt);
  const size_t shown = std::min(record.descent.size(), kDescentShown);
  for (size_t i = 0; i < shown; ++i) {
    const CheckpointId& parent = record.descent[i].parent;
    absl::StrAppend(&text, " <- ",
                    parent.attempt == 0
                        ? std::string("from scratch")
                        : absl::StrCat("attempt ", parent.attempt, " at step ", parent.step));
  }
  if (shown < record.descent.size()) {
    absl::StrAppend(&text, " <- … (", record.descent.size() - shown, " more: --json has them all)");
  }
  return text;
}

std::string ContentsText(const Layout& layout) {
  std::set<std::string_view> tensors;
  std::set<std::string_view> objects;
  for (const Slice& slice : layout.slices) {
    (slice.kind == SliceKind::kTensor ? tensors : objects).insert(slice.name);
  }
  return absl::StrCat(Count(layout.slices.size(), "slice", "slices"), " of ",
                      Count(tensors.size(), "tensor", "tensors"), " and ",
                      Count(objects.size(), "object", "objects"));
}

Table SliceTable(const InspectedShard& shard, size_t slices_max) {
  Table table({{"AT", Align::kRight},
               {"BYTES", Align::kRight},
               {"DTYPE", Align::kLeft},
               {"SHAPE", Align::kLeft},
               {"PLACE", Align::kLeft},
               {"FIRST DIGEST", Align::kLeft},
               {"NAME", Align::kLeft}});
  const std::vector<DigestedRange> ranges = DigestedRanges(shard.layout);
  for (size_t i = 0; i < shard.layout.slices.size() && i < slices_max; ++i) {
    const Slice& slice = shard.layout.slices[i];
    const std::optional<uint64_t> digest = FirstDigest(shard.record, ranges[i + 1]);
    const std::string dtype = slice.kind == SliceKind::kTensor ? std::string(DTypeName(slice.dtype))
                              : slice.kind == SliceKind::kOpaque
                                  ? absl::StrCat("opaque:", EscapeText(slice.codec))
                                  : "json";
    table.AddRow({absl::StrCat(slice.image_offset), absl::StrCat(slice.bytes), dtype,
                  NumbersText(slice.global_shape), PlaceText(slice),
                  digest ? DigestText(*digest) : "(empty)",
                  EscapeText(slice.name, kNameColumnsMax)});
  }
  return table;
}

nlohmann::ordered_json PlaceToJson(const Slice& slice) {
  if (const auto* box = std::get_if<BoxPlace>(&slice.place)) {
    return {{"box", {{"offset", box->offset}, {"shape", box->shape}}}};
  }
  if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
    return {{"flat", {{"start", flat->start}, {"length", flat->length}}}};
  }
  return "whole";
}

nlohmann::ordered_json ShardToJson(const InspectedShard& shard) {
  const ShardRecord& r = shard.record;
  const std::vector<DigestedRange> ranges = DigestedRanges(shard.layout);
  const auto digest_json = [&](const DigestedRange& range) -> nlohmann::ordered_json {
    const std::optional<uint64_t> digest = FirstDigest(r, range);
    return digest ? nlohmann::ordered_json(DigestText(*digest)) : nlohmann::ordered_json(nullptr);
  };
  nlohmann::ordered_json json = {{"job", r.job_name},
                                 {"job_uuid", r.id.job.ToString()},
                                 {"attempt", r.id.attempt},
                                 {"step", r.id.step},
                                 {"rank", r.id.rank},
                                 {"world_size", r.world_size},
                                 {"generation", r.generation},
                                 {"location", shard.location},
                                 {"sealed_unix_ms", r.sealed_unix_ms},
                                 {"image_bytes", r.image_bytes},
                                 {"header_bytes", r.header_bytes},
                                 {"layout_hash", ToHex(r.layout_hash)},
                                 {"digest_blocks", r.digests.size()},
                                 {"digest_block_bytes", kDigestBlockBytes},
                                 {"header_first_digest", digest_json(ranges[0])},
                                 {"descent", nlohmann::ordered_json::array()},
                                 {"slices", nlohmann::ordered_json::array()}};
  for (const Descent& d : r.descent) {
    json["descent"].push_back({{"attempt", d.attempt},
                               {"parent_attempt", d.parent.attempt},
                               {"parent_step", d.parent.step}});
  }
  for (size_t i = 0; i < shard.layout.slices.size(); ++i) {
    const Slice& slice = shard.layout.slices[i];
    json["slices"].push_back({{"name", slice.name},
                              {"kind", KindName(slice.kind)},
                              {"codec", slice.codec},
                              {"dtype", DTypeName(slice.dtype)},
                              {"global_shape", slice.global_shape},
                              {"place", PlaceToJson(slice)},
                              {"key", HeaderKey(slice, r.id.rank)},
                              {"image_offset", slice.image_offset},
                              {"bytes", slice.bytes},
                              {"first_digest", digest_json(ranges[i + 1])}});
  }
  return json;
}

// Nothing of what the daemon sent is believed before record and layout have been checked against
// themselves.
absl::StatusOr<InspectedShard> DecodeShard(const v1::InspectShardReply& reply) {
  InspectedShard shard;
  shard.location = reply.location();
  const std::string where = absl::StrCat("record of ", reply.location());
  absl::StatusOr<ShardRecord> record = DecodeRecord(reply.record());
  if (!record.ok()) {
    return absl::DataLossError(Message(Annotate(record.status(), where)));
  }
  shard.record = *std::move(record);
  absl::StatusOr<Layout> layout =
      DecodeLayout(shard.record.layout_bytes, shard.record.header_bytes, shard.record.image_bytes);
  if (!layout.ok()) {
    return absl::DataLossError(Message(Annotate(layout.status(), where)));
  }
  shard.layout = *std::move(layout);
  return shard;
}

}  // namespace

std::string RenderShard(const InspectedShard& shard, size_t slices_max, int64_t now_unix_ms) {
  const ShardRecord& r = shard.record;
  const std::string ago = FormatAgo(r.sealed_unix_ms, now_unix_ms);
  Table facts({{"", Align::kLeft}, {"", Align::kLeft}});
  facts.AddRow(
      {"sealed", absl::StrCat(FormatTime(r.sealed_unix_ms), ago.empty() ? "" : ", ", ago)});
  facts.AddRow(
      {"lies in", absl::StrCat(EscapeText(shard.location), ", generation ", r.generation)});
  facts.AddRow({"image", absl::StrCat(FormatBytes(r.image_bytes), " (", r.image_bytes,
                                      " bytes, of which ", r.header_bytes, " are header)")});
  facts.AddRow(
      {"layout", absl::StrCat(ContentsText(shard.layout), ", hash ", ToHex(r.layout_hash))});
  const std::optional<uint64_t> first = FirstDigest(r, DigestedRanges(shard.layout)[0]);
  facts.AddRow(
      {"digests", absl::StrCat("CRC-64/XZ of ", Count(r.digests.size(), "block", "blocks"),
                               ", the header's first ", first ? DigestText(*first) : "(none)")});
  facts.AddRow({"descent", DescentText(r)});
  facts.AddRow({"job uuid", r.id.job.ToString()});
  std::string out = absl::StrCat("job ", EscapeText(r.job_name), ", step ", r.id.step, " (attempt ",
                                 r.id.attempt, "), rank ", r.id.rank, " of ", r.world_size, "\n",
                                 facts.RenderWithoutTitles("  "), "\n",
                                 SliceTable(shard, slices_max).Render("  "));
  if (shard.layout.slices.size() > slices_max) {
    absl::StrAppend(&out, "  … and ", shard.layout.slices.size() - slices_max,
                    " more: --all-slices shows them\n");
  }
  return out;
}

ExitCode RunInspect(const Context& context, const InspectArguments& arguments) {
  v1::InspectShardRequest request;
  request.set_job(arguments.job);
  request.set_step(arguments.step.value_or(0));
  request.set_newest(!arguments.step.has_value());
  request.set_attempt(arguments.attempt);
  request.set_rank(arguments.rank);
  const auto reply = AskFor(context, &AdminClient::InspectShard, request);
  if (!reply.ok()) {
    return ReportError(context, reply.status());
  }
  const absl::StatusOr<InspectedShard> shard = DecodeShard(*reply);
  if (!shard.ok()) {
    return ReportError(context, shard.status());
  }
  if (context.json) {
    *context.out << DumpJson(ShardToJson(*shard)) << "\n";
  } else {
    *context.out << RenderShard(*shard, arguments.all_slices ? SIZE_MAX : kSlicesShown,
                                context.clock->UnixMillis());
  }
  return ExitCode::kOk;
}

}  // namespace holdfast
