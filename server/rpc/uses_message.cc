#include "server/rpc/uses_message.h"

#include <cmath>

namespace latentd {
namespace {

v1::RequestFieldType ToProto(FieldType type) {
  switch (type) {
    case FieldType::kText:
      return v1::REQUEST_FIELD_TYPE_TEXT;
    case FieldType::kInteger:
      return v1::REQUEST_FIELD_TYPE_INTEGER;
    case FieldType::kNumber:
      return v1::REQUEST_FIELD_TYPE_NUMBER;
    case FieldType::kNumbers:
      return v1::REQUEST_FIELD_TYPE_NUMBERS;
    case FieldType::kFlag:
      return v1::REQUEST_FIELD_TYPE_FLAG;
    case FieldType::kChoice:
      return v1::REQUEST_FIELD_TYPE_CHOICE;
    case FieldType::kSize:
      return v1::REQUEST_FIELD_TYPE_SIZE;
    case FieldType::kPoint:
      return v1::REQUEST_FIELD_TYPE_POINT;
    case FieldType::kTiles:
      return v1::REQUEST_FIELD_TYPE_TILES;
  }
  return v1::REQUEST_FIELD_TYPE_UNSPECIFIED;
}

v1::RequestField ToProto(const FieldUse& use) {
  v1::RequestField proto;
  proto.set_name(std::string(use.field->name));
  proto.set_type(ToProto(use.field->type));
  proto.set_description(std::string(use.field->help));
  if (std::isfinite(use.bounds.min)) proto.set_min(use.bounds.min);
  if (std::isfinite(use.bounds.max)) proto.set_max(use.bounds.max);
  proto.set_above_min(use.bounds.above);
  proto.set_max_size(static_cast<int>(use.bounds.size));
  if (use.field->type == FieldType::kInteger) proto.set_multiple(static_cast<int>(use.multiple));
  if (const auto* number = std::get_if<double>(&use.usual)) proto.set_usual_number(*number);
  if (const auto* text = std::get_if<std::string>(&use.usual)) proto.set_usual_text(*text);
  for (const std::string& choice : use.choices) proto.add_choices(choice);
  return proto;
}

}  // namespace

void SetUses(const RequestUses& uses, v1::Model& model) {
  for (const FieldUse& use : uses.fields) *model.add_fields() = ToProto(use);
  for (const MediaUse& use : uses.media) {
    v1::MediaUse& proto = *model.add_media();
    proto.set_role(std::string(MediaRoleName(use.role)));
    proto.set_required(use.required);
    proto.set_max_count(static_cast<int>(use.most));
  }
  model.set_takes_latents(uses.init_latents);
}

}  // namespace latentd
