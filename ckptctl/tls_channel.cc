#include "ckptctl/tls_channel.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/status.h"
#include "base/tcp_socket.h"
#include "base/utf8.h"

namespace holdfast {
namespace {

constexpr int kPartingMs = 1000;

TlsFiles FilesIn(const std::string& directory) {
  return {JoinPath(directory, "ca.crt"), JoinPath(directory, "tls.crt"),
          JoinPath(directory, "tls.key")};
}

std::string Absolute(const std::string& path) {
  std::array<char, 4096> here = {};
  return path.empty() || path[0] == '/' || ::getcwd(here.data(), here.size()) == nullptr
             ? path
             : JoinPath(here.data(), path);
}

absl::Status NotLetIn(absl::Status status) {
  status.SetPayload(kNotLetIn, absl::Cord());
  return status;
}

// What a daemon that has gone, or comes, may look like.
bool MayPass(TlsFault fault) {
  return fault == TlsFault::kNone || fault == TlsFault::kOther || fault == TlsFault::kClosed;
}

std::string Seconds(Duration time) {
  return absl::StrCat(std::chrono::duration<double>(time).count(), " s");
}

}  // namespace

std::string FarewellIn(std::string_view bytes) {
  // RFC 9113: frames of a length, a type, flags and a stream; GOAWAY has the last stream that was
  // taken, why, and a text. ENHANCE_YOUR_CALM is what ckptd says at its door.
  constexpr size_t kHeader = 9;
  constexpr size_t kFields = 8;
  constexpr char kGoaway = 7;
  constexpr std::string_view kCalm("\0\0\0\x0b", 4);
  while (bytes.size() >= kHeader) {
    const auto at = [&](size_t i) { return static_cast<size_t>(static_cast<uint8_t>(bytes[i])); };
    const size_t size = at(0) << 16 | at(1) << 8 | at(2);
    const char type = bytes[3];
    bytes.remove_prefix(kHeader);
    if (size > bytes.size()) {
      return "";
    }
    if (type == kGoaway && size >= kFields && bytes.substr(4, 4) == kCalm) {
      return PrintableText(bytes.substr(kFields, size - kFields));
    }
    bytes.remove_prefix(size);
  }
  return "";
}

TlsChannel::TlsChannel(std::string address, std::string directory)
    : address_(std::move(address)), directory_(std::move(directory)) {}

absl::StatusOr<std::unique_ptr<TlsChannel>> TlsChannel::Connect(const std::string& address,
                                                                const std::string& directory,
                                                                Duration timeout) {
  std::unique_ptr<TlsChannel> channel(new TlsChannel(address, Absolute(directory)));
  HF_RETURN_IF_ERROR(channel->Begin(timeout));
  return channel;
}

// Of what went wrong with TLS: what to do.
absl::Status TlsChannel::Explain(const absl::Status& status, TlsFault fault) const {
  std::string way_out;
  switch (fault) {
    case TlsFault::kPlainText:
      way_out = "; is it the port of admin.tls.address?";
      break;
    case TlsFault::kVersion:
      way_out = "; is there a ckptd at that port?";
      break;
    case TlsFault::kClosed:
      way_out =
          "; it may have too many connections, or no certificate to show: its log says so (\"admin "
          "connection turned away\"), and its status (\"admin.tls\")";
      break;
    case TlsFault::kTheirsExpired:
    case TlsFault::kTheirsTooNew:
      way_out = "; it is in admin.tls.cert_file of that ckptd, which reads a new one by itself";
      break;
    case TlsFault::kTheirsUnknown:
      way_out = absl::StrCat("; put the authority of admin.tls.cert_file of that ckptd into '",
                             FilesIn(directory_).ca, "'");
      break;
    case TlsFault::kTheirsNamed:
      way_out =
          "; say one of its names in --address, or let admin.tls.cert_file of that ckptd have this "
          "one as well";
      break;
    case TlsFault::kOursUnknown:
      way_out = absl::StrCat("; the authority of '", FilesIn(directory_).cert,
                             "' belongs into admin.tls.ca_file of that ckptd, or take a "
                             "certificate of the authority that is there");
      break;
    case TlsFault::kOursExpired:
      way_out = absl::StrCat("; '", FilesIn(directory_).cert,
                             "' has expired there: are both clocks right?");
      break;
    default:
      break;
  }
  const absl::Status explained = absl::UnavailableError(
      absl::StrCat("no TLS with ckptd at ", address_, ": ", Message(status), way_out));
  return MayPass(fault) ? explained : NotLetIn(explained);
}

absl::Status TlsChannel::Begin(Duration timeout) {
  const MonotonicTime until = Clock::System()->Now() + timeout;
  const auto unreachable = [&](const std::string& why) {
    return absl::UnavailableError(absl::StrCat("cannot reach ckptd at ", address_, ": ", why));
  };
  const auto too_late = [&](const std::string& what) {
    return absl::DeadlineExceededError(
        absl::StrCat("cannot reach ckptd at ", address_, ": ", what, " within ", Seconds(timeout),
                     ": is something in between (a firewall), or is it busy? Give it longer with "
                     "--timeout"));
  };
  // 1. What we show, and whom we trust.
  const TlsFiles files = FilesIn(directory_);
  const absl::StatusOr<TlsTexts> texts = ReadTlsFiles(*Env::System(), files);
  if (!texts.ok()) {
    return NotLetIn(
        unreachable(absl::StrCat(Message(texts.status()),
                                 "; --tls names a directory with ca.crt, tls.crt and tls.key, "
                                 "as a Kubernetes secret has them")));
  }
  if (const absl::Status fits = CheckTlsTexts(*texts, files, Clock::System()->UnixMillis() / 1000);
      !fits.ok()) {
    return NotLetIn(unreachable(Message(fits)));
  }
  const absl::StatusOr<std::shared_ptr<const TlsContext>> context =
      TlsContext::ForClient(*texts, "h2");
  if (!context.ok()) {
    return NotLetIn(
        unreachable(absl::StrCat("the files of '", directory_, "': ", Message(context.status()))));
  }
  // 2. Somebody there.
  absl::StatusOr<UniqueFd> fd = ConnectTcp(address_, until);
  if (!fd.ok()) {
    if (absl::IsDeadlineExceeded(fd.status())) {
      return too_late("nobody answered");
    }
    return unreachable(absl::StrCat(Message(fd.status()),
                                    absl::IsUnavailable(fd.status())
                                        ? ": does it run there, and is that its admin.tls.address?"
                                        : ""));
  }
  // 3. Who that is.
  HF_ASSIGN_OR_RETURN(const HostAndPort parts, SplitAddress(address_));
  absl::StatusOr<std::unique_ptr<TlsSession>> session =
      TlsSession::Create(*context, fd->get(), parts.host);
  if (!session.ok()) {
    return unreachable(Message(session.status()));
  }
  for (bool done = false; !done;) {
    const absl::StatusOr<TlsStep> step = (*session)->Handshake();
    if (!step.ok()) {
      return Explain(step.status(), (*session)->fault());
    }
    switch (step->kind) {
      case TlsStep::Kind::kDone:
        done = true;
        break;
      case TlsStep::Kind::kEnded:
        return Explain(absl::UnavailableError("the other side has closed the connection"),
                       TlsFault::kClosed);
      case TlsStep::Kind::kWantsToRead:
      case TlsStep::Kind::kWantsToWrite:
        if (!AwaitReady(fd->get(), step->kind == TlsStep::Kind::kWantsToRead ? POLLIN : POLLOUT,
                        until)) {
          return too_late("it listens, and the handshake of TLS did not end");
        }
        break;
    }
  }
  // 4. (Whether it takes our certificate is told with the first words.)
  int ends[2] = {-1, -1};
  stop_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
  if (!stop_.valid() ||
      ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) {
    return ErrnoStatus(errno, "socketpair", address_);
  }
  plain_ = UniqueFd(ends[0]);
  relay_ = std::make_unique<TlsRelay>(*std::move(fd), *std::move(session), UniqueFd(ends[1]));
  thread_ = std::thread([this] { Carry(); });
  return absl::OkStatus();
}

void TlsChannel::Carry() {
  TlsRelay& relay = *relay_;
  for (;;) {
    const TlsRelay::Outcome outcome = relay.Step();
    if (outcome == TlsRelay::Outcome::kEnded) {
      break;
    }
    if (outcome == TlsRelay::Outcome::kMore) {
      continue;
    }
    // (One of which nothing is wanted is not polled: it would be ready for ever, once hung up.)
    std::array<pollfd, 3> ready = {
        {{relay.socket_events() == 0 ? -1 : relay.socket(), relay.socket_events(), 0},
         {relay.plain_events() == 0 ? -1 : relay.plain(), relay.plain_events(), 0},
         {stop_.get(), POLLIN, 0}}};
    const int count = ::poll(ready.data(), ready.size(), relay.parting() ? kPartingMs : -1);
    if (count == 0 || (count < 0 && errno != EINTR) || (ready[2].revents & POLLIN) != 0) {
      break;
    }
  }
  const std::string farewell = FarewellIn(relay.first_bytes());
  MutexLock lock(mutex_);
  if (!farewell.empty()) {
    why_ = NotLetIn(
        absl::UnavailableError(absl::StrCat("ckptd at ", address_, " lets us not in: ", farewell)));
  } else if (!relay.status().ok()) {
    why_ = Explain(relay.status(), relay.fault());
  }
  has_ended_ = true;
  ended_.NotifyAll();
}

absl::Status TlsChannel::WhyEnded(Duration at_most) {
  const auto until = std::chrono::steady_clock::now() + at_most;
  MutexLock lock(mutex_);
  while (!has_ended_ && ended_.WaitUntil(mutex_, until)) {
  }
  return why_;
}

TlsChannel::~TlsChannel() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    static_cast<void>(!::write(stop_.get(), &one, sizeof(one)));
    thread_.join();
  }
}

}  // namespace holdfast
