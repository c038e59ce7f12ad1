// Invariant, under mu_: at most one request is in progress (busy_), and only it touches model_ and loras_.
// Whoever makes busy_ false calls Pump, which starts the next request or, when the end was asked for, the
// end. Calls to the client are made without mu_.
#include "server/session/session_scope.h"

#include <malloc.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache/base/error.h"
#include "google/protobuf/util/time_util.h"
#include "server/catalog/embedding_set.h"
#include "server/catalog/lora_set.h"
#include "server/rpc/params.h"
#include "server/rpc/request_bounds.h"
#include "server/runtime/tensor_guard.h"
#include "spdlog/spdlog.h"

namespace latentd {
namespace {

constexpr absl::Duration kLookAtFilesEvery = absl::Seconds(1);
constexpr absl::string_view kClientStalled = "CLIENT_STALLED";
// How much longer than a request an answer may take to be read.
constexpr int kAnswerPatience = 3;
// Requests after which memory is given back to the system, and how often at most.
constexpr int64_t kTrimBytes = 32 << 20;
constexpr absl::Duration kTrimInterval = absl::Seconds(2);
constexpr absl::Duration kIdle = absl::Seconds(5);  // without a session

absl::Status JobNotFound(const std::string& job_id) {
  return MakeError(absl::StatusCode::kNotFound, "JOB_NOT_FOUND",
                   absl::StrCat("no job '", job_id.substr(0, 128), "' is queued or running in this session"),
                   {{"resource_type", "job"}, {"resource_name", job_id.substr(0, 128)}, {"field", "job_id"}});
}

absl::Status Cancelled() { return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "cancelled"); }

std::vector<PatchReport> Reports(const std::vector<HeldLora>& loras) {
  std::vector<PatchReport> reports;
  for (const HeldLora& lora : loras) reports.push_back(lora.report);
  return reports;
}

google::protobuf::Duration ToProto(absl::Duration d) {
  return google::protobuf::util::TimeUtil::MillisecondsToDuration(absl::ToInt64Milliseconds(d));
}

}  // namespace

SessionScope::SessionScope(ServerCore* core, std::shared_ptr<SessionClient> client, std::string peer,
                           OpenRequest request)
    : core_(core),
      id_(RandomId()),
      peer_(std::move(peer)),
      open_(std::move(request)),
      client_(std::move(client)) {}

SessionScope::~SessionScope() = default;

void SessionScope::Start() {
  Request open;
  open.kind = Request::Kind::kOpen;
  open.request_id = open_.request_id;
  open.loras = std::move(open_.loras);
  open.patch_mode = open_.patch_mode;
  open.created = created_;
  auto charge = ChargeRefs(open.loras);
  if (!charge.ok()) return RequestEnd(EndReason::kFailed, charge.status());
  open.refs = *std::move(charge);
  {
    MutexLock lock(&mu_);
    queue_.push_back(std::move(open));
  }
  Pump();
}

absl::Status SessionScope::Admit(const std::string& job_id) {
  RETURN_IF_ERROR(core_->CheckAccepting());
  if (job_id.size() > 128) return FieldError("job_id", "at most 128 bytes");
  auto same_id = [&](const Request& r) { return r.job_id == job_id; };
  if (std::any_of(queue_.begin(), queue_.end(), same_id) || (job_ != nullptr && same_id(current_))) {
    return FieldError("job_id", absl::StrCat("job '", job_id, "' is already queued or running"));
  }
  const auto queued = std::count_if(queue_.begin(), queue_.end(),
                                    [](const Request& r) { return r.kind == Request::Kind::kDenoise; });
  if (queued >= core_->config.max_queued_jobs_per_session) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
        absl::StrCat("this session has ", queued, " jobs waiting, which is the limit; wait for one"),
        {{"limit", absl::StrCat(core_->config.max_queued_jobs_per_session)}, {"retry_ms", "1000"}});
  }
  if (core_->queued_jobs.fetch_add(1) >= core_->config.max_queued_jobs) {
    --core_->queued_jobs;
    return MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                     absl::StrCat("the server has ", core_->config.max_queued_jobs,
                                  " jobs, which is the limit; try again later"),
                     {{"limit", absl::StrCat(core_->config.max_queued_jobs)}, {"retry_ms", "2000"}});
  }
  return absl::OkStatus();
}

