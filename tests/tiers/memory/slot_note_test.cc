// Notes and job states: the frame, and the encoding against protobuf's own.
#include <gtest/gtest.h>

#include "base/status.h"
#include "holdfast/v1/state.pb.h"
#include "tiers/image/frame.h"
#include "tiers/memory/slot_files.h"
#include "tiers/memory/slot_note.h"

namespace holdfast {
namespace {

SlotNote SampleNote() {
  SlotNote note;
  note.boot_id = "5f3c1a52-0000-4000-8000-000000000001";
  note.generation = 300;
  note.writer = ProcessId{4711, 123456789};
  note.readers = {{{1, 2}, 3}, {{2147483647, UINT64_MAX}, UINT64_MAX}};
  note.slot_bytes = uint64_t{6} << 20;
  return note;
}

v1::SlotNote SampleProto() {
  v1::SlotNote note;
  note.set_boot_id("5f3c1a52-0000-4000-8000-000000000001");
  note.set_generation(300);
  note.mutable_writer()->set_pid(4711);
  note.mutable_writer()->set_start_ticks(123456789);
  v1::Reader* reader = note.add_readers();
  reader->set_pid(1);
  reader->set_start_ticks(2);
  reader->set_hold(3);
  reader = note.add_readers();
  reader->set_pid(2147483647);
  reader->set_start_ticks(UINT64_MAX);
  reader->set_hold(UINT64_MAX);
  note.set_slot_bytes(uint64_t{6} << 20);
  return note;
}

void ExpectSame(const SlotNote& a, const SlotNote& b) {
  EXPECT_EQ(a.boot_id, b.boot_id);
  EXPECT_EQ(a.generation, b.generation);
  EXPECT_EQ(a.writer, b.writer);
  EXPECT_EQ(a.readers, b.readers);
  EXPECT_EQ(a.slot_bytes, b.slot_bytes);
}

TEST(SlotNote, IsWhatProtobufWrites) {
  const absl::StatusOr<std::string> bytes = EncodeSlotNote(SampleNote());
  ASSERT_TRUE(bytes.ok());
  EXPECT_EQ(DecodeFrame(FrameKind::kSlotNote, *bytes).value(), SampleProto().SerializeAsString());
}

TEST(SlotNote, ReadsWhatProtobufWrites) {
  const absl::StatusOr<SlotNote> note =
      DecodeSlotNote(EncodeFrame(FrameKind::kSlotNote, SampleProto().SerializeAsString()));
  ASSERT_TRUE(note.ok()) << ToString(note.status());
  ExpectSame(*note, SampleNote());
}

TEST(SlotNote, NobodyMayTouchIt) {
  SlotNote note;
  note.boot_id = "boot";
  const absl::StatusOr<SlotNote> read = DecodeSlotNote(EncodeSlotNote(note).value());
  ASSERT_TRUE(read.ok());
  ExpectSame(*read, note);
}

TEST(SlotNote, SkipsFieldsOfLaterVersions) {
  std::string body = SampleProto().SerializeAsString();
  body += std::string("\xa2\x06\x03new", 6);  // field 100, bytes
  const absl::StatusOr<SlotNote> note = DecodeSlotNote(EncodeFrame(FrameKind::kSlotNote, body));
  ASSERT_TRUE(note.ok());
  ExpectSame(*note, SampleNote());
}

TEST(SlotNote, RefusesHostileBodies) {
  const std::string good = SampleProto().SerializeAsString();
  const std::vector<std::string> bodies = {
      "",                          // no boot id
      std::string("\x0a\x00", 2),  // an empty one
      "\x0a\x05"
      "boot",             // longer than the body
      good + "\x10\x01",  // the generation twice
      good +
          "\x12\x01"
          "x",                            // the generation as bytes
      good + std::string("\x22\x00", 2),  // a reader without a pid
      good + "\x22\x02\x08\xff",          // a pid cut short
      "\x0a\x01"
      "b\x1a\x06\x08\xff\xff\xff\xff\x0f",     // a pid beyond 31 bits
      good + "\x0b",                           // a group
      good + std::string("\x00\x00", 2),       // field 0
      "\x0a\x81\x01" + std::string(129, 'b'),  // a boot id beyond its limit
  };
  for (const std::string& body : bodies) {
    const absl::StatusOr<SlotNote> note = DecodeSlotNote(EncodeFrame(FrameKind::kSlotNote, body));
    EXPECT_TRUE(absl::IsDataLoss(note.status())) << testing::PrintToString(body);
  }
}

TEST(SlotNote, LimitsReaders) {
  SlotNote note = SampleNote();
  note.readers.assign(kNoteReadersMax, ReadHold{{1, 1}, 1});
  const absl::StatusOr<std::string> most = EncodeSlotNote(note);
  ASSERT_TRUE(most.ok());
  EXPECT_LE(most->size(), kNoteBytesMax);
  EXPECT_TRUE(DecodeSlotNote(*most).ok());
  note.readers.assign(kNoteReadersMax, ReadHold{{INT32_MAX, UINT64_MAX}, UINT64_MAX});
  EXPECT_LE(EncodeSlotNote(note).value().size(), kNoteBytesMax);
  note.readers.push_back({{1, 1}, 1});
  EXPECT_TRUE(absl::IsResourceExhausted(EncodeSlotNote(note).status()));
  note = SampleNote();
  note.boot_id.clear();
  EXPECT_TRUE(absl::IsInvalidArgument(EncodeSlotNote(note).status()));
}

TEST(Frame, EveryFlippedBitAndEveryTruncationIsFound) {
  const std::string good = EncodeSlotNote(SampleNote()).value();
  for (size_t at = 0; at < good.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ (1 << bit));
      EXPECT_FALSE(DecodeSlotNote(bad).ok()) << at << ", bit " << bit;
    }
    EXPECT_TRUE(absl::IsDataLoss(DecodeSlotNote(good.substr(0, at)).status())) << at;
  }
  EXPECT_TRUE(absl::IsDataLoss(DecodeSlotNote(good + "x").status()));
}

