// What the tests of the cache share: a resource of a given size that is made of blocks, and its loader.
#ifndef LATENTD_CACHE_CACHE_TEST_UTIL_H_
#define LATENTD_CACHE_CACHE_TEST_UTIL_H_

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache/base/error.h"
#include "cache/device.h"
#include "cache/model_cache.h"
#include "cache/resource.h"
#include "gtest/gtest.h"

namespace latentd {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Blocks that may be streamed, behind one of `staying` bytes when that is not 0.
inline std::vector<ResourceBlock> Blocks(int64_t staying, const std::vector<int64_t>& movable) {
  std::vector<ResourceBlock> blocks;
  if (staying > 0) blocks.push_back({staying, true});
  for (int64_t bytes : movable) blocks.push_back({bytes, false});
  return blocks;
}

// Bytes that are claimed, and not there.
class Claim : public Resource {
 public:
  explicit Claim(int64_t bytes) : bytes_(bytes) {}
  int64_t bytes() const override { return bytes_; }
  absl::StatusOr<std::shared_ptr<const Resource>> CopyTo(Device&, const std::vector<bool>&, const Resource*,
                                                         std::stop_token) const override {
    return absl::UnimplementedError("not copied");
  }

 private:
  const int64_t bytes_;
};

// A copy of a Blob on a device: one piece of memory for each block that is there.
class BlobCopy : public Resource {
 public:
  explicit BlobCopy(std::vector<std::shared_ptr<void>> memory) : memory_(std::move(memory)) {}
  int64_t bytes() const override { return 0; }  // none of the host's
  absl::StatusOr<std::shared_ptr<const Resource>> CopyTo(Device&, const std::vector<bool>&, const Resource*,
                                                         std::stop_token) const override {
    return absl::UnimplementedError("a copy is not copied again");
  }
  const std::vector<std::shared_ptr<void>>& memory() const { return memory_; }

 private:
  const std::vector<std::shared_ptr<void>> memory_;
};

// A resource of a given size; says when it dies.
class Blob : public Resource {
 public:
  explicit Blob(int64_t bytes, std::atomic<int>* alive = nullptr, std::vector<ResourceBlock> blocks = {})
      : bytes_(bytes),
        blocks_(blocks.empty() ? std::vector<ResourceBlock>{{PaddedBytes(bytes), true}} : std::move(blocks)),
        alive_(alive) {
    if (alive_ != nullptr) ++*alive_;
  }
  ~Blob() override {
    if (alive_ != nullptr) --*alive_;
  }

  int64_t bytes() const override { return bytes_; }
  std::vector<ResourceBlock> device_blocks() const override { return blocks_; }
  absl::StatusOr<std::shared_ptr<const Resource>> CopyTo(Device& device, const std::vector<bool>& resident,
                                                         const Resource* have,
                                                         std::stop_token stop) const override {
    if (on_copy) RETURN_IF_ERROR(on_copy());
    std::vector<std::shared_ptr<void>> memory(blocks_.size());
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (stop.stop_requested())
        return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "copy cancelled");
      if (!resident.empty() && !resident[i]) continue;
      if (have != nullptr) memory[i] = static_cast<const BlobCopy*>(have)->memory()[i];
      if (memory[i] != nullptr) continue;
      ASSIGN_OR_RETURN(memory[i], device.Allocate(blocks_[i].bytes));
      const std::vector<char> content(static_cast<size_t>(blocks_[i].bytes), static_cast<char>(i + 1));
      RETURN_IF_ERROR(device.CopyIn(memory[i].get(), content.data(), blocks_[i].bytes));
    }
    return std::make_shared<const BlobCopy>(std::move(memory));
  }
  absl::Status Check() const override { return broken ? absl::DataLossError("cut short") : absl::OkStatus(); }

  bool at_its_place() const override { return !elsewhere; }

  std::function<absl::Status()> on_copy;  // called when a copy begins; set before the blob is shared
  std::atomic<bool> broken = false;
  std::atomic<bool> elsewhere = false;  // its file is not at its place any more

 private:
  const int64_t bytes_;
  const std::vector<ResourceBlock> blocks_;
  std::atomic<int>* const alive_;
};

using Loaded = absl::StatusOr<std::shared_ptr<const Resource>>;  // what Loader::load gives

// Calls `f` until it says true. A test that waits for ever is ended by its runner.
template <typename F>
void WaitUntil(F f) {
  while (!f()) absl::SleepFor(absl::Microseconds(50));
}

// Calls `f` in a thread of its own, over and over, until the end of this object.
class Sampler {
 public:
  explicit Sampler(std::function<void()> f)
      : thread_([this, f = std::move(f)] {
          do {
            f();
            ++samples_;
            std::this_thread::yield();
          } while (!stop_);
        }) {}
  ~Sampler() { Stop(); }
  // Returns how often it was called.
  int64_t Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    return samples_;
  }

 private:
  std::atomic<bool> stop_ = false;
  std::atomic<int64_t> samples_ = 0;
  std::thread thread_;
};

