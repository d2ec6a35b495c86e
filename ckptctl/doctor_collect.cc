// Gathers what doctor judges. Nothing here is fatal: what cannot be read is a fact of its own.
#include <pwd.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/certificates.h"
#include "base/config.h"
#include "base/copy.h"
#include "base/env.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/doctor.h"
#include "ckptctl/doctor_findings.h"
#include "ckptctl/sockets.h"
#include "holdfast/v1/admin.pb.h"
#include "holdfast/v1/config.pb.h"

namespace holdfast {
namespace {

constexpr char kDefaultConfig[] = "/etc/holdfast/ckptd.yaml";
constexpr uint64_t kConfigBytesMax = kMiB;
constexpr int64_t kEndsSoonS = 14 * 24 * 3600;  // as the daemon has it
constexpr int kCapIpcLock = 14;
constexpr std::chrono::seconds kProbeTimeout(3);

// The rest of the line that starts with `prefix`, without blanks around it; empty if there is none.
std::string LineAfter(const std::string& text, std::string_view prefix) {
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::StartsWith(line, ToAbsl(prefix))) {
      return std::string(absl::StripAsciiWhitespace(line.substr(prefix.size())));
    }
  }
  return "";
}

// "Max locked memory   8388608   8388608   bytes": the soft limit.
uint64_t SoftLimit(const std::string& limits, std::string_view name) {
  const std::string line = LineAfter(limits, name);
  const std::string first = line.substr(0, line.find(' '));
  uint64_t value = 0;
  return first == "unlimited" ? kUnlimited : absl::SimpleAtoi(first, &value) ? value : 0;
}

LimitFacts CollectLimits(int32_t daemon_pid) {
  LimitFacts facts;
  std::string process = absl::StrCat("/proc/", daemon_pid);
  facts.of = absl::StrCat("ckptd (pid ", daemon_pid, ")");
  std::string limits = daemon_pid > 0 ? KernelText(process + "/limits") : "";
  if (limits.empty()) {
    process = "/proc/self";
    facts.of = "this shell";
    limits = KernelText(process + "/limits");
  }
  facts.memlock_bytes = SoftLimit(limits, "Max locked memory");
  facts.open_files = SoftLimit(limits, "Max open files");
  uint64_t capabilities = 0;
  const std::string effective = LineAfter(KernelText(process + "/status"), "CapEff:");
  facts.may_lock_all =
      absl::SimpleHexAtoi(effective, &capabilities) && (capabilities >> kCapIpcLock & 1) != 0;
  return facts;
}

// The directory itself, or what exists above it.
std::string NearestExisting(std::string path) {
  while (path.size() > 1 && !Env::System()->Info(path).ok()) {
    path = ParentDirectory(path);
  }
  return path;
}

TmpfsFacts CollectTmpfs(const std::string& path) {
  TmpfsFacts facts;
  facts.path = path;
  const std::string existing = NearestExisting(path);
  const auto info = Env::System()->Filesystem(existing);
  facts.status = info.status();
  if (info.ok()) {
    facts.type = info->type;
    facts.bytes_total = info->bytes_total;
    facts.bytes_free = info->bytes_free;
  }
  const MountFacts mount = FindMount(KernelText("/proc/self/mountinfo"), existing);
  facts.mount_point = mount.mount_point;
  facts.huge = mount.huge;
  return facts;
}

SocketFacts CollectSocket(std::string what, const std::string& path) {
  SocketFacts facts;
  facts.what = std::move(what);
  facts.path = path;
  facts.directory = ParentDirectory(path);
  struct stat info;
  if (::stat(path.c_str(), &info) == 0) {
    facts.exists = true;
    facts.is_socket = S_ISSOCK(info.st_mode);
    facts.may_connect = ::access(path.c_str(), W_OK) == 0;
  }
  if (::stat(facts.directory.c_str(), &info) == 0) {
    facts.directory_open_to_all = (info.st_mode & S_IWOTH) != 0 && (info.st_mode & S_ISVTX) == 0;
  }
  return facts;
}

std::vector<std::string> NamesIn(const std::string& directory) {
  return Env::System()->List(directory).value_or(std::vector<std::string>());
}

// The texts of logind's settings in the order in which it reads them: its file, then the drop-ins
// by name, of which one in /etc stands for its namesakes in /run and /usr.
std::vector<std::string> LogindSettings() {
  std::map<std::string, std::string> drop_ins;
  for (const char* base : {"/usr/lib/systemd", "/run/systemd", "/etc/systemd"}) {
    const std::string directory = JoinPath(base, "logind.conf.d");
    for (const std::string& name : NamesIn(directory)) {
      if (absl::EndsWith(name, ".conf")) {
        drop_ins[name] = JoinPath(directory, name);
      }
    }
  }
  std::vector<std::string> texts = {KernelText("/etc/systemd/logind.conf")};
  for (const auto& [name, path] : drop_ins) {
    texts.push_back(KernelText(path));
  }
  return texts;
}

