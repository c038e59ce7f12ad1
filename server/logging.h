// The daemon's log: lines on stderr, for people or as JSON objects.
//
// Code logs with spdlog's own functions (spdlog::info("session {} opened", id)); this sets them up. A line is
// one line whatever a client put into a name: control characters, and others that change what is seen, are
// escaped. A client's text in a line goes through LogField, so that it cannot pretend to be two fields. Lines
// of gRPC and protobuf take the same way.
#ifndef LATENTD_SERVER_LOGGING_H_
#define LATENTD_SERVER_LOGGING_H_

#include <spdlog/formatter.h>

#include <memory>
#include <string>

#include "absl/strings/string_view.h"

namespace latentd {

// level: trace, debug, info, warning, error; format: text, json (Config::log_level, Config::log_format).
// Once, at the start of main.
void SetUpLogging(const std::string& level, const std::string& format);

// `value` as it stands behind "key=": as it is if it is made of [A-Za-z0-9._/:@+,%~-] alone, else in double
// quotes with " and \ escaped.
std::string LogField(absl::string_view value);

// text:  2026-01-31T12:00:00.123Z info    message
// json:  {"time":"2026-01-31T12:00:00.123Z","level":"info","message":"message"}
std::unique_ptr<spdlog::formatter> MakeLogFormatter(const std::string& format);

}  // namespace latentd

#endif  // LATENTD_SERVER_LOGGING_H_
