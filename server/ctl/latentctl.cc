// latentctl: the command-line client of latentd.
//
// Exit codes: ctl_text.h.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cache/base/error.h"
#include "cache/device.h"
#include "server/ctl/client.h"
#include "server/ctl/commands.h"
#include "server/ctl/job.h"
#include "server/ctl/replay.h"
#include "server/ctl/session.h"
#include "server/ctl/text.h"
#include "server/ctl/top_live.h"
#include "server/version.h"

namespace latentd::ctl {
namespace {

constexpr char kFooter[] =
    R"(Exit codes: 0 done; 1 the server refused or the job failed (health: not serving;
plan: does not fit; replay: other bytes); 2 wrong command line; 3 no server reached; 4 a local file could not
be read or written, or received data is damaged; 130 interrupted.)";

// CLI11 check: "30s", "10m".
std::string CheckDuration(const std::string& text) {
  absl::Duration duration;
  if (absl::ParseDuration(text, &duration) && duration > absl::ZeroDuration()) return "";
  return absl::StrCat("'", text, "' is no time such as 30s or 10m");
}

std::optional<absl::Duration> DurationOf(const std::string& text) {
  absl::Duration duration;
  if (!absl::ParseDuration(text, &duration)) return std::nullopt;
  return duration;
}

struct Arguments {
  GlobalOptions global;
  std::string timeout;
  JobOptions job;
  std::string prompt, prompt_flag;
  std::string idle_timeout;
  std::string lora, model;
  std::optional<std::string> lora_model;
  UploadOptions upload;
  std::string upload_ttl, delete_name;
  std::string trim;  // empty with the flag given: everything
  std::string drop;
  std::vector<std::string> cancel;
  std::string service;
  v1::LoadModelRequest load;
  std::vector<std::string> components;
  bool pin = false;
  std::string unload;
  std::string cap_budget, cap;
  double interval = 0;
  bool once = false;
  std::string replay;
};

absl::StatusOr<int64_t> BytesOf(const std::string& text) {
  auto bytes = ParseBytes(text);
  if (bytes.ok()) return bytes;
  return MakeError(absl::StatusCode::kInvalidArgument, "USAGE", bytes.status().message());
}

absl::Status RunCacheCommand(const Arguments& arguments, bool trim) {
  if (!arguments.drop.empty()) return RunDrop(arguments.global, arguments.drop);
  if (!trim) return RunCache(arguments.global);
  if (arguments.trim.empty()) return RunTrim(arguments.global, std::nullopt);
  ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(arguments.trim));
  return RunTrim(arguments.global, bytes);
}

absl::Status RunCapCommand(const Arguments& arguments) {
  ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(arguments.cap));
  return RunCap(arguments.global, arguments.cap_budget, bytes);
}

