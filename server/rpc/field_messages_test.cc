#include "server/rpc/field_messages.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cache/base/error.h"
#include "gmock/gmock.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::util::MessageDifferencer;

const FieldDescriptor* FieldAt(absl::string_view path) {
  const Descriptor* message = v1::GenerateParams::descriptor();
  const FieldDescriptor* field = nullptr;
  for (const absl::string_view step : absl::StrSplit(path, '.')) {
    field = message == nullptr ? nullptr : message->FindFieldByName(std::string(step));
    message = field == nullptr ? nullptr : field->message_type();
  }
  return field;
}

FieldDescriptor::CppType WireType(FieldType type) {
  switch (type) {
    case FieldType::kText:
      return FieldDescriptor::CPPTYPE_STRING;
    case FieldType::kInteger:
      return FieldDescriptor::CPPTYPE_INT32;
    case FieldType::kNumber:
    case FieldType::kNumbers:
      return FieldDescriptor::CPPTYPE_DOUBLE;
    case FieldType::kFlag:
      return FieldDescriptor::CPPTYPE_BOOL;
    case FieldType::kChoice:
      return FieldDescriptor::CPPTYPE_ENUM;
    default:
      return FieldDescriptor::CPPTYPE_MESSAGE;
  }
}

TEST(RequestFields, AreFieldsOfTheMessage) {
  for (const RequestField& row : RequestFields()) {
    const FieldDescriptor* field = FieldAt(row.name);
    ASSERT_NE(field, nullptr) << std::string(row.name);
    const bool seed = row.name == "seed";
    EXPECT_EQ(field->cpp_type(), seed ? FieldDescriptor::CPPTYPE_UINT64 : WireType(row.type))
        << std::string(row.name);
    EXPECT_EQ(field->is_repeated(), row.type == FieldType::kNumbers) << std::string(row.name);
    EXPECT_FALSE(row.help.empty()) << std::string(row.name);
    if (row.type != FieldType::kChoice) continue;
    const std::vector<std::string> choices = absl::StrSplit(row.choices, ',');
    EXPECT_EQ(static_cast<int>(choices.size()), field->enum_type()->value_count() - 1)
        << std::string(row.name);
  }
}

// A field that has no row is read by nobody. Files are not the table's.
TEST(RequestFields, AreAllFieldsOfTheMessageButFiles) {
  const std::set<std::string> files = {"init_image", "mask_image", "control_image", "init_latents", "inputs"};
  for (int i = 0; i < v1::GenerateParams::descriptor()->field_count(); ++i) {
    const std::string& name = v1::GenerateParams::descriptor()->field(i)->name();
    EXPECT_EQ(FindRequestField(name) != nullptr, files.count(name) == 0) << name;
  }
}

TEST(RequestFields, HaveFlagsOfTheirOwn) {
  std::set<std::string> flags;
  for (const RequestField& row : RequestFields()) {
    if (row.flag.empty()) continue;
    for (const absl::string_view flag : absl::StrSplit(row.flag, ',')) {
      EXPECT_TRUE(flags.insert(std::string(flag)).second) << std::string(flag);
    }
  }
}

// A value of its type for each field; different ones for different `n`.
struct SetValue {
  RequestScalars& scalars;
  int n;

  void operator()(std::monostate) const {}
  void operator()(std::string RequestScalars::*member) const { scalars.*member = absl::StrCat("text ", n); }
  void operator()(std::optional<std::string> RequestScalars::*member) const {
    scalars.*member = member == &RequestScalars::prompt_syntax ? "compel" : absl::StrCat("text ", n);
  }
  void operator()(std::optional<int64_t> RequestScalars::*member) const { scalars.*member = n; }
  void operator()(std::optional<double> RequestScalars::*member) const { scalars.*member = n / 7.0; }
  void operator()(std::optional<bool> RequestScalars::*member) const { scalars.*member = n % 2 == 0; }
  void operator()(std::vector<double> RequestScalars::*member) const {
    scalars.*member = {n / 3.0, 0, 1.0 * n};
  }
  void operator()(std::optional<PixelSize> RequestScalars::*member) const {
    scalars.*member = PixelSize{n, n + 1};
  }
  void operator()(std::optional<PixelPoint> RequestScalars::*member) const {
    scalars.*member = PixelPoint{n, n + 1};
  }
  void operator()(std::optional<DenoiseTiles> RequestScalars::*member) const {
    scalars.*member = DenoiseTiles{n, n + 1, n + 2};
  }
};

