// Prometheus metrics beside their use: a name, a unit in the name, one line of help, where the
// thing happens. prometheus-cpp underneath; its headers stay in metrics.cc. Thread-safe.
//
//   Counter& saves = metrics.AddCounter("holdfast_saves_total", "Saves by outcome.", {{"outcome",
//   "sealed"}}); saves.Add(1);
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace holdfast {

class Counter {
 public:
  virtual ~Counter() = default;
  virtual void Add(double amount) = 0;
};
class Gauge {
 public:
  virtual ~Gauge() = default;
  virtual void Set(double value) = 0;
};
class Histogram {
 public:
  virtual ~Histogram() = default;
  virtual void Observe(double value) = 0;
};

class Metrics {
 public:
  using Labels = std::map<std::string, std::string>;
  Metrics();
  ~Metrics();
  // The same name and labels give the same object. References live as long as Metrics.
  Counter& AddCounter(const std::string& name, const std::string& help, const Labels& labels = {});
  Gauge& AddGauge(const std::string& name, const std::string& help, const Labels& labels = {});
  Histogram& AddHistogram(const std::string& name, const std::string& help,
                          const std::vector<double>& buckets, const Labels& labels = {});
  void RemoveGauge(const std::string& name, const Labels& labels);
  std::string Text() const;  // the exposition format

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
