// Life of a stream: the reactor belongs to gRPC and deletes itself in OnDone; the StreamWriter and the
// session's client object are shared with the scope and may outlive it. On cancel the stream is finished at
// once (gRPC 1.51 does not shut down otherwise) and the scope ends behind it.
#include "server/rpc/denoise_service.h"

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "cache/base/utf8.h"
#include "google/protobuf/util/time_util.h"
#include "server/rpc/grpc_errors.h"
#include "server/rpc/params.h"
#include "server/rpc/peer.h"
#include "server/rpc/request_bounds.h"
#include "server/rpc/unary.h"
#include "server/runtime/planner.h"
#include "server/session/session_scope.h"
#include "server/session/stream_writer.h"

namespace latentd {
namespace {

using google::protobuf::util::TimeUtil;

constexpr size_t kMaxRequestId = 128;
constexpr absl::string_view kClientGone = "CLIENT_GONE";

google::protobuf::Duration ToProto(absl::Duration d) {
  return TimeUtil::MillisecondsToDuration(absl::ToInt64Milliseconds(d));
}

std::vector<v1::LoraRef> Loras(const google::protobuf::RepeatedPtrField<v1::LoraRef>& refs) {
  return {refs.begin(), refs.end()};
}

absl::Status ClientGone() {
  return MakeError(absl::StatusCode::kCancelled, kClientGone, "the client cancelled or is gone");
}

// What of the stream's state a scope asks for, and does to it, whatever the messages are.
template <typename Writer>
class StreamClient : public SessionClient {
 public:
  explicit StreamClient(std::shared_ptr<Writer> writer) : writer_(std::move(writer)) {}

  int64_t UnreadBytes() const override { return writer_->unread_bytes(); }
  void WhenRead(int64_t bytes, std::function<void()> then) override {
    writer_->WhenRead(bytes, std::move(then));
  }
  bool TooSlow(absl::Duration window, int64_t bytes_per_second) override {
    return writer_->too_slow({window, bytes_per_second});
  }
  void DropUnread() override { writer_->DropUnsent(); }
  void BreakOff() override { writer_->BreakOff(); }
  bool Gone() const override { return writer_->done(); }

 protected:
  // Of one picture's previews, the newest will do.
  static typename Writer::Options OptionsFor(const std::string& job_id, const v1::JobEvent& event,
                                             Reservation memory) {
    std::string replaces;
    if (event.has_preview()) replaces = absl::StrCat(event.preview().index(), "/", job_id);
    return {std::move(replaces), std::move(memory)};
  }

  const std::shared_ptr<Writer> writer_;
};

// What both reactors do: they own a writer and a scope, and cancelling ends both.
template <typename Reactor, typename Base, typename Message>
class ScopeReactor : public Base {
 public:
  using Writer = StreamWriter<Reactor, Message>;

  void OnWriteDone(bool ok) override { writer_->OnWriteDone(ok); }

  void OnCancel() override {
    writer_->OnCancel();
    MutexLock lock(&mu_);
    if (scope_ != nullptr) scope_->RequestEnd(EndReason::kCancelled, ClientGone());
  }

  void OnDone() override {
    writer_->OnDone();
    delete static_cast<Reactor*>(this);
  }

 protected:
  explicit ScopeReactor(grpc::CallbackServerContext* context)
      : writer_(std::make_shared<Writer>(static_cast<Reactor*>(this), [context] { context->TryCancel(); })) {}
  ~ScopeReactor() override = default;

  // Takes the scope and starts it, then does `more` with it. The call may have been cancelled while there was
  // no scope to be told.
  template <typename More>
  void Begin(std::shared_ptr<SessionScope> scope, More more) {
    MutexLock lock(&mu_);
    scope_ = std::move(scope);
    scope_->Start();
    more(*scope_);
    if (writer_->cancelled()) scope_->RequestEnd(EndReason::kCancelled, ClientGone());
  }

  const std::shared_ptr<Writer> writer_;
  Mutex mu_;
  std::shared_ptr<SessionScope> scope_;  // set once, under mu_; the thread that set it looks without
};

// ------------------------------------------------------------------------------------------------- Session

class SessionReactor;
using SessionWriter = StreamWriter<SessionReactor, v1::SessionResponse>;

// What the scope says, as messages.
class SessionStreamClient : public StreamClient<SessionWriter> {
 public:
  SessionStreamClient(ServerCore* core, std::shared_ptr<SessionWriter> writer)
      : StreamClient(std::move(writer)), core_(core) {}

