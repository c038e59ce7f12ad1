// latentctl: texts for people and for scripts.
#ifndef LATENTD_SERVER_CTL_TEXT_H_
#define LATENTD_SERVER_CTL_TEXT_H_

#include <google/protobuf/duration.pb.h>
#include <google/protobuf/message.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "latentd/v1/common.pb.h"
#include "latentd/v1/model.pb.h"

namespace latentd::ctl {

// Exit codes of latentctl.
enum ExitCode {
  kExitOk = 0,
  kExitFailed = 1,        // the server refused the request or the job failed; `health`: not serving
  kExitUsage = 2,         // wrong command line
  kExitUnreachable = 3,   // no server, or it went away
  kExitLocal = 4,         // a file could not be read or written, or what was received is damaged
  kExitInterrupted = 130  // SIGINT, SIGTERM
};

// Of the error that a command ends with.
ExitCode ExitCodeOf(const absl::Status& status);

// "NOT_FOUND MODEL_NOT_FOUND: message" and a line "  key: value" for each detail; or with `json` one object.
std::string ErrorText(const absl::Status& status, bool json);

// 1536 → "1.5 KiB".
std::string HumanBytes(int64_t bytes);

// The same where room is short: 1536 → "1.50Ki", at most six columns.
std::string ShortBytes(int64_t bytes);

// 75400 → "1 min 15 s"; 1234 → "1.23 s"; 12.3 → "12 ms".
std::string HumanMs(double ms);

// The same where room is short: 75400 → "1m15s", at most six columns below 100 days.
std::string ShortMs(double ms);
double ToMs(const google::protobuf::Duration& duration);

// 0.423 → "42%". Only what is whole is 100%, and only nothing is 0%.
std::string Percent(int64_t part, int64_t whole);

// A record's key or a session's id with its hashes cut to six digits.
std::string ShortKey(absl::string_view key);

// "STATE_IDLE" → "idle".
std::string EnumText(const std::string& name, absl::string_view prefix);

using Rows = std::vector<std::vector<std::string>>;

// Columns as wide as they need to be; the first row is the heading. Cells that look like numbers or sizes are
// set to the right.
std::string TableText(const Rows& rows);

// Rows of a name and a value.
std::string PairsText(const Rows& rows);

// Terminal columns of UTF-8 text without wide characters: its code points.
int DisplayColumns(absl::string_view text);

// `text` in at most so many columns; the end of what is too long becomes "…", or the middle.
std::string FitText(absl::string_view text, int columns, bool cut_middle = false);

struct Column {
  std::string title;
  bool right = false;
  int min_width = 0;  // so that what changes does not move what does not
  int shrink_to = 0;  // where the table is too wide; 0: never
  bool cut_middle = false;
};

// Of a model's request field: what stands for it where it is left out, and what it may be ("8 to 4096, in
// eights", "euler, heun, …").
std::string UsualText(const v1::RequestField& field);
std::string ValuesText(const v1::RequestField& field);

// The heading and the rows, each in at most `width` columns; 0: as wide as they need to be.
std::vector<std::string> FitTable(const std::vector<Column>& columns, const Rows& rows, int width);

// What a server sent, safe to print: what drives a terminal, hides or turns text (IsUnsafeToShow) becomes
// '?', the end of a line a space. Every text of a server's that is shown goes through here or through
// MessageJson.
std::string Printable(absl::string_view text);

// The proto's JSON mapping on one line, all fields shown, and what is unsafe to show written as \u escapes.
// Without `raw`, bytes fields are left empty.
std::string MessageJson(const google::protobuf::Message& message, bool raw);

// "night" or "night:0.5". A colon whose right side is no number belongs to the name. Errors:
// INVALID_ARGUMENT.
absl::StatusOr<v1::LoraRef> ParseLora(absl::string_view text);
std::string LoraText(const v1::LoraRef& lora);

struct OutputName {
  std::string job = "";
  int index = 0;
  uint64_t seed = 0;
  int count = 1;
};

// The file name for one picture: {job}, {index} and {seed} in `pattern` are filled in; with several pictures
// and none of these, "-INDEX" goes before the extension.
std::string ExpandOutput(absl::string_view pattern, const OutputName& name);

}  // namespace latentd::ctl

#endif  // LATENTD_SERVER_CTL_TEXT_H_
