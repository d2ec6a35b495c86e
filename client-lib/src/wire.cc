// Writing is protozero's; reading goes through the strict reader that images and records use too:
// protozero's own asserts on, and throws at, what a misbehaving daemon may send.
#include "client-lib/src/wire.h"

#include <protozero/pbf_writer.hpp>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client-lib/src/errors.h"
#include "tiers/image/wire.h"

namespace holdfast::client::wire {
namespace {

using image_internal::WireField;
using image_internal::WireReader;

// ---- Writing: fields that have their default value are left out, as proto3 has it ----

class Writer {
 public:
  Writer() = default;
  Writer(const Writer&) = delete;  // writer_ points at out_
  Writer& operator=(const Writer&) = delete;

  void Put(uint32_t field, uint64_t value) {
    if (value != 0) {
      writer_.add_uint64(field, value);
    }
  }
  void Put(uint32_t field, std::string_view text) {
    if (!text.empty()) {
      writer_.add_bytes(field, text.data(), text.size());
    }
  }
  void PutMessage(uint32_t field, const std::string& message) {
    writer_.add_message(field, message);
  }
  void PutPacked(uint32_t field, const std::vector<uint32_t>& values) {
    writer_.add_packed_uint32(field, values.begin(), values.end());
  }
  void PutPacked(uint32_t field, const std::vector<uint64_t>& values) {
    writer_.add_packed_uint64(field, values.begin(), values.end());
  }
  // Present also when it is 0.
  void PutOptional(uint32_t field, const std::optional<uint64_t>& value) {
    if (value) {
      writer_.add_uint64(field, *value);
    }
  }
  std::string Take() { return std::move(out_); }

 private:
  std::string out_;
  protozero::pbf_writer writer_{out_};
};

std::string EncodeTierPolicy(const TierPolicy& policy) {
  std::string out;
  protozero::pbf_writer writer{out};
  // Present also when 0: a wish for none is not the lack of a wish.
  const auto put = [&](uint32_t field, const std::optional<uint64_t>& value) {
    if (value) {
      writer.add_uint64(field, *value);
    }
  };
  put(1, policy.every_steps);
  put(2, policy.every_ms);
  put(3, policy.keep_last);
  put(4, policy.keep_every_steps);
  put(5, policy.bytes_max);
  return out;
}

struct Body {
  uint32_t field;
  std::string bytes;
};

struct Encode {
  Writer w;

