// latentctl: pictures out of a job's events, and in the terminal.
#ifndef LATENTD_SERVER_CTL_IMAGES_H_
#define LATENTD_SERVER_CTL_IMAGES_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "latentd/v1/denoise.pb.h"
#include "server/media/image_codec.h"

namespace latentd::ctl {

struct ReceivedImage {
  v1::JobEvent::ImageHeader header;
  std::string data;
};

// Puts the chunks of one job's pictures together and checks them against their headers.
class ImageReceiver {
 public:
  // A picture, when `event` completes one. Errors: DATA_LOSS DAMAGED_DATA when sizes, order or checksum are
  // not what the header says.
  absl::StatusOr<std::optional<ReceivedImage>> OnEvent(const v1::JobEvent& event);

  // Whether every picture that was begun is complete. Errors: DATA_LOSS DAMAGED_DATA.
  absl::Status Finish() const;

 private:
  absl::StatusOr<std::optional<ReceivedImage>> CompleteIfWhole();
  std::optional<ReceivedImage> current_;
};

// `image` in lines of half blocks, two pixels to a character, in 24-bit colours; made smaller to fit into
// columns × rows characters.
std::vector<std::string> DrawHalfBlocks(const RgbImage& image, int columns, int rows);

// `image` enlarged by the largest whole number with which it fits into columns × rows characters.
RgbImage EnlargeToFit(const RgbImage& image, int columns, int rows);

}  // namespace latentd::ctl

#endif  // LATENTD_SERVER_CTL_IMAGES_H_
