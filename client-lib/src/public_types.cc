// What the public headers declare and no object owns: names, sizes, constructors.
#include "holdfast/job.h"
#include "holdfast/state.h"
#include "holdfast/status.h"
#include "tiers/image/layout.h"

namespace holdfast {

static_assert(static_cast<int>(Type::kBool) == static_cast<int>(DType::kBool) &&
                  static_cast<int>(Type::kBF16) == static_cast<int>(DType::kBF16) &&
                  static_cast<int>(Type::kF8E5M2Fnuz) == static_cast<int>(DType::kF8E5M2Fnuz),
              "Type and DType have the same numbers");

const char* CodeName(Code code) {
  switch (code) {
    case Code::kOk:
      return "OK";
    case Code::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case Code::kNothingToRestore:
      return "NOTHING_TO_RESTORE";
    case Code::kUnreadable:
      return "UNREADABLE";
    case Code::kCorrupt:
      return "CORRUPT";
    case Code::kSuperseded:
      return "SUPERSEDED";
    case Code::kShed:
      return "SHED";
    case Code::kAbandoned:
      return "ABANDONED";
    case Code::kNoRoom:
      return "NO_ROOM";
    case Code::kRefused:
      return "REFUSED";
    case Code::kTopology:
      return "TOPOLOGY";
    case Code::kUnavailable:
      return "UNAVAILABLE";
    case Code::kDeadlineExceeded:
      return "DEADLINE_EXCEEDED";
    case Code::kForked:
      return "FORKED";
    case Code::kNotFound:
      return "NOT_FOUND";
    case Code::kInternal:
      return "INTERNAL";
  }
  return "?";
}

const char* ReasonName(Reason reason) {
  switch (reason) {
    case Reason::kNone:
      return "";
    case Reason::kNotRestored:
      return "NOT_RESTORED";
    case Reason::kOtherOwner:
      return "OTHER_OWNER";
    case Reason::kTooLarge:
      return "TOO_LARGE";
    case Reason::kNoDriver:
      return "NO_DRIVER";
    case Reason::kNotYet:
      return "NOT_YET";
    case Reason::kCopying:
      return "COPYING";
  }
  return "?";
}

std::string Status::ToString() const {
  return ok() ? std::string("OK") : std::string(CodeName(code_)) + ": " + message_;
}

uint32_t TypeBytes(Type type) {
  return DTypeBytes(static_cast<DType>(type));
}

const char* TypeName(Type type) {
  return DTypeName(static_cast<DType>(type)).data();
}  // of string literals

Tensor Tensor::Box(std::string name, Type type, std::vector<uint64_t> global_shape,
                   std::vector<uint64_t> offset, std::vector<uint64_t> shape, void* data) {
  Tensor tensor(std::move(name), type, std::move(global_shape), data);
  tensor.place = Place::kBox;
  tensor.box_offset = std::move(offset);
  tensor.box_shape = std::move(shape);
  return tensor;
}

Tensor Tensor::Flat(std::string name, Type type, std::vector<uint64_t> global_shape, uint64_t start,
                    uint64_t length, void* data) {
  Tensor tensor(std::move(name), type, std::move(global_shape), data);
  tensor.place = Place::kFlat;
  tensor.flat_start = start;
  tensor.flat_length = length;
  return tensor;
}

const char* StageName(Stage stage) {
  switch (stage) {
    case Stage::kSnapshot:
      return "snapshot";
    case Stage::kSealed:
      return "sealed";
    case Stage::kCommitted:
      return "committed";
    case Stage::kNvme:
      return "nvme";
    case Stage::kRemote:
      return "remote";
    case Stage::kPeer:
      return "peer";
  }
  return "?";
}

}  // namespace holdfast