void SessionScope::Denoise(std::string request_id, std::string job_id, v1::GenerateParams params) {
  absl::Status admitted;
  Reservation memory;
  if (const int64_t bytes = PictureFileBytes(params) + RequestBytes(params); bytes > 0) {
    auto promised = core_->ram->TryReserve(
        {.bytes = bytes, .use = MemoryUse::kImages, .owner = id_, .what = "a request"});
    admitted = promised.status();
    if (promised.ok()) memory = std::move(*promised);
  }
  int position = 0;
  {
    MutexLock lock(&mu_);
    if (ending_ || ended_) return;
    last_active_ = absl::Now();
    if (job_id.empty()) job_id = absl::StrCat("job-", next_job_++);
    if (admitted.ok()) admitted = Admit(job_id);
    if (admitted.ok()) {
      position = static_cast<int>(core_->queued_jobs.load()) - 1;
      Request request;
      request.kind = Request::Kind::kDenoise;
      request.request_id = request_id;
      request.job_id = job_id;
      request.params = std::move(params);
      request.memory = std::move(memory);
      request.created = absl::Now();
      request.announced = false;
      queue_.push_back(std::move(request));
    }
  }
  if (!admitted.ok()) {
    client_->OnError(request_id, job_id, admitted);
    return;
  }
  v1::JobEvent event;
  event.mutable_queued()->set_position(position);
  event.mutable_queued()->set_priority(open_.priority);
  client_->OnJobEvent(request_id, job_id, std::move(event), {});
  {
    MutexLock lock(&mu_);
    auto it =
        std::find_if(queue_.begin(), queue_.end(), [&](const Request& r) { return r.job_id == job_id; });
    if (it != queue_.end()) it->announced = true;
  }
  Pump();
}

void SessionScope::SetLoras(std::string request_id, std::vector<v1::LoraRef> loras, v1::PatchMode mode) {
  auto charge = ChargeRefs(loras);
  if (!charge.ok()) return client_->OnError(request_id, "", charge.status());
  // Jobs are bounded, and a set is followed by a job: well-behaved clients never come near this.
  const auto limit = static_cast<size_t>(core_->config.max_queued_jobs_per_session) * 2;
  bool full = false;
  {
    MutexLock lock(&mu_);
    if (ending_ || ended_) return;
    last_active_ = absl::Now();
    full = queue_.size() >= limit;
    if (!full) {
      Request request;
      request.kind = Request::Kind::kSetLoras;
      request.request_id = request_id;
      request.loras = std::move(loras);
      request.refs = *std::move(charge);
      request.patch_mode = mode;
      request.created = absl::Now();
      queue_.push_back(std::move(request));
    }
  }
  if (full) {
    client_->OnError(request_id, "",
                     MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                               "this session has too many requests waiting",
                               {{"limit", absl::StrCat(limit)}, {"retry_ms", "1000"}}));
    return;
  }
  Pump();
}

absl::StatusOr<RequestMemory::Charge> SessionScope::ChargeRefs(const std::vector<v1::LoraRef>& refs) const {
  const int64_t bytes = 2 * RequestBytes(refs);  // as they came, and as they are used
  if (bytes == 0) return RequestMemory::Charge();
  auto charge = core_->requests->Take(bytes, id_, "LoRA references");
  if (charge) return *std::move(charge);
  return MakeError(
      absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
      absl::StrCat("no room for ", bytes, " bytes of LoRA references beside those of other requests"),
      {{"bytes", absl::StrCat(bytes)}, {"retry_ms", "2000"}});
}

