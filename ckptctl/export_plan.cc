#include "ckptctl/export_plan.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/digest.h"
#include "base/status.h"
#include "base/units.h"

namespace holdfast {
namespace {

constexpr uint64_t kDataAlignment = 4096;
// Of one file's header, about: safetensors takes 100 MB, and a reader keeps it in memory.
constexpr uint64_t kHeaderBytes = uint64_t{32} << 20;
constexpr size_t kFilesMax = 99'999;  // of five digits
constexpr size_t kToldInError = 5;    // in an error
constexpr char kOursPrefix[] = "holdfast:";
constexpr char kMetadata[] = "__metadata__";

std::string Quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string Some(const std::vector<std::string>& texts, const char* between) {
  const size_t shown = std::min(texts.size(), kToldInError);
  std::string some =
      absl::StrJoin(texts.begin(), texts.begin() + static_cast<ptrdiff_t>(shown), between);
  return texts.size() == shown ? some
                               : absl::StrCat(some, between, "and ", texts.size() - shown, " more");
}

bool IsUnderAny(std::string_view name, const std::vector<std::string>& keys) {
  return std::any_of(keys.begin(), keys.end(),
                     [&](const std::string& key) { return IsUnder(name, key); });
}

// "0 to 3, 7".
std::string RanksText(const std::vector<uint32_t>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) {
      ++last;
    }
    absl::StrAppend(&text, text.empty() ? "" : ", ", ranks[i]);
    if (last > i) {
      absl::StrAppend(&text, " to ", ranks[last]);
    }
    i = last + 1;
  }
  return text;
}

class Planning {
 public:
  Planning(const ExportSource& source, const ExportOptions& options)
      : source_(source), items_(*source.items), options_(options) {}

  absl::StatusOr<ExportPlan> Make();

 private:
  bool IsTensor(size_t i) const { return items_[i].kind == SavedItem::Kind::kTensor; }
  absl::Status ChooseTensors();
  void ChooseObjects();
  void ChooseTied();
  absl::Status CheckNames() const;
  std::string NameOf(const std::string& saved) const;
  std::string OwnName(size_t item) const;
  absl::Status Divide();
  uint64_t HeaderBytesOf(const ExportEntry& entry) const;
  std::string HeaderOf(const ExportFile& file) const;
  void Finish();

  const ExportSource& source_;
  const std::vector<SavedItem>& items_;
  const ExportOptions& options_;
  std::vector<ExportEntry> entries_;
  ExportPlan plan_;
};

absl::StatusOr<ExportPlan> Planning::Make() {
  HF_RETURN_IF_ERROR(CheckKeys(items_, source_.tied, options_.only));
  HF_RETURN_IF_ERROR(ChooseTensors());
  ChooseObjects();
  ChooseTied();
  HF_RETURN_IF_ERROR(CheckNames());
  HF_RETURN_IF_ERROR(Divide());
  Finish();
  return std::move(plan_);
}

// Of several keys' tensors the names stay as they are: below their keys they may be the same.
std::string Planning::NameOf(const std::string& saved) const {
  if (options_.only.size() != 1 || saved.size() <= options_.only[0].size()) {
    return saved;
  }
  return saved.substr(options_.only[0].size() + 1);
}

// As the keys of images say whose something is (docs/formats.md, "Keys").
std::string Planning::OwnName(size_t item) const {
  const SavedItem& its = items_[item];
  const std::string kind = its.kind == SavedItem::Kind::kTensor ? "own"
                           : its.kind == SavedItem::Kind::kJson ? "json"
                                                                : "opaque:" + its.codec;
  const uint32_t rank = options_.rank.value_or(its.ranks.front());
  return absl::StrFormat("%s%07u:%s:%s", kOursPrefix, rank, kind, its.name);
}

absl::Status Planning::ChooseTensors() {
  std::vector<std::string> own;
  std::vector<std::string> problems;
  for (size_t i = 0; i < items_.size() && IsTensor(i); ++i) {
    const SavedItem& item = items_[i];
    if (!options_.only.empty() && !IsUnderAny(item.name, options_.only)) {
      continue;
    }
    if (!item.problem.empty()) {
      problems.push_back(item.problem);
    } else if (item.ranks.empty()) {
      entries_.push_back({i, NameOf(item.name)});
    } else if (options_.rank) {
      if (item.ranks.front() == *options_.rank) {
        entries_.push_back({i, NameOf(item.name)});
      }
    } else if (options_.only.empty()) {
      entries_.push_back({i, OwnName(i), /*ours=*/true});
    } else if (own.empty() || own.back() != item.name) {
      own.push_back(item.name);
    }
  }
  if (!problems.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("not all tensors can be had whole: ", Some(problems, "; "),
                     "; --only KEY leaves out what is not under that key"));
  }
  if (!own.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("ranks saved different values under the same names: ", Some(own, ", "),
                     "; say whose are wanted: --rank R"));
  }
  return absl::OkStatus();
}