int Main(int argc, char** argv) {
  CLI::App app{"latentctl talks to latentd, a daemon that serves diffusion models.", "latentctl"};
  app.footer(kFooter);
  app.require_subcommand(1);
  app.fallthrough();
  app.set_version_flag("--version", std::string(kVersion));

  Arguments arguments;
  GlobalOptions& global = arguments.global;
  app.add_option(
      "-a,--address", global.address,
      "Where the daemon listens, unix:PATH or HOST:PORT [$LATENTD_ADDRESS, else the default ones]");
  app.add_flag("--json", global.json, "Print JSON: one object, or for jobs one a line for each event");
  app.add_option("--timeout", arguments.timeout, "Give up after this time, such as 30s or 10m")
      ->check(CheckDuration);

  CLI::App* generate = app.add_subcommand("generate", "Make pictures");
  generate->add_option("prompt", arguments.prompt, "What to draw");
  generate->add_option("-p,--prompt", arguments.prompt_flag,
                       "The same, for a prompt that starts with a dash");
  AddJobFlags(*generate, arguments.job);

  CLI::App* plan = app.add_subcommand(
      "plan",
      "Ask what `generate` with these options would do with memory; the exit code is 0 when it fits, or 1");
  plan->add_option("prompt", arguments.prompt, "What to draw");
  plan->add_option("-p,--prompt", arguments.prompt_flag, "The same, for a prompt that starts with a dash");
  AddJobFlags(*plan, arguments.job);

  CLI::App* replay = app.add_subcommand("replay",
                                        "Draw a picture again that says how it was made (generate "
                                        "--metadata), and compare: the exit code is 0 when the "
                                        "bytes are equal, or 1");
  replay->add_option("file", arguments.replay, "A PNG, JPEG or WebP file")->required();
  AddInputFlags(*replay, arguments.job);
  replay->add_option("-o,--out", arguments.job.out, "File for the new picture, - for stdout");

  CLI::App* session = app.add_subcommand(
      "session",
      "Keep a session open and do what lines on stdin say: generate PROMPT, set FIELD [VALUE], "
      "loras [NAME[:WEIGHT] ...], cancel [JOB], wait, close, or a SessionRequest as JSON");
  session->add_option("--idle-timeout", arguments.idle_timeout, "Let the server close it when idle this long")
      ->check(CheckDuration);
  AddJobFlags(*session, arguments.job);

  CLI::App* models = app.add_subcommand("models", "List the models");
  CLI::App* model = app.add_subcommand(
      "model", "Show a model, and what of a request it takes: fields, ranges, defaults, pictures");
  model->add_option("name", arguments.model, "Model")->required();
  CLI::App* loras = app.add_subcommand("loras", "List the LoRAs");
  loras->add_option("-m,--model", arguments.lora_model, "Model to match them against");
  CLI::App* embeddings =
      app.add_subcommand("embeddings", "List the textual inversions, and how prompts name them");
  CLI::App* inspect = app.add_subcommand("inspect-lora", "Show what is in a LoRA file");
  inspect->add_option("name", arguments.lora, "LoRA")->required();
  inspect->add_option("-m,--model", arguments.lora_model, "Model to match it against");

  CLI::App* upload = app.add_subcommand("upload", "Send the server a LoRA file; it becomes uploads/NAME");
  upload->add_option("file", arguments.upload.file, "A .safetensors file")->required();
  upload->add_option("-n,--name", arguments.upload.name, "What to call it [the file's name]");
  upload
      ->add_option("--ttl", arguments.upload_ttl,
                   "Keep it this long, such as 1h [as long as the server keeps files]")
      ->check(CheckDuration);
  upload->add_flag("--replace", arguments.upload.replace, "Take the place of another file of that name");
  CLI::App* remove = app.add_subcommand("delete", "Delete a LoRA that was uploaded");
  remove->add_option("name", arguments.delete_name, "As `loras` shows it: uploads/NAME")->required();

  CLI::App* cache = app.add_subcommand("cache", "Show what is in memory, or take it out");
  CLI::Option* trim =
      cache->add_option("--trim", arguments.trim, "Free this much, such as 2GiB, or all that nobody holds");
  trim->expected(0, 1)->type_name("[BYTES]");
  cache->add_option("--drop", arguments.drop, "Take a model's or a LoRA's records out")->excludes(trim);

  CLI::App* load = app.add_subcommand("load", "Load a model or a LoRA ahead of its first job");
  load->add_option("name", *arguments.load.mutable_name(), "Model or LoRA")->required();
  load->add_option("-C,--component", arguments.components, "Of a model; may be given several times")
      ->allow_extra_args(false);
  load->add_option("-d,--device", *arguments.load.mutable_device(), "Make copies there, too");
  load->add_flag("--pin", arguments.pin, "Hold it until `unload`");
  CLI::App* unload =
      app.add_subcommand("unload", "Take the pin off a model or a LoRA, and out what nobody uses of it");
  unload->add_option("name", arguments.unload, "Model or LoRA")->required();
  CLI::App* cap = app.add_subcommand("cap", "Change a cap until the server ends");
  cap->add_option("budget", arguments.cap_budget, "ram, or a device with memory of its own")->required();
  cap->add_option("size", arguments.cap, "Such as 8GiB")->required()->type_name("BYTES");

  CLI::App* top = app.add_subcommand("top", "Watch memory, sessions and jobs; q leaves");
  top->footer(
      "Bars show what is in use (█), reserved (▓), free (░) and taken by other processes (x). Sizes by use "
      "are\n"
      "those in use and reserved together, or \"in use+reserved\" where there is room.");
  CLI::Option* interval =
      top->add_option("--interval", arguments.interval,
                      "Seconds between two looks [1]; with --once or --json: take two, for the rates")
          ->check(CLI::Range(0.1, 3600.0));
  top->add_flag("--once", arguments.once, "Print it and end, as is done where stdout is no terminal");

  CLI::App* sessions = app.add_subcommand("sessions", "List the sessions and their jobs");
  sessions->add_option("--cancel", arguments.cancel, "Stop a job")->expected(2)->type_name("SESSION JOB");

  CLI::App* health = app.add_subcommand("health", "Ask whether the server serves; the exit code is 0 or 1");
  health->add_option("service", arguments.service, "One service, such as latentd.v1.DenoiseService");
  CLI::App* info = app.add_subcommand("info", "Show what the server is and can do");

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  global.timeout = DurationOf(arguments.timeout);

  absl::Status status;
  if (*generate) {
    const std::string& prompt = arguments.prompt_flag.empty() ? arguments.prompt : arguments.prompt_flag;
    status = RunGenerate(global, arguments.job, prompt);
  } else if (*plan) {
    const std::string& prompt = arguments.prompt_flag.empty() ? arguments.prompt : arguments.prompt_flag;
    auto code = RunPlan(global, arguments.job, prompt);
    if (code.ok()) return *code;
    status = code.status();
  } else if (*replay) {
    auto code = RunReplay(global, arguments.job, arguments.replay);
    if (code.ok()) return *code;
    status = code.status();
  } else if (*session) {
    auto code = RunSession(global, arguments.job, DurationOf(arguments.idle_timeout));
    if (code.ok()) return *code;
    status = code.status();
  } else if (*models) {
    status = RunModels(global);
  } else if (*model) {
    status = RunModel(global, arguments.model);
  } else if (*loras) {
    status = RunLoras(global, arguments.lora_model);
  } else if (*embeddings) {
    status = RunEmbeddings(global);
  } else if (*inspect) {
    status = RunInspectLora(global, arguments.lora, arguments.lora_model);
  } else if (*upload) {
    arguments.upload.ttl = DurationOf(arguments.upload_ttl);
    status = RunUpload(global, arguments.upload);
  } else if (*remove) {
    status = RunDelete(global, arguments.delete_name);
  } else if (*cache) {
    status = RunCacheCommand(arguments, trim->count() > 0);
  } else if (*load) {
    arguments.load.mutable_components()->Assign(arguments.components.begin(), arguments.components.end());
    arguments.load.set_pin(arguments.pin);
    status = RunLoad(global, arguments.load);
  } else if (*unload) {
    status = RunUnload(global, arguments.unload);
  } else if (*cap) {
    status = RunCapCommand(arguments);
  } else if (*top) {
    TopOptions options = {.interval = std::nullopt, .once = arguments.once};
    if (interval->count() > 0) options.interval = absl::Seconds(arguments.interval);
    status = RunTop(global, options);
  } else if (*sessions) {
    status = arguments.cancel.empty() ? RunSessions(global)
                                      : RunCancel(global, arguments.cancel[0], arguments.cancel[1]);
  } else if (*health) {
    status = RunHealth(global, arguments.service);
  } else if (*info) {
    status = RunInfo(global);
  }
  if (status.ok()) return kExitOk;
  std::fputs(ErrorText(status, global.json).c_str(), stderr);
  return *health ? kExitFailed : ExitCodeOf(status);
}

}  // namespace
}  // namespace latentd::ctl

int main(int argc, char** argv) {
  // gRPC's own lines on stderr are no use to a person here; GRPC_VERBOSITY brings them back.
  setenv("GRPC_VERBOSITY", "NONE", 0);
  latentd::ctl::InstallInterruptHandler();
  return latentd::ctl::Main(argc, argv);
}
