// A training loop that does nothing but what a training loop does to a checkpointer: tensors that
// change with every step, saves, restores. Its state after a step is a pure function of rank, step
// and history (which attempt made each step), so that a restored state can be verified bit for bit,
// and a fork in history shows.
//
//   holdfast_train_example --job demo --rank 0 --world 2 --steps 20 --bytes 67108864
//
// Prints one JSON object per line (events: open, reserve, restore, scratch, step, save, committed,
// done, error). Exit status: 0 done, 1 wrong use or no daemon, 2 could not restore, 3 restored
// state is wrong, 4 superseded.
#include <holdfast/holdfast.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

struct Args {
  std::string job = "example";
  std::string launch;
  std::string socket;
  uint32_t rank = 0;
  uint32_t world = 1;
  uint64_t steps = 10;  // to make, beyond what was restored
  uint64_t bytes = 16 << 20;
  uint64_t save_every = 1;
  uint64_t slow_ms = 0;  // per step: what training would take
  uint64_t threads = 0;
  uint64_t deadline_ms = 60'000;  // to open, and to restore
  uint64_t wait_room_ms = 0;
  uint64_t restore_step = 0;
  uint64_t restore_attempt = 0;
  bool restore_given = false;
  bool no_restore = false;  // start from scratch without asking
  bool reserve = false;     // make slots before the first save
  bool overlap = false;     // save while the next step is "computed"
  bool await_commit = false;
  std::string await_tier;  // nvme or remote: each save waits until its step is whole there
  bool lockstep = false;   // before each step, say "ready" and wait for a byte on stdin: where real
                           // ranks wait for each other
  bool wait_stdin = false;  // at the end, until stdin is closed
};

const char kUsage[] =
    "usage: holdfast_train_example [--job NAME] [--rank N] [--world N] [--steps N] [--bytes N] "
    "[--launch ID] [--socket PATH]\n"
    "  [--save-every N] [--slow-ms N] [--threads N] [--deadline-ms N] [--wait-room-ms N] "
    "[--restore-step N [--restore-attempt N]]\n"
    "  [--no-restore] [--reserve] [--overlap] [--await-commit] [--await-tier nvme|remote] "
    "[--lockstep] [--wait-stdin]\n";

bool ParseNumber(const char* text, uint64_t& out) {
  char* end = nullptr;
  out = std::strtoull(text, &end, 10);
  return *text >= '0' && *text <= '9' && *end == '\0';
}

bool Parse(int argc, char** argv, Args& args) {
  uint64_t rank = 0;
  uint64_t world = 1;
  const std::map<std::string_view, std::string*> texts = {{"--job", &args.job},
                                                          {"--launch", &args.launch},
                                                          {"--socket", &args.socket},
                                                          {"--await-tier", &args.await_tier}};
  const std::map<std::string_view, uint64_t*> numbers = {
      {"--rank", &rank},
      {"--world", &world},
      {"--steps", &args.steps},
      {"--bytes", &args.bytes},
      {"--save-every", &args.save_every},
      {"--slow-ms", &args.slow_ms},
      {"--threads", &args.threads},
      {"--deadline-ms", &args.deadline_ms},
      {"--wait-room-ms", &args.wait_room_ms},
      {"--restore-step", &args.restore_step},
      {"--restore-attempt", &args.restore_attempt}};
  const std::map<std::string_view, bool*> flags = {
      {"--no-restore", &args.no_restore}, {"--reserve", &args.reserve},
      {"--overlap", &args.overlap},       {"--await-commit", &args.await_commit},
      {"--lockstep", &args.lockstep},     {"--wait-stdin", &args.wait_stdin}};
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (const auto flag = flags.find(name); flag != flags.end()) {
      *flag->second = true;
      continue;
    }
    const auto text = texts.find(name);
    const auto number = numbers.find(name);
    if ((text == texts.end() && number == numbers.end()) || i + 1 == argc) {
      return false;
    }
    ++i;
    if (text != texts.end()) {
      *text->second = argv[i];
    } else if (!ParseNumber(argv[i], *number->second)) {
      return false;
    }
    args.restore_given = args.restore_given || name == "--restore-step";
  }
  args.rank = static_cast<uint32_t>(rank);
  args.world = static_cast<uint32_t>(world);
  args.await_commit = args.await_commit || !args.await_tier.empty();
  return (args.await_tier.empty() || args.await_tier == "nvme" || args.await_tier == "remote") &&
         rank < UINT32_MAX && world < UINT32_MAX && args.save_every > 0 && args.bytes >= 64 &&
         args.bytes < (uint64_t{1} << 40);
}

