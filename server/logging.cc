#include "server/logging.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "cache/base/utf8.h"

namespace latentd {
namespace {

using Json = nlohmann::ordered_json;

std::string TimeText(const spdlog::details::log_msg& line) {
  return absl::FormatTime("%Y-%m-%d%ET%H:%M:%E3SZ", absl::FromChrono(line.time), absl::UTCTimeZone());
}

absl::string_view LevelText(const spdlog::details::log_msg& line) {
  auto text = spdlog::level::to_string_view(line.level);
  return {text.data(), text.size()};
}

class LineFormatter : public spdlog::formatter {
 public:
  explicit LineFormatter(bool json) : json_(json) {}

  void format(const spdlog::details::log_msg& line, spdlog::memory_buf_t& out) override {
    const absl::string_view message(line.payload.data(), line.payload.size());
    std::string text;
    if (json_) {
      Json object = {{"time", TimeText(line)},
                     {"level", std::string(LevelText(line))},
                     {"message", std::string(message)}};
      // Invalid UTF-8 becomes U+FFFD in place of an exception.
      text = EscapeUnsafe(object.dump(-1, ' ', false, Json::error_handler_t::replace));
    } else {
      std::string level(LevelText(line));
      level.resize(7, ' ');
      text = absl::StrCat(TimeText(line), " ", level, " ", EscapeUnsafe(message));
    }
    text += '\n';
    out.append(text.data(), text.data() + text.size());
  }

  std::unique_ptr<spdlog::formatter> clone() const override { return std::make_unique<LineFormatter>(json_); }

 private:
  const bool json_;
};

}  // namespace

namespace {

// What gRPC calls an error is most often a client's.
void LogOfGrpc(gpr_log_func_args* line) {
  const auto level = line->severity == GPR_LOG_SEVERITY_ERROR  ? spdlog::level::warn
                     : line->severity == GPR_LOG_SEVERITY_INFO ? spdlog::level::info
                                                               : spdlog::level::debug;
  spdlog::log(level, "grpc at={}:{} message={}", LogField(line->file), line->line, LogField(line->message));
}

void LogOfProtobuf(google::protobuf::LogLevel severity, const char* file, int line,
                   const std::string& message) {
  const auto level =
      severity >= google::protobuf::LOGLEVEL_WARNING ? spdlog::level::warn : spdlog::level::info;
  spdlog::log(level, "protobuf at={}:{} message={}", LogField(file), line, LogField(message));
}

}  // namespace

std::string LogField(absl::string_view value) {
  constexpr absl::string_view kPlain = "._-/:@+,%~";
  const bool plain = !value.empty() && std::all_of(value.begin(), value.end(), [&](unsigned char c) {
    return absl::ascii_isalnum(c) || absl::StrContains(kPlain, static_cast<char>(c));
  });
  if (plain) return std::string(value);
  return absl::StrCat("\"", EscapeUnsafe(absl::StrReplaceAll(value, {{"\\", "\\\\"}, {"\"", "\\\""}})), "\"");
}

std::unique_ptr<spdlog::formatter> MakeLogFormatter(const std::string& format) {
  return std::make_unique<LineFormatter>(format == "json");
}

void SetUpLogging(const std::string& level, const std::string& format) {
  auto logger =
      std::make_shared<spdlog::logger>("latentd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_formatter(MakeLogFormatter(format));
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::trace);
  spdlog::set_default_logger(std::move(logger));
  gpr_set_log_function(LogOfGrpc);
  google::protobuf::SetLogHandler(LogOfProtobuf);
}

}  // namespace latentd
