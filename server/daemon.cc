#include "server/daemon.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "server/rpc/cache_service.h"
#include "server/rpc/denoise_service.h"
#include "server/rpc/model_service.h"
#include "server/rpc/server_service.h"
#include "server/session/session_scope.h"
#include "spdlog/spdlog.h"

namespace latentd {
namespace {

constexpr int kStreamWindow = 64 * 1024;

// Bound on what is left after Drain has ended all sessions: replies on their way out.
constexpr auto kShutdownGrace = std::chrono::seconds(2);

const char* const kServiceNames[] = {"latentd.v1.DenoiseService", "latentd.v1.ModelService",
                                     "latentd.v1.CacheService", "latentd.v1.ServerService"};

void SetTransportOptions(grpc::ServerBuilder& builder, const Config& config) {
  builder.SetMaxReceiveMessageSize(static_cast<int>(config.max_message_bytes));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                             static_cast<int>(MaxStreamsPerConnection(config)));
  // Windows that do not grow: what gRPC holds of a request that nobody has asked for yet.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kStreamWindow);
  // A peer that is gone without a word is noticed within 40 seconds; a session may be silent for long.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, 30 * 60'000);
}

}  // namespace

struct Daemon::Services {
  explicit Services(ServerCore* core) : denoise(core), model(core), cache(core), server(core) {}
  DenoiseServiceImpl denoise;
  ModelServiceImpl model;
  CacheServiceImpl cache;
  ServerServiceImpl server;
};

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const Config& config) {
  auto daemon = std::unique_ptr<Daemon>(new Daemon);
  ASSIGN_OR_RETURN(daemon->core_, ServerCore::Create(config));
  ServerCore* core = daemon->core_.get();
  daemon->services_ = std::make_unique<Services>(core);

  grpc::EnableDefaultHealthCheckService(config.health);
  if (config.reflection) grpc::reflection::InitProtoReflectionServerBuilderPlugin();

  grpc::ServerBuilder builder;
  SetTransportOptions(builder, config);
  ASSIGN_OR_RETURN(daemon->listener_,
                   Listener::Bind({.addresses = config.listen,
                                   .max_connections = config.max_connections,
                                   .max_connections_per_peer = MaxConnectionsPerPeer(config),
                                   .http2 = {.max_streams = MaxStreamsPerConnection(config),
                                             .max_message_bytes = config.max_message_bytes,
                                             .request_timeout = config.request_timeout},
                                   .request_memory = core->requests.get()}));
  daemon->listener_->AddTo(builder, grpc::InsecureServerCredentials());
  builder.RegisterService(&daemon->services_->denoise);
  builder.RegisterService(&daemon->services_->model);
  builder.RegisterService(&daemon->services_->cache);
  builder.RegisterService(&daemon->services_->server);
  daemon->server_ = builder.BuildAndStart();
  if (daemon->server_ == nullptr) {
    return MakeError(absl::StatusCode::kInternal, "START_FAILED",
                     "gRPC did not start; its log lines say why");
  }
  if (auto* health = daemon->server_->GetHealthCheckService()) {
    health->SetServingStatus("", true);
    for (const char* name : kServiceNames) health->SetServingStatus(name, true);
  }
  daemon->listener_->Start();
  // What is not served is logged where a person first looks.
  core->workers->Submit([core] {
    core->catalog->UnservedModels();
    core->catalog->UnservedLoras();
    core->catalog->UnservedEmbeddings();
  });
  return daemon;
}

void Daemon::Drain() {
  if (drained_) return;
  drained_ = true;
  core_->draining = true;
  if (auto* health = server_->GetHealthCheckService()) health->Shutdown();
  spdlog::info("draining for at most {}", absl::FormatDuration(core_->config.drain_timeout));
  core_->upload_watch->Drain();
  core_->sessions->Drain(absl::Now() + core_->config.drain_timeout);
  core_->pins->Close();
  listener_->Stop();
  server_->Shutdown(std::chrono::system_clock::now() + kShutdownGrace);
  server_->Wait();
  if (absl::Status status = core_->cache->Shutdown(absl::Now() + absl::Seconds(5)); !status.ok()) {
    spdlog::error("{}", std::string(status.message()));
  }
}

Daemon::~Daemon() {
  if (server_ != nullptr) Drain();
}

}  // namespace latentd
