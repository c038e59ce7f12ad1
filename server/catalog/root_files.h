// Folders that hold what is served ("roots"), and what lies in them, by name.
//
// A name is a path below a root, of a file without ".safetensors" (in small letters or capitals). Names
// resolve inside of the roots: others would let whoever can write to a root have the server read, and tell
// of, files that are none of its business. So links are followed that lead below one of the roots; others,
// when the administrator says so (Config::follow_links).
//
// Immutable; any thread. Calls read the disk.
#ifndef LATENTD_SERVER_CATALOG_ROOT_FILES_H_
#define LATENTD_SERVER_CATALOG_ROOT_FILES_H_

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace latentd {

// Something that a folder holds.
struct RootEntry {
  enum class Link { kNone, kInside, kOutside, kToNothing };

  std::filesystem::path path;
  std::string relative;  // to the folder of the walk
  Link link = Link::kNone;
  bool is_folder = false, is_file = false;  // of what a link leads to; neither where it is not followed
  bool leads_to_folder = false;             // a link that is not followed
  bool too_deep = false;                    // a folder that is not looked into
};

// A file or folder that looks as if it should be served, and is not.
struct Unserved {
  std::string name;  // its path below its root; what cannot be shown is escaped
  std::string problem;
  int64_t bytes = 0;
};

// The weight files of some roots.
struct RootListing {
  std::vector<std::string> names;  // sorted; each resolves, unless it was removed since
  std::vector<Unserved> unserved;  // by name
};

class Roots {
 public:
  // Folders that are not there are left out.
  Roots(const std::vector<std::string>& folders, bool follow_links);

  // Canonical paths, in the order in which they are looked through.
  const std::vector<std::string>& folders() const { return folders_; }

  // The canonical path of `name` below `folder`, which is one of them; empty: it is not there, or not inside.
  std::filesystem::path Below(const std::string& folder, absl::string_view name) const;
  // The same of the weight file of that name, a regular file.
  std::filesystem::path WeightFile(const std::string& folder, const std::string& name) const;

  // Shows `take` what lies below `folder`, and what is in the folders of which it says true. What begins with
  // a dot is nobody's name, and no file of a model. A folder that cannot be read ends nothing but itself:
  // clients' uploads come and go while this runs.
  void Walk(const std::filesystem::path& folder, absl::FunctionRef<bool(const RootEntry&)> take) const;

  // Of the files of LoRAs and embeddings. Of two with one name that of the first root is served.
  // `with_unserved`: also looks at what is not served.
  RootListing List(bool with_unserved) const;

  // Looks at every link below a model's folder. Errors: FAILED_PRECONDITION UNSAFE_FILE for one that leads
  // out of the roots, or for more entries than any model has. A link to nothing harms nobody.
  absl::Status CheckLinks(const std::filesystem::path& folder) const;

 private:
  bool Holds(const std::filesystem::path& canonical) const;
  RootEntry Look(const std::filesystem::path& path) const;

  std::vector<std::string> folders_;
  const bool follow_links_;
};

// Why what looks like a file of weights is not served, though no name stands in its way; empty for what is of
// no concern (notes, pictures) and for .safetensors files. Reads the file's beginning.
std::string WhyNoWeightFile(const RootEntry& entry);

// The name that a weight file has: `path` without ".safetensors", whatever its case. Empty: it ends
// otherwise.
std::string NameOfWeightFile(absl::string_view path);

// Why `name` is not one; empty when it is.
std::string WhyNoName(absl::string_view name);

Unserved MakeUnserved(const RootEntry& entry, std::string problem);

}  // namespace latentd

#endif  // LATENTD_SERVER_CATALOG_ROOT_FILES_H_
