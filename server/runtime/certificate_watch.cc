#include "server/runtime/certificate_watch.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/program.h"
#include "base/status.h"

namespace holdfast {

absl::StatusOr<std::unique_ptr<CertificateWatch>> CertificateWatch::Start(Options options) {
  HF_RETURN_IF_ERROR(CheckThreads(1));
  std::unique_ptr<CertificateWatch> watch(new CertificateWatch(std::move(options)));
  watch->thread_ = std::thread([w = watch.get()] { w->Run(); });
  return watch;
}

CertificateWatch::~CertificateWatch() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

void CertificateWatch::Run() {
  for (;;) {
    const bool same = Look();
    const auto until = std::chrono::steady_clock::now() + (same ? options_.every : options_.again);
    MutexLock lock(mutex_);
    while (!stopping_ && wake_.WaitUntil(mutex_, until)) {
    }
    if (stopping_) {
      return;
    }
  }
}

bool CertificateWatch::Look() {
  bool same = true;
  for (const Watched& watched : options_.watched) {
    const std::string now = Problem(watched);
    std::string& seen = seen_[watched.setting];
    std::string& told = told_[watched.setting];
    if (now != seen) {
      same = false;
    } else if (now != told) {
      told = now;
      options_.changed(watched.setting, now);
    }
    seen = now;
  }
  return same;
}

std::string CertificateWatch::Problem(const Watched& watched) const {
  const int64_t now_s = options_.clock->UnixMillis() / 1000;
  const absl::StatusOr<TlsTexts> texts = ReadTlsFiles(*options_.env, watched.files);
  const absl::Status status =
      texts.ok() ? CheckTlsTexts(*texts, watched.files, now_s) : texts.status();
  std::string problem;
  if (!status.ok()) {
    problem = watched.only_soon ? "" : Message(status);
  } else {
    problem =
        EndsSoonText(*texts, watched.files, now_s, kCertificateEndsSoon / std::chrono::seconds(1));
  }
  return problem.empty() ? "" : absl::StrCat(watched.setting, ": ", problem);
}

}  // namespace holdfast
