#include "server/ctl/images.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "cache/base/sha256.h"

namespace latentd::ctl {
namespace {

// A header's size is taken on trust no further than this.
constexpr int64_t kMaxImageBytes = int64_t{1} << 30;

absl::Status Damaged(const ReceivedImage& image, absl::string_view what) {
  return MakeError(absl::StatusCode::kDataLoss, "DAMAGED_DATA",
                   absl::StrCat("picture ", image.header.index(), ": ", what));
}

}  // namespace

absl::StatusOr<std::optional<ReceivedImage>> ImageReceiver::OnEvent(const v1::JobEvent& event) {
  if (event.has_image_header()) {
    RETURN_IF_ERROR(Finish());
    current_ = ReceivedImage{event.image_header(), ""};
    const int64_t size = current_->header.size();
    if (size < 0 || size > kMaxImageBytes)
      return Damaged(*current_, absl::StrCat("a size of ", size, " bytes"));
    current_->data.reserve(size);
    return CompleteIfWhole();
  }
  if (!event.has_image_chunk()) return std::nullopt;
  const auto& chunk = event.image_chunk();
  if (!current_ || chunk.index() != current_->header.index()) {
    return MakeError(absl::StatusCode::kDataLoss, "DAMAGED_DATA",
                     absl::StrCat("picture ", chunk.index(), ": a chunk without a header"));
  }
  const int64_t have = static_cast<int64_t>(current_->data.size());
  if (chunk.offset() != have || chunk.data().empty() ||
      static_cast<int64_t>(chunk.data().size()) > current_->header.size() - have) {
    return Damaged(*current_, absl::StrCat("a chunk of ", chunk.data().size(), " bytes at ", chunk.offset(),
                                           " after ", have, " of ", current_->header.size()));
  }
  current_->data += chunk.data();
  return CompleteIfWhole();
}

absl::StatusOr<std::optional<ReceivedImage>> ImageReceiver::CompleteIfWhole() {
  if (static_cast<int64_t>(current_->data.size()) < current_->header.size()) return std::nullopt;
  const std::string sum = Sha256Hex(current_->data);
  if (sum != current_->header.sha256()) {
    return Damaged(*current_, absl::StrCat("its SHA-256 is ", sum, " and not ", current_->header.sha256()));
  }
  return std::exchange(current_, std::nullopt);
}

absl::Status ImageReceiver::Finish() const {
  if (!current_) return absl::OkStatus();
  return Damaged(*current_, absl::StrCat("ends after ", current_->data.size(), " of ",
                                         current_->header.size(), " bytes"));
}

std::vector<std::string> DrawHalfBlocks(const RgbImage& image, int columns, int rows) {
  // The longer side that makes both sides fit.
  const int longer = std::max(image.width, image.height);
  const double scale =
      std::min({1.0, double(std::max(columns, 1)) / image.width, 2.0 * std::max(rows, 1) / image.height});
  const RgbImage small = ShrinkTo(image, std::max(1, static_cast<int>(longer * scale)));
  const auto pixel = [&](int x, int y) {
    const uint8_t* p = &small.pixels[(static_cast<size_t>(y) * small.width + x) * 3];
    return absl::StrCat(p[0], ";", p[1], ";", p[2]);
  };
  std::vector<std::string> lines;
  for (int y = 0; y < small.height; y += 2) {
    std::string line, last;
    for (int x = 0; x < small.width; ++x) {
      std::string colours = absl::StrCat("\x1b[38;2;", pixel(x, y), "m");
      if (y + 1 < small.height) absl::StrAppend(&colours, "\x1b[48;2;", pixel(x, y + 1), "m");
      if (colours != last) absl::StrAppend(&line, colours);
      absl::StrAppend(&line, "▀");
      last = std::move(colours);
    }
    lines.push_back(line + "\x1b[0m");
  }
  return lines;
}

RgbImage EnlargeToFit(const RgbImage& image, int columns, int rows) {
  const int factor = std::max(1, std::min(columns / image.width, 2 * rows / image.height));
  RgbImage out{image.width * factor, image.height * factor, {}};
  out.pixels.reserve(image.pixels.size() * factor * factor);
  for (int y = 0; y < out.height; ++y) {
    for (int x = 0; x < out.width; ++x) {
      const uint8_t* p = &image.pixels[(static_cast<size_t>(y / factor) * image.width + x / factor) * 3];
      out.pixels.insert(out.pixels.end(), p, p + 3);
    }
  }
  return out;
}

}  // namespace latentd::ctl
