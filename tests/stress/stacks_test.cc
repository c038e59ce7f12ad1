// LoRA sets in any order, by several sessions at once, never leave a trace.
#include <map>
#include <random>
#include <thread>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/base/sha256.h"
#include "cache/weights/weight_set.h"
#include "gtest/gtest.h"
#include "server/media/image_codec.h"
#include "tests/stress/in_process_server.h"
#include "tests/stress/weight_editor.h"

namespace latentd {
namespace {

constexpr int kSessions = 3;
constexpr int kSequences = 200;  // of all sessions together
constexpr int kJobsPerSequence = 3;

struct Set {
  std::vector<v1::LoraRef> loras;
  v1::PatchMode mode;
};

std::vector<Set> TheSets() {
  std::vector<Set> sets;
  for (const v1::PatchMode mode : {v1::PATCH_MODE_DIRECT, v1::PATCH_MODE_SIDECAR}) {
    sets.push_back({{}, mode});
    for (double weight : {1.0, 0.5, -0.75, 0.0}) {
      sets.push_back({{Lora("dusk", weight)}, mode});
      sets.push_back({{Lora("checker", weight)}, mode});
      sets.push_back({{Lora("dusk", weight), Lora("checker", 1 - weight)}, mode});
      sets.push_back({{Lora("checker", 1 - weight), Lora("dusk", weight)}, mode});
    }
  }
  return sets;
}

v1::GenerateParams JobOf(bool from_image) {
  v1::GenerateParams params = SmallJob();
  if (!from_image) return params;
  std::vector<uint8_t> pixels(64 * 64 * 3);
  for (size_t i = 0; i < pixels.size(); ++i) pixels[i] = static_cast<uint8_t>(i * 7 + i / 191);
  params.mutable_init_image()->set_data(*EncodePng(pixels, 64, 64));
  params.mutable_init_image()->set_strength(0.6);
  return params;
}

// SHA-256 of all weights of all components, by key.
std::map<std::string, std::string> HashesOfWeights(InProcessServer& server) {
  std::map<std::string, std::string> hashes;
  for (const RecordStats& record : server.stats().records) {
    if (record.use != MemoryUse::kWeights) continue;
    const LockHandle handle = server.core().cache->Peek(record.key, "test");
    const auto& weights = handle.As<WeightSet>();
    std::string all;
    for (size_t i = 0; i < weights.layout().tensors().size(); ++i) {
      const at::Tensor data = weights[Slot{static_cast<int32_t>(i)}].data.contiguous();
      all.append(static_cast<const char*>(data.const_data_ptr()), static_cast<size_t>(data.nbytes()));
    }
    hashes[record.key.ToString()] = Sha256Hex(all);
  }
  return hashes;
}

// What a run of many sequences is made of.
struct Stacks {
  Config config;
  std::string model = kDemoModel;
  std::vector<Set> sets;
  int sequences = kSequences;
};

void RunStacks(const Stacks& stacks) {
  const std::vector<Set>& sets = stacks.sets;
  std::vector<std::vector<std::string>> expected(sets.size());
  for (size_t i = 0; i < sets.size(); ++i) {
    for (bool from_image : {false, true}) {
      Config config = stacks.config;
      config.devices = {"cpu"};
      InProcessServer fresh(config);
      const Outcome outcome = fresh.Generate(JobOf(from_image), sets[i].loras, sets[i].mode, stacks.model);
      ASSERT_TRUE(outcome.status.ok()) << outcome.status;
      expected[i].push_back(outcome.sha256.at(0));
    }
  }

  InProcessServer server(stacks.config);
  for (bool from_image : {false, true}) {
    ASSERT_TRUE(server.Generate(JobOf(from_image), {}, v1::PATCH_MODE_UNSPECIFIED, stacks.model).status.ok());
  }
  const auto before = HashesOfWeights(server);
  ASSERT_EQ(before.size(), 4u);
  std::atomic<int64_t> pictures = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kSessions; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<uint32_t>(17 + t));
      for (int i = t; i < stacks.sequences; i += kSessions) {
        InProcessServer::Session session = server.Open({}, v1::PATCH_MODE_UNSPECIFIED, stacks.model);
        for (int j = 0; j < kJobsPerSequence; ++j) {
          const size_t set = random() % sets.size();
          const bool from_image = random() % 2 == 1;
          ASSERT_TRUE(session.SetLoras(sets[set].loras, sets[set].mode).ok());
          const Outcome outcome = session.Denoise(JobOf(from_image));
          ASSERT_TRUE(outcome.status.ok()) << outcome.status;
          ASSERT_EQ(outcome.sha256.at(0), expected[set][from_image ? 1 : 0])
              << "sequence " << i << ", job " << j << ", set " << set;
          ++pictures;
        }
        ASSERT_TRUE(session.End().ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pictures, stacks.sequences * kJobsPerSequence);
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
  EXPECT_EQ(HashesOfWeights(server), before) << "a base weight was written to";
  std::cout << pictures << " pictures of " << sets.size() << " sets\n";
}

TEST(Stacks, TwoHundredSequencesOfLoraSetsGiveThePicturesOfAFreshServer) {
  RunStacks({.config = InProcessServer::DefaultConfig({"sim:0=64MiB", "sim:1=24MiB"}), .sets = TheSets()});
}

// A model with every other matrix in 8-bit floats, and a LoRA of which a part is merged in all modes: what
// else is merged depends on the mode.
TEST(Stacks, MixedStorageInAllModesGivesThePicturesOfAFreshServer) {
  const ModelCopies copies({"mixed"});
  EditTensors(absl::StrCat(copies.root(), "/mixed/transformer/diffusion_pytorch_model.safetensors"),
              [](NamedTensors& tensors) {
                int matrices = 0;
                for (auto& [name, tensor] : tensors) {
                  if (tensor.dim() == 2 && ++matrices % 2 == 0) tensor = tensor.to(at::kFloat8_e4m3fn);
                }
              });
  Stacks stacks{.config = InProcessServer::DefaultConfig({"sim:0=64MiB", "sim:1=24MiB"}),
                .model = "mixed",
                .sets = {},
                .sequences = 60};
  stacks.config.model_roots = {copies.root()};
  stacks.config.lora_roots.push_back(copies.root());
  NamedTensors file = ReadTensors("deploy/demo/loras/dusk.safetensors");
  const NamedTensors layers = file;
  int pairs = 0;
  for (const auto& [name, down] : layers) {
    const size_t end = name.find(".lora_A.weight");
    if (end == std::string::npos || ++pairs % 3 != 0) continue;
    const std::string layer = name.substr(0, end), up = layer + ".lora_B.weight";
    file[layer + ".diff"] = layers.at(up).to(at::kFloat).mm(down.to(at::kFloat));
    for (const std::string& gone : {name, up, layer + ".alpha"}) file.erase(gone);
  }
  ASSERT_GT(pairs, 3);
  WriteTensors(absl::StrCat(copies.root(), "/half-full.safetensors"), file);
  for (const v1::PatchMode mode : {v1::PATCH_MODE_DIRECT, v1::PATCH_MODE_AUTO, v1::PATCH_MODE_SIDECAR}) {
    stacks.sets.push_back({{}, mode});
    for (double weight : {1.0, 0.5}) {
      stacks.sets.push_back({{Lora("half-full", weight)}, mode});
      stacks.sets.push_back({{Lora("half-full", weight), Lora("checker", weight)}, mode});
    }
  }
  RunStacks(stacks);
}

}  // namespace
}  // namespace latentd
