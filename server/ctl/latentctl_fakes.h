// A server that plays given answers, for latentctl_test.cc: what a call gets depends on names and prompts,
// and what was asked for is kept.
#ifndef LATENTD_SERVER_CTL_LATENTCTL_FAKES_H_
#define LATENTD_SERVER_CTL_LATENTCTL_FAKES_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "cache/base/sha256.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "latentd/v1/cache.grpc.pb.h"
#include "latentd/v1/denoise.grpc.pb.h"
#include "latentd/v1/model.grpc.pb.h"
#include "latentd/v1/server.grpc.pb.h"
#include "server/media/image_codec.h"
#include "server/rpc/grpc_errors.h"

namespace latentd {

inline std::string TestPng() {
  std::vector<uint8_t> pixels(16 * 16 * 3, 200);
  return *EncodePng(pixels, 16, 16);
}

// Sends the events of a whole job to `send`.
template <typename Send>
void PlayJob(const v1::GenerateParams& params, const Send& send) {
  v1::JobEvent event;
  event.mutable_queued()->set_position(0);
  send(event);
  event.mutable_step()->set_index(1);
  event.mutable_step()->set_count(1);
  send(event);
  event.mutable_preview()->set_data(TestPng());
  send(event);
  const std::string png = TestPng();
  for (int i = 0; i < std::max(1, params.count()); ++i) {
    auto* header = event.mutable_image_header();
    header->set_index(i);
    header->set_size(static_cast<int64_t>(png.size()));
    header->set_width(16);
    header->set_height(16);
    header->set_seed(params.seed() + i);
    header->set_sha256(Sha256Hex(params.prompt() == "damaged" ? "other" : png));
    send(event);
    for (size_t at = 0; at < png.size(); at += 50) {
      event.mutable_image_chunk()->set_index(i);
      event.mutable_image_chunk()->set_offset(static_cast<int64_t>(at));
      event.mutable_image_chunk()->set_data(png.substr(at, 50));
      send(event);
    }
  }
  if (params.prompt() == "cut") return;
  if (params.prompt() == "short of memory") {
    auto* adapted = event.mutable_adapted();
    adapted->set_measure(v1::JobEvent::Adapted::MEASURE_TILED);
    adapted->set_component("vae");
    adapted->set_device("sim:0");
    adapted->set_reason("no room");
    send(event);
  }
  *event.mutable_done()->mutable_params() = params;
  auto* report = event.mutable_done()->add_loras();
  report->set_name("night");
  report->set_layers_in_file(5);
  report->set_unmatched_count(2);
  report->add_unmatched_samples("odd.layer");
  report->add_embeddings("sks");
  report->add_unused_embeddings("sks");
  auto* phase = event.mutable_done()->add_phases();
  phase->set_component("vae");
  phase->set_device("sim:0");
  phase->set_working_bytes(1 << 20);
  send(event);
}

inline absl::Status NoModel(const std::string& name) {
  return MakeError(absl::StatusCode::kNotFound, "MODEL_NOT_FOUND",
                   absl::StrCat("no model named '", name, "'"), {{"model", name}});
}

// More than trailers can hold.
inline absl::Status HugeError() {
  ErrorDetails details;
  for (int i = 0; i < 50; ++i) details[absl::StrCat("key", i)] = std::string(1000, 'x');
  return MakeError(absl::StatusCode::kAborted, "HUGE_ERROR", std::string(20000, 'y'), details);
}

class FakeDenoise : public v1::DenoiseService::Service {
 public:
  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateResponse>* writer) override {
    last_request = *request;
    if (request->model() == "missing") return ToGrpcStatus(NoModel("missing"));
    if (request->model() == "huge") return ToGrpcStatus(HugeError());
    const auto send = [&](const v1::JobEvent& event) {
      v1::GenerateResponse response;
      response.set_session("s");
      response.set_job_id("j");
      *response.mutable_event() = event;
      writer->Write(response);
    };
    if (request->params().prompt() == "forever") {
      v1::JobEvent event;
      event.mutable_step()->set_index(1);
      send(event);
      while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      cancelled = true;
      return grpc::Status::CANCELLED;
    }
    PlayJob(request->params(), send);
    return grpc::Status::OK;
  }

