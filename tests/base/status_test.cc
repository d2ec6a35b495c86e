#include "base/status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "base/errno_status.h"

namespace holdfast {
namespace {

struct ErrnoCase {
  int error;
  absl::StatusCode code;
};

class ErrnoStatusTest : public ::testing::TestWithParam<ErrnoCase> {};

TEST_P(ErrnoStatusTest, CodeFollowsErrno) {
  const absl::Status status = ErrnoStatus(GetParam().error, "open", "/x");
  EXPECT_EQ(status.code(), GetParam().code) << status;
}

INSTANTIATE_TEST_SUITE_P(All, ErrnoStatusTest,
                         ::testing::Values(ErrnoCase{ENOENT, absl::StatusCode::kNotFound},
                                           ErrnoCase{EEXIST, absl::StatusCode::kAlreadyExists},
                                           ErrnoCase{ENOSPC, absl::StatusCode::kResourceExhausted},
                                           ErrnoCase{EDQUOT, absl::StatusCode::kResourceExhausted},
                                           ErrnoCase{ENOMEM, absl::StatusCode::kResourceExhausted},
                                           ErrnoCase{EMFILE, absl::StatusCode::kResourceExhausted},
                                           ErrnoCase{ENFILE, absl::StatusCode::kResourceExhausted},
                                           ErrnoCase{EACCES, absl::StatusCode::kPermissionDenied},
                                           ErrnoCase{EPERM, absl::StatusCode::kPermissionDenied},
                                           ErrnoCase{EINVAL, absl::StatusCode::kInvalidArgument},
                                           ErrnoCase{EAGAIN, absl::StatusCode::kUnavailable},
                                           ErrnoCase{EINTR, absl::StatusCode::kUnavailable},
                                           ErrnoCase{ECONNREFUSED, absl::StatusCode::kUnavailable},
                                           ErrnoCase{ECONNRESET, absl::StatusCode::kUnavailable},
                                           ErrnoCase{ECONNABORTED, absl::StatusCode::kUnavailable},
                                           ErrnoCase{EPIPE, absl::StatusCode::kUnavailable},
                                           ErrnoCase{ETIMEDOUT,
                                                     absl::StatusCode::kDeadlineExceeded},
                                           ErrnoCase{EIO, absl::StatusCode::kDataLoss},
                                           ErrnoCase{ENOTDIR, absl::StatusCode::kInternal},
                                           ErrnoCase{EROFS, absl::StatusCode::kInternal},
                                           ErrnoCase{ESTALE, absl::StatusCode::kInternal},
                                           ErrnoCase{123456, absl::StatusCode::kInternal}));

TEST(StatusTest, WhatFileSystemsFailWithHasItsName) {
  for (const auto& [error, name] : {std::pair(ENOSPC, "(ENOSPC)"),
                                    {EDQUOT, "(EDQUOT)"},
                                    {ESTALE, "(ESTALE)"},
                                    {EROFS, "(EROFS)"},
                                    {EIO, "(EIO)"}}) {
    const std::string message = Message(ErrnoStatus(error, "write", "/r/x"));
    EXPECT_TRUE(message.ends_with(name)) << message;
  }
}

TEST(StatusTest, MessageNamesOperationThingAndCause) {
  EXPECT_EQ(Message(ErrnoStatus(ENOSPC, "open", "/dev/shm/holdfast/slot-000003")),
            "open '/dev/shm/holdfast/slot-000003': No space left on device (ENOSPC)");
  EXPECT_EQ(Message(ErrnoStatus(123456, "open", "/x")), "open '/x': error 123456");
}

TEST(StatusTest, ToStringStartsWithTheCode) {
  EXPECT_EQ(ToString(ErrnoStatus(ENOENT, "open", "/x")),
            "NOT_FOUND: open '/x': No such file or directory (ENOENT)");
  EXPECT_EQ(ToString(absl::OkStatus()), "OK");
}

TEST(StatusTest, AnnotateKeepsCodeAndLeavesOkAlone) {
  const absl::Status status = Annotate(absl::NotFoundError("gone"), "slot 3");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Message(status), "slot 3: gone");
  EXPECT_TRUE(Annotate(absl::OkStatus(), "slot 3").ok());
}

TEST(StatusTest, WhatTheSystemSaidIsToldFromWhatWasRead) {
  const absl::Status system = ErrnoStatus(EIO, "read", "/a");
  EXPECT_TRUE(absl::IsDataLoss(system));
  EXPECT_TRUE(IsErrno(system));
  EXPECT_TRUE(IsErrno(Annotate(system, "copy")));
  EXPECT_THAT(ToString(system), ::testing::EndsWith("(EIO)"));
  EXPECT_FALSE(IsErrno(absl::DataLossError("digest differs")));
  EXPECT_FALSE(IsErrno(Annotate(absl::DataLossError("digest differs"), "copy")));
  EXPECT_FALSE(IsErrno(absl::OkStatus()));
  EXPECT_EQ(ErrnoOf(Annotate(system, "copy")), EIO);
  EXPECT_EQ(ErrnoOf(absl::DataLossError("digest differs")), std::nullopt);
}

TEST(StatusTest, SomeErrorsOfTheSystemAreToldFromOthersOfTheirCode) {
  for (const int full : {ENOSPC, EDQUOT}) {
    EXPECT_TRUE(IsNoSpace(Annotate(ErrnoStatus(full, "write", "/a"), "copy"))) << full;
  }
  EXPECT_FALSE(IsNoSpace(ErrnoStatus(EMFILE, "open", "/a")));
  EXPECT_FALSE(IsNoSpace(absl::ResourceExhaustedError("the budget is used up")));
  EXPECT_TRUE(IsNotADirectory(Annotate(ErrnoStatus(ENOTDIR, "stat", "/a"), "look")));
  EXPECT_FALSE(IsNotADirectory(ErrnoStatus(ELOOP, "stat", "/a")));
  EXPECT_FALSE(IsNotADirectory(absl::InternalError("stat")));
  EXPECT_FALSE(IsNotADirectory(absl::OkStatus()));
}

TEST(StatusTest, ViewsCrossTheBorderWithTheirZeroBytes) {
  const std::string_view text("a\0b", 3);
  EXPECT_EQ(FromAbsl(ToAbsl(text)), text);
}

absl::StatusOr<int> Half(int n) {
  if (n % 2 != 0) {
    return absl::InvalidArgumentError("odd");
  }
  return n / 2;
}

absl::StatusOr<int> Quarter(int n) {
  HF_ASSIGN_OR_RETURN(const int half, Half(n));
  HF_ASSIGN_OR_RETURN(const int quarter, Half(half));
  return quarter;
}

absl::Status CheckQuarter(int n) {
  HF_RETURN_IF_ERROR(Quarter(n).status());
  return absl::OkStatus();
}

TEST(StatusTest, MacrosReturnTheFirstError) {
  EXPECT_EQ(*Quarter(8), 2);
  EXPECT_EQ(Message(Quarter(6).status()), "odd");
  EXPECT_TRUE(CheckQuarter(8).ok());
  EXPECT_EQ(CheckQuarter(7).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace holdfast
