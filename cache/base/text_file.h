// The one way in which small files that others can put in the program's way are read: settings of models,
// notes and measurements of the server's own.
//
// Never waits: a FIFO, device, socket or folder in the file's place is an error, not a thread that hangs.
// Never reads more than it is told to.
#ifndef LATENTD_CACHE_BASE_TEXT_FILE_H_
#define LATENTD_CACHE_BASE_TEXT_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace latentd {

// The whole file, which has at most `max_bytes`. Links are followed; who serves strangers' folders checks
// where they lead (Catalog). Errors name the file by ShortPath: NOT_FOUND MISSING_FILE (it is not there or
// may not be read), DATA_LOSS CORRUPT_FILE (no regular file, too large, or it cannot be read to its end).
absl::StatusOr<std::string> ReadTextFile(const std::string& path, int64_t max_bytes);

// Writes `text` to `path`.new and renames that, so that a reader sees the old file or the new one. What else
// lies at `path`.new gives way if it can be removed in one step. Errors: INTERNAL WRITE_FAILED, naming what
// could not be done.
absl::Status ReplaceTextFile(const std::string& path, absl::string_view text);

// "text_encoder/config.json" of "/models/x/text_encoder/config.json": what errors may show of a path.
std::string ShortPath(absl::string_view path);

}  // namespace latentd

#endif  // LATENTD_CACHE_BASE_TEXT_FILE_H_
