// Typed errors (cache/base/error.h) on the wire and back.
//
// Every error that a client gets has google.rpc details: exactly one ErrorInfo with the domain "latentd", a
// stable reason and the error's details as metadata. From well-known details more is made: "field" gives a
// BadRequest, "retry_ms" a RetryInfo, "resource_type" and "resource_name" a ResourceInfo.
// A status without a reason was not made for clients: INTERNAL and UNKNOWN ones lose their text.
#ifndef LATENTD_SERVER_RPC_GRPC_ERRORS_H_
#define LATENTD_SERVER_RPC_GRPC_ERRORS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "google/rpc/status.pb.h"

namespace latentd {

// The domain of every ErrorInfo.
inline constexpr char kErrorDomain[] = "latentd";

// Below gRPC's limit of 8 KiB for all trailers, where too large details vanish without a word.
inline constexpr size_t kMaxErrorBytes = 5 * 1024;

// For messages that carry an error (JobEvent.Failed, SessionError). Serialises to at most kMaxErrorBytes;
// what is too long is cut.
google::rpc::Status ToRpcStatus(const absl::Status& status);

// For the end of a call.
grpc::Status ToGrpcStatus(const absl::Status& status);

// The other way, for clients: MakeError's reason and details come back. A status of other origin keeps its
// code and message and has no reason.
absl::Status FromRpcStatus(const google::rpc::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_GRPC_ERRORS_H_