// Each content once; of one rank those that it had.
void Planning::ChooseObjects() {
  if (!options_.only.empty()) {
    return;
  }
  for (size_t i = 0; i < items_.size(); ++i) {
    const std::vector<uint32_t>& ranks = items_[i].ranks;
    if (!IsTensor(i) &&
        (!options_.rank || std::binary_search(ranks.begin(), ranks.end(), *options_.rank))) {
      entries_.push_back({i, OwnName(i), /*ours=*/true});
    }
  }
}

// Further names of what is written anyway are left out; what is wanted under such a name alone, as
// what it is a name of is under another key, is written under it.
void Planning::ChooseTied() {
  std::map<std::string_view, size_t> entry_of;  // by the tensor's name in the state
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (IsTensor(entries_[i].item)) {
      entry_of.emplace(items_[entries_[i].item].name, i);
    }
  }
  std::map<std::string_view, size_t> item_of;
  for (size_t i = 0; i < items_.size() && IsTensor(i); ++i) {
    const bool good = items_[i].problem.empty() && items_[i].ranks.empty();
    if (good) {
      item_of.emplace(items_[i].name, i);
    }
  }
  std::set<std::string_view> seen;
  for (const TiedName& tied : source_.tied) {
    const bool wanted = options_.only.empty() || IsUnderAny(tied.name, options_.only);
    const auto item = item_of.find(tied.same_as);
    // (A name of its own in the state is no further name of another one.)
    if (!wanted || item == item_of.end() || item_of.count(tied.name) > 0 ||
        !seen.insert(tied.name).second) {
      continue;
    }
    const auto [entry, fresh] = entry_of.try_emplace(item->first, entries_.size());
    if (fresh) {
      entries_.push_back({item->second, NameOf(tied.name)});
    } else {
      entries_[entry->second].tied.push_back(NameOf(tied.name));
    }
  }
}

absl::Status Planning::CheckNames() const {
  if (entries_.empty()) {
    return absl::NotFoundError(
        absl::StrCat("nothing of what is wanted was saved by rank ", options_.rank.value_or(0)));
  }
  std::set<std::string_view> names;
  for (const ExportEntry& entry : entries_) {
    const bool bad = entry.name.empty() || entry.name == kMetadata ||
                     (!entry.ours && absl::StartsWith(entry.name, kOursPrefix));
    if (bad || !names.insert(entry.name).second) {
      return absl::FailedPreconditionError(
          absl::StrCat("tensor '", items_[entry.item].name, "' would be called '", entry.name,
                       "', ", bad ? "which no file may have" : "as another one is",
                       ": export it with its key, by naming another --only beside, or everything"));
    }
  }
  return absl::OkStatus();
}

// What an entry takes of a header, at most.
uint64_t Planning::HeaderBytesOf(const ExportEntry& entry) const {
  constexpr uint64_t kNumber = 21;
  constexpr uint64_t kEscaped = 6;  // of a byte of a string
  uint64_t bytes =
      100 + kEscaped * entry.name.size() + kNumber * (2 + items_[entry.item].shape.size());
  for (const std::string& tied : entry.tied) {
    bytes += 10 + kEscaped * (tied.size() + entry.name.size());
  }
  return IsTensor(entry.item)
             ? bytes
             : bytes + kEscaped * entry.name.size() + 2 * kNumber * items_[entry.item].ranks.size();
}

absl::Status Planning::Divide() {
  std::sort(entries_.begin(), entries_.end(), [&](const ExportEntry& a, const ExportEntry& b) {
    return std::tuple(!IsTensor(a.item), std::string_view(a.name)) <
           std::tuple(!IsTensor(b.item), std::string_view(b.name));
  });
  uint64_t header = 0;
  for (ExportEntry& entry : entries_) {
    const uint64_t bytes = items_[entry.item].bytes;
    const uint64_t of_header = HeaderBytesOf(entry);
    if (plan_.files.empty() || (!plan_.files.back().entries.empty() &&
                                (plan_.files.back().data_bytes + bytes > options_.file_bytes_max ||
                                 header + of_header > kHeaderBytes))) {
      plan_.files.emplace_back();
      header = 0;
    }
    header += of_header;
    ++(IsTensor(entry.item) ? plan_.tensors : plan_.objects);
    plan_.data_bytes += bytes;
    plan_.files.back().data_bytes += bytes;
    plan_.files.back().entries.push_back(std::move(entry));
  }
  if (plan_.files.size() > kFilesMax) {
    return absl::FailedPreconditionError(
        absl::StrCat("it would be ", plan_.files.size(), " files, and at most ", kFilesMax,
                     " have names: allow larger ones (--max-file-bytes)"));
  }
  return absl::OkStatus();
}

