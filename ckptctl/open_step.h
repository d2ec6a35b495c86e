// A step that a command reads itself, through the client's socket of this machine's ckptd, which
// passes it memory and files; errors become those of commands.
//
//   HF_ASSIGN_OR_RETURN(const OpenedStep step, OpenStep(context, {.job = "llama-7b"}));
//   HF_ASSIGN_OR_RETURN(WindowReader windows, step.Read(ranges));
//   while (true) {
//     HF_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, windows.Next());
//     if (bytes.empty()) break;
//     …
//   }
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "ckptctl/commands.h"
#include "holdfast/checkpoint_reader.h"

namespace holdfast {

// Of each stream two of them are in memory: one is read while the other one is used.
inline constexpr uint64_t kWindowBytes = 64 << 20;

// Which step, for errors and answers: "step 900 (attempt 1) of job llama-7b".
std::string NameOfStep(const CheckpointReader& reader, const std::string& job);

// What was saved, a window at a time; the next one is read meanwhile by a thread of its own, which
// the end waits for. Used by one thread.
class WindowReader {
 public:
  // Puts what comes next at `to`, which has room for kWindowBytes, and says how many bytes that
  // were; 0: all has come. Called by the thread that reads.
  using Fill = std::function<Result<uint64_t>(std::byte* to)>;
  WindowReader(const Context& context, const std::string& socket, Fill fill);
  ~WindowReader();
  WindowReader(WindowReader&&) noexcept;
  // Good until the next call; empty at the end.
  absl::StatusOr<std::span<const std::byte>> Next();

 private:
  struct Reading;
  std::unique_ptr<Reading> reading_;
};

// The client's socket (FindClientSocket) at which somebody listens. Unavailable: nobody does.
absl::StatusOr<std::string> FindClient(const Context& context, const std::string& client_socket);

// What the client library says, as commands have it. `socket`: to tell a ckptd that went away from
// a copy that did.
absl::Status FromClient(const Context& context, const std::string& socket, const Status& status);

class OpenedStep {
 public:
  const CheckpointReader& reader() const { return *reader_; }
  const std::vector<SavedItem>& items() const { return reader_->items(); }
  // The step must outlive what it returns.
  absl::StatusOr<WindowReader> Read(std::vector<ElementRange> ranges) const;
  // One item, whole; ResourceExhausted: it has more bytes than that.
  absl::StatusOr<std::string> ReadItem(size_t item, uint64_t bytes_max) const;

 private:
  friend absl::StatusOr<OpenedStep> OpenStep(const Context& context, const StepArguments& step);
  OpenedStep(const Context& context, std::string socket, std::unique_ptr<CheckpointReader> reader)
      : context_(&context), socket_(std::move(socket)), reader_(std::move(reader)) {}

  const Context* context_;
  std::string socket_;
  std::unique_ptr<CheckpointReader> reader_;
};

// Unavailable: no ckptd is there. DataLoss: what is there is damaged. Cancelled: interrupted.
absl::StatusOr<OpenedStep> OpenStep(const Context& context, const StepArguments& step);

}  // namespace holdfast