  Body operator()(const Hello& m) {
    w.Put(1, m.protocol);
    w.Put(2, m.client);
    w.Put(3, m.network_flag);
    return {2, w.Take()};
  }
  Body operator()(const Join& m) {
    w.Put(1, m.job);
    w.Put(2, m.rank);
    w.Put(3, m.world_size);
    w.Put(4, m.launch);
    w.Put(5, m.attempt);
    w.Put(6, m.leave_attempt);
    w.Put(7, m.deadline_ms);
    if (!m.policy.empty()) {
      w.PutMessage(8, m.policy);
    }
    w.PutOptional(9, m.passed_step);
    return {3, w.Take()};
  }
  Body operator()(const Reserve& m) {
    w.Put(1, m.slot_bytes);
    w.Put(2, m.slots);
    w.Put(3, m.deadline_ms);
    return {4, w.Take()};
  }
  Body operator()(const BeginSave& m) {
    w.Put(1, m.step);
    w.Put(2, m.slot_bytes);
    w.Put(3, m.deadline_ms);
    return {5, w.Take()};
  }
  Body operator()(const Seal& m) {
    w.Put(1, m.step);
    w.Put(2, m.slot);
    w.Put(3, m.generation);
    w.Put(4, m.record_offset);
    w.Put(5, m.record_bytes);
    return {6, w.Take()};
  }
  Body operator()(const AbortSave& m) {
    w.Put(1, m.step);
    w.Put(2, m.slot);
    w.Put(3, m.generation);
    w.Put(4, m.why);
    return {7, w.Take()};
  }
  Body operator()(const AwaitSave& m) {
    w.Put(1, m.step);
    w.Put(2, static_cast<uint32_t>(m.stage));
    w.Put(3, m.deadline_ms);
    return {8, w.Take()};
  }
  Body operator()(const EnterSession& m) {
    w.Put(1, static_cast<uint32_t>(m.choice));
    w.Put(2, m.step);
    w.Put(3, m.attempt);
    w.Put(4, m.deadline_ms);
    w.Put(5, m.hold);
    w.Put(6, m.reads_by_itself ? 1 : 0);
    w.Put(7, m.may_reshard ? 1 : 0);
    w.Put(8, m.reads_parts ? 1 : 0);
    w.Put(9, m.label);
    return {9, w.Take()};
  }
  Body operator()(const ReportLoad& m) {
    w.Put(1, m.session);
    w.Put(2, m.round);
    w.Put(3, m.loaded ? 1 : 0);
    w.Put(4, m.problem);
    w.Put(5, m.copy_is_bad ? 1 : 0);
    w.Put(6, m.deadline_ms);
    w.Put(7, m.wants_mismatch ? 1 : 0);
    w.Put(8, m.hold);
    w.Put(9, m.shards_are_bad ? 1 : 0);
    w.Put(10, m.of_another_run ? 1 : 0);
    return {10, w.Take()};
  }
  Body operator()(const Attach& m) {
    w.Put(1, m.job);
    w.Put(2, m.rank);
    w.Put(3, static_cast<uint32_t>(m.choice));
    w.Put(4, m.step);
    w.Put(5, m.attempt);
    w.Put(6, m.hold);
    w.Put(7, m.deadline_ms);
    w.Put(8, m.any_tier ? 1 : 0);
    for (const std::string& tier : m.without) {
      w.Put(9, tier);
    }
    w.Put(10, m.parts ? 1 : 0);
    w.Put(11, m.parts_of_files ? 1 : 0);
    return {11, w.Take()};
  }
  Body operator()(const ConfirmRead& m) {
    w.Put(1, m.slot);
    w.Put(2, m.generation);
    return {12, w.Take()};
  }
  Body operator()(const ReleaseRead& m) {
    w.Put(1, m.hold);
    return {13, w.Take()};
  }
  Body operator()(const ReleaseSlots& m) {
    w.PutPacked(1, m.slots);
    return {14, w.Take()};
  }
  Body operator()(const Leave&) { return {15, w.Take()}; }
  Body operator()(const List& m) {
    w.Put(1, m.job);
    w.Put(2, m.before ? 1 : 0);
    w.Put(3, m.before_attempt);
    w.Put(4, m.before_step);
    w.Put(5, m.deadline_ms);
    return {16, w.Take()};
  }
  Body operator()(const ReadParts& m) {
    w.Put(1, m.hold);
    w.PutPacked(2, m.offset);
    w.PutPacked(3, m.bytes);
    w.PutPacked(4, m.place);
    w.Put(5, m.contradicted ? 1 : 0);
    w.Put(6, m.deadline_ms);
    return {17, w.Take()};
  }
  Body operator()(const ReadRecords& m) {
    w.Put(1, m.job);
    w.Put(2, m.attempt);
    w.Put(3, m.step);
    w.Put(4, m.deadline_ms);
    return {18, w.Take()};
  }
  Body operator()(const ReachStep& m) {
    w.Put(1, m.step);
    w.Put(2, m.told_to_stop ? 1 : 0);
    w.Put(3, m.grace_ms);
    w.PutOptional(4, m.passed_step);
    return {19, w.Take()};
  }
};

// ---- Reading ----

// One message's fields, by number; what is not asked for is skipped, as fields of later versions
// must be.
class Fields {
 public:
  explicit Fields(WireReader& reader) : reader_(reader) {}

