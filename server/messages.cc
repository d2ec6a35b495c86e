#include "server/messages.h"

#include "server/membership/membership.h"
#include "server/node_messages.h"

namespace holdfast {

template class OneOf<AnyToCoordinator>;
template class OneOf<AnyToAgent>;
template class OneOf<AnyForwardedRequest>;
template class OneOf<AnyReturnedReply>;
template class OneOf<AnyNodeMessage>;
template class OneOf<AnyMembershipEvent>;

}  // namespace holdfast
