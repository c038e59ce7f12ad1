// ModelService: what the catalog holds.
#ifndef LATENTD_SERVER_MODEL_SERVICE_H_
#define LATENTD_SERVER_MODEL_SERVICE_H_

#include "latentd/v1/model.grpc.pb.h"
#include "server/server_core.h"

namespace latentd {

class ModelServiceImpl : public v1::ModelService::CallbackService {
 public:
  explicit ModelServiceImpl(ServerCore* core) : core_(core) {}

  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context, const v1::ListModelsRequest* request,
                                       v1::ListModelsResponse* response) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context, const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response) override;
  grpc::ServerUnaryReactor* ListLoras(grpc::CallbackServerContext* context, const v1::ListLorasRequest* request,
                                      v1::ListLorasResponse* response) override;
  grpc::ServerUnaryReactor* InspectLora(grpc::CallbackServerContext* context, const v1::InspectLoraRequest* request,
                                        v1::InspectLoraResponse* response) override;

 private:
  ServerCore* const core_;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_MODEL_SERVICE_H_