  void set_session(const SessionScope& scope) {
    session_ = scope.id();
    idle_timeout_ = scope.idle_timeout();
    priority_ = scope.priority();
  }

  void OnOpened(const std::string& request_id, const OpenModel& model,
                const std::vector<PatchReport>& loras) override {
    v1::SessionResponse response = Reply(request_id);
    auto& opened = *response.mutable_opened();
    opened.set_session(session_);
    opened.set_server_instance(core_->instance);
    opened.set_model(model.name);
    opened.set_model_id(model.id);
    opened.set_family(std::string(model.pipeline->family()));
    for (const PatchReport& report : loras) *opened.add_loras() = ReportToProto(report);
    *opened.mutable_limits() = LimitsToProto(core_->config);
    *opened.mutable_idle_timeout() = ToProto(idle_timeout_);
    opened.set_priority(priority_);
    writer_->Send(std::move(response));
  }

  void OnLorasSet(const std::string& request_id, const std::vector<PatchReport>& loras) override {
    v1::SessionResponse response = Reply(request_id);
    auto& set = *response.mutable_loras_set();
    for (const PatchReport& report : loras) *set.add_loras() = ReportToProto(report);
    writer_->Send(std::move(response));
  }

  void OnError(const std::string& request_id, const std::string& job_id,
               const absl::Status& status) override {
    v1::SessionResponse response = Reply(request_id);
    response.mutable_error()->set_job_id(job_id);
    *response.mutable_error()->mutable_status() = ToRpcStatus(status);
    writer_->Send(std::move(response));
  }

  void OnJobEvent(const std::string& request_id, const std::string& job_id, v1::JobEvent event,
                  Reservation memory) override {
    auto options = OptionsFor(job_id, event, std::move(memory));
    v1::SessionResponse response = Reply(request_id);
    response.mutable_job_event()->set_job_id(job_id);
    *response.mutable_job_event()->mutable_event() = std::move(event);
    writer_->Send(std::move(response), std::move(options));
  }

  void OnJobFailed(const std::string& request_id, const std::string& job_id,
                   const absl::Status& status) override {
    v1::JobEvent event;
    *event.mutable_failed()->mutable_status() = ToRpcStatus(status);
    OnJobEvent(request_id, job_id, std::move(event), {});
  }

  void OnJobCancelled(const std::string& request_id, const std::string& job_id) override {
    v1::JobEvent event;
    event.mutable_cancelled();
    OnJobEvent(request_id, job_id, std::move(event), {});
  }

  void OnEnded(EndReason reason, const absl::Status& status) override {
    if (status.ok()) {
      v1::SessionResponse response = Reply(close_request_id_);
      response.mutable_closed()->set_reason(reason == EndReason::kHalfClosed
                                                ? v1::SessionResponse::Closed::REASON_HALF_CLOSED
                                                : v1::SessionResponse::Closed::REASON_CLOSED_BY_CLIENT);
      writer_->Send(std::move(response));
    }
    writer_->Finish(ToGrpcStatus(status));
  }

  // Of the `close` request; set before the end is asked for.
  void set_close_request_id(std::string id) { close_request_id_ = std::move(id); }

 private:
  static v1::SessionResponse Reply(const std::string& request_id) {
    v1::SessionResponse response;
    response.set_request_id(request_id);
    return response;
  }

