// Typed errors: an absl::Status that carries a reason and key-value details.
//
// Every error that may reach a client is made here, so that each has exactly one machine-readable reason
// (UPPER_SNAKE_CASE, stable) and every number in its message also stands in its details. The server turns
// both into a google.rpc.ErrorInfo; the lower layers know nothing of protocols.
//
//   return MakeError(absl::StatusCode::kNotFound, "MODEL_NOT_FOUND",
//                    absl::StrCat("no model named '", name, "'; ListModels shows what there is"),
//                    {{"model", name}});
#ifndef LATENTD_CACHE_BASE_ERROR_H_
#define LATENTD_CACHE_BASE_ERROR_H_

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace latentd {

using ErrorDetails = std::map<std::string, std::string>;

// A status with a reason. `details` with the key "field" name the request's field at fault, as a path
// ("params.width").
absl::Status MakeError(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                       const ErrorDetails& details = {});

// Shorthand for INVALID_ARGUMENT / INVALID_FIELD on one field of a request.
absl::Status FieldError(absl::string_view field, absl::string_view message);

// The reason of a status made by MakeError; empty for any other status.
std::string ErrorReason(const absl::Status& status);

// The details of a status made by MakeError; empty for any other status.
ErrorDetails GetErrorDetails(const absl::Status& status);

// `status` with `prefix` before its message; code, reason and details stay.
absl::Status WithPrefix(const absl::Status& status, absl::string_view prefix);

}  // namespace latentd

#define LATENTD_CONCAT_INNER_(a, b) a##b
#define LATENTD_CONCAT_(a, b) LATENTD_CONCAT_INNER_(a, b)

// Returns from the enclosing function when `expr` is not OK.
#define RETURN_IF_ERROR(expr)                 \
  do {                                        \
    if (absl::Status s_ = (expr); !s_.ok()) { \
      return s_;                              \
    }                                         \
  } while (false)

// ASSIGN_OR_RETURN(auto x, F()): x = value of F(), or returns F()'s status.
#define ASSIGN_OR_RETURN(lhs, expr) ASSIGN_OR_RETURN_IMPL_(LATENTD_CONCAT_(statusor_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_IMPL_(tmp, lhs, expr) \
  auto tmp = (expr);                           \
  if (!tmp.ok()) return tmp.status();          \
  lhs = std::move(tmp).value()

#endif  // LATENTD_CACHE_BASE_ERROR_H_