LogoutFacts CollectLogout(int32_t daemon_pid) {
  LogoutFacts facts;
  facts.logind = Env::System()->Info("/run/systemd/system").ok();
  facts.removes_ipc = RemovesIpc(LogindSettings());
  facts.uid = ::geteuid();
  if (daemon_pid > 0) {
    const auto process = Env::System()->Info(absl::StrCat("/proc/", daemon_pid));
    facts.uid = process.ok() ? process->uid : facts.uid;
  }
  std::array<char, 16 << 10> buffer;
  struct passwd entry;
  struct passwd* found = nullptr;
  if (::getpwuid_r(facts.uid, &entry, buffer.data(), buffer.size(), &found) == 0 &&
      found != nullptr) {
    facts.user = found->pw_name;
    facts.lingers = Env::System()->Info(JoinPath("/var/lib/systemd/linger", facts.user)).ok();
  } else {
    facts.user = absl::StrCat(facts.uid);  // loginctl takes numbers as well
  }
  return facts;
}

DaemonFacts CollectDaemon(const Context& context, std::string& memory_dir,
                          std::vector<TierDirFacts>& tier_dirs) {
  DaemonFacts facts;
  facts.socket = FindAdminSocket(context.socket);
  const auto client = AdminClient::Connect(facts.socket, context.timeout);
  facts.reachable = client.status();
  if (!client.ok()) {
    return facts;
  }
  facts.health = (*client)->CheckHealth();
  v1::GetStatusReply reply;
  facts.status_call = (*client)->GetStatus(v1::GetStatusRequest(), reply);
  const v1::DaemonStatus& daemon = reply.daemon();
  facts.version = daemon.version();
  facts.pid = daemon.pid();
  facts.memory_bytes_max = daemon.memory_bytes_max();
  facts.memory_bytes_used = daemon.memory_bytes_used();
  facts.memory_bytes_free_in_tmpfs = daemon.memory_bytes_free_in_tmpfs();
  facts.slots_quarantined = daemon.slots_quarantined();
  facts.problems.assign(daemon.problems().begin(), daemon.problems().end());
  for (const v1::TierStatus& tier : daemon.tiers()) {
    facts.tiers.push_back({tier.tier(), tier.state(), tier.healthy(), tier.engine(), tier.stalled(),
                           std::vector<std::string>(tier.notes().begin(), tier.notes().end())});
    for (const std::string& dir : tier.dirs()) {
      tier_dirs.push_back({.tier = tier.tier(), .probe = {.dir = dir}});
    }
  }
  memory_dir = daemon.memory_dir();
  return facts;
}

// Where the durable tiers would be if the daemon were started now.
void ConfiguredDirs(const v1::DaemonConfig& config, std::vector<TierDirFacts>& tier_dirs) {
  for (const std::string& dir : config.nvme().dirs()) {
    tier_dirs.push_back({.tier = "nvme", .probe = {.dir = dir}});
  }
  if (!config.remote().dir().empty()) {
    tier_dirs.push_back({.tier = "remote", .probe = {.dir = config.remote().dir()}});
  }
}

// Nothing here touches the directories themselves but the probes, which may hang.
void CollectTierDirs(std::vector<TierDirFacts>& tier_dirs) {
  std::vector<std::string> dirs;
  for (const TierDirFacts& dir : tier_dirs) {
    dirs.push_back(dir.probe.dir);
  }
  const std::vector<DirectoryProbe> probes = ProbeDirectories(dirs, kProbeTimeout);
  const std::string mountinfo = KernelText("/proc/self/mountinfo");
  for (size_t i = 0; i < tier_dirs.size(); ++i) {
    const MountFacts mount = FindMount(mountinfo, dirs[i]);
    tier_dirs[i].probe = probes[i];
    tier_dirs[i].fs_type = mount.type;
    tier_dirs[i].mount_point = mount.mount_point;
  }
}

// (Whether the key fits says the daemon, which can read it.)
void CollectCertificates(const v1::DaemonConfig& config, std::vector<TlsWord>& words) {
  const int64_t now_s = Clock::System()->UnixMillis() / 1000;
  const auto look = [&](const std::string& setting, const auto& tls) {
    if (tls.cert_file().empty() || tls.ca_file().empty()) {
      return;
    }
    const TlsFiles files = {tls.ca_file(), tls.cert_file(), tls.key_file()};
    TlsWord word{.setting = setting};
    TlsTexts texts;
    absl::Status status;
    for (const auto& [file, text] :
         {std::pair(&files.ca, &texts.ca), std::pair(&files.cert, &texts.cert)}) {
      absl::StatusOr<std::string> read = ReadFile(*Env::System(), *file, kTlsFileBytesMax);
      if (absl::IsPermissionDenied(read.status())) {
        return;  // nothing is known of it
      }
      status = status.ok() ? read.status() : status;
      *text = read.ok() ? *std::move(read) : "";
    }
    status = status.ok() ? CheckTlsTimes(texts, files, now_s) : status;
    word.bad = !status.ok();
    word.text = status.ok() ? EndsSoonText(texts, files, now_s, kEndsSoonS) : Message(status);
    words.push_back(std::move(word));
  };
  look("cluster.tls", config.cluster().tls());
  look("status_page.tls", config.status_page().tls());
  look("admin.tls", config.admin().tls());
}

