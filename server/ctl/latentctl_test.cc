// latentctl as a program, against a server that plays given answers over a real socket.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cache/base/sha256.h"
#include "server/ctl/latentctl_fakes.h"
#include "server/rpc/listener.h"

namespace latentd {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// A stdin on which nothing comes and which stays open.
constexpr char kNeverEnds[] = "(never ends)";

struct Outcome {
  int code = -1;
  std::string out, err;
};

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

class LatentctlTest : public ::testing::Test {
 protected:
  LatentctlTest() : folder_(absl::StrCat(::testing::TempDir(), "/latentctl_", getpid())) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    address_ = absl::StrCat("unix:", folder_, "/s.sock");
    auto listener = Listener::Bind({.addresses = {address_}});
    EXPECT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
    grpc::ServerBuilder builder;
    for (grpc::Service* service :
         std::initializer_list<grpc::Service*>{&denoise_, &models_, &cache_, &info_, &health_}) {
      builder.RegisterService(service);
    }
    listener_->AddTo(builder, grpc::InsecureServerCredentials());
    server_ = builder.BuildAndStart();
    listener_->Start();
  }

  ~LatentctlTest() override {
    listener_->Stop();
    server_->Shutdown(std::chrono::system_clock::now());
    std::filesystem::remove_all(folder_);
  }

  // Starts latentctl in the test's folder; on `terminal`, where there is one.
  pid_t Start(std::vector<std::string> args, const std::string& input, const char* terminal = nullptr) {
    const char* program = std::getenv("LATENTCTL");
    if (program == nullptr) ADD_FAILURE() << "LATENTCTL is not set; run this through ctest";
    if (input == kNeverEnds) {
      EXPECT_EQ(mkfifo((folder_ + "/in").c_str(), 0600), 0);
    } else {
      std::ofstream(folder_ + "/in") << input;
    }
    args.insert(args.begin(), "latentctl");
    std::vector<char*> argv;
    for (std::string& arg : args) argv.push_back(arg.data());
    argv.push_back(nullptr);
    std::string variable = "LATENTD_ADDRESS=" + address_;
    std::string term = "TERM=xterm";
    char* environment[] = {variable.data(), term.data(), nullptr};
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addchdir_np(&files, folder_.c_str());
    const char* in = terminal != nullptr ? terminal : "in";
    posix_spawn_file_actions_addopen(&files, 0, in, terminal || input == kNeverEnds ? O_RDWR : O_RDONLY, 0);
    if (terminal != nullptr) {
      posix_spawn_file_actions_addopen(&files, 1, terminal, O_RDWR, 0);
    } else {
      posix_spawn_file_actions_addopen(&files, 1, "out", O_WRONLY | O_CREAT | O_TRUNC, 0600);
    }
    posix_spawn_file_actions_addopen(&files, 2, "err", O_WRONLY | O_CREAT | O_TRUNC, 0600);
    pid_t pid = -1;
    // A session of its own, so that the terminal's keys are its signals.
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    if (terminal != nullptr) posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
    EXPECT_EQ(posix_spawn(&pid, program, &files, &attributes, argv.data(), environment), 0);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    return pid;
  }

  Outcome Wait(pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, ReadFile(folder_ + "/out"),
            ReadFile(folder_ + "/err")};
  }

  Outcome Ctl(std::vector<std::string> args, const std::string& input = "") {
    return Wait(Start(std::move(args), input));
  }

  std::string File(const std::string& name) { return ReadFile(folder_ + "/" + name); }

  const std::string folder_;
  std::string address_;
  FakeDenoise denoise_;
  FakeUploads models_;
  FakeCache cache_;
  FakeServer info_;
  FakeHealth health_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<grpc::Server> server_;
};

