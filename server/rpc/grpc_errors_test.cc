#include "server/rpc/grpc_errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cache/base/error.h"
#include "google/rpc/error_details.pb.h"

namespace latentd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

template <typename T>
std::vector<T> Details(const google::rpc::Status& status) {
  std::vector<T> out;
  for (const auto& any : status.details()) {
    if (T detail; any.UnpackTo(&detail)) out.push_back(detail);
  }
  return out;
}

absl::Status SomeError(absl::StatusCode code, const ErrorDetails& details) {
  return MakeError(code, "SOME_REASON", "something happened", details);
}

TEST(GrpcErrors, ATypedErrorHasOneErrorInfoWithItsDetails) {
  auto infos = Details<google::rpc::ErrorInfo>(
      ToRpcStatus(SomeError(absl::StatusCode::kAborted, {{"needed", "5"}, {"cap", "4"}})));
  ASSERT_THAT(infos, SizeIs(1));
  EXPECT_EQ(infos[0].reason(), "SOME_REASON");
  EXPECT_EQ(infos[0].domain(), "latentd");
  EXPECT_EQ(infos[0].metadata().at("needed"), "5");
  EXPECT_EQ(infos[0].metadata().at("cap"), "4");
}

TEST(GrpcErrors, AFieldErrorNamesTheFieldInABadRequest) {
  const auto status = ToRpcStatus(FieldError("params.width", "is negative"));
  EXPECT_EQ(status.code(), 3);
  auto bad = Details<google::rpc::BadRequest>(status);
  ASSERT_THAT(bad, SizeIs(1));
  EXPECT_EQ(bad[0].field_violations(0).field(), "params.width");
  EXPECT_THAT(bad[0].field_violations(0).description(), HasSubstr("is negative"));
}

TEST(GrpcErrors, ARetryHintBecomesRetryInfo) {
  auto retry = Details<google::rpc::RetryInfo>(
      ToRpcStatus(SomeError(absl::StatusCode::kResourceExhausted, {{"retry_ms", "1500"}})));
  ASSERT_THAT(retry, SizeIs(1));
  EXPECT_EQ(retry[0].retry_delay().seconds(), 1);
  EXPECT_EQ(retry[0].retry_delay().nanos(), 500'000'000);
}

TEST(GrpcErrors, AMissingResourceIsNamed) {
  auto info = Details<google::rpc::ResourceInfo>(ToRpcStatus(
      SomeError(absl::StatusCode::kNotFound, {{"resource_type", "lora"}, {"resource_name", "night"}})));
  ASSERT_THAT(info, SizeIs(1));
  EXPECT_EQ(info[0].resource_type(), "lora");
  EXPECT_EQ(info[0].resource_name(), "night");
}

TEST(GrpcErrors, AStatusWithoutReasonTakesItsCodesName) {
  const auto status = ToRpcStatus(absl::NotFoundError("no such thing"));
  EXPECT_EQ(Details<google::rpc::ErrorInfo>(status)[0].reason(), "NOT_FOUND");
  EXPECT_EQ(status.message(), "no such thing");
}

TEST(GrpcErrors, AnInternalErrorWithoutReasonKeepsItsTextFromTheClient) {
  const auto status = ToRpcStatus(absl::InternalError("tensor at /secret/path is odd"));
  EXPECT_EQ(Details<google::rpc::ErrorInfo>(status)[0].reason(), "INTERNAL");
  EXPECT_THAT(status.message(), Not(HasSubstr("secret")));
}

TEST(GrpcErrors, AStackTraceIsCutOff) {
  const auto status =
      ToRpcStatus(MakeError(absl::StatusCode::kInternal, "STEP_FAILED",
                            "sizes differ\nException raised from f at ../c10/x.cpp:1\nframe #0: g"));
  EXPECT_EQ(status.message(), "sizes differ");
}

TEST(GrpcErrors, HugeErrorsStayBelowTheLimitAndKeepTheReason) {
  ErrorDetails details{{"cap", "4"}};
  for (int i = 0; i < 100; ++i) details[absl::StrCat("key", i)] = std::string(1000, 'x');
  const auto status =
      ToRpcStatus(MakeError(absl::StatusCode::kAborted, "SOME_REASON", std::string(100000, 'y'), details));
  EXPECT_LE(status.ByteSizeLong(), kMaxErrorBytes);
  auto info = Details<google::rpc::ErrorInfo>(status)[0];
  EXPECT_EQ(info.reason(), "SOME_REASON");
  EXPECT_EQ(info.metadata().at("cap"), "4");
}

TEST(GrpcErrors, InvalidUtf8IsReplaced) {
  const auto status = ToRpcStatus(MakeError(absl::StatusCode::kNotFound, "R", "name \xff\xc0\x80 é", {}));
  EXPECT_EQ(status.message(), "name ??? é");
}

TEST(GrpcErrors, AClientGetsReasonAndDetailsBack) {
  const absl::Status sent = SomeError(absl::StatusCode::kNotFound, {{"model", "m"}});
  const absl::Status got = FromGrpcStatus(ToGrpcStatus(sent));
  EXPECT_EQ(got.code(), sent.code());
  EXPECT_EQ(got.message(), sent.message());
  EXPECT_EQ(ErrorReason(got), "SOME_REASON");
  EXPECT_EQ(GetErrorDetails(got), GetErrorDetails(sent));
}

TEST(GrpcErrors, AStatusOfOtherOriginKeepsCodeAndMessage) {
  const absl::Status got = FromGrpcStatus(grpc::Status(grpc::StatusCode::UNAVAILABLE, "refused"));
  EXPECT_EQ(got.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(got.message(), "refused");
  EXPECT_EQ(ErrorReason(got), "");
}

TEST(GrpcErrors, OkStaysOk) {
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_TRUE(FromGrpcStatus(grpc::Status::OK).ok());
}

}  // namespace
}  // namespace latentd