// ---- One JSON object per line ----

std::string Quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned char>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string Hex(uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof(text), "%016" PRIx64, value);
  return text;
}

class Line {
 public:
  Line(const char* event, uint32_t rank, uint64_t attempt) {
    text_ = "{\"event\":" + Quoted(event);
    Put("rank", rank).Put("attempt", attempt);
  }
  Line& Put(const char* key, uint64_t value) { return Raw(key, std::to_string(value)); }
  Line& Put(const char* key, std::string_view value) { return Raw(key, Quoted(value)); }
  Line& Millis(const char* key, std::chrono::nanoseconds took) {
    char number[32];
    std::snprintf(number, sizeof(number), "%.3f",
                  std::chrono::duration<double, std::milli>(took).count());
    return Raw(key, number);
  }
  Line& Bytes(uint64_t bytes, std::chrono::nanoseconds took) {
    const double seconds = std::max(1e-9, std::chrono::duration<double>(took).count());
    return Put("bytes", bytes)
        .Put("bytes_per_s", static_cast<uint64_t>(static_cast<double>(bytes) / seconds));
  }
  Line& Raw(const char* key, const std::string& json) {
    text_ += ",\"" + std::string(key) + "\":" + json;
    return *this;
  }
  ~Line() {
    text_ += "}\n";
    std::fputs(text_.c_str(), stdout);
    std::fflush(stdout);
  }

 private:
  std::string text_;
};

// ---- The model ----

uint64_t Mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

// Calls use(word, index) with the words of rank `rank`'s tensors after history `chain`.
template <typename Use>
void ForEachWord(uint64_t chain, uint32_t rank, size_t words, const Use& use) {
  const uint64_t seed = Mix(chain ^ Mix(rank + 1));
  for (size_t i = 0; i < words; ++i) {
    use(Mix(seed + i * 0x9e3779b97f4a7c15ULL), i);
  }
}

class Model {
 public:
  explicit Model(const Args& args)
      : rank_(args.rank), words_(args.bytes / 16 * 2), memory_(words_) {
    // Half are weights, this rank's row of a tensor that all ranks share; half are moments, its
    // part of a flat buffer.
    const uint64_t half = words_ / 2;
    state_.tensors = {holdfast::Tensor::Box("weights", holdfast::Type::kF32, {args.world, half * 2},
                                            {args.rank, 0}, {1, half * 2}, memory_.data()),
                      holdfast::Tensor::Flat("moments", holdfast::Type::kF64, {args.world * half},
                                             args.rank * half, half, memory_.data() + half),
                      {"step", holdfast::Type::kU64, {}, &step_}};
    Remember();
  }

  holdfast::State& state() { return state_; }
  uint64_t step() const { return step_; }
  uint64_t chain() const { return chain_; }
  uint64_t digest() const { return digest_; }

  void Train(uint64_t step, uint64_t attempt) {
    step_ = step;
    chain_ = Mix(chain_ ^ Mix(step + 1) ^ Mix(attempt * 0x9e3779b97f4a7c15ULL));
    digest_ = chain_;
    ForEachWord(chain_, rank_, words_, [this](uint64_t word, size_t i) {
      memory_[i] = word;
      digest_ = digest_ * 0x100000001b3ULL ^ word;
    });
    Remember();
  }

  // What was restored must be what this history makes of the model.
  bool Verify() {
    if (state_.objects.size() != 1 ||
        std::sscanf(state_.objects[0].bytes.c_str(), "{\"chain\":\"%" SCNx64 "\"}", &chain_) != 1) {
      return false;
    }
    bool same = true;
    digest_ = chain_;
    ForEachWord(chain_, rank_, words_, [&](uint64_t word, size_t i) {
      same = same && memory_[i] == word;
      digest_ = digest_ * 0x100000001b3ULL ^ memory_[i];
    });
    return same;
  }

 private:
  void Remember() {
    state_.objects = {{"history", "{\"chain\":\"" + Hex(chain_) + "\"}", true, ""}};
  }

