// Bad copies, written anew: asks for it, and waits until each was mended or nothing more comes of
// it. What `repair` and `scrub` have in common.
//
//   HF_ASSIGN_OR_RETURN(const Mended mended, MendCopies(context, client, request));
//   *context.out << RenderMended("llama", mended);
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ckptctl/commands.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {

struct Mended {
  std::vector<v1::BadCopy> copies;  // that were asked for, as they are in the end
  uint64_t not_told = 0;            // that are bad, too: ckptd names so many at a time
  size_t not_known = 0;             // of what was found: in memory, or gone since
  bool interrupted = false;
  uint64_t bad() const;  // that are not mended
};

// `found`: what a verification has just found bad; some of it may be mended already. Ends when each
// copy that ckptd names is mended or not to be mended now, and of those that it only counts none
// has been mended for half a minute.
absl::StatusOr<Mended> MendCopies(const Context& context, AdminClient& client,
                                  const v1::RepairRequest& request,
                                  std::vector<v1::BadShard> found = {});
// Whether Ctrl-C was pressed.
bool RepairInterrupted(const Context& context);
// "MENDED: llama step 900 (attempt 3) rank 1, nvme on node-a, /mnt/…: from the memory"
std::string RenderMendedCopy(const std::string& job, const v1::BadCopy& copy);
std::string RenderMended(const std::string& job, const Mended& mended);
void AddMended(const Mended& mended, nlohmann::ordered_json& json);

}  // namespace holdfast