// {"__metadata__":{…},"name":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},…}, padded.
std::string Planning::HeaderOf(const ExportFile& file) const {
  nlohmann::json metadata;
  metadata["format"] = "pt";
  metadata["holdfast_job"] = source_.job;
  metadata["holdfast_step"] = absl::StrCat(source_.step);
  metadata["holdfast_attempt"] = absl::StrCat(source_.attempt);
  std::string json;
  uint64_t begin = 0;
  for (const ExportEntry& entry : file.entries) {
    const SavedItem& item = items_[entry.item];
    if (!IsTensor(entry.item)) {
      metadata[absl::StrCat("holdfast_ranks ", entry.name)] = RanksText(item.ranks);
    }
    for (const std::string& tied : entry.tied) {
      if (!metadata.contains(tied)) {
        metadata[tied] = entry.name;
      }
    }
    absl::StrAppend(&json, ",", Quoted(entry.name), ":{\"dtype\":\"", TypeName(item.type),
                    "\",\"shape\":[", absl::StrJoin(item.shape, ","), "],\"data_offsets\":[", begin,
                    ",", begin + item.bytes, "]}");
    begin += item.bytes;
  }
  json = absl::StrCat(
      "{\"", kMetadata,
      "\":", metadata.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), json, "}");
  json.resize(RoundUp(json.size() + sizeof(uint64_t), kDataAlignment) - sizeof(uint64_t), ' ');
  std::string header;
  for (size_t i = 0; i < sizeof(uint64_t); ++i) {
    header.push_back(static_cast<char>(json.size() >> (8 * i)));
  }
  return header + json;
}

void Planning::Finish() {
  const size_t count = plan_.files.size();
  nlohmann::json index;
  index["metadata"]["total_size"] = plan_.data_bytes;
  index["weight_map"] = nlohmann::json::object();
  uint64_t digest = Crc64(&source_.content, sizeof(source_.content));
  for (size_t i = 0; i < count; ++i) {
    ExportFile& file = plan_.files[i];
    file.name = count == 1 ? "model.safetensors"
                           : absl::StrFormat("model-%05d-of-%05d.safetensors", i + 1, count);
    for (const ExportEntry& entry : file.entries) {
      index["weight_map"][entry.name] = file.name;
    }
    // Each element lies where its size wants it, as larger ones lie before.
    std::stable_sort(file.entries.begin(), file.entries.end(),
                     [&](const ExportEntry& a, const ExportEntry& b) {
                       return TypeBytes(items_[a.item].type) > TypeBytes(items_[b.item].type);
                     });
    file.header = HeaderOf(file);
    plan_.bytes += file.bytes();
    digest = Crc64(file.name.data(), file.name.size(), digest);
    digest = Crc64(file.header.data(), file.header.size(), digest);
    for (const ExportEntry& entry : file.entries) {
      for (const std::string& tied : entry.tied) {
        plan_.left_out.push_back({tied, entry.name});
      }
    }
  }
  plan_.digest = digest;
  if (count > 1) {
    plan_.index = index.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  }
}

}  // namespace

bool IsUnder(std::string_view name, std::string_view key) {
  return name.substr(0, key.size()) == key &&
         (name.size() == key.size() || name[key.size()] == '.');
}

absl::Status CheckKeys(const std::vector<SavedItem>& items, const std::vector<TiedName>& tied,
                       const std::vector<std::string>& keys) {
  for (const std::string& key : keys) {
    const bool any =
        std::any_of(items.begin(), items.end(),
                    [&](const SavedItem& item) {
                      return item.kind == SavedItem::Kind::kTensor && IsUnder(item.name, key);
                    }) ||
        std::any_of(tied.begin(), tied.end(),
                    [&](const TiedName& name) { return IsUnder(name.name, key); });
    if (any) {
      continue;
    }
    std::set<std::string> there;
    for (const SavedItem& item : items) {
      if (item.kind == SavedItem::Kind::kTensor) {
        there.insert(item.name.substr(0, item.name.find('.')));
      }
    }
    return absl::NotFoundError(
        absl::StrCat("no tensor was saved under '", key, "'; there is ",
                     there.empty() ? "none" : Some({there.begin(), there.end()}, ", ")));
  }
  return absl::OkStatus();
}

absl::StatusOr<ExportPlan> PlanExport(const ExportSource& source, const ExportOptions& options) {
  return Planning(source, options).Make();
}

}  // namespace holdfast
