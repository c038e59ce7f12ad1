// What a file is that should be weights and is not, told by its first bytes, whatever it is called.
#ifndef LATENTD_CACHE_WEIGHTS_FILE_KIND_H_
#define LATENTD_CACHE_WEIGHTS_FILE_KIND_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace latentd {

enum class FileKind {
  kUnknown,  // may be a safetensors file
  kEmpty,
  kPickle,      // also PyTorch's archives, whatever is in them
  kLfsPointer,  // a few lines of text in place of the file, by a clone without Git LFS
  kWebPage,     // HTML or XML: an answer that was no download
  kJson,        // the same
  kArchive,     // gzip, 7z, RAR, xz, zstd
  kGguf,
  kPartial,  // nothing but zeros: made, not yet written
};

// Of at most this many first bytes.
inline constexpr int64_t kFileKindBytes = 4096;

// `start`: the first bytes, or all of a shorter file.
FileKind RecogniseFile(absl::string_view start);

// Why a file that is no safetensors file cannot be used, as far as its first bytes tell. OK for kUnknown.
// Errors, with the file's base name in the message and as detail "file": FAILED_PRECONDITION UNSAFE_FILE for
// pickles; UNIMPLEMENTED UNSUPPORTED_FILE for GGUF; DATA_LOSS CORRUPT_FILE for all others.
absl::Status CheckFileKind(const std::string& base_name, absl::string_view start);

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHTS_FILE_KIND_H_
