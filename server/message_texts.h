// Texts of messages that leave the daemon.
//
//   MakeUtf8(reply);  // now whoever gets it can read it
#pragma once

#include <google/protobuf/message.h>

namespace holdfast {

// Texts may come from names of files, which are bytes; a message with one that is no UTF-8 cannot
// be read by who gets it.
void MakeUtf8(google::protobuf::Message& message);

}  // namespace holdfast
