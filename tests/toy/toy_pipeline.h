// A family that is not of the usual kind, for tests of the frame alone: a vision encoder that looks at
// references of unequal sizes, two experts of which the second takes over in the middle, and a decoder that
// makes a picture in chunks of rows. Its numbers mean nothing; each of its weights is one matrix of 4 × 4.
#ifndef LATENTD_TESTS_TOY_TOY_PIPELINE_H_
#define LATENTD_TESTS_TOY_TOY_PIPELINE_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "families/family.h"

namespace latentd {

inline constexpr int64_t kToySide = 16, kToyChunks = 4;  // of a picture, in pixels; chunks that it is made in
inline constexpr const char* kToyComponents[] = {"vision", "expert_high", "expert_low", "decoder"};

class ToyPipeline : public Pipeline {
 public:
  // `folder` has NAME.safetensors with a tensor `proj.weight` for each component. `on_slice` is told of each
  // slice before it is done, by its number from 0 in the run and what it reads.
  ToyPipeline(const std::string& folder,
              std::function<void(int64_t slice, const std::string& component)> on_slice = {});

  absl::string_view family() const override { return "toy"; }
  absl::string_view variant() const override { return "two experts"; }
  const std::vector<Component>& components() const override { return components_; }
  const ModelDefaults& defaults() const override { return defaults_; }
  absl::StatusOr<std::shared_ptr<const Run>> Prepare(GenerateParams params) const override;
  std::string denoiser_component() const override { return "expert_high"; }

  Slot weight() const { return weight_; }
  const std::function<void(int64_t, const std::string&)>& on_slice() const { return on_slice_; }

 protected:
  RequestUses MakeUses() const override;

 private:
  std::vector<Component> components_;
  ModelDefaults defaults_;
  Slot weight_;
  const std::function<void(int64_t, const std::string&)> on_slice_;
};

}  // namespace latentd

#endif  // LATENTD_TESTS_TOY_TOY_PIPELINE_H_