TEST(Frame, KindsAndVersionsAreToldApart) {
  const std::string note = EncodeSlotNote(SampleNote()).value();
  EXPECT_TRUE(absl::IsDataLoss(DecodeFrame(FrameKind::kJobState, note).status()));
  std::string newer = note;
  newer[8] = 7;
  const absl::Status status = DecodeFrame(FrameKind::kSlotNote, newer).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_NE(Message(status).find("version 7"), std::string::npos) << Message(status);
  EXPECT_NE(Message(status).find("up to 1"), std::string::npos) << Message(status);
}

// The bytes of docs/formats.md's example.
TEST(Frame, IsWhatTheDocumentSays) {
  SlotNote note;
  note.boot_id = "b";
  note.generation = 2;
  note.writer = ProcessId{7, 9};
  note.slot_bytes = uint64_t{2} << 20;
  const std::string bytes = EncodeSlotNote(note).value();
  std::string hex;
  for (const char c : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    hex += kDigits[static_cast<unsigned char>(c) >> 4];
    hex += kDigits[c & 15];
  }
  EXPECT_EQ(hex,
            "4846534c4e4f5445"  // "HFSLNOTE"
            "01000000"
            "00000000"          // version, zero
            "1000000000000000"  // 16 bytes of body:
            "0a0162"
            "1002"
            "1a0408071009"        // boot "b", generation 2, writer pid 7 started at 9,
            "2880808001"          // 2 MiB
            "832afff16fb3048c");  // CRC-64/XZ
}

TEST(JobIdentity, ReadsUuidAndName) {
  v1::JobState state;
  JobUuid job;
  job.bytes[0] = 1;
  state.set_job_uuid(job.ToBytes());
  state.set_name("demo");
  state.set_version(3);
  state.add_attempts()->set_launch("x");
  const absl::StatusOr<JobIdentity> identity = DecodeJobIdentity(state.SerializeAsString());
  ASSERT_TRUE(identity.ok());
  EXPECT_EQ(identity->job, job);
  EXPECT_EQ(identity->name, "demo");
  state.set_job_uuid("short");
  EXPECT_FALSE(DecodeJobIdentity(state.SerializeAsString()).ok());
  EXPECT_FALSE(DecodeJobIdentity("\xff").ok());
}

TEST(FileNames, OnlyTheExactFormCounts) {
  EXPECT_EQ(ImageName(17), "slot-000017");
  EXPECT_EQ(ImageName(4294967295), "slot-4294967295");
  const ParsedName image = ParseFileName("slot-4294967295.record");
  EXPECT_EQ(image.role, FileRole::kRecord);
  EXPECT_EQ(image.slot, 4294967295u);
  EXPECT_EQ(ParseFileName("slot-000017").role, FileRole::kImage);
  EXPECT_EQ(ParseFileName("slot-000017.note").role, FileRole::kNote);
  EXPECT_EQ(ParseFileName("slot-000017.note.tmp").role, FileRole::kTemporary);
  EXPECT_EQ(ParseFileName("slot-000017.record.tmp").role, FileRole::kTemporary);
  EXPECT_EQ(ParseFileName("lock").role, FileRole::kLock);
  EXPECT_EQ(ParseFileName("lock.1").role, FileRole::kLock);
  EXPECT_EQ(ParseFileName("lock.15").role, FileRole::kLock);
  EXPECT_EQ(ParseFileName("reserve").role, FileRole::kReserve);
  JobUuid job;
  job.bytes[3] = 0xab;
  EXPECT_EQ(ParseFileName(JobStateName(job)).role, FileRole::kJobState);
  EXPECT_EQ(ParseFileName(JobStateName(job)).job, job);
  EXPECT_EQ(ParseFileName(JobStateName(job) + ".tmp").role, FileRole::kTemporary);
  for (const char* name :
       {"", "slot-17", "slot-0000017", "slot-4294967296", "slot--00001", "slot-00001a",
        "slot-000017.tmp", "slot-000017.records", "slot-000017.record.note", "slot-+00017",
        "slot- 00017", "lock.tmp", "lock.0", "lock.01", "lock.16", "lock.", "x.tmp",
        "job-000000AB-0000-0000-0000-000000000000", "job-"}) {
    EXPECT_EQ(ParseFileName(name).role, FileRole::kUnknown) << name;
  }
}

}  // namespace
}  // namespace holdfast
