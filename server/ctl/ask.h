// latentctl: calls that ask one thing.
#ifndef LATENTD_SERVER_CTL_ASK_H_
#define LATENTD_SERVER_CTL_ASK_H_

#include <optional>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache/base/error.h"
#include "latentd/v1/model.grpc.pb.h"
#include "server/ctl/client.h"

namespace latentd::ctl {

// One unary call: connects, calls `method` of Service's stub, gives the response.
template <typename Service, typename Request, typename Response>
absl::StatusOr<Response> Ask(const GlobalOptions& global,
                             grpc::Status (Service::Stub::*method)(grpc::ClientContext*, const Request&,
                                                                   Response*),
                             const Request& request, std::optional<absl::Duration> limit = kUnaryLimit) {
  ASSIGN_OR_RETURN(auto channel, Connect(global));
  auto stub = Service::NewStub(channel);
  Call call(global, limit);
  Response response;
  RETURN_IF_ERROR(call.Result((stub.get()->*method)(call.context(), request, &response)));
  return response;
}

// All pages of a list, as one.
template <typename Request, typename Response>
absl::StatusOr<Response> AskForAll(const GlobalOptions& global,
                                   grpc::Status (v1::ModelService::Stub::*method)(grpc::ClientContext*,
                                                                                  const Request&, Response*),
                                   Request request = {}) {
  Response all;
  do {
    ASSIGN_OR_RETURN(const Response page, Ask<v1::ModelService>(global, method, request));
    all.MergeFrom(page);
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  all.clear_next_page_token();
  return all;
}

}  // namespace latentd::ctl

#endif  // LATENTD_SERVER_CTL_ASK_H_
