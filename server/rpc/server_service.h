// ServerService: the server itself and its sessions.
#ifndef LATENTD_SERVER_RPC_SERVER_SERVICE_H_
#define LATENTD_SERVER_RPC_SERVER_SERVICE_H_

#include "latentd/v1/server.grpc.pb.h"
#include "server/server_core.h"

namespace latentd {

class ServerServiceImpl : public v1::ServerService::CallbackService {
 public:
  explicit ServerServiceImpl(ServerCore* core) : core_(core) {}

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* response) override;
  grpc::ServerUnaryReactor* ListSessions(grpc::CallbackServerContext* context,
                                         const v1::ListSessionsRequest* request,
                                         v1::ListSessionsResponse* response) override;
  grpc::ServerUnaryReactor* CancelJob(grpc::CallbackServerContext* context,
                                      const v1::CancelJobRequest* request,
                                      v1::CancelJobResponse* response) override;

 private:
  ServerCore* const core_;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_SERVER_SERVICE_H_