  absl::Status Get(const WireField& field, uint64_t& out) {
    return reader_.Unsigned(field, UINT64_MAX, out);
  }
  absl::Status Get(const WireField& field, int64_t& out) {
    uint64_t value = 0;
    HF_RETURN_IF_ERROR(Get(field, value));
    out = static_cast<int64_t>(value);
    return absl::OkStatus();
  }
  absl::Status Get(const WireField& field, uint32_t& out) {
    uint64_t value = 0;
    HF_RETURN_IF_ERROR(reader_.Unsigned(field, UINT32_MAX, value));
    out = static_cast<uint32_t>(value);
    return absl::OkStatus();
  }
  absl::Status Get(const WireField& field, bool& out) {
    uint64_t value = 0;
    HF_RETURN_IF_ERROR(Get(field, value));
    out = value != 0;
    return absl::OkStatus();
  }
  absl::Status Get(const WireField& field, std::string& out) { return reader_.Bytes(field, out); }
  // Of a repeated field.
  absl::Status GetOneOf(const WireField& field, std::string& out) {
    std::string_view bytes;
    HF_RETURN_IF_ERROR(reader_.Repeated(field, bytes));
    out = bytes;
    return absl::OkStatus();
  }
  template <typename Enum>
  absl::Status GetEnum(const WireField& field, Enum& out) {
    uint32_t value = 0;
    HF_RETURN_IF_ERROR(Get(field, value));
    out = static_cast<Enum>(value);
    return absl::OkStatus();
  }

