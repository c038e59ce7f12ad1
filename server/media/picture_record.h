// What a picture's file says of how it was made (PictureRecord in proto/), as texts and back.
//
// Stateless, thread-safe. The same record gives the same texts.
#ifndef LATENTD_SERVER_MEDIA_PICTURE_RECORD_H_
#define LATENTD_SERVER_MEDIA_PICTURE_RECORD_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "latentd/v1/denoise.pb.h"
#include "server/media/image_codec.h"

namespace latentd {

inline constexpr int kRecordVersion = 1;

// The record as JSON in ASCII with its keys in order, and as A1111 writes what it was told, with LoRAs as
// tags. It is for programs that read that text, and leaves out what they have no name for.
PictureNotes NotesOf(const v1::PictureRecord& record);

// Of a file that was made with notes; files come from anywhere. Errors: NOT_FOUND NO_RECORD; INVALID_ARGUMENT
// BAD_RECORD for what is none, or has fields or a version that this program does not know.
absl::StatusOr<v1::PictureRecord> RecordOfFile(absl::string_view file);

// The request that draws it again, without the pictures that it brought.
v1::GenerateRequest RequestOf(const v1::PictureRecord& record);

// A picture that a request brings, by the flag of latentctl that gives it: "--image", and its SHA-256; in a
// fixed order, those that there were.
struct RecordedInput {
  std::string flag;
  std::string sha256;
};
std::vector<RecordedInput> InputsOf(const v1::PictureRecord& record);

// Fields in which two records differ: "model_id", "loras.dusk.id", "params.steps", … In order.
std::vector<std::string> DifferencesOf(const v1::PictureRecord& a, const v1::PictureRecord& b);

}  // namespace latentd

#endif  // LATENTD_SERVER_MEDIA_PICTURE_RECORD_H_
