// A training rank that does what it is told: one command a line on stdin, one answer a line on
// stdout ("ok …" or "error CODE …").
//
//   holdfast_test_rank <socket> <job> <rank> <world size> <bytes> [launch [policy]]
//
// Its state is a function of (rank, step), so that whatever a restore brings back can be checked
// bit for bit. `as R`: its tensors are rank R's from now on, as a replica's are.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "holdfast/holdfast.h"
#include "tests/integration/raw_client.h"

namespace {

using holdfast::Milliseconds;
using holdfast::Stage;

constexpr Milliseconds kDeadline{25'000};

struct Settings {
  std::string socket;
  std::string job;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint64_t bytes = 0;
  std::string launch;
  std::string policy;  // "nvme.every_steps=2 remote.keep_last=1"
};

holdfast::Policy ParsePolicy(const std::string& text) {
  holdfast::Policy policy;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t dot = word.find('.');
    const size_t equals = word.find('=');
    if (word.substr(0, equals) == "replicas") {
      policy.replicas = static_cast<uint32_t>(std::stoul(word.substr(equals + 1)));
      continue;
    }
    holdfast::TierPolicy& tier = word.substr(0, dot) == "nvme" ? policy.nvme : policy.remote;
    const std::string name = word.substr(dot + 1, equals - dot - 1);
    const uint64_t value = std::stoull(word.substr(equals + 1));
    if (name == "every_steps") {
      tier.every_steps = value;
    } else if (name == "every_ms") {
      tier.every = Milliseconds(value);
    } else if (name == "keep_last") {
      tier.keep_last = static_cast<uint32_t>(value);
    } else if (name == "keep_every_steps") {
      tier.keep_every_steps = value;
    } else if (name == "bytes_max") {
      tier.bytes_max = value;
    }
  }
  return policy;
}

// SplitMix64: every (rank, step, index) has a value of its own.
uint64_t Value(uint32_t rank, uint64_t step, uint64_t index) {
  uint64_t z = (static_cast<uint64_t>(rank) << 48) + (step << 32) + index + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

class Trainer {
 public:
  explicit Trainer(Settings settings)
      : settings_(std::move(settings)),
        content_rank_(settings_.rank),
        weights_(settings_.bytes / 16 + 1),
        moments_(settings_.bytes / 16 + 1) {}

  std::string Do(const std::string& line) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    if (verb == "open")
      return Open(words);
    if (verb == "reserve")
      return Reserve();
    if (verb == "save")
      return Save(words);
    if (verb == "begin")
      return Begin(words);
    if (verb == "committed")
      return Committed(words);
    if (verb == "tier")
      return AwaitTier(words);
    if (verb == "busy")
      return Busy(words);
    if (verb == "reach")
      return Reach(words);
    if (verb == "restore")
      return Restore(words);
    if (verb == "notes")
      return "ok " + notes_;
    if (verb == "attach")
      return Attach(words);
    if (verb == "read")
      return Read(words);
    if (verb == "list")
      return List();
    if (verb == "adopt")
      return Adopt(words);
    if (verb == "detach")
      return Detach();
    if (verb == "close")
      return Close();
    if (verb == "grab")
      return Grab(words);
    if (verb == "hangup")
      return HangUp();
    if (verb == "scribble")
      return Scribble();
    if (verb == "size")
      return Size(words);
    if (verb == "as")
      return As(words);
    return "error WHAT " + line;
  }
  // In a signal's handler: SIGUSR1 tells it to end.
  void NoticeStop() {
    if (job_ != nullptr) {
      job_->NoticeStop(Milliseconds(60'000));
    }
  }

 private:
  static std::string Failed(const holdfast::Status& status) {
    std::string text =
        std::string("error ") + holdfast::CodeName(status.code()) + " " + status.message();
    for (char& c : text) {
      c = c == '\n' ? ' ' : c;
    }
    return text;
  }

  void Fill(uint64_t step) {
    for (uint64_t i = 0; i < weights_.size(); ++i) {
      weights_[i] = Value(content_rank_, step, i);
      moments_[i] = Value(content_rank_, step, i) ^ 0x5555555555555555ull;
    }
  }
  bool Matches(uint64_t step) const {
    for (uint64_t i = 0; i < weights_.size(); ++i) {
      if (weights_[i] != Value(content_rank_, step, i) ||
          moments_[i] != (Value(content_rank_, step, i) ^ 0x5555555555555555ull)) {
        return false;
      }
    }
    return true;
  }
  holdfast::State MakeState(uint64_t step) {
    holdfast::State state;
    state.tensors.emplace_back("layers.0.weight", holdfast::Type::kU64,
                               std::vector<uint64_t>{weights_.size()}, weights_.data());
    state.tensors.emplace_back("optimizer.0.moment", holdfast::Type::kI64,
                               std::vector<uint64_t>{moments_.size()}, moments_.data());
    state.objects.push_back(
        {.name = "progress", .bytes = "{\"step\": " + std::to_string(step) + "}"});
    return state;
  }

  // reach STEP: whether it is the last one
  std::string Reach(std::istringstream& words) {
    uint64_t step = 0;
    words >> step;
    return job_->Preempted(step) ? "ok last" : "ok on";
  }
  // open [DEADLINE_MS]
  std::string Open(std::istringstream& words) {
    uint64_t deadline_ms = static_cast<uint64_t>(kDeadline.count());
    words >> deadline_ms;
    job_.reset();
    auto opened = holdfast::Job::Open({.job = settings_.job,
                                       .rank = settings_.rank,
                                       .world_size = settings_.world_size,
                                       .launch = settings_.launch,
                                       .socket = settings_.socket,
                                       .copy_threads = 1,
                                       .policy = ParsePolicy(settings_.policy),
                                       .open_deadline = Milliseconds(deadline_ms),
                                       .call_deadline = kDeadline,
                                       // A test may hold the daemon for as long as it likes.
                                       .silence_deadline = kDeadline,
                                       // Some read its answers and errors from one pipe.
                                       .warn = [](const std::string&) {}});
    if (!opened.ok()) {
      return Failed(opened.status());
    }
    job_ = std::move(*opened);
    return "ok attempt=" + std::to_string(job_->attempt());
  }

  std::string Reserve() {
    const auto report = job_->Reserve(MakeState(0), kDeadline);
    return report.ok() ? "ok ready=" + std::to_string(report->slots_ready) +
                             " wanted=" + std::to_string(report->slots_wanted)
                       : Failed(report.status());
  }

  std::string Save(std::istringstream& words) {
    uint64_t step = 0;
    words >> step;
    Fill(step);
    handle_ = job_->SaveAsync(step, MakeState(step));
    const holdfast::Status sealed = handle_->Wait(Stage::kSealed, kDeadline);
    return sealed.ok() ? "ok sealed" : Failed(sealed);
  }

  // Like save, but waits for room if there is none.
  std::string Begin(std::istringstream& words) {
    uint64_t step = 0;
    words >> step;
    Fill(step);
    handle_ = job_->SaveAsync(step, MakeState(step), {.wait_for_room = kDeadline});
    const holdfast::Status sealed = handle_->Wait(Stage::kSealed, kDeadline);
    return sealed.ok() ? "ok sealed" : Failed(sealed);
  }

  std::string Committed(std::istringstream& words) {
    uint64_t deadline_ms = static_cast<uint64_t>(kDeadline.count());
    words >> deadline_ms;
    const holdfast::Status committed = handle_->Wait(Stage::kCommitted, Milliseconds(deadline_ms));
    return committed.ok() ? "ok committed" : Failed(committed);
  }

  // Until the last save is whole in nvme or remote.
  std::string AwaitTier(std::istringstream& words) {
    std::string tier;
    uint64_t deadline_ms = static_cast<uint64_t>(kDeadline.count());
    words >> tier >> deadline_ms;
    const holdfast::Status whole = handle_->Wait(tier == "nvme"   ? Stage::kNvme
                                                 : tier == "peer" ? Stage::kPeer
                                                                  : Stage::kRemote,
                                                 Milliseconds(deadline_ms));
    return whole.ok() ? "ok " + tier : Failed(whole);
  }

  // Begins, or ends, a quiet window.
  std::string Busy(std::istringstream& words) {
    std::string what;
    words >> what;
    what == "on" ? job_->EnterNetworkBusy() : job_->LeaveNetworkBusy();
    return "ok " + what;
  }

  std::string Restore(std::istringstream& words) {
    holdfast::RestoreOptions options{.deadline = kDeadline};
    if (uint64_t step = 0; words >> step) {
      options.newest = false;
      options.step = step;
      words >> options.attempt;
    }
    holdfast::State state = MakeState(0);
    state.objects[0].bytes.clear();
    const auto restored = job_->Restore(state, options);
    notes_.clear();
    if (!restored.ok()) {
      return Failed(restored.status());
    }
    for (const std::string& note : restored->notes) {
      notes_ += (notes_.empty() ? "" : "; ") + note;
    }
    if (!Matches(restored->step) ||
        state.objects[0].bytes != "{\"step\": " + std::to_string(restored->step) + "}") {
      return "error CONTENT step " + std::to_string(restored->step) + " came back with other bytes";
    }
    const std::string from =
        restored->source == "memory" ? "" : " source=" + restored->source + " why=" + restored->why;
    return "ok attempt=" + std::to_string(restored->attempt) +
           " step=" + std::to_string(restored->step) + from;
  }

  // attach [unverified] [rank=R] [step=S] [attempt=A] [without=TIER]… [ms=DEADLINE]
  std::string Attach(std::istringstream& words) {
    holdfast::AttachOptions options{.job = settings_.job,
                                    .rank = settings_.rank,
                                    .socket = settings_.socket,
                                    .deadline = kDeadline};
    bool verify = true;
    for (std::string word; words >> word;) {
      const std::string name = word.substr(0, word.find('='));
      const std::string value = word.substr(word.find('=') + 1);
      if (name == "unverified") {
        verify = false;
      } else if (name == "rank") {
        options.rank = static_cast<uint32_t>(std::stoul(value));
      } else if (name == "step") {
        options.newest = false;
        options.step = std::stoull(value);
      } else if (name == "attempt") {
        options.attempt = std::stoull(value);
      } else if (name == "without") {
        options.without.push_back(value);
      } else if (name == "ms") {
        options.deadline = Milliseconds(std::stoll(value));
      }
    }
    auto view = holdfast::Attach(options);
    if (!view.ok()) {
      return Failed(view.status());
    }
    view_ = std::move(*view);
    attached_rank_ = options.rank;
    const holdfast::Status verified = verify ? view_->Verify() : holdfast::Status();
    const std::string from =
        view_->tier() == "memory" ? "" : " source=" + view_->tier() + " why=" + view_->why();
    return verified.ok() ? "ok step=" + std::to_string(view_->step()) + from : Failed(verified);
  }
  std::string As(std::istringstream& words) {
    words >> content_rank_;
    return "ok";
  }
  // Every tensor of the view, copied and compared with what its rank saved (or `read as R`).
  std::string Read(std::istringstream& words) {
    uint32_t rank = attached_rank_;
    if (std::string as; words >> as) {
      words >> rank;
    }
    for (size_t i = 0; i < view_->tensors().size(); ++i) {
      const holdfast::Tensor& tensor = view_->tensors()[i];
      std::vector<uint64_t> got(tensor.bytes / 8);
      const holdfast::Status read = view_->Read(i, got.data());
      if (!read.ok()) {
        return Failed(read);
      }
      const uint64_t mask = tensor.name == "layers.0.weight" ? 0 : 0x5555555555555555ull;
      for (uint64_t at = 0; at < got.size(); ++at) {
        if (got[at] != (Value(rank, view_->step(), at) ^ mask)) {
          return "error CONTENT " + tensor.name;
        }
      }
    }
    return "ok tensors=" + std::to_string(view_->tensors().size()) +
           " world=" + std::to_string(view_->world_size());
  }
  std::string List() {
    const auto all = holdfast::ListCheckpoints(
        {.job = settings_.job, .socket = settings_.socket, .deadline = kDeadline});
    if (!all.ok()) {
      return Failed(all.status());
    }
    std::string text = "ok";
    for (const holdfast::CheckpointInfo& info : *all) {
      text += " " + std::to_string(info.attempt) + ":" + std::to_string(info.step) + "/" +
              std::to_string(info.world_size) + (info.on_line ? "" : "-off");
      for (const std::string& tier : info.tiers) {
        text += "," + tier;
      }
    }
    return text;
  }
  std::string Adopt(std::istringstream& words) {
    holdfast::RestoreOptions options{.deadline = kDeadline, .adopt_only = true};
    if (uint64_t step = 0; words >> step) {
      options.newest = false;
      options.step = step;
    }
    holdfast::State state;
    const auto adopted = job_->Restore(state, options);
    return adopted.ok() ? "ok attempt=" + std::to_string(adopted->attempt) +
                              " step=" + std::to_string(adopted->step)
                        : Failed(adopted.status());
  }
  std::string Detach() {
    view_.reset();
    return "ok";
  }
  std::string Close() {
    handle_.reset();
    job_.reset();
    return "ok";
  }

  // Takes a slot by hand, and keeps it mapped whatever happens to the connection.
  std::string Grab(std::istringstream& words) {
    uint64_t step = 0;
    words >> step;
    raw_ = holdfast::RawClient::Greet(settings_.socket);
    if (raw_ == nullptr) {
      return "error CONNECT";
    }
    const auto joined = raw_->Join(settings_.job, settings_.rank, settings_.world_size);
    if (!joined || !joined->frame.has_join()) {
      return "error JOIN " + (joined ? joined->frame.failure().message() : "closed");
    }
    const auto granted = raw_->BeginSave(step, settings_.bytes * 2 + (1 << 20));
    if (!granted || !granted->frame.has_begin_save() || granted->descriptors.empty()) {
      return "error GRANT " + (granted ? granted->frame.failure().message() : "closed");
    }
    mapped_bytes_ = granted->frame.begin_save().slot_bytes();
    mapped_ = static_cast<char*>(::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED,
                                        granted->descriptors[0].get(), 0));
    if (mapped_ == MAP_FAILED) {
      return "error MAP";
    }
    return "ok slot=" + std::to_string(granted->frame.begin_save().slot());
  }
  std::string HangUp() {
    raw_.reset();
    return "ok";
  }
  std::string Scribble() {
    for (uint64_t i = 0; i < mapped_bytes_; i += 512) {
      mapped_[i] = static_cast<char>(0xee);
    }
    return "ok";
  }
  std::string Size(std::istringstream& words) {
    uint64_t bytes = 0;
    words >> bytes;
    weights_.assign(bytes / 16 + 1, 0);
    moments_.assign(bytes / 16 + 1, 0);
    return "ok";
  }

  const Settings settings_;
  uint32_t content_rank_;  // whose tensors it has
  std::vector<uint64_t> weights_;
  std::vector<uint64_t> moments_;
  std::string notes_;  // of the last restore
  std::unique_ptr<holdfast::Job> job_;
  std::unique_ptr<holdfast::SaveHandle> handle_;
  std::unique_ptr<holdfast::View> view_;
  uint32_t attached_rank_ = 0;
  std::unique_ptr<holdfast::RawClient> raw_;
  char* mapped_ = nullptr;
  uint64_t mapped_bytes_ = 0;
};

std::atomic<Trainer*> told{nullptr};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) {
    std::fprintf(
        stderr,
        "usage: holdfast_test_rank <socket> <job> <rank> <world size> <bytes> [launch [policy]]\n");
    return 2;
  }
  Trainer trainer({.socket = argv[1],
                   .job = argv[2],
                   .rank = static_cast<uint32_t>(std::stoul(argv[3])),
                   .world_size = static_cast<uint32_t>(std::stoul(argv[4])),
                   .bytes = std::stoull(argv[5]),
                   .launch = argc > 6 ? argv[6] : "",
                   .policy = argc > 7 ? argv[7] : ""});
  told = &trainer;
  std::signal(SIGUSR1, [](int) { told.load()->NoticeStop(); });
  for (std::string line; std::getline(std::cin, line);) {
    if (line == "exit") {
      std::cout << "ok" << std::endl;
      return 0;
    }
    std::cout << trainer.Do(line) << std::endl;
  }
  return 0;
}