TEST(FieldMessages, EachFieldGoesThereAndBackAlone) {
  int n = 1;
  for (const RequestField& row : RequestFields()) {
    if (std::holds_alternative<std::monostate>(row.member)) continue;
    RequestScalars scalars;
    std::visit(SetValue{scalars, ++n}, row.member);
    v1::GenerateParams message;
    message.mutable_init_image();
    message.mutable_mask_image();
    WriteScalars(scalars, message);
    RequestScalars back;
    ASSERT_TRUE(ReadScalars(message, back).ok());
    v1::GenerateParams again;
    again.mutable_init_image();
    again.mutable_mask_image();
    WriteScalars(back, again);
    EXPECT_TRUE(MessageDifferencer::Equals(message, again)) << std::string(row.name);
    for (const RequestField& other : RequestFields()) {
      EXPECT_EQ(IsSet(other, back), other.name == row.name)
          << std::string(row.name) << " " << std::string(other.name);
    }
  }
}

TEST(FieldMessages, WhatIsSaidOfAPictureThatIsNotThereIsLeftOut) {
  RequestScalars scalars;
  scalars.strength = 0.5;
  v1::GenerateParams message;
  WriteScalars(scalars, message);
  EXPECT_FALSE(message.has_init_image());
}

TEST(FieldMessages, TextsAndListsAreBoundedBeforeAnythingIsDoneWithThem) {
  v1::GenerateParams message;
  message.set_negative_prompt(std::string(kMaxPromptBytes + 1, 'x'));
  RequestScalars scalars;
  absl::Status status = ReadScalars(message, scalars);
  EXPECT_EQ(GetErrorDetails(status)["field"], "params.negative_prompt");
  message.clear_negative_prompt();
  scalars = {};
  for (int i = 0; i < 1001; ++i) message.add_guidance_list(1);
  status = ReadScalars(message, scalars);
  EXPECT_EQ(GetErrorDetails(status)["field"], "params.guidance_list");
  message.clear_guidance_list();
  scalars = {};
  message.set_prompt_syntax(static_cast<v1::PromptSyntax>(99));
  status = ReadScalars(message, scalars);
  EXPECT_EQ(GetErrorDetails(status)["field"], "params.prompt_syntax");
}

TEST(FoldInputs, PutsOnePictureOfARoleIntoItsField) {
  v1::GenerateParams message;
  for (const auto role : {v1::MEDIA_ROLE_MASK, v1::MEDIA_ROLE_REFERENCE, v1::MEDIA_ROLE_INIT,
                          v1::MEDIA_ROLE_INIT, v1::MEDIA_ROLE_CONTROL}) {
    v1::Input& input = *message.add_inputs();
    input.set_role(role);
    input.set_data(absl::StrCat(message.inputs_size()));
  }
  message.mutable_inputs(0)->set_gradient(true);
  message.mutable_inputs(2)->set_strength(0.25);
  ASSERT_TRUE(FoldInputs(message).ok());
  EXPECT_EQ(message.mask_image().data(), "1");
  EXPECT_TRUE(message.mask_image().gradient());
  EXPECT_EQ(message.init_image().data(), "3");
  EXPECT_EQ(message.init_image().strength(), 0.25);
  EXPECT_EQ(message.control_image().data(), "5");
  ASSERT_EQ(message.inputs_size(), 2);
  EXPECT_EQ(message.inputs(0).data(), "2");
  EXPECT_EQ(message.inputs(1).data(), "4");
}

TEST(FoldInputs, SaysWhatDoesNotGoTogether) {
  const auto field = [](auto change) {
    v1::GenerateParams message;
    message.add_inputs()->set_role(v1::MEDIA_ROLE_MASK);
    change(message);
    return GetErrorDetails(FoldInputs(message))["field"];
  };
  EXPECT_EQ(field([](auto&) {}), "");
  EXPECT_EQ(field([](auto& m) { m.mutable_control_image(); }), "params.inputs");
  EXPECT_EQ(field([](auto& m) { m.add_inputs(); }), "params.inputs[1].role");
  EXPECT_EQ(field([](auto& m) { m.add_inputs()->set_role(static_cast<v1::MediaRole>(77)); }),
            "params.inputs[1].role");
  EXPECT_EQ(field([](auto& m) { m.mutable_inputs(0)->set_strength(1); }), "params.inputs[0].strength");
  EXPECT_EQ(field([](auto& m) {
              m.mutable_inputs(0)->set_role(v1::MEDIA_ROLE_INIT);
              m.mutable_inputs(0)->set_paste_back(true);
            }),
            "params.inputs[0].paste_back");
}

}  // namespace
}  // namespace latentd
