// CacheService: what the ModelCache holds.
#ifndef LATENTD_SERVER_RPC_CACHE_SERVICE_H_
#define LATENTD_SERVER_RPC_CACHE_SERVICE_H_

#include "latentd/v1/cache.grpc.pb.h"
#include "server/server_core.h"

namespace latentd {

class CacheServiceImpl : public v1::CacheService::CallbackService {
 public:
  explicit CacheServiceImpl(ServerCore* core) : core_(core) {}

  grpc::ServerUnaryReactor* GetCacheStats(grpc::CallbackServerContext* context,
                                          const v1::GetCacheStatsRequest* request,
                                          v1::GetCacheStatsResponse* response) override;
  grpc::ServerUnaryReactor* TrimCache(grpc::CallbackServerContext* context,
                                      const v1::TrimCacheRequest* request,
                                      v1::TrimCacheResponse* response) override;
  grpc::ServerUnaryReactor* DropModel(grpc::CallbackServerContext* context,
                                      const v1::DropModelRequest* request,
                                      v1::DropModelResponse* response) override;

  grpc::ServerUnaryReactor* LoadModel(grpc::CallbackServerContext* context,
                                      const v1::LoadModelRequest* request,
                                      v1::LoadModelResponse* response) override;
  grpc::ServerUnaryReactor* UnloadModel(grpc::CallbackServerContext* context,
                                        const v1::UnloadModelRequest* request,
                                        v1::UnloadModelResponse* response) override;
  grpc::ServerUnaryReactor* SetCap(grpc::CallbackServerContext* context, const v1::SetCapRequest* request,
                                   v1::SetCapResponse* response) override;

 private:
  ServerCore* const core_;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_CACHE_SERVICE_H_