  ServerCore* const core_;
  std::string session_;
  std::string close_request_id_;
  absl::Duration idle_timeout_;
  int priority_ = 0;
};

class SessionReactor
    : public ScopeReactor<SessionReactor, grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>,
                          v1::SessionResponse> {
 public:
  SessionReactor(ServerCore* core, grpc::CallbackServerContext* context)
      : ScopeReactor(context), core_(core), peer_(PeerOf(context->peer()).address) {
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {  // half-close, or cancel: then OnCancel says so
      MutexLock lock(&mu_);
      if (scope_ != nullptr) {
        scope_->EndWhenDone();
      } else {
        writer_->Finish(grpc::Status::OK);
      }
      return;
    }
    request_.DiscardUnknownFields();
    Handle();
    v1::SessionRequest().Swap(&request_);  // Clear would keep the memory of its texts
    // Not after a message that ends the stream.
    if (!over_) StartRead(&request_);
  }

 private:
  void Fail(const absl::Status& status) {
    over_ = true;
    writer_->Finish(ToGrpcStatus(status));
  }

  void Handle() {
    if (request_.request_id().size() > kMaxRequestId) {
      return Refuse(FieldError("request_id", absl::StrCat("at most ", kMaxRequestId, " bytes")));
    }
    if (scope_ == nullptr) return Open();
    switch (request_.request_case()) {
      case v1::SessionRequest::kOpen:
        return Refuse(MakeError(absl::StatusCode::kFailedPrecondition, "ALREADY_OPEN",
                                "the session is open; use set_loras, or a new session for another model"));
      case v1::SessionRequest::kDenoise:
        if (absl::Status status = CheckBounds(request_.denoise().params(), core_->config); !status.ok()) {
          return client_->OnJobFailed(request_.request_id(),
                                      request_.denoise().job_id().substr(0, kMaxRequestId), status);
        }
        return scope_->Denoise(request_.request_id(), request_.denoise().job_id(),
                               std::move(*request_.mutable_denoise()->mutable_params()));
      case v1::SessionRequest::kSetLoras:
        if (absl::Status status = CheckBounds(request_.set_loras().loras()); !status.ok())
          return Refuse(status);
        return scope_->SetLoras(request_.request_id(), Loras(request_.set_loras().loras()),
                                request_.set_loras().patch_mode());
      case v1::SessionRequest::kCancel:
        if (absl::Status status = scope_->CancelJob(request_.cancel().job_id()); !status.ok()) {
          client_->OnError(request_.request_id(),
                           std::string(CutUtf8(request_.cancel().job_id(), kMaxRequestId)), status);
        }
        return;
      case v1::SessionRequest::kClose:
        client_->set_close_request_id(request_.request_id());
        return scope_->RequestEnd(EndReason::kClosed, absl::OkStatus());
      case v1::SessionRequest::REQUEST_NOT_SET:
        return Refuse(FieldError("request", "is empty; set one of open, denoise, set_loras, cancel, close"));
    }
  }

  // A message that cannot be taken: the stream ends before `open`, and goes on after it.
  void Refuse(const absl::Status& status) {
    if (client_ == nullptr) return Fail(status);
    client_->OnError(std::string(CutUtf8(request_.request_id(), kMaxRequestId)), "", status);
  }

  void Open() {
    if (request_.request_case() != v1::SessionRequest::kOpen) {
      return Fail(MakeError(absl::StatusCode::kFailedPrecondition, "NOT_OPEN",
                            "the first message of a session must be `open`"));
    }
    const v1::SessionRequest::Open& open = request_.open();
    absl::Status bounds = CheckNameBound("model", open.model());
    if (bounds.ok()) bounds = CheckBounds(open.loras());
    if (!bounds.ok()) return Fail(bounds);
    client_ = std::make_shared<SessionStreamClient>(core_, writer_);
    OpenRequest request{request_.request_id(), open.model(),    Loras(open.loras()),
                        open.patch_mode(),     open.priority(), absl::ZeroDuration()};
    if (open.has_idle_timeout()) {
      request.idle_timeout = absl::Milliseconds(TimeUtil::DurationToMilliseconds(open.idle_timeout()));
    }
    auto scope = core_->sessions->Open(client_, peer_, std::move(request));
    if (!scope.ok()) return Fail(scope.status());
    client_->set_session(**scope);
    Begin(std::move(*scope), [](SessionScope&) {});
  }

  ServerCore* const core_;
  const std::string peer_;
  std::shared_ptr<SessionStreamClient> client_;
  v1::SessionRequest request_;
  bool over_ = false;  // of reads; touched in read callbacks only
};

// ------------------------------------------------------------------------------------------------ Generate

class GenerateReactor;
using GenerateWriter = StreamWriter<GenerateReactor, v1::GenerateResponse>;

class GenerateStreamClient : public StreamClient<GenerateWriter> {
 public:
  using StreamClient::StreamClient;

  void set_scope(const std::shared_ptr<SessionScope>& scope) {
    session_ = scope->id();
    scope_ = scope;
  }

  void OnOpened(const std::string&, const OpenModel&, const std::vector<PatchReport>&) override {}
  void OnLorasSet(const std::string&, const std::vector<PatchReport>&) override {}

  void OnError(const std::string&, const std::string&, const absl::Status& status) override { Fail(status); }
  void OnJobFailed(const std::string&, const std::string&, const absl::Status& status) override {
    Fail(status);
  }
  void OnJobCancelled(const std::string&, const std::string&) override {
    Fail(MakeError(absl::StatusCode::kCancelled, "CANCELLED", "the job was cancelled"));
  }

