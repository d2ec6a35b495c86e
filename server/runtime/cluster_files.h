// Whether the files that a ClusterConfig names can be what they are named for: files with a
// certificate, a key or a password in them. What a certificate says, and whether a key is its own,
// shows when a connection is made.
//
//   HF_RETURN_IF_ERROR(CheckClusterFiles(*Env::System(), config.cluster()));
//
// A plain function; it waits for the disk.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "base/env.h"
#include "holdfast/v1/config.pb.h"

namespace holdfast {

// Every error names the setting, the file and the way out.
absl::Status CheckTlsFiles(Env& env, const std::string& setting, const v1::ClusterTlsConfig& tls);
absl::Status CheckClusterFiles(Env& env, const v1::ClusterConfig& cluster);

}  // namespace holdfast
