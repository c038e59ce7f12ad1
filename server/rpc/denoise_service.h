// DenoiseService over gRPC's callback API: one reactor per stream, each the client of one SessionScope.
#ifndef LATENTD_SERVER_RPC_DENOISE_SERVICE_H_
#define LATENTD_SERVER_RPC_DENOISE_SERVICE_H_

#include "latentd/v1/denoise.grpc.pb.h"
#include "server/server_core.h"

namespace latentd {

// How a stream can end, whoever asks: the reader's last message, cancel, or the scope. The scope's end comes
// last in every case, so that its locks are gone before the client sees the stream end.
class DenoiseServiceImpl : public v1::DenoiseService::CallbackService {
 public:
  explicit DenoiseServiceImpl(ServerCore* core) : core_(core) {}

  grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>* Session(
      grpc::CallbackServerContext* context) override;
  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(grpc::CallbackServerContext* context,
                                                           const v1::GenerateRequest* request) override;

  grpc::ServerUnaryReactor* Plan(grpc::CallbackServerContext* context, const v1::PlanRequest* request,
                                 v1::PlanResponse* response) override;

 private:
  ServerCore* const core_;
};

// The server's limits as the API shows them.
v1::Limits LimitsToProto(const Config& config);

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_DENOISE_SERVICE_H_
