// The daemon's settings: a TOML file, and for every key of it a flag.
//
// One table (ConfigKeys) drives the file, the flags, --help, --print-config and the reference in the
// documentation; a key is added in the struct and in the table. A flag wins over the file, the file over the
// default. Keys are flat: `max_sessions = 8` in the file is --max-sessions 8 on the command line. Relative
// paths are relative to the current directory.
//
//   DaemonCommand command = ParseDaemonCommandLine(argc, argv, std::cout, std::cerr);
//   if (command.exit) return command.exit_code;
//   Serve(command.config);
#ifndef LATENTD_SERVER_CONFIG_H_
#define LATENTD_SERVER_CONFIG_H_

#include <cstdint>
#include <ostream>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cache/device_choice.h"
#include "server/rpc/address.h"

namespace latentd {

// What each means stands in the table in config.cc. Counts and sizes that say "auto" are 0 here.
struct Config {
  std::vector<std::string> listen = DefaultListenAddresses();
  bool allow_insecure_bind = false;
  int64_t max_connections = 256;
  int64_t max_connections_per_peer = 0;
  int64_t max_streams_per_connection = 0;
  int64_t max_request_bytes = int64_t{96} << 20;
  absl::Duration request_timeout = absl::Seconds(10);
  bool admin_over_tcp = false;
  bool reflection = true;
  bool health = true;

  std::vector<std::string> devices = {"auto"};
  int64_t threads_per_device = 0;
  int64_t loader_threads = 2;

  std::vector<std::string> model_roots;
  std::vector<std::string> lora_roots;
  std::vector<std::string> embedding_roots;
  bool follow_links = false;
  std::string default_model;
  std::string patch_mode = "auto";

  int64_t ram_cap = 0;
  int64_t conditioning_cap = 0;  // 0: a share of ram_cap
  absl::Duration memory_wait_timeout = absl::Minutes(2);
  absl::Duration keep_alive = absl::InfiniteDuration();
  std::string residency = "auto";
  std::string compute = "auto";
  std::string cpu_gemm = "auto";
  int64_t ring_blocks = 2;
  std::string state_dir = "auto";

  absl::Duration session_idle_timeout = absl::Minutes(10);
  absl::Duration session_max_age = absl::Hours(24);
  int64_t max_sessions = 64;
  int64_t max_queued_jobs_per_session = 16;
  int64_t max_queued_jobs = 256;
  absl::Duration job_timeout = absl::Hours(1);
  int64_t max_priority = 100;
  absl::Duration priority_ageing = absl::Seconds(5);
  int64_t max_unread_bytes = int64_t{4} << 20;
  absl::Duration reader_timeout = absl::Minutes(2);
  int64_t min_read_rate = int64_t{16} << 10;

  std::string upload_dir;
  int64_t upload_max_bytes = int64_t{2} << 30;
  int64_t upload_total_bytes = int64_t{16} << 30;
  absl::Duration upload_ttl = absl::Hours(24);
  int64_t max_uploads = 4;
  absl::Duration upload_idle_timeout = absl::Seconds(30);

  int64_t max_message_bytes = int64_t{48} << 20;
  int64_t max_image_bytes = int64_t{32} << 20;
  int64_t max_pixels = int64_t{2048} * 2048;
  int64_t preview_max_px = 256;
  bool picture_metadata = false;

  std::string log_level = "info";
  std::string log_format = "text";
  bool log_prompts = false;
  absl::Duration drain_timeout = absl::Seconds(30);
};

struct ConfigKey {
  using Field = std::variant<bool Config::*, int64_t Config::*, absl::Duration Config::*,
                             std::string Config::*, std::vector<std::string> Config::*>;
  enum class Unit { kNone, kBytes };

  const char* name;  // as in TOML; the flag has '-' for '_'
  Field field;
  const char* help;
  Unit unit = Unit::kNone;                // of an int64_t
  int64_t min = 0, max = 0;               // of an int64_t, inclusive
  bool has_auto = false;                  // an int64_t that may be "auto", which is 0 and may be written so;
                                          // a Duration that may be "never", which is infinite
  std::vector<std::string> choices = {};  // of a string; empty: any text
  bool zero_is_never = false;             // a Duration with has_auto: "0" is another way to say "never"
};

// "auto" of max_connections_per_peer: three quarters of max_connections. Of max_streams_per_connection: room
// for every session that the server may have and for other calls, so that a client beyond max_sessions is
// told so and does not wait in its own library.
int64_t MaxConnectionsPerPeer(const Config& config);
int64_t MaxStreamsPerConnection(const Config& config);

// What `devices` means on this machine; lists the GPUs where it says auto. Errors: INVALID_ARGUMENT.
absl::StatusOr<DeviceChoice> ConfiguredDevices(const Config& config);

// All keys, in the order in which they are shown.
absl::Span<const ConfigKey> ConfigKeys();

// Puts the keys of a TOML text into `config`. `file` is for messages. Errors: INVALID_ARGUMENT INVALID_CONFIG
// naming file, line and key; nothing is set then.
absl::Status ApplyToml(absl::string_view text, const std::string& file, Config& config);

// Checks what a single key cannot: addresses, devices, folders, limits that belong together. Errors:
// INVALID_ARGUMENT INVALID_CONFIG naming the key.
absl::Status ValidateConfig(const Config& config);

// `config` as a TOML file with every key and its help. ApplyToml gives the same config back.
std::string ToToml(const Config& config);

// All keys with flag, default and help, as a Markdown table.
std::string ConfigReference();

// What a daemon's command line asks for.
struct DaemonCommand {
  bool exit = false;  // it is done (--help, --check, …) or wrong; otherwise `config` is valid
  int exit_code = 0;  // kExitConfig when wrong
  Config config;
};

// EX_CONFIG of sysexits.h: a restart would not help.
inline constexpr int kExitConfig = 78;

// Reads the file of --config, then the flags. Prints what --help, --version, --check, --print-config and
// --config-reference print, and errors.
DaemonCommand ParseDaemonCommandLine(int argc, const char* const* argv, std::ostream& out, std::ostream& err);

}  // namespace latentd

#endif  // LATENTD_SERVER_CONFIG_H_
