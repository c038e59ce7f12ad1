#include "families/request_uses.h"

#include <algorithm>
#include <map>
#include <type_traits>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "cache/base/error.h"
#include "families/request_checks.h"

namespace latentd {
namespace {

absl::Status CheckNumber(const FieldUse& use, double value) {
  const FieldBounds& bounds = use.bounds;
  if (!bounds.above) return CheckRange(use.field->path(), value, bounds.min, bounds.max);
  if (value > bounds.min && value <= bounds.max) return absl::OkStatus();
  return FieldError(use.field->path(),
                    absl::StrCat("must be above ", bounds.min, " and at most ", bounds.max));
}

absl::Status CheckPair(const FieldUse& use, int64_t first, int64_t second) {
  if (absl::Status status = CheckNumber(use, static_cast<double>(first)); !status.ok()) return status;
  return CheckNumber(use, static_cast<double>(second));
}

// Of what sizes bound (WhyTooLarge), nothing is left to look at.
absl::Status Check(const FieldUse&, const std::string&) { return absl::OkStatus(); }
absl::Status Check(const FieldUse& use, int64_t value) {
  return CheckNumber(use, static_cast<double>(value));
}
absl::Status Check(const FieldUse& use, double value) { return CheckNumber(use, value); }
absl::Status Check(const FieldUse&, bool) { return absl::OkStatus(); }
absl::Status Check(const FieldUse& use, const std::vector<double>& list) {
  for (double value : list) RETURN_IF_ERROR(CheckNumber(use, value));
  return absl::OkStatus();
}
absl::Status Check(const FieldUse& use, const PixelSize& size) {
  return CheckPair(use, size.width, size.height);
}
absl::Status Check(const FieldUse& use, const PixelPoint& at) { return CheckPair(use, at.left, at.top); }
absl::Status Check(const FieldUse& use, const DenoiseTiles&) { return absl::OkStatus(); }  // by the family

// The value of a field that is set.
absl::Status CheckValue(const FieldUse& use, const RequestScalars& scalars) {
  return std::visit(
      [&](auto member) -> absl::Status {
        if constexpr (std::is_same_v<decltype(member), std::monostate>) {
          return absl::OkStatus();
        } else if constexpr (requires { *(scalars.*member); }) {
          return Check(use, *(scalars.*member));
        } else {
          return Check(use, scalars.*member);
        }
      },
      use.field->member);
}

absl::Status CheckMedia(const GenerateParams& params, const RequestUses& uses, absl::string_view family) {
  std::map<MediaRole, int64_t> given;
  for (const MediaInput& input : params.inputs) {
    const auto use = std::find_if(uses.media.begin(), uses.media.end(),
                                  [&](const MediaUse& one) { return one.role == input.role; });
    if (use == uses.media.end()) {
      return FieldError(
          input.field,
          absl::StrCat("is not known to ", family, " models: of pictures they take those for ",
                       absl::StrJoin(uses.media, ", ", [](std::string* out, const MediaUse& one) {
                         absl::StrAppend(out, MediaRoleName(one.role));
                       })));
    }
    if (++given[input.role] > use->most) {
      return FieldError(input.field,
                        absl::StrCat("is one more picture for ", std::string(MediaRoleName(input.role)),
                                     "; at most ", use->most, " is taken"));
    }
  }
  if (!params.init_latents.defined() || uses.init_latents) return absl::OkStatus();
  return FieldError("params.init_latents", absl::StrCat("is not known to ", family, " models"));
}

}  // namespace

const FieldUse* RequestUses::Find(absl::string_view name) const {
  const auto it = std::find_if(fields.begin(), fields.end(),
                               [&](const FieldUse& use) { return use.field->name == name; });
  return it == fields.end() ? nullptr : &*it;
}

void RequestUses::Refuse(absl::string_view name, std::string why) {
  fields.erase(std::remove_if(fields.begin(), fields.end(),
                              [&](const FieldUse& use) { return use.field->name == name; }),
               fields.end());
  refusals[std::string(name)] = std::move(why);
}

FieldUse& RequestUses::operator[](absl::string_view name) { return const_cast<FieldUse&>(*Find(name)); }

RequestUses UsesOf(const ModelDefaults& defaults, int64_t multiple,
                   absl::Span<const absl::string_view> more) {
  RequestUses uses;
  for (const RequestField& field : RequestFields()) {
    if (!field.everywhere && std::find(more.begin(), more.end(), field.name) == more.end()) continue;
    FieldUse use{.field = &field, .bounds = field.bounds};
    if (!field.choices.empty()) use.choices = absl::StrSplit(field.choices, ',');
    uses.fields.push_back(std::move(use));
  }
  for (const auto& [name, usual] :
       {std::pair<const char*, int64_t>{"width", defaults.width}, {"height", defaults.height}}) {
    FieldUse& side = uses[name];
    side.bounds.min = static_cast<double>(multiple);
    side.multiple = multiple;
    side.usual = static_cast<double>(usual);
  }
  uses["steps"].usual = static_cast<double>(defaults.steps);
  uses["guidance"].usual = defaults.guidance;
  uses["init_image.strength"].usual = defaults.strength;
  uses["sampler"].usual = defaults.sampler;
  uses["count"].usual = 1.0;
  if (uses.Find("true_cfg_scale") != nullptr) uses["true_cfg_scale"].usual = defaults.true_cfg_scale;
  if (uses.Find("max_sequence_length") != nullptr) {
    uses["max_sequence_length"].usual = static_cast<double>(defaults.max_sequence_length);
  }
  return uses;
}

absl::Status CheckUses(const GenerateParams& params, const RequestUses& uses, absl::string_view family) {
  for (const RequestField& field : RequestFields()) {
    if (!IsSet(field, params) || uses.Find(field.name) != nullptr) continue;
    const auto why = uses.refusals.find(std::string(field.name));
    return FieldError(
        field.path(),
        absl::StrCat("is ", why != uses.refusals.end() ? why->second
                                                       : absl::StrCat("not known to ", family, " models")));
  }
  RETURN_IF_ERROR(CheckMedia(params, uses, family));
  for (const FieldUse& use : uses.fields) {
    // A picture's sides are told of with their multiple (CheckSize).
    if (use.multiple > 1 || !IsSet(*use.field, params)) continue;
    if (const std::string why = WhyTooLarge(*use.field, params); !why.empty())
      return FieldError(use.field->path(), why);
    RETURN_IF_ERROR(CheckValue(use, params));
  }
  return absl::OkStatus();
}

}  // namespace latentd
