// Messages of this release and of those before it (tests/fixtures/protocol/): what one of them says
// the other one understands, as far as it knows it, and passes on what it does not know. That
// daemons, clients and ckptctl of two releases work together tests/cluster/versions_test.py tries.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/dynamic_message.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "holdfast/v1/admin.pb.h"
#include "holdfast/v1/client.pb.h"
#include "holdfast/v1/config.pb.h"
#include "holdfast/v1/fabric.pb.h"
#include "holdfast/v1/layout.pb.h"
#include "holdfast/v1/membership.pb.h"
#include "holdfast/v1/peer.pb.h"
#include "holdfast/v1/policy.pb.h"
#include "holdfast/v1/record.pb.h"
#include "holdfast/v1/state.pb.h"

namespace holdfast {
namespace {

namespace pb = google::protobuf;
namespace fs = std::filesystem;
using pb::util::MessageDifferencer;
using Field = pb::FieldDescriptor;

constexpr int kDepth = 4;  // of messages in messages, which may contain themselves

// Of the program: all files, whichever the linker would have left out.
const pb::DescriptorPool& Present() {
  static const std::vector<const pb::Descriptor*> kLinked = {
      v1::GetStatusRequest::descriptor(), v1::ClientFrame::descriptor(),
      v1::DaemonConfig::descriptor(),     v1::MeasureFabricRequest::descriptor(),
      v1::PeerMessage::descriptor(),      v1::JobState::descriptor(),
      v1::ShardRecord::descriptor(),      v1::NodeRecord::descriptor(),
      v1::LayoutFile::descriptor(),       v1::Policy::descriptor()};
  EXPECT_EQ(std::count(kLinked.begin(), kLinked.end(), nullptr), 0);
  return *pb::DescriptorPool::generated_pool();
}

struct Release {
  std::string name;
  std::unique_ptr<pb::DescriptorPool> pool = std::make_unique<pb::DescriptorPool>();
  std::vector<const pb::FileDescriptor*> files;  // ours
};

std::vector<Release> Releases() {
  std::vector<Release> releases;
  for (const auto& directory : fs::directory_iterator(HOLDFAST_PROTOCOL_FIXTURES)) {
    Release& release = releases.emplace_back();
    release.name = directory.path().filename();
    std::ifstream file(directory.path() / "schema.binpb", std::ios::binary);
    pb::FileDescriptorSet set;
    EXPECT_TRUE(set.ParseFromIstream(&file)) << directory.path();
    for (const pb::FileDescriptorProto& each : set.file()) {
      const pb::FileDescriptor* const built = release.pool->BuildFile(each);
      EXPECT_NE(built, nullptr) << each.name();
      if (built != nullptr && each.package() == "holdfast.v1") {
        release.files.push_back(built);
      }
    }
  }
  return releases;
}

void Collect(const pb::Descriptor* message, std::vector<const pb::Descriptor*>& all) {
  all.push_back(message);
  for (int i = 0; i < message->nested_type_count(); ++i) {
    Collect(message->nested_type(i), all);
  }
}

std::vector<const pb::Descriptor*> MessagesOf(const Release& release) {
  std::vector<const pb::Descriptor*> all;
  for (const pb::FileDescriptor* file : release.files) {
    for (int i = 0; i < file->message_type_count(); ++i) {
      Collect(file->message_type(i), all);
    }
  }
  return all;
}

std::string TypeOf(const Field& field) {
  return absl::StrCat(field.is_repeated()    ? "repeated "
                      : field.has_presence() ? "optional "
                                             : "",
                      field.type_name(),
                      field.message_type() != nullptr ? field.message_type()->full_name() : "",
                      field.enum_type() != nullptr ? field.enum_type()->full_name() : "",
                      field.real_containing_oneof() != nullptr
                          ? absl::StrCat(" of ", field.real_containing_oneof()->name())
                          : "");
}

// Some value that is not the field's default; `seed` makes it another one.
class Filler {
 public:
  explicit Filler(int seed) : next_(seed) {}

  void Fill(pb::Message& message, int depth) {
    const pb::Descriptor& type = *message.GetDescriptor();
    const int choice = next_++;
    for (int i = 0; i < type.field_count(); ++i) {
      const Field& field = *type.field(i);
      if (const pb::OneofDescriptor* one = field.real_containing_oneof();
          one != nullptr && one->field(choice % one->field_count()) != &field) {
        continue;
      }
      if (field.message_type() != nullptr && depth == 0) {
        continue;
      }
      for (int times = field.is_repeated() ? 2 : 1; times > 0; --times) {
        Set(message, field, depth);
      }
    }
  }

 private:
  void Set(pb::Message& message, const Field& field, int depth) {
    const pb::Reflection& reflection = *message.GetReflection();
    const int n = next_++ % 100 + 1;
    switch (field.cpp_type()) {
#define HF_SET(CASE, NAME, VALUE)                                        \
  case Field::CPPTYPE_##CASE:                                            \
    field.is_repeated() ? reflection.Add##NAME(&message, &field, VALUE)  \
                        : reflection.Set##NAME(&message, &field, VALUE); \
    return;
      HF_SET(INT32, Int32, -n)
      HF_SET(INT64, Int64, -n * (int64_t{1} << 40))
      HF_SET(UINT32, UInt32, static_cast<uint32_t>(n))
      HF_SET(UINT64, UInt64, static_cast<uint64_t>(n) << 50)
      HF_SET(DOUBLE, Double, n / 8.0)
      HF_SET(FLOAT, Float, static_cast<float>(n) / 8)
      HF_SET(BOOL, Bool, true)
      HF_SET(STRING, String, absl::StrCat("text ", n))
#undef HF_SET
      case Field::CPPTYPE_ENUM: {
        const pb::EnumDescriptor& type = *field.enum_type();
        const int value = type.value(type.value_count() - 1)->number();
        field.is_repeated() ? reflection.AddEnumValue(&message, &field, value)
                            : reflection.SetEnumValue(&message, &field, value);
        return;
      }
      case Field::CPPTYPE_MESSAGE:
        Fill(*(field.is_repeated() ? reflection.AddMessage(&message, &field)
                                   : reflection.MutableMessage(&message, &field)),
             depth - 1);
    }
  }

