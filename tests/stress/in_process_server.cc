#include "tests/stress/in_process_server.h"

#include <cstdlib>
#include <deque>
#include <filesystem>
#include <map>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gtest/gtest.h"
#include "server/logging.h"

namespace latentd {
namespace {

constexpr char kDemo[] = "deploy/demo";  // tests run in the repository's root

}  // namespace

v1::GenerateParams SmallJob(const std::string& prompt, uint64_t seed) {
  v1::GenerateParams params;
  params.set_prompt(prompt);
  params.set_seed(seed);
  params.set_width(64);
  params.set_height(64);
  params.set_steps(2);
  return params;
}

v1::LoraRef Lora(const std::string& name, double weight) {
  v1::LoraRef ref;
  ref.set_name(name);
  ref.set_weight(weight);
  return ref;
}

// Collects what a session tells.
class InProcessServer::Session::Client : public SessionClient {
 public:
  void OnOpened(const std::string&, const OpenModel&, const std::vector<PatchReport>&) override {
    MutexLock lock(&mu_);
    answered_ = true;
    changed_.SignalAll();
  }
  void OnLorasSet(const std::string&, const std::vector<PatchReport>&) override {
    MutexLock lock(&mu_);
    answered_ = true;
    changed_.SignalAll();
  }
  void OnError(const std::string&, const std::string& job_id, const absl::Status& status) override {
    MutexLock lock(&mu_);
    if (job_id.empty()) {
      answer_ = status;
      answered_ = true;
    } else {
      Finish(job_id, status);
    }
    changed_.SignalAll();
  }
  void OnJobEvent(const std::string&, const std::string& job_id, v1::JobEvent event,
                  Reservation memory) override {
    if (watch) watch(event);
    MutexLock lock(&mu_);
    if (!reads_) {
      unread_bytes_ += static_cast<int64_t>(event.ByteSizeLong());
      unread_.push_back(std::move(memory));
    }
    Outcome& outcome = running_[job_id];
    if (event.has_image_header()) outcome.sha256.push_back(event.image_header().sha256());
    if (event.has_adapted()) outcome.adapted.push_back(event.adapted());
    if (event.has_step()) {
      ++outcome.steps;
      ++steps_;
      changed_.SignalAll();
    }
    if (event.has_done()) {
      outcome.done = event.done();
      Finish(job_id, absl::OkStatus());
    }
  }
  void OnJobFailed(const std::string&, const std::string& job_id, const absl::Status& status) override {
    MutexLock lock(&mu_);
    Finish(job_id, status);
  }
  void OnJobCancelled(const std::string&, const std::string& job_id) override {
    MutexLock lock(&mu_);
    Finish(job_id, absl::CancelledError());
  }
  void OnEnded(EndReason, const absl::Status& status) override {
    MutexLock lock(&mu_);
    ended_ = true;
    end_status_ = status;
    changed_.SignalAll();
  }

  int64_t UnreadBytes() const override {
    MutexLock lock(&mu_);
    return unread_bytes_;
  }
  void WhenRead(int64_t bytes, std::function<void()> then) override {
    {
      MutexLock lock(&mu_);
      if (unread_bytes_ > bytes) {
        waiting_.push_back(std::move(then));
        return;
      }
    }
    then();
  }
  void SetReading(bool reads) {
    std::vector<Reservation> taken;
    std::vector<std::function<void()>> waiting;
    {
      MutexLock lock(&mu_);
      reads_ = reads;
      if (!reads) return;
      unread_bytes_ = 0;
      taken.swap(unread_);
      waiting.swap(waiting_);
    }
    taken.clear();
    for (const auto& then : waiting) then();
  }
  std::function<void(const v1::JobEvent&)> watch;

  // The answer to `open` or `set_loras`; the session's end when that comes first.
  absl::Status WaitForAnswer() {
    MutexLock lock(&mu_);
    while (!answered_ && !ended_) changed_.Wait(&mu_);
    const absl::Status status = answered_ ? answer_ : end_status_;
    answered_ = false;
    answer_ = absl::OkStatus();
    return status;
  }
  Outcome WaitForJob() {
    MutexLock lock(&mu_);
    while (finished_.empty() && !ended_) changed_.Wait(&mu_);
    if (finished_.empty()) {
      Outcome outcome;
      outcome.status = end_status_.ok() ? absl::CancelledError("the session ended") : end_status_;
      return outcome;
    }
    Outcome outcome = std::move(finished_.front());
    finished_.pop_front();
    return outcome;
  }
  void WaitForStep() {
    MutexLock lock(&mu_);
    const int64_t seen = seen_steps_;
    while (steps_ == seen && finished_.empty() && !ended_) changed_.Wait(&mu_);
    seen_steps_ = steps_;
  }
  absl::Status WaitForEnd() {
    MutexLock lock(&mu_);
    while (!ended_) changed_.Wait(&mu_);
    return end_status_;
  }

 private:
  void Finish(const std::string& job_id, absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Outcome outcome = std::move(running_[job_id]);
    running_.erase(job_id);
    outcome.status = std::move(status);
    finished_.push_back(std::move(outcome));
    changed_.SignalAll();
  }