// A cache of 100 units with two sims of 80, and a clock that stands still until it is told. The smallest
// thing that a device gives is a unit, so that host and device count alike.
inline constexpr int64_t kUnit = kDeviceAlignment;

class CacheTest : public ::testing::Test {
 protected:
  // A loader of a resource of `units`; on a device it is one block, or those of `blocks` (in units too).
  Loader Load(int64_t units, std::vector<ResourceBlock> blocks = {}) {
    for (ResourceBlock& block : blocks) block.bytes *= kUnit;
    return {"test", units * kUnit, [this, units, blocks](const LoadContext&) -> Loaded {
              ++loads;
              return std::make_shared<const Blob>(units * kUnit, &alive, blocks);
            }};
  }
  // A loader that takes so long by the cache's clock.
  Loader LoadFor(absl::Duration d, int64_t units) {
    Loader loader = Load(units);
    loader.load = [this, d, inner = loader.load](const LoadContext& c) {
      Advance(d);
      return inner(c);
    };
    return loader;
  }
  // A loader that says when it runs and goes on when it may.
  Loader LoadWhenTold(int64_t units) {
    Loader loader = Load(units);
    loader.load = [this, inner = loader.load](const LoadContext& c) -> Loaded {
      loading = true;
      while (!go_on) {
        if (c.cancelled()) return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "load cancelled");
        absl::SleepFor(absl::Microseconds(50));
      }
      return inner(c);
    };
    return loader;
  }
  LockHandle MustLock(const std::string& id, const Loader& loader, const std::string& owner = "me") {
    auto handle = cache.Lock({id, ""}, loader, {.owner = owner});
    EXPECT_TRUE(handle.ok()) << handle.status();
    return handle.ok() ? std::move(*handle) : LockHandle();
  }
  LockHandle MustLock(const std::string& id, int64_t units, const std::string& owner = "me") {
    return MustLock(id, Load(units), owner);
  }
  DeviceLock MustLockOn(Device& device, const LockHandle& handle, const DeviceLockOptions& options = {}) {
    auto lock = cache.LockOnDevice(handle, device, options);
    EXPECT_TRUE(lock.ok()) << lock.status();
    return lock.ok() ? std::move(*lock) : DeviceLock();
  }

  // What holds at every moment at which nobody is inside of the cache.
  void ExpectBalanced() {
    const CacheStats stats = cache.Stats();
    EXPECT_EQ(stats.unaccounted_bytes(), 0);
    EXPECT_LE(stats.ram.in_use_bytes + stats.ram.reserved_bytes, stats.ram.cap_bytes);
    for (const auto& [name, device] : stats.devices) {
      EXPECT_EQ(device.allocated_bytes, device.residency_bytes) << name;
      EXPECT_EQ(device.budget.in_use_bytes, device.residency_bytes) << name;
    }
  }
  void ExpectEmpty() {
    EXPECT_EQ(alive, 0);
    EXPECT_EQ(ram.stats().in_use_bytes + ram.stats().reserved_bytes, 0);
    for (SimDevice* sim : {&sim0, &sim1}) {
      EXPECT_EQ(sim->allocated_bytes(), 0);
      EXPECT_EQ(sim->budget().stats().in_use_bytes + sim->budget().stats().reserved_bytes, 0);
    }
  }
  bool Waits(const std::string& owner) { return ram.waits()->Waits(owner); }
  std::vector<std::string> Ids() {
    std::vector<std::string> ids;
    for (const RecordStats& r : cache.Stats().records) ids.push_back(r.key.id);
    return ids;
  }
  RecordStats Record(const std::string& id) {
    for (const RecordStats& r : cache.Stats().records) {
      if (r.key.id == id && !r.stale) return r;
    }
    return {};
  }
  void Advance(absl::Duration d) { now_ns += absl::ToInt64Nanoseconds(d); }
  absl::Time Now() const { return absl::UnixEpoch() + absl::Nanoseconds(now_ns.load()); }

  std::atomic<int> loads = 0;
  std::atomic<bool> loading = false, go_on = false;  // of LoadWhenTold
  std::atomic<int> alive = 0;
  std::atomic<int64_t> now_ns = 1;
  RamBudget ram{100 * kUnit};
  SimDevice sim0{{.index = 0, .memory_bytes = 80 * kUnit}};
  SimDevice sim1{{.index = 1, .memory_bytes = 80 * kUnit}};
  ModelCache cache{&ram, {&sim0, &sim1}, [this] { return Now(); }};
};

}  // namespace latentd

#endif  // LATENTD_CACHE_CACHE_TEST_UTIL_H_
