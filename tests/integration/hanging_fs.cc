#include "tests/integration/hanging_fs.h"

#include <fcntl.h>
#include <linux/fuse.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "tests/integration/harness.h"

namespace holdfast {
namespace {

constexpr uint32_t kWriteMax = 128 << 10;

const fuse_in_header& Header(const std::vector<char>& request) {
  return *reinterpret_cast<const fuse_in_header*>(request.data());
}

template <typename T>
const T& Body(const std::vector<char>& request) {
  return *reinterpret_cast<const T*>(request.data() + sizeof(fuse_in_header));
}

// A name after `skip` bytes of the body.
std::string Name(const std::vector<char>& request, size_t skip = 0) {
  return request.data() + sizeof(fuse_in_header) + skip;
}

fuse_attr Attributes(const struct stat& st) {
  fuse_attr attr = {};
  attr.ino = st.st_ino;
  attr.size = static_cast<uint64_t>(st.st_size);
  attr.blocks = static_cast<uint64_t>(st.st_blocks);
  attr.atime = static_cast<uint64_t>(st.st_atim.tv_sec);
  attr.mtime = static_cast<uint64_t>(st.st_mtim.tv_sec);
  attr.ctime = static_cast<uint64_t>(st.st_ctim.tv_sec);
  attr.mode = st.st_mode;
  attr.nlink = static_cast<uint32_t>(st.st_nlink);
  attr.uid = st.st_uid;
  attr.gid = st.st_gid;
  attr.blksize = 4096;
  return attr;
}

int OpenFlags(uint32_t flags) {  // the bytes come from buffers of any alignment
  return static_cast<int>(flags) & ~(O_DIRECT | O_CREAT | O_EXCL | O_NOFOLLOW);
}

}  // namespace

HangingMount::HangingMount() {
  std::filesystem::create_directory(directory_.Path("backing"));
  std::filesystem::create_directory(path());
  paths_[FUSE_ROOT_ID] = directory_.Path("backing");
  nodes_[directory_.Path("backing")] = FUSE_ROOT_ID;
  device_ = UniqueFd(::open("/dev/fuse", O_RDWR | O_CLOEXEC));
  if (!device_.valid() || ::unshare(CLONE_NEWNS) != 0 ||
      ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
    return;
  }
  const std::string options =
      "fd=" + std::to_string(device_.get()) + ",rootmode=40000,user_id=0,group_id=0,allow_other";
  mounted_ = ::mount("hanging", path().c_str(), "fuse", 0, options.c_str()) == 0;
  if (mounted_) {
    thread_ = std::thread([this] { Serve(); });
  }
}

HangingMount::~HangingMount() {
  if (mounted_) {
    Release();
    ::umount2(path().c_str(), MNT_FORCE);  // ends the connection, and with it the thread
    ::umount2(path().c_str(), MNT_DETACH);
    thread_.join();
  }
}

void HangingMount::HangAtWrite() {
  const std::lock_guard lock(mutex_);
  armed_ = true;
}

bool HangingMount::AwaitHanging() {
  std::unique_lock lock(mutex_);
  return hung_.wait_for(lock, kPatience, [this] { return hanging_; });
}

void HangingMount::IgnoreInterrupts() {
  const std::lock_guard lock(mutex_);
  interrupts_ = false;
}

void HangingMount::Release() {
  std::vector<Request> waiting;
  {
    const std::lock_guard lock(mutex_);
    armed_ = hanging_ = false;
    waiting.swap(waiting_);
  }
  for (const Request& request : waiting) {
    Perform(request);
  }
}

void HangingMount::Serve() {
  for (;;) {
    Request request(kWriteMax + (64 << 10));
    const ssize_t got = ::read(device_.get(), request.data(), request.size());
    if (got < 0 && (errno == EINTR || errno == ENOENT || errno == EAGAIN)) {
      continue;
    }
    if (got <= 0) {
      return;  // unmounted
    }
    request.resize(static_cast<size_t>(got) + 1);  // names end with a zero in any case
    Take(std::move(request));
  }
}

void HangingMount::Take(Request request) {
  const fuse_in_header& header = Header(request);
  if (header.opcode == FUSE_INTERRUPT) {
    return Interrupted(Body<fuse_interrupt_in>(request).unique);
  }
  if (header.opcode == FUSE_FORGET || header.opcode == FUSE_BATCH_FORGET) {
    return;
  }
  // A process that ends closes its files, and nothing interrupts that.
  if (header.opcode == FUSE_FLUSH || header.opcode == FUSE_RELEASE ||
      header.opcode == FUSE_RELEASEDIR) {
    return Perform(request);
  }
  {
    const std::lock_guard lock(mutex_);
    hanging_ = hanging_ || (armed_ && header.opcode == FUSE_WRITE);
    if (hanging_) {
      waiting_.push_back(std::move(request));
      return hung_.notify_all();
    }
  }
  Perform(request);
}

void HangingMount::Interrupted(uint64_t unique) {
  const std::lock_guard lock(mutex_);
  if (!interrupts_) {
    return;
  }
  for (auto it = waiting_.begin(); it != waiting_.end(); ++it) {
    if (Header(*it).unique == unique) {
      waiting_.erase(it);
      return Reply(unique, EINTR, nullptr, 0);
    }
  }
}

void HangingMount::Reply(uint64_t unique, int error, const void* data, size_t bytes) {
  fuse_out_header header = {static_cast<uint32_t>(sizeof(header) + bytes), -error, unique};
  std::array<iovec, 2> parts = {iovec{&header, sizeof(header)},
                                iovec{const_cast<void*>(data), bytes}};
  [[maybe_unused]] const ssize_t sent =
      ::writev(device_.get(), parts.data(), bytes == 0 ? 1 : 2);  // an interrupted one is gone
}

void HangingMount::ReplyTo(const Request& request, int64_t result) {
  Reply(Header(request).unique, result < 0 ? errno : 0, nullptr, 0);
}

uint64_t HangingMount::NodeOf(const std::string& path) {
  uint64_t& node = nodes_[path];
  if (node == 0) {
    node = ++last_node_;
    paths_[node] = path;
  }
  return node;
}

void HangingMount::ReplyEntry(const Request& request, const std::string& path, const void* more,
                              size_t bytes) {
  struct stat st = {};
  if (::lstat(path.c_str(), &st) != 0) {
    return ReplyTo(request, -1);
  }
  fuse_entry_out entry = {};
  entry.nodeid = NodeOf(path);
  entry.attr = Attributes(st);
  std::string all(reinterpret_cast<const char*>(&entry), sizeof(entry));
  all.append(static_cast<const char*>(more), bytes);
  Reply(Header(request).unique, 0, all.data(), all.size());
}

void HangingMount::ReplyAttributes(const Request& request, int error, const std::string& path,
                                   int fd) {
  struct stat st = {};
  if (error == 0 && (fd >= 0 ? ::fstat(fd, &st) : ::lstat(path.c_str(), &st)) != 0) {
    error = errno;
  }
  fuse_attr_out out = {};
  out.attr = Attributes(st);
  Reply(Header(request).unique, error, &out, error == 0 ? sizeof(out) : 0);
}

void HangingMount::SetAttributes(const Request& request) {
  const auto& in = Body<fuse_setattr_in>(request);
  const std::string path = PathOf(Header(request).nodeid);
  const int fd = (in.valid & FATTR_FH) != 0 ? static_cast<int>(in.fh) : -1;
  int error = 0;
  const auto check = [&error](int result) { error = result != 0 && error == 0 ? errno : error; };
  if ((in.valid & FATTR_SIZE) != 0) {
    const auto size = static_cast<off_t>(in.size);
    check(fd >= 0 ? ::ftruncate(fd, size) : ::truncate(path.c_str(), size));
  }
  if ((in.valid & (FATTR_UID | FATTR_GID)) != 0) {
    const uid_t uid = (in.valid & FATTR_UID) != 0 ? in.uid : static_cast<uid_t>(-1);
    const gid_t gid = (in.valid & FATTR_GID) != 0 ? in.gid : static_cast<gid_t>(-1);
    check(fd >= 0 ? ::fchown(fd, uid, gid) : ::lchown(path.c_str(), uid, gid));
  }
  if ((in.valid & FATTR_MODE) != 0) {
    check(fd >= 0 ? ::fchmod(fd, in.mode) : ::chmod(path.c_str(), in.mode));
  }
  ReplyAttributes(request, error, path, fd);
}

void HangingMount::ReadDirectory(const Request& request) {
  const auto& in = Body<fuse_read_in>(request);
  const std::vector<std::string> names = FilesIn(PathOf(Header(request).nodeid), "");
  std::string out;
  for (size_t i = in.offset; i < names.size(); ++i) {
    const std::string path = PathOf(Header(request).nodeid) + "/" + names[i];
    struct stat st = {};
    ::lstat(path.c_str(), &st);
    fuse_dirent entry = {};
    entry.ino = st.st_ino;
    entry.off = i + 1;
    entry.namelen = static_cast<uint32_t>(names[i].size());
    entry.type = (st.st_mode & S_IFMT) >> 12;
    std::string one(reinterpret_cast<const char*>(&entry), FUSE_NAME_OFFSET);
    one += names[i];
    one.resize(FUSE_DIRENT_ALIGN(one.size()));
    if (out.size() + one.size() > in.size) {
      break;
    }
    out += one;
  }
  Reply(Header(request).unique, 0, out.data(), out.size());
}

void HangingMount::Rename(const Request& request, const std::string& from, const std::string& to,
                          uint32_t flags) {
  const auto result = ::syscall(SYS_renameat2, AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags);
  if (result == 0) {
    const uint64_t node = NodeOf(from);
    nodes_.erase(from);
    nodes_[to] = node;
    paths_[node] = to;
  }
  ReplyTo(request, result);
}

void HangingMount::Perform(const Request& request) {
  const std::lock_guard lock(serving_);
  const fuse_in_header& header = Header(request);
  const auto below = [&](size_t skip) { return PathOf(header.nodeid) + "/" + Name(request, skip); };
  switch (header.opcode) {
    case FUSE_INIT: {
      fuse_init_out out = {};
      out.major = FUSE_KERNEL_VERSION;
      out.minor = 31;
      out.max_readahead = 0;
      out.max_write = kWriteMax;
      out.max_background = 64;
      out.congestion_threshold = 48;
      return Reply(header.unique, 0, &out, sizeof(out));
    }
    case FUSE_LOOKUP:
      return ReplyEntry(request, below(0), nullptr, 0);
    case FUSE_GETATTR: {
      const auto& in = Body<fuse_getattr_in>(request);
      return ReplyAttributes(
          request, 0, PathOf(header.nodeid),
          (in.getattr_flags & FUSE_GETATTR_FH) != 0 ? static_cast<int>(in.fh) : -1);
    }
    case FUSE_SETATTR:
      return SetAttributes(request);
    case FUSE_MKDIR: {
      const std::string path = below(sizeof(fuse_mkdir_in));
      return ::mkdir(path.c_str(), Body<fuse_mkdir_in>(request).mode) != 0
                 ? ReplyTo(request, -1)
                 : ReplyEntry(request, path, nullptr, 0);
    }
    case FUSE_UNLINK:
    case FUSE_RMDIR: {
      const std::string path = below(0);
      const int result =
          header.opcode == FUSE_RMDIR ? ::rmdir(path.c_str()) : ::unlink(path.c_str());
      if (result == 0) {
        nodes_.erase(path);
      }
      return ReplyTo(request, result);
    }
    case FUSE_RENAME: {
      const std::string from = Name(request, sizeof(fuse_rename_in));
      return Rename(request, below(sizeof(fuse_rename_in)),
                    PathOf(Body<fuse_rename_in>(request).newdir) + "/" +
                        Name(request, sizeof(fuse_rename_in) + from.size() + 1),
                    0);
    }
    case FUSE_RENAME2: {
      const auto& in = Body<fuse_rename2_in>(request);
      const std::string from = Name(request, sizeof(in));
      return Rename(request, below(sizeof(in)),
                    PathOf(in.newdir) + "/" + Name(request, sizeof(in) + from.size() + 1),
                    in.flags);
    }
    case FUSE_LINK: {
      const std::string path = below(sizeof(fuse_link_in));
      const std::string old = PathOf(Body<fuse_link_in>(request).oldnodeid);
      return ::link(old.c_str(), path.c_str()) != 0 ? ReplyTo(request, -1)
                                                    : ReplyEntry(request, path, nullptr, 0);
    }
    case FUSE_OPEN: {
      const int fd = ::open(PathOf(header.nodeid).c_str(),
                            OpenFlags(Body<fuse_open_in>(request).flags) | O_CLOEXEC);
      fuse_open_out out = {};
      out.fh = static_cast<uint64_t>(fd);
      out.open_flags = FOPEN_DIRECT_IO;
      return fd < 0 ? ReplyTo(request, -1) : Reply(header.unique, 0, &out, sizeof(out));
    }
    case FUSE_CREATE: {
      const auto& in = Body<fuse_create_in>(request);
      const std::string path = below(sizeof(in));
      const int fd =
          ::open(path.c_str(), OpenFlags(in.flags) | O_CREAT | O_EXCL | O_CLOEXEC, in.mode);
      fuse_open_out out = {};
      out.fh = static_cast<uint64_t>(fd);
      out.open_flags = FOPEN_DIRECT_IO;
      return fd < 0 ? ReplyTo(request, -1) : ReplyEntry(request, path, &out, sizeof(out));
    }
    case FUSE_READ: {
      const auto& in = Body<fuse_read_in>(request);
      std::string bytes(in.size, '\0');
      const ssize_t got = ::pread(static_cast<int>(in.fh), bytes.data(), bytes.size(),
                                  static_cast<off_t>(in.offset));
      return got < 0 ? ReplyTo(request, -1)
                     : Reply(header.unique, 0, bytes.data(), static_cast<size_t>(got));
    }
    case FUSE_WRITE: {
      const auto& in = Body<fuse_write_in>(request);
      const ssize_t wrote =
          ::pwrite(static_cast<int>(in.fh), request.data() + sizeof(header) + sizeof(in), in.size,
                   static_cast<off_t>(in.offset));
      const fuse_write_out out = {static_cast<uint32_t>(wrote), 0};
      return wrote < 0 ? ReplyTo(request, -1) : Reply(header.unique, 0, &out, sizeof(out));
    }
    case FUSE_FSYNC:
      return ReplyTo(request, ::fdatasync(static_cast<int>(Body<fuse_fsync_in>(request).fh)));
    case FUSE_FALLOCATE: {
      const auto& in = Body<fuse_fallocate_in>(request);
      return ReplyTo(request,
                     ::fallocate(static_cast<int>(in.fh), static_cast<int>(in.mode),
                                 static_cast<off_t>(in.offset), static_cast<off_t>(in.length)));
    }
    case FUSE_RELEASE:
      return ReplyTo(request, ::close(static_cast<int>(Body<fuse_release_in>(request).fh)));
    case FUSE_OPENDIR: {
      const fuse_open_out out = {};
      return Reply(header.unique, 0, &out, sizeof(out));
    }
    case FUSE_READDIR:
      return ReadDirectory(request);
    case FUSE_FLUSH:
    case FUSE_FSYNCDIR:
    case FUSE_RELEASEDIR:
    case FUSE_ACCESS:
      return Reply(header.unique, 0, nullptr, 0);
    case FUSE_STATFS: {
      struct statvfs fs = {};
      ::statvfs(PathOf(FUSE_ROOT_ID).c_str(), &fs);
      fuse_statfs_out out = {};
      out.st.blocks = fs.f_blocks;
      out.st.bfree = fs.f_bfree;
      out.st.bavail = fs.f_bavail;
      out.st.bsize = static_cast<uint32_t>(fs.f_bsize);
      out.st.frsize = static_cast<uint32_t>(fs.f_frsize);
      out.st.namelen = 255;
      return Reply(header.unique, 0, &out, sizeof(out));
    }
    default:
      return Reply(header.unique, ENOSYS, nullptr, 0);
  }
}

}  // namespace holdfast
