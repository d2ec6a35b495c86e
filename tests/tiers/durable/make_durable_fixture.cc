// Writes the fixtures of the small files of durable tiers: make_durable_fixture <directory>. Run
// once for each version that is released, by hand; the tests read what is committed.
#include <cstdio>
#include <fstream>

#include "tests/tiers/durable/small_file_examples.h"

namespace {

bool Write(const std::string& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  if (!out) {
    std::fprintf(stderr, "make_durable_fixture: could not write '%s'\n", path.c_str());
  }
  return static_cast<bool>(out);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: make_durable_fixture <directory>\n");
    return 2;
  }
  const std::string stem = std::string(argv[1]) + "/example.";
  const bool ok = Write(stem + "job", holdfast::EncodeJobFile(holdfast::ExampleJob())) &&
                  Write(stem + "claim", holdfast::EncodeClaim(holdfast::ExampleClaim())) &&
                  Write(stem + "intent", holdfast::EncodeIntent(holdfast::ExampleIntent())) &&
                  Write(stem + "manifest", holdfast::EncodeManifest(holdfast::ExampleManifest()));
  return ok ? 0 : 1;
}
