#include "server/config.h"

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#define TOML_EXCEPTIONS 0
#include <toml++/toml.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"
#include "cache/cuda_plugin.h"
#include "cache/device.h"
#include "cache/memory_budget.h"
#include "server/version.h"

namespace latentd {
namespace {

using Unit = ConfigKey::Unit;
using Texts = std::vector<std::string>;

constexpr int64_t kMany = 1'000'000;
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kAnySize = std::numeric_limits<int64_t>::max();
// What a request holds besides its image.
constexpr int64_t kRequestOverhead = kMiB;

const std::vector<ConfigKey>& Table() {
  static const auto& table = *new std::vector<ConfigKey>{
      {"listen", &Config::listen,
       "Addresses to listen on, unix:PATH or HOST:PORT. Sockets that systemd passes are used in their "
       "place."},
      {"allow_insecure_bind", &Config::allow_insecure_bind,
       "Allow TCP addresses that other machines can reach. There is no encryption and no login: put a proxy "
       "in "
       "front."},
      {"max_connections", &Config::max_connections,
       "Open connections; more are closed at once. Less where the limit of open files asks for it.",
       Unit::kNone, 1, kMany},
      {"max_connections_per_peer", &Config::max_connections_per_peer,
       "Open connections from one IP address, or of one user on a Unix socket; auto: three quarters of "
       "max_connections.",
       Unit::kNone, 1, kMany, true},
      {"max_streams_per_connection", &Config::max_streams_per_connection,
       "Calls at a time on one connection; auto: max_sessions and 64 more, at least 128.", Unit::kNone, 1,
       kMany, true},
      {"max_request_bytes", &Config::max_request_bytes,
       "Request messages on their way in and answers that wait to be read, of all clients together; never "
       "less than max_message_bytes.",
       Unit::kBytes, kMiB, kAnySize},
      {"request_timeout", &Config::request_timeout,
       "A connection that says nothing and a call without a request are ended after this time, and so is one "
       "whose request stands still for three times as long."},
      {"admin_over_tcp", &Config::admin_over_tcp,
       "Let clients on TCP change caps, trim, drop and unload, and delete or replace uploads. Without it "
       "only "
       "those on a Unix socket may."},
      {"reflection", &Config::reflection, "Answer gRPC reflection, which grpcurl needs."},
      {"health", &Config::health, "Answer grpc.health.v1."},
      {"devices", &Config::devices,
       "Where jobs run. auto: every GPU, else the CPU. Or named: cpu; cuda:N or cuda:UUID (nvidia-smi -L "
       "shows "
       "it; its beginning will do), with =SIZE behind it to cap it; or sim:N=SIZE for a pretended device "
       "with "
       "memory of its own, to which copies may have a bandwidth: sim:N=SIZE,bandwidth=SIZE (per second)."},
      {"threads_per_device", &Config::threads_per_device, "Threads that compute; auto: cores / devices.",
       Unit::kNone, 1, 1024, true},
      {"loader_threads", &Config::loader_threads, "Threads that read weight files.", Unit::kNone, 1, 64},
      {"model_roots", &Config::model_roots, "Folders that hold models."},
      {"lora_roots", &Config::lora_roots, "Folders that hold LoRA files."},
      {"embedding_roots", &Config::embedding_roots,
       "Folders that hold textual inversion files, which prompts name as <NAME> or embedding:NAME."},
      {"follow_links", &Config::follow_links,
       "Serve what links under the roots lead to also where that is outside of all of them; otherwise "
       "whoever "
       "can write to a root could have any file of the server's user read."},
      {"default_model", &Config::default_model,
       "Model of a request that names none; empty: such a request fails."},
      {"patch_mode",
       &Config::patch_mode,
       "How LoRAs are applied where a request does not say.",
       Unit::kNone,
       0,
       0,
       false,
       {"auto", "direct", "sidecar"}},
      {"ram_cap", &Config::ram_cap,
       "Host memory for weights and work; auto: half of the RAM less 2 GiB, at most what the GPUs hold (32 "
       "GiB "
       "without one), at least 4 GiB.",
       Unit::kBytes, kMiB, kAnySize, true},
      {"conditioning_cap", &Config::conditioning_cap,
       "Host memory for the encoded prompts that no job uses; auto: a sixteenth of ram_cap.", Unit::kBytes,
       kMiB, kAnySize, true},
      {"memory_wait_timeout", &Config::memory_wait_timeout,
       "How long a job waits for others to free memory."},
      {"keep_alive", &Config::keep_alive,
       "Models and LoRAs that nobody used for this long leave memory; never: they stay until room is needed.",
       Unit::kNone, 0, 0, true},
      {"residency",
       &Config::residency,
       "Weights on devices with memory of their own. auto: all of them where there is room beside the "
       "working "
       "memory, else a part, and the rest is streamed; full: all or an error; stream: as little as possible.",
       Unit::kNone,
       0,
       0,
       false,
       {"auto", "full", "stream"}},
      {"compute",
       &Config::compute,
       "What networks compute in. auto: fp32 on CPUs, bf16 on GPUs (fp16 on those that have none); fp32, "
       "bf16, fp16: "
       "that on all devices, VAEs in fp32 in place of fp16. On a CPU, bf16 needs AVX512_BF16 or AMX.",
       Unit::kNone,
       0,
       0,
       false,
       {"auto", "fp32", "bf16", "fp16"}},
      {"cpu_gemm",
       &Config::cpu_gemm,
       "Whose products of matrices networks use on a CPU. auto: oneDNN's on AMD's processors with AVX-512, "
       "for twice the speed, else MKL's. Pictures of the two differ by rounding.",
       Unit::kNone,
       0,
       0,
       false,
       {"auto", "mkl", "onednn"}},
      {"ring_blocks", &Config::ring_blocks, "Blocks of weights that a device buffers while streaming.",
       Unit::kNone, 2, 64},
      {"state_dir", &Config::state_dir,
       "Folder for what the server learns of memory and time; auto: systemd's, or ~/.local/state/latentd; "
       "empty: nothing is kept."},
      {"session_idle_timeout", &Config::session_idle_timeout,
       "A session without a request for this long is closed."},
      {"session_max_age", &Config::session_max_age, "A session is closed at this age."},
      {"max_sessions", &Config::max_sessions, "Open sessions.", Unit::kNone, 1, kMany},
      {"max_queued_jobs_per_session", &Config::max_queued_jobs_per_session, "Jobs that wait in one session.",
       Unit::kNone, 1, kMany},
      {"max_queued_jobs", &Config::max_queued_jobs, "Jobs that wait in all sessions.", Unit::kNone, 1, kMany},
      {"job_timeout", &Config::job_timeout,
       "A job fails when it is not done after this time, queue included."},
      {"max_priority", &Config::max_priority,
       "Highest priority of a session or job, and its negative the lowest; what is beyond is cut to it.",
       Unit::kNone, 0, kMany},
      {"priority_ageing", &Config::priority_ageing,
       "A job that waits for its turn rises by one priority each time this has passed; never: only higher "
       "ones "
       "run as long as there are any.",
       Unit::kNone, 0, 0, true},
      {"max_unread_bytes", &Config::max_unread_bytes,
       "A job makes no further picture file while its client has more than this to read.", Unit::kBytes,
       64 << 10, kAnySize},
      {"reader_timeout", &Config::reader_timeout,
       "A session ends whose client, while something waited for it for this long, took nothing, or less than "
       "min_read_rate."},
      {"min_read_rate", &Config::min_read_rate,
       "Bytes a second that a client must read at least; see reader_timeout.", Unit::kBytes, 1, kAnySize},
      {"upload_dir", &Config::upload_dir,
       "Folder for LoRAs that clients upload, which are served as uploads/NAME; the server's own, and in "
       "none of "
       "the roots. It is made when it is not there; empty: uploads are off."},
      {"upload_max_bytes", &Config::upload_max_bytes, "Size of an uploaded file.", Unit::kBytes, 1, kAnySize},
      {"upload_total_bytes", &Config::upload_total_bytes,
       "Size of all uploaded files together; when they reach it, uploads fail until some expire or are "
       "deleted.",
       Unit::kBytes, 1, kAnySize},
      {"upload_ttl",
       &Config::upload_ttl,
       "How long an uploaded file is kept; a client may ask for less. never, or 0: until it is deleted.",
       Unit::kNone,
       0,
       0,
       true,
       {},
       true},
      {"max_uploads", &Config::max_uploads, "Uploads at the same time.", Unit::kNone, 1, 1024},
      {"upload_idle_timeout", &Config::upload_idle_timeout,
       "An upload from which nothing comes for this long fails."},
      {"max_message_bytes", &Config::max_message_bytes, "Size of a request message.", Unit::kBytes, 64 * 1024,
       1024 * kMiB},
      {"max_image_bytes", &Config::max_image_bytes, "Size of an init image as it is sent.", Unit::kBytes,
       1024, 1024 * kMiB},
      {"max_pixels", &Config::max_pixels, "Width × height of a picture, generated or sent.", Unit::kNone,
       64 * 64, int64_t{1} << 28},
      {"preview_max_px", &Config::preview_max_px, "Longer side of a preview.", Unit::kNone, 8, 2048},
      {"picture_metadata", &Config::picture_metadata,
       "Let pictures say how they were made where a request does not say: prompts, seed, models and all "
       "settings, for "
       "`latentctl replay` and for programs that read A1111's text."},
      {"log_level",
       &Config::log_level,
       "Least level that is logged.",
       Unit::kNone,
       0,
       0,
       false,
       {"trace", "debug", "info", "warning", "error"}},
      {"log_format",
       &Config::log_format,
       "Lines for people or JSON objects.",
       Unit::kNone,
       0,
       0,
       false,
       {"text", "json"}},
      {"log_prompts", &Config::log_prompts, "Let prompts into the log."},
      {"drain_timeout", &Config::drain_timeout, "How long running jobs may go on after a SIGTERM."},
  };
  return table;
}

const ConfigKey* FindKey(absl::string_view name) {
  for (const ConfigKey& key : Table()) {
    if (name == key.name) return &key;
  }
  return nullptr;
}

std::string FlagName(const ConfigKey& key) { return absl::StrReplaceAll(key.name, {{"_", "-"}}); }

template <typename T>
bool Holds(const ConfigKey& key) {
  return std::holds_alternative<T Config::*>(key.field);
}

// What a flag takes, for --help.
std::string TypeName(const ConfigKey& key) {
  if (!key.choices.empty()) return absl::StrCat("{", absl::StrJoin(key.choices, ","), "}");
  if (Holds<absl::Duration>(key)) return "TIME";
  if (Holds<int64_t>(key)) return key.unit == Unit::kBytes ? "SIZE" : "N";
  return "TEXT";
}

absl::Status Invalid(absl::string_view key, absl::string_view message, ErrorDetails details = {}) {
  details["key"] = std::string(key);
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_CONFIG", absl::StrCat(key, ": ", message),
                   details);
}

// 50331648 → "48MiB", when it is a whole number of them.
std::string BytesText(int64_t bytes) {
  const char* units[] = {"", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && bytes % 1024 == 0 && unit < 4) bytes /= 1024, ++unit;
  return absl::StrCat(bytes, units[unit]);
}

// "10m0s" → "10m".
std::string DurationText(absl::Duration duration) {
  if (duration == absl::InfiniteDuration()) return "never";
  std::string text = absl::FormatDuration(duration);
  for (absl::string_view zero : {"m0s", "h0m"}) {
    if (absl::EndsWith(text, zero)) text.resize(text.size() - 2);
  }
  return text;
}

std::string IntegerText(const ConfigKey& key, int64_t value) {
  return key.unit == Unit::kBytes ? BytesText(value) : absl::StrCat(value);
}

// A value as a person writes it.
struct TextOf {
  const ConfigKey& key;
  std::string operator()(bool value) const { return value ? "true" : "false"; }
  std::string operator()(int64_t value) const {
    return key.has_auto && value == 0 ? "auto" : IntegerText(key, value);
  }
  std::string operator()(absl::Duration value) const { return DurationText(value); }
  std::string operator()(const std::string& value) const { return value; }
  std::string operator()(const Texts& value) const { return absl::StrJoin(value, ", "); }
};

// The other way round. Each says what it wants when the text is not it; empty: done.
struct SetFromText {
  const ConfigKey& key;
  const Texts& texts;

