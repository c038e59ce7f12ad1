// What one model takes of a request: the fields of the table (request_fields.h) that it knows, with its own
// bounds, defaults and choices, and the pictures, by what they are for. GetModel shows it, so that nobody has
// to know a family by its name; requests are checked by it. Immutable; any thread.
#ifndef LATENTD_FAMILIES_REQUEST_USES_H_
#define LATENTD_FAMILIES_REQUEST_USES_H_

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "families/generate_params.h"
#include "families/request_fields.h"

namespace latentd {

// What ListModels shows: the values that Validate fills in where the request leaves them out.
struct ModelDefaults {
  int64_t width = 1024, height = 1024, steps = 28;
  double guidance = 3.5;
  double true_cfg_scale = 1.0;
  double strength = 0.75;
  int64_t max_sequence_length = 512;
  std::string sampler = "euler";
};

struct FieldUse {
  const RequestField* field = nullptr;
  FieldBounds bounds;                                            // the table's, or narrower
  int64_t multiple = 1;                                          // of an integer
  std::variant<std::monostate, double, std::string> usual = {};  // what stands for it where it is left out
  std::vector<std::string> choices = {};                         // of a text; empty: any
};

struct MediaUse {
  MediaRole role = MediaRole::kInit;
  bool required = false;
  int64_t most = 1;  // of this role in a request
};

struct RequestUses {
  std::vector<FieldUse> fields;  // in the table's order
  std::vector<MediaUse> media;
  bool init_latents = false;  // latents of another job may stand in place of an init image
  // What is said of fields that are not taken, by name, where "is not known to … models" would leave a
  // question open.
  std::map<std::string, std::string> refusals;

  // REQUIRES: the model knows it.
  FieldUse& operator[](absl::string_view name);
  const FieldUse* Find(absl::string_view name) const;
  void Refuse(absl::string_view name, std::string why);
};

// Of a model with these defaults, whose sides are multiples of `multiple` pixels: what every model takes, and
// the fields `more` besides.
RequestUses UsesOf(const ModelDefaults& defaults, int64_t multiple, absl::Span<const absl::string_view> more);

// Whether all that a request has is known to the model, and within bounds. `family` as in "FLUX.1 models".
// Not looked at: choices, multiples and what is required, which families tell with their own reasons. Errors:
// INVALID_ARGUMENT INVALID_FIELD, naming the field.
absl::Status CheckUses(const GenerateParams& params, const RequestUses& uses, absl::string_view family);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_REQUEST_USES_H_
