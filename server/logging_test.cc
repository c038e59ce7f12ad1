#include "server/logging.h"

#include <gmock/gmock.h>
#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

namespace latentd {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

std::string Logged(const std::string& format, const std::string& message) {
  std::ostringstream out;
  spdlog::logger logger("test", std::make_shared<spdlog::sinks::ostream_sink_st>(out));
  logger.set_formatter(MakeLogFormatter(format));
  logger.warn("{}", message);
  return out.str();
}

TEST(Logging, ATextLineHasTimeLevelAndMessage) {
  EXPECT_THAT(Logged("text", "hello"), MatchesRegex("20..-..-..T..:..:..\\....Z warning hello\n"));
}

TEST(Logging, ATextLineStaysOneLine) {
  EXPECT_THAT(Logged("text", "a\nb\x1b[31m"), EndsWith(" a\\nb\\x1b[31m\n"));
}

TEST(Logging, AJsonLineIsAnObjectWithTheMessageAsItWas) {
  const std::string message = "quote \" backslash \\ newline \n bell \a";
  const auto object = nlohmann::json::parse(Logged("json", message));
  EXPECT_EQ(object["level"], "warning");
  EXPECT_EQ(object["message"], message);
  EXPECT_THAT(object["time"].get<std::string>(), MatchesRegex("20..-..-..T..:..:..\\....Z"));
}

TEST(Logging, AJsonLineIsValidWhateverBytesAreInIt) {
  const auto object = nlohmann::json::parse(Logged("json", "\xff\xfe"));
  EXPECT_EQ(object["message"], "\xef\xbf\xbd\xef\xbf\xbd");
}

TEST(Logging, ATextLineHidesAndTurnsNothing) {
  EXPECT_THAT(Logged("text", "a\u009b31m\u202eb\u200b\xff"), EndsWith(" a\\u009b31m\\u202eb\\u200b\\xff\n"));
}

TEST(Logging, AJsonLineHidesAndTurnsNothingAndSaysTheSame) {
  const std::string message = "a\u009b31m\u202eb\U000e0041\x7f";
  const std::string line = Logged("json", message);
  EXPECT_TRUE(std::all_of(line.begin(), line.end() - 1, [](unsigned char c) {
    return c >= 0x20 && c < 0x7f;
  })) << line;
  EXPECT_EQ(nlohmann::json::parse(line)["message"], message);
}

TEST(Logging, AFieldIsOneFieldWhateverIsInIt) {
  EXPECT_EQ(LogField("job-1/a.b:2@x"), "job-1/a.b:2@x");
  EXPECT_EQ(LogField(""), "\"\"");
  EXPECT_EQ(LogField("a session=x"), "\"a session=x\"");
  EXPECT_EQ(LogField("a=b"), "\"a=b\"");
  EXPECT_EQ(LogField("a\" session=\"x\\"), R"("a\" session=\"x\\")");
  EXPECT_EQ(LogField("a\n\u009b\xff"), R"("a\n\u009b\xff")");
  EXPECT_EQ(LogField("a\u00a0b"), "\"a\u00a0b\"");  // a space that looks like one
}

TEST(Logging, LinesOfGrpcAndProtobufAreLinesOfTheLog) {
  testing::internal::CaptureStderr();
  SetUpLogging("info", "text");
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);  // as grpc_init does
  gpr_log("file.cc", 7, GPR_LOG_SEVERITY_ERROR, "%s",
          "bad :status \"\n2026-01-01T00:00:00.000Z info forged\x1b[2J");
  GOOGLE_LOG(ERROR) << "of\nprotobuf";
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 2) << log;
  EXPECT_EQ(std::count(log.begin(), log.end(), '\x1b'), 0) << log;
  EXPECT_THAT(log, HasSubstr(R"(grpc at=file.cc:7 message="bad :status \"\n2026)"));
  EXPECT_THAT(log, HasSubstr(R"(message="of\nprotobuf")"));
}

}  // namespace
}  // namespace latentd
