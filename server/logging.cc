#include "server/logging.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

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

// Control characters as \n, \t or \x1b, so that nobody can forge a line or drive a terminal.
std::string OneLine(absl::string_view text) {
  std::string out;
  for (unsigned char c : text) {
    if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c < 0x20 || c == 0x7f) {
      absl::StrAppend(&out, "\\x", absl::Hex(c, absl::kZeroPad2));
    } else {
      out += static_cast<char>(c);
    }
  }
  return out;
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
      text = object.dump(-1, ' ', false, Json::error_handler_t::replace);
    } else {
      std::string level(LevelText(line));
      level.resize(7, ' ');
      text = absl::StrCat(TimeText(line), " ", level, " ", OneLine(message));
    }
    text += '\n';
    out.append(text.data(), text.data() + text.size());
  }

  std::unique_ptr<spdlog::formatter> clone() const override { return std::make_unique<LineFormatter>(json_); }

 private:
  const bool json_;
};

}  // namespace

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
}

}  // namespace latentd
