#include "server/runtime/status_page/status_connection.h"

#include <pthread.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/program.h"
#include "base/status.h"

namespace holdfast {
namespace {

class Plain final : public StatusConnection {
 public:
  explicit Plain(UniqueFd fd) : fd_(std::move(fd)) {}

  int socket() const override { return fd_.get(); }

  absl::StatusOr<TlsStep> Read(std::span<char> buffer) override {
    const ssize_t size = ::recv(fd_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    return size == 0 ? TlsStep{TlsStep::Kind::kEnded, 0}
                     : StepOf(size, "recv", TlsStep::Kind::kWantsToRead);
  }

  absl::StatusOr<TlsStep> Write(std::string_view bytes) override {
    const ssize_t size = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    return StepOf(size, "send", TlsStep::Kind::kWantsToWrite);
  }

  void End() override { ::shutdown(fd_.get(), SHUT_WR); }

 private:
  static absl::StatusOr<TlsStep> StepOf(ssize_t size, const char* call, TlsStep::Kind not_ready) {
    if (size >= 0) {
      return TlsStep{TlsStep::Kind::kDone, static_cast<size_t>(size)};
    }
    if (errno == EAGAIN) {
      return TlsStep{not_ready, 0};
    }
    return ErrnoStatus(errno, call, "a browser's connection");
  }

  const UniqueFd fd_;
};

class Encrypted final : public StatusConnection {
 public:
  Encrypted(UniqueFd fd, std::unique_ptr<TlsSession> session)
      : fd_(std::move(fd)), session_(std::move(session)) {}

  int socket() const override { return fd_.get(); }

  absl::StatusOr<TlsStep> Read(std::span<char> buffer) override {
    if (!greeted_) {
      HF_ASSIGN_OR_RETURN(const TlsStep step, session_->Handshake());
      if (step.kind != TlsStep::Kind::kDone) {
        return step;
      }
      greeted_ = true;
    }
    return session_->Read(buffer);
  }

  absl::StatusOr<TlsStep> Write(std::string_view bytes) override { return session_->Write(bytes); }

  void End() override {
    session_->End();
    ::shutdown(fd_.get(), SHUT_WR);
  }

 private:
  const UniqueFd fd_;
  const std::unique_ptr<TlsSession> session_;
  bool greeted_ = false;
};

}  // namespace

std::unique_ptr<StatusConnection> PlainConnection(UniqueFd fd) {
  return std::make_unique<Plain>(std::move(fd));
}

absl::StatusOr<std::unique_ptr<StatusTls>> StatusTls::Open(Env& env, const TlsFiles& files,
                                                           Duration look) {
  HF_RETURN_IF_ERROR(CheckThreads(1));
  HF_ASSIGN_OR_RETURN(TlsTexts texts, ReadTlsFiles(env, files));
  // (One that is not valid now may be replaced at any time.)
  if (const absl::Status fits = CheckTlsTexts(texts, files, Clock::System()->UnixMillis() / 1000);
      absl::IsInvalidArgument(fits)) {
    return fits;
  }
  HF_ASSIGN_OR_RETURN(std::shared_ptr<const TlsContext> context, TlsContext::ForServer(texts));
  std::unique_ptr<StatusTls> tls(
      new StatusTls(env, files, look, std::move(texts), std::move(context)));
  tls->thread_ = std::thread([t = tls.get()] { t->Run(); });
  return tls;
}

StatusTls::StatusTls(Env& env, TlsFiles files, Duration look, TlsTexts texts,
                     std::shared_ptr<const TlsContext> context)
    : env_(env),
      files_(std::move(files)),
      look_(look),
      texts_(std::move(texts)),
      context_(std::move(context)) {}

StatusTls::~StatusTls() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

void StatusTls::Run() {
  ::pthread_setname_np(::pthread_self(), "status-tls");
  for (;;) {
    {
      const auto until = std::chrono::steady_clock::now() + look_;
      MutexLock lock(mutex_);
      while (!stopping_ && wake_.WaitUntil(mutex_, until)) {
      }
      if (stopping_) {
        return;
      }
    }
    if (const absl::Status looked = Look(); !looked.ok()) {
      LogFrom(LogLevel::kDebug, "status page",
              absl::StrCat("status_page.tls: ", Message(looked), "; those of before stay in use"));
    }
  }
}

absl::Status StatusTls::Look() {
  HF_ASSIGN_OR_RETURN(TlsTexts texts, ReadTlsFiles(env_, files_));
  if (texts == texts_) {
    return absl::OkStatus();
  }
  HF_ASSIGN_OR_RETURN(std::shared_ptr<const TlsContext> context, TlsContext::ForServer(texts));
  texts_ = std::move(texts);
  MutexLock lock(mutex_);
  context_ = std::move(context);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<StatusConnection>> StatusTls::Accept(UniqueFd fd) {
  std::shared_ptr<const TlsContext> context;
  {
    MutexLock lock(mutex_);
    context = context_;
  }
  HF_ASSIGN_OR_RETURN(auto session, TlsSession::Create(context, fd.get(), ""));
  return std::make_unique<Encrypted>(std::move(fd), std::move(session));
}

}  // namespace holdfast
