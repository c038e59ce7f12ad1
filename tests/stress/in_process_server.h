// The whole server but for gRPC, in the test's own process: where devices can be told to fail, the budget can
// be watched from inside, and a run takes a tenth of a second. It serves the demo model, and copies of it
// under other names.
#ifndef LATENTD_TESTS_STRESS_IN_PROCESS_SERVER_H_
#define LATENTD_TESTS_STRESS_IN_PROCESS_SERVER_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cache/device.h"
#include "latentd/v1/denoise.pb.h"
#include "server/config.h"
#include "server/server_core.h"
#include "server/session/session_scope.h"

namespace latentd {

inline constexpr char kDemoModel[] = "shapes-flux";

// What came of a job.
struct Outcome {
  absl::Status status;              // of the job, or of the session when that failed
  std::vector<std::string> sha256;  // of the pictures
  std::vector<v1::JobEvent::Adapted> adapted;
  v1::JobEvent::Done done;
  int64_t steps = 0;
};

// A picture of 64 × 64 in two steps, unless the test changes it.
v1::GenerateParams SmallJob(const std::string& prompt = "a red circle on blue", uint64_t seed = 7);

v1::LoraRef Lora(const std::string& name, double weight = 1);

class InProcessServer {
 public:
  // A config for `devices`, with the demo's roots and nothing kept on disk.
  static Config DefaultConfig(std::vector<std::string> devices = {"sim:0=64MiB"});

  explicit InProcessServer(const Config& config);
  // Every session must have ended.
  ~InProcessServer();

  ServerCore& core() { return *core_; }
  SimDevice& sim(int index);
  CacheStats stats() const { return core_->cache->Stats(); }

  // Opens a session; `Session` ends it with its own end.
  class Session {
   public:
    Session(Session&&) = default;
    ~Session();
    const absl::Status& opened() const { return opened_; }
    absl::Status SetLoras(const std::vector<v1::LoraRef>& loras,
                          v1::PatchMode mode = v1::PATCH_MODE_UNSPECIFIED);
    Outcome Denoise(const v1::GenerateParams& params);
    // Queues a job without waiting for it; its outcome comes from Wait, in order.
    void Send(const v1::GenerateParams& params);
    Outcome Wait();
    // Cancels a job by its number in the session, from 1. Any thread.
    absl::Status Cancel(int job = 1);
    // From the next job on, `what` is told every event, on the thread that sends it.
    void Watch(std::function<void(const v1::JobEvent&)> what);
    // The client takes nothing from now on; Read takes all that waits, and what comes.
    void StopReading();
    void Read();
    // Until one more step of its jobs is done than when this was called last, or a job is over.
    void WaitForStep();
    // Ends it and waits until everything is released. Its status.
    absl::Status End(EndReason reason = EndReason::kClosed);

   private:
    friend class InProcessServer;
    class Client;
    Session() = default;
    std::shared_ptr<Client> client_;
    std::shared_ptr<SessionScope> scope_;
    absl::Status opened_;
  };
  Session Open(const std::vector<v1::LoraRef>& loras = {}, v1::PatchMode mode = v1::PATCH_MODE_UNSPECIFIED,
               const std::string& model = kDemoModel, int priority = 0);

  // A session with one job.
  Outcome Generate(const v1::GenerateParams& params, const std::vector<v1::LoraRef>& loras = {},
                   v1::PatchMode mode = v1::PATCH_MODE_UNSPECIFIED, const std::string& model = kDemoModel);

  // With no session open: nothing is locked, promised or leaving, every byte belongs to a record, and what
  // devices measure is what their residency says. Otherwise says what is not so; empty: all is well.
  std::string WhatIsNotAtRest() const;

 private:
  std::unique_ptr<ServerCore> core_;
};

// A folder with the demo model under each of `names`, removed with the object.
class ModelCopies {
 public:
  explicit ModelCopies(const std::vector<std::string>& names);
  ~ModelCopies();
  const std::string& root() const { return root_; }

 private:
  std::string root_;
};

}  // namespace latentd

#endif  // LATENTD_TESTS_STRESS_IN_PROCESS_SERVER_H_
