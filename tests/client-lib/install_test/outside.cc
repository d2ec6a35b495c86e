#include <holdfast/holdfast.h>

#include <cstdio>

int main() {
  float w[4] = {};
  const auto tensor = holdfast::Tensor::Box("w", holdfast::Type::kF32, {8}, {4}, {4}, w);
  const auto job = holdfast::Job::Open({.job = "outside",
                                        .socket = "/nonexistent/ckptd.sock",
                                        .open_deadline = holdfast::Milliseconds(1)});
  const auto reader =
      holdfast::OpenCheckpoint({.job = "outside", .socket = "/nonexistent/ckptd.sock"});
  std::printf("%s %s %s\n%s\n", HOLDFAST_VERSION_STRING, holdfast::TypeName(tensor.type),
              job.status().ToString().c_str(), reader.status().ToString().c_str());
  const bool nobody = job.status().code() == holdfast::Code::kUnavailable &&
                      reader.status().code() == holdfast::Code::kUnavailable;
  return nobody ? 0 : 1;
}
