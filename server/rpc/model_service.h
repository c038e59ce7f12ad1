// ModelService: what the catalog holds, and what clients add to it (upload_call.h).
#ifndef LATENTD_SERVER_RPC_MODEL_SERVICE_H_
#define LATENTD_SERVER_RPC_MODEL_SERVICE_H_

#include "latentd/v1/model.grpc.pb.h"
#include "server/server_core.h"

namespace latentd {

class ModelServiceImpl : public v1::ModelService::CallbackService {
 public:
  explicit ModelServiceImpl(ServerCore* core) : core_(core) {}

  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context,
                                       const v1::ListModelsRequest* request,
                                       v1::ListModelsResponse* response) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context, const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response) override;
  grpc::ServerUnaryReactor* ListLoras(grpc::CallbackServerContext* context,
                                      const v1::ListLorasRequest* request,
                                      v1::ListLorasResponse* response) override;
  grpc::ServerUnaryReactor* ListEmbeddings(grpc::CallbackServerContext* context,
                                           const v1::ListEmbeddingsRequest* request,
                                           v1::ListEmbeddingsResponse* response) override;
  grpc::ServerUnaryReactor* InspectLora(grpc::CallbackServerContext* context,
                                        const v1::InspectLoraRequest* request,
                                        v1::InspectLoraResponse* response) override;
  grpc::ServerReadReactor<v1::UploadLoraRequest>* UploadLora(grpc::CallbackServerContext* context,
                                                             v1::UploadLoraResponse* response) override;
  grpc::ServerUnaryReactor* DeleteLora(grpc::CallbackServerContext* context,
                                       const v1::DeleteLoraRequest* request,
                                       v1::DeleteLoraResponse* response) override;

 private:
  ServerCore* const core_;
};

// A LoRA as ListLoras shows it; of a file that cannot be used, name and size. Reads the file's header.
v1::Lora DescribeLora(const ServerCore& core, const LoraFile& lora);

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_MODEL_SERVICE_H_
