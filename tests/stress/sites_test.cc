// Every place that applies patches: one row for each component of each family that takes them. What holds of
// one site holds of all, because all go through PhaseResources and LayerPatcher::Apply; a family joins by
// adding its rows, and a component without a row is a failure.
//
// The patches here are files of one low-rank layer each, made for the first matrix of the component.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gtest/gtest.h"
#include "server/catalog/lora_set.h"
#include "server/runtime/phase_resources.h"
#include "tests/stress/in_process_server.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;

struct Site {
  const char* name;
  const char* model;
  const char* component;
  bool tiles = false;  // MultiDiffusion
};
constexpr Site kSites[] = {
    {"FluxClip", kDemoModel, "text_encoder"},
    {"FluxT5", kDemoModel, "text_encoder_2"},
    {"FluxTransformer", kDemoModel, "transformer"},
    {"Sd15Clip", "tiny-sd15", "text_encoder"},
    {"Sd15Unet", "tiny-sd15", "unet"},
    {"SdxlClipL", "tiny-sdxl", "text_encoder"},
    {"SdxlClipG", "tiny-sdxl", "text_encoder_2"},
    {"SdxlUnet", "tiny-sdxl", "unet"},
    {"Sd15UnetInTiles", "tiny-sd15", "unet", /*tiles=*/true},
    {"SdxlUnetInTiles", "tiny-sdxl", "unet", /*tiles=*/true},
};

void PrintTo(const Site& site, std::ostream* out) { *out << site.name; }

// The demo's models, and the tiny ones that the golden tests are made with.
Config ServerConfig() {
  Config config = InProcessServer::DefaultConfig();
  const char* goldens = std::getenv("LATENTD_GOLDENS");
  config.model_roots.push_back(goldens == nullptr ? "build/goldens" : goldens);
  return config;
}

// A safetensors file of fp32 tensors.
void WriteFile(const fs::path& path, const std::map<std::string, at::Tensor>& tensors) {
  std::string header = "{", data;
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor flat = tensor.contiguous();
    const size_t begin = data.size();
    data.append(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
    absl::StrAppend(&header, header.size() > 1 ? "," : "", "\"", name, R"(":{"dtype":"F32","shape":[)",
                    tensor.size(0), ",", tensor.size(1), R"(],"data_offsets":[)", begin, ",", data.size(),
                    "]}");
  }
  header += "}";
  const uint64_t length = header.size();
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&length), sizeof length);
  out << header << data;
}

class SiteTest : public testing::TestWithParam<Site> {
 protected:
  SiteTest() : root_(fs::path(testing::TempDir()) / absl::StrCat("sites-", getpid(), "-", GetParam().name)) {
    fs::create_directories(root_);
    server_ = std::make_unique<InProcessServer>(ConfigFor());
    model_ = *server_->core().catalog->Model(GetParam().model);
    params_.prompt = "a red circle";
    params_.seeds = {7};
    if (GetParam().tiles) params_.tiles = DenoiseTiles{48, 48, 16};
    auto run = model_->pipeline->Prepare(params_);
    EXPECT_TRUE(run.ok()) << run.status();
    run_ = *std::move(run);
    at::manual_seed(11);
    for (const char* file : {"here", "also"}) WriteFile(root_ / absl::StrCat(file, ".safetensors"), Pair(0));
    WriteFile(root_ / "narrow.safetensors", Pair(-1));  // fits no weight
    std::ofstream(root_ / "broken.safetensors") << "no such format";
  }
  ~SiteTest() override {
    server_ = nullptr;
    fs::remove_all(root_);
  }

  Config ConfigFor() const {
    Config config = ServerConfig();
    config.lora_roots = {root_.string()};
    return config;
  }

  const Component& component() const { return model_->component(GetParam().component); }