 private:
  WireReader& reader_;
};

// Calls on(field, fields) for every field of `bytes`.
template <typename OnField>
absl::Status ReadMessage(std::string_view name, std::string_view bytes, const OnField& on) {
  WireReader reader(name, bytes);
  Fields fields(reader);
  for (WireField field; reader.Next(field);) {
    HF_RETURN_IF_ERROR(on(field, fields));
  }
  return reader.status();
}

absl::Status Read(std::string_view bytes, Descent& out) {
  return ReadMessage("Descent", bytes, [&](const WireField& field, Fields& fields) -> absl::Status {
    switch (field.number) {
      case 1:
        return fields.Get(field, out.attempt);
      case 2:
        return fields.Get(field, out.parent.attempt);
      case 3:
        return fields.Get(field, out.parent.step);
      default:
        return absl::OkStatus();
    }
  });
}

absl::Status AppendDescent(const WireField& field, std::vector<Descent>& out) {
  if (field.type != image_internal::WireType::kBytes) {
    return absl::InvalidArgumentError("a descent that is no message");
  }
  if (out.size() == kDescentMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("more than ", kDescentMax, " entries of descent"));
  }
  return Read(field.bytes, out.emplace_back());
}

absl::Status Read(std::string_view bytes, Failure& out) {
  return ReadMessage("Failure", bytes, [&](const WireField& field, Fields& fields) -> absl::Status {
    switch (field.number) {
      case 1: {
        int64_t code = 0;
        HF_RETURN_IF_ERROR(fields.Get(field, code));
        out.code = static_cast<int32_t>(code);
        return absl::OkStatus();
      }
      case 2:
        return fields.Get(field, out.message);
      case 3:
        return fields.GetEnum(field, out.reason);
      default:
        return absl::OkStatus();
    }
  });
}

absl::Status Read(std::string_view bytes, Done&) {
  return ReadMessage("Done", bytes, [](const WireField&, Fields&) { return absl::OkStatus(); });
}

absl::Status Read(std::string_view bytes, HelloReply& out) {
  return ReadMessage("HelloReply", bytes,
                     [&](const WireField& field, Fields& fields) -> absl::Status {
                       switch (field.number) {
                         case 1:
                           return fields.Get(field, out.protocol);
                         case 2:
                           return fields.Get(field, out.daemon_version);
                         case 3:
                           return fields.Get(field, out.boot_id);
                         case 4:
                           return fields.Get(field, out.network_flag);
                         default:
                           return absl::OkStatus();
                       }
                     });
}

absl::Status Read(std::string_view bytes, JoinReply& out) {
  return ReadMessage("JoinReply", bytes,
                     [&](const WireField& field, Fields& fields) -> absl::Status {
                       switch (field.number) {
                         case 1:
                           return fields.Get(field, out.job_uuid);
                         case 2:
                           return fields.Get(field, out.attempt);
                         case 3:
                           return AppendDescent(field, out.descent);
                         case 4:
                           return fields.Get(field, out.decided);
                         case 5:
                           return fields.Get(field, out.last_step);
                         case 6:
                           return fields.Get(field, out.any_step);
                         default:
                           return absl::OkStatus();
                       }
                     });
}

absl::Status Read(std::string_view bytes, ReserveReply& out) {
  return ReadMessage("ReserveReply", bytes,
                     [&](const WireField& field, Fields& fields) -> absl::Status {
                       switch (field.number) {
                         case 1:
                           return fields.Get(field, out.ready);
                         case 2:
                           return fields.Get(field, out.wanted);
                         case 3:
                           return fields.Get(field, out.slot_bytes);
                         case 4:
                           return fields.Get(field, out.descriptor);
                         case 5:
                           return fields.Get(field, out.slot);
                         default:
                           return absl::OkStatus();
                       }
                     });
}

absl::Status Read(std::string_view bytes, Grant& out) {
  return ReadMessage("Grant", bytes, [&](const WireField& field, Fields& fields) -> absl::Status {
    switch (field.number) {
      case 1:
        return fields.Get(field, out.slot);
      case 2:
        return fields.Get(field, out.generation);
      case 3:
        return fields.Get(field, out.slot_bytes);
      case 4:
        return fields.Get(field, out.descriptor);
      case 5:
        return fields.Get(field, out.job_uuid);
      case 6:
        return fields.Get(field, out.attempt);
      case 7:
        return AppendDescent(field, out.descent);
      default:
        return absl::OkStatus();
    }
  });
}

absl::Status Read(std::string_view bytes, Sealed& out) {
  return ReadMessage("Sealed", bytes, [&](const WireField& field, Fields& fields) -> absl::Status {
    return field.number == 1 ? fields.Get(field, out.sealed_unix_ms) : absl::OkStatus();
  });
}

absl::Status Read(std::string_view bytes, SaveProgress& out) {
  return ReadMessage("SaveProgress", bytes,
                     [&](const WireField& field, Fields& fields) -> absl::Status {
                       switch (field.number) {
                         case 1:
                           return fields.GetEnum(field, out.stage);
                         case 2:
                           return fields.Get(field, out.unix_ms);
                         default:
                           return absl::OkStatus();
                       }
                     });
}

absl::Status Read(std::string_view bytes, Source& out) {
  return ReadMessage("Source", bytes, [&](const WireField& field, Fields& fields) -> absl::Status {
    switch (field.number) {
      case 1:
        return fields.Get(field, out.slot);
      case 2:
        return fields.Get(field, out.generation);
      case 3:
        return fields.Get(field, out.image_bytes);
      case 4:
        return fields.Get(field, out.attempt);
      case 5:
        return fields.Get(field, out.step);
      case 6:
        return fields.Get(field, out.job_uuid);
      case 7:
        return fields.Get(field, out.rank);
      case 8:
        return fields.Get(field, out.world_size);
      case 9:
        return fields.Get(field, out.hold);
      case 10:
        return fields.Get(field, out.tier);
      case 11:
        return fields.Get(field, out.why);
      case 12:
        return fields.Get(field, out.parts_bytes);
      default:
        return absl::OkStatus();
    }
  });
}

absl::Status Read(std::string_view bytes, StepRecords& out) {
  return ReadMessage("StepRecords", bytes,
                     [&](const WireField& field, Fields& fields) -> absl::Status {
                       switch (field.number) {
                         case 1:
                           return fields.Get(field, out.job_uuid);
                         case 2:
                           return fields.Get(field, out.world_size);
                         case 3:
                           return fields.Get(field, out.bytes);
                         default:
                           return absl::OkStatus();
                       }
                     });
}

absl::Status Read(std::string_view bytes, StepReached& out) {
  return ReadMessage("StepReached", bytes,
                     [&](const WireField& field, Fields& fields) -> absl::Status {
                       switch (field.number) {
                         case 1:
                           return fields.Get(field, out.stop);
                         case 2:
                           return fields.Get(field, out.stopping);
                         case 3:
                           return fields.Get(field, out.left_ms);
                         default:
                           return absl::OkStatus();
                       }
                     });
}

absl::Status Read(std::string_view bytes, SessionOutcome& out) {
  const absl::Status read = ReadMessage(
      "SessionOutcome", bytes, [&](const WireField& field, Fields& fields) -> absl::Status {
        switch (field.number) {
          case 1:
            return fields.Get(field, out.session);
          case 2:
            return fields.Get(field, out.round);
          case 3:
            return fields.Get(field, out.done);
          case 4:
            return fields.Get(field, out.attempt);
          case 5:
            return fields.Get(field, out.step);
          case 6: {
            std::string source;
            HF_RETURN_IF_ERROR(fields.Get(field, source));
            return Read(source, out.source.emplace());
          }
          case 7:
            return AppendDescent(field, out.descent);
          case 8:
            return fields.Get(field, out.reshard);
          case 9:
            return fields.Get(field, out.passed_over);
          default:
            return absl::OkStatus();
        }
      });
  HF_RETURN_IF_ERROR(read);
  if (!out.done && !out.source.has_value() && out.reshard == 0) {
    return absl::InvalidArgumentError("a session that goes on, without a source");
  }
  if (out.reshard > kWorldSizeMax) {
    return absl::InvalidArgumentError("a step of more ranks than there can be");
  }
  return absl::OkStatus();
}

absl::Status Read(std::string_view bytes, ListedCheckpoint& out) {
  return ReadMessage("ListedCheckpoint", bytes,
                     [&](const WireField& field, Fields& fields) -> absl::Status {
                       switch (field.number) {
                         case 1:
                           return fields.Get(field, out.attempt);
                         case 2:
                           return fields.Get(field, out.step);
                         case 3:
                           return fields.Get(field, out.world_size);
                         case 4:
                           return fields.Get(field, out.on_line);
                         case 5:
                           return fields.GetOneOf(field, out.tiers.emplace_back());
                         case 6:
                           return fields.Get(field, out.bytes);
                         case 7:
                           return fields.Get(field, out.unix_ms);
                         default:
                           return absl::OkStatus();
                       }
                     });
}

absl::Status Read(std::string_view bytes, Listing& out) {
  return ReadMessage("Listing", bytes, [&](const WireField& field, Fields& fields) -> absl::Status {
    switch (field.number) {
      case 1: {
        std::string checkpoint;
        HF_RETURN_IF_ERROR(fields.GetOneOf(field, checkpoint));
        return Read(checkpoint, out.checkpoints.emplace_back());
      }
      case 2:
        return fields.Get(field, out.more);
      case 3:
        return fields.Get(field, out.unread);
      default:
        return absl::OkStatus();
    }
  });
}

template <typename Message>
absl::Status ReadReply(const WireField& field, Fields& fields, Reply& out) {
  std::string bytes;
  HF_RETURN_IF_ERROR(fields.Get(field, bytes));
  return Read(bytes, out.emplace<Message>());
}

absl::Status ReadReplyField(const WireField& field, Fields& fields, Reply& out) {
  switch (field.number) {
    case 2:
      return ReadReply<Failure>(field, fields, out);
    case 3:
      return ReadReply<HelloReply>(field, fields, out);
    case 4:
      return ReadReply<JoinReply>(field, fields, out);
    case 5:
      return ReadReply<ReserveReply>(field, fields, out);
    case 6:
      return ReadReply<Grant>(field, fields, out);
    case 7:
      return ReadReply<Sealed>(field, fields, out);
    case 9:
      return ReadReply<SaveProgress>(field, fields, out);
    case 10:
      return ReadReply<SessionOutcome>(field, fields, out);
    case 11:
      return ReadReply<Source>(field, fields, out);
    case 16:
      return ReadReply<Listing>(field, fields, out);
    case 18:
      return ReadReply<StepRecords>(field, fields, out);
    case 19:
      return ReadReply<StepReached>(field, fields, out);
    default:  // 8, 12 to 15, 17
      return ReadReply<Done>(field, fields, out);
  }
}

}  // namespace