  int next_;
};

// `from` says it, `to` takes it and says it again: nothing of it is lost or changed.
void Cross(const pb::Message& from, const pb::Message& to) {
  std::unique_ptr<pb::Message> said(from.New());
  for (int seed = 0; seed < 40; ++seed) {
    said->Clear();
    Filler(seed).Fill(*said, kDepth);
    std::unique_ptr<pb::Message> taken(to.New());
    ASSERT_TRUE(taken->ParseFromString(said->SerializeAsString())) << said->GetTypeName();
    std::unique_ptr<pb::Message> back(from.New());
    ASSERT_TRUE(back->ParseFromString(taken->SerializeAsString())) << said->GetTypeName();
    EXPECT_TRUE(MessageDifferencer::Equals(*said, *back)) << said->GetTypeName() << ":\n"
                                                          << said->ShortDebugString() << "\n"
                                                          << back->ShortDebugString();
  }
}

TEST(ProtocolTest, ThereAreReleasesToCompareWith) {
  const std::vector<Release> releases = Releases();
  ASSERT_FALSE(releases.empty());
  for (const Release& release : releases) {
    EXPECT_GT(MessagesOf(release).size(), 150u) << release.name;
  }
}

// Nothing that was ever said means another thing now, or is not understood any more.
TEST(ProtocolTest, FieldsAreOnlyAdded) {
  for (const Release& release : Releases()) {
    for (const pb::Descriptor* old : MessagesOf(release)) {
      const pb::Descriptor* const now = Present().FindMessageTypeByName(old->full_name());
      ASSERT_NE(now, nullptr) << release.name << ": " << old->full_name();
      for (int i = 0; i < old->field_count(); ++i) {
        const Field& was = *old->field(i);
        const Field* const is = now->FindFieldByNumber(was.number());
        ASSERT_NE(is, nullptr) << release.name << ": " << was.full_name();
        EXPECT_EQ(is->name(), was.name()) << release.name << ": " << was.full_name();
        EXPECT_EQ(TypeOf(*is), TypeOf(was)) << release.name << ": " << was.full_name();
      }
    }
  }
}

TEST(ProtocolTest, WordsAndCallsAreOnlyAdded) {
  for (const Release& release : Releases()) {
    std::vector<const pb::EnumDescriptor*> enums;
    for (const pb::FileDescriptor* file : release.files) {
      for (int i = 0; i < file->enum_type_count(); ++i) {
        enums.push_back(file->enum_type(i));
      }
      for (int i = 0; i < file->service_count(); ++i) {
        const pb::ServiceDescriptor& service = *file->service(i);
        for (int m = 0; m < service.method_count(); ++m) {
          const pb::MethodDescriptor& was = *service.method(m);
          const pb::MethodDescriptor* const is = Present().FindMethodByName(was.full_name());
          ASSERT_NE(is, nullptr) << release.name << ": " << was.full_name();
          EXPECT_EQ(is->input_type()->full_name(), was.input_type()->full_name());
          EXPECT_EQ(is->output_type()->full_name(), was.output_type()->full_name());
          EXPECT_EQ(is->client_streaming(), was.client_streaming()) << was.full_name();
          EXPECT_EQ(is->server_streaming(), was.server_streaming()) << was.full_name();
        }
      }
    }
    for (const pb::Descriptor* message : MessagesOf(release)) {
      for (int i = 0; i < message->enum_type_count(); ++i) {
        enums.push_back(message->enum_type(i));
      }
    }
    for (const pb::EnumDescriptor* was : enums) {
      const pb::EnumDescriptor* const is = Present().FindEnumTypeByName(was->full_name());
      ASSERT_NE(is, nullptr) << release.name << ": " << was->full_name();
      for (int i = 0; i < was->value_count(); ++i) {
        if (is->IsReservedNumber(was->value(i)->number())) {
          continue;  // taken back, and never used for anything else
        }
        const pb::EnumValueDescriptor* const value = is->FindValueByNumber(was->value(i)->number());
        ASSERT_NE(value, nullptr) << release.name << ": " << was->value(i)->full_name();
        EXPECT_EQ(value->name(), was->value(i)->name());
      }
    }
  }
}

TEST(ProtocolTest, WhatEachSaysTheOtherTakesAndPassesOn) {
  for (const Release& release : Releases()) {
    pb::DynamicMessageFactory then(release.pool.get());
    pb::MessageFactory& now = *pb::MessageFactory::generated_factory();
    for (const pb::Descriptor* old : MessagesOf(release)) {
      const pb::Descriptor* const present = Present().FindMessageTypeByName(old->full_name());
      ASSERT_NE(present, nullptr) << old->full_name();
      if (old->options().map_entry()) {
        continue;
      }
      SCOPED_TRACE(absl::StrCat("release ", release.name));
      Cross(*then.GetPrototype(old), *now.GetPrototype(present));
      Cross(*now.GetPrototype(present), *then.GetPrototype(old));
    }
  }
}

}  // namespace
}  // namespace holdfast
