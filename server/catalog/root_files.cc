#include "server/catalog/root_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"
#include "cache/base/fd.h"
#include "cache/base/text_file.h"
#include "cache/base/utf8.h"
#include "cache/weights/file_kind.h"
#include "server/catalog/names.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;

constexpr char kWeightFile[] = ".safetensors";
constexpr int kMaxDepth = 6;
constexpr int kMaxEntries = 100'000;  // of a model
constexpr int kMaxLinks = 10'000;     // to folders, that one walk follows
constexpr char kLeadsOut[] = "is a link that leads out of the root; put the files there, or set follow_links";

// What other programs call files of weights.
constexpr absl::string_view kOtherWeights[] = {".ckpt", ".pt",   ".pth", ".bin",
                                               ".pkl",  ".gguf", ".sft", ".onnx"};
// What downloads that are going on, or were broken off, are called.
constexpr absl::string_view kDownloads[] = {".part",     ".partial", ".incomplete", ".crdownload",
                                            ".download", ".aria2",   ".tmp",        ".!ut"};

bool IsBelow(const fs::path& path, const fs::path& folder) {
  const fs::path relative = path.lexically_relative(folder);
  return !relative.empty() && *relative.begin() != "..";
}

std::string Lower(const fs::path& path) { return absl::AsciiStrToLower(path.filename().string()); }

template <size_t n>
bool EndsInOneOf(absl::string_view name, const absl::string_view (&endings)[n]) {
  return std::any_of(std::begin(endings), std::end(endings),
                     [&](absl::string_view ending) { return absl::EndsWith(name, ending); });
}

bool LooksLikeWeights(const fs::path& path) {
  const std::string name = Lower(path);
  return absl::EndsWith(name, kWeightFile) || EndsInOneOf(name, kOtherWeights);
}

// Of two spellings of one name.
bool Precedes(const fs::path& a, const fs::path& b) {
  const auto rank = [](const fs::path& path) { return std::pair(path.extension() != kWeightFile, path); };
  return rank(a) < rank(b);
}

// Its first bytes; none where it cannot be read.
std::string Beginning(const fs::path& path) {
  std::string start(static_cast<size_t>(kFileKindBytes), '\0');
  const Fd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  const ssize_t got = file ? read(file.get(), start.data(), start.size()) : 0;
  start.resize(got > 0 ? static_cast<size_t>(got) : 0);
  return start;
}

}  // namespace

Roots::Roots(const std::vector<std::string>& folders, bool follow_links) : follow_links_(follow_links) {
  for (const std::string& folder : folders) {
    std::error_code ec;
    const fs::path path = fs::canonical(folder, ec);
    if (!ec) folders_.push_back(path.string());
  }
}

bool Roots::Holds(const fs::path& canonical) const {
  return follow_links_ || std::any_of(folders_.begin(), folders_.end(),
                                      [&](const std::string& folder) { return IsBelow(canonical, folder); });
}

fs::path Roots::Below(const std::string& folder, absl::string_view name) const {
  std::error_code ec;
  const fs::path path = fs::canonical(fs::path(folder) / std::string(name), ec);
  return ec || !Holds(path) ? fs::path() : path;
}

fs::path Roots::WeightFile(const std::string& folder, const std::string& name) const {
  std::error_code ec;
  fs::path path = Below(folder, absl::StrCat(name, kWeightFile));
  if (fs::is_regular_file(path, ec)) return path;
  // In capitals, then.
  const fs::path wanted(name);
  std::set<std::string> spellings;
  for (auto it = fs::directory_iterator(fs::path(folder) / wanted.parent_path(), ec);
       !ec && it != fs::directory_iterator(); it.increment(ec)) {
    const std::string file = it->path().filename().string();
    if (NameOfWeightFile(file) == wanted.filename().string()) spellings.insert(file);
  }
  for (const std::string& spelling : spellings) {
    path = Below(folder, (wanted.parent_path() / spelling).string());
    if (fs::is_regular_file(path, ec)) return path;
  }
  return {};
}

RootEntry Roots::Look(const fs::path& path) const {
  RootEntry entry;
  entry.path = path;
  std::error_code ec;
  if (fs::is_symlink(fs::symlink_status(path, ec))) {
    const fs::path target = fs::canonical(path, ec);
    entry.link = ec              ? RootEntry::Link::kToNothing
                 : Holds(target) ? RootEntry::Link::kInside
                                 : RootEntry::Link::kOutside;
    entry.leads_to_folder = fs::is_directory(path, ec);
    if (entry.link != RootEntry::Link::kInside) return entry;
  }
  const fs::file_status status = fs::status(path, ec);
  entry.is_folder = fs::is_directory(status);
  entry.is_file = fs::is_regular_file(status);
  return entry;
}

