#include "server/root_links.h"

#include <algorithm>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/error.h"
#include "cache/text_file.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxDepth = 6;
constexpr int kMaxEntries = 100'000;

class LinkChecker {
 public:
  explicit LinkChecker(const std::vector<std::string>& roots) : roots_(roots) {}

  absl::Status Check(const fs::path& folder, int depth) {
    std::error_code ec, no;
    for (auto it = fs::directory_iterator(folder, ec); !ec && it != fs::directory_iterator();
         it.increment(ec)) {
      const fs::path& path = it->path();
      if (absl::StartsWith(path.filename().string(), ".")) continue;
      if (++entries_ > kMaxEntries) return Unsafe(folder, "holds more files than any model has");
      fs::path target = path;
      if (it->is_symlink(no)) {
        target = fs::canonical(path, no);
        if (no) continue;
        if (!IsBelowRoot(target))
          return Unsafe(path, "is a link that leads out of the root; put the files there");
        if (!visited_.insert(target).second) continue;
      }
      if (depth < kMaxDepth && fs::is_directory(target, no)) RETURN_IF_ERROR(Check(target, depth + 1));
    }
    return absl::OkStatus();
  }

 private:
  static absl::Status Unsafe(const fs::path& path, absl::string_view what) {
    const std::string label = ShortPath(path.string());
    return MakeError(absl::StatusCode::kFailedPrecondition, "UNSAFE_FILE", absl::StrCat(label, " ", what),
                     {{"file", label}});
  }

  bool IsBelowRoot(const fs::path& target) const {
    return std::any_of(roots_.begin(), roots_.end(), [&](const std::string& root) {
      const fs::path relative = target.lexically_relative(root);
      return !relative.empty() && *relative.begin() != "..";
    });
  }

  const std::vector<std::string>& roots_;
  int entries_ = 0;
  std::set<fs::path> visited_;  // what links lead to
};

}  // namespace

absl::Status CheckLinks(const std::vector<std::string>& roots, const fs::path& folder) {
  return LinkChecker(roots).Check(folder, 0);
}

}  // namespace latentd