  grpc::Status Session(grpc::ServerContext* context,
                       grpc::ServerReaderWriter<v1::SessionResponse, v1::SessionRequest>* stream) override {
    v1::SessionRequest request;
    while (stream->Read(&request)) {
      v1::SessionResponse response;
      response.set_request_id(request.request_id());
      if (request.has_open()) {
        if (request.open().model() == "missing") return ToGrpcStatus(NoModel("missing"));
        response.mutable_opened()->set_session("s");
        response.mutable_opened()->set_model(request.open().model());
        stream->Write(response);
      } else if (request.has_set_loras()) {
        if (request.set_loras().loras_size() > 0 && request.set_loras().loras(0).name() == "missing") {
          *response.mutable_error()->mutable_status() = ToRpcStatus(
              MakeError(absl::StatusCode::kNotFound, "LORA_NOT_FOUND", "no LoRA named 'missing'"));
        } else {
          response.mutable_loras_set()->add_loras();
        }
        stream->Write(response);
      } else if (request.has_denoise()) {
        PlayJob(request.denoise().params(), [&](const v1::JobEvent& event) {
          response.mutable_job_event()->set_job_id(request.denoise().job_id());
          *response.mutable_job_event()->mutable_event() = event;
          stream->Write(response);
        });
      } else if (request.has_close()) {
        response.mutable_closed()->set_reason(v1::SessionResponse::Closed::REASON_CLOSED_BY_CLIENT);
        stream->Write(response);
        return grpc::Status::OK;
      }
    }
    cancelled = context->IsCancelled();
    return grpc::Status::OK;
  }

  grpc::Status Plan(grpc::ServerContext*, const v1::PlanRequest* request,
                    v1::PlanResponse* response) override {
    last_plan = *request;
    if (request->model() == "missing") return ToGrpcStatus(NoModel("missing"));
    response->set_device("sim:0");
    response->set_fits(request->model() != "large");
    if (!response->fits()) {
      *response->mutable_reason() =
          ToRpcStatus(MakeError(absl::StatusCode::kResourceExhausted, "BUDGET_EXHAUSTED", "no room"));
    }
    return grpc::Status::OK;
  }

  v1::GenerateRequest last_request;
  v1::PlanRequest last_plan;
  std::atomic<bool> cancelled = false;
};

class FakeModels : public v1::ModelService::Service {
 public:
  // Two pages.
  grpc::Status ListModels(grpc::ServerContext*, const v1::ListModelsRequest* request,
                          v1::ListModelsResponse* response) override {
    auto* model = response->add_models();
    model->set_name(request->page_token().empty() ? "first" : "second");
    model->set_family("flux");
    model->mutable_defaults()->set_width(128);
    model->mutable_defaults()->set_height(128);
    model->mutable_defaults()->set_steps(12);
    auto* component = model->add_components();
    component->set_name("transformer");
    component->set_storage_type("bf16");
    component->set_bytes(3 << 20);
    if (request->page_token().empty()) response->set_next_page_token("next");
    return grpc::Status::OK;
  }
  grpc::Status ListLoras(grpc::ServerContext*, const v1::ListLorasRequest* request,
                         v1::ListLorasResponse* response) override {
    v1::Lora& night = *response->add_loras();
    night.set_name("night");
    night.set_format("kohya");
    night.set_family("SDXL");
    night.set_layers(9);
    night.set_bytes(6 << 10);
    night.add_embeddings("sks");
    if (request->has_model()) {
      night.mutable_match()->set_layers_in_file(9);
      night.mutable_match()->set_unmatched_count(2);
      night.mutable_match()->add_unmatched_samples("odd.layer");
    }
    v1::Lora& torn = *response->add_loras();
    torn.set_name("torn");
    torn.set_problem("torn.safetensors is empty");
    return grpc::Status::OK;
  }
  grpc::Status ListEmbeddings(grpc::ServerContext*, const v1::ListEmbeddingsRequest* request,
                              v1::ListEmbeddingsResponse* response) override {
    v1::Embedding& embedding = *response->add_embeddings();
    embedding.set_name(request->page_token().empty() ? "pets/cat" : "torn");
    embedding.set_trigger(request->page_token().empty() ? "<cat>" : "<torn>");
    embedding.set_bytes(6 << 10);
    if (!request->page_token().empty()) return embedding.set_problem("is torn"), grpc::Status::OK;
    embedding.set_tokens(2);
    embedding.set_family("SD 1.x");
    response->set_next_page_token("pets/cat");
    return grpc::Status::OK;
  }
  grpc::Status InspectLora(grpc::ServerContext*, const v1::InspectLoraRequest* request,
                           v1::InspectLoraResponse* response) override {
    response->mutable_lora()->set_name(request->name());
    (*response->mutable_layers_by_rank())[8] = 24;
    if (request->has_model()) (*response->mutable_match()->mutable_matched())["transformer"] = 24;
    return grpc::Status::OK;
  }
};

