#include "families/lora_test_util.h"

#include <cstdlib>
#include <fstream>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "patcher/layer_patcher.h"
#include "patcher/layer_resolver.h"

namespace latentd {

at::Tensor OfShape(const std::vector<int64_t>& shape) {
  return shape.empty() ? at::ones({}) : at::empty(shape, at::TensorOptions().device(at::kMeta));
}

Outcome MatchAll(const Tensors& file, const std::vector<PatchTarget>& targets) {
  Outcome outcome;
  const auto patch = ModelPatch::FromTensors(file);
  EXPECT_TRUE(patch.ok()) << patch.status();
  if (!patch.ok()) return outcome;
  const auto report = LayerPatcher::Match(**patch, "lora", 1, targets);
  EXPECT_TRUE(report.ok()) << report.status();
  if (!report.ok()) return outcome;
  EXPECT_EQ(report->unmatched_count, 0) << testing::PrintToString(report->unmatched);
  outcome.layers = report->layers_in_file;
  outcome.matched = report->matched;
  outcome.grown = report->grown;
  outcome.ignored = (*patch)->ignored();
  std::vector<LayerResolver> resolvers;
  resolvers.reserve(targets.size());
  for (const PatchTarget& target : targets) resolvers.emplace_back(target);
  for (const PatchLayer& layer : (*patch)->layers()) {
    ++outcome.types[layer.type];
    if (layer.rank() > 0) ++outcome.ranks[absl::StrCat(layer.rank())];
    outcome.with_alpha += layer.has_alpha ? 1 : 0;
    if (layer.type == "set scale") continue;  // a vector, whole in every layout
    for (size_t t = 0; t < resolvers.size(); ++t) {
      const size_t parts = resolvers[t].Resolve(layer.name).size();
      if (parts > 0) outcome.tensors[targets[t].component] += static_cast<int64_t>(parts);
    }
  }
  return outcome;
}

std::vector<Module> Canonical(const PatchTarget& target) {
  std::vector<Module> modules;
  for (const TensorDecl& tensor : target.layout->tensors()) {
    if (tensor.shape.size() != 2 || absl::StrContains(tensor.name, "embedding.") ||
        absl::StrContains(tensor.name, "relative_attention_bias") ||
        absl::StartsWith(tensor.name, "shared")) {
      continue;
    }
    modules.push_back({tensor.name.substr(0, tensor.name.rfind('.')), tensor.shape[0], tensor.shape[1]});
  }
  return modules;
}

std::string Flat(const std::string& name) { return absl::StrReplaceAll(name, {{".", "_"}}); }

void AddPair(Tensors& file, const std::string& down, const std::string& up, const Module& m, int64_t rank) {
  file[down] = OfShape({rank, m.columns});
  file[up] = OfShape({m.rows, rank});
}

void AddKohya(Tensors& file, const std::string& name, const Module& m) {
  AddPair(file, name + ".lora_down.weight", name + ".lora_up.weight", m);
  file[name + ".alpha"] = OfShape({});
}

Tensors Peft(const std::string& prefix, const std::vector<Module>& modules, const std::string& adapter) {
  Tensors file;
  for (const Module& m : modules) {
    AddPair(file, absl::StrCat(prefix, m.name, ".lora_A.", adapter, "weight"),
            absl::StrCat(prefix, m.name, ".lora_B.", adapter, "weight"), m);
  }
  return file;
}

namespace {

nlohmann::json ReadJson(const std::string& path) {
  std::ifstream in(path);
  return nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
}

}  // namespace

void CheckPublishedLists(const std::string& prefix, const std::vector<PatchTarget>& targets,
                         const std::function<std::string(const std::string&)>& component,
                         const std::set<std::string>& refused) {
  const char* folder = std::getenv("LATENTD_LORA_FILES");
  if (folder == nullptr) GTEST_SKIP() << "LATENTD_LORA_FILES names no folder of key lists";
  const nlohmann::json all = ReadJson(absl::StrCat(folder, "/expected.json"));
  ASSERT_TRUE(all.is_object());
  int files = 0;
  for (const auto& [name, expected] : all.items()) {
    if (!absl::StartsWith(name, prefix)) continue;
    SCOPED_TRACE(name);
    ++files;
    Tensors file;
    const nlohmann::json listed = ReadJson(absl::StrCat(folder, "/", name, ".json"));
    for (const auto& [key, shape] : listed["tensors"].items()) {
      file[key] = OfShape(shape.get<std::vector<int64_t>>());
      // The lists have no values. IA3 scales the inputs of the second feed-forward layer, outputs elsewhere.
      if (absl::EndsWith(key, ".on_input") && !absl::StrContains(key, "ff_net_2") &&
          !absl::StrContains(key, "mlp_fc2")) {
        file[key] = at::zeros({});
      }
    }
    if (refused.count(name) != 0) {
      EXPECT_EQ(ModelPatch::FromTensors(file).status().code(), absl::StatusCode::kUnimplemented);
      continue;
    }
    Counts components, tensors;
    for (const auto& [of, count] : expected["components"].items()) components[component(of)] = count;
    for (const auto& [of, count] : components) tensors[of] = count;
    for (const auto& [of, count] : expected["split_layers"].items()) tensors[component(of)] = count;
    const Outcome outcome = MatchAll(file, targets);
    EXPECT_EQ(outcome.layers, expected["layers_in_file"].get<int64_t>());
    EXPECT_EQ(outcome.matched, components);
    EXPECT_EQ(outcome.tensors, tensors);
    EXPECT_EQ(outcome.types, expected["layer_types"].get<Counts>());
    const Counts ranks = expected["ranks"].get<Counts>();  // only of layers that have one by definition
    if (!ranks.empty()) {
      EXPECT_EQ(outcome.ranks, ranks);
    }
    EXPECT_EQ(outcome.with_alpha, expected["layers_with_alpha"].get<int64_t>());
    EXPECT_EQ(outcome.ignored, expected["ignored_entries"].get<int64_t>());
  }
  EXPECT_GT(files, 0);
}

}  // namespace latentd
