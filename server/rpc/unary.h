// Unary calls off the RPC threads: the work runs on the server's workers, where it may read the disk.
//
// An answer that is not small is charged until the client has read it; one for which there is no room is an
// error, and a client that does not read is not waited for.
#ifndef LATENTD_SERVER_RPC_UNARY_H_
#define LATENTD_SERVER_RPC_UNARY_H_

#include <google/protobuf/message.h>
#include <grpcpp/server_context.h>

#include <functional>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache/base/error.h"
#include "server/rpc/grpc_errors.h"
#include "server/rpc/peer.h"
#include "server/runtime/tensor_guard.h"
#include "server/server_core.h"

namespace latentd {

// Answers up to this size are bounded by the number of calls alone.
inline constexpr size_t kSmallAnswer = 16 * 1024;

class UnaryAnswer : public grpc::ServerUnaryReactor {
 public:
  UnaryAnswer(ServerCore* core, grpc::CallbackServerContext* context, google::protobuf::Message* response)
      : core_(core), context_(context), response_(response) {}

  // gRPC keeps request and response until the call is over.
  void Send(absl::Status status) {
    if (status.ok()) status = Charge();
    if (!status.ok()) response_->Clear();
    core_->answers.Add(this, absl::Now(), [context = context_] { context->TryCancel(); });
    Finish(ToGrpcStatus(status));
  }

  void OnDone() override {
    core_->answers.Remove(this);
    delete this;
  }

 private:
  absl::Status Charge() {
    const size_t size = response_->ByteSizeLong();
    if (size <= kSmallAnswer) return absl::OkStatus();
    const auto bytes =
        static_cast<int64_t>(size + response_->SpaceUsedLong());  // as gRPC has it, and as it is
    auto charge = core_->requests->Take(bytes, "answers", "an answer");
    if (!charge) {
      return MakeError(absl::StatusCode::kResourceExhausted, "ANSWERS_EXHAUSTED",
                       absl::StrCat("no room for an answer of ", bytes,
                                    " bytes beside those that wait to be "
                                    "read; try again later"),
                       {{"bytes", absl::StrCat(bytes)}, {"retry_ms", "2000"}});
    }
    charge_ = *std::move(charge);
    return absl::OkStatus();
  }

  ServerCore* const core_;
  grpc::CallbackServerContext* const context_;
  google::protobuf::Message* const response_;
  RequestMemory::Charge charge_;
};

// Runs `work` on a worker and finishes the call with its status, and the response when that is OK.
inline grpc::ServerUnaryReactor* OnWorker(ServerCore* core, grpc::CallbackServerContext* context,
                                          google::protobuf::Message* response,
                                          std::function<absl::Status()> work) {
  auto* answer = new UnaryAnswer(core, context, response);
  core->workers->Submit([answer, work = std::move(work)] { answer->Send(GuardTensorCode("call", work)); });
  return answer;
}

// The same for what only operators may ask for; `what` names the call.
inline grpc::ServerUnaryReactor* OnWorkerForAdmin(ServerCore* core, grpc::CallbackServerContext* context,
                                                  google::protobuf::Message* response, absl::string_view what,
                                                  std::function<absl::Status()> work) {
  const absl::Status allowed = CheckAdmin(context->peer(), core->config.admin_over_tcp, what);
  if (allowed.ok()) return OnWorker(core, context, response, std::move(work));
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(allowed));
  return reactor;
}

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_UNARY_H_
