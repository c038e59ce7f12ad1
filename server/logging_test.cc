#include "server/logging.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <nlohmann/json.hpp>
#include <sstream>

namespace latentd {
namespace {

using ::testing::EndsWith;
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

}  // namespace
}  // namespace latentd
