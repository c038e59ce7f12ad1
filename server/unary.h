// Unary calls off the RPC threads: the work runs on the server's workers, where it may read the disk.
#ifndef LATENTD_SERVER_UNARY_H_
#define LATENTD_SERVER_UNARY_H_

#include <grpcpp/server_context.h>

#include <functional>

#include "server/grpc_errors.h"
#include "server/server_core.h"
#include "server/tensor_guard.h"

namespace latentd {

// Runs `work` on a worker and finishes the call with its status. gRPC keeps request and response until then.
inline grpc::ServerUnaryReactor* OnWorker(ServerCore* core, grpc::CallbackServerContext* context,
                                          std::function<absl::Status()> work) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  core->workers->Submit([reactor, work = std::move(work)] {
    reactor->Finish(ToGrpcStatus(GuardTensorCode("call", work)));
  });
  return reactor;
}

}  // namespace latentd

#endif  // LATENTD_SERVER_UNARY_H_
