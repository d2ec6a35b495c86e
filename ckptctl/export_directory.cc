#include "ckptctl/export_directory.h"

#include <sys/stat.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/digest.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "base/sync_point.h"

namespace holdfast {
namespace {

constexpr char kPartSuffix[] = ".part";
constexpr char kTemporarySuffix[] = ".tmp";
constexpr uint64_t kExportStateBytesMax = uint64_t{64} << 20;
constexpr size_t kReadBytes = size_t{4} << 20;
constexpr size_t kOthersNamed = 3;
constexpr int kStateVersion = 1;

// What other programs make: Env's files are their owner's alone.
uint32_t FileMode() {
  const mode_t mask = ::umask(0);
  ::umask(mask);
  return 0666 & ~static_cast<uint32_t>(mask);
}

std::string HexDigest(uint64_t digest) {
  return absl::StrFormat("%016x", digest);
}

std::optional<uint64_t> ParseHex(const nlohmann::json& json) {
  uint64_t value = 0;
  return json.is_string() && absl::SimpleHexAtoi(json.get<std::string>(), &value)
             ? std::optional(value)
             : std::nullopt;
}

// Of a number or text that is there; else nothing.
template <typename T>
std::optional<T> Field(const nlohmann::json& json, const char* name) {
  if (!json.is_object() || !json.contains(name)) {
    return std::nullopt;
  }
  const nlohmann::json& field = json[name];
  const bool fits = std::is_same_v<T, std::string> ? field.is_string() : field.is_number_unsigned();
  return fits ? std::optional(field.get<T>()) : std::nullopt;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ExportDirectory>> ExportDirectory::Open(Env& env,
                                                                       const std::string& path,
                                                                       const ExportPlan& plan,
                                                                       const ExportIdentity& of) {
  std::unique_ptr<ExportDirectory> directory(new ExportDirectory(env, path, plan, of));
  HF_RETURN_IF_ERROR(env.CreateDirectories(path, 0777));
  // Looked at before anything is written there, and again when nobody else writes.
  HF_RETURN_IF_ERROR(directory->CheckNames());
  HF_ASSIGN_OR_RETURN(directory->lock_, env.Lock(directory->Path(kExportLockName)));
  HF_RETURN_IF_ERROR(directory->CheckNames());
  HF_RETURN_IF_ERROR(directory->ReadState());
  if (!directory->has_state_) {
    HF_RETURN_IF_ERROR(directory->WriteState());
  }
  HF_SYNC_POINT("ckptctl.export.begun");
  return directory;
}

ExportDirectory::~ExportDirectory() {
  GiveUp();
  if (lock_ != nullptr) {
    env_.Unlink(Path(kExportLockName)).IgnoreError();
  }
}

absl::Status ExportDirectory::CheckNames() {
  std::set<std::string> ours = {kExportStateName, kExportLockName, kExportIndexName,
                                absl::StrCat(kExportStateName, kTemporarySuffix),
                                absl::StrCat(kExportIndexName, kTemporarySuffix)};
  HF_ASSIGN_OR_RETURN(const std::vector<std::string> names, env_.List(path_));
  const bool has_state = std::binary_search(names.begin(), names.end(), kExportStateName);
  if (has_state) {
    for (const ExportFile& file : plan_.files) {
      ours.insert(file.name);
      ours.insert(file.name + kPartSuffix);
    }
    // Whose files these are the state says, also where they are others than ours.
    HF_RETURN_IF_ERROR(ReadState());
  } else {
    ours = {kExportLockName, absl::StrCat(kExportStateName, kTemporarySuffix)};
  }
  std::vector<std::string> others;
  for (const std::string& name : names) {
    if (ours.count(name) == 0) {
      others.push_back(name);
    }
  }
  if (others.empty()) {
    return absl::OkStatus();
  }
  const size_t shown = std::min(others.size(), kOthersNamed);
  return absl::FailedPreconditionError(absl::StrCat(
      "'", path_, "' has something else in it (",
      absl::StrJoin(others.begin(), others.begin() + static_cast<ptrdiff_t>(shown), ", "),
      others.size() > shown ? absl::StrCat(" and ", others.size() - shown, " more") : "",
      "): name a directory that is empty or not there yet, or take that out of it"));
}

absl::Status ExportDirectory::ReadState() {
  OpenOptions options;
  options.no_symlink = true;
  const absl::StatusOr<std::string> text =
      ReadFile(env_, Path(kExportStateName), kExportStateBytesMax, options);
  if (absl::IsNotFound(text.status())) {
    return absl::OkStatus();
  }
  HF_RETURN_IF_ERROR(text.status());
  has_state_ = true;
  return ParseState(*text);
}

// Names in it are compared with those of the plan, and never used.
absl::Status ExportDirectory::ParseState(const std::string& text) {
  const nlohmann::json state = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto version = Field<uint64_t>(state, "holdfast_export");
  const auto job = Field<std::string>(state, "job");
  const auto step = Field<uint64_t>(state, "step");
  const auto attempt = Field<uint64_t>(state, "attempt");
  const std::optional<uint64_t> plan =
      state.is_object() && state.contains("plan") ? ParseHex(state["plan"]) : std::nullopt;
  const std::string way_out =
      absl::StrCat("; name another directory, or remove '", path_, "' with all that is in it");
  if (version && *version > kStateVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", Path(kExportStateName), "' is of a newer ckptctl", way_out));
  }
  if (!version || !job || !step || !attempt || !plan) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", Path(kExportStateName), "' is damaged", way_out));
  }
  if (*job != of_.job || *step != of_.step || *attempt != of_.attempt) {
    return absl::FailedPreconditionError(absl::StrCat("'", path_, "' has an export of step ", *step,
                                                      " (attempt ", *attempt, ") of job ", *job,
                                                      way_out));
  }
  if (*plan != plan_.digest) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", path_,
                     "' has an export of that step with other options, or of other content "
                     "(the job was made anew)",
                     way_out));
  }
  done_.clear();
  const nlohmann::json files = state.contains("files") ? state["files"] : nlohmann::json::array();
  for (const nlohmann::json& file : files) {
    const auto name = Field<std::string>(file, "name");
    const auto bytes = Field<uint64_t>(file, "bytes");
    const std::optional<uint64_t> digest =
        file.is_object() && file.contains("digest") ? ParseHex(file["digest"]) : std::nullopt;
    if (name && bytes && digest) {
      done_[*name] = {*bytes, *digest};
    }
  }
  return absl::OkStatus();
}

