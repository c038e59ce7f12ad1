#include "server/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "cache/base/error.h"

namespace latentd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Outcome {
  DaemonCommand command;
  std::string out, err;
};

Outcome RunDaemon(std::vector<const char*> args) {
  args.insert(args.begin(), "latentd");
  std::ostringstream out, err;
  Outcome run;
  run.command = ParseDaemonCommandLine(static_cast<int>(args.size()), args.data(), out, err);
  run.out = out.str();
  run.err = err.str();
  return run;
}

std::string WriteFile(const std::string& text) {
  const std::string path = ::testing::TempDir() + "/config_test.toml";
  std::ofstream(path) << text;
  return path;
}

std::string TomlError(const std::string& text) {
  Config config;
  return std::string(ApplyToml(text, "f.toml", config).message());
}

TEST(ConfigToml, SetsKeysOfEveryKind) {
  Config config;
  ASSERT_TRUE(ApplyToml(R"(
listen = ["127.0.0.1:1", "unix:/tmp/x.sock"]
max_sessions = 3
reflection = false
session_idle_timeout = "90s"
ram_cap = "8GiB"
max_message_bytes = 1000000
default_model = "shapes"
)",
                        "f.toml", config)
                  .ok());
  EXPECT_THAT(config.listen, ElementsAre("127.0.0.1:1", "unix:/tmp/x.sock"));
  EXPECT_EQ(config.max_sessions, 3);
  EXPECT_FALSE(config.reflection);
  EXPECT_EQ(config.session_idle_timeout, absl::Seconds(90));
  EXPECT_EQ(config.ram_cap, int64_t{8} << 30);
  EXPECT_EQ(config.max_message_bytes, 1000000);
  EXPECT_EQ(config.default_model, "shapes");
}

TEST(ConfigToml, ZeroMeansAutoWhereThereIsAuto) {
  Config config;
  ASSERT_TRUE(ApplyToml("threads_per_device = 0\nram_cap = \"auto\"", "f.toml", config).ok());
  EXPECT_EQ(config.threads_per_device, 0);
  EXPECT_EQ(config.ram_cap, 0);
}

TEST(ConfigToml, AnUnknownKeyIsAnErrorWithFileAndLine) {
  EXPECT_THAT(TomlError("max_sessions = 1\n\nmax_sesions = 2\n"),
              StartsWith("f.toml:3: max_sesions: no such key"));
}

TEST(ConfigToml, AWrongTypeIsAnErrorWithWhatIsWanted) {
  EXPECT_EQ(TomlError("max_sessions = \"3\""), "f.toml:1: max_sessions: wants an integer");
  EXPECT_EQ(TomlError("listen = \"a:1\""), "f.toml:1: listen: wants an array of strings");
  EXPECT_EQ(TomlError("reflection = 1"), "f.toml:1: reflection: wants true or false");
  EXPECT_EQ(TomlError("\njob_timeout = 60"), "f.toml:2: job_timeout: wants a string");
}

TEST(ConfigToml, AValueOutOfRangeIsAnErrorWithTheRange) {
  EXPECT_EQ(TomlError("preview_max_px = 4"), "f.toml:1: preview_max_px: is from 8 to 2048, not '4'");
  EXPECT_EQ(TomlError("log_format = \"xml\""), "f.toml:1: log_format: is one of text, json, not 'xml'");
  EXPECT_THAT(TomlError("job_timeout = \"-1s\""), HasSubstr("above zero"));
}

TEST(ConfigToml, ABrokenFileIsAnErrorWithTheLine) {
  EXPECT_THAT(TomlError("max_sessions = 1\nlisten = [\n"), StartsWith("f.toml:"));
  Config config;
  EXPECT_EQ(ErrorReason(ApplyToml("=", "f.toml", config)), "INVALID_CONFIG");
}

TEST(ConfigToml, AFileWithAnErrorSetsNothing) {
  Config config;
  EXPECT_FALSE(ApplyToml("max_sessions = 1\nnonsense = 1\n", "f.toml", config).ok());
  EXPECT_EQ(config.max_sessions, Config().max_sessions);
}

TEST(ConfigToml, WhatIsPrintedReadsBackTheSame) {
  Config config;
  config.default_model = "a \"quoted\"\n\\ name";
  config.ram_cap = (int64_t{3} << 30) + 1;
  config.job_timeout = absl::Minutes(90);
  config.lora_roots = {"one", "two, three"};
  Config back;
  ASSERT_TRUE(ApplyToml(ToToml(config), "printed", back).ok());
  EXPECT_EQ(ToToml(back), ToToml(config));
  EXPECT_EQ(back.ram_cap, config.ram_cap);
  EXPECT_EQ(back.default_model, config.default_model);
}