class FakeUploads : public FakeModels {
 public:
  grpc::Status UploadLora(grpc::ServerContext*, grpc::ServerReader<v1::UploadLoraRequest>* reader,
                          v1::UploadLoraResponse* response) override {
    v1::UploadLoraRequest request;
    data.clear();
    chunks = 0;
    if (!reader->Read(&request)) return grpc::Status::CANCELLED;
    header = request.header();
    if (header.name() == "off") {
      return ToGrpcStatus(
          MakeError(absl::StatusCode::kUnimplemented, "UPLOADS_OFF", "this server takes no uploads"));
    }
    response->mutable_lora()->set_name("uploads/" + header.name());
    response->mutable_lora()->set_bytes(header.size());
    response->mutable_lora()->set_layers(96);
    response->set_existed(header.name() == "there");
    if (response->existed()) return grpc::Status::OK;
    while (reader->Read(&request)) {
      EXPECT_EQ(request.chunk().offset(), static_cast<int64_t>(data.size()));
      data += request.chunk().data();
      ++chunks;
    }
    return grpc::Status::OK;
  }
  grpc::Status DeleteLora(grpc::ServerContext*, const v1::DeleteLoraRequest* request,
                          v1::DeleteLoraResponse*) override {
    if (request->name() == "uploads/night") return grpc::Status::OK;
    return ToGrpcStatus(MakeError(absl::StatusCode::kFailedPrecondition, "NOT_AN_UPLOAD", "not an upload"));
  }

  v1::UploadLoraRequest::Header header;
  std::string data;
  int chunks = 0;
};

class FakeCache : public v1::CacheService::Service {
 public:
  grpc::Status GetCacheStats(grpc::ServerContext*, const v1::GetCacheStatsRequest*,
                             v1::GetCacheStatsResponse* response) override {
    auto* record = response->add_records();
    record->set_key("night@1/lora");
    record->set_kind("lora");
    record->set_bytes(160 * 1024);
    record->set_lock_count(1);
    record->add_holders("session-1");
    record->set_use("patches");
    response->mutable_ram_budget()->set_cap_bytes(int64_t{8} << 30);
    return grpc::Status::OK;
  }
  grpc::Status TrimCache(grpc::ServerContext*, const v1::TrimCacheRequest* request,
                         v1::TrimCacheResponse* response) override {
    response->set_freed_bytes(request->has_bytes() ? request->bytes() : 7);
    return grpc::Status::OK;
  }
  grpc::Status DropModel(grpc::ServerContext*, const v1::DropModelRequest*,
                         v1::DropModelResponse* response) override {
    response->set_evicted_records(4);
    return grpc::Status::OK;
  }
  grpc::Status LoadModel(grpc::ServerContext*, const v1::LoadModelRequest* request,
                         v1::LoadModelResponse* response) override {
    last_load = *request;
    if (request->name() == "missing") return ToGrpcStatus(NoModel("missing"));
    for (const char* key : {"m@1:transformer", "m@1:vae"}) response->add_keys(key);
    response->set_bytes(3 << 20);
    response->set_loaded_records(1);
    return grpc::Status::OK;
  }
  grpc::Status UnloadModel(grpc::ServerContext*, const v1::UnloadModelRequest* request,
                           v1::UnloadModelResponse* response) override {
    response->set_evicted_records(4);
    response->set_evicted_bytes(3 << 20);
    response->set_busy_records(request->name() == "busy" ? 2 : 0);
    return grpc::Status::OK;
  }
  grpc::Status SetCap(grpc::ServerContext*, const v1::SetCapRequest* request,
                      v1::SetCapResponse* response) override {
    last_cap = *request;
    response->set_old_cap_bytes(int64_t{8} << 30);
    response->set_in_use_bytes(int64_t{2} << 30);
    return grpc::Status::OK;
  }

  v1::LoadModelRequest last_load;
  v1::SetCapRequest last_cap;
};

class FakeServer : public v1::ServerService::Service {
 public:
  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                             v1::GetServerInfoResponse* response) override {
    response->set_version("9.9");
    response->set_device_choice("auto: the CPU, as there is no GPU");
    response->add_samplers("euler");
    return grpc::Status::OK;
  }
  grpc::Status ListSessions(grpc::ServerContext*, const v1::ListSessionsRequest*,
                            v1::ListSessionsResponse* response) override {
    auto* session = response->add_sessions();
    session->set_session("abc");
    session->set_state(v1::SessionInfo::STATE_BUSY);
    auto* job = session->add_jobs();
    job->set_job_id("job-1");
    job->set_phase(v1::JobInfo::PHASE_DENOISING);
    job->set_step(3);
    job->set_steps(12);
    return grpc::Status::OK;
  }
  grpc::Status CancelJob(grpc::ServerContext*, const v1::CancelJobRequest* request,
                         v1::CancelJobResponse*) override {
    if (request->session() == "abc") return grpc::Status::OK;
    return ToGrpcStatus(MakeError(absl::StatusCode::kNotFound, "SESSION_NOT_FOUND", "no such session"));
  }
};

class FakeHealth : public grpc::health::v1::Health::Service {
 public:
  grpc::Status Check(grpc::ServerContext*, const grpc::health::v1::HealthCheckRequest* request,
                     grpc::health::v1::HealthCheckResponse* response) override {
    response->set_status(request->service().empty() ? grpc::health::v1::HealthCheckResponse::SERVING
                                                    : grpc::health::v1::HealthCheckResponse::NOT_SERVING);
    return grpc::Status::OK;
  }
};

}  // namespace latentd

#endif  // LATENTD_SERVER_CTL_LATENTCTL_FAKES_H_
