// ModelService.UploadLora: one call.
#ifndef LATENTD_SERVER_RPC_UPLOAD_CALL_H_
#define LATENTD_SERVER_RPC_UPLOAD_CALL_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include "latentd/v1/model.pb.h"
#include "server/server_core.h"

namespace latentd {

// UNIMPLEMENTED UPLOADS_OFF where the config names no folder for uploads.
absl::Status CheckUploadsOn(const ServerCore& core);

// A reactor that belongs to gRPC. One message is in memory at a time: the next is asked for when a worker has
// written the last. `response` is gRPC's, and filled before the call ends with OK.
grpc::ServerReadReactor<v1::UploadLoraRequest>* NewUploadCall(ServerCore* core,
                                                              grpc::CallbackServerContext* context,
                                                              v1::UploadLoraResponse* response);

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_UPLOAD_CALL_H_
