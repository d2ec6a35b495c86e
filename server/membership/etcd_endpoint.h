// Where one etcd server listens.
#pragma once

#include <string>

namespace holdfast {

struct EtcdEndpoint {
  std::string address;  // host:port
  bool tls = false;
};

}  // namespace holdfast