void Roots::Walk(const fs::path& root, absl::FunctionRef<bool(const RootEntry&)> take) const {
  int links = 0;
  // `above`: the canonical folders on the way, so that a link to one of them is not followed in circles.
  const auto walk = [&](const auto& self, const fs::path& folder, std::vector<fs::path>& above,
                        int depth) -> void {
    std::error_code ec, no;
    for (auto it = fs::directory_iterator(folder, ec); !ec && it != fs::directory_iterator();
         it.increment(ec)) {
      if (absl::StartsWith(it->path().filename().string(), ".")) continue;
      RootEntry entry = Look(it->path());
      entry.relative = entry.path.lexically_relative(root).string();
      entry.too_deep = entry.is_folder && depth >= kMaxDepth;
      if (!take(entry) || !entry.is_folder || entry.too_deep) continue;
      const bool is_link = entry.link != RootEntry::Link::kNone;
      if (is_link && ++links > kMaxLinks) continue;
      const fs::path canonical = fs::canonical(entry.path, no);
      if (no || std::find(above.begin(), above.end(), canonical) != above.end()) continue;
      above.push_back(canonical);
      self(self, entry.path, above, depth + 1);
      above.pop_back();
    }
  };
  std::error_code ec;
  std::vector<fs::path> above = {fs::canonical(root, ec)};
  walk(walk, root, above, 0);
}

RootListing Roots::List(bool with_unserved) const {
  std::map<std::string, RootEntry> served;
  RootListing listing;
  for (const std::string& folder : folders_) {
    Walk(folder, [&](const RootEntry& entry) {
      const std::string name = NameOfWeightFile(entry.relative);
      std::string problem = name.empty() ? "" : WhyNoName(name);
      if (entry.is_file && !name.empty() && problem.empty()) {
        const auto [first, fresh] = served.emplace(name, entry);
        if (fresh || !with_unserved) return false;
        RootEntry hidden = entry;
        const bool one_folder = first->second.path.parent_path() == entry.path.parent_path();
        // As WeightFile chooses: small letters, then what comes first.
        if (one_folder && Precedes(entry.path, first->second.path)) std::swap(first->second, hidden);
        listing.unserved.push_back(MakeUnserved(hidden, "another file has this name"));
        return false;
      }
      if (!with_unserved) return entry.is_folder;
      if (problem.empty()) problem = WhyNoWeightFile(entry);
      if (!problem.empty()) listing.unserved.push_back(MakeUnserved(entry, std::move(problem)));
      return entry.is_folder;
    });
  }
  for (const auto& [name, entry] : served) listing.names.push_back(name);
  std::sort(listing.unserved.begin(), listing.unserved.end(),
            [](const Unserved& a, const Unserved& b) { return a.name < b.name; });
  return listing;
}

absl::Status Roots::CheckLinks(const fs::path& folder) const {
  int entries = 0;
  absl::Status status;
  const auto unsafe = [](const fs::path& path, absl::string_view what) {
    const std::string label = ShortPath(path.string());
    return MakeError(absl::StatusCode::kFailedPrecondition, "UNSAFE_FILE", absl::StrCat(label, " ", what),
                     {{"file", label}});
  };
  Walk(folder, [&](const RootEntry& entry) {
    if (!status.ok()) return false;
    if (++entries > kMaxEntries) status = unsafe(folder, "holds more files than any model has");
    if (entry.link == RootEntry::Link::kOutside) status = unsafe(entry.path, kLeadsOut);
    return status.ok();
  });
  return status;
}

std::string NameOfWeightFile(absl::string_view path) {
  constexpr size_t kEnding = sizeof(kWeightFile) - 1;
  if (path.size() <= kEnding || !absl::EndsWithIgnoreCase(path, kWeightFile)) return "";
  return std::string(path.substr(0, path.size() - kEnding));
}

std::string WhyNoName(absl::string_view name) {
  if (IsValidName(name)) return "";
  if (name.size() > kMaxNameBytes) {
    return absl::StrCat("its name has ", name.size(), " bytes; at most ", kMaxNameBytes, " are looked up");
  }
  return "its name is no UTF-8 text without control characters; rename it";
}

std::string WhyNoWeightFile(const RootEntry& entry) {
  const std::string name = Lower(entry.path);
  if (entry.is_folder) {
    if (absl::EndsWith(name, kWeightFile)) return "is a folder";
    return entry.too_deep ? absl::StrCat("lies below ", kMaxDepth, " folders; what is in it is not looked at")
                          : "";
  }
  const bool looks = LooksLikeWeights(entry.path);
  if (entry.link == RootEntry::Link::kOutside) return looks || entry.leads_to_folder ? kLeadsOut : "";
  if (entry.link ==
      RootEntry::Link::kToNothing) {  // of a folder's, as when a disk is gone, the name alone tells
    return looks || entry.path.extension().empty() ? "is a link to nothing" : "";
  }
  if (EndsInOneOf(name, kDownloads) && LooksLikeWeights(entry.path.stem()))
    return "is a download that did not end";
  if (!looks) return "";
  if (!entry.is_file) return "is no regular file";
  if (absl::EndsWith(name, kWeightFile)) return "";
  const absl::Status kind = CheckFileKind(entry.path.filename().string(), Beginning(entry.path));
  if (!kind.ok()) return std::string(kind.message());
  return absl::StrCat("is not called ", kWeightFile, "; if it is one, rename it");
}

Unserved MakeUnserved(const RootEntry& entry, std::string problem) {
  std::error_code ec;
  const auto bytes = entry.is_file ? static_cast<int64_t>(fs::file_size(entry.path, ec)) : int64_t{0};
  return {std::string(CutUtf8(EscapeUnsafe(entry.relative), kMaxNameBytes)), EscapeUnsafe(problem),
          ec ? 0 : bytes};
}

}  // namespace latentd
