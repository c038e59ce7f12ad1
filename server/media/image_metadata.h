// What picture files hold beside their pixels: chunks of PNG and WebP, segments of JPEG, EXIF in all of them.
//
// Stateless, thread-safe. Files come from clients and are taken for hostile: nothing is read beyond their
// end, what is damaged is as if it were not there. Views are into what was given.
#ifndef LATENTD_SERVER_MEDIA_IMAGE_METADATA_H_
#define LATENTD_SERVER_MEDIA_IMAGE_METADATA_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace latentd {

bool IsPng(absl::string_view file);
bool IsJpeg(absl::string_view file);
bool IsWebp(absl::string_view file);

// A chunk's type ("tEXt", "EXIF") and its data. JPEG's segments are called by their marker: "APP1", "COM",
// others are left out; none that comes after the first scan's begin.
struct ImageChunk {
  std::string type;
  absl::string_view data;
};
std::vector<ImageChunk> ImageChunks(absl::string_view file);

// The EXIF of a PNG, JPEG or WebP file: TIFF, from its byte order on. Empty where there is none.
absl::string_view ExifOf(absl::string_view file);

// How a picture was held, 1 to 8, as EXIF counts: 1 is upright, and is what is taken where nothing else is
// said.
int ExifOrientation(absl::string_view exif);

// A text of EXIF's first directory, ImageDescription. Absent: it has none.
std::optional<std::string> ExifDescription(absl::string_view exif);

// EXIF with a description (ASCII) and a UserComment (UTF-8, written as UTF-16, which is what A1111 reads).
std::string MakeExif(absl::string_view ascii_description, absl::string_view utf8_comment);

}  // namespace latentd

#endif  // LATENTD_SERVER_MEDIA_IMAGE_METADATA_H_