// From where that process is; empty if that cannot be told.
std::string AbsolutePath(const std::string& path, const std::string& process) {
  if (path.empty() || path[0] == '/') {
    return path;
  }
  std::error_code failed;
  const auto directory = std::filesystem::read_symlink(JoinPath(process, "cwd"), failed);
  return failed ? "" : JoinPath(directory.string(), path);
}

// What ckptd's command line says for an option; empty: nothing, or that process is no ckptd (of
// another namespace of processes).
std::string DaemonsOption(int32_t pid, const std::string& option) {
  const std::vector<std::string> words =
      absl::StrSplit(KernelText(absl::StrCat("/proc/", pid, "/cmdline")), '\0');
  if (pid <= 0 || (words[0] != "ckptd" && !absl::EndsWith(words[0], "/ckptd"))) {
    return "";
  }
  std::string value;
  for (size_t i = 1; i < words.size(); ++i) {
    if (words[i] == option && i + 1 < words.size()) {
      value = words[i + 1];
    } else if (absl::StartsWith(words[i], option + "=")) {
      value = words[i].substr(option.size() + 1);
    }
  }
  return AbsolutePath(value, absl::StrCat("/proc/", pid));
}

// The file that is asked for; else that of the daemon that runs, if whoever asks may read it; else
// what ckptd would take.
std::string ConfigPath(const DoctorArguments& arguments, int32_t daemon_pid) {
  if (!arguments.config.empty()) {
    const std::string absolute = AbsolutePath(arguments.config, "/proc/self");
    return absolute.empty() ? arguments.config : absolute;
  }
  const std::string daemons = DaemonsOption(daemon_pid, "--config");
  return !daemons.empty() && ::access(daemons.c_str(), R_OK) == 0
             ? daemons
             : DefaultConfigPath(::geteuid() == 0);
}

// The daemon's settings as its file has them; what the file does not say is found as ckptd would.
v1::DaemonConfig CollectConfig(const DoctorArguments& arguments, Facts& facts) {
  v1::DaemonConfig config;
  facts.config_path = ConfigPath(arguments, facts.daemon.pid);
  if (!facts.config_path.empty()) {
    const auto text = ReadFile(*Env::System(), facts.config_path, kConfigBytesMax);
    facts.config = text.ok() ? ParseConfig(*text, facts.config_path, config) : text.status();
  }
  const std::string socket = DaemonsOption(facts.daemon.pid, "--socket");
  if (!socket.empty()) {
    config.mutable_socket()->set_path(socket);
  }
  return config;
}

}  // namespace

std::string DefaultConfigPath(bool root) {
  std::vector<std::string> paths = {kDefaultConfig};
  const char* xdg = std::getenv("XDG_CONFIG_HOME");
  const char* home = std::getenv("HOME");
  if (!root && xdg != nullptr && *xdg != '\0') {
    paths.insert(paths.begin(), JoinPath(xdg, "holdfast/ckptd.yaml"));
  } else if (!root && home != nullptr && *home != '\0') {
    paths.insert(paths.begin(), JoinPath(home, ".config/holdfast/ckptd.yaml"));
  }
  for (const std::string& path : paths) {
    if (path[0] == '/' && !absl::IsNotFound(Env::System()->Info(path).status())) {
      return path;
    }
  }
  return "";
}

MountFacts FindMount(std::string_view mountinfo, const std::string& path) {
  MountFacts found;
  for (const absl::string_view line : absl::StrSplit(ToAbsl(mountinfo), '\n')) {
    // "36 35 98:0 /root /mount/point rw,noatime shared:1 - tmpfs tmpfs rw,size=1k,huge=always"
    const std::vector<std::string> parts = absl::StrSplit(line, ' ');
    const auto dash = std::find(parts.begin(), parts.end(), "-");
    if (parts.size() < 6 || parts.end() - dash < 4) {
      continue;
    }
    const std::string& mount = parts[4];
    const bool holds = mount == "/" || path == mount || absl::StartsWith(path, mount + "/");
    // Of two at one place the later lies on top.
    if (!holds || mount.size() < found.mount_point.size()) {
      continue;
    }
    found = {.mount_point = mount, .huge = "never", .type = *(dash + 1)};
    for (const absl::string_view option : absl::StrSplit(*(dash + 3), ',')) {
      if (absl::StartsWith(option, "huge=")) {
        found.huge = std::string(option.substr(5));
      } else if (absl::StartsWith(option, "mpol=")) {
        found.mpol = std::string(option.substr(5));
      } else if (!found.mpol.empty() && !option.empty() &&
                 option.find_first_not_of("0123456789-") == absl::string_view::npos) {
        absl::StrAppend(&found.mpol, ",", option);  // "mpol=bind:0,2": its list has commas, too
      }
      found.noswap = found.noswap || option == "noswap";
    }
  }
  return found;
}