  void OnJobEvent(const std::string&, const std::string& job_id, v1::JobEvent event,
                  Reservation memory) override {
    auto options = OptionsFor(job_id, event, std::move(memory));
    v1::GenerateResponse response;
    response.set_session(session_);
    response.set_job_id(job_id);
    *response.mutable_event() = std::move(event);
    writer_->Send(std::move(response), std::move(options));
  }

  void OnEnded(EndReason, const absl::Status& status) override { writer_->Finish(ToGrpcStatus(status)); }

 private:
  // The job's error is the call's, once everything is released. No-op when the session is ending already:
  // then its reason is the call's.
  void Fail(const absl::Status& status) {
    if (auto scope = scope_.lock()) scope->RequestEnd(EndReason::kFailed, status);
  }

  std::string session_;
  std::weak_ptr<SessionScope> scope_;
};

class GenerateReactor : public ScopeReactor<GenerateReactor, grpc::ServerWriteReactor<v1::GenerateResponse>,
                                            v1::GenerateResponse> {
 public:
  GenerateReactor(ServerCore* core, grpc::CallbackServerContext* context, v1::GenerateRequest request)
      : ScopeReactor(context) {
    request.DiscardUnknownFields();
    absl::Status bounds = CheckNameBound("model", request.model());
    if (bounds.ok()) bounds = CheckBounds(request.loras());
    if (bounds.ok()) bounds = CheckBounds(request.params(), core->config);
    if (!bounds.ok()) {
      writer_->Finish(ToGrpcStatus(bounds));
      return;
    }
    auto client = std::make_shared<GenerateStreamClient>(writer_);
    auto scope = core->sessions->Open(client, PeerOf(context->peer()).address,
                                      {"", request.model(), Loras(request.loras()), request.patch_mode(),
                                       request.priority(), absl::ZeroDuration()});
    if (!scope.ok()) {
      writer_->Finish(ToGrpcStatus(scope.status()));
      return;
    }
    client->set_scope(*scope);
    Begin(std::move(*scope), [&](SessionScope& s) {
      s.Denoise("", "", std::move(*request.mutable_params()));
      s.EndWhenDone();
    });
  }
};

}  // namespace

v1::Limits LimitsToProto(const Config& config) {
  v1::Limits limits;
  *limits.mutable_session_idle_timeout() = ToProto(config.session_idle_timeout);
  *limits.mutable_session_max_age() = ToProto(config.session_max_age);
  *limits.mutable_job_timeout() = ToProto(config.job_timeout);
  limits.set_max_sessions(config.max_sessions);
  limits.set_max_queued_jobs_per_session(config.max_queued_jobs_per_session);
  limits.set_max_queued_jobs(config.max_queued_jobs);
  limits.set_max_message_bytes(config.max_message_bytes);
  limits.set_max_image_bytes(config.max_image_bytes);
  limits.set_max_pixels(config.max_pixels);
  limits.set_preview_max_px(config.preview_max_px);
  limits.set_max_priority(static_cast<int>(config.max_priority));
  return limits;
}

grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>* DenoiseServiceImpl::Session(
    grpc::CallbackServerContext* context) {
  return new SessionReactor(core_, context);
}

grpc::ServerWriteReactor<v1::GenerateResponse>* DenoiseServiceImpl::Generate(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request) {
  // gRPC keeps the message until the call is over, and does not look at it again: it is emptied, so that only
  // one holds its pictures.
  v1::GenerateRequest taken;
  const_cast<v1::GenerateRequest*>(request)->Swap(&taken);
  return new GenerateReactor(core_, context, std::move(taken));
}

grpc::ServerUnaryReactor* DenoiseServiceImpl::Plan(grpc::CallbackServerContext* context,
                                                   const v1::PlanRequest* request,
                                                   v1::PlanResponse* response) {
  return OnWorker(core_, context, response, [=, this]() -> absl::Status {
    RETURN_IF_ERROR(core_->CheckAccepting());
    RETURN_IF_ERROR(CheckBounds(request->loras()));
    RETURN_IF_ERROR(CheckBounds(request->params(), core_->config));
    ASSIGN_OR_RETURN(*response, PlanJob(*core_, *request));
    return absl::OkStatus();
  });
}

}  // namespace latentd