  const uint32_t rank_;
  const size_t words_;
  std::vector<uint64_t> memory_;
  uint64_t step_ = 0;
  uint64_t chain_ = 0;
  uint64_t digest_ = 0;
  holdfast::State state_;
};

// ---- The loop ----

class Loop {
 public:
  Loop(const Args& args, std::unique_ptr<holdfast::Job> job)
      : args_(args), job_(std::move(job)), model_(args) {}

  int Run() {
    uint64_t first = 0;
    if (args_.reserve) {
      Reserve();
    }
    if (const int failed = Restore(first); failed != 0) {
      return failed;
    }
    for (uint64_t step = first; step < first + args_.steps; ++step) {
      if (args_.lockstep && !AwaitOthers(step)) {
        break;
      }
      if (args_.slow_ms != 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(args_.slow_ms));
      }
      FinishOverlapped();  // the tensors change now
      model_.Train(step, job_->attempt());
      NewLine("step")
          .Put("step", step)
          .Put("chain", Hex(model_.chain()))
          .Put("digest", Hex(model_.digest()));
      if ((step + 1) % args_.save_every == 0 && !Save(step)) {
        return 4;
      }
    }
    FinishOverlapped();
    NewLine("done").Put("failed_saves", job_->failed_saves());
    for (char byte = 0; args_.wait_stdin && ::read(STDIN_FILENO, &byte, 1) > 0;) {
    }
    return superseded_ ? 4 : 0;
  }

 private:
  Line NewLine(const char* event) { return Line(event, args_.rank, job_->attempt()); }
  void PrintError(const char* during, const holdfast::Status& status) {
    NewLine("error")
        .Put("during", during)
        .Put("code", CodeName(status.code()))
        .Put("message", status.message());
    superseded_ = superseded_ || status.code() == holdfast::Code::kSuperseded;
  }

  // False when stdin was closed: whoever led the ranks is gone.
  bool AwaitOthers(uint64_t step) {
    NewLine("ready").Put("step", step);
    char byte = 0;
    return ::read(STDIN_FILENO, &byte, 1) == 1;
  }

  void Reserve() {
    const Clock::time_point began = Clock::now();
    const auto reserved = job_->Reserve(model_.state(), holdfast::Milliseconds(args_.deadline_ms));
    if (!reserved.ok()) {
      return PrintError("reserve", reserved.status());
    }
    NewLine("reserve")
        .Put("ready", reserved->slots_ready)
        .Put("wanted", reserved->slots_wanted)
        .Put("slot_bytes", reserved->slot_bytes)
        .Millis("ms", Clock::now() - began);
  }

  int Restore(uint64_t& first) {
    if (args_.no_restore) {
      NewLine("scratch");
      return 0;
    }
    holdfast::RestoreOptions options;
    options.newest = !args_.restore_given;
    options.step = args_.restore_step;
    options.attempt = args_.restore_attempt;
    options.deadline = holdfast::Milliseconds(args_.deadline_ms);
    const Clock::time_point began = Clock::now();
    const auto restored = job_->Restore(model_.state(), options);
    if (restored.status().code() == holdfast::Code::kNothingToRestore) {
      NewLine("scratch");
      return 0;
    }
    if (!restored.ok()) {
      PrintError("restore", restored.status());
      return superseded_ ? 4 : 2;
    }
    const std::chrono::nanoseconds took = Clock::now() - began;
    const bool verified = model_.Verify() && model_.step() == restored->step;
    std::string notes = "[";
    for (const std::string& note : restored->notes) {
      notes += (notes.size() > 1 ? "," : "") + Quoted(note);
    }
    NewLine("restore")
        .Put("from_attempt", restored->attempt)
        .Put("step", restored->step)
        .Put("source", restored->source)
        .Put("why", restored->why)
        .Millis("ms", took)
        .Millis("waited_ms", restored->waited)
        .Bytes(restored->bytes, restored->copied)
        .Put("chain", Hex(model_.chain()))
        .Put("digest", Hex(model_.digest()))
        .Raw("verified", verified ? "true" : "false")
        .Raw("notes", notes + "]");
    first = restored->step + 1;
    return verified ? 0 : 3;
  }

  // False when this process has no place in the job any more. Any other failure is reported, and
  // training goes on.
  bool Save(uint64_t step) {
    const holdfast::SaveOptions options{holdfast::Milliseconds(args_.wait_room_ms)};
    const Clock::time_point began = Clock::now();
    handle_ = nullptr;
    holdfast::Status status;
    if (args_.overlap || args_.await_commit) {
      handle_ = job_->SaveAsync(step, model_.state(), options);
      kept_ = Clock::now() - began;
      if (!args_.overlap) {
        FinishOverlapped();
      }
      return !superseded_;
    }
    status = job_->Save(step, model_.state(), options);
    if (!status.ok()) {
      PrintError("save", status);
      return !superseded_;
    }
    const std::chrono::nanoseconds took = Clock::now() - began;
    NewLine("save")
        .Put("step", step)
        .Millis("ms", took)
        .Bytes(args_.bytes, took)
        .Put("digest", Hex(model_.digest()));
    return true;
  }

  void FinishOverlapped() {
    if (handle_ == nullptr) {
      return;
    }
    const holdfast::Milliseconds deadline(args_.deadline_ms);
    holdfast::Status status = handle_->WaitSnapshot(deadline);
    if (status.ok() && !args_.overlap) {
      status = handle_->Wait(holdfast::Stage::kSealed, deadline);
    }
    const holdfast::StageTimes times = handle_->times();
    if (!status.ok()) {
      PrintError("save", status);
    } else {
      NewLine("save")
          .Put("step", model_.step())
          .Millis("ms", times.snapshot)
          .Millis("kept_ms", kept_)
          .Bytes(times.bytes, times.snapshot)
          .Put("digest", Hex(model_.digest()));
      AwaitCommit();
    }
    handle_ = nullptr;
  }

  // Whether the others come along is not for a loop to wait long for: if their save failed, this
  // step never becomes whole.
  void AwaitCommit() {
    constexpr holdfast::Milliseconds kPatience{20'000};
    if (!args_.await_commit) {
      return;
    }
    const Clock::time_point began = Clock::now();
    const holdfast::Status status = handle_->Wait(holdfast::Stage::kCommitted, kPatience);
    if (!status.ok()) {
      return PrintError("commit", status);
    }
    NewLine("committed").Put("step", model_.step()).Millis("ms", Clock::now() - began);
    AwaitTier();
  }

  void AwaitTier() {
    if (args_.await_tier.empty()) {
      return;
    }
    const Clock::time_point began = Clock::now();
    const holdfast::Status status = handle_->Wait(
        args_.await_tier == "nvme" ? holdfast::Stage::kNvme : holdfast::Stage::kRemote,
        holdfast::Milliseconds(args_.deadline_ms));
    if (!status.ok()) {
      return PrintError(args_.await_tier.c_str(), status);
    }
    NewLine("whole")
        .Put("tier", args_.await_tier)
        .Put("step", model_.step())
        .Millis("ms", Clock::now() - began);
  }

  const Args& args_;
  std::unique_ptr<holdfast::Job> job_;
  Model model_;
  std::unique_ptr<holdfast::SaveHandle> handle_;  // after job_ in order, so gone before it
  std::chrono::nanoseconds kept_{0};
  bool superseded_ = false;
};

}  // namespace

int main(int argc, char** argv) {
  Args args;
  if (!Parse(argc, argv, args)) {
    std::fputs(kUsage, stderr);
    return 1;
  }
  holdfast::JobOptions options;
  options.job = args.job;
  options.rank = args.rank;
  options.world_size = args.world;
  options.launch = args.launch;
  options.socket = args.socket;
  options.copy_threads = static_cast<uint32_t>(args.threads);
  options.open_deadline = holdfast::Milliseconds(args.deadline_ms);
  const Clock::time_point began = Clock::now();
  auto job = holdfast::Job::Open(options);
  if (!job.ok()) {
    Line("error", args.rank, 0)
        .Put("during", "open")
        .Put("code", CodeName(job.status().code()))
        .Put("message", job.status().message());
    return job.status().code() == holdfast::Code::kSuperseded ? 4 : 1;
  }
  Line("open", args.rank, (*job)->attempt())
      .Put("pid", static_cast<uint64_t>(::getpid()))
      .Millis("ms", Clock::now() - began);
  return Loop(args, *std::move(job)).Run();
}
