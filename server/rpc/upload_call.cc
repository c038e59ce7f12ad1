// Life of a call: the reactor belongs to gRPC and deletes itself in OnDone; the UploadCall is shared by it,
// the watch and the worker that is busy with it, and outlives the reactor while a worker cleans up. On cancel
// the stream is finished at once (gRPC 1.51 does not shut down otherwise) and the file goes behind it; in all
// other cases the client hears of the end when nothing is left.
#include "server/rpc/upload_call.h"

#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "server/rpc/grpc_errors.h"
#include "server/rpc/model_service.h"
#include "server/rpc/peer.h"
#include "server/runtime/tensor_guard.h"
#include "spdlog/spdlog.h"

namespace latentd {
namespace {

// What a call may take in all besides its idle timeout: a client that sends a byte now and then would hold
// its place for days.
constexpr absl::Duration kMinTime = absl::Minutes(10);
constexpr int64_t kMinBytesPerSecond = 256 * 1024;

using Reactor = grpc::ServerReadReactor<v1::UploadLoraRequest>;

absl::Status ClientGone() {
  return MakeError(absl::StatusCode::kCancelled, "CLIENT_GONE", "the client cancelled or is gone");
}

absl::Status Stalled(absl::string_view why) {
  return MakeError(absl::StatusCode::kDeadlineExceeded, "UPLOAD_STALLED", why);
}

class UploadCall : public WatchedUpload, public std::enable_shared_from_this<UploadCall> {
 public:
  UploadCall(ServerCore* core, Reactor* reactor, v1::UploadLoraResponse* response, const std::string& peer)
      : core_(core),
        peer_(PeerOf(peer).address),
        admin_(CheckAdmin(peer, core->config.admin_over_tcp, "replace")),
        reactor_(reactor),
        silent_since_(core->upload_watch->now()),
        response_(response) {}

  void Start() {
    absl::Status status = CheckUploadsOn(*core_);
    if (status.ok()) status = core_->upload_watch->Add(shared_from_this());
    MutexLock lock(&mu_);
    if (!status.ok()) return FinishLocked(status);
    if (!end_) reactor_->StartRead(&request_);
  }

  void OnReadDone(bool ok) {
    MutexLock lock(&mu_);
    if (end_ || finished_) return;
    busy_ = true;
    core_->workers->Submit([self = shared_from_this(), ok] { self->Step(ok); });
  }

  void OnCancel() {
    RequestEnd(ClientGone());
    MutexLock lock(&mu_);
    FinishLocked(ClientGone());
  }

  void OnDone() {
    MutexLock lock(&mu_);
    reactor_ = nullptr;
    finished_ = true;
  }

  void Tick(absl::Time now) override {
    absl::Status status;
    {
      MutexLock lock(&mu_);
      const absl::Duration limit = core_->config.upload_idle_timeout;
      if (!busy_ && now - silent_since_ > limit) {
        status = Stalled(absl::StrCat("nothing came for ", absl::FormatDuration(limit)));
      } else if (now > must_end_) {
        status = Stalled("the upload is too slow");
      }
    }
    if (!status.ok()) RequestEnd(status);
  }

  void RequestEnd(const absl::Status& status) override {
    MutexLock lock(&mu_);
    if (end_ || finished_) return;
    end_ = status;
    if (busy_) return;
    busy_ = true;
    core_->workers->Submit([self = shared_from_this()] { self->End(absl::OkStatus()); });
  }

 private:
  bool cancelled() const {
    MutexLock lock(&mu_);
    return end_.has_value();
  }

  // On a worker, which has the call to itself until it asks for the next message.
  void Step(bool ok) {
    bool done = !ok;
    const absl::Status status = GuardTensorCode("upload", [&]() -> absl::Status {
      if (!ok) return Complete();
      switch (request_.request_case()) {
        case v1::UploadLoraRequest::kHeader:
          return Begin(request_.header(), &done);
        case v1::UploadLoraRequest::kChunk:
          if (incoming_ == nullptr) return NoHeader();
          return incoming_->Write(request_.chunk().offset(), request_.chunk().data());
        case v1::UploadLoraRequest::REQUEST_NOT_SET:
          break;
      }
      return FieldError("request", "is empty; set one of header, chunk");
    });
    if (done || !status.ok()) return End(status);
    {
      MutexLock lock(&mu_);
      if (!end_) {
        busy_ = false;
        silent_since_ = core_->upload_watch->now();
        return reactor_->StartRead(&request_);
      }
    }
    End(absl::OkStatus());
  }

  static absl::Status NoHeader() {
    return MakeError(absl::StatusCode::kFailedPrecondition, "NO_HEADER",
                     "the first message of an upload must be `header`");
  }

