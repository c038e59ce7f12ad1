#include "cache/cuda_plugin.h"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "cache/base/fault_injection.h"

namespace latentd {
namespace {

absl::Status NotFound(absl::string_view why) {
  return MakeError(absl::StatusCode::kUnavailable, "DEVICE_NOT_FOUND", why);
}

std::string LastError() {
  const char* error = dlerror();
  return error == nullptr ? "" : error;
}

// The folder of the LibTorch that this program has loaded; empty where it links none.
std::filesystem::path LibTorchFolder() {
  std::filesystem::path folder;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        const std::filesystem::path file(info->dlpi_name);
        if (file.filename() != "libtorch_cpu.so") return 0;
        *static_cast<std::filesystem::path*>(out) = file.parent_path();
        return 1;
      },
      &folder);
  return folder;
}

// Its registrations have to be in the scope that LibTorch's CPU part and what it loads later look things up
// in; the plug-in would bring it into a scope of its own. In a program without LibTorch that scope does.
absl::Status LoadLibTorchCuda() {
  const std::filesystem::path folder = LibTorchFolder();
  if (folder.empty()) return absl::OkStatus();
  if (dlopen((folder / "libtorch_cuda.so").c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr)
    return absl::OkStatus();
  return NotFound(absl::StrCat("LibTorch's CUDA part cannot be loaded: ", LastError(),
                               "; install LibTorch with CUDA, or use cpu or sim:N=SIZE"));
}

absl::StatusOr<const CudaPluginApi*> LoadPlugin() {
  std::error_code ec;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", ec).parent_path();
  for (const std::filesystem::path& folder :
       {program, program.parent_path() / "lib" / "latentd", program.parent_path() / "bin"}) {
    const std::filesystem::path file = folder / kCudaPlugin;
    if (!std::filesystem::exists(file, ec)) continue;
    RETURN_IF_ERROR(LoadLibTorchCuda());
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return NotFound(absl::StrCat("the plug-in cannot be loaded: ", LastError()));
    auto entry = reinterpret_cast<decltype(&latentd_cuda_api)>(dlsym(library, kCudaPluginEntry));
    if (entry == nullptr || entry()->abi != kCudaPluginAbi) {
      return NotFound(absl::StrCat(file.string(),
                                   " is of another version than this program; install the one that "
                                   "was built with it"));
    }
    return entry();
  }
  return NotFound(absl::StrCat("cuda devices need the plug-in ", kCudaPlugin,
                               " beside the program, and it is not "
                               "installed there; the build makes it where it finds CUDA's headers"));
}

// Asked first: without a driver there is no reason to load anything.
absl::Status FindDriver() {
  static const auto* const status = new absl::Status([] {
    if (dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) != nullptr) return absl::OkStatus();
    return NotFound(
        absl::StrCat("there is no NVIDIA driver (", LastError(), "); install one, or use cpu or sim:N=SIZE"));
  }());
  return *status;
}

}  // namespace

absl::StatusOr<const CudaPluginApi*> LoadCudaPlugin() {
  static const auto* const api = new absl::StatusOr<const CudaPluginApi*>(LoadPlugin());
  return *api;
}

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int index, int64_t cap_bytes, RamBudget* ram) {
  const std::string name = absl::StrCat("cuda:", index, ": ");
  if (absl::Status driver = FindDriver(); !driver.ok()) return WithPrefix(driver, name);
  const absl::StatusOr<const CudaPluginApi*> api = LoadCudaPlugin();
  if (!api.ok()) return WithPrefix(api.status(), name);
  CudaDeviceReply reply;
  (*api)->make_device({.index = index, .cap_bytes = cap_bytes, .ram = ram, .maybe_fail = MaybeFail}, &reply);
  RETURN_IF_ERROR(reply.status);
  return std::move(reply.device);
}

CudaGpus ListCudaGpus() {
  CudaGpus gpus;
  if (CudaDeviceCount() > 0) {
    (*LoadCudaPlugin())->device_uuids(&gpus.uuids);
    return gpus;
  }
  // Whoever makes a device knows best why it cannot be made.
  RamBudget ram(0);
  const std::string missing(MakeCudaDevice(0, 0, &ram).status().message());
  constexpr absl::string_view kFirst = "cuda:0: ";
  gpus.missing = absl::StartsWith(missing, kFirst) ? missing.substr(kFirst.size()) : missing;
  return gpus;
}

int CudaDeviceCount() {
  if (!FindDriver().ok()) return 0;
  const absl::StatusOr<const CudaPluginApi*> api = LoadCudaPlugin();
  return api.ok() ? (*api)->device_count() : 0;
}

}  // namespace latentd
