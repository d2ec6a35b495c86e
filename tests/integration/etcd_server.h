// A real etcd of a test's own: one server, or one of several, on loopback ports that were free,
// with its data in a directory that goes away with it.
//
//   EtcdServer etcd;
//   ASSERT_TRUE(etcd.Start());
//   etcd.Kill();  etcd.Wipe();  etcd.Start();
//
// One thread per object.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/base/temporary_directory.h"
#include "tests/integration/child.h"

namespace holdfast {

uint16_t FreePort();

struct CommandAnswer {
  int exit_code = -1000;  // -1000: it did not end
  std::string text;       // stdout and stderr
};
// Runs a program to its end.
CommandAnswer RunCommand(std::vector<std::string> arguments, const std::string& input = "");

struct EtcdServerOptions {
  bool tls = false;  // for clients, who need a certificate, too
};

// Made by openssl, for 127.0.0.1: a CA, and a pair for the server and one for clients.
struct TestCertificates {
  explicit TestCertificates(const std::string& directory);
  // The clients' pair anew; with `ca`, of another authority.
  std::string ca;
  std::string server_cert;
  std::string server_key;
  std::string client_cert;
  std::string client_key;
  bool good = false;
};

class EtcdServer {
 public:
  using Options = EtcdServerOptions;
  explicit EtcdServer(Options options = {});
  ~EtcdServer();

  // Servers that form one cluster, not started.
  static std::vector<std::unique_ptr<EtcdServer>> Cluster(size_t servers);

  void Launch();  // without waiting
  bool Start();   // waits until it answers
  bool AwaitReady();
  void Kill();  // SIGKILL
  void Pause() { child_->Signal(SIGSTOP); }
  void Continue() { child_->Signal(SIGCONT); }
  void Wipe();  // its data; not while it runs
  // etcdctl's API v3 at this server.
  CommandAnswer Ctl(std::vector<std::string> arguments, const std::string& input = "");
  bool IsLeader();

  std::string endpoint() const { return "127.0.0.1:" + std::to_string(client_port_); }
  const TestCertificates& certificates() const { return *certificates_; }
  std::string Log() const;
  std::vector<std::string> ctl_options;  // "--user=…"

 private:
  const Options options_;
  TemporaryDirectory directory_;
  std::unique_ptr<TestCertificates> certificates_;
  uint16_t client_port_ = FreePort();
  uint16_t peer_port_ = FreePort();
  std::string name_ = "s0";
  std::string cluster_;  // name=url of all; empty: this one
  std::unique_ptr<Child> child_;
};

}  // namespace holdfast
