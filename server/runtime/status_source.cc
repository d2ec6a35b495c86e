#include "server/runtime/status_source.h"

#include <utility>

#include "base/status.h"
#include "server/message_texts.h"

namespace holdfast {
namespace {

template <typename Reply, typename Request>
absl::StatusOr<Reply> AskAsRoot(AdminContext& context, const Request& request, Duration at_most) {
  HF_ASSIGN_OR_RETURN(AdminAnswer answer, context.gateway->Ask(request, Caller{}, at_most));
  Reply* const reply = std::get_if<Reply>(&answer.reply);
  if (reply == nullptr) {
    return absl::InternalError("the daemon answered another question");
  }
  return std::move(*reply);
}

}  // namespace

absl::StatusOr<v1::GetStatusReply> GatewayStatusSource::Status(Duration at_most) {
  HF_ASSIGN_OR_RETURN(v1::GetStatusReply reply,
                      AskAsRoot<v1::GetStatusReply>(context_, v1::GetStatusRequest(), at_most));
  context_.fill_daemon_status(*reply.mutable_daemon());
  MakeUtf8(reply);
  return reply;
}

absl::StatusOr<v1::GetNodesReply> GatewayStatusSource::Nodes(Duration at_most) {
  return AskAsRoot<v1::GetNodesReply>(context_, v1::GetNodesRequest(), at_most);
}

absl::StatusOr<v1::ListCheckpointsReply> GatewayStatusSource::List(
    const v1::ListCheckpointsRequest& request, Duration at_most) {
  return AskAsRoot<v1::ListCheckpointsReply>(context_, request, at_most);
}

absl::StatusOr<v1::WhereReply> GatewayStatusSource::Where(const v1::WhereRequest& request,
                                                          Duration at_most) {
  return AskAsRoot<v1::WhereReply>(context_, request, at_most);
}

absl::StatusOr<v1::TimelineReply> GatewayStatusSource::Timeline(const v1::TimelineRequest& request,
                                                                Duration at_most) {
  return AskAsRoot<v1::TimelineReply>(context_, request, at_most);
}

}  // namespace holdfast