  mutable Mutex mu_;
  CondVar changed_;
  bool reads_ ABSL_GUARDED_BY(mu_) = true;
  int64_t unread_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<Reservation> unread_ ABSL_GUARDED_BY(mu_);
  std::vector<std::function<void()>> waiting_ ABSL_GUARDED_BY(mu_);
  bool answered_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status answer_ ABSL_GUARDED_BY(mu_);
  absl::Status end_status_ ABSL_GUARDED_BY(mu_);
  int64_t steps_ ABSL_GUARDED_BY(mu_) = 0, seen_steps_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, Outcome> running_ ABSL_GUARDED_BY(mu_);
  std::deque<Outcome> finished_ ABSL_GUARDED_BY(mu_);
};

Config InProcessServer::DefaultConfig(std::vector<std::string> devices) {
  Config config;
  config.devices = std::move(devices);
  config.threads_per_device = 1;
  config.model_roots = {absl::StrCat(kDemo, "/models")};
  config.lora_roots = {absl::StrCat(kDemo, "/loras")};
  config.ram_cap = int64_t{1} << 30;
  config.state_dir = "";
  config.memory_wait_timeout = absl::Seconds(20);
  return config;
}

InProcessServer::InProcessServer(const Config& config) {
  SetUpLogging("critical", "text");  // what fails here fails on purpose
  auto core = ServerCore::Create(config);
  EXPECT_TRUE(core.ok()) << core.status();
  core_ = std::move(*core);
}

InProcessServer::~InProcessServer() = default;

SimDevice& InProcessServer::sim(int index) {
  return static_cast<SimDevice&>(*core_->devices[static_cast<size_t>(index)]);
}

InProcessServer::Session InProcessServer::Open(const std::vector<v1::LoraRef>& loras, v1::PatchMode mode,
                                               const std::string& model, int priority) {
  Session session;
  session.client_ = std::make_shared<Session::Client>();
  OpenRequest request;
  request.model = model;
  request.loras = loras;
  request.patch_mode = mode;
  request.priority = priority;
  auto scope = core_->sessions->Open(session.client_, "test", request);
  if (!scope.ok()) {
    session.opened_ = scope.status();
    return session;
  }
  session.scope_ = *scope;
  session.scope_->Start();
  session.opened_ = session.client_->WaitForAnswer();
  return session;
}

absl::Status InProcessServer::Session::SetLoras(const std::vector<v1::LoraRef>& loras, v1::PatchMode mode) {
  scope_->SetLoras("", loras, mode);
  return client_->WaitForAnswer();
}

void InProcessServer::Session::Send(const v1::GenerateParams& params) { scope_->Denoise("", "", params); }

absl::Status InProcessServer::Session::Cancel(int job) {
  return scope_->CancelJob(absl::StrCat("job-", job));
}

void InProcessServer::Session::Watch(std::function<void(const v1::JobEvent&)> what) {
  client_->watch = std::move(what);
}

void InProcessServer::Session::StopReading() { client_->SetReading(false); }

void InProcessServer::Session::Read() { client_->SetReading(true); }

void InProcessServer::Session::WaitForStep() { client_->WaitForStep(); }

Outcome InProcessServer::Session::Wait() { return client_->WaitForJob(); }

Outcome InProcessServer::Session::Denoise(const v1::GenerateParams& params) {
  if (!opened_.ok()) {
    Outcome outcome;
    outcome.status = opened_;
    return outcome;
  }
  Send(params);
  return Wait();
}

absl::Status InProcessServer::Session::End(EndReason reason) {
  if (scope_ == nullptr) return opened_;
  scope_->RequestEnd(reason, absl::OkStatus());
  scope_ = nullptr;
  return client_->WaitForEnd();
}

InProcessServer::Session::~Session() { End().IgnoreError(); }

Outcome InProcessServer::Generate(const v1::GenerateParams& params, const std::vector<v1::LoraRef>& loras,
                                  v1::PatchMode mode, const std::string& model) {
  Session session = Open(loras, mode, model);
  Outcome outcome = session.Denoise(params);
  session.End().IgnoreError();
  return outcome;
}

std::string InProcessServer::WhatIsNotAtRest() const {
  const CacheStats stats = core_->cache->Stats();
  std::string text;
  for (const RecordStats& record : stats.records) {
    if (record.lock_count > 0)
      absl::StrAppend(&text, record.key.ToString(), " is locked by ", record.holders[0], "; ");
    if (record.stale) absl::StrAppend(&text, record.key.ToString(), " is stale; ");
  }
  if (stats.ram.reserved_bytes != 0)
    absl::StrAppend(&text, stats.ram.reserved_bytes, " bytes of ram are promised; ");
  if (stats.unaccounted_bytes() != 0)
    absl::StrAppend(&text, stats.unaccounted_bytes(), " bytes are unaccounted for; ");
  if (stats.leaving_bytes != 0) absl::StrAppend(&text, stats.leaving_bytes, " bytes do not leave; ");
  if (stats.ram.waiting != 0) absl::StrAppend(&text, "somebody waits for ram; ");
  for (const auto& [name, device] : stats.devices) {
    if (device.budget.reserved_bytes != 0) {
      absl::StrAppend(&text, device.budget.reserved_bytes, " bytes of ", name, " are promised; ");
    }
    if (device.budget.in_use_bytes != device.residency_bytes ||
        device.allocated_bytes != device.residency_bytes) {
      absl::StrAppend(&text, name, " has ", device.budget.in_use_bytes, " bytes in use and ",
                      device.allocated_bytes, " allocated, records have ", device.residency_bytes, "; ");
    }
  }
  return text;
}

ModelCopies::ModelCopies(const std::vector<std::string>& names) {
  namespace fs = std::filesystem;
  std::string pattern = (fs::temp_directory_path() / "latentd-models-XXXXXX").string();
  root_ = mkdtemp(pattern.data());
  for (const std::string& name : names) {
    fs::copy(absl::StrCat(kDemo, "/models/", kDemoModel), fs::path(root_) / name,
             fs::copy_options::recursive);
  }
}

ModelCopies::~ModelCopies() {
  std::error_code error;
  std::filesystem::remove_all(root_, error);
}

}  // namespace latentd