absl::Status SessionScope::CancelJob(const std::string& job_id) {
  std::string request_id;
  {
    MutexLock lock(&mu_);
    last_active_ = absl::Now();
    if (job_ != nullptr && current_.job_id == job_id) {
      job_->Cancel(Cancelled());
      return absl::OkStatus();
    }
    auto it = std::find_if(queue_.begin(), queue_.end(), [&](const Request& r) {
      return r.kind == Request::Kind::kDenoise && r.job_id == job_id;
    });
    if (job_id.empty() || it == queue_.end()) return JobNotFound(job_id);
    request_id = it->request_id;
    queue_.erase(it);
    --core_->queued_jobs;
  }
  client_->OnJobCancelled(request_id, job_id);
  return absl::OkStatus();
}

void SessionScope::RequestEnd(EndReason reason, absl::Status status) {
  std::deque<Request> dropped;
  {
    MutexLock lock(&mu_);
    if (ending_ || ended_) return;
    ending_ = true;
    end_reason_ = reason;
    end_status_ = std::move(status);
    dropped.swap(queue_);
    if (job_ != nullptr) job_->Cancel(Cancelled());
  }
  stop_.request_stop();
  core_->cache->WillEnd(id_);
  for (const Request& request : dropped) {
    if (request.kind != Request::Kind::kDenoise) continue;
    --core_->queued_jobs;
    client_->OnJobCancelled(request.request_id, request.job_id);
  }
  Pump();
}

void SessionScope::EndWhenDone() {
  {
    MutexLock lock(&mu_);
    end_when_done_ = true;
  }
  core_->cache->WillEnd(id_);
  Pump();
}

void SessionScope::Pump() {
  MutexLock lock(&mu_);
  if (busy_ || ended_) return;
  if (!ending_ && queue_.empty() && end_when_done_) {
    ending_ = true;
    end_reason_ = EndReason::kHalfClosed;
  }
  if (ending_) {
    ended_ = true;
    busy_ = true;
    core_->workers->Submit([self = shared_from_this()] { self->End(); });
    return;
  }
  if (queue_.empty() || !queue_.front().announced) return;
  current_ = std::move(queue_.front());
  queue_.pop_front();
  busy_ = true;
  if (current_.kind == Request::Kind::kDenoise) {
    job_ = MakeJob(current_);  // here, so that at no moment the job is neither queued nor running
    job_->Start();
    return;
  }
  core_->workers->Submit(
      [self = shared_from_this(), request = std::make_shared<Request>(std::move(current_))] {
        request->kind == Request::Kind::kOpen ? self->RunOpen(*request) : self->RunSetLoras(*request);
      });
}

void SessionScope::RequestDone() {
  {
    MutexLock lock(&mu_);
    busy_ = false;
    job_ = nullptr;
    last_active_ = absl::Now();
  }
  Pump();
}

absl::StatusOr<std::vector<HeldLora>> SessionScope::LockLoras(const std::vector<v1::LoraRef>& refs,
                                                              const OpenModel& model) {
  ASSIGN_OR_RETURN(std::vector<LoraChoice> choices, ResolveLoras(refs, *core_->catalog));
  std::vector<HeldLora> held;
  std::vector<LockRequest> requests;
  for (LoraChoice& choice : choices) {
    requests.push_back(std::move(choice.request));
    held.emplace_back();
    static_cast<LoraUse&>(held.back()) = choice;
  }
  // They are kept for as long as the client wants, so nobody waits for them, until it is known that the
  // session comes to its end by itself.
  ASSIGN_OR_RETURN(
      std::vector<LockHandle> handles,
      core_->cache->LockAll(requests, {.owner = id_,
                                       .deadline = absl::Now() + core_->config.memory_wait_timeout,
                                       .stop = stop_.get_token(),
                                       .lasting = !EndsByItself()}));
  if (EndsByItself()) core_->cache->WillEnd(id_);  // since just now, perhaps
  for (size_t i = 0; i < held.size(); ++i) {
    held[i].handle = std::move(handles[i]);
    ASSIGN_OR_RETURN(held[i].report,
                     LayerPatcher::Match(held[i].handle.As<ModelPatch>(), held[i].name, held[i].weight,
                                         model.patch_targets, held[i].blocks, held[i].only));
    NoteUnusedEmbeddings(*model.pipeline, held[i].handle.As<ModelPatch>(), held[i].report);
    if (held[i].report.unmatched_count > 0) {
      spdlog::warn("lora {} session={}: {} of {} layers match nothing", held[i].name, id_,
                   held[i].report.unmatched_count, held[i].report.layers_in_file);
    }
  }
  return held;
}

