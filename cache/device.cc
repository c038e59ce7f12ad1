#include "cache/device.h"

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cache/error.h"

namespace latentd {
namespace {

constexpr size_t kAlignment = 64;

std::shared_ptr<void> AlignedHostMemory(int64_t bytes) {
  const size_t size = (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
  void* p = std::aligned_alloc(kAlignment, size == 0 ? kAlignment : size);
  if (p == nullptr) return nullptr;
  return std::shared_ptr<void>(p, std::free);
}

absl::Status OutOfMemory(const std::string& device, int64_t bytes) {
  return MakeError(absl::StatusCode::kResourceExhausted, "DEVICE_OUT_OF_MEMORY",
                   absl::StrCat("allocation of ", bytes, " bytes on ", device, " failed"),
                   {{"device", device}, {"needed_bytes", absl::StrCat(bytes)}});
}

// True for exactly one call: the one that brings the counter from 1 to 0.
bool CountsDownToZero(std::atomic<int64_t>& counter) {
  int64_t n = counter.load();
  while (n > 0) {
    if (counter.compare_exchange_weak(n, n - 1)) return n == 1;
  }
  return false;
}

}  // namespace

absl::StatusOr<std::shared_ptr<void>> CpuDevice::Allocate(int64_t bytes) {
  auto p = AlignedHostMemory(bytes);
  if (p == nullptr) return OutOfMemory(name(), bytes);
  return p;
}

absl::Status CpuDevice::CopyIn(void* to, const void* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

SimDevice::SimDevice(std::string name, int64_t memory_bytes)
    : Device(name, DeviceKind::kSim, &own_budget_), own_budget_(name, memory_bytes) {}

absl::StatusOr<std::shared_ptr<void>> SimDevice::Allocate(int64_t bytes) {
  if (lost_) return MakeError(absl::StatusCode::kUnavailable, "DEVICE_LOST", absl::StrCat(name(), " is lost"));
  if (CountsDownToZero(fail_allocation_)) return OutOfMemory(name(), bytes);
  auto memory = AlignedHostMemory(bytes);
  if (memory == nullptr) return OutOfMemory(name(), bytes);
  *allocated_ += bytes;
  void* p = memory.get();
  return std::shared_ptr<void>(p, [memory, count = allocated_, bytes](void*) { *count -= bytes; });
}

absl::Status SimDevice::CopyIn(void* to, const void* from, int64_t bytes) {
  if (lost_) return MakeError(absl::StatusCode::kUnavailable, "DEVICE_LOST", absl::StrCat(name(), " is lost"));
  if (CountsDownToZero(fail_copy_)) {
    return MakeError(absl::StatusCode::kInternal, "COPY_FAILED", absl::StrCat("copy to ", name(), " failed"));
  }
  std::memcpy(to, from, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::StatusOr<int64_t> ParseBytes(absl::string_view text) {
  size_t digits = 0;
  while (digits < text.size() && (std::isdigit(static_cast<unsigned char>(text[digits])) || text[digits] == '.')) {
    ++digits;
  }
  double number = 0;
  if (digits == 0 || !absl::SimpleAtod(text.substr(0, digits), &number)) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is no size; write 8GiB, 512MB or a number of bytes"));
  }
  absl::string_view unit = absl::StripAsciiWhitespace(text.substr(digits));
  static const std::pair<absl::string_view, double> kUnits[] = {
      {"", 1},       {"B", 1},        {"KiB", 1024.0},       {"MiB", 1048576.0}, {"GiB", 1073741824.0},
      {"KB", 1e3},   {"MB", 1e6},     {"GB", 1e9},           {"TiB", 1099511627776.0}, {"TB", 1e12}};
  for (const auto& [name, factor] : kUnits) {
    if (absl::EqualsIgnoreCase(unit, name)) {
      const double bytes = number * factor;
      if (bytes > 9e18) return absl::InvalidArgumentError(absl::StrCat("'", text, "' is too large"));
      return static_cast<int64_t>(std::llround(bytes));
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown unit in '", text, "'; use KiB, MiB, GiB, KB, MB or GB"));
}

absl::StatusOr<std::unique_ptr<Device>> MakeDevice(absl::string_view spec, RamBudget* ram) {
  if (spec == "cpu") return std::make_unique<CpuDevice>(ram);
  if (absl::StartsWith(spec, "cuda")) {
    return MakeError(absl::StatusCode::kUnimplemented, "DEVICE_UNSUPPORTED",
                     "cuda devices are not in this build; use cpu or sim:N=SIZE");
  }
  absl::string_view rest = spec;
  const size_t equals = rest.find('=');
  int index = 0;
  if (absl::ConsumePrefix(&rest, "sim:") && equals != absl::string_view::npos &&
      absl::SimpleAtoi(spec.substr(4, equals - 4), &index) && index >= 0) {
    auto bytes = ParseBytes(spec.substr(equals + 1));
    if (!bytes.ok()) return bytes.status();
    return std::make_unique<SimDevice>(absl::StrCat("sim:", index), *bytes);
  }
  return absl::InvalidArgumentError(absl::StrCat("'", spec, "' is no device; write cpu or sim:0=8GiB"));
}

}  // namespace latentd
