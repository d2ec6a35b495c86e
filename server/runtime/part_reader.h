// Shards that lie on other nodes, of which clients here want parts (docs/protocol.md §10,
// "Readers"): the record, and memory that the client maps and parts are read into, as they are
// asked for. Nothing is verified but that they are of the shard whose record was given; digests are
// the client's to compare.
//
//   PartReader parts({"n1", pulls, fabric, remote_parts, [&](Event event) { … }, …});
//   parts.Open(open);       // → DurableOpened, exactly one
//   parts.Read(read);       // → PartsRead, unless it was ended before
//   parts.End(drain);
//
// A node that fails, or contradicts the digests, is left for the next that has the shard. What is
// in the remote tier comes from the node that reads that file for all, which may be this one;
// should it fail, it is read here.
//
// Owner: the Daemon. One thread at a time calls; each shard has a thread of its own. It must end
// before the fabric does.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "server/events.h"

namespace holdfast {

class FabricPort;
class PullClient;
class RemoteParts;

// Whoever wants more asks again.
inline constexpr uint64_t kPartsBytes = uint64_t{16} << 20;

class PartReader {
 public:
  struct Options {
    std::string node_name;
    std::shared_ptr<PullClient> pulls;          // null: no other node is asked
    FabricPort* fabric = nullptr;               // null: none
    std::shared_ptr<RemoteParts> remote_parts;  // null: there is no remote tier
    std::function<void(Event)> post;
    std::function<void()> ended;  // one of the shards' threads has: Reap soon; any thread
  };
  explicit PartReader(Options options);
  ~PartReader();
  PartReader(const PartReader&) = delete;
  PartReader& operator=(const PartReader&) = delete;

  void Open(OpenDurable action);
  void Read(ReadParts action);
  void End(DrainId opened);
  // Joins the threads that have ended.
  void Reap();

 private:
  class Shard;

  const Options options_;
  std::map<DrainId, std::unique_ptr<Shard>> shards_;
  std::map<uint64_t, std::unique_ptr<Shard>> ending_;
  uint64_t next_ending_ = 1;
};

}  // namespace holdfast