  std::string operator()(bool& value) const {
    return absl::SimpleAtob(texts.back(), &value) ? "" : "is true or false";
  }
  std::string operator()(int64_t& value) const {
    const std::string& text = texts.back();
    if (key.has_auto && (text == "auto" || text == "0")) {
      value = 0;
      return "";
    }
    int64_t number = 0;
    if (key.unit == Unit::kBytes) {
      auto bytes = ParseBytes(text);
      if (!bytes.ok()) return R"(is a size, such as "8GiB", "512MB" or 1000000)";
      number = *bytes;
    } else if (!absl::SimpleAtoi(text, &number)) {
      return key.has_auto ? "is a whole number or \"auto\"" : "is a whole number";
    }
    if (number < key.min || number > key.max) {
      if (key.max == kAnySize) return absl::StrCat("is at least ", IntegerText(key, key.min));
      return absl::StrCat("is from ", IntegerText(key, key.min), " to ", IntegerText(key, key.max));
    }
    value = number;
    return "";
  }
  std::string operator()(absl::Duration& value) const {
    if (key.has_auto && texts.back() == "never") {
      value = absl::InfiniteDuration();
      return "";
    }
    absl::Duration duration;
    const bool parsed = absl::ParseDuration(texts.back(), &duration);
    if (parsed && duration == absl::ZeroDuration() && key.zero_is_never) {
      value = absl::InfiniteDuration();
      return "";
    }
    if (!parsed || duration <= absl::ZeroDuration()) {
      return key.has_auto ? R"(is a time above zero, such as "30s" or "10m", or "never")"
                          : R"(is a time above zero, such as "30s", "10m" or "24h")";
    }
    value = duration;
    return "";
  }
  std::string operator()(std::string& value) const {
    const std::string& text = texts.back();
    if (!key.choices.empty() &&
        std::find(key.choices.begin(), key.choices.end(), text) == key.choices.end()) {
      return absl::StrCat("is one of ", absl::StrJoin(key.choices, ", "));
    }
    value = text;
    return "";
  }
  std::string operator()(Texts& value) const {
    value = texts;
    return "";
  }
};

absl::Status Set(const ConfigKey& key, const Texts& texts, Config& config) {
  const std::string wanted = std::visit(
      [&](auto field) {
        return SetFromText{key, texts}(config.*field);
      },
      key.field);
  if (wanted.empty()) return absl::OkStatus();
  return Invalid(key.name, absl::StrCat(wanted, ", not '", texts.back(), "'"));
}

std::string Text(const ConfigKey& key, const Config& config) {
  return std::visit([&](auto field) { return TextOf{key}(config.*field); }, key.field);
}

// ---- TOML ----

// The texts of a TOML value, when its type is one that the key takes.
std::optional<Texts> TomlTexts(const ConfigKey& key, const toml::node& node) {
  if (Holds<bool>(key)) {
    if (auto value = node.value_exact<bool>()) return Texts{*value ? "true" : "false"};
    return std::nullopt;
  }
  if (Holds<int64_t>(key)) {
    if (auto value = node.value_exact<int64_t>()) return Texts{absl::StrCat(*value)};
    if (key.unit == Unit::kNone && !key.has_auto) return std::nullopt;
  }
  if (Holds<Texts>(key)) {
    const toml::array* array = node.as_array();
    if (array == nullptr) return std::nullopt;
    Texts texts;
    for (const toml::node& element : *array) {
      auto text = element.value_exact<std::string>();
      if (!text) return std::nullopt;
      texts.push_back(*std::move(text));
    }
    return texts;
  }
  if (auto value = node.value_exact<std::string>()) return Texts{*std::move(value)};
  return std::nullopt;
}

const char* TomlType(const ConfigKey& key) {
  if (Holds<bool>(key)) return "true or false";
  if (Holds<Texts>(key)) return "an array of strings";
  if (Holds<int64_t>(key)) return key.unit == Unit::kBytes ? "a string or an integer" : "an integer";
  return "a string";
}

absl::Status At(const std::string& file, const toml::source_region& source, const absl::Status& status) {
  ErrorDetails details = GetErrorDetails(status);
  details["file"] = file;
  details["line"] = absl::StrCat(source.begin.line);
  return MakeError(status.code(), ErrorReason(status),
                   absl::StrCat(file, ":", source.begin.line, ": ", status.message()), details);
}

std::string Quoted(absl::string_view text) {
  std::string out = "\"";
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c < 0x20 || c == 0x7f) {
      absl::StrAppend(&out, "\\u", absl::Hex(c, absl::kZeroPad4));
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + "\"";
}

std::string TomlValue(const ConfigKey& key, const Config& config) {
  if (Holds<bool>(key)) return Text(key, config);
  if (auto list = std::get_if<Texts Config::*>(&key.field)) {
    return absl::StrCat(
        "[",
        absl::StrJoin(config.**list, ", ",
                      [](std::string* out, const std::string& text) { *out += Quoted(text); }),
        "]");
  }
  std::string text = Text(key, config);
  int64_t number;
  if (Holds<int64_t>(key) && absl::SimpleAtoi(text, &number)) return text;
  return Quoted(text);
}

// ---- checks ----

absl::Status CheckListen(const Config& config) {
  if (config.listen.empty()) return Invalid("listen", "names no address");
  std::set<std::string> seen;
  for (const std::string& text : config.listen) {
    auto address = ParseAddress(text);
    if (!address.ok()) return Invalid("listen", address.status().message());
    if (!seen.insert(address->ToString()).second)
      return Invalid("listen", absl::StrCat("'", text, "' stands twice"));
    if (!address->is_local() && !config.allow_insecure_bind) {
      return Invalid("listen",
                     absl::StrCat("'", text,
                                  "' can be reached from other machines, without encryption or login; "
                                  "listen on loopback or set allow_insecure_bind"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckDevices(const Config& config) {
  if (config.devices.empty()) return Invalid("devices", "names no device");
  const auto choice = ConfiguredDevices(config);
  if (!choice.ok()) return Invalid("devices", choice.status().message());
  RamBudget ram(0);
  std::set<std::string> seen;
  for (const std::string& spec : choice->specs) {
    auto device = MakeDevice(spec, &ram);
    if (!device.ok()) return Invalid("devices", device.status().message());
    if (!seen.insert((*device)->name()).second) {
      return Invalid("devices", absl::StrCat("'", (*device)->name(), "' stands twice"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckFolders(const char* key, const Texts& folders) {
  for (const std::string& folder : folders) {
    std::error_code error;
    if (!std::filesystem::is_directory(folder, error)) {
      return Invalid(key, absl::StrCat("there is no folder '", folder, "'"));
    }
  }
  return absl::OkStatus();
}

// True when one of two folders is the other, or is in it.
bool Overlap(const std::string& a, const std::string& b) {
  std::error_code error;
  const std::filesystem::path x = std::filesystem::weakly_canonical(std::filesystem::absolute(a), error);
  const std::filesystem::path y = std::filesystem::weakly_canonical(std::filesystem::absolute(b), error);
  return std::mismatch(x.begin(), x.end(), y.begin(), y.end()).first == x.end() ||
         std::mismatch(y.begin(), y.end(), x.begin(), x.end()).first == y.end();
}

absl::Status CheckUploads(const Config& config) {
  if (config.upload_dir.empty()) return absl::OkStatus();
  for (const Texts* roots : {&config.model_roots, &config.lora_roots, &config.embedding_roots}) {
    for (const std::string& root : *roots) {
      if (!Overlap(config.upload_dir, root)) continue;
      return Invalid("upload_dir",
                     absl::StrCat("'", config.upload_dir, "' and the root '", root,
                                  "' are the same or in each other; use a folder for uploads alone"));
    }
  }
  if (config.upload_max_bytes > config.upload_total_bytes) {
    return Invalid("upload_max_bytes", absl::StrCat("is not above upload_total_bytes, which is ",
                                                    BytesText(config.upload_total_bytes)));
  }
  return absl::OkStatus();
}

absl::StatusOr<Config> ReadConfig(const std::string& file, const std::map<std::string, Texts>& flags) {
  Config config;
  if (!file.empty()) {
    std::ifstream stream(file, std::ios::binary);
    std::ostringstream text;
    if (!stream || !(text << stream.rdbuf())) {
      return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_CONFIG",
                       absl::StrCat("cannot read '", file, "'"), {{"file", file}});
    }
    RETURN_IF_ERROR(ApplyToml(text.str(), file, config));
  }
  for (const auto& [name, texts] : flags) {
    RETURN_IF_ERROR(WithPrefix(Set(*FindKey(name), texts, config), "command line: "));
  }
  RETURN_IF_ERROR(ValidateConfig(config));
  return config;
}

}  // namespace

absl::StatusOr<DeviceChoice> ConfiguredDevices(const Config& config) {
  return ChooseDevices(config.devices, WantsAutoDevices(config.devices) ? ListCudaGpus() : CudaGpus{});
}

int64_t MaxConnectionsPerPeer(const Config& config) {
  if (config.max_connections_per_peer > 0) return config.max_connections_per_peer;
  return std::max<int64_t>(1, config.max_connections * 3 / 4);
}

int64_t MaxStreamsPerConnection(const Config& config) {
  if (config.max_streams_per_connection > 0) return config.max_streams_per_connection;
  return std::max<int64_t>(128, config.max_sessions + 64);
}

absl::Span<const ConfigKey> ConfigKeys() { return Table(); }

absl::Status ApplyToml(absl::string_view text, const std::string& file, Config& config) {
  const toml::parse_result parsed = toml::parse(std::string_view(text.data(), text.size()), file);
  if (!parsed) {
    const toml::parse_error& error = parsed.error();
    return At(
        file, error.source(),
        MakeError(absl::StatusCode::kInvalidArgument, "INVALID_CONFIG", std::string(error.description())));
  }
  Config changed = config;
  for (const auto& [toml_name, node] : parsed.table()) {
    const std::string name(toml_name.str());
    const ConfigKey* key = FindKey(name);
    if (key == nullptr) {
      return At(file, toml_name.source(),
                Invalid(name, "no such key; --help lists the flags, one for each key"));
    }
    const std::optional<Texts> texts = TomlTexts(*key, node);
    if (!texts) return At(file, node.source(), Invalid(name, absl::StrCat("wants ", TomlType(*key))));
    if (absl::Status status = Set(*key, *texts, changed); !status.ok())
      return At(file, node.source(), status);
  }
  config = std::move(changed);
  return absl::OkStatus();
}

absl::Status ValidateConfig(const Config& config) {
  RETURN_IF_ERROR(CheckListen(config));
  RETURN_IF_ERROR(CheckDevices(config));
  RETURN_IF_ERROR(CheckFolders("model_roots", config.model_roots));
  RETURN_IF_ERROR(CheckFolders("lora_roots", config.lora_roots));
  RETURN_IF_ERROR(CheckFolders("embedding_roots", config.embedding_roots));
  RETURN_IF_ERROR(CheckUploads(config));
  if (config.max_image_bytes + kRequestOverhead > config.max_message_bytes) {
    return Invalid("max_image_bytes",
                   absl::StrCat("is at least ", BytesText(kRequestOverhead),
                                " below max_message_bytes, which is ", BytesText(config.max_message_bytes)));
  }
  if (config.session_idle_timeout > config.session_max_age) {
    return Invalid("session_idle_timeout", "is not above session_max_age");
  }
  return absl::OkStatus();
}

std::string ToToml(const Config& config) {
  std::string out;
  for (const ConfigKey& key : Table()) {
    absl::StrAppend(&out, "# ", key.help, "\n", key.name, " = ", TomlValue(key, config), "\n\n");
  }
  out.pop_back();
  return out;
}

std::string ConfigReference() {
  const Config defaults;
  std::string out = "| key | flag | default | |\n|---|---|---|---|\n";
  for (const ConfigKey& key : Table()) {
    // The default of `listen` depends on who asks.
    const bool listen = absl::string_view(key.name) == "listen";
    std::string text = listen ? absl::StrCat("unix:$XDG_RUNTIME_DIR/latentd.sock, 127.0.0.1:", kDefaultPort)
                              : Text(key, defaults);
    std::string help = key.help;
    if (!key.choices.empty()) absl::StrAppend(&help, " One of ", absl::StrJoin(key.choices, ", "), ".");
    absl::StrAppend(&out, "| `", key.name, "` | `--", FlagName(key), "` | ", text.empty() ? "" : "`", text,
                    text.empty() ? "" : "`", " | ", help, " |\n");
  }
  return out;
}

DaemonCommand ParseDaemonCommandLine(int argc, const char* const* argv, std::ostream& out,
                                     std::ostream& err) {
  CLI::App app{"latentd serves diffusion models over gRPC.", "latentd"};
  app.set_version_flag("--version", std::string(kVersion));
  std::string file;
  bool check = false, print = false, reference = false;
  app.add_option("--config", file, "TOML file with the keys below")->type_name("FILE");
  app.add_flag("--check", check, "Check the configuration and exit");
  app.add_flag("--print-config", print, "Print the configuration in effect as TOML and exit");
  app.add_flag("--config-reference", reference, "Print all keys as a Markdown table and exit");

  const Config defaults;
  std::map<std::string, CLI::Option*> options;
  std::map<std::string, Texts> values;
  for (const ConfigKey& key : Table()) {
    const std::string flag = FlagName(key);
    const std::string text = Text(key, defaults);
    const std::string help = text.empty() ? key.help : absl::StrCat(key.help, " [", text, "]");
    if (Holds<bool>(key)) {
      options[key.name] = app.add_flag(absl::StrCat("--", flag, ",!--no-", flag), help);
      continue;
    }
    CLI::Option* option = app.add_option(absl::StrCat("--", flag), values[key.name], help);
    option->expected(1)->type_name(TypeName(key));
    option->multi_option_policy(Holds<Texts>(key) ? CLI::MultiOptionPolicy::TakeAll
                                                  : CLI::MultiOptionPolicy::TakeLast);
    options[key.name] = option;
  }

  DaemonCommand command;
  command.exit = true;
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    command.exit_code = app.exit(error, out, err) == 0 ? 0 : kExitConfig;
    return command;
  }
  if (reference) {
    out << ConfigReference();
    return command;
  }
  std::map<std::string, Texts> flags;
  for (const auto& [name, option] : options) {
    if (option->count() > 0) flags[name] = option->results();
  }
  absl::StatusOr<Config> config = ReadConfig(file, flags);
  if (!config.ok()) {
    err << "latentd: " << config.status().message() << "\n";
    command.exit_code = kExitConfig;
    return command;
  }
  command.config = *std::move(config);
  if (print) out << ToToml(command.config);
  if (check && !print) out << "the configuration is valid\n";
  command.exit = print || check;
  return command;
}

}  // namespace latentd