absl::Status ExportDirectory::WriteState() {
  nlohmann::ordered_json state;
  state["holdfast_export"] = kStateVersion;
  state["job"] = of_.job;
  state["step"] = of_.step;
  state["attempt"] = of_.attempt;
  state["plan"] = HexDigest(plan_.digest);
  state["files"] = nlohmann::ordered_json::array();
  for (const ExportFile& file : plan_.files) {
    if (const auto done = done_.find(file.name); done != done_.end()) {
      state["files"].push_back({{"name", file.name},
                                {"bytes", done->second.bytes},
                                {"digest", HexDigest(done->second.digest)}});
    }
  }
  has_state_ = true;
  return WriteSmallFile(kExportStateName, state.dump(1) + "\n");
}

// As WriteFileAtomically, but for others to read, too.
absl::Status ExportDirectory::WriteSmallFile(const std::string& name, const std::string& text) {
  const std::string temporary = Path(name + kTemporarySuffix);
  env_.Unlink(temporary).IgnoreError();
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                      env_.Open(temporary, OpenMode::kCreateExclusive));
  absl::Status status = file->WriteAt(0, std::as_bytes(std::span<const char>(text)));
  if (status.ok()) {
    status = file->SetMode(FileMode());
  }
  if (status.ok()) {
    status = file->Sync();
  }
  if (status.ok()) {
    status = env_.Rename(temporary, Path(name));
  }
  if (!status.ok()) {
    env_.Unlink(temporary).IgnoreError();
    return status;
  }
  return env_.SyncDirectory(path_);
}