  // The component's first linear layer.
  Slot Matrix() const {
    const auto& tensors = component().layout->tensors();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const bool table =
          absl::StrContains(tensors[i].name, "embedding.") || absl::StrContains(tensors[i].name, "shared");
      if (tensors[i].shape.size() == 2 && !table) return Slot{static_cast<int32_t>(i)};
    }
    ADD_FAILURE() << "no matrix";
    return {};
  }

  // One low-rank layer for it, `wider` by so many columns.
  std::map<std::string, at::Tensor> Pair(int64_t wider) const {
    const TensorDecl& tensor = (*component().layout)[Matrix()];
    const std::string name =
        component().patch_target->dotted_prefixes.front() + tensor.name.substr(0, tensor.name.rfind('.'));
    return {{name + ".lora_A.weight", at::randn({4, tensor.shape[1] + wider})},
            {name + ".lora_B.weight", at::randn({tensor.shape[0], 4})}};
  }

  std::vector<HeldLora> Hold(const std::vector<v1::LoraRef>& refs) {
    std::vector<HeldLora> held;
    std::vector<LoraChoice> choices = *ResolveLoras(refs, *server_->core().catalog);
    for (LoraChoice& choice : choices) {
      HeldLora lora;
      static_cast<LoraUse&>(lora) = choice;
      lora.handle =
          *server_->core().cache->Lock(choice.request.key, choice.request.loader, {.owner = "session"});
      lora.report =
          *LayerPatcher::Match(lora.handle.As<ModelPatch>(), lora.name, lora.weight, model_->patch_targets);
      held.push_back(std::move(lora));
    }
    return held;
  }

  std::unique_ptr<PhaseResources> Phase(const std::vector<HeldLora>& loras, PatchMode mode) {
    return std::make_unique<PhaseResources>(
        PhaseResources::Setup{.core = &server_->core(),
                              .model = model_.get(),
                              .run = run_.get(),
                              .phase = Phase(),
                              .component = GetParam().component,
                              .device = &server_->sim(0),
                              .loras = &loras,
                              .patch_mode = mode,
                              .owner = "session",
                              .stop = {},
                              .on_loading = [](int64_t, int64_t) {},
                              .on_adapted = [](v1::JobEvent::Adapted) {}});
  }

  InProcessServer::Session Open(const std::vector<v1::LoraRef>& loras) {
    return server_->Open(loras, v1::PATCH_MODE_UNSPECIFIED, GetParam().model);
  }
  static v1::GenerateParams Params() {
    v1::GenerateParams params = SmallJob();
    if (!GetParam().tiles) return params;
    v1::DenoiseTiles& tiles = *params.mutable_denoise_tiles();
    tiles.set_width(48);
    tiles.set_height(48);
    tiles.set_overlap(16);
    return params;
  }
  Outcome Draw(const std::vector<v1::LoraRef>& loras = {}, v1::PatchMode mode = v1::PATCH_MODE_UNSPECIFIED) {
    return server_->Generate(Params(), loras, mode, GetParam().model);
  }

  // How many LoRAs are locked, and how many are in memory.
  std::pair<int64_t, int64_t> LoraLocks() const {
    int64_t locks = 0, records = 0;
    for (const RecordStats& record : server_->stats().records) {
      if (!absl::StartsWith(record.key.id, "lora/")) continue;
      ++records;
      locks += record.lock_count > 0 ? 1 : 0;
    }
    return {locks, records};
  }

  const fs::path root_;
  std::unique_ptr<InProcessServer> server_;
  std::shared_ptr<const OpenModel> model_;
  // The phase that reads the site's component first.
  size_t Phase() const {
    for (size_t i = 0; i < run_->phases().size(); ++i) {
      if (run_->phases()[i].components[0] == GetParam().component) return i;
    }
    ADD_FAILURE() << "nothing reads " << GetParam().component;
    return 0;
  }

  GenerateParams params_;
  std::shared_ptr<const latentd::Run> run_;  // gtest has a Run, too
};

// The patch stays where it is for as long as the region lasts, even when nobody else holds it and all that
// can be evicted is.
TEST_P(SiteTest, PinsAreHeldThroughTheRegionAndNoLonger) {
  for (const PatchMode mode : {PatchMode::kAuto, PatchMode::kDirect, PatchMode::kSidecar}) {
    std::vector<HeldLora> held = Hold({Lora("here"), Lora("also", 0.5)});
    std::vector<PatchReport> reports = {held[1].report, held[0].report};  // in order of name
    const std::shared_ptr<const Resource> before = held[0].handle.resource();
    auto phase = Phase(held, mode);
    ASSERT_TRUE(phase->Acquire(&reports).ok());
    const at::Tensor value = phase->view()(Matrix()).clone();
    held[0].handle.Release();
    held[1].handle.Release();
    server_->core().cache->Trim(MemoryBudget::kUnlimited);
    server_->core().cache->Offload(server_->sim(0), MemoryBudget::kUnlimited);
    EXPECT_EQ(LoraLocks(), std::make_pair(int64_t{2}, int64_t{2}));  // by the overlay alone
    EXPECT_TRUE(at::equal(phase->view()(Matrix()), value));
    EXPECT_EQ(Hold({Lora("here")})[0].handle.resource(), before);  // the same object, not a second load
    phase->Release();
    EXPECT_EQ(LoraLocks().first, 0);
    server_->core().cache->Trim(MemoryBudget::kUnlimited);
    EXPECT_EQ(LoraLocks().second, 0);
  }
  EXPECT_EQ(server_->WhatIsNotAtRest(), "");
}