void SessionScope::RunOpen(Request& request) {
  absl::Status status = GuardTensorCode("open", [&]() -> absl::Status {
    ASSIGN_OR_RETURN(patch_mode_, PatchModeFromProto(request.patch_mode, core_->config));
    std::string name = open_.model.empty() ? core_->config.default_model : open_.model;
    if (name.empty()) return FieldError("model", "no model was named, and this server has no default");
    ASSIGN_OR_RETURN(model_, core_->catalog->Model(name));
    ASSIGN_OR_RETURN(loras_, LockLoras(request.loras, *model_));
    return absl::OkStatus();
  });
  if (status.ok()) {
    {
      MutexLock lock(&mu_);
      opened_ = true;
      lora_refs_ = ShownRefs(request.loras);
      refs_charge_ = std::move(request.refs);
    }
    spdlog::info("session open session={} model={} loras={}", id_, model_->name, loras_.size());
    client_->OnOpened(request.request_id, *model_, Reports(loras_));
  } else {
    RequestEnd(EndReason::kFailed, status);
  }
  RequestDone();
}

void SessionScope::RunSetLoras(Request& request) {
  std::vector<HeldLora> fresh;
  PatchMode mode = patch_mode_;
  absl::Status status = GuardTensorCode("set_loras", [&]() -> absl::Status {
    if (request.patch_mode != v1::PATCH_MODE_UNSPECIFIED) {
      ASSIGN_OR_RETURN(mode, PatchModeFromProto(request.patch_mode, core_->config));
    }
    RETURN_IF_ERROR(model_->Check());
    ASSIGN_OR_RETURN(fresh, LockLoras(request.loras, *model_));
    return absl::OkStatus();
  });
  if (status.ok()) {
    loras_.swap(fresh);
    fresh.clear();  // the old set goes before the client hears of the new one
    patch_mode_ = mode;
    {
      MutexLock lock(&mu_);
      lora_refs_ = ShownRefs(request.loras);
      refs_charge_ = std::move(request.refs);
    }
    client_->OnLorasSet(request.request_id, Reports(loras_));
  } else if (!stop_.stop_requested()) {
    client_->OnError(request.request_id, "", status);
  }
  RequestDone();
}

std::shared_ptr<Job> SessionScope::MakeJob(Request& request) {
  JobSetup setup;
  setup.job_id = request.job_id;
  setup.owner = id_;
  setup.model = model_;
  setup.request = std::move(request.params);
  setup.request_memory = std::move(request.memory);
  setup.loras = &loras_;
  setup.patch_mode = patch_mode_;
  setup.priority = open_.priority;
  setup.created = request.created;
  setup.on_event = [self = shared_from_this(), request_id = request.request_id, job_id = request.job_id](
                       v1::JobEvent event, Reservation memory) {
    self->client_->OnJobEvent(request_id, job_id, std::move(event), std::move(memory));
  };
  setup.unread_bytes = [client = client_] { return client->UnreadBytes(); };
  setup.when_read = [client = client_](int64_t bytes, std::function<void()> then) {
    client->WhenRead(bytes, std::move(then));
  };
  setup.on_end = [self = shared_from_this(), request_id = request.request_id,
                  job_id = request.job_id](absl::Status status) {
    --self->core_->queued_jobs;
    if (absl::IsCancelled(status)) {
      self->client_->OnJobCancelled(request_id, job_id);
    } else if (!status.ok()) {
      self->client_->OnJobFailed(request_id, job_id, status);
    }
    self->RequestDone();
  };
  return std::make_shared<Job>(core_, std::move(setup));
}

