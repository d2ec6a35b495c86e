#include "server/message_texts.h"

#include <google/protobuf/descriptor.h>

#include <string>
#include <vector>

#include "base/utf8.h"

namespace holdfast {

void MakeUtf8(google::protobuf::Message& message) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const google::protobuf::FieldDescriptor* field : fields) {
    const int size = field->is_repeated() ? reflection.FieldSize(message, field) : 1;
    for (int i = 0; i < size; ++i) {
      if (field->cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_MESSAGE) {
        MakeUtf8(field->is_repeated() ? *reflection.MutableRepeatedMessage(&message, field, i)
                                      : *reflection.MutableMessage(&message, field));
      } else if (field->type() == google::protobuf::FieldDescriptor::TYPE_STRING) {
        std::string scratch;
        const std::string& text =
            field->is_repeated()
                ? reflection.GetRepeatedStringReference(message, field, i, &scratch)
                : reflection.GetStringReference(message, field, &scratch);
        if (IsUtf8(text)) {
          continue;
        }
        if (field->is_repeated()) {
          reflection.SetRepeatedString(&message, field, i, Utf8Text(text));
        } else {
          reflection.SetString(&message, field, Utf8Text(text));
        }
      }
    }
  }
}

}  // namespace holdfast