// What a person has: a window that shows things, and keys.
class Terminal {
 public:
  Terminal() : fd_(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC)) {
    EXPECT_TRUE(fd_ && grantpt(fd_.get()) == 0 && unlockpt(fd_.get()) == 0);
    name_ = ptsname(fd_.get());
    // Without it, the end of the program would end what is read.
    slave_ = Fd(open(name_.c_str(), O_RDWR | O_NOCTTY | O_CLOEXEC));
    Resize(80, 24);
  }

  const char* name() const { return name_.c_str(); }

  void Resize(int columns, int rows) {
    winsize size = {};
    size.ws_col = columns;
    size.ws_row = rows;
    ioctl(fd_.get(), TIOCSWINSZ, &size);
  }

  void Press(char key) { EXPECT_EQ(write(fd_.get(), &key, 1), 1); }

  // Whether keys are echoed and come in lines, as a shell wants it.
  bool IsCooked() const {
    termios mode = {};
    tcgetattr(slave_.get(), &mode);
    return (mode.c_lflag & (ICANON | ECHO)) == (ICANON | ECHO);
  }

  // Reads until `text` was shown since the last call; false when it does not come.
  bool Shows(const std::string& text) {
    for (int i = 0; i < 400; ++i) {
      if (const size_t at = shown_.find(text); at != std::string::npos) {
        shown_.erase(0, at + text.size());
        return true;
      }
      pollfd wait = {.fd = fd_.get(), .events = POLLIN, .revents = 0};
      char bytes[4096];
      if (poll(&wait, 1, 50) != 1) continue;
      const ssize_t size = read(fd_.get(), bytes, sizeof(bytes));
      if (size > 0) shown_.append(bytes, size);
    }
    ADD_FAILURE() << "no '" << text << "' in: " << shown_;
    return false;
  }

 private:
  Fd fd_, slave_;
  std::string name_, shown_;
};

std::vector<json> JsonLines(const std::string& text) {
  std::vector<json> out;
  for (absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    out.push_back(json::parse(std::string(line)));
  }
  return out;
}