std::string EncodePolicy(const TierPolicy& nvme, const TierPolicy& remote,
                         std::optional<uint32_t> replicas) {
  std::string out;
  protozero::pbf_writer writer{out};
  const std::string first = EncodeTierPolicy(nvme);
  const std::string second = EncodeTierPolicy(remote);
  if (!first.empty()) {
    writer.add_message(1, first);
  }
  if (!second.empty()) {
    writer.add_message(2, second);
  }
  if (replicas) {
    writer.add_uint32(3, *replicas);
  }
  return out;
}

Result<std::string> EncodeFrame(uint64_t id, const Request& request) {
  const Body body = std::visit(Encode{}, request);
  Writer message;
  message.Put(1, id);
  message.PutMessage(body.field, body.bytes);
  const std::string bytes = message.Take();
  if (bytes.size() > kMessageBytesMax) {
    return Status(Code::kInvalidArgument,
                  absl::StrCat("a request of ", bytes.size(),
                               " bytes exceeds the protocol's limit of ", kMessageBytesMax));
  }
  std::string frame;
  frame.reserve(kFrameHeaderBytes + bytes.size());
  for (size_t i = 0; i < kFrameHeaderBytes; ++i) {
    frame.push_back(static_cast<char>(bytes.size() >> (8 * i)));
  }
  frame += bytes;
  return frame;
}

