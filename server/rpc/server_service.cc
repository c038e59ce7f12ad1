#include "server/rpc/server_service.h"

#include <algorithm>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/compute_type.h"
#include "families/sampling/sampler.h"
#include "google/protobuf/util/time_util.h"
#include "server/rpc/denoise_service.h"
#include "server/rpc/unary.h"
#include "server/session/session_scope.h"
#include "server/version.h"

namespace latentd {
namespace {

constexpr int kMaxPageSize = 1000;

}  // namespace

grpc::ServerUnaryReactor* ServerServiceImpl::GetServerInfo(grpc::CallbackServerContext* context,
                                                           const v1::GetServerInfoRequest*,
                                                           v1::GetServerInfoResponse* response) {
  return OnWorker(core_, context, response, [=, this]() -> absl::Status {
    response->set_version(kVersion);
    response->set_instance(core_->instance);
    *response->mutable_start_time() =
        google::protobuf::util::TimeUtil::MillisecondsToTimestamp(absl::ToUnixMillis(core_->start_time));
    for (const auto& executor : core_->executors) {
      const Device& device = executor->device();
      v1::DeviceInfo& out = *response->add_devices();
      out.set_name(device.name());
      out.set_kind(std::string(DeviceKindName(device.kind())));
      out.set_gemm(std::string(GemmName(device)));
      out.set_compute(
          std::string(ComputeTypeName(ComputeTypeFor(core_->config.compute, device, /*leaves_fp16=*/false))));
      out.set_memory_bytes(device.uses_host_memory() ? 0 : device.budget().stats().cap_bytes);
      out.set_threads(executor->threads());
    }
    response->set_device_choice(core_->device_choice);
    for (const Family* family : AllFamilies()) response->add_families(std::string(family->name()));
    for (const SamplerInfo& sampler : AllSamplers()) response->add_samplers(std::string(sampler.name));
    for (const absl::string_view schedule : SigmaScheduleNames())
      response->add_schedules(std::string(schedule));
    response->add_image_formats(v1::IMAGE_FORMAT_PNG);
    response->add_image_formats(v1::IMAGE_FORMAT_JPEG);
    response->add_image_formats(v1::IMAGE_FORMAT_WEBP);
    response->add_image_formats(v1::IMAGE_FORMAT_LATENTS);
    *response->mutable_limits() = LimitsToProto(core_->config);
    response->set_draining(core_->draining);
    response->set_default_model(core_->config.default_model);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ServerServiceImpl::ListSessions(grpc::CallbackServerContext* context,
                                                          const v1::ListSessionsRequest* request,
                                                          v1::ListSessionsResponse* response) {
  return OnWorker(core_, context, response, [=, this]() -> absl::Status {
    if (request->page_size() < 0) return FieldError("page_size", "must not be negative");
    uint64_t after = 0, more = 0;
    if (!request->page_token().empty() && !absl::SimpleAtoi(request->page_token(), &after)) {
      return FieldError("page_token", "is no token of an earlier page");
    }
    const int size = request->page_size() == 0 ? kMaxPageSize : std::min(request->page_size(), kMaxPageSize);
    for (v1::SessionInfo& info : core_->sessions->List(after, static_cast<size_t>(size), &more)) {
      *response->add_sessions() = std::move(info);
    }
    if (more > 0) response->set_next_page_token(absl::StrCat(more));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ServerServiceImpl::CancelJob(grpc::CallbackServerContext* context,
                                                       const v1::CancelJobRequest* request,
                                                       v1::CancelJobResponse* response) {
  return OnWorker(core_, context, response, [=, this]() -> absl::Status {
    return core_->sessions->CancelJob(request->session(), request->job_id());
  });
}

}  // namespace latentd
