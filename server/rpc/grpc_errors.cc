#include "server/rpc/grpc_errors.h"

#include <algorithm>
#include <map>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cache/base/error.h"
#include "google/rpc/error_details.pb.h"

namespace latentd {
namespace {

constexpr size_t kMaxMessage = 1024;
constexpr size_t kMaxValue = 512;
constexpr absl::string_view kCut = "…";

// protobuf strings are UTF-8, and a client may refuse a message over one byte.
std::string ValidUtf8(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0u; };
    const unsigned lead = byte(i);
    const size_t length = lead < 0x80                   ? 1
                          : lead >= 0xc2 && lead < 0xe0 ? 2
                          : lead >= 0xe0 && lead < 0xf0 ? 3
                          : lead >= 0xf0 && lead < 0xf5 ? 4
                                                        : 0;
    bool valid = length > 0;
    for (size_t k = 1; k < length; ++k) valid = valid && (byte(i + k) & 0xc0) == 0x80;
    // Overlong forms, surrogates, beyond U+10FFFF.
    if (length >= 3) {
      const unsigned second = byte(i + 1);
      if ((lead == 0xe0 && second < 0xa0) || (lead == 0xed && second >= 0xa0) ||
          (lead == 0xf0 && second < 0x90) || (lead == 0xf4 && second >= 0x90)) {
        valid = false;
      }
    }
    if (valid) {
      absl::StrAppend(&out, text.substr(i, length));
      i += length;
    } else {
      out += '?';
      ++i;
    }
  }
  return out;
}

std::string Cut(std::string text, size_t limit) {
  if (text.size() <= limit) return text;
  size_t end = limit - kCut.size();
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  text.resize(end);
  absl::StrAppend(&text, kCut);
  return text;
}

// A tensor library's errors carry a stack trace after the first line.
absl::string_view WithoutTrace(absl::string_view message) {
  for (absl::string_view mark : {"\nException raised from", "\nframe #"}) {
    message = message.substr(0, message.find(mark));
  }
  return message;
}

std::string ClientMessage(const absl::Status& status, bool typed) {
  const bool internal =
      status.code() == absl::StatusCode::kInternal || status.code() == absl::StatusCode::kUnknown;
  if (!typed && internal) return "internal error; the server's log has the cause";
  return Cut(ValidUtf8(WithoutTrace(status.message())), kMaxMessage);
}

template <typename T>
void Add(const T& detail, google::rpc::Status& out) {
  out.add_details()->PackFrom(detail);
}

google::rpc::Status Build(absl::StatusCode code, const std::string& message, const std::string& reason,
                          const ErrorDetails& details) {
  google::rpc::Status out;
  out.set_code(static_cast<int>(code));
  out.set_message(message);
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain(kErrorDomain);
  info.mutable_metadata()->insert(details.begin(), details.end());
  Add(info, out);
  if (auto field = details.find("field"); field != details.end()) {
    google::rpc::BadRequest bad;
    auto* violation = bad.add_field_violations();
    violation->set_field(field->second);
    violation->set_description(message);
    Add(bad, out);
  }
  int64_t retry_ms = 0;
  if (auto retry = details.find("retry_ms");
      retry != details.end() && absl::SimpleAtoi(retry->second, &retry_ms)) {
    google::rpc::RetryInfo info;
    info.mutable_retry_delay()->set_seconds(retry_ms / 1000);
    info.mutable_retry_delay()->set_nanos(static_cast<int32_t>(retry_ms % 1000) * 1'000'000);
    Add(info, out);
  }
  if (auto type = details.find("resource_type"); type != details.end()) {
    google::rpc::ResourceInfo resource;
    resource.set_resource_type(type->second);
    if (auto name = details.find("resource_name"); name != details.end())
      resource.set_resource_name(name->second);
    Add(resource, out);
  }
  return out;
}

}  // namespace

google::rpc::Status ToRpcStatus(const absl::Status& status) {
  if (status.ok()) return google::rpc::Status();
  std::string reason = ErrorReason(status);
  const std::string message = ClientMessage(status, !reason.empty());
  if (reason.empty()) reason = absl::StatusCodeToString(status.code());
  ErrorDetails details;
  for (const auto& [key, value] : GetErrorDetails(status)) {
    details[ValidUtf8(key)] = Cut(ValidUtf8(value), kMaxValue);
  }
  google::rpc::Status out = Build(status.code(), message, reason, details);
  while (out.ByteSizeLong() > kMaxErrorBytes && !details.empty()) {
    // The largest detail says the least per byte.
    details.erase(std::max_element(details.begin(), details.end(), [](const auto& a, const auto& b) {
      return a.first.size() + a.second.size() < b.first.size() + b.second.size();
    }));
    out = Build(status.code(), message, reason, details);
  }
  return out;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const google::rpc::Status rpc = ToRpcStatus(status);
  return grpc::Status(static_cast<grpc::StatusCode>(rpc.code()), rpc.message(), rpc.SerializeAsString());
}

absl::Status FromRpcStatus(const google::rpc::Status& status) {
  const auto code = static_cast<absl::StatusCode>(status.code());
  for (const auto& any : status.details()) {
    google::rpc::ErrorInfo info;
    if (!any.UnpackTo(&info)) continue;
    return MakeError(code, info.reason(), status.message(),
                     ErrorDetails(info.metadata().begin(), info.metadata().end()));
  }
  return absl::Status(code, status.message());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  google::rpc::Status rpc;
  if (!status.error_details().empty() && rpc.ParseFromString(status.error_details()) &&
      rpc.code() == status.error_code()) {
    return FromRpcStatus(rpc);
  }
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace latentd
