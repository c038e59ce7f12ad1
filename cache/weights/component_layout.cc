#include "cache/weights/component_layout.h"

#include "absl/base/internal/raw_logging.h"
#include "absl/strings/str_cat.h"

namespace latentd {

Slot ComponentLayout::Add(absl::string_view name, std::vector<int64_t> shape) {
  if (blocks_.empty()) BeginBlock("");
  const auto index = static_cast<int32_t>(tensors_.size());
  const bool is_new = index_.emplace(std::string(name), index).second;
  ABSL_INTERNAL_CHECK(is_new, absl::StrCat("tensor ", name, " was added twice"));
  tensors_.push_back({std::string(name), std::move(shape), static_cast<int32_t>(blocks_.size()) - 1});
  return Slot{index};
}

Slot ComponentLayout::Find(absl::string_view name) const {
  auto it = index_.find(name);
  return it == index_.end() ? Slot{} : Slot{it->second};
}

int64_t ComponentLayout::parameter_count() const {
  int64_t total = 0;
  for (const TensorDecl& tensor : tensors_) {
    int64_t n = 1;
    for (int64_t d : tensor.shape) n *= d;
    total += n;
  }
  return total;
}

}  // namespace latentd
