#include "server/ctl/text.h"

#include <google/protobuf/any.pb.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"
#include "cache/base/utf8.h"

namespace latentd::ctl {
namespace {

namespace pb = google::protobuf;

void ClearBytes(pb::Message& message) {
  // An Any keeps a whole message in a bytes field.
  if (message.GetDescriptor() == pb::Any::descriptor()) return;
  const pb::Reflection& reflection = *message.GetReflection();
  std::vector<const pb::FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const pb::FieldDescriptor* field : fields) {
    if (field->type() == pb::FieldDescriptor::TYPE_BYTES && !field->is_repeated()) {
      reflection.SetString(&message, field, "");
    } else if (field->cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE && !field->is_map()) {
      if (!field->is_repeated()) {
        ClearBytes(*reflection.MutableMessage(&message, field));
      } else {
        for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
          ClearBytes(*reflection.MutableRepeatedMessage(&message, field, i));
        }
      }
    }
  }
}

constexpr size_t kShortHash = 6;
constexpr size_t kLongHash = 12;  // shorter runs of hexadecimal digits may be words

bool LooksLikeNumber(absl::string_view cell) {
  return !cell.empty() && std::isdigit(static_cast<unsigned char>(cell[0])) &&
         (std::isdigit(static_cast<unsigned char>(cell.back())) || absl::EndsWith(cell, "B") ||
          absl::EndsWith(cell, " s") || absl::EndsWith(cell, " ms") || absl::EndsWith(cell, "%")) &&
         !absl::StrContains(cell, ":") && !absl::StrContains(cell, "-");
}

std::string Columned(const Rows& rows, bool numbers_right) {
  std::vector<int> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], DisplayColumns(row[i]));
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string& cell = row[i];
      const std::string gap(widths[i] - DisplayColumns(cell), ' ');
      absl::StrAppend(&line, i > 0 ? "  " : "",
                      numbers_right && LooksLikeNumber(cell) ? gap + cell : cell + gap);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&out, line, "\n");
  }
  return out;
}

}  // namespace

ExitCode ExitCodeOf(const absl::Status& status) {
  if (status.ok()) return kExitOk;
  const std::string reason = ErrorReason(status);
  if (reason == "INTERRUPTED") return kExitInterrupted;
  if (reason == "USAGE") return kExitUsage;
  if (reason == "LOCAL_FILE" || reason == "DAMAGED_DATA") return kExitLocal;
  const bool transport = status.code() == absl::StatusCode::kUnavailable && reason.empty();
  return transport || reason == "NO_SERVER" ? kExitUnreachable : kExitFailed;
}

std::string ErrorText(const absl::Status& status, bool json) {
  const std::string code = absl::StatusCodeToString(status.code());
  const std::string reason = ErrorReason(status);
  const ErrorDetails details = GetErrorDetails(status);
  if (json) {
    using Json = nlohmann::ordered_json;
    Json object = {{"code", code}, {"reason", reason}, {"message", std::string(status.message())}};
    object["details"] = Json::object();
    for (const auto& [key, value] : details) object["details"][key] = value;
    return EscapeUnsafe(object.dump(-1, ' ', false, Json::error_handler_t::replace)) + "\n";
  }
  std::string out = absl::StrCat("latentctl: ", code, reason.empty() || reason == code ? "" : " ",
                                 reason == code ? "" : reason, ": ", Printable(status.message()), "\n");
  for (const auto& [key, value] : details) {
    if (key == "field" && absl::StartsWith(status.message(), absl::StrCat(value, ":")))
      continue;  // it is said
    absl::StrAppend(&out, "  ", Printable(key), ": ", Printable(value), "\n");
  }
  return out;
}

std::string HumanBytes(int64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (std::abs(value) >= 1024 && unit < 4) value /= 1024, ++unit;
  if (unit == 0) return absl::StrCat(bytes, " B");
  return absl::StrFormat(std::abs(value) < 10 ? "%.2f %s" : "%.1f %s", value, units[unit]);
}

