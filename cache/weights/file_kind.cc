#include "cache/weights/file_kind.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

struct Magic {
  absl::string_view bytes;
  FileKind kind;
};
// A byte string of a literal, with the zeros in it.
template <size_t n>
constexpr absl::string_view Bytes(const char (&text)[n]) {
  return absl::string_view(text, n - 1);
}
constexpr Magic kMagics[] = {
    {Bytes("PK\x03\x04"), FileKind::kPickle},  // what torch.save writes is a zip archive
    {Bytes("\x80\x02"), FileKind::kPickle},    // a pickle of protocol 2, 3, 4, 5
    {Bytes("\x80\x03"), FileKind::kPickle},
    {Bytes("\x80\x04"), FileKind::kPickle},
    {Bytes("\x80\x05"), FileKind::kPickle},
    {Bytes("version https://git-lfs.github.com/spec/"), FileKind::kLfsPointer},
    {Bytes("GGUF"), FileKind::kGguf},
    {Bytes("\x1f\x8b"), FileKind::kArchive},  // gzip
    {Bytes("7z\xbc\xaf\x27\x1c"), FileKind::kArchive},
    {Bytes("Rar!\x1a\x07"), FileKind::kArchive},
    {Bytes("\xfd"
           "7zXZ\x00"),
     FileKind::kArchive},
    {Bytes("\x28\xb5\x2f\xfd"), FileKind::kArchive},  // zstd
};

// A tag or a comment: a web page, or the XML that object stores answer errors with.
bool IsMarkup(absl::string_view text) {
  if (!absl::ConsumePrefix(&text, "<") || text.empty()) return false;
  return text[0] == '!' || text[0] == '?' || absl::ascii_isalpha(static_cast<unsigned char>(text[0]));
}

// A member's name, or nothing: a header length can begin with "{", but then has no such text behind it.
bool IsJson(absl::string_view text) {
  if (!absl::ConsumePrefix(&text, "{")) return false;
  text = absl::StripLeadingAsciiWhitespace(text);
  return absl::StartsWith(text, "\"") || absl::StartsWith(text, "}");
}

}  // namespace

FileKind RecogniseFile(absl::string_view start) {
  start = start.substr(0, kFileKindBytes);
  if (start.empty()) return FileKind::kEmpty;
  for (const Magic& magic : kMagics) {
    if (absl::StartsWith(start, magic.bytes)) return magic.kind;
  }
  absl::string_view text = absl::StripPrefix(start, "\xef\xbb\xbf");  // UTF-8's mark
  text = absl::StripLeadingAsciiWhitespace(text);
  if (IsMarkup(text)) return FileKind::kWebPage;
  if (IsJson(text)) return FileKind::kJson;
  const bool zeros = std::all_of(start.begin(), start.end(), [](char c) { return c == 0; });
  return zeros ? FileKind::kPartial : FileKind::kUnknown;
}

absl::Status CheckFileKind(const std::string& base_name, absl::string_view start) {
  auto corrupt = [&](absl::string_view what) {
    return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE", absl::StrCat(base_name, " ", what),
                     {{"file", base_name}});
  };
  switch (RecogniseFile(start)) {
    case FileKind::kUnknown:
      return absl::OkStatus();
    case FileKind::kEmpty:
      return corrupt("is empty; download it again");
    case FileKind::kPickle:
      return MakeError(absl::StatusCode::kFailedPrecondition, "UNSAFE_FILE",
                       absl::StrCat(base_name, " is a pickle, which can run code; convert it to safetensors"),
                       {{"file", base_name}});
    case FileKind::kLfsPointer:
      return corrupt("is a pointer of Git LFS, not the file that it stands for; 'git lfs pull' fetches that");
    case FileKind::kWebPage:
      return corrupt("is a web page, not weights; what was asked for it wanted a login, or had no such file");
    case FileKind::kJson:
      return corrupt("is JSON text, not weights");
    case FileKind::kArchive:
      return corrupt("is a compressed archive; unpack it");
    case FileKind::kGguf:
      return MakeError(absl::StatusCode::kUnimplemented, "UNSUPPORTED_FILE",
                       absl::StrCat(base_name, " is a GGUF file, which is not served; use safetensors"),
                       {{"file", base_name}});
    case FileKind::kPartial:
      return corrupt("holds nothing but zeros where it begins; its download did not end");
  }
  return absl::OkStatus();
}

}  // namespace latentd
