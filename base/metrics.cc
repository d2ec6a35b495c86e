#include "base/metrics.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/unique_fd.h"

namespace holdfast {
namespace {

class PrometheusCounter : public Counter {
 public:
  explicit PrometheusCounter(prometheus::Counter& counter) : counter_(counter) {}
  void Add(double amount) override { counter_.Increment(amount); }

 private:
  prometheus::Counter& counter_;
};

class PrometheusGauge : public Gauge {
 public:
  PrometheusGauge(prometheus::Family<prometheus::Gauge>& family, const Metrics::Labels& labels)
      : family_(family), gauge_(family.Add(labels)) {}
  void Set(double value) override { gauge_.Set(value); }
  void RemoveFromFamily() { family_.Remove(&gauge_); }

 private:
  prometheus::Family<prometheus::Gauge>& family_;
  prometheus::Gauge& gauge_;
};

class PrometheusHistogram : public Histogram {
 public:
  explicit PrometheusHistogram(prometheus::Histogram& histogram) : histogram_(histogram) {}
  void Observe(double value) override { histogram_.Observe(value); }

 private:
  prometheus::Histogram& histogram_;
};

using Key = std::pair<std::string, Metrics::Labels>;

// The server looks only every two seconds whether it should stop, unless somebody connects: so we
// do, that a daemon that is told to end, or is replaced by a newer one, need not wait. Best effort:
// an address other than loopback or "any" waits.
void StopServer(std::unique_ptr<prometheus::Exposer> exposer, int port) {
  std::atomic<bool> stopped{false};
  std::thread visitor([&stopped, port] {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    while (!stopped.load()) {
      const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) !=
              0 &&
          errno != EINPROGRESS) {
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  exposer.reset();
  stopped = true;
  visitor.join();
}

}  // namespace

struct Metrics::Impl {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  mutable Mutex mutex;
  std::map<Key, std::unique_ptr<PrometheusCounter>> counters GUARDED_BY(mutex);
  std::map<Key, std::unique_ptr<PrometheusGauge>> gauges GUARDED_BY(mutex);
  std::map<Key, std::unique_ptr<PrometheusHistogram>> histograms GUARDED_BY(mutex);
  std::unique_ptr<prometheus::Exposer> exposer GUARDED_BY(mutex);
  int port GUARDED_BY(mutex) = 0;
};

Metrics::Metrics() : impl_(std::make_unique<Impl>()) {}

Metrics::~Metrics() {
  std::unique_ptr<prometheus::Exposer> exposer;
  int port = 0;
  {
    MutexLock lock(impl_->mutex);
    exposer = std::move(impl_->exposer);
    port = impl_->port;
  }
  if (exposer != nullptr) {
    StopServer(std::move(exposer), port);
  }
}

Counter& Metrics::AddCounter(const std::string& name, const std::string& help,
                             const Labels& labels) {
  MutexLock lock(impl_->mutex);
  std::unique_ptr<PrometheusCounter>& counter = impl_->counters[{name, labels}];
  if (counter == nullptr) {
    auto& family = prometheus::BuildCounter().Name(name).Help(help).Register(*impl_->registry);
    counter = std::make_unique<PrometheusCounter>(family.Add(labels));
  }
  return *counter;
}

Gauge& Metrics::AddGauge(const std::string& name, const std::string& help, const Labels& labels) {
  MutexLock lock(impl_->mutex);
  std::unique_ptr<PrometheusGauge>& gauge = impl_->gauges[{name, labels}];
  if (gauge == nullptr) {
    auto& family = prometheus::BuildGauge().Name(name).Help(help).Register(*impl_->registry);
    gauge = std::make_unique<PrometheusGauge>(family, labels);
  }
  return *gauge;
}

Histogram& Metrics::AddHistogram(const std::string& name, const std::string& help,
                                 const std::vector<double>& buckets, const Labels& labels) {
  MutexLock lock(impl_->mutex);
  std::unique_ptr<PrometheusHistogram>& histogram = impl_->histograms[{name, labels}];
  if (histogram == nullptr) {
    auto& family = prometheus::BuildHistogram().Name(name).Help(help).Register(*impl_->registry);
    histogram = std::make_unique<PrometheusHistogram>(family.Add(labels, buckets));
  }
  return *histogram;
}

void Metrics::RemoveGauge(const std::string& name, const Labels& labels) {
  MutexLock lock(impl_->mutex);
  const auto found = impl_->gauges.find({name, labels});
  if (found == impl_->gauges.end()) {
    return;
  }
  found->second->RemoveFromFamily();
  impl_->gauges.erase(found);
}

absl::Status Metrics::Serve(const std::string& address) {
  MutexLock lock(impl_->mutex);
  if (impl_->exposer != nullptr) {
    return absl::FailedPreconditionError("serve metrics: already serving");
  }
  try {
    // Requests that are never finished hold a thread each until their time is over.
    const std::vector<std::string> options = {"listening_ports",    address, "num_threads", "4",
                                              "request_timeout_ms", "500"};
    auto exposer = std::make_unique<prometheus::Exposer>(options);
    exposer->RegisterCollectable(impl_->registry);
    const std::vector<int> ports = exposer->GetListeningPorts();
    impl_->port = ports.empty() ? 0 : ports.front();
    impl_->exposer = std::move(exposer);
    return absl::OkStatus();
  } catch (const std::exception& e) {
    return absl::UnavailableError(absl::StrCat("serve metrics on '", address, "': ", e.what(),
                                               "; is the port taken? (port 0 picks a free one)"));
  }
}

int Metrics::port() const {
  MutexLock lock(impl_->mutex);
  return impl_->port;
}

std::string Metrics::Text() const {
  return prometheus::TextSerializer().Serialize(impl_->registry->Collect());
}

}  // namespace holdfast