  absl::Status Begin(const v1::UploadLoraRequest::Header& header, bool* done) {
    if (incoming_ != nullptr) return FieldError("header", "comes once, before the chunks");
    ASSIGN_OR_RETURN(const std::string name, UploadStore::NameOf(header.name()));
    // Operators' roots come first, so that the upload would never be seen.
    if (auto there = core_->catalog->Lora(name);
        there.ok() && !absl::StartsWith(there->path, absl::StrCat(core_->uploads->folder(), "/"))) {
      return MakeError(
          absl::StatusCode::kAlreadyExists, "NAME_TAKEN",
          absl::StrCat("the server has a file of its own that is named '", name, "'; use another name"),
          {{"resource_type", "lora"}, {"resource_name", name}, {"field", "header.name"}});
    }
    UploadHeader wanted{
        .name = name, .sha256 = header.sha256(), .size = header.size(), .replace = header.replace()};
    if (header.has_ttl())
      wanted.ttl = absl::Seconds(header.ttl().seconds()) + absl::Nanoseconds(header.ttl().nanos());
    // Nobody knows whose the file there is; to take its place is as good as to delete it.
    if (!admin_.ok()) wanted.replace = false;
    auto tried = core_->uploads->Begin(wanted);
    if (header.replace() && !admin_.ok() && ErrorReason(tried.status()) == "UPLOAD_EXISTS") return admin_;
    ASSIGN_OR_RETURN(auto begun, std::move(tried));
    if (const StoredUpload* stored = std::get_if<StoredUpload>(&begun)) {
      *done = true;
      return Answer(*stored);
    }
    incoming_ = std::get<std::unique_ptr<UploadStore::Incoming>>(std::move(begun));
    // The message and what gRPC holds of the next.
    ASSIGN_OR_RETURN(memory_, core_->ram->TryReserve({.bytes = 2 * UploadStore::kMaxChunkBytes,
                                                      .use = MemoryUse::kStaging,
                                                      .owner = absl::StrCat("upload ", name),
                                                      .what = absl::StrCat("upload ", name)}));
    MutexLock lock(&mu_);
    must_end_ = core_->upload_watch->now() + kMinTime + absl::Seconds(header.size() / kMinBytesPerSecond);
    return absl::OkStatus();
  }

  // The client has half-closed, or cancelled; then the store is told before it keeps the file.
  absl::Status Complete() {
    if (incoming_ == nullptr) return NoHeader();
    memory_.Release();  // no message is there any more, and the check wants room
    ASSIGN_OR_RETURN(const StoredUpload stored, incoming_->Finish([this] { return cancelled(); }));
    spdlog::info("upload {}: {} bytes from {}", stored.name, stored.bytes, peer_);
    return Answer(stored);
  }

  absl::Status Answer(const StoredUpload& stored) {
    ASSIGN_OR_RETURN(const LoraFile lora, core_->catalog->Lora(stored.name));
    *answer_.mutable_lora() = DescribeLora(*core_, lora);
    answer_.set_existed(stored.existed);
    return absl::OkStatus();
  }

  // On a worker. `status` is what came of its work, and is not OK when that was to end early.
  void End(const absl::Status& status) {
    incoming_.reset();
    memory_.Release();
    {
      MutexLock lock(&mu_);
      if (status.ok() && answer_.has_lora()) {
        if (!finished_) *response_ = std::move(answer_);
        FinishLocked(absl::OkStatus());
      } else {
        FinishLocked(end_ ? *end_ : status);
      }
    }
    core_->upload_watch->Remove(this);
  }

  void FinishLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (finished_) return;
    finished_ = true;
    reactor_->Finish(ToGrpcStatus(status));
  }

  ServerCore* const core_;
  const std::string peer_;
  const absl::Status admin_;  // whether the client may replace files

  mutable Mutex mu_;
  Reactor* reactor_ ABSL_GUARDED_BY(mu_);
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  bool busy_ ABSL_GUARDED_BY(mu_) = false;                // a worker has it
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mu_);  // asked for from outside
  absl::Time silent_since_ ABSL_GUARDED_BY(mu_);
  absl::Time must_end_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();

  // gRPC's until finished_.
  v1::UploadLoraResponse* const response_;
  // gRPC's while a read is on, else the worker's that has the call.
  v1::UploadLoraRequest request_;
  // The worker's.
  std::unique_ptr<UploadStore::Incoming> incoming_;
  Reservation memory_;
  v1::UploadLoraResponse answer_;
};

class UploadReactor : public Reactor {
 public:
  UploadReactor(ServerCore* core, grpc::CallbackServerContext* context, v1::UploadLoraResponse* response)
      : call_(std::make_shared<UploadCall>(core, this, response, context->peer())) {
    call_->Start();
  }

  void OnReadDone(bool ok) override { call_->OnReadDone(ok); }
  void OnCancel() override { call_->OnCancel(); }
  void OnDone() override {
    call_->OnDone();
    delete this;
  }

 private:
  const std::shared_ptr<UploadCall> call_;
};

}  // namespace

absl::Status CheckUploadsOn(const ServerCore& core) {
  if (core.uploads != nullptr) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kUnimplemented, "UPLOADS_OFF",
      "this server takes no uploads; its operator turns them on with upload_dir, a folder for them");
}

Reactor* NewUploadCall(ServerCore* core, grpc::CallbackServerContext* context,
                       v1::UploadLoraResponse* response) {
  return new UploadReactor(core, context, response);
}

}  // namespace latentd
