// What families check in requests the same way. Errors: INVALID_ARGUMENT INVALID_FIELD, naming the field.
// Pure functions; any thread.
#ifndef LATENTD_FAMILIES_REQUEST_CHECKS_H_
#define LATENTD_FAMILIES_REQUEST_CHECKS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "families/generate_params.h"

namespace latentd {

// `min` and `max` belong to the range; NaN does not.
absl::Status CheckRange(absl::string_view field, double value, double min, double max);
// Above 0 and at most 1.
absl::Status CheckShare(absl::string_view field, double value);
// Sets width and height where they are missing: both of them to those of the init image, each cut to a
// multiple of `multiple`, else to the model's.
void FillSize(const PixelSize& usual, int64_t multiple, GenerateParams& params);
// Width and height are set: multiples of `multiple`, and not more of them than are drawn at once.
absl::Status CheckSize(const GenerateParams& params, int64_t multiple);
// uint8 [H, W, 3], sides of a sane length.
absl::Status CheckPicture(absl::string_view field, const at::Tensor& picture);
// What a prompt says that is perhaps not what was meant.
struct PromptNotice {
  std::string reason;  // of Warning in proto/
  std::string field;
  std::string message;
};
// Of each "<lora:NAME…>" in a prompt whose syntax takes it for text; at most a few.
std::vector<PromptNotice> LoraTagNotices(const GenerateParams& params);

// At least one seed, drawn where the request has none, and not too many.
absl::Status FillSeeds(GenerateParams& params);

// `status` said of another field, which takes the place of the one that it named: in its details, and before
// its message, where a name stands once. Code, reason and other details stay.
absl::Status AtField(const absl::Status& status, absl::string_view field);
// The message of an error without the name of its field before it, to be put into another one's. A view into
// `status`.
absl::string_view MessageWithoutField(const absl::Status& status);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_REQUEST_CHECKS_H_
