#include <grpcpp/create_channel.h>

#include "latentd/v1/denoise.grpc.pb.h"
#include "tests/bench/bench_model.h"
#include "tests/bench/noop_daemon.h"

namespace latentd::bench {

double NoopStepMicros(const std::string& address, int steps) {
  const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  const auto stub = v1::DenoiseService::NewStub(channel);
  v1::GenerateRequest request;
  request.set_model(kNoopModel);
  request.mutable_params()->set_steps(steps);
  grpc::ClientContext context;
  const auto reader = stub->Generate(&context, request);
  v1::GenerateResponse response;
  Stopwatch since_first;
  double last = 0;
  bool done = false;
  while (reader->Read(&response)) {
    const v1::JobEvent& event = response.event();
    if (event.has_step() && event.step().index() == 1) since_first = Stopwatch();
    if (event.has_step() && event.step().index() == steps) last = since_first.ms();
    done |= event.has_done();
  }
  const grpc::Status status = reader->Finish();
  if (!status.ok() || !done || last == 0) OrDie<int>(absl::InternalError("no run: " + status.error_message()));
  return last * 1000 / (steps - 1);
}

}  // namespace latentd::bench
