#include "base/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <utility>

#include "base/mutex.h"

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

}  // namespace

struct Metrics::Impl {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  mutable Mutex mutex;
  std::map<Key, std::unique_ptr<PrometheusCounter>> counters GUARDED_BY(mutex);
  std::map<Key, std::unique_ptr<PrometheusGauge>> gauges GUARDED_BY(mutex);
  std::map<Key, std::unique_ptr<PrometheusHistogram>> histograms GUARDED_BY(mutex);
};

Metrics::Metrics() : impl_(std::make_unique<Impl>()) {}

Metrics::~Metrics() = default;

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

std::string Metrics::Text() const {
  return prometheus::TextSerializer().Serialize(impl_->registry->Collect());
}

}  // namespace holdfast
