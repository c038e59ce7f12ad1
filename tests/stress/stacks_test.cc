// LoRA sets in any order, by several sessions at once, never leave a trace.
#include <map>
#include <random>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/weight_set.h"
#include "gtest/gtest.h"
#include "server/image_codec.h"
#include "server/sha256.h"
#include "tests/stress/in_process_server.h"

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

TEST(Stacks, TwoHundredSequencesOfLoraSetsGiveThePicturesOfAFreshServer) {
  const std::vector<Set> sets = TheSets();
  std::vector<std::vector<std::string>> expected(sets.size());
  for (size_t i = 0; i < sets.size(); ++i) {
    for (bool from_image : {false, true}) {
      InProcessServer fresh(InProcessServer::DefaultConfig({"cpu"}));
      const Outcome outcome = fresh.Generate(JobOf(from_image), sets[i].loras, sets[i].mode);
      ASSERT_TRUE(outcome.status.ok()) << outcome.status;
      expected[i].push_back(outcome.sha256.at(0));
    }
  }

  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB", "sim:1=24MiB"}));
  for (bool from_image : {false, true}) ASSERT_TRUE(server.Generate(JobOf(from_image)).status.ok());
  const auto before = HashesOfWeights(server);
  ASSERT_EQ(before.size(), 4u);
  std::atomic<int64_t> pictures = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kSessions; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<uint32_t>(17 + t));
      for (int i = t; i < kSequences; i += kSessions) {
        InProcessServer::Session session = server.Open();
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
  EXPECT_EQ(pictures, kSequences * kJobsPerSequence);
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
  EXPECT_EQ(HashesOfWeights(server), before) << "a base weight was written to";
  std::cout << pictures << " pictures of " << sets.size() << " sets\n";
}

}  // namespace
}  // namespace latentd