absl::StatusOr<bool> ExportDirectory::IsComplete(size_t number, const Progress& progress) {
  const ExportFile& file = plan_.files[number];
  const auto done = done_.find(file.name);
  if (done == done_.end() || done->second.bytes != file.bytes()) {
    return false;
  }
  OpenOptions options;
  options.no_symlink = true;
  const absl::StatusOr<std::unique_ptr<File>> opened =
      env_.Open(Path(file.name), OpenMode::kRead, options);
  if (!opened.ok()) {
    return false;
  }
  const absl::StatusOr<FileInfo> info = (*opened)->Info();
  if (!info.ok() || !S_ISREG(info->mode) || info->bytes != file.bytes()) {
    return false;
  }
  std::vector<std::byte> buffer(kReadBytes);
  uint64_t digest = 0;
  for (uint64_t at = 0; at < file.bytes();) {
    const std::span<std::byte> some(buffer.data(),
                                    std::min<uint64_t>(kReadBytes, file.bytes() - at));
    if (!(*opened)->ReadAt(at, some).ok()) {
      return false;
    }
    digest = Crc64(some.data(), some.size(), digest);
    at += some.size();
    if (!progress(some.size())) {
      return absl::CancelledError("interrupted");
    }
  }
  return digest == done->second.digest;
}

absl::Status ExportDirectory::Begin(size_t number) {
  writing_ = &plan_.files[number];
  const std::string part = Path(writing_->name + kPartSuffix);
  // What an earlier run left of it, whatever that is by now: a link is removed, and not followed.
  if (const absl::Status gone = env_.Unlink(part); !gone.ok() && !absl::IsNotFound(gone)) {
    return gone;
  }
  HF_ASSIGN_OR_RETURN(file_, env_.Open(part, OpenMode::kCreateExclusive));
  HF_RETURN_IF_ERROR(file_->SetMode(FileMode()));
  // All of it is taken at once, where the file system can: a disk that is too small is found now.
  if (const absl::Status room = file_->Allocate(0, writing_->bytes()); IsNoSpace(room)) {
    return room;
  }
  written_ = {};
  return Append(std::as_bytes(std::span<const char>(writing_->header)));
}

absl::Status ExportDirectory::Append(std::span<const std::byte> bytes) {
  HF_RETURN_IF_ERROR(file_->WriteAt(written_.bytes, bytes));
  written_.digest = Crc64(bytes.data(), bytes.size(), written_.digest);
  written_.bytes += bytes.size();
  HF_SYNC_POINT("ckptctl.export.written");
  return absl::OkStatus();
}

absl::Status ExportDirectory::Publish() {
  if (written_.bytes != writing_->bytes()) {
    return absl::InternalError(absl::StrCat("'", writing_->name, "' has ", written_.bytes,
                                            " bytes, planned were ", writing_->bytes()));
  }
  HF_RETURN_IF_ERROR(file_->Sync());
  HF_SYNC_POINT("ckptctl.export.synced");
  HF_RETURN_IF_ERROR(env_.Rename(Path(writing_->name + kPartSuffix), Path(writing_->name)));
  file_.reset();
  HF_RETURN_IF_ERROR(env_.SyncDirectory(path_));
  HF_SYNC_POINT("ckptctl.export.renamed");
  done_[writing_->name] = written_;
  HF_RETURN_IF_ERROR(WriteState());
  HF_SYNC_POINT("ckptctl.export.file_done");
  return absl::OkStatus();
}

void ExportDirectory::GiveUp() {
  if (file_ != nullptr) {
    env_.Unlink(Path(writing_->name + kPartSuffix)).IgnoreError();
    file_.reset();
  }
}

absl::StatusOr<bool> ExportDirectory::Finish() {
  if (plan_.index.empty()) {
    return true;
  }
  OpenOptions options;
  options.no_symlink = true;
  const absl::StatusOr<std::string> there =
      ReadFile(env_, Path(kExportIndexName), plan_.index.size(), options);
  if (there.ok() && *there == plan_.index) {
    return true;
  }
  HF_RETURN_IF_ERROR(WriteSmallFile(kExportIndexName, plan_.index));
  HF_SYNC_POINT("ckptctl.export.index_written");
  return false;
}

}  // namespace holdfast