std::string ChosenWord(std::string_view text) {
  const size_t begin = text.find('[');
  const size_t end = text.find(']', begin == std::string_view::npos ? 0 : begin);
  if (begin == std::string_view::npos || end == std::string_view::npos) {
    return "";
  }
  return std::string(text.substr(begin + 1, end - begin - 1));
}

bool RemovesIpc(const std::vector<std::string>& settings) {
  bool removes = true;
  for (const std::string& text : settings) {
    bool login = false;
    for (const absl::string_view raw : absl::StrSplit(text, '\n')) {
      const absl::string_view line = absl::StripAsciiWhitespace(raw);
      if (absl::StartsWith(line, "[")) {
        login = line == "[Login]";
        continue;
      }
      const std::pair<std::string, std::string> setting =
          absl::StrSplit(line, absl::MaxSplits('=', 1));
      if (!login || absl::StripAsciiWhitespace(setting.first) != "RemoveIPC") {
        continue;
      }
      const std::string value = absl::AsciiStrToLower(absl::StripAsciiWhitespace(setting.second));
      for (const char* no : {"no", "n", "false", "f", "off", "0"}) {
        removes = removes && value != no;
      }
      for (const char* yes : {"yes", "y", "true", "t", "on", "1"}) {
        removes = removes || value == yes;
      }
    }
  }
  return removes;
}

Facts CollectFacts(const Context& context, const DoctorArguments& arguments) {
  Facts facts;
  utsname name{};
  if (::uname(&name) == 0) {
    facts.kernel_release = name.release;
    int major = 0;
    int minor = 0;
    facts.noswap_known = std::sscanf(name.release, "%d.%d", &major, &minor) == 2 &&
                         (major > 6 || (major == 6 && minor >= 4));
    facts.x86 = absl::StartsWith(name.machine, "x86");
  }
  facts.io_uring_error = TryIoUring();
  facts.pidfd_error = TryPidfd();
  facts.populate_error = TryPopulate();
  facts.copy_kernel = std::string(CopyKernelName());
  const std::string total = LineAfter(KernelText("/proc/meminfo"), "MemTotal:");
  uint64_t kib = 0;
  if (absl::SimpleAtoi(total.substr(0, total.find(' ')), &kib)) {
    facts.ram_bytes = kib * kKiB;
  }
  facts.shmem_huge = ChosenWord(KernelText("/sys/kernel/mm/transparent_hugepage/shmem_enabled"));
  facts.fabric_providers = FabricProviders();
  facts.rdma_devices = NamesIn("/sys/class/infiniband");

  std::string memory_dir;
  facts.daemon = CollectDaemon(context, memory_dir, facts.tier_dirs);
  const v1::DaemonConfig config = CollectConfig(arguments, facts);
  CollectCertificates(config, facts.certificates);
  if (!facts.daemon.reachable.ok() || !facts.daemon.status_call.ok()) {
    ConfiguredDirs(config, facts.tier_dirs);
  }
  if (memory_dir.empty()) {
    memory_dir = config.memory().dir();
  }
  facts.tmpfs.push_back(CollectTmpfs(kSharedMemory));
  if (!memory_dir.empty() && memory_dir.front() == '/') {
    TmpfsFacts other = CollectTmpfs(memory_dir);
    if (other.mount_point != facts.tmpfs.front().mount_point) {
      facts.tmpfs.push_back(std::move(other));
    }
  }
  facts.memory_dir = memory_dir;
  facts.limits = CollectLimits(facts.daemon.pid);
  facts.memory = CollectMemory("", facts.daemon.pid, memory_dir);
  facts.logout = CollectLogout(facts.daemon.pid);
  facts.is_daemons_user = ::geteuid() == 0 || ::geteuid() == facts.logout.uid;
  CollectTierDirs(facts.tier_dirs);
  facts.sockets.push_back(CollectSocket("admin socket", facts.daemon.socket));
  facts.sockets.push_back(CollectSocket(
      "client socket", config.socket().path().empty()
                           ? JoinPath(ParentDirectory(facts.daemon.socket), "ckptd.sock")
                           : config.socket().path()));
  return facts;
}

}  // namespace holdfast