TEST_P(SiteTest, EverySiteChangesThePictureAndLeavesNoTrace) {
  const std::string plain = Draw().sha256.at(0);
  for (const v1::PatchMode mode : {v1::PATCH_MODE_DIRECT, v1::PATCH_MODE_SIDECAR}) {
    const Outcome outcome = Draw({Lora("here")}, mode);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_NE(outcome.sha256.at(0), plain);
    const v1::LoraReport& report = outcome.done.loras(0);
    EXPECT_EQ(report.matched().at(GetParam().component), 1);
    EXPECT_EQ(report.direct_tensors() + report.sidecar_tensors(), 1);
    EXPECT_EQ(server_->WhatIsNotAtRest(), "");
    EXPECT_EQ(Draw().sha256.at(0), plain);
  }
}

TEST_P(SiteTest, AnErrorInTheBodyReleasesAll) {
  auto session = Open({Lora("here"), Lora("also")});
  ASSERT_TRUE(session.opened().ok());
  ASSERT_TRUE(session.Denoise(SmallJob()).status.ok());
  v1::GenerateParams wrong = SmallJob();
  wrong.set_width(65);
  EXPECT_FALSE(session.Denoise(wrong).status.ok());
  EXPECT_EQ(LoraLocks(), std::make_pair(int64_t{2}, int64_t{2}));  // the session's, and no others
  server_->sim(0).Lose();
  EXPECT_FALSE(session.Denoise(SmallJob("another")).status.ok());
  session.End().IgnoreError();
  EXPECT_EQ(server_->WhatIsNotAtRest(), "");
}

// Of two LoRAs the second cannot be loaded, or fits nothing: the first is let go.
TEST_P(SiteTest, AnErrorInALaterLoadReleasesAll) {
  for (const char* second : {"broken", "narrow", "absent"}) {
    auto session = Open({Lora("here"), Lora(second)});
    EXPECT_FALSE(session.opened().ok()) << second;
    EXPECT_EQ(LoraLocks().first, 0);
    auto open = Open({Lora("here")});
    ASSERT_TRUE(open.opened().ok());
    EXPECT_FALSE(open.SetLoras({Lora("also"), Lora(second)}).ok());
    EXPECT_EQ(LoraLocks().first, 1);  // the old set stays
    open.End().IgnoreError();
    EXPECT_EQ(server_->WhatIsNotAtRest(), "");
  }
}

// Applying fails half-way: what was taken for it goes back.
TEST_P(SiteTest, AnErrorInApplyReleasesAll) {
  for (const PatchMode mode : {PatchMode::kDirect, PatchMode::kSidecar}) {
    const std::vector<HeldLora> held = Hold({Lora("here")});
    std::vector<PatchReport> reports = {held[0].report};
    std::stop_source stop;
    stop.request_stop();
    PhaseResources phase({.core = &server_->core(),
                          .model = model_.get(),
                          .run = run_.get(),
                          .phase = Phase(),
                          .component = GetParam().component,
                          .device = &server_->sim(0),
                          .loras = &held,
                          .patch_mode = mode,
                          .owner = "session",
                          .stop = stop.get_token(),
                          .on_loading = [](int64_t, int64_t) {},
                          .on_adapted = [](v1::JobEvent::Adapted) {}});
    EXPECT_FALSE(phase.Acquire(&reports).ok());
    phase.Release();
    EXPECT_EQ(LoraLocks().first, 1);  // the holder's own
  }
  EXPECT_EQ(server_->WhatIsNotAtRest(), "");
}

INSTANTIATE_TEST_SUITE_P(All, SiteTest, testing::ValuesIn(kSites),
                         [](const testing::TestParamInfo<Site>& info) { return info.param.name; });

TEST(Sites, EveryComponentThatTakesPatchesHasARow) {
  std::set<std::pair<std::string, std::string>> rows, models;
  for (const Site& site : kSites) rows.insert({site.model, site.component});
  InProcessServer server(ServerConfig());
  std::set<std::string> names;
  for (const Site& site : kSites) names.insert(site.model);
  for (const std::string& name : names) {
    const auto model = server.core().catalog->Model(name);
    ASSERT_TRUE(model.ok()) << model.status();
    for (const Component& component : (*model)->pipeline->components()) {
      if (component.patch_target) models.insert({name, component.name});
    }
  }
  EXPECT_EQ(rows, models);
}

}  // namespace
}  // namespace latentd
