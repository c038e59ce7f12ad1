// What the families' LoRA tests share: files of names and shapes alone, and what becomes of them when they
// meet a full-size model.
#ifndef LATENTD_FAMILIES_LORA_TEST_UTIL_H_
#define LATENTD_FAMILIES_LORA_TEST_UTIL_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "patcher/patch_target.h"

namespace latentd {

using Tensors = std::map<std::string, at::Tensor>;
using Counts = std::map<std::string, int64_t>;

// A tensor without values; scalars have one.
at::Tensor OfShape(const std::vector<int64_t>& shape);

// What a file is to a model.
struct Outcome {
  int64_t layers = 0;
  Counts matched, tensors;  // by component: layers, and weights that they mean
  Counts types, ranks;
  int64_t with_alpha = 0, ignored = 0;
  Counts grown;  // weights that get more inputs
};
// Fails the test where the file is refused, or a layer is left over.
Outcome MatchAll(const Tensors& file, const std::vector<PatchTarget>& targets);

// A module that a file may name, and the size of its matrix.
struct Module {
  std::string name;
  int64_t rows, columns;
};
// The linear layers of a component, under their canonical names.
std::vector<Module> Canonical(const PatchTarget& target);

std::string Flat(const std::string& name);
void AddPair(Tensors& file, const std::string& down, const std::string& up, const Module& m,
             int64_t rank = 16);
void AddKohya(Tensors& file, const std::string& name, const Module& m);
Tensors Peft(const std::string& prefix, const std::vector<Module>& modules, const std::string& adapter = "");

// The key lists in the folder that LATENTD_LORA_FILES names (NAME.json with "tensors": {name: shape}, and
// expected.json) whose names start with `prefix`. Those in `refused` are UNIMPLEMENTED, all others match in
// full, with the numbers that are expected of them. `component`: what "unet", "te1" and "te2" are here. Skips
// the test without the variable.
void CheckPublishedLists(const std::string& prefix, const std::vector<PatchTarget>& targets,
                         const std::function<std::string(const std::string&)>& component,
                         const std::set<std::string>& refused);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_LORA_TEST_UTIL_H_
