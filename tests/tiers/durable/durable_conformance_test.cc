#include "tests/tiers/durable/durable_harness.h"
#include "tests/tiers/tier_conformance.h"

namespace holdfast {
namespace {

HarnessFactory Place(std::string name, const DurablePlace& place) {
  return {std::move(name), [place] { return std::make_unique<DurableHarness>(place); }};
}
std::string Name(const testing::TestParamInfo<HarnessFactory>& info) {
  return info.param.name;
}

constexpr DurablePlace kNvme = {.kind = DurableKind::kNvme};
constexpr DurablePlace kRemote = {.kind = DurableKind::kRemote};
constexpr DurablePlace kLinksOnly = {.kind = DurableKind::kRemote, .rename_no_replace = false};
constexpr DurablePlace kRenameOnly = {.kind = DurableKind::kRemote, .hard_links = false};
constexpr DurablePlace kNeither = {
    .kind = DurableKind::kRemote, .hard_links = false, .rename_no_replace = false};
constexpr DurablePlace kNoRoomAhead = {.kind = DurableKind::kRemote, .allocate = false};
constexpr DurablePlace kNvmeNoRoomAhead = {.kind = DurableKind::kNvme, .allocate = false};

INSTANTIATE_TEST_SUITE_P(
    Durable, TierConformance,
    testing::Values(Place("Nvme", kNvme), Place("Remote", kRemote),
                    Place("RemoteWithLinksOnly", kLinksOnly),
                    Place("RemoteWithRenameOnly", kRenameOnly),
                    Place("RemoteWithNeither", kNeither),
                    Place("RemoteThatCannotReserve", kNoRoomAhead),
                    Place("NvmeThatCannotReserve", kNvmeNoRoomAhead),
                    Place("NvmeOnRealFiles", {.kind = DurableKind::kNvme, .real = true}),
                    Place("RemoteOnRealFiles", {.kind = DurableKind::kRemote, .real = true})),
    Name);
// The other places crash in durable_crash_test, with smaller images.
INSTANTIATE_TEST_SUITE_P(Durable, TierCrashConformance,
                         testing::Values(Place("Nvme", kNvme), Place("Remote", kRemote)), Name);

}  // namespace
}  // namespace holdfast
