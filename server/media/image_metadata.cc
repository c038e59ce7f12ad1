#include "server/media/image_metadata.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace latentd {
namespace {

constexpr size_t kMaxChunks = 4096;

// Numbers at a place of a text, by byte order. 0 where the text is over.
class Numbers {
 public:
  Numbers(absl::string_view data, bool big) : data_(data), big_(big) {}

  uint32_t U16(size_t at) const { return static_cast<uint32_t>(Read(at, 2)); }
  uint32_t U32(size_t at) const { return static_cast<uint32_t>(Read(at, 4)); }

 private:
  uint64_t Read(size_t at, size_t bytes) const {
    if (at > data_.size() || bytes > data_.size() - at) return 0;
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) {
      const auto byte = static_cast<uint8_t>(data_[at + (big_ ? i : bytes - 1 - i)]);
      value = value << 8 | byte;
    }
    return value;
  }

  const absl::string_view data_;
  const bool big_;
};

// PNG: length, type, data, checksum. WebP: type, length, data, a byte where the length is odd.
std::vector<ImageChunk> LengthChunks(absl::string_view file, size_t at, bool png) {
  std::vector<ImageChunk> chunks;
  const Numbers numbers(file, png);
  while (at + 8 <= file.size() && chunks.size() < kMaxChunks) {
    const uint64_t length = numbers.U32(png ? at : at + 4);
    std::string type(file.substr(png ? at + 4 : at, 4));
    at += 8;
    if (length > file.size() - at) break;
    chunks.push_back({std::move(type), file.substr(at, length)});
    at += length + (png ? 4 : length % 2);
  }
  return chunks;
}

std::vector<ImageChunk> JpegSegments(absl::string_view file) {
  constexpr uint8_t kStartOfScan = 0xda, kEnd = 0xd9, kComment = 0xfe, kApp0 = 0xe0, kApp15 = 0xef;
  std::vector<ImageChunk> chunks;
  const Numbers numbers(file, true);
  size_t at = 2;
  while (at + 4 <= file.size() && chunks.size() < kMaxChunks) {
    if (static_cast<uint8_t>(file[at]) != 0xff) break;
    const auto marker = static_cast<uint8_t>(file[at + 1]);
    if (marker == 0xff) {  // fill
      ++at;
      continue;
    }
    if (marker == kStartOfScan || marker == kEnd) break;
    const size_t length = numbers.U16(at + 2);
    if (length < 2 || length > file.size() - at - 2) break;
    const absl::string_view data = file.substr(at + 4, length - 2);
    if (marker == kComment) chunks.push_back({"COM", data});
    if (marker >= kApp0 && marker <= kApp15) chunks.push_back({absl::StrCat("APP", marker - kApp0), data});
    at += 2 + length;
  }
  return chunks;
}

// ---- EXIF is TIFF: a byte order, and directories of entries of 12 bytes: tag, type, count, value or its
// place.

constexpr uint32_t kAscii = 2, kShort = 3, kLong = 4, kUndefined = 7;
constexpr uint32_t kDescription = 0x010e, kOrientation = 0x0112, kExifDirectory = 0x8769,
                   kUserComment = 0x9286;

// Where in the first directory a tag's entry is; 0: it has none.
size_t FindEntry(const Numbers& numbers, uint32_t tag) {
  const size_t directory = numbers.U32(4);
  const uint32_t entries = numbers.U16(directory);
  for (uint32_t i = 0; i < entries; ++i) {
    const size_t at = directory + 2 + 12 * size_t{i};
    if (numbers.U16(at) == tag) return at;
  }
  return 0;
}

std::optional<Numbers> TiffNumbers(absl::string_view exif) {
  if (absl::StartsWith(exif, absl::string_view("II*\0", 4))) return Numbers(exif, false);
  if (absl::StartsWith(exif, absl::string_view("MM\0*", 4))) return Numbers(exif, true);
  return std::nullopt;
}

void Append(std::string& out, uint64_t value, int bytes) {
  for (int i = bytes - 1; i >= 0; --i) out += static_cast<char>(value >> (8 * i) & 0xff);
}

void AppendEntry(std::string& out, uint32_t tag, uint32_t type, size_t count, size_t value) {
  Append(out, tag, 2);
  Append(out, type, 2);
  Append(out, count, 4);
  Append(out, value, 4);
}