void SessionScope::End() {
  loras_.clear();
  EndReason reason;
  absl::Status status;
  {
    MutexLock lock(&mu_);
    refs_charge_.Release();
    reason = end_reason_;
    status = end_status_;
  }
  spdlog::info("session end session={} reason={}", id_,
               status.ok() ? "ok" : (ErrorReason(status).empty() ? "error" : ErrorReason(status)));
  // Who does not read gets the reason behind the message that is on its way, and nothing else.
  if (ErrorReason(status) == kClientStalled) client_->DropUnread();
  core_->sessions->Remove(id_, client_);
  client_->OnEnded(reason, status);
}

void SessionScope::Tick(absl::Time now) {
  EndReason reason = EndReason::kFailed;
  absl::Status end;
  std::vector<Request> late;
  {
    MutexLock lock(&mu_);
    if (ending_ || ended_) return;
    const absl::Time started_before = now - core_->config.job_timeout;
    auto too_late = MakeError(
        absl::StatusCode::kDeadlineExceeded, "JOB_TIMEOUT",
        absl::StrCat("the job was not done within ", absl::FormatDuration(core_->config.job_timeout)));
    if (job_ != nullptr && current_.created < started_before) job_->Cancel(too_late);
    for (auto it = queue_.begin(); it != queue_.end();) {
      if (it->kind == Request::Kind::kDenoise && it->created < started_before) {
        late.push_back(std::move(*it));
        it = queue_.erase(it);
        --core_->queued_jobs;
      } else {
        ++it;
      }
    }
    if (client_->TooSlow(core_->config.reader_timeout, core_->config.min_read_rate)) {
      end =
          MakeError(absl::StatusCode::kDeadlineExceeded, kClientStalled,
                    absl::StrCat("the client read nothing, or less than ", core_->config.min_read_rate,
                                 " bytes a second, for ", absl::FormatDuration(core_->config.reader_timeout)),
                    {{"min_read_rate", absl::StrCat(core_->config.min_read_rate)}});
    } else if (now - created_ > core_->config.session_max_age) {
      end =
          MakeError(absl::StatusCode::kDeadlineExceeded, "SESSION_TOO_OLD",
                    absl::StrCat("sessions end after ", absl::FormatDuration(core_->config.session_max_age)));
    } else if (!busy_ && queue_.empty() && now - last_active_ > open_.idle_timeout) {
      end = MakeError(absl::StatusCode::kDeadlineExceeded, "SESSION_IDLE",
                      absl::StrCat("no request for ", absl::FormatDuration(open_.idle_timeout)));
    }
  }
  for (const Request& request : late) {
    client_->OnJobFailed(
        request.request_id, request.job_id,
        MakeError(absl::StatusCode::kDeadlineExceeded, "JOB_TIMEOUT", "the job waited too long"));
  }
  if (!end.ok()) RequestEnd(reason, end);
}

bool SessionScope::EndsByItself() const {
  MutexLock lock(&mu_);
  return ending_ || end_when_done_;
}

bool SessionScope::idle() const {
  MutexLock lock(&mu_);
  return !busy_ && queue_.empty();
}

