#include "server/rpc/request_bounds.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "server/catalog/names.h"
#include "server/rpc/field_messages.h"
#include "server/rpc/params.h"

namespace latentd {
namespace {

constexpr int64_t kMaxParamsBytes = 512 << 10;  // without prompts that are too long and picture files
constexpr int64_t kSmall = 16 << 10;
constexpr int kShownBlocks = 16;
constexpr int kMaxInputs = 16;

absl::Status CheckSize(absl::string_view field, size_t bytes, size_t limit) {
  if (bytes <= limit) return absl::OkStatus();
  return FieldError(field, absl::StrCat("has ", bytes, " bytes, at most ", limit, " are taken"));
}

int64_t OrNothing(int64_t bytes) { return bytes > kSmall ? bytes : 0; }

}  // namespace

absl::Status CheckNameBound(absl::string_view field, const std::string& name) {
  return CheckSize(field, name.size(), kMaxNameBytes);
}

absl::Status CheckBounds(const v1::GenerateParams& params, const Config& config) {
  RequestScalars scalars;
  RETURN_IF_ERROR(ReadScalars(params, scalars));
  if (params.inputs_size() > kMaxInputs)
    return FieldError("params.inputs", absl::StrCat("has more than ", kMaxInputs, " pictures"));
  const auto latents = static_cast<size_t>(config.max_image_bytes);
  RETURN_IF_ERROR(CheckSize("params.init_latents", params.init_latents().size(), latents));
  // Of lists, and fields to come.
  const auto rest = static_cast<int64_t>(params.ByteSizeLong()) - PictureFileBytes(params);
  return CheckSize("params", static_cast<size_t>(std::max<int64_t>(0, rest)), kMaxParamsBytes);
}

absl::Status CheckBounds(const google::protobuf::RepeatedPtrField<v1::LoraRef>& refs) {
  if (refs.size() > kMaxLoras) return FieldError("loras", absl::StrCat("at most ", kMaxLoras, " at once"));
  size_t bytes = 0;
  for (const v1::LoraRef& ref : refs) {
    RETURN_IF_ERROR(CheckNameBound("loras.name", ref.name()));
    bytes += ref.ByteSizeLong();
  }
  return CheckSize("loras", bytes, kMaxLoraRefsBytes);
}

int64_t RequestBytes(const v1::GenerateParams& params) {
  return OrNothing(static_cast<int64_t>(params.SpaceUsedLong()) - PictureFileBytes(params));
}

int64_t RequestBytes(const std::vector<v1::LoraRef>& refs) {
  int64_t bytes = 0;
  for (const v1::LoraRef& ref : refs) bytes += static_cast<int64_t>(ref.SpaceUsedLong());
  return OrNothing(bytes);
}

std::vector<v1::LoraRef> ShownRefs(const std::vector<v1::LoraRef>& refs) {
  std::vector<v1::LoraRef> shown;
  for (const v1::LoraRef& ref : refs) {
    v1::LoraRef& out = shown.emplace_back();
    if (ref.block_weights_size() <= kShownBlocks) {
      out = ref;
      continue;
    }
    out.set_name(ref.name());
    if (ref.has_weight()) out.set_weight(ref.weight());
    if (ref.has_start()) out.set_start(ref.start());
    if (ref.has_end()) out.set_end(ref.end());
    *out.mutable_only() = ref.only();
  }
  return shown;
}

}  // namespace latentd
