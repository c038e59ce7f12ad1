#include "cache/weights/key_map.h"

#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace latentd {
namespace {

bool IsNumber(absl::string_view s) {
  return !s.empty() && s.size() < 6 && s.find_first_not_of("0123456789") == absl::string_view::npos;
}

// Puts `number` in the place of "{}".
std::string Fill(const std::string& pattern, absl::string_view number) {
  return absl::StrReplaceAll(pattern, {{"{}", number}});
}

}  // namespace

KeyMap::KeyMap(std::vector<KeyRule> rules) : rules_(std::move(rules)) {
  for (size_t i = 0; i < rules_.size(); ++i) by_native_.emplace(rules_[i].native, i);
}

std::vector<KeyPart> KeyMap::Resolve(absl::string_view native_module, const ComponentLayout& layout) const {
  const KeyRule* rule = nullptr;
  std::string number;
  if (auto it = by_native_.find(native_module); it != by_native_.end()) {
    rule = &rules_[it->second];
  } else {
    // The first numeric segment is the block number; later ones ("img_mlp.0") belong to the name.
    std::vector<absl::string_view> segments = absl::StrSplit(native_module, '.');
    std::string pattern;
    for (absl::string_view segment : segments) {
      if (!pattern.empty()) pattern += '.';
      if (number.empty() && IsNumber(segment)) {
        number = std::string(segment);
        pattern += "{}";
      } else {
        pattern += std::string(segment);
      }
    }
    auto found = by_native_.find(pattern);
    if (found == by_native_.end()) return {};
    rule = &rules_[found->second];
  }
  std::vector<KeyPart> parts;
  int64_t row = 0;
  bool any = false;
  for (const std::string& canonical : rule->canonical) {
    KeyPart part;
    part.canonical = Fill(canonical, number);
    part.row_begin = row;
    part.transform = rule->transform;
    if (Slot slot = layout.Find(part.canonical + ".weight"); slot && !layout[slot].shape.empty()) {
      part.rows = layout[slot].shape[0];
      any = true;
    }
    row += part.rows;
    parts.push_back(std::move(part));
  }
  if (!any) parts.clear();
  return parts;
}

std::vector<std::string> KeyMap::NativeModules(const ComponentLayout& layout) const {
  std::set<std::string> numbers;
  for (const TensorDecl& tensor : layout.tensors()) {
    for (absl::string_view segment : absl::StrSplit(tensor.name, '.')) {
      if (IsNumber(segment)) {
        numbers.insert(std::string(segment));
        break;
      }
    }
  }
  std::vector<std::string> modules;
  for (const KeyRule& rule : rules_) {
    if (!absl::StrContains(rule.native, "{}")) {
      if (!Resolve(rule.native, layout).empty()) modules.push_back(rule.native);
      continue;
    }
    for (const std::string& number : numbers) {
      std::string module = Fill(rule.native, number);
      if (!Resolve(module, layout).empty()) modules.push_back(std::move(module));
    }
  }
  return modules;
}

std::string KeyMap::ToString() const {
  std::string text;
  for (const KeyRule& rule : rules_) {
    absl::StrAppend(&text, rule.native, ">", absl::StrJoin(rule.canonical, ","), ">",
                    static_cast<int>(rule.transform), "|");
  }
  return text;
}

}  // namespace latentd