v1::SessionInfo SessionScope::Info() const {
  const absl::Time now = absl::Now();
  MutexLock lock(&mu_);
  v1::SessionInfo info;
  info.set_session(id_);
  info.set_peer(peer_);
  info.set_model(open_.model.empty() ? core_->config.default_model : open_.model);
  for (const v1::LoraRef& ref : lora_refs_) *info.add_loras() = ref;
  info.set_priority(open_.priority);
  *info.mutable_age() = ToProto(now - created_);
  auto add_job = [&](const Request& request, const Job* job) {
    v1::JobInfo& out = *info.add_jobs();
    out.set_job_id(request.job_id);
    out.set_phase(job == nullptr ? v1::JobInfo::PHASE_QUEUED : job->phase());
    if (job != nullptr) {
      out.set_step(job->step());
      out.set_steps(job->steps());
      out.set_device(job->device());
    }
    *out.mutable_age() = ToProto(now - request.created);
  };
  if (job_ != nullptr) add_job(current_, job_.get());
  for (const Request& request : queue_) {
    if (request.kind == Request::Kind::kDenoise) add_job(request, nullptr);
  }
  info.set_state(ending_ || ended_ ? v1::SessionInfo::STATE_CLOSING
                 : !opened_        ? v1::SessionInfo::STATE_OPENING
                 : busy_           ? v1::SessionInfo::STATE_BUSY
                                   : v1::SessionInfo::STATE_IDLE);
  return info;
}

// ------------------------------------------------------------------------------------------------ registry

SessionRegistry::SessionRegistry(ServerCore* core) : core_(core), watcher_([this] { Watch(); }) {}

SessionRegistry::~SessionRegistry() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.SignalAll();
  }
  watcher_.join();
}

absl::StatusOr<std::shared_ptr<SessionScope>> SessionRegistry::Open(std::shared_ptr<SessionClient> client,
                                                                    std::string peer, OpenRequest request) {
  RETURN_IF_ERROR(core_->CheckAccepting());
  const absl::Duration limit = core_->config.session_idle_timeout;
  if (request.idle_timeout <= absl::ZeroDuration() || request.idle_timeout > limit)
    request.idle_timeout = limit;
  const auto highest = static_cast<int>(core_->config.max_priority);
  request.priority = std::clamp(request.priority, -highest, highest);
  auto scope = std::make_shared<SessionScope>(core_, std::move(client), std::move(peer), std::move(request));
  {
    MutexLock lock(&mu_);
    if (static_cast<int64_t>(sessions_.size()) >= core_->config.max_sessions) {
      return MakeError(
          absl::StatusCode::kResourceExhausted, "TOO_MANY_SESSIONS",
          absl::StrCat("the server has ", sessions_.size(), " sessions, which is the limit; try again later"),
          {{"limit", absl::StrCat(core_->config.max_sessions)}, {"retry_ms", "2000"}});
    }
    sessions_[scope->id()] = {next_++, scope};
  }
  return scope;
}

absl::Status SessionRegistry::CancelJob(const std::string& session, const std::string& job_id) {
  std::shared_ptr<SessionScope> scope;
  {
    MutexLock lock(&mu_);
    auto it = sessions_.find(session);
    if (it != sessions_.end()) scope = it->second.second;
  }
  if (scope == nullptr) {
    return MakeError(
        absl::StatusCode::kNotFound, "SESSION_NOT_FOUND",
        absl::StrCat("no session '", session.substr(0, 64), "' is open"),
        {{"resource_type", "session"}, {"resource_name", session.substr(0, 64)}, {"field", "session"}});
  }
  return scope->CancelJob(job_id);
}

std::vector<std::shared_ptr<SessionScope>> SessionRegistry::All() const {
  MutexLock lock(&mu_);
  std::map<uint64_t, std::shared_ptr<SessionScope>> by_age;
  for (const auto& [id, entry] : sessions_) by_age[entry.first] = entry.second;
  std::vector<std::shared_ptr<SessionScope>> out;
  for (auto& [age, scope] : by_age) out.push_back(scope);
  return out;
}

