// Files of removed copies, kept to be overwritten: writing into extents that are there runs about
// twice as fast as into fresh ones. Nothing in the pool is a copy; a file leaves it only when
// nobody can read it any more under its old life.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/durable/copy_store_impl.h"

namespace holdfast {
namespace {

constexpr uint32_t kPrivateMode = 0600;
constexpr int kCandidatesMax = 4;  // that somebody still has, before a fresh file is made

// Images of one rank differ by a few bytes from step to step, so a file may also be a little
// shorter.
bool Fits(uint64_t held, uint64_t bytes) {
  return held >= bytes - bytes / 16 && held / 2 <= bytes;
}

uint64_t Misfit(uint64_t held, uint64_t bytes) {
  return held >= bytes ? held - bytes : bytes - held;
}

}  // namespace

absl::Status CopyStore::Impl::LoadPool() {
  HF_ASSIGN_OR_RETURN(const std::vector<std::string> names, env.List(pool_dir, kDirectoryNamesMax));
  std::map<std::string, uint64_t> found;
  uint64_t bytes = 0;
  for (const std::string& name : names) {
    if (!IsUnique(name)) {
      continue;  // nobody's; the scan reports it
    }
    HF_ASSIGN_OR_RETURN(const FileInfo info, env.Info(JoinPath(pool_dir, name)));
    if (!S_ISREG(info.mode)) {
      continue;  // likewise
    }
    found[name] = info.bytes;
    bytes += info.bytes;
  }
  MutexLock hold(mutex);
  pool = std::move(found);
  pool_bytes = bytes;
  return absl::OkStatus();
}

absl::StatusOr<bool> CopyStore::Impl::IsInPool(const std::string& name) {
  const absl::StatusOr<FileInfo> info = env.Info(JoinPath(pool_dir, name));
  if (info.ok() || absl::IsNotFound(info.status())) {
    return info.ok() && S_ISREG(info->mode);
  }
  return info.status();
}

absl::Status CopyStore::Impl::DeleteFromPool(const std::string& name) {
  HF_ASSIGN_OR_RETURN(const bool there, IsInPool(name));
  return there ? RemoveIfThere(JoinPath(pool_dir, name)) : absl::OkStatus();
}

absl::Status CopyStore::Impl::ForgetWhatLeftThePool() {
  std::map<std::string, uint64_t> known;
  {
    MutexLock hold(mutex);
    known = pool;
  }
  for (const auto& [name, bytes] : known) {
    HF_ASSIGN_OR_RETURN(const bool there, IsInPool(name));
    MutexLock hold(mutex);
    if (!there && pool.erase(name) == 1) {
      pool_bytes -= bytes;
    }
  }
  return absl::OkStatus();
}

// Files that a copy as long as this one could not use go first, the least alike of them: they would
// stay for ever if the job that had such is gone. Files as good as this one stay.
bool CopyStore::Impl::MakeRoomInPool(uint64_t bytes) {
  if (bytes > options.pool_bytes_max) {
    return false;
  }
  for (;;) {
    std::string name;
    uint64_t freed = 0;
    {
      MutexLock hold(mutex);
      if (pool_bytes <= options.pool_bytes_max - bytes) {
        return true;
      }
      auto worst = pool.end();
      for (auto it = pool.begin(); it != pool.end(); ++it) {
        if (!Fits(it->second, bytes) &&
            (worst == pool.end() || Misfit(it->second, bytes) > Misfit(worst->second, bytes))) {
          worst = it;
        }
      }
      if (worst == pool.end()) {
        return false;
      }
      name = worst->first;
      freed = worst->second;
      pool_bytes -= freed;
      pool.erase(worst);
    }
    if (!DeleteFromPool(name).ok()) {
      MutexLock hold(mutex);
      pool[name] = freed;
      pool_bytes += freed;
      return false;
    }
  }
}

absl::Status CopyStore::Impl::Recycle(const std::string& path, uint64_t bytes,
                                      RemovalReport& report) {
  if (bytes > 0 && MakeRoomInPool(bytes)) {
    const std::string name = NewUnique();
    absl::Status moved = env.Rename(path, JoinPath(pool_dir, name));
    if (absl::IsNotFound(moved)) {  // somebody removed the pool
      HF_RETURN_IF_ERROR(CheckMount());
      HF_RETURN_IF_ERROR(MakeOwn(pool_dir));
      HF_RETURN_IF_ERROR(ForgetWhatLeftThePool());
      moved = env.Rename(path, JoinPath(pool_dir, name));
    }
    if (moved.ok()) {
      report.bytes_recycled += bytes;
      {
        MutexLock hold(mutex);
        pool[name] = bytes;
        pool_bytes += bytes;
      }
      return env.SyncDirectory(pool_dir);
    }
  }
  HF_RETURN_IF_ERROR(RemoveIfThere(path));
  report.bytes_freed += bytes;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<File>> CopyStore::Impl::TakeFromPool(const std::string& path,
                                                                    uint64_t bytes, bool direct) {
  for (int candidate = 0; candidate < kCandidatesMax; ++candidate) {
    // 1. The one that fits best: it is nobody else's from here on.
    std::string name;
    uint64_t size = 0;
    {
      MutexLock hold(mutex);
      auto best = pool.end();
      for (auto it = pool.begin(); it != pool.end(); ++it) {
        if (Fits(it->second, bytes) &&
            (best == pool.end() || Misfit(it->second, bytes) < Misfit(best->second, bytes))) {
          best = it;
        }
      }
      if (best == pool.end()) {
        return nullptr;
      }
      name = best->first;
      size = best->second;
      pool_bytes -= size;
      pool.erase(best);
    }
    const auto put_back = [&, this] {
      MutexLock hold(mutex);
      pool[name] = size;
      pool_bytes += size;
    };
    const absl::StatusOr<bool> there = IsInPool(name);
    if (!there.ok()) {
      put_back();
      return there.status();
    }
    if (!*there) {  // somebody removed or replaced it, and perhaps others
      HF_RETURN_IF_ERROR(ForgetWhatLeftThePool());
      continue;
    }
    // 2. Under the temporary name, which the intent names; gone from the pool for good.
    if (absl::Status status = env.Rename(JoinPath(pool_dir, name), path); !status.ok()) {
      const absl::StatusOr<bool> still_there = IsInPool(name);
      if (!still_there.ok() || *still_there) {
        put_back();
      }
      return status;
    }
    HF_RETURN_IF_ERROR(env.SyncDirectory(pool_dir));
    // 3. Nobody has it: no other name, nobody who may open it, nobody who has.
    HF_ASSIGN_OR_RETURN(
        std::unique_ptr<File> file,
        env.Open(path, OpenMode::kReadWrite, {.direct = direct, .no_symlink = true}));
    if (options.set_owner) {
      HF_RETURN_IF_ERROR(file->SetOwner(::geteuid(), ::getegid()));
    }
    HF_RETURN_IF_ERROR(file->SetMode(kPrivateMode));
    HF_ASSIGN_OR_RETURN(const FileInfo info, file->Info());
    HF_ASSIGN_OR_RETURN(const bool alone, file->NobodyElseHasIt());
    if (info.links == 1 && alone) {
      return file;
    }
    // 4. Else whoever has it keeps it as it is, without a name.
    file.reset();
    HF_RETURN_IF_ERROR(env.Unlink(path));
  }
  return nullptr;
}

absl::Status CopyStore::Impl::TrimPool(uint64_t bytes) {
  bool any = false;
  for (;;) {
    std::string name;
    uint64_t freed = 0;
    {
      MutexLock hold(mutex);
      if (pool_bytes <= bytes || pool.empty()) {
        break;
      }
      const auto largest =
          std::max_element(pool.begin(), pool.end(),
                           [](const auto& a, const auto& b) { return a.second < b.second; });
      name = largest->first;
      freed = largest->second;
      pool_bytes -= freed;
      pool.erase(largest);
    }
    if (absl::Status status = DeleteFromPool(name); !status.ok()) {
      MutexLock hold(mutex);
      pool[name] = freed;
      pool_bytes += freed;
      return status;
    }
    any = true;
  }
  // File systems with a journal give the room away only when this is durable.
  const absl::Status synced = any ? env.SyncDirectory(pool_dir) : absl::OkStatus();
  return absl::IsNotFound(synced) ? absl::OkStatus() : synced;  // somebody removed the pool
}

absl::Status CopyStore::TrimPool(uint64_t bytes) {
  if (impl_->remote()) {
    return absl::OkStatus();
  }
  HF_RETURN_IF_ERROR(impl_->Prepare());
  return impl_->TrimPool(bytes);
}

}  // namespace holdfast
