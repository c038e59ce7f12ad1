// Links in a model's folder: those that stay in the roots are fine, others would let whoever can write to a
// root have the server read, and tell of, files that are none of its business.
#ifndef LATENTD_SERVER_ROOT_LINKS_H_
#define LATENTD_SERVER_ROOT_LINKS_H_

#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace latentd {

// Looks at every link below `folder`, and below folders that links lead to, as deep as models are looked at.
// What begins with a dot is no file of a model, and a link to nothing harms nobody. `roots` are canonical
// paths. Reads the disk. Errors: FAILED_PRECONDITION UNSAFE_FILE for one that leads out of all roots, or for
// more entries than any model has.
absl::Status CheckLinks(const std::vector<std::string>& roots, const std::filesystem::path& folder);

}  // namespace latentd

#endif  // LATENTD_SERVER_ROOT_LINKS_H_