std::vector<v1::SessionInfo> SessionRegistry::List(uint64_t after, size_t limit, uint64_t* more) const {
  std::map<uint64_t, std::shared_ptr<SessionScope>> by_age;
  {
    MutexLock lock(&mu_);
    for (const auto& [id, entry] : sessions_) {
      if (entry.first > after) by_age[entry.first] = entry.second;
    }
  }
  *more = 0;
  std::vector<v1::SessionInfo> out;
  uint64_t last = 0;
  for (const auto& [number, scope] : by_age) {
    if (out.size() == limit) {
      *more = last;
      break;
    }
    out.push_back(scope->Info());
    last = number;
  }
  return out;
}

void SessionRegistry::Remove(const std::string& id, std::shared_ptr<SessionClient> client) {
  std::shared_ptr<SessionScope> scope;
  MutexLock lock(&mu_);
  leaving_.push_back(std::move(client));
  auto it = sessions_.find(id);
  if (it == sessions_.end()) return;
  scope = it->second.second;
  sessions_.erase(it);
  changed_.SignalAll();
}

void SessionRegistry::Drain(absl::Time deadline) {
  const absl::Status draining =
      MakeError(absl::StatusCode::kUnavailable, "SERVER_DRAINING",
                "the server is going down; connect again later", {{"retry_ms", "5000"}});
  auto count = [&] {
    MutexLock lock(&mu_);
    return sessions_.size();
  };
  while (count() > 0) {
    const bool late = absl::Now() >= deadline;
    for (const auto& scope : All()) {
      if (late || scope->idle()) scope->RequestEnd(EndReason::kFailed, draining);
    }
    MutexLock lock(&mu_);
    if (!sessions_.empty()) changed_.WaitWithTimeout(&mu_, absl::Milliseconds(50));
  }
}

void SessionRegistry::WatchLeaving() {
  std::vector<std::shared_ptr<SessionClient>> clients;
  {
    MutexLock lock(&mu_);
    clients.swap(leaving_);
  }
  std::erase_if(clients, [](const auto& client) { return client->Gone(); });
  for (const auto& client : clients) {
    if (client->TooSlow(core_->config.reader_timeout, core_->config.min_read_rate)) client->BreakOff();
  }
  MutexLock lock(&mu_);
  leaving_.insert(leaving_.end(), clients.begin(), clients.end());
}

// What requests, and gRPC's calls, took stays in the C library's free lists, in many places, and would stay
// for good.
void SessionRegistry::GiveBackMemory(absl::Time now) {
  {
    MutexLock lock(&mu_);
    if (!sessions_.empty()) busy_until_ = now;
  }
  if (now - trimmed_ < kTrimInterval) return;
  const int64_t taken = core_->requests->taken_ever();
  // While jobs run, fresh memory would cost them time.
  const bool idle = now - busy_until_ > kIdle && static_cast<int64_t>(mallinfo2().fordblks) >= kTrimBytes;
  if (taken - trimmed_at_ < kTrimBytes && !idle) return;
  malloc_trim(0);
  trimmed_at_ = taken;
  trimmed_ = now + (idle ? kIdle : absl::ZeroDuration());
}

void SessionRegistry::Watch() {
  absl::Time looked = absl::InfinitePast();
  MutexLock lock(&mu_);
  while (!stopping_) {
    changed_.WaitWithTimeout(&mu_, absl::Milliseconds(250));
    if (stopping_) return;
    mu_.Unlock();
    const absl::Time now = absl::Now();
    for (const auto& scope : All()) scope->Tick(now);
    WatchLeaving();
    core_->answers.Tick(now, core_->config.request_timeout * kAnswerPatience);
    GiveBackMemory(now);
    core_->cache->EvictUnusedSince(now - core_->config.keep_alive);
    if (now - looked > kLookAtFilesEvery) {
      looked = now;
      core_->LookAtFilesOnWorker();
    }
    mu_.Lock();
  }
}

}  // namespace latentd
