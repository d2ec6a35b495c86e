#include "server/membership/etcd_membership.h"

#include <algorithm>
#include <ctime>
#include <random>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/status.h"
#include "holdfast/v1/config.pb.h"
#include "server/membership/cluster_config.h"
#include "server/membership/cluster_note.h"
#include "server/membership/etcd_client.h"
#include "server/membership/etcd_session.h"
#include "server/membership/membership_note.h"
#include "server/membership/task_thread.h"

namespace holdfast {
namespace {

uint64_t RandomBits() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// By how much the clock that goes on while the machine is suspended is ahead of the one that does
// not.
Duration SuspendedSoFar() {
  timespec boot{};
  ::clock_gettime(CLOCK_BOOTTIME, &boot);
  const Duration all = std::chrono::seconds(boot.tv_sec) + std::chrono::nanoseconds(boot.tv_nsec);
  return all - Duration(Clock::System()->Now().ns);
}

class EtcdMembership final : public Membership, public ClusterNotes {
 public:
  explicit EtcdMembership(const MembershipOptions& options)
      : config_(options.config.etcd()),
        env_(*options.env),
        clock_(options.clock == nullptr ? *Clock::System() : *options.clock),
        note_path_(MembershipNotePath(options.state_dir)),
        loop_([this] { Handle(EtcdSession::Tick{}); }),
        client_([this](EtcdSession::Event event) { Post(std::move(event)); }) {
    session_options_.self = options.self;
    session_options_.prefix = EtcdPrefix(options.config);
    for (const std::string& endpoint : config_.endpoints()) {
      endpoints_.push_back(*ParseEtcdEndpoint(config_, endpoint));
      session_options_.endpoints.push_back(endpoints_.back().address);
    }
    session_options_.user = config_.user();
    session_options_.lease_ttl = std::chrono::milliseconds(config_.lease_ttl_ms());
    session_options_.request_timeout = std::chrono::milliseconds(config_.request_timeout_ms());
    session_options_.seed = RandomBits();
  }
  ~EtcdMembership() override {
    // What comes from the other threads finds the loop gone, and is dropped.
    loop_.Stop();
    files_.Stop();
  }

  void Start(MembershipObserver observer) override {
    observer_ = std::move(observer);
    files_.Post([this] {
      absl::StatusOr<MembershipNoteData> note =
          ReadMembershipNote(env_, note_path_, session_options_.self.name);
      loop_.Post([this, note = std::move(note)] { Begin(note); });
    });
  }
  void Leave() override { Post(EtcdSession::AskLeave{}); }
  void WatchHost(const std::string& job) override { Post(EtcdSession::AskWatchHost{job}); }
  void UnwatchHost(const std::string& job) override { Post(EtcdSession::AskUnwatchHost{job}); }
  void Campaign(const std::string& job, Epoch floor) override {
    Post(EtcdSession::AskCampaign{job, floor});
  }
  void Resign(const std::string& job) override { Post(EtcdSession::AskResign{job}); }
  void StoreState(const std::string& job, Epoch epoch, uint64_t version,
                  std::string state) override {
    Post(EtcdSession::AskStoreState{job, {epoch, version, std::move(state)}});
  }
  void ReadState(const std::string& job) override { Post(EtcdSession::AskReadState{job}); }
  void ForgetJob(const std::string& job, Epoch epoch) override {
    Post(EtcdSession::AskForgetJob{job, epoch});
  }
  ClusterNotes* notes() override { return this; }
  void FollowNote(std::string remembered, Observer observer) override {
    note_observer_ = std::move(observer);
    Post(EtcdSession::AskNote{std::move(remembered)});
  }
  void AskNote() override { Post(EtcdSession::AskNote{}); }
  void NoteRemote(std::string id, std::string instead_of) override {
    Post(EtcdSession::AskNoteRemote{std::move(id), std::move(instead_of)});
  }

 private:
  void Post(EtcdSession::Event event) {
    loop_.Post([this, event = std::make_shared<EtcdSession::Event>(std::move(event))] {
      Handle(std::move(*event));
    });
  }

