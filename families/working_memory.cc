#include "families/working_memory.h"

#include <algorithm>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "cache/weights/weight_set.h"

namespace latentd {
namespace {

// f(info) for the matrices of a component; of a checkpoint's, which its prefix sets apart.
template <typename F>
void ForEachMatrix(const Component& component, F f) {
  if (component.files == nullptr) return;
  for (const auto& [name, entry] : component.files->tensors()) {
    if (entry.info->shape.size() >= 2 && absl::StartsWith(name, component.prefix)) f(*entry.info);
  }
}

}  // namespace

WeightUse UseOf(const Pipeline& pipeline, const std::string& component, const PhaseOptions& options) {
  WeightUse use{.converted = false, .beside_rank = options.beside_rank};
  for (const Component& c : pipeline.components()) {
    if (c.name != component) continue;
    // What lies in a file at an address that kernels do not take goes the same way as what is of another
    // type.
    ForEachMatrix(c, [&](const TensorInfo& info) {
      use.converted |= info.dtype != DType::kF32 || info.offset % kTensorAlignment != 0;
    });
  }
  return use;
}

std::string StorageTypes(const Component& component) {
  std::set<absl::string_view> types;
  ForEachMatrix(component, [&](const TensorInfo& info) { types.insert(DTypeName(info.dtype)); });
  return absl::StrJoin(types, ",");
}

}  // namespace latentd
