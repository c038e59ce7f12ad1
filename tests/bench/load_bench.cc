#include "tests/bench/load_bench.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "ATen/ATen.h"
#include "tests/bench/bench_model.h"

namespace latentd::bench {
namespace {

constexpr size_t kBufferBytes = 8 << 20;
constexpr char kFile[] = "/transformer/diffusion_pytorch_model.safetensors";

volatile uint64_t g_sum;  // so that no read is left out

uint64_t SumBytes(const void* data, size_t bytes) {
  const char* p = static_cast<const char*>(data);
  const auto word = [&p](int i) {
    uint64_t w;
    std::memcpy(&w, p + 8 * i, sizeof(w));
    return w;
  };
  uint64_t a = 0, b = 0, c = 0, d = 0;
  for (; bytes >= 64; p += 64, bytes -= 64) {
    a += word(0) + word(4);
    b += word(1) + word(5);
    c += word(2) + word(6);
    d += word(3) + word(7);
  }
  for (; bytes > 0; ++p, --bytes) a += static_cast<unsigned char>(*p);
  return a + b + c + d;
}

// An open file and its size.
struct File {
  explicit File(const std::string& path) : fd(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    struct stat st = {};
    if (fd < 0 || fstat(fd, &st) != 0) OrDie<int>(absl::NotFoundError("cannot open " + path));
    size = static_cast<size_t>(st.st_size);
  }
  ~File() { close(fd); }
  int fd;
  size_t size = 0;
};

double Load(const Component& component, const std::string& folder) {
  const Stopwatch watch;
  const auto files = OrDie(WeightFiles::Open(folder));
  const auto weights =
      OrDie(LoadWeights(files, component.layout, component.key_map, component.prefix, PlainLoad()));
  uint64_t sum = 0;
  for (size_t i = 0; i < component.layout->tensors().size(); ++i) {
    const at::Tensor& tensor = (*weights)[Slot{static_cast<int32_t>(i)}].data;
    sum += SumBytes(tensor.const_data_ptr(), tensor.nbytes());
  }
  g_sum = sum;
  return watch.ms();
}

double Map(const std::string& path) {
  const Stopwatch watch;
  const File file(path);
  void* data = mmap(nullptr, file.size, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (data == MAP_FAILED) OrDie<int>(absl::InternalError("cannot map " + path));
  g_sum = SumBytes(data, file.size);
  const double ms = watch.ms();
  munmap(data, file.size);
  return ms;
}

double Read(const std::string& path) {
  static std::vector<char> buffer(kBufferBytes);
  const Stopwatch watch;
  const File file(path);
  uint64_t sum = 0;
  for (size_t at = 0; at < file.size;) {
    const ssize_t n = pread(file.fd, buffer.data(), buffer.size(), static_cast<off_t>(at));
    if (n <= 0) OrDie<int>(absl::InternalError("cannot read " + path));
    sum += SumBytes(buffer.data(), static_cast<size_t>(n));
    at += static_cast<size_t>(n);
  }
  g_sum = sum;
  return watch.ms();
}

}  // namespace

LoadTimes MeasureLoad(const std::string& folder) {
  const auto pipeline = OpenPipeline(folder);
  const std::string path = folder + kFile;
  const Component* transformer = nullptr;
  for (const Component& c : pipeline->components()) {
    if (c.name == pipeline->denoiser_component()) transformer = &c;
  }
  LoadTimes times = {};
  times.bytes = static_cast<int64_t>(File(path).size);
  times.load = Load(*transformer, folder + "/transformer");
  times.mmap = Map(path);
  times.pread = Read(path);
  return times;
}

}  // namespace latentd::bench