// What is no UTF-8 becomes U+FFFD.
std::string Utf16BigEndian(absl::string_view utf8) {
  std::string out;
  size_t at = 0;
  while (at < utf8.size()) {
    const auto lead = static_cast<uint8_t>(utf8[at++]);
    const int more = lead < 0x80 ? 0 : lead >> 5 == 6 ? 1 : lead >> 4 == 14 ? 2 : lead >> 3 == 30 ? 3 : -1;
    uint32_t code = more <= 0 ? lead : lead & (0x3f >> more);
    bool good = more >= 0;
    for (int i = 0; good && i < more; ++i) {
      good = at < utf8.size() && (static_cast<uint8_t>(utf8[at]) & 0xc0) == 0x80;
      if (good) code = code << 6 | (static_cast<uint8_t>(utf8[at++]) & 0x3f);
    }
    if (!good || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) code = 0xfffd;
    if (code >= 0x10000) {
      Append(out, 0xd800 + ((code - 0x10000) >> 10), 2);
      Append(out, 0xdc00 + ((code - 0x10000) & 0x3ff), 2);
    } else {
      Append(out, code, 2);
    }
  }
  return out;
}

}  // namespace

bool IsPng(absl::string_view file) {
  return absl::StartsWith(file, absl::string_view("\x89PNG\r\n\x1a\n", 8));
}

bool IsJpeg(absl::string_view file) { return absl::StartsWith(file, "\xff\xd8\xff"); }

bool IsWebp(absl::string_view file) {
  return absl::StartsWith(file, "RIFF") && file.size() >= 12 && file.substr(8, 4) == "WEBP";
}

std::vector<ImageChunk> ImageChunks(absl::string_view file) {
  if (IsPng(file)) return LengthChunks(file, 8, true);
  if (IsWebp(file)) return LengthChunks(file, 12, false);
  if (IsJpeg(file)) return JpegSegments(file);
  return {};
}

absl::string_view ExifOf(absl::string_view file) {
  constexpr absl::string_view kPrefix("Exif\0\0", 6);
  for (const ImageChunk& chunk : ImageChunks(file)) {
    absl::string_view data = chunk.data;
    if (chunk.type == "APP1" && absl::ConsumePrefix(&data, kPrefix)) return data;
    if (chunk.type != "eXIf" && chunk.type != "EXIF") continue;
    absl::ConsumePrefix(&data, kPrefix);  // which some write there, too
    return data;
  }
  return {};
}

int ExifOrientation(absl::string_view exif) {
  const std::optional<Numbers> numbers = TiffNumbers(exif);
  if (!numbers) return 1;
  const size_t at = FindEntry(*numbers, kOrientation);
  if (at == 0 || numbers->U16(at + 2) != kShort) return 1;
  const uint32_t value = numbers->U16(at + 8);
  return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
}

std::optional<std::string> ExifDescription(absl::string_view exif) {
  const std::optional<Numbers> numbers = TiffNumbers(exif);
  if (!numbers) return std::nullopt;
  const size_t at = FindEntry(*numbers, kDescription);
  if (at == 0 || numbers->U16(at + 2) != kAscii) return std::nullopt;
  const size_t count = numbers->U32(at + 4);
  const size_t place = count <= 4 ? at + 8 : numbers->U32(at + 8);
  if (place > exif.size() || count > exif.size() - place) return std::nullopt;
  absl::string_view text = exif.substr(place, count);
  while (absl::EndsWith(text, absl::string_view("\0", 1))) text.remove_suffix(1);
  return std::string(text);
}

std::string MakeExif(absl::string_view ascii_description, absl::string_view utf8_comment) {
  const std::string comment = absl::StrCat(absl::string_view("UNICODE\0", 8), Utf16BigEndian(utf8_comment));
  // Values of 4 bytes or less would stand in the entry; the description gets zeros at its end, the comment is
  // longer. What brings the next value to an even place is no part of the description: readers take one zero
  // off its end.
  std::string description(ascii_description);
  description.resize(std::max<size_t>(description.size() + 1, 5), '\0');
  const size_t described = description.size();
  if (description.size() % 2 != 0) description += '\0';
  constexpr size_t kFirst = 8, kDescriptionAt = kFirst + 2 + 2 * 12 + 4;
  const size_t second = kDescriptionAt + description.size();
  std::string out("MM\0*", 4);
  Append(out, kFirst, 4);
  Append(out, 2, 2);
  AppendEntry(out, kDescription, kAscii, described, kDescriptionAt);
  AppendEntry(out, kExifDirectory, kLong, 1, second);
  Append(out, 0, 4);
  out += description;
  Append(out, 1, 2);
  AppendEntry(out, kUserComment, kUndefined, comment.size(), second + 2 + 12 + 4);
  Append(out, 0, 4);
  return out + comment;
}

}  // namespace latentd