TEST(ConfigValidation, AnAddressThatOthersCanReachNeedsAnExplicitKey) {
  Config config;
  config.listen = {"0.0.0.0:7411"};
  EXPECT_THAT(std::string(ValidateConfig(config).message()), HasSubstr("allow_insecure_bind"));
  config.allow_insecure_bind = true;
  EXPECT_TRUE(ValidateConfig(config).ok());
}

TEST(ConfigValidation, DevicesAreSpelledOutAndStandOnce) {
  Config config;
  config.devices = {"sim:0=1GiB", "sim:0=2GiB"};
  EXPECT_THAT(std::string(ValidateConfig(config).message()), HasSubstr("stands twice"));
  config.devices = {"toaster"};
  EXPECT_THAT(std::string(ValidateConfig(config).message()), StartsWith("devices: "));
}

TEST(ConfigValidation, DevicesAreChosenByDefaultAndAutoStandsAlone) {
  EXPECT_THAT(Config().devices, ElementsAre("auto"));
  EXPECT_TRUE(ValidateConfig(Config()).ok());
  const auto chosen = ConfiguredDevices(Config());
  ASSERT_TRUE(chosen.ok());
  EXPECT_THAT(chosen->reason, StartsWith("auto: "));
  Config config;
  config.devices = {"auto", "cpu"};
  EXPECT_THAT(std::string(ValidateConfig(config).message()), StartsWith("devices: 'auto' stands alone"));
  config.devices = {"cuda:GPU-no-such-one"};
  EXPECT_THAT(std::string(ValidateConfig(config).message()), HasSubstr("no GPU has a UUID that begins so"));
}

TEST(ConfigValidation, ARootThatIsNotThereIsAnError) {
  Config config;
  config.model_roots = {"/no/such/folder"};
  EXPECT_EQ(ValidateConfig(config).message(), "model_roots: there is no folder '/no/such/folder'");
  config = {};
  config.embedding_roots = {"/no/such/folder"};
  EXPECT_EQ(ValidateConfig(config).message(), "embedding_roots: there is no folder '/no/such/folder'");
}

TEST(ConfigValidation, AnImageFitsIntoAMessage) {
  Config config;
  config.max_message_bytes = config.max_image_bytes;
  EXPECT_THAT(std::string(ValidateConfig(config).message()), StartsWith("max_image_bytes: "));
}

TEST(ConfigValidation, UploadsHaveAFolderOfTheirOwn) {
  const std::string root = ::testing::TempDir() + "/config_test_root";
  std::filesystem::create_directories(root + "/sub");
  Config config;
  config.lora_roots = {root + "/sub"};
  for (const char* folder : {"/sub", "/sub/uploads", "/sub/../sub", "", "/nothing/../sub/x"}) {
    config.upload_dir = root + folder;
    EXPECT_THAT(std::string(ValidateConfig(config).message()), StartsWith("upload_dir: ")) << folder;
  }
  std::swap(config.lora_roots, config.embedding_roots);
  config.upload_dir = root + "/sub";
  EXPECT_THAT(std::string(ValidateConfig(config).message()), StartsWith("upload_dir: "));
  config.upload_dir = root + "/subway";
  EXPECT_TRUE(ValidateConfig(config).ok());
  config.upload_total_bytes = config.upload_max_bytes - 1;
  EXPECT_THAT(std::string(ValidateConfig(config).message()), StartsWith("upload_max_bytes: "));
}

TEST(ConfigToml, UploadsAreKeptForGoodWithZeroOrNever) {
  for (const char* text : {"upload_ttl = \"0\"", "upload_ttl = \"never\"", "upload_ttl = \"0s\""}) {
    Config config;
    ASSERT_TRUE(ApplyToml(text, "f.toml", config).ok()) << text;
    EXPECT_EQ(config.upload_ttl, absl::InfiniteDuration());
  }
  EXPECT_THAT(TomlError("keep_alive = \"0\""), HasSubstr("above zero"));
  EXPECT_THAT(TomlError("upload_ttl = \"-1s\""), HasSubstr("above zero"));
}

TEST(ConfigCommandLine, AFlagWinsOverTheFile) {
  const std::string file = WriteFile("max_sessions = 3\nmax_queued_jobs = 5\n");
  Outcome run = RunDaemon({"--config", file.c_str(), "--max-sessions", "7"});
  ASSERT_FALSE(run.command.exit) << run.err;
  EXPECT_EQ(run.command.config.max_sessions, 7);
  EXPECT_EQ(run.command.config.max_queued_jobs, 5);
}

