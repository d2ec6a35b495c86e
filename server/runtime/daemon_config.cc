#include "server/runtime/daemon_config.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/config.h"
#include "base/env.h"
#include "base/ids.h"
#include "base/log.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "base/units.h"
#include "recovery/policy.h"
#include "server/membership/cluster_config.h"
#include "server/runtime/cluster_files.h"
#include "server/runtime/event_journal.h"
#include "server/runtime/tier_config.h"
#include "server/runtime/unix_socket.h"
#include "tiers/memory/slot_store.h"

namespace holdfast {
namespace {

constexpr uint64_t kConfigFileBytesMax = kMiB;
constexpr size_t kCommandWordsMax = 64;
constexpr size_t kCommandWordBytesMax = 4096;
constexpr int kCertificateUsersMax = 4096;
constexpr size_t kCertificateNameBytesMax = 1024;
constexpr uint32_t kNoUid = 0xffffffff;
constexpr char kSystemConfig[] = "/etc/holdfast/ckptd.yaml";

bool IsRoot() {
  return ::geteuid() == 0;
}

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// $XDG_…_HOME, or its default under $HOME; empty when neither is known.
std::string XdgDirectory(const char* variable, std::string_view under_home) {
  std::string directory = Variable(variable);
  if (directory.empty() && !Variable("HOME").empty()) {
    directory = JoinPath(Variable("HOME"), under_home);
  }
  return directory.empty() ? "" : JoinPath(directory, "holdfast");
}

std::string HostName() {
  std::array<char, 256> name = {};
  return ::gethostname(name.data(), name.size() - 1) == 0 && name[0] != '\0' ? name.data()
                                                                             : "localhost";
}

absl::Status CheckPath(std::string_view setting, const std::string& path) {
  if (path.empty()) {
    return BadSetting(
        setting,
        "there is no default, since neither HOME nor an XDG variable for it is set: give a path");
  }
  if (path[0] != '/') {
    return BadSetting(setting, absl::StrCat("'", path, "' is not an absolute path"));
  }
  return absl::OkStatus();
}

absl::Status CheckSocketPath(std::string_view setting, const std::string& path) {
  if (path.empty()) {
    return BadSetting(
        setting,
        "there is no default, since XDG_RUNTIME_DIR is not set. Give a path (--socket "
        "PATH), or set it: export XDG_RUNTIME_DIR=/run/user/$(id -u)");
  }
  HF_RETURN_IF_ERROR(CheckPath(setting, path));
  if (path.size() > kSocketPathBytesMax) {
    return BadSetting(
        setting, absl::StrCat("'", path, "' has ", path.size(),
                              " bytes; a unix socket's path has at most ", kSocketPathBytesMax));
  }
  return absl::OkStatus();
}

// Of the directory, or of the nearest one above it that exists.
absl::StatusOr<FilesystemInfo> FilesystemOf(std::string path) {
  Env& env = *Env::System();
  while (path != "/" && absl::IsNotFound(env.Info(path).status())) {
    path = ParentDirectory(path);
  }
  return env.Filesystem(path);
}

enum class Missing { kIsMade, kIsAnError };

// A directory that exists is to be writable; one that does not, to have a parent where it can be
// made.
absl::Status CheckDirectory(std::string_view setting, const std::string& directory,
                            Missing missing) {
  std::string there = directory;
  struct stat info = {};
  while (::stat(there.c_str(), &info) != 0) {
    const int error = errno;
    if (error != ENOENT || there == "/" || missing == Missing::kIsAnError) {
      return BadSetting(setting, Message(ErrnoStatus(error, "look at the directory", there)));
    }
    there = ParentDirectory(there);
  }
  if (!S_ISDIR(info.st_mode)) {
    return BadSetting(setting, absl::StrCat("'", there, "' is not a directory"));
  }
  if (::access(there.c_str(), W_OK | X_OK) != 0) {
    return BadSetting(
        setting, Message(ErrnoStatus(errno,
                                     there == directory ? "write in the directory"
                                                        : absl::StrCat("make '", directory, "' in"),
                                     there)));
  }
  const absl::StatusOr<FilesystemInfo> fs = Env::System()->Filesystem(there);
  if (fs.ok() && (fs->type == "proc" || fs->type == "sysfs")) {
    return BadSetting(setting,
                      absl::StrCat("'", there, "' lies on ", fs->type, ", which takes no files"));
  }
  return absl::OkStatus();
}

// HOST:PORT, or the port alone; whether it is free shows when it is opened.
absl::Status CheckAddress(std::string_view setting, const std::string& address) {
  if (address.empty() || address == "off") {
    return absl::OkStatus();
  }
  const size_t colon = address.rfind(':');
  const std::string host = colon == std::string::npos ? "" : address.substr(0, colon);
  const std::string port = colon == std::string::npos ? address : address.substr(colon + 1);
  uint32_t number = 0;
  if (port.empty() || port.find_first_not_of("0123456789") != std::string::npos ||
      !absl::SimpleAtoi(port, &number) || number > 65'535) {
    return BadSetting(setting,
                      absl::StrCat("'", address.substr(0, 64),
                                   "': expected HOST:PORT with a port of 0 to 65535, or off"));
  }
  std::array<char, sizeof(in6_addr)> parsed = {};
  const bool v6 = host.size() > 2 && host.front() == '[' && host.back() == ']';
  const bool good =
      v6 ? ::inet_pton(AF_INET6, host.substr(1, host.size() - 2).c_str(), parsed.data()) == 1
         : std::all_of(host.begin(), host.end(), [](const char c) {
             return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-';
           });
  if (!good) {
    return BadSetting(
        setting,
        absl::StrCat(
            "'", address.substr(0, 64),
            "': the host is neither a name nor an address such as 127.0.0.1, 0.0.0.0 or [::1]"));
  }
  return absl::OkStatus();
}

// (gRPC wants a host as well.)
absl::Status CheckHealth(const v1::HealthConfig& health) {
  HF_RETURN_IF_ERROR(CheckAddress("health.address", health.address()));
  if (!health.address().empty() && health.address() != "off" &&
      health.address().find(':') == std::string::npos) {
    return BadSetting("health.address",
                      absl::StrCat("'", health.address(), "': expected HOST:PORT, such as 0.0.0.0:",
                                   health.address(), ", or off"));
  }
  return absl::OkStatus();
}

absl::Status CheckStatusPage(const v1::StatusPageConfig& page) {
  const std::string& address = page.address();
  HF_RETURN_IF_ERROR(CheckAddress("status_page.address", address));
  if (page.has_tls()) {
    HF_RETURN_IF_ERROR(CheckTlsConfig("status_page.tls", page.tls()));
  }
  if (address.empty() || address == "off") {
    return absl::OkStatus();
  }
  if (address.rfind(':') == std::string::npos) {
    return BadSetting("status_page.address",
                      absl::StrCat("'", address, "': expected HOST:PORT, such as 127.0.0.1:",
                                   address, ", or off"));
  }
  if (!page.has_tls() && !IsLoopbackAddress(address)) {
    return BadSetting(
        "status_page.address",
        absl::StrCat("'", address.substr(0, 64),
                     "' is no address of loopback, and the page tells the names and sizes of all "
                     "jobs to whoever reaches it: choose 127.0.0.1:PORT or [::1]:PORT, or set "
                     "status_page.tls, with which a browser must show a certificate"));
  }
  return absl::OkStatus();
}

v1::ClusterTlsConfig FilesOf(const v1::AdminTlsConfig& tls) {
  v1::ClusterTlsConfig files;
  files.set_ca_file(tls.ca_file());
  files.set_cert_file(tls.cert_file());
  files.set_key_file(tls.key_file());
  return files;
}

// Whoever forgets a number must not have made an operator of somebody.
absl::Status CheckAdminTlsUsers(const v1::AdminTlsConfig& tls) {
  std::map<std::string, uint32_t> known;
  for (const v1::AdminTlsUser& user : tls.users()) {
    const std::string& name = user.certificate();
    if (name.empty() || name.size() > kCertificateNameBytesMax) {
      return BadSetting("admin.tls.users", absl::StrCat("each needs a certificate, a name of 1 to ",
                                                        kCertificateNameBytesMax, " bytes"));
    }
    if (!user.has_uid() || user.uid() == kNoUid) {
      return BadSetting("admin.tls.users", absl::StrCat("'", name.substr(0, 64),
                                                        "' has no uid: say whom it stands "
                                                        "for (uid: 1001; 0 is an operator)"));
    }
    if (!known.emplace(name, user.uid()).second) {
      return BadSetting("admin.tls.users",
                        absl::StrCat("'", name.substr(0, 64), "' is listed twice"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckAdminTls(const v1::AdminTlsConfig& tls) {
  const std::string& address = tls.address();
  HF_RETURN_IF_ERROR(CheckAddress("admin.tls.address", address));
  HF_RETURN_IF_ERROR(CheckAdminTlsUsers(tls));
  if (address.empty() || address == "off") {
    return absl::OkStatus();
  }
  if (address.rfind(':') == std::string::npos) {
    return BadSetting(
        "admin.tls.address",
        absl::StrCat("'", address, "': expected HOST:PORT, such as 0.0.0.0:", address, ", or off"));
  }
  HF_RETURN_IF_ERROR(CheckTlsConfig("admin.tls", FilesOf(tls)));
  if (tls.users().empty()) {
    return BadSetting("admin.tls.users",
                      "nobody is listed, so nobody would be let in: say whom certificates stand "
                      "for ({certificate: alice@example.com, uid: 1001})");
  }
  return absl::OkStatus();
}

// Where two servers would listen at one port: the later one to start could not.
absl::Status CheckAddressesDiffer(const v1::DaemonConfig& config) {
  struct Place {
    const char* setting;
    const std::string& address;
    std::string host;
    std::string port;
  };
  std::vector<Place> taken;
  const std::string none;
  for (const auto& [setting, address] :
       std::initializer_list<std::pair<const char*, const std::string&>>{
           {"cluster.listen_address",
            config.has_cluster() ? config.cluster().listen_address() : none},
           {"metrics.address", config.metrics().address()},
           {"health.address", config.health().address()},
           {"status_page.address", config.status_page().address()},
           {"admin.tls.address", config.admin().tls().address()}}) {
    const size_t colon = address.rfind(':');
    Place place = {setting, address,
                   colon == std::string::npos ? "0.0.0.0" : address.substr(0, colon),
                   colon == std::string::npos ? address : address.substr(colon + 1)};
    if (place.host == "localhost") {
      place.host = "127.0.0.1";
    }
    if (address.empty() || address == "off" || place.port == "0") {
      continue;
    }
    for (const Place& other : taken) {
      const bool everywhere = (place.host == "0.0.0.0" || other.host == "0.0.0.0") &&
                              place.host[0] != '[' && other.host[0] != '[';
      if (place.port == other.port && (place.host == other.host || everywhere)) {
        return BadSetting(setting, absl::StrCat("'", address, "' is taken by ", other.setting,
                                                ", '", other.address, "'; choose another port"));
      }
    }
    taken.push_back(std::move(place));
  }
  return absl::OkStatus();
}

// That it is there and may be run says --check-config, and whoever starts it.
absl::Status CheckEvents(const v1::EventsConfig& events) {
  if (!ParseSeverity(events.least())) {
    return BadSetting("events.least", absl::StrCat("'", events.least().substr(0, 64),
                                                   "' is none of info, warning, error"));
  }
  for (const std::string& word : events.command()) {
    if (word.size() > kCommandWordBytesMax || word.find('\0') != std::string::npos) {
      return BadSetting("events.command",
                        absl::StrCat("a word of it has more than ", kCommandWordBytesMax,
                                     " bytes, or a zero byte"));
    }
  }
  return events.command().empty() ? absl::OkStatus()
                                  : CheckPath("events.command", events.command(0));
}

// The tmpfs that slots will lie on.
absl::StatusOr<FilesystemInfo> MemoryFilesystem(const v1::MemoryConfig& memory) {
  HF_RETURN_IF_ERROR(CheckPath("memory.dir", memory.dir()));
  absl::StatusOr<FilesystemInfo> fs = FilesystemOf(memory.dir());
  if (!fs.ok()) {
    return BadSetting("memory.dir", Message(fs.status()));
  }
  if (fs->type != "tmpfs") {
    return BadSetting("memory.dir",
                      absl::StrCat("'", memory.dir(), "' lies on ", fs->type,
                                   ", not on tmpfs; slots are shared memory: choose a "
                                   "directory under /dev/shm, or mount a tmpfs there"));
  }
  return fs;
}

absl::Status CheckMemory(const v1::MemoryConfig& memory) {
  HF_ASSIGN_OR_RETURN(const FilesystemInfo fs, MemoryFilesystem(memory));
  if (memory.bytes_max() > fs.bytes_total) {
    return BadSetting(
        "memory.bytes_max",
        absl::StrCat(memory.bytes_max(), " bytes (", FormatBytes(memory.bytes_max()),
                     ") are more than the file system of '", memory.dir(),
                     "' has: ", fs.bytes_total, " (", FormatBytes(fs.bytes_total),
                     "); lower the budget, or enlarge it: mount -o remount,size=<bytes>"));
  }
  return absl::OkStatus();
}

// Paths below it are made of it, and compared with it.
void StripSlashes(std::string* dir) {
  while (dir->size() > 1 && dir->back() == '/') {
    dir->pop_back();
  }
}

// Half of what there is.
absl::Status CompleteBudget(v1::DaemonConfig* config) {
  if (config->memory().bytes_max() == 0 && !config->memory().dir().empty()) {
    HF_ASSIGN_OR_RETURN(const FilesystemInfo fs, MemoryFilesystem(config->memory()));
    config->mutable_memory()->set_bytes_max(fs.bytes_total / 2 / kSlotBytesMultiple *
                                            kSlotBytesMultiple);
  }
  return absl::OkStatus();
}

}  // namespace

Surroundings SurroundingsOfProcess() {
  return {IsRoot(), absl::StrCat(::geteuid()), HostName(),
          XdgDirectory("XDG_STATE_HOME", ".local/state"), Variable("XDG_RUNTIME_DIR")};
}

void CompleteConfig(v1::DaemonConfig* config) {
  for (std::string& dir : *config->mutable_nvme()->mutable_dirs()) {
    StripSlashes(&dir);
  }
  StripSlashes(config->mutable_remote()->mutable_dir());
  if (config->has_cluster()) {
    CompleteClusterConfig(config->node_name(), config->mutable_cluster());
  }
  if (config->admin().path().empty() && !config->socket().path().empty()) {
    config->mutable_admin()->set_path(
        JoinPath(ParentDirectory(config->socket().path()), "admin.sock"));
  }
}

v1::DaemonConfig DefaultConfig(const Surroundings& surroundings) {
  v1::DaemonConfig config;
  config.set_node_name(surroundings.host);
  config.set_state_dir(surroundings.root ? "/var/lib/holdfast" : surroundings.state_dir);
  v1::SocketConfig* socket = config.mutable_socket();
  if (surroundings.root) {
    socket->set_path("/run/holdfast/ckptd.sock");
  } else if (!surroundings.runtime_dir.empty()) {
    socket->set_path(JoinPath(surroundings.runtime_dir, "holdfast/ckptd.sock"));
  }
  socket->set_mode(0666);
  socket->set_connections_max(4096);
  socket->set_connections_per_uid_max(1024);
  socket->set_requests_per_connection_max(64);
  socket->set_reply_backlog_bytes_max(kMiB);
  socket->set_hello_timeout_ms(10'000);
  config.mutable_admin()->set_request_timeout_ms(30'000);
  v1::MemoryConfig* memory = config.mutable_memory();
  memory->set_dir(surroundings.root ? "/dev/shm/holdfast"
                                    : absl::StrCat("/dev/shm/holdfast-", surroundings.uid));
  memory->set_slots_per_rank(3);
  memory->set_slots_max(65'536);
  memory->set_populate_chunk_bytes(64 * kMiB);
  memory->set_populate_cpu_percent(100);
  memory->set_keep_ended_ms(uint64_t{24} * 60 * 60 * 1000);
  config.mutable_save()->set_commit_deadline_ms(10 * 60 * 1000);
  config.mutable_session()->set_deadline_max_ms(60 * 60 * 1000);
  config.mutable_retention()->set_grace_ms(uint64_t{7} * 24 * 60 * 60 * 1000);
  config.mutable_restore()->set_wait_for_copies_ms(2 * 60 * 1000);
  config.mutable_restore()->set_fall_back(true);
  config.mutable_scrub()->set_period_ms(uint64_t{7} * 24 * 60 * 60 * 1000);
  config.mutable_scrub()->set_bandwidth_bytes_per_s_max(100 * kMiB);
  config.mutable_metrics()->set_address("127.0.0.1:9464");
  config.mutable_status_page()->set_address("off");
  config.mutable_log()->set_level("info");
  config.mutable_events()->set_least("warning");
  config.mutable_events()->set_timeout_ms(30'000);
  v1::NvmeConfig* nvme = config.mutable_nvme();
  nvme->set_high_watermark_percent(90);
  nvme->set_low_watermark_percent(80);
  nvme->set_piece_bytes(4 * kMiB);
  nvme->set_depth(4);
  nvme->set_io_priority(6);
  nvme->set_nice(10);
  nvme->set_stall_timeout_ms(30'000);
  nvme->set_keep_ended_ms(uint64_t{30} * 24 * 60 * 60 * 1000);
  v1::RemoteConfig* remote = config.mutable_remote();
  remote->set_writers(4);
  remote->set_job_writes_max(1024);
  remote->set_piece_bytes(4 * kMiB);
  remote->set_io_priority(6);
  remote->set_nice(10);
  remote->set_stall_timeout_ms(60'000);
  v1::TierPolicy* to_nvme = config.mutable_policy()->mutable_nvme();
  to_nvme->set_every_steps(1);
  to_nvme->set_every_ms(0);
  to_nvme->set_keep_last(2);
  v1::TierPolicy* to_remote = config.mutable_policy()->mutable_remote();
  to_remote->set_every_steps(0);
  to_remote->set_every_ms(10 * 60 * 1000);
  to_remote->set_keep_last(3);
  to_remote->set_share_replicas(true);
  to_remote->set_compression(v1::TierPolicy::COMPRESSION_NONE);
  to_remote->set_compression_level(3);
  to_remote->set_compression_threads(0);
  config.mutable_policy()->set_replicas(0);
  for (v1::TierPolicy* tier : {to_nvme, to_remote}) {
    tier->set_keep_every_steps(0);
    tier->set_bytes_max(0);
    tier->set_verify(v1::TierPolicy::VERIFY_SAMPLE);
  }
  return config;
}

absl::Status LoadConfig(const ConfigFlags& flags, v1::DaemonConfig* config) {
  *config = DefaultConfig();
  Env& env = *Env::System();
  std::string file = flags.file;
  if (file.empty()) {
    file = IsRoot() ? kSystemConfig
                    : JoinPath(XdgDirectory("XDG_CONFIG_HOME", ".config"), "ckptd.yaml");
    if (file[0] != '/' || absl::IsNotFound(env.Info(file).status())) {
      file.clear();
    }
  } else if (file[0] != '/') {
    std::array<char, 4096> directory = {};
    if (::getcwd(directory.data(), directory.size()) != nullptr) {
      file = JoinPath(directory.data(), file);
    }
  }
  if (!file.empty()) {
    HF_ASSIGN_OR_RETURN(const std::string text, ReadFile(env, file, kConfigFileBytesMax));
    HF_RETURN_IF_ERROR(ParseConfig(text, file, *config));
  }
  if (flags.memory_dir) {
    config->mutable_memory()->set_dir(*flags.memory_dir);
  }
  if (flags.state_dir) {
    config->set_state_dir(*flags.state_dir);
  }
  if (flags.socket) {
    config->mutable_socket()->set_path(*flags.socket);
  }
  if (flags.admin) {
    config->mutable_admin()->set_path(*flags.admin);
  }
  if (flags.memory_bytes) {
    const absl::StatusOr<uint64_t> bytes = ParseBytes(*flags.memory_bytes);
    if (!bytes.ok()) {
      return BadSetting("--memory-bytes", Message(bytes.status()));
    }
    config->mutable_memory()->set_bytes_max(*bytes);
  }
  CompleteConfig(config);
  HF_RETURN_IF_ERROR(CompleteBudget(config));
  return CheckConfig(*config);
}

std::vector<SettingRange> NodeRanges(const v1::DaemonConfig& config) {
  using Unit = SettingRange::Unit;
  constexpr uint64_t kHourMs = 3'600'000;
  constexpr uint64_t kWeekMs = 7 * 24 * kHourMs;
  const v1::SocketConfig& socket = config.socket();
  const v1::MemoryConfig& memory = config.memory();
  return {
      {"socket.mode", socket.mode(), 1, 0777, Unit::kMode},
      {"socket.connections_max", socket.connections_max(), 1, 1u << 20},
      {"socket.connections_per_uid_max", socket.connections_per_uid_max(), 1, 1u << 20},
      {"socket.requests_per_connection_max", socket.requests_per_connection_max(), 1, 1u << 16},
      {"socket.reply_backlog_bytes_max", socket.reply_backlog_bytes_max(), 64 * kKiB, kGiB,
       Unit::kBytes},
      {"socket.hello_timeout_ms", socket.hello_timeout_ms(), 1, kHourMs, Unit::kMs},
      {"admin.request_timeout_ms", config.admin().request_timeout_ms(), 1, kHourMs, Unit::kMs},
      {.setting = "admin.tls.users",
       .value = static_cast<uint64_t>(config.admin().tls().users_size()),
       .max = kCertificateUsersMax},
      {.setting = "memory.bytes_max",
       .value = memory.bytes_max(),
       .min = kSlotBytesMultiple,
       .unit = Unit::kBytes,
       .max_is = "the size of its file system",  // (CheckMemory)
       .note = "a smaller budget holds no slot"},
      {"memory.slots_per_rank", memory.slots_per_rank(), 2, 1024},
      {.setting = "memory.slots_max",
       .value = memory.slots_max(),
       .min = memory.slots_per_rank(),
       .max = 1u << 24,
       .min_is = "memory.slots_per_rank"},
      {"memory.populate_chunk_bytes", memory.populate_chunk_bytes(), kSlotBytesMultiple, kGiB,
       Unit::kBytes},
      {"memory.populate_cpu_percent", memory.populate_cpu_percent(), 1, 100},
      {"memory.keep_committed", memory.keep_committed()},
      {.setting = "memory.peer_bytes_max",
       .value = memory.peer_bytes_max(),
       .max = memory.bytes_max(),
       .unit = Unit::kBytes,
       .max_is = "memory.bytes_max",
       .note = "in which they are counted; lower it, or leave it out for half of that"},
      {"memory.keep_ended_ms", memory.keep_ended_ms(), 1000, 520 * kWeekMs, Unit::kMs, true},
      {"memory.bytes_per_uid_max", memory.bytes_per_uid_max(), kSlotBytesMultiple, UINT64_MAX,
       Unit::kBytes, true},
      {"save.commit_deadline_ms", config.save().commit_deadline_ms(), 1, kWeekMs, Unit::kMs},
      {"session.deadline_max_ms", config.session().deadline_max_ms(), 1, kWeekMs, Unit::kMs},
      {"nvme.keep_ended_ms", config.nvme().keep_ended_ms(), 1000, 520 * kWeekMs, Unit::kMs, true},
      {"retention.grace_ms", config.retention().grace_ms(), 1000, 52 * kWeekMs, Unit::kMs, true},
      {"restore.wait_for_copies_ms", config.restore().wait_for_copies_ms(), 1000, kHourMs,
       Unit::kMs, true},
      {"scrub.period_ms", config.scrub().period_ms(), 1000, 52 * kWeekMs, Unit::kMs, true},
      {"scrub.bandwidth_bytes_per_s_max", config.scrub().bandwidth_bytes_per_s_max(), 64 * kKiB,
       1024 * kGiB, Unit::kBytes, true},
      {"events.command", static_cast<uint64_t>(config.events().command_size()), 0,
       kCommandWordsMax},
      {"events.timeout_ms", config.events().timeout_ms(), 100, kHourMs, Unit::kMs},
  };
}

absl::Status CheckConfig(const v1::DaemonConfig& config) {
  if (config.node_name().empty() || config.node_name().size() > 255) {
    return BadSetting("node_name", "1 to 255 bytes are needed");
  }
  if (const absl::Status name = CheckJobName(config.node_name());
      !config.remote().dir().empty() && !name.ok()) {
    return BadSetting("node_name",
                      absl::StrCat("with remote.dir it names files there, so it must be as a "
                                   "job's name: ",
                                   Message(name)));
  }
  for (const SettingRange& range : NodeRanges(config)) {
    HF_RETURN_IF_ERROR(CheckRange(range));
  }
  HF_RETURN_IF_ERROR(CheckPath("state_dir", config.state_dir()));
  const v1::SocketConfig& socket = config.socket();
  HF_RETURN_IF_ERROR(CheckSocketPath("socket.path", socket.path()));
  HF_RETURN_IF_ERROR(CheckSocketPath("admin.path", config.admin().path()));
  if (config.admin().path() == socket.path()) {
    return BadSetting(
        "admin.path",
        absl::StrCat("'", socket.path(), "' is the clients' socket (socket.path); choose another"));
  }
  const absl::StatusOr<LogLevel> level = ParseLogLevel(config.log().level());
  if (!level.ok()) {
    return BadSetting("log.level", Message(level.status()));
  }
  if (!config.log().file().empty()) {
    HF_RETURN_IF_ERROR(CheckPath("log.file", config.log().file()));
  }
  HF_RETURN_IF_ERROR(CheckAddress("metrics.address", config.metrics().address()));
  HF_RETURN_IF_ERROR(CheckHealth(config.health()));
  HF_RETURN_IF_ERROR(CheckStatusPage(config.status_page()));
  HF_RETURN_IF_ERROR(CheckAdminTls(config.admin().tls()));
  HF_RETURN_IF_ERROR(CheckEvents(config.events()));
  if (config.has_cluster()) {
    HF_RETURN_IF_ERROR(CheckClusterConfig(config.node_name(), config.cluster()));
  }
  HF_RETURN_IF_ERROR(CheckAddressesDiffer(config));
  HF_RETURN_IF_ERROR(CheckTierConfig(config));
  HF_RETURN_IF_ERROR(CheckPolicy(config.policy()));
  return CheckMemory(config.memory());
}

absl::Status CheckLogFile(const std::string& file) {
  struct stat info = {};
  if (::stat(file.c_str(), &info) != 0 || !S_ISFIFO(info.st_mode)) {
    return absl::OkStatus();
  }
  const UniqueFd pipe(::open(file.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC));
  return pipe.valid() || errno != ENXIO
             ? absl::OkStatus()
             : BadSetting("log.file", absl::StrCat("'", file,
                                                   "' is a pipe that nobody reads; start its "
                                                   "reader first, or name a file"));
}

absl::Status CheckPlaces(const v1::DaemonConfig& config) {
  HF_RETURN_IF_ERROR(CheckDirectory("state_dir", config.state_dir(), Missing::kIsMade));
  HF_RETURN_IF_ERROR(CheckDirectory("memory.dir", config.memory().dir(), Missing::kIsMade));
  HF_RETURN_IF_ERROR(
      CheckDirectory("socket.path", ParentDirectory(config.socket().path()), Missing::kIsMade));
  HF_RETURN_IF_ERROR(
      CheckDirectory("admin.path", ParentDirectory(config.admin().path()), Missing::kIsMade));
  HF_RETURN_IF_ERROR(CheckClusterFiles(*Env::System(), config.cluster()));
  HF_RETURN_IF_ERROR(CheckTlsFiles(*Env::System(), "status_page.tls", config.status_page().tls()));
  HF_RETURN_IF_ERROR(CheckTlsFiles(*Env::System(), "admin.tls", FilesOf(config.admin().tls())));
  struct stat info = {};
  if (const auto& command = config.events().command(); !command.empty()) {
    if (::access(command[0].c_str(), X_OK) != 0) {
      return BadSetting("events.command", Message(ErrnoStatus(errno, "run", command[0])));
    }
    if (::stat(command[0].c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
      return BadSetting("events.command",
                        absl::StrCat("'", command[0], "' is no file: name the program to run"));
    }
  }
  const std::string& log = config.log().file();
  if (log.empty()) {
    return absl::OkStatus();
  }
  HF_RETURN_IF_ERROR(CheckDirectory("log.file", ParentDirectory(log), Missing::kIsAnError));
  HF_RETURN_IF_ERROR(CheckLogFile(log));
  if (::stat(log.c_str(), &info) == 0 &&
      (S_ISDIR(info.st_mode) || ::access(log.c_str(), W_OK) != 0)) {
    return BadSetting("log.file", absl::StrCat("'", log, "' cannot be written: it is ",
                                               S_ISDIR(info.st_mode) ? "a directory" : "not ours"));
  }
  return absl::OkStatus();
}

}  // namespace holdfast
