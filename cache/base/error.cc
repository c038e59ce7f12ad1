#include "cache/base/error.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace latentd {
namespace {

// Payloads are keyed by URL; one prefix for the reason, one for each detail.
constexpr absl::string_view kReasonUrl = "latentd/reason";
constexpr absl::string_view kDetailUrl = "latentd/detail/";

}  // namespace

absl::Status MakeError(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                       const ErrorDetails& details) {
  absl::Status status(code, message);
  status.SetPayload(kReasonUrl, absl::Cord(reason));
  for (const auto& [key, value] : details) {
    status.SetPayload(absl::StrCat(kDetailUrl, key), absl::Cord(value));
  }
  return status;
}

absl::Status FieldError(absl::string_view field, absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_FIELD", absl::StrCat(field, ": ", message),
                   {{"field", std::string(field)}});
}

std::string ErrorReason(const absl::Status& status) {
  auto payload = status.GetPayload(kReasonUrl);
  return payload.has_value() ? std::string(*payload) : "";
}

ErrorDetails GetErrorDetails(const absl::Status& status) {
  ErrorDetails details;
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& value) {
    if (url.substr(0, kDetailUrl.size()) == kDetailUrl) {
      details[std::string(url.substr(kDetailUrl.size()))] = std::string(value);
    }
  });
  return details;
}

absl::Status WithPrefix(const absl::Status& status, absl::string_view prefix) {
  if (status.ok()) return status;
  absl::Status out(status.code(), absl::StrCat(prefix, status.message()));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& value) { out.SetPayload(url, value); });
  return out;
}

}  // namespace latentd