Result<DaemonFrame> DecodeFrame(std::string_view message) {
  DaemonFrame frame;
  int replies = 0;
  const absl::Status read = ReadMessage(
      "DaemonFrame", message, [&](const WireField& field, Fields& fields) -> absl::Status {
        if (field.number == 1) {
          return fields.Get(field, frame.id);
        }
        if (field.number > 19) {
          return absl::OkStatus();
        }
        ++replies;
        return ReadReplyField(field, fields, frame.reply);
      });
  if (!read.ok()) {
    return Status(Code::kInternal, Message(read));
  }
  if (replies != 1) {
    return Status(Code::kInternal,
                  absl::StrCat("a frame with ", replies, " replies instead of one"));
  }
  return frame;
}

size_t DescriptorCount(const Reply& reply) {
  if (const auto* grant = std::get_if<Grant>(&reply)) {
    return grant->descriptor ? 1 : 0;
  }
  if (const auto* reserved = std::get_if<ReserveReply>(&reply)) {
    return reserved->descriptor ? 1 : 0;
  }
  if (const auto* hello = std::get_if<HelloReply>(&reply)) {
    return hello->network_flag ? 1 : 0;
  }
  if (const auto* outcome = std::get_if<SessionOutcome>(&reply)) {
    return outcome->done || !outcome->source.has_value() ? 0 : 2;
  }
  if (std::holds_alternative<StepRecords>(reply)) {
    return 1;
  }
  return std::holds_alternative<Source>(reply) ? 2 : 0;
}

}  // namespace holdfast::client::wire
