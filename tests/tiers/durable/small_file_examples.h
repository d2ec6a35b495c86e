// The worked examples of docs/formats.md for the small files of durable tiers.
#pragma once

#include "tiers/durable/manifest.h"
#include "tiers/durable/small_files.h"

namespace holdfast {

inline JobUuid ExampleUuid() {
  return JobUuid::FromString("00112233-4455-4677-8899-aabbccddeeff").value();
}
inline JobIdentity ExampleJob() {
  return {ExampleUuid(), "demo", 1000, 100};
}
inline AttemptClaim ExampleClaim() {
  return {ExampleUuid(), 1, "launch-1"};
}
inline Intent ExampleIntent() {
  Intent intent;
  intent.kind = IntentKind::kPublish;
  intent.unique = "0123456789abcdef0123456789abcdef";
  intent.job = ExampleUuid();
  intent.job_name = "demo";
  intent.checkpoint = {1, 7};
  intent.world_size = 2;
  intent.ranks = {1};
  return intent;
}
inline Manifest ExampleManifest() {
  Manifest manifest;
  manifest.job = ExampleUuid();
  manifest.job_name = "demo";
  manifest.checkpoint = {1, 7};
  manifest.world_size = 2;
  manifest.descent = {{1, {0, 0}}};
  manifest.committed_unix_ms = 1'700'000'000'000;
  for (uint8_t rank = 0; rank < 2; ++rank) {
    ManifestShard shard;
    shard.rank = rank;
    shard.image_bytes = 4122;
    shard.record_bytes = 185;
    shard.record_crc = 0x1122334455667788 + rank;
    shard.layout_hash.fill(static_cast<decltype(shard.layout_hash)::value_type>(0xa0 + rank));
    manifest.shards.push_back(shard);
  }
  return manifest;
}

}  // namespace holdfast
