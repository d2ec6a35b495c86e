// What the status page asks the core, as root: it shows all jobs to whoever may see it.
//
//   GatewayStatusSource source(context);
//   HF_ASSIGN_OR_RETURN(const std::string json, StatusReport(source, *Clock::System()));
//
// Any thread; the context outlives it.
#pragma once

#include "server/runtime/admin_service.h"
#include "server/runtime/status_page/status_report.h"

namespace holdfast {

class GatewayStatusSource final : public StatusSource {
 public:
  explicit GatewayStatusSource(AdminContext& context) : context_(context) {}

  absl::StatusOr<v1::GetStatusReply> Status(Duration at_most) override;
  absl::StatusOr<v1::GetNodesReply> Nodes(Duration at_most) override;
  absl::StatusOr<v1::ListCheckpointsReply> List(const v1::ListCheckpointsRequest& request,
                                                Duration at_most) override;
  absl::StatusOr<v1::WhereReply> Where(const v1::WhereRequest& request, Duration at_most) override;
  absl::StatusOr<v1::TimelineReply> Timeline(const v1::TimelineRequest& request,
                                             Duration at_most) override;

 private:
  AdminContext& context_;
};

}  // namespace holdfast
