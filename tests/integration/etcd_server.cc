#include "tests/integration/etcd_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

namespace holdfast {
namespace {

std::string ReadAll(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

}  // namespace

uint16_t FreePort() {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(address);
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &bytes) != 0) {
    ADD_FAILURE() << "no free port";
  }
  return ntohs(address.sin_port);
}

CommandAnswer RunCommand(std::vector<std::string> arguments, const std::string& input) {
  const TemporaryDirectory directory;
  std::ofstream(directory.Path("in")) << input;
  std::string line =
      "exec \"$@\" <'" + directory.Path("in") + "' >'" + directory.Path("out") + "' 2>&1";
  std::vector<std::string> shell = {"/bin/sh", "-c", line, "sh"};
  shell.insert(shell.end(), std::make_move_iterator(arguments.begin()),
               std::make_move_iterator(arguments.end()));
  Child child({.arguments = shell});
  const std::optional<int> code = child.Wait();
  return {code.value_or(-1000), ReadAll(directory.Path("out"))};
}

TestCertificates::TestCertificates(const std::string& directory)
    : ca(directory + "/ca.pem"),
      server_cert(directory + "/server.pem"),
      server_key(directory + "/server.key"),
      client_cert(directory + "/client.pem"),
      client_key(directory + "/client.key") {
  const std::string script = R"(set -e
cd "$1"
printf 'subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n' >ext
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=test-ca -keyout ca.key -out ca.pem
for who in server client; do
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=$who -keyout $who.key -out $who.csr
  openssl x509 -req -days 2 -in $who.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile ext -out $who.pem
done
)";
  const CommandAnswer made = RunCommand({"/bin/sh", "-c", script, "sh", directory});
  good = made.exit_code == 0;
  EXPECT_TRUE(good) << made.text;
}

EtcdServer::EtcdServer(Options options) : options_(options) {
  if (options_.tls) {
    certificates_ = std::make_unique<TestCertificates>(directory_.path());
  }
}

EtcdServer::~EtcdServer() {
  Kill();
}

std::vector<std::unique_ptr<EtcdServer>> EtcdServer::Cluster(size_t servers) {
  std::vector<std::unique_ptr<EtcdServer>> all;
  std::string cluster;
  for (size_t i = 0; i < servers; ++i) {
    all.push_back(std::make_unique<EtcdServer>());
    all.back()->name_ = "s" + std::to_string(i);
    cluster += (i == 0 ? "" : ",") + all.back()->name_ +
               "=http://127.0.0.1:" + std::to_string(all.back()->peer_port_);
  }
  for (const auto& server : all) {
    server->cluster_ = cluster;
  }
  return all;
}

void EtcdServer::Launch() {
  const std::string scheme = options_.tls ? "https://" : "http://";
  const std::string peer = "http://127.0.0.1:" + std::to_string(peer_port_);
  std::vector<std::string> arguments = {
      "/usr/bin/etcd",
      "--name=" + name_,
      "--data-dir=" + directory_.Path("data"),
      "--listen-client-urls=" + scheme + endpoint(),
      "--advertise-client-urls=" + scheme + endpoint(),
      "--listen-peer-urls=" + peer,
      "--initial-advertise-peer-urls=" + peer,
      "--initial-cluster=" + (cluster_.empty() ? name_ + "=" + peer : cluster_),
      "--unsafe-no-fsync",
      "--heartbeat-interval=50",
      "--election-timeout=500",
      "--logger=zap",
      "--log-outputs=stderr"};
  if (options_.tls) {
    arguments.insert(
        arguments.end(),
        {"--cert-file=" + certificates_->server_cert, "--key-file=" + certificates_->server_key,
         "--trusted-ca-file=" + certificates_->ca, "--client-cert-auth"});
  }
  child_ = std::make_unique<Child>(
      Child::Options{.arguments = arguments, .error_file = directory_.Path("log")});
}

bool EtcdServer::Start() {
  Launch();
  return AwaitReady();
}

bool EtcdServer::AwaitReady() {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (std::chrono::steady_clock::now() < deadline && child_->running()) {
    if (Ctl({"get", "ready", "--command-timeout=2s", "--dial-timeout=2s"}).exit_code == 0) {
      return true;
    }
  }
  ADD_FAILURE() << "etcd does not answer\n" << Log();
  return false;
}

void EtcdServer::Kill() {
  if (child_ != nullptr) {
    child_->Signal(SIGKILL);
    child_->Wait();
    child_ = nullptr;
  }
}

void EtcdServer::Wipe() {
  std::filesystem::remove_all(directory_.Path("data"));
}

CommandAnswer EtcdServer::Ctl(std::vector<std::string> arguments, const std::string& input) {
  std::vector<std::string> all = {
      "/usr/bin/env", "ETCDCTL_API=3", "/usr/bin/etcdctl",
      "--endpoints=" + std::string(options_.tls ? "https://" : "") + endpoint(),
      // Before the arguments, of which the later count.
      "--command-timeout=25s", "--dial-timeout=25s"};
  if (options_.tls) {
    all.insert(all.end(), {"--cacert=" + certificates_->ca, "--cert=" + certificates_->client_cert,
                           "--key=" + certificates_->client_key});
  }
  all.insert(all.end(), ctl_options.begin(), ctl_options.end());
  all.insert(all.end(), std::make_move_iterator(arguments.begin()),
             std::make_move_iterator(arguments.end()));
  return RunCommand(std::move(all), input);
}

bool EtcdServer::IsLeader() {
  // ENDPOINT, ID, VERSION, DB SIZE, IS LEADER, …
  const std::string status = Ctl({"endpoint", "status", "--write-out=simple"}).text;
  size_t at = 0;
  for (int comma = 0; comma < 4; ++comma) {
    at = status.find(", ", at);
    if (at == std::string::npos) {
      return false;
    }
    at += 2;
  }
  return status.compare(at, 4, "true") == 0;
}

std::string EtcdServer::Log() const {
  return ReadAll(directory_.Path("log"));
}

}  // namespace holdfast