  // On the loop's thread, like all that follows.
  void Begin(const absl::StatusOr<MembershipNoteData>& note) {
    if (note.ok()) {
      session_options_.noted_leases = note->leases;
    } else {
      // What it said is lost: a lease of this node's earlier life ends by itself.
      observer_(MembershipProblem{
          absl::StrCat("the membership note is passed over: ", note.status().message())});
    }
    session_ = std::make_unique<EtcdSession>(session_options_);
    suspended_ = SuspendedSoFar();
    Handle(EtcdSession::Begin{});
    for (EtcdSession::Event& event : std::exchange(early_, {})) {
      Handle(std::move(event));
    }
  }

  void Handle(EtcdSession::Event event) {
    if (session_ == nullptr) {
      if (!std::holds_alternative<EtcdSession::Tick>(event)) {
        early_.push_back(std::move(event));
      }
      return;
    }
    constexpr Duration kClockNoise = std::chrono::milliseconds(1);
    const Duration suspended = SuspendedSoFar();
    if (suspended > suspended_ + kClockNoise) {
      const Duration slept = suspended - suspended_;
      suspended_ = suspended;
      Perform(session_->Handle(EtcdSession::Slept{slept}, clock_.Now()));
    }
    Perform(session_->Handle(std::move(event), clock_.Now()));
    // That the machine was suspended is to be noticed before others act on its absence.
    loop_.WakeAt(std::min(session_->next_timer(), clock_.Now() + session_options_.lease_ttl / 20));
  }

  void Perform(std::vector<EtcdAction> actions) {
    for (EtcdAction& action : actions) {
      if (auto* connect = std::get_if<EtcdConnect>(&action)) {
        ReadFiles(*connect);
      } else if (std::holds_alternative<EtcdDisconnect>(action)) {
        client_.Disconnect();
      } else if (auto* call = std::get_if<EtcdCall>(&action)) {
        client_.Call(std::move(*call));
      } else if (auto* open = std::get_if<EtcdOpenWatch>(&action)) {
        client_.OpenWatch(*open);
      } else if (auto* write = std::get_if<EtcdWriteWatch>(&action)) {
        client_.WriteWatch(*write);
      } else if (auto* note = std::get_if<WriteMembershipNote>(&action)) {
        files_.Post([this, note = std::move(*note)] {
          Post(EtcdSession::NoteWritten{note.serial, WriteNote(env_, note_path_, note.note)});
        });
      } else if (auto* event = std::get_if<MembershipEvent>(&action)) {
        observer_(*event);
      } else if (auto* agreed = std::get_if<ClusterNote>(&action); agreed && note_observer_) {
        note_observer_(*agreed);
      }
    }
  }

  // Certificates and password are read anew for each connection: they may have been renewed.
  void ReadFiles(const EtcdConnect& connect) {
    files_.Post([this, connect] {
      auto tls = std::make_shared<TlsFiles>();
      EtcdSession::ConnectionOpened opened{connect.connection, absl::OkStatus(), ""};
      const auto read = [&](const std::string& path, uint64_t bytes_max, std::string* into) {
        if (path.empty() || !opened.status.ok()) {
          return;
        }
        absl::StatusOr<std::string> text = ReadFile(env_, path, bytes_max);
        if (text.ok()) {
          *into = *std::move(text);
        } else {
          opened.status = text.status();
        }
      };
      read(config_.ca_file(), kPemBytesMax, &tls->ca);
      read(config_.cert_file(), kPemBytesMax, &tls->cert);
      read(config_.key_file(), kPemBytesMax, &tls->key);
      read(config_.password_file(), kPasswordBytesMax, &opened.password);
      opened.password = opened.password.substr(0, opened.password.find_first_of("\r\n"));
      loop_.Post([this, connect, tls, opened] {
        if (opened.status.ok()) {
          client_.Connect(endpoints_[connect.endpoint], *tls);
        }
        Handle(opened);
      });
    });
  }

  const v1::EtcdConfig config_;
  Env& env_;
  const Clock& clock_;
  const std::string note_path_;
  std::vector<EtcdEndpoint> endpoints_;
  EtcdSession::Options session_options_;
  MembershipObserver observer_;
  Observer note_observer_;
  std::unique_ptr<EtcdSession> session_;
  std::vector<EtcdSession::Event> early_;  // asked before the note was read
  Duration suspended_{};
  TaskThread files_;
  TaskThread loop_;
  EtcdClient client_;  // its callbacks use the loop
};

}  // namespace

std::unique_ptr<Membership> MakeEtcdMembership(const MembershipOptions& options) {
  return std::make_unique<EtcdMembership>(options);
}

}  // namespace holdfast
