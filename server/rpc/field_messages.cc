#include "server/rpc/field_messages.h"

#include <type_traits>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cache/base/error.h"
#include "google/protobuf/reflection.h"

namespace latentd {
namespace {

using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// A field of a message, and the message that has it: for "init_image.strength" that of init_image.
struct Place {
  Message* message = nullptr;  // null: a message on the way to it is not there
  const FieldDescriptor* field = nullptr;
};

// REQUIRES: the table's names are GenerateParams' (a test has it).
Place Find(Message& root, absl::string_view path) {
  Message* message = &root;
  const std::vector<std::string> steps = absl::StrSplit(path, '.');
  for (size_t i = 0; i + 1 < steps.size(); ++i) {
    const FieldDescriptor* field = message->GetDescriptor()->FindFieldByName(steps[i]);
    if (!message->GetReflection()->HasField(*message, field)) return {};
    message = message->GetReflection()->MutableMessage(message, field);
  }
  return {message, message->GetDescriptor()->FindFieldByName(steps.back())};
}

// "PROMPT_SYNTAX_COMPEL" → "compel". The first value of an enumeration is the absence of one.
std::string ChoiceName(const EnumValueDescriptor& value) {
  const std::string& prefix = value.type()->value(0)->name();  // "PROMPT_SYNTAX_UNSPECIFIED"
  return absl::AsciiStrToLower(value.name().substr(prefix.rfind('_') + 1));
}

void Get(const Place& p, std::string& value) {
  value = p.message->GetReflection()->GetString(*p.message, p.field);
}
void Get(const Place& p, double& value) {
  value = p.message->GetReflection()->GetDouble(*p.message, p.field);
}
void Get(const Place& p, int64_t& value) {
  value = p.message->GetReflection()->GetInt32(*p.message, p.field);
}
void Get(const Place& p, bool& value) { value = p.message->GetReflection()->GetBool(*p.message, p.field); }
const Message& Sub(const Place& p) { return p.message->GetReflection()->GetMessage(*p.message, p.field); }
void Get(const Place& p, PixelSize& value) {
  const auto& size = static_cast<const v1::Size&>(Sub(p));
  value = {size.width(), size.height()};
}
void Get(const Place& p, PixelPoint& value) {
  const auto& point = static_cast<const v1::Point&>(Sub(p));
  value = {point.left(), point.top()};
}
void Get(const Place& p, DenoiseTiles& value) {
  const auto& tiles = static_cast<const v1::DenoiseTiles&>(Sub(p));
  if (tiles.has_width()) value.width = tiles.width();
  if (tiles.has_height()) value.height = tiles.height();
  if (tiles.has_overlap()) value.overlap = tiles.overlap();
}

void Set(const Place& p, const std::string& value) {
  const auto* reflection = p.message->GetReflection();
  if (p.field->type() != FieldDescriptor::TYPE_ENUM) return reflection->SetString(p.message, p.field, value);
  for (int i = 0; i < p.field->enum_type()->value_count(); ++i) {
    const EnumValueDescriptor& choice = *p.field->enum_type()->value(i);
    if (ChoiceName(choice) == value) reflection->SetEnum(p.message, p.field, &choice);
  }
}
void Set(const Place& p, double value) { p.message->GetReflection()->SetDouble(p.message, p.field, value); }
void Set(const Place& p, int64_t value) {
  p.message->GetReflection()->SetInt32(p.message, p.field, static_cast<int32_t>(value));
}
void Set(const Place& p, bool value) { p.message->GetReflection()->SetBool(p.message, p.field, value); }
Message& MutableSub(const Place& p) {
  return *p.message->GetReflection()->MutableMessage(p.message, p.field);
}
void Set(const Place& p, const PixelSize& value) {
  auto& size = static_cast<v1::Size&>(MutableSub(p));
  size.set_width(static_cast<int>(value.width));
  size.set_height(static_cast<int>(value.height));
}
void Set(const Place& p, const PixelPoint& value) {
  auto& point = static_cast<v1::Point&>(MutableSub(p));
  point.set_left(static_cast<int>(value.left));
  point.set_top(static_cast<int>(value.top));
}
void Set(const Place& p, const DenoiseTiles& value) {
  auto& tiles = static_cast<v1::DenoiseTiles&>(MutableSub(p));
  tiles.set_width(static_cast<int>(value.width));
  tiles.set_height(static_cast<int>(value.height));
  tiles.set_overlap(static_cast<int>(value.overlap));
}

absl::Status ReadChoice(const RequestField& field, const Place& place, std::optional<std::string>& value) {
  const int number = place.message->GetReflection()->GetEnumValue(*place.message, place.field);
  if (number == 0) return absl::OkStatus();
  const EnumValueDescriptor* choice = place.field->enum_type()->FindValueByNumber(number);
  if (choice == nullptr) return FieldError(field.path(), "unknown value");
  value = ChoiceName(*choice);
  return absl::OkStatus();
}

absl::Status ReadField(const RequestField& field, const Place& place, RequestScalars& scalars) {
  return std::visit(
      [&](auto member) -> absl::Status {
        using Member = decltype(member);
        if constexpr (std::is_same_v<Member, std::monostate>) {
          return absl::OkStatus();
        } else if constexpr (std::is_same_v<Member, std::vector<double> RequestScalars::*>) {
          const auto list =
              place.message->GetReflection()->GetRepeatedFieldRef<double>(*place.message, place.field);
          (scalars.*member).assign(list.begin(), list.end());
        } else if constexpr (std::is_same_v<Member, std::string RequestScalars::*>) {
          Get(place, scalars.*member);
        } else {
          if (place.field->type() == FieldDescriptor::TYPE_ENUM) {
            if constexpr (std::is_same_v<Member, std::optional<std::string> RequestScalars::*>) {
              return ReadChoice(field, place, scalars.*member);
            }
          } else if (place.message->GetReflection()->HasField(*place.message, place.field)) {
            Get(place, (scalars.*member).emplace());
          }
        }
        return absl::OkStatus();
      },
      field.member);
}

void WriteField(const RequestField& field, const Place& place, const RequestScalars& scalars) {
  std::visit(
      [&](auto member) {
        using Member = decltype(member);
        if constexpr (std::is_same_v<Member, std::monostate>) {
        } else if constexpr (std::is_same_v<Member, std::vector<double> RequestScalars::*>) {
          const auto* reflection = place.message->GetReflection();
          reflection->ClearField(place.message, place.field);
          for (double value : scalars.*member) reflection->AddDouble(place.message, place.field, value);
        } else if constexpr (std::is_same_v<Member, std::string RequestScalars::*>) {
          Set(place, scalars.*member);
        } else if (scalars.*member) {
          Set(place, *(scalars.*member));
        }
      },
      field.member);
}

// ------------------------------------------------------------------------------------------------ pictures

absl::Status CheckInput(const std::string& path, const v1::Input& input) {
  if (!v1::MediaRole_IsValid(input.role()) || input.role() == v1::MEDIA_ROLE_UNSPECIFIED) {
    return FieldError(absl::StrCat(path, ".role"), "says what the picture is for: MEDIA_ROLE_INIT, …");
  }
  if (input.has_strength() && input.role() != v1::MEDIA_ROLE_INIT) {
    return FieldError(absl::StrCat(path, ".strength"), "is known to an init image alone");
  }
  for (const auto& [name, given] :
       {std::pair{"gradient", input.has_gradient()}, std::pair{"paste_back", input.has_paste_back()}}) {
    if (given && input.role() != v1::MEDIA_ROLE_MASK)
      return FieldError(absl::StrCat(path, ".", name), "is known to a mask alone");
  }
  return absl::OkStatus();
}

// Moves `input` into the field for one of its role. False: there is none, or it is taken.
bool FoldInput(v1::Input& input, v1::GenerateParams& message) {
  switch (input.role()) {
    case v1::MEDIA_ROLE_INIT:
      if (message.has_init_image()) return false;
      message.mutable_init_image()->set_data(std::move(*input.mutable_data()));
      if (input.has_strength()) message.mutable_init_image()->set_strength(input.strength());
      return true;
    case v1::MEDIA_ROLE_MASK:
      if (message.has_mask_image()) return false;
      message.mutable_mask_image()->set_data(std::move(*input.mutable_data()));
      if (input.has_gradient()) message.mutable_mask_image()->set_gradient(input.gradient());
      if (input.has_paste_back()) message.mutable_mask_image()->set_paste_back(input.paste_back());
      return true;
    case v1::MEDIA_ROLE_CONTROL:
      if (message.has_control_image()) return false;
      message.mutable_control_image()->set_data(std::move(*input.mutable_data()));
      return true;
    default:
      return false;
  }
}

}  // namespace

absl::Status ReadScalars(const v1::GenerateParams& message, RequestScalars& scalars) {
  // Reflection reaches submessages by mutable ones; nothing is changed.
  auto& root = const_cast<v1::GenerateParams&>(message);
  for (const RequestField& field : RequestFields()) {
    const Place place = Find(root, field.name);
    if (place.message == nullptr) continue;
    RETURN_IF_ERROR(ReadField(field, place, scalars));
    if (const std::string why = WhyTooLarge(field, scalars); !why.empty())
      return FieldError(field.path(), why);
  }
  return absl::OkStatus();
}

void WriteScalars(const RequestScalars& scalars, v1::GenerateParams& message) {
  for (const RequestField& field : RequestFields()) {
    const Place place = Find(message, field.name);
    if (place.message != nullptr) WriteField(field, place, scalars);
  }
}

absl::Status FoldInputs(v1::GenerateParams& message) {
  if (message.inputs().empty()) return absl::OkStatus();
  for (const auto& [name, given] :
       {std::pair{"init_image", message.has_init_image()}, std::pair{"mask_image", message.has_mask_image()},
        std::pair{"control_image", message.has_control_image()}}) {
    if (given) {
      return FieldError("params.inputs", absl::StrCat("and params.", name,
                                                      " are both given; put all pictures into one "
                                                      "of the two"));
    }
  }
  google::protobuf::RepeatedPtrField<v1::Input> rest;
  for (int i = 0; i < message.inputs_size(); ++i) {
    v1::Input& input = *message.mutable_inputs(i);
    RETURN_IF_ERROR(CheckInput(absl::StrCat("params.inputs[", i, "]"), input));
    if (!FoldInput(input, message)) rest.Add(std::move(input));
  }
  message.mutable_inputs()->Swap(&rest);
  return absl::OkStatus();
}

MediaRole RoleOf(v1::MediaRole role) {
  switch (role) {
    case v1::MEDIA_ROLE_MASK:
      return MediaRole::kMask;
    case v1::MEDIA_ROLE_CONTROL:
      return MediaRole::kControl;
    case v1::MEDIA_ROLE_REFERENCE:
      return MediaRole::kReference;
    case v1::MEDIA_ROLE_FIRST_FRAME:
      return MediaRole::kFirstFrame;
    case v1::MEDIA_ROLE_LAST_FRAME:
      return MediaRole::kLastFrame;
    default:
      return MediaRole::kInit;
  }
}

v1::MediaRole ToProto(MediaRole role) {
  switch (role) {
    case MediaRole::kInit:
      return v1::MEDIA_ROLE_INIT;
    case MediaRole::kMask:
      return v1::MEDIA_ROLE_MASK;
    case MediaRole::kControl:
      return v1::MEDIA_ROLE_CONTROL;
    case MediaRole::kReference:
      return v1::MEDIA_ROLE_REFERENCE;
    case MediaRole::kFirstFrame:
      return v1::MEDIA_ROLE_FIRST_FRAME;
    case MediaRole::kLastFrame:
      return v1::MEDIA_ROLE_LAST_FRAME;
  }
  return v1::MEDIA_ROLE_UNSPECIFIED;
}

}  // namespace latentd