TEST(ConfigCommandLine, AListIsAFlagGivenSeveralTimes) {
  Outcome run = RunDaemon({"--listen", "127.0.0.1:1", "--listen", "127.0.0.1:2"});
  ASSERT_FALSE(run.command.exit) << run.err;
  EXPECT_THAT(run.command.config.listen, ElementsAre("127.0.0.1:1", "127.0.0.1:2"));
}

TEST(ConfigCommandLine, ASwitchCanBeTurnedOffInTwoWays) {
  EXPECT_FALSE(RunDaemon({"--no-reflection"}).command.config.reflection);
  EXPECT_FALSE(RunDaemon({"--reflection=false"}).command.config.reflection);
  EXPECT_TRUE(RunDaemon({"--log-prompts"}).command.config.log_prompts);
}

TEST(ConfigCommandLine, EveryKeyHasAFlagInTheHelp) {
  Outcome run = RunDaemon({"--help"});
  EXPECT_EQ(run.command.exit_code, 0);
  for (const ConfigKey& key : ConfigKeys()) {
    std::string flag = std::string("--") + key.name;
    for (char& c : flag) c = c == '_' ? '-' : c;
    EXPECT_THAT(run.out, HasSubstr(flag));
  }
}

TEST(ConfigCommandLine, CheckSaysValidAndExits) {
  Outcome run = RunDaemon({"--check"});
  EXPECT_TRUE(run.command.exit);
  EXPECT_EQ(run.command.exit_code, 0);
  EXPECT_EQ(run.out, "the configuration is valid\n");
}

TEST(ConfigCommandLine, AWrongFileEndsWithTheExitCodeForConfiguration) {
  const std::string file = WriteFile("nonsense = 1\n");
  Outcome run = RunDaemon({"--check", "--config", file.c_str()});
  EXPECT_EQ(run.command.exit_code, kExitConfig);
  EXPECT_THAT(run.err, HasSubstr("config_test.toml:1: nonsense: no such key"));
}

TEST(ConfigCommandLine, AnUnknownFlagEndsWithTheExitCodeForConfiguration) {
  Outcome run = RunDaemon({"--nonsense"});
  EXPECT_TRUE(run.command.exit);
  EXPECT_EQ(run.command.exit_code, kExitConfig);
}

TEST(ConfigCommandLine, PrintConfigShowsTheFlagsEffect) {
  Outcome run = RunDaemon({"--print-config", "--max-image-bytes", "2MiB"});
  EXPECT_THAT(run.out, HasSubstr("\nmax_image_bytes = \"2MiB\"\n"));
  EXPECT_THAT(run.out, HasSubstr("\nram_cap = \"auto\"\n"));
  EXPECT_THAT(run.out, HasSubstr("\nsession_idle_timeout = \"10m\"\n"));
}

TEST(ConfigReference, HasARowForEveryKey) {
  const std::string table = ConfigReference();
  for (const ConfigKey& key : ConfigKeys())
    EXPECT_THAT(table, HasSubstr(std::string("| `") + key.name + "` |"));
}

TEST(AddressParsing, TakesUnixSocketsAndTcp) {
  EXPECT_EQ(ParseAddress("unix:/run/x.sock")->path, "/run/x.sock");
  EXPECT_EQ(ParseAddress("localhost:80")->port, 80);
  EXPECT_EQ(ParseAddress("[::1]:7411")->host, "::1");
  EXPECT_EQ(ParseAddress("[::1]:7411")->ToString(), "[::1]:7411");
}

TEST(AddressParsing, RefusesWhatIsNeither) {
  for (const char* text : {"", "unix:", "7411", ":7411", "host:", "host:x", "host:65536", "::1:80"}) {
    EXPECT_EQ(ErrorReason(ParseAddress(text).status()), "INVALID_ADDRESS") << text;
  }
  EXPECT_FALSE(ParseAddress("unix:/" + std::string(200, 'x')).ok());
}

TEST(AddressParsing, OnlyLoopbackAndUnixSocketsAreLocal) {
  for (const char* text : {"unix:/x", "127.0.0.1:1", "127.1.2.3:1", "localhost:1", "[::1]:1", "[0:0::1]:1",
                           "[::ffff:127.0.0.1]:1"}) {
    EXPECT_TRUE(ParseAddress(text)->is_local()) << text;
  }
  for (const char* text :
       {"0.0.0.0:1", "[::]:1", "example.org:1", "10.0.0.1:1", "127.evil.example:1",
        "127.0.0.1.evil.example:1", "127.1:1", "127.:1", "127.0.0.1 :1", "128.0.0.1:1",
        "localhost.evil.example:1", "[::2]:1", "[::ffff:128.0.0.1]:1", "[::1%lo]:1", "[1::1]:1"}) {
    EXPECT_FALSE(ParseAddress(text)->is_local()) << text;
  }
}

}  // namespace
}  // namespace latentd
