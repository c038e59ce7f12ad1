#include "families/vae/resize.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace latentd {
namespace {

constexpr int64_t kChannels = 3;
constexpr double kLobes = 3;
constexpr int kBits = 22;  // of a weight's fraction
constexpr int32_t kHalf = 1 << (kBits - 1);

double Sinc(double x) {
  if (x == 0) return 1;
  x *= std::numbers::pi;
  return std::sin(x) / x;
}

double Lanczos(double x) { return x >= -kLobes && x < kLobes ? Sinc(x) * Sinc(x / kLobes) : 0; }

// The source pixels [first, first + weights.size()) that make one target pixel.
struct Window {
  int64_t first = 0;
  std::vector<int32_t> weights;
};

std::vector<Window> Windows(int64_t from, int64_t to) {
  const double scale = static_cast<double>(from) / static_cast<double>(to);
  const double stretch = std::max(scale, 1.0);
  const double support = kLobes * stretch;
  std::vector<Window> windows(static_cast<size_t>(to));
  for (int64_t i = 0; i < to; ++i) {
    const double center = (static_cast<double>(i) + 0.5) * scale;
    const auto first = std::max<int64_t>(0, static_cast<int64_t>(center - support + 0.5));
    const auto last = std::min<int64_t>(from, static_cast<int64_t>(center + support + 0.5));
    std::vector<double> weights;
    double sum = 0;
    for (int64_t x = first; x < last; ++x) {
      weights.push_back(Lanczos((static_cast<double>(x) - center + 0.5) * (1.0 / stretch)));
      sum += weights.back();
    }
    Window& window = windows[static_cast<size_t>(i)];
    window.first = first;
    for (double weight : weights) {
      if (sum != 0) weight /= sum;
      window.weights.push_back(static_cast<int32_t>((weight < 0 ? -0.5 : 0.5) + weight * (1 << kBits)));
    }
  }
  return windows;
}

uint8_t Round(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kBits, 0, 255)); }

struct Picture {
  int64_t width, height;
  std::vector<uint8_t> pixels;
};

void ResizeWidth(Picture& picture, int64_t new_width) {
  if (new_width == picture.width) return;
  const std::vector<Window> windows = Windows(picture.width, new_width);
  std::vector<uint8_t> out(static_cast<size_t>(new_width * picture.height * kChannels));
  uint8_t* target = out.data();
  for (int64_t y = 0; y < picture.height; ++y) {
    const uint8_t* row = picture.pixels.data() + y * picture.width * kChannels;
    for (const Window& window : windows) {
      int32_t sums[kChannels] = {kHalf, kHalf, kHalf};
      const uint8_t* source = row + window.first * kChannels;
      for (int32_t weight : window.weights) {
        for (int32_t& sum : sums) sum += *source++ * weight;
      }
      for (int32_t sum : sums) *target++ = Round(sum);
    }
  }
  picture = {new_width, picture.height, std::move(out)};
}

void ResizeHeight(Picture& picture, int64_t new_height) {
  if (new_height == picture.height) return;
  const std::vector<Window> windows = Windows(picture.height, new_height);
  const int64_t row = picture.width * kChannels;
  std::vector<uint8_t> out(static_cast<size_t>(row * new_height));
  std::vector<int32_t> sums(static_cast<size_t>(row));
  auto target = out.begin();
  for (const Window& window : windows) {
    std::fill(sums.begin(), sums.end(), kHalf);
    const uint8_t* source = picture.pixels.data() + window.first * row;
    for (int32_t weight : window.weights) {
      for (int32_t& sum : sums) sum += *source++ * weight;
    }
    target = std::transform(sums.begin(), sums.end(), target, Round);
  }
  picture = {picture.width, new_height, std::move(out)};
}

}  // namespace

std::vector<uint8_t> ResizeLanczos(const uint8_t* pixels, int64_t width, int64_t height, int64_t new_width,
                                   int64_t new_height) {
  Picture picture{width, height, std::vector<uint8_t>(pixels, pixels + width * height * kChannels)};
  // The order shows in the last bit, because of the rounding in between. This is Pillow's, found by trying.
  const bool height_first = new_height < height && height - new_height > 2 * (width - new_width);
  if (height_first) ResizeHeight(picture, new_height);
  ResizeWidth(picture, new_width);
  ResizeHeight(picture, new_height);
  return std::move(picture.pixels);
}

}  // namespace latentd
