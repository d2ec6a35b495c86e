// Serves `ckptctl fabric` at the admin socket.
//
//   auto service = MakeFabricService(context, caller);
//
// Calls come on gRPC's threads; one measurement at a time.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>

#include "server/runtime/admin_service.h"

namespace holdfast {

std::unique_ptr<grpc::Service> MakeFabricService(AdminContext& context, const Caller& caller);

}  // namespace holdfast