std::string ShortBytes(int64_t bytes) {
  const char* units[] = {"", "Ki", "Mi", "Gi", "Ti"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  // What would be shown as 1000 has a digit too many.
  while (std::abs(value) >= (unit == 0 ? 1024 : 999.5) && unit < 4) value /= 1024, ++unit;
  if (unit == 0) return absl::StrCat(bytes);
  const double size = std::abs(value);
  return absl::StrFormat(size < 9.995 ? "%.2f%s" : size < 99.95 ? "%.1f%s" : "%.0f%s", value, units[unit]);
}

std::string HumanMs(double ms) {
  if (ms < 1000) return absl::StrFormat(ms < 10 ? "%.1f ms" : "%.0f ms", ms);
  if (ms < 60'000) return absl::StrFormat(ms < 10'000 ? "%.2f s" : "%.1f s", ms / 1000);
  const int64_t seconds = std::llround(ms / 1000);
  const auto two = [](int64_t large, const char* unit, int64_t small, const char* small_unit) {
    return small == 0 ? absl::StrCat(large, unit) : absl::StrCat(large, unit, " ", small, small_unit);
  };
  if (seconds < 3600) return two(seconds / 60, " min", seconds % 60, " s");
  return two(seconds / 3600, " h", seconds % 3600 / 60, " min");
}

std::string ShortMs(double ms) {
  if (ms < 1000) return absl::StrFormat("%.0fms", ms);
  if (ms < 10'000) return absl::StrFormat("%.1fs", std::floor(ms / 100) / 10);
  const int64_t seconds = static_cast<int64_t>(ms / 1000), minutes = seconds / 60, hours = minutes / 60;
  if (minutes == 0) return absl::StrFormat("%ds", seconds);
  if (hours == 0) return absl::StrFormat("%dm%02ds", minutes, seconds % 60);
  if (hours < 24) return absl::StrFormat("%dh%02dm", hours, minutes % 60);
  return absl::StrFormat("%dd%02dh", hours / 24, hours % 24);
}

double ToMs(const pb::Duration& duration) {
  return 1e3 * static_cast<double>(duration.seconds()) + duration.nanos() / 1e6;
}

std::string Percent(int64_t part, int64_t whole) {
  if (part == 0 || whole <= 0) return part == 0 ? "0%" : "";
  if (part == whole) return "100%";
  const double percent = 100.0 * static_cast<double>(part) / static_cast<double>(whole);
  if (percent < 1) return "<1%";
  return absl::StrCat(static_cast<int64_t>(percent), "%");
}

std::string ShortKey(absl::string_view key) {
  std::string out;
  for (size_t at = 0; at < key.size();) {
    size_t end = at;
    while (end < key.size() && absl::ascii_isxdigit(key[end])) ++end;
    const bool word =
        (at > 0 && absl::ascii_isalnum(key[at - 1])) || (end < key.size() && absl::ascii_isalnum(key[end]));
    absl::StrAppend(&out, key.substr(at, end - at >= kLongHash && !word ? kShortHash : end - at));
    if (end < key.size()) out += key[end];
    at = end + 1;
  }
  return Printable(out);
}

std::string EnumText(const std::string& name, absl::string_view prefix) {
  return absl::AsciiStrToLower(absl::StripPrefix(name, prefix));
}

std::string TableText(const Rows& rows) { return Columned(rows, true); }

std::string PairsText(const Rows& rows) { return Columned(rows, false); }

int DisplayColumns(absl::string_view text) {
  return static_cast<int>(
      std::count_if(text.begin(), text.end(), [](unsigned char c) { return (c & 0xc0) != 0x80; }));
}

std::string FitText(absl::string_view text, int columns, bool cut_middle) {
  const int all = DisplayColumns(text);
  if (all <= columns) return std::string(text);
  if (columns <= 0) return "";
  // Where the n-th column begins.
  const auto at = [&](int n) {
    size_t i = 0;
    for (; n > 0; --n) {
      do ++i;
      while (i < text.size() && (static_cast<unsigned char>(text[i]) & 0xc0) == 0x80);
    }
    return i;
  };
  const int after = cut_middle ? (columns - 1) / 2 : 0;
  return absl::StrCat(text.substr(0, at(columns - 1 - after)), "…", text.substr(at(all - after)));
}

std::vector<std::string> FitTable(const std::vector<Column>& columns, const Rows& rows, int width) {
  constexpr int kGap = 2;
  std::vector<int> widths;
  int sum = -kGap;
  for (size_t i = 0; i < columns.size(); ++i) {
    int widest = std::max(columns[i].min_width, DisplayColumns(columns[i].title));
    for (const auto& row : rows) {
      if (i < row.size()) widest = std::max(widest, DisplayColumns(row[i]));
    }
    widths.push_back(widest);
    sum += widest + kGap;
  }
  // The widest gives first.
  for (; width > 0 && sum > width; --sum) {
    size_t widest = columns.size();
    for (size_t i = 0; i < columns.size(); ++i) {
      if (columns[i].shrink_to == 0 || widths[i] <= columns[i].shrink_to) continue;
      if (widest == columns.size() || widths[i] > widths[widest]) widest = i;
    }
    if (widest == columns.size()) break;
    --widths[widest];
  }
  std::vector<std::string> out;
  const auto append = [&](const std::vector<std::string>& row, bool heading) {
    std::string line;
    for (size_t i = 0; i < columns.size() && i < row.size(); ++i) {
      const std::string cell = FitText(row[i], widths[i], columns[i].cut_middle && !heading);
      const std::string gap(widths[i] - DisplayColumns(cell), ' ');
      absl::StrAppend(&line, i > 0 ? "  " : "", columns[i].right ? gap + cell : cell + gap);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out.push_back(width > 0 ? FitText(line, width) : line);
  };
  std::vector<std::string> titles;
  for (const Column& column : columns) titles.push_back(column.title);
  append(titles, true);
  for (const auto& row : rows) append(row, false);
  return out;
}

std::string Printable(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const absl::string_view before = text;
    const int32_t code = TakeCharacter(text);
    if (code == '\n') {
      out += ' ';
    } else if (IsUnsafeToShow(code)) {
      out += '?';
    } else {
      absl::StrAppend(&out, before.substr(0, before.size() - text.size()));
    }
  }
  return out;
}

std::string MessageJson(const pb::Message& message, bool raw) {
  std::unique_ptr<pb::Message> copy(message.New());
  copy->CopyFrom(message);
  if (!raw) ClearBytes(*copy);
  pb::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  std::string out;
  if (!pb::util::MessageToJsonString(*copy, &out, options).ok()) return "{}";
  return EscapeUnsafe(out);
}

absl::StatusOr<v1::LoraRef> ParseLora(absl::string_view text) {
  const absl::Status usage =
      MakeError(absl::StatusCode::kInvalidArgument, "USAGE",
                "a LoRA is written NAME, NAME:WEIGHT, NAME:WEIGHT@START-END, NAME:WEIGHT,PATH=FACTOR,… or "
                "NAME,only=COMPONENT+COMPONENT");
  v1::LoraRef lora;
  // Names may have all of these signs, so it is read from the end.
  for (size_t comma = text.rfind(','); comma != absl::string_view::npos; comma = text.rfind(',')) {
    const std::pair<absl::string_view, absl::string_view> entry =
        absl::StrSplit(text.substr(comma + 1), absl::MaxSplits('=', 1));
    double factor = 0;
    if (!absl::StrContains(text.substr(comma), '=')) break;
    if (entry.first == "only") {
      for (const absl::string_view component : absl::StrSplit(entry.second, '+'))
        lora.add_only(std::string(component));
      text = text.substr(0, comma);
      continue;
    }
    if (entry.first.empty() || !absl::SimpleAtod(entry.second, &factor)) return usage;
    lora.mutable_block_weights()->insert({std::string(entry.first), factor});
    text = text.substr(0, comma);
  }
  if (const size_t at = text.rfind('@');
      at != absl::string_view::npos && absl::StrContains(text.substr(at), '-')) {
    const std::pair<absl::string_view, absl::string_view> range = absl::StrSplit(text.substr(at + 1), '-');
    double start = 0, end = 1;
    if (!absl::SimpleAtod(range.first, &start) || !absl::SimpleAtod(range.second, &end)) return usage;
    lora.set_start(start);
    lora.set_end(end);
    text = text.substr(0, at);
  }
  const size_t colon = text.rfind(':');
  double weight = 0;
  if (colon != absl::string_view::npos && absl::SimpleAtod(text.substr(colon + 1), &weight)) {
    lora.set_weight(weight);
    text = text.substr(0, colon);
  }
  if (text.empty()) return usage;
  lora.set_name(std::string(text));
  return lora;
}

std::string LoraText(const v1::LoraRef& lora) {
  std::string text = lora.name();
  if (lora.has_weight()) absl::StrAppend(&text, ":", lora.weight());
  if (lora.has_start() || lora.has_end()) {
    absl::StrAppend(&text, "@", lora.start(), "-", lora.has_end() ? lora.end() : 1);
  }
  if (lora.only_size() > 0) absl::StrAppend(&text, ",only=", absl::StrJoin(lora.only(), "+"));
  const std::map<std::string, double> blocks(lora.block_weights().begin(), lora.block_weights().end());
  for (const auto& [path, factor] : blocks) absl::StrAppend(&text, ",", path, "=", factor);
  return Printable(text);
}

std::string ExpandOutput(absl::string_view pattern, const OutputName& name) {
  const std::string expanded = absl::StrReplaceAll(
      pattern,
      {{"{job}", name.job}, {"{index}", absl::StrCat(name.index)}, {"{seed}", absl::StrCat(name.seed)}});
  if (name.count <= 1 || expanded != pattern) return expanded;
  const size_t slash = pattern.rfind('/');
  size_t dot = pattern.rfind('.');
  if (dot == absl::string_view::npos || (slash != absl::string_view::npos && dot < slash))
    dot = pattern.size();
  return absl::StrCat(pattern.substr(0, dot), "-", name.index, pattern.substr(dot));
}

std::string UsualText(const v1::RequestField& field) {
  if (field.has_usual_text()) return field.usual_text();
  return field.has_usual_number() ? absl::StrCat(field.usual_number()) : "";
}

std::string ValuesText(const v1::RequestField& field) {
  if (field.choices_size() > 0) return absl::StrJoin(field.choices(), ", ");
  std::string text;
  if (field.has_min() && field.has_max()) {
    text = absl::StrCat(field.above_min() ? "above " : "from ", field.min(), " to ", field.max());
  } else if (field.has_min()) {
    text = absl::StrCat("from ", field.min());
  } else if (field.has_max()) {
    text = absl::StrCat("up to ", field.max());
  }
  if (field.multiple() > 1) absl::StrAppend(&text, ", a multiple of ", field.multiple());
  if (text.empty() && field.max_size() > 0) text = absl::StrCat("up to ", field.max_size(), " bytes");
  return text;
}

}  // namespace latentd::ctl
