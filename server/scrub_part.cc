#include "server/scrub_part.h"

namespace holdfast {

ReadableShard InRemote(const std::string& job, const JobUuid& uuid, const v1::ScrubCopy& copy) {
  ReadableShard shard;
  shard.copy.id = {uuid, copy.attempt(), copy.step(), copy.rank()};
  shard.copy.job_name = job;
  shard.copy.world_size = copy.world_size();
  shard.copy.image_bytes = copy.bytes();
  shard.tier = TierKind::kRemote;
  shard.location = copy.location();
  shard.known_unix_ms = copy.known_unix_ms();
  shard.read_unix_ms = copy.read_unix_ms();
  return shard;
}

}  // namespace holdfast
