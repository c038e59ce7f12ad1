#include <grpcpp/create_channel.h>

#include "latentd/v1/denoise.grpc.pb.h"
#include "tests/bench/bench_model.h"
#include "tests/bench/noop_daemon.h"

namespace latentd::bench {

double RunNoopJob(const std::string& address, int steps) {
  static const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  static const auto stub = v1::DenoiseService::NewStub(channel);
  v1::GenerateRequest request;
  request.set_model(kNoopModel);
  request.mutable_params()->set_steps(steps);
  const Stopwatch watch;
  grpc::ClientContext context;
  const auto reader = stub->Generate(&context, request);
  v1::GenerateResponse response;
  int seen = 0;
  bool done = false;
  while (reader->Read(&response)) {
    if (response.event().has_step()) ++seen;
    done |= response.event().has_done();
  }
  const grpc::Status status = reader->Finish();
  const double ms = watch.ms();
  if (!status.ok() || !done || seen != steps) {
    OrDie<int>(absl::InternalError("the run failed or lost events: " + status.error_message()));
  }
  return ms;
}

}  // namespace latentd::bench