TEST_F(LatentctlTest, GenerateSavesThePicture) {
  const Outcome outcome = Ctl({"generate", "a circle", "--seed", "7", "-o", "a.png"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(File("a.png"), TestPng());
  EXPECT_THAT(outcome.out, StartsWith("a.png  16×16  seed 7  "));
  EXPECT_THAT(outcome.err, HasSubstr("done in "));
  EXPECT_THAT(outcome.err,
              HasSubstr("LoRA night: 2 of 5 layers fit no component of the model, such as odd.layer"));
}

TEST_F(LatentctlTest, GenerateNamesTheFileAfterTheSeed) {
  EXPECT_EQ(Ctl({"generate", "a circle", "--seed", "7"}).code, 0);
  EXPECT_EQ(File("latentd-7.png"), TestPng());
}

TEST_F(LatentctlTest, GenerateSavesSeveralPictures) {
  EXPECT_EQ(Ctl({"generate", "a circle", "--count", "2", "-o", "a.png"}).code, 0);
  EXPECT_EQ(File("a-0.png"), TestPng());
  EXPECT_EQ(File("a-1.png"), TestPng());
}

TEST_F(LatentctlTest, GenerateWritesThePictureToStdout) {
  const Outcome outcome = Ctl({"generate", "a circle", "-o", "-"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, TestPng());
}

TEST_F(LatentctlTest, GenerateSendsWhatTheFlagsSayAndNothingElse) {
  std::ofstream(folder_ + "/start.png") << "png";
  ASSERT_EQ(Ctl({"generate", "--prompt",     "-dash",      "--model",         "m",         "--lora",
                 "a",        "--lora",       "b:-0.5",     "--negative",      "n",         "--steps",
                 "4",        "--guidance",   "2.5",        "--image",         "start.png", "--strength",
                 "0.4",      "--patch-mode", "sidecar",    "--preview-every", "3",         "-o",
                 "x.jpg",    "--vae-tiling", "when-needed"})
                .code,
            0);
  const v1::GenerateRequest& request = denoise_.last_request;
  EXPECT_EQ(request.model(), "m");
  EXPECT_EQ(request.patch_mode(), v1::PATCH_MODE_SIDECAR);
  ASSERT_EQ(request.loras_size(), 2);
  EXPECT_FALSE(request.loras(0).has_weight());
  EXPECT_EQ(request.loras(1).weight(), -0.5);
  const v1::GenerateParams& params = request.params();
  EXPECT_EQ(params.prompt(), "-dash");
  EXPECT_EQ(params.negative_prompt(), "n");
  EXPECT_EQ(params.steps(), 4);
  EXPECT_EQ(params.guidance(), 2.5);
  EXPECT_EQ(params.init_image().data(), "png");
  EXPECT_EQ(params.init_image().strength(), 0.4);
  EXPECT_EQ(params.preview_every(), 3);
  EXPECT_EQ(params.vae_tiling(), v1::VAE_TILING_WHEN_NEEDED);
  EXPECT_EQ(params.image_format(), v1::IMAGE_FORMAT_JPEG);
  EXPECT_FALSE(params.has_width() || params.has_height() || params.has_seed() || params.has_count() ||
               params.has_true_cfg_scale());
}

TEST_F(LatentctlTest, GenerateInJsonPrintsOneEventALineAndNothingElse) {
  const Outcome outcome = Ctl({"generate", "a circle", "--json"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const auto lines = JsonLines(outcome.out);
  ASSERT_GE(lines.size(), 6u);
  EXPECT_EQ(lines[0]["event"]["queued"]["position"], 0);
  EXPECT_EQ(lines[3]["event"]["imageHeader"]["sha256"], Sha256Hex(TestPng()));
  EXPECT_EQ(lines[4]["event"]["imageChunk"]["data"], "");
  EXPECT_TRUE(lines.back()["event"].contains("done"));
  EXPECT_EQ(outcome.err, "");
}

TEST_F(LatentctlTest, GenerateInRawJsonHasThePicture) {
  const auto lines = JsonLines(Ctl({"generate", "a circle", "--json", "--raw"}).out);
  EXPECT_THAT(lines[4]["event"]["imageChunk"]["data"].get<std::string>(), StartsWith("iVBOR"));
}

TEST_F(LatentctlTest, GenerateShowsThePictureInHalfBlocks) {
  const Outcome outcome = Ctl({"generate", "a circle", "--show"});
  EXPECT_THAT(outcome.out, HasSubstr("\x1b[38;2;200;200;200m\x1b[48;2;200;200;200m▀▀"));
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/latentd-0.png"));
}

TEST_F(LatentctlTest, ADamagedPictureIsNotSaved) {
  const Outcome outcome = Ctl({"generate", "damaged", "-o", "a.png"});
  EXPECT_EQ(outcome.code, 4);
  EXPECT_THAT(outcome.err, HasSubstr("DAMAGED_DATA"));
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/a.png"));
}

TEST_F(LatentctlTest, AStreamThatEndsTooEarlyIsAnError) {
  EXPECT_EQ(Ctl({"generate", "cut", "-o", "a.png"}).code, 4);
}

TEST_F(LatentctlTest, AServersErrorIsShownWithReasonAndDetails) {
  const Outcome outcome = Ctl({"generate", "a circle", "--model", "missing"});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_EQ(outcome.err,
            "latentctl: NOT_FOUND MODEL_NOT_FOUND: no model named 'missing'\n  model: missing\n");
}

TEST_F(LatentctlTest, AHugeErrorKeepsItsReasonOnTheWay) {
  const Outcome outcome = Ctl({"generate", "a circle", "--model", "huge"});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, StartsWith("latentctl: ABORTED HUGE_ERROR: yyy"));
}

TEST_F(LatentctlTest, AServersErrorIsAnObjectInJson) {
  const Outcome outcome = Ctl({"--json", "generate", "a circle", "--model", "missing"});
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(json::parse(outcome.err)["reason"], "MODEL_NOT_FOUND");
}

TEST_F(LatentctlTest, AnInterruptCancelsTheCall) {
  const pid_t pid = Start({"generate", "forever", "--json"}, "");
  for (int i = 0; i < 1000 && File("out").empty(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  kill(pid, SIGINT);
  EXPECT_EQ(Wait(pid).code, 130);
  for (int i = 0; i < 1000 && !denoise_.cancelled; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(denoise_.cancelled);
}

TEST_F(LatentctlTest, TheTimeoutEndsTheCall) {
  const Outcome outcome = Ctl({"--timeout", "100ms", "generate", "forever"});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("DEADLINE_EXCEEDED"));
}

TEST_F(LatentctlTest, WithoutADaemonItSaysWhereItLooked) {
  const Outcome outcome = Ctl({"--address", "unix:/no/such.sock", "info"});
  EXPECT_EQ(outcome.code, 3);
  EXPECT_THAT(outcome.err, HasSubstr("no daemon answers at unix:/no/such.sock"));
}

TEST_F(LatentctlTest, AWrongCommandLineHasItsOwnExitCode) {
  EXPECT_EQ(Ctl({}).code, 2);
  EXPECT_EQ(Ctl({"paint"}).code, 2);
  EXPECT_EQ(Ctl({"generate", "x", "--strength", "0.5"}).code, 2);
  EXPECT_EQ(Ctl({"generate", "x", "--steps", "many"}).code, 2);
}

TEST_F(LatentctlTest, AMissingInitImageIsALocalError) {
  const Outcome outcome = Ctl({"generate", "x", "--image", "nowhere.png"});
  EXPECT_EQ(outcome.code, 4);
  EXPECT_THAT(outcome.err, HasSubstr("nowhere.png"));
}

TEST_F(LatentctlTest, ModelsListsAllPages) {
  EXPECT_EQ(Ctl({"models"}).out,
            "NAME    FAMILY  VARIANT  SIZE      PARAMETERS  DEFAULTS           COMPONENTS\n"
            "first   flux             3.00 MiB  0.0 M       128×128, 12 steps  transformer bf16\n"
            "second  flux             3.00 MiB  0.0 M       128×128, 12 steps  transformer bf16\n");
  EXPECT_EQ(json::parse(Ctl({"models", "--json"}).out)["models"].size(), 2u);
}

TEST_F(LatentctlTest, LorasAreListedAndInspected) {
  EXPECT_EQ(Ctl({"loras"}).out,
            "NAME   FORMAT  FAMILY  LAYERS  SIZE      BRINGS\n"
            "night  kohya   SDXL         9  6.00 KiB  sks\n"
            "\n"
            "CANNOT BE USED  WHY\n"
            "torn            torn.safetensors is empty\n");
  EXPECT_THAT(Ctl({"loras", "--model", "m"}).out, HasSubstr("7 of 9 layers; not odd.layer, …"));
  const std::string out = Ctl({"inspect-lora", "night", "--model", "m"}).out;
  EXPECT_THAT(out, HasSubstr("24 of rank 8"));
  EXPECT_THAT(out, HasSubstr("transformer 24"));
}

TEST_F(LatentctlTest, EmbeddingsListsAllPages) {
  EXPECT_EQ(Ctl({"embeddings"}).out,
            "NAME      IN PROMPTS  FAMILY  TOKENS  SIZE\n"
            "pets/cat  <cat>       SD 1.x       2  6.00 KiB\n"
            "\n"
            "CANNOT BE USED  WHY\n"
            "torn            is torn\n");
  EXPECT_EQ(json::parse(Ctl({"embeddings", "--json"}).out)["embeddings"].size(), 2u);
}

TEST_F(LatentctlTest, UploadSendsTheFileInOrderWithItsSum) {
  std::string data(2'500'000, 'x');
  for (size_t i = 0; i < data.size(); i += 1000) data[i] = static_cast<char>(i / 1000);
  std::ofstream(folder_ + "/night.safetensors", std::ios::binary) << data;
  EXPECT_EQ(Ctl({"upload", "night.safetensors"}).out,
            "uploads/night: 2.38 MiB, 96 layers, until it is deleted\n");
  EXPECT_EQ(models_.data, data);
  EXPECT_EQ(models_.chunks, 3);
  EXPECT_EQ(models_.header.sha256(), Sha256Hex(data));
  EXPECT_EQ(models_.header.size(), static_cast<int64_t>(data.size()));
  EXPECT_FALSE(models_.header.has_ttl() || models_.header.replace());
  EXPECT_EQ(Ctl({"upload", "night.safetensors", "--name", "alice/dawn", "--ttl", "90s", "--replace"}).code,
            0);
  EXPECT_EQ(models_.header.name(), "alice/dawn");
  EXPECT_EQ(models_.header.ttl().seconds(), 90);
  EXPECT_TRUE(models_.header.replace());
}

TEST_F(LatentctlTest, UploadOfAFileThatIsThereSaysSo) {
  std::ofstream(folder_ + "/x") << std::string(5'000'000, 'x');
  EXPECT_THAT(Ctl({"upload", "x", "--name", "there"}).out, HasSubstr("which was there already"));
  EXPECT_EQ(json::parse(Ctl({"--json", "upload", "x", "--name", "there"}).out)["existed"], true);
}

TEST_F(LatentctlTest, UploadSaysWhatIsWrong) {
  std::ofstream(folder_ + "/x") << std::string(5'000'000, 'x');
  const Outcome off = Ctl({"upload", "x", "--name", "off"});
  EXPECT_EQ(off.code, 1);
  EXPECT_THAT(off.err, HasSubstr("UPLOADS_OFF"));
  const Outcome missing = Ctl({"upload", "nowhere.safetensors"});
  EXPECT_EQ(missing.code, 4);
  EXPECT_THAT(missing.err, HasSubstr("nowhere.safetensors"));
  EXPECT_EQ(Ctl({"upload", "."}).code, 4);
  EXPECT_EQ(Ctl({"upload"}).code, 2);
  EXPECT_EQ(Ctl({"upload", "x", "--ttl", "soon"}).code, 2);
}

TEST_F(LatentctlTest, DeleteTakesTheWholeName) {
  EXPECT_EQ(Ctl({"delete", "uploads/night"}).out, "deleted uploads/night\n");
  const Outcome own = Ctl({"delete", "night"});
  EXPECT_EQ(own.code, 1);
  EXPECT_THAT(own.err, HasSubstr("NOT_AN_UPLOAD"));
}

TEST_F(LatentctlTest, CacheShowsRecordsAndWhoHoldsThem) {
  const std::string out = Ctl({"cache"}).out;
  EXPECT_THAT(out, HasSubstr("0 B in use, 0 B reserved, of 8.00 GiB"));
  EXPECT_THAT(out, HasSubstr("night@1/lora  lora  patches  160.0 KiB      1        0.0 ms  session-1"));
}

TEST_F(LatentctlTest, CacheTrimsAndDrops) {
  EXPECT_EQ(Ctl({"cache", "--trim"}).out, "freed 7 B\n");
  EXPECT_EQ(Ctl({"cache", "--trim", "2MiB"}).out, "freed 2.00 MiB\n");
  EXPECT_THAT(Ctl({"cache", "--drop", "m"}).out, HasSubstr("evicted 4 records"));
  EXPECT_EQ(Ctl({"cache", "--trim", "lots"}).code, 2);
}

TEST_F(LatentctlTest, LoadSaysWhatIsThereNow) {
  EXPECT_EQ(Ctl({"load", "m", "--component", "transformer", "-C", "vae", "--device", "sim:0", "--pin"}).out,
            "loaded 1 of 2 records, 3.00 MiB in all, also on sim:0; pinned until they are unloaded\n");
  EXPECT_EQ(cache_.last_load.name(), "m");
  ASSERT_EQ(cache_.last_load.components_size(), 2);
  EXPECT_EQ(cache_.last_load.components(1), "vae");
  EXPECT_EQ(cache_.last_load.device(), "sim:0");
  EXPECT_TRUE(cache_.last_load.pin());
  EXPECT_EQ(Ctl({"load", "m"}).out, "loaded 1 of 2 records, 3.00 MiB in all\n");
  EXPECT_TRUE(cache_.last_load.components().empty() && cache_.last_load.device().empty());
  EXPECT_FALSE(cache_.last_load.pin());
  EXPECT_EQ(json::parse(Ctl({"--json", "load", "m"}).out)["keys"].size(), 2u);
  EXPECT_EQ(Ctl({"load", "missing"}).code, 1);
  EXPECT_EQ(Ctl({"load"}).code, 2);
}

TEST_F(LatentctlTest, UnloadSaysWhatWentAndWhatStays) {
  EXPECT_EQ(Ctl({"unload", "m"}).out, "evicted 4 records, 3.00 MiB\n");
  EXPECT_EQ(Ctl({"unload", "busy"}).out, "evicted 4 records, 3.00 MiB; 2 in use stay\n");
}

TEST_F(LatentctlTest, CapTakesSizesAsPeopleWriteThem) {
  EXPECT_EQ(Ctl({"cap", "ram", "4GiB"}).out, "cap of ram set to 4.00 GiB, was 8.00 GiB; 2.00 GiB in use\n");
  EXPECT_EQ(cache_.last_cap.budget(), "ram");
  EXPECT_EQ(cache_.last_cap.cap_bytes(), int64_t{4} << 30);
  EXPECT_EQ(
      Ctl({"cap", "sim:0", "1GiB"}).out,
      "cap of sim:0 set to 1.00 GiB, was 8.00 GiB; 2.00 GiB in use, above the cap until they are let go\n");
  EXPECT_EQ(Ctl({"cap", "ram", "lots"}).code, 2);
  EXPECT_EQ(Ctl({"cap", "ram"}).code, 2);
}

TEST_F(LatentctlTest, PlanTakesTheOptionsOfGenerate) {
  const Outcome outcome = Ctl({"plan", "a circle", "-m", "m", "--lora", "a:0.5", "--steps", "4",
                               "--vae-tiling", "always", "--patch-mode", "direct", "-o", "x.png"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, StartsWith("fits, on sim:0\n"));
  EXPECT_EQ(denoise_.last_plan.model(), "m");
  EXPECT_EQ(denoise_.last_plan.loras(0).weight(), 0.5);
  EXPECT_EQ(denoise_.last_plan.patch_mode(), v1::PATCH_MODE_DIRECT);
  EXPECT_EQ(denoise_.last_plan.params().prompt(), "a circle");
  EXPECT_EQ(denoise_.last_plan.params().steps(), 4);
  EXPECT_EQ(denoise_.last_plan.params().vae_tiling(), v1::VAE_TILING_ALWAYS);
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/x.png"));
}

TEST_F(LatentctlTest, WhetherAPlanFitsIsInTheExitCode) {
  const Outcome outcome = Ctl({"plan", "a circle", "-m", "large"});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.out, StartsWith("does not fit, on sim:0\nBUDGET_EXHAUSTED: no room\n"));
  EXPECT_EQ(outcome.err, "");
  const Outcome in_json = Ctl({"--json", "plan", "a circle", "-m", "large"});
  EXPECT_EQ(in_json.code, 1);
  EXPECT_EQ(json::parse(in_json.out)["fits"], false);
  EXPECT_EQ(Ctl({"plan", "a circle", "-m", "missing"}).code, 1);
}

TEST_F(LatentctlTest, GenerateSaysWhatWasDoneAboutMissingMemory) {
  const Outcome outcome = Ctl({"generate", "short of memory", "-o", "a.png"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("memory is short for vae on sim:0: works in tiles (no room)\n"));
  EXPECT_THAT(outcome.err, Not(HasSubstr("PHASE")));
}

TEST_F(LatentctlTest, VerboseShowsThePhases) {
  EXPECT_THAT(Ctl({"generate", "a circle", "-v", "-o", "a.png"}).err,
              HasSubstr("\nvae    sim:0   1.00 MiB\n"));
  EXPECT_THAT(Ctl({"session", "-v", "-o", "{job}.png"}, "generate one").err,
              HasSubstr("\njob-1: vae    sim:0   1.00 MiB\n"));
}

TEST_F(LatentctlTest, TopPrintsOnceWhereThereIsNoTerminal) {
  const Outcome outcome = Ctl({"top"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, StartsWith("latentd 9.9  up "));
  EXPECT_THAT(outcome.out, HasSubstr("\nloads -/s (0)  "));
  EXPECT_THAT(outcome.out, HasSubstr("\nnight@1/lora              lora  "));
  EXPECT_THAT(outcome.out, HasSubstr("\nabc      job-1                denoising   3/12  "));
  EXPECT_THAT(outcome.out, Not(HasSubstr("\x1b")));
  EXPECT_THAT(Ctl({"top", "--once", "--interval", "0.1"}).out, HasSubstr("\nloads 0.0/s (0)  "));
  EXPECT_EQ(Ctl({"top", "--interval", "0"}).code, 2);
  EXPECT_EQ(Ctl({"--address", "unix:/no/such.sock", "top"}).code, 3);
}

TEST_F(LatentctlTest, TopInJsonIsOneObject) {
  const auto top = json::parse(Ctl({"--json", "top"}).out);
  EXPECT_EQ(top["info"]["version"], "9.9");
  EXPECT_EQ(top["sessions"][0]["jobs"][0]["jobId"], "job-1");
  EXPECT_EQ(top["cache"]["records"][0]["kind"], "lora");
}

TEST_F(LatentctlTest, TopFillsTheTerminalAndGivesItBack) {
  Terminal terminal;
  const pid_t pid = Start({"top", "--interval", "0.1"}, "", terminal.name());
  EXPECT_TRUE(terminal.Shows("\x1b[?1049h"));
  EXPECT_TRUE(terminal.Shows("latentd 9.9  up "));
  EXPECT_TRUE(terminal.Shows("loads 0.0/s (0)  "));
  EXPECT_FALSE(terminal.IsCooked());
  EXPECT_TRUE(terminal.Shows("  DEVICE     AGE"));
  terminal.Resize(160, 24);
  EXPECT_TRUE(terminal.Shows("  PEER"));
  terminal.Press('q');
  EXPECT_EQ(Wait(pid).code, 0);
  EXPECT_TRUE(terminal.Shows("\x1b[?25h\x1b[?1049l"));
  EXPECT_TRUE(terminal.IsCooked());
}

TEST_F(LatentctlTest, TopOutlivesTheServerAndEndsWithAnInterrupt) {
  Terminal terminal;
  const pid_t pid = Start({"top", "--interval", "0.1"}, "", terminal.name());
  EXPECT_TRUE(terminal.Shows("latentd 9.9  up "));
  listener_->Stop();
  server_->Shutdown(std::chrono::system_clock::now());
  EXPECT_TRUE(terminal.Shows("no answer, trying again, this is "));
  EXPECT_TRUE(terminal.Shows("NO_SERVER"));
  terminal.Press('\x03');
  EXPECT_EQ(Wait(pid).code, 0);
  EXPECT_TRUE(terminal.Shows("\x1b[?25h\x1b[?1049l"));
  EXPECT_TRUE(terminal.IsCooked());
}

TEST_F(LatentctlTest, SessionsShowsJobsAndCancelsThem) {
  const std::string out = Ctl({"sessions"}).out;
  EXPECT_THAT(out, HasSubstr("busy"));
  EXPECT_THAT(out, HasSubstr("job-1  denoising  3/12"));
  EXPECT_EQ(Ctl({"sessions", "--cancel", "abc", "job-1"}).code, 0);
  EXPECT_EQ(Ctl({"sessions", "--cancel", "xyz", "job-1"}).code, 1);
}

TEST_F(LatentctlTest, HealthIsInTheExitCode) {
  EXPECT_EQ(Ctl({"health"}).code, 0);
  EXPECT_EQ(Ctl({"health"}).out, "SERVING\n");
  EXPECT_EQ(Ctl({"health", "some.Service"}).code, 1);
  EXPECT_EQ(Ctl({"--address", "unix:/no/such.sock", "health"}).code, 1);
}

TEST_F(LatentctlTest, InfoShowsTheVersionAndWhyTheDevicesAreThose) {
  const std::string out = Ctl({"info"}).out;
  EXPECT_THAT(out, HasSubstr("version         9.9\n"));
  EXPECT_THAT(out, HasSubstr("devices chosen  auto: the CPU, as there is no GPU\n"));
  EXPECT_EQ(json::parse(Ctl({"--json", "info"}).out)["samplers"][0], "euler");
}

TEST_F(LatentctlTest, SessionDoesWhatTheLinesSay) {
  const Outcome outcome = Ctl({"session", "-m", "m", "-o", "{job}.png"},
                              "loras a:1 b:0.5\nset seed 9\ngenerate one\ngenerate two\nwait\nclose\n");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(File("job-1.png"), TestPng());
  EXPECT_EQ(File("job-2.png"), TestPng());
  EXPECT_THAT(outcome.out,
              StartsWith("session s with m, 0 LoRAs\nLoRAs set: 1\njob-1: job-1.png  16×16  seed 9"));
  EXPECT_THAT(outcome.out, HasSubstr("\nclosed\n"));
}

TEST_F(LatentctlTest, SessionFinishesItsJobsWhenStdinEnds) {
  const Outcome outcome = Ctl({"session", "--json"}, "generate one");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const auto lines = JsonLines(outcome.out);
  EXPECT_EQ(lines[0]["requestId"], "open");
  EXPECT_TRUE(lines.back()["jobEvent"]["event"].contains("done"));
}

TEST_F(LatentctlTest, SessionGoesOnAfterARequestThatFailed) {
  const Outcome outcome = Ctl({"session", "-o", "{job}.png"}, "loras missing\ngenerate one\nwait\nclose\n");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("NOT_FOUND LORA_NOT_FOUND: request-1: no LoRA named 'missing'"));
  EXPECT_EQ(File("job-1.png"), TestPng());
}

TEST_F(LatentctlTest, SessionGoesOnAfterALineItCannotRead) {
  const Outcome outcome = Ctl({"session"}, "paint\nclose\n");
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("cannot read 'paint'"));
  EXPECT_THAT(outcome.out, HasSubstr("closed"));
}

TEST_F(LatentctlTest, SessionEndsWithTheStreamThoughStdinIsOpen) {
  const Outcome outcome = Ctl({"session", "-m", "missing"}, kNeverEnds);
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("MODEL_NOT_FOUND"));
}

TEST_F(LatentctlTest, AnInterruptEndsTheSession) {
  const pid_t pid = Start({"session", "--json"}, kNeverEnds);
  for (int i = 0; i < 1000 && File("out").empty(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  kill(pid, SIGTERM);
  EXPECT_EQ(Wait(pid).code, 130);
  for (int i = 0; i < 1000 && !denoise_.cancelled; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(denoise_.cancelled);
}

}  // namespace
}  // namespace latentd
