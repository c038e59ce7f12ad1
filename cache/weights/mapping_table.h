// Where the SIGBUS handler finds the mappings that it may mend. Grows, never shrinks.
#ifndef LATENTD_CACHE_WEIGHTS_MAPPING_TABLE_H_
#define LATENTD_CACHE_WEIGHTS_MAPPING_TABLE_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cache/base/mutex.h"

namespace latentd {

// Take and Give from any thread; Find also from a signal handler: it reads atomics and takes no lock.
class MappingTable {
 public:
  struct Region {
    std::atomic<uintptr_t> begin{0};  // 0: not in use
    std::atomic<uintptr_t> end{0};
    std::atomic<bool> torn{false};  // a page of it could not be had
  };

  Region* Take(uintptr_t begin, uintptr_t end) {
    MutexLock lock(&mu_);
    if (free_.empty()) Grow();
    Region* region = free_.back();
    free_.pop_back();
    region->torn.store(false, std::memory_order_relaxed);
    region->end.store(end, std::memory_order_relaxed);
    region->begin.store(begin, std::memory_order_release);
    return region;
  }

  // From here on Find does not find it.
  void Hide(Region* region) { region->begin.store(0, std::memory_order_release); }
  void Give(Region* region) {
    Hide(region);
    MutexLock lock(&mu_);
    free_.push_back(region);
  }

  // The region that holds `address`; null when there is none.
  Region* Find(uintptr_t address) {
    for (Chunk* chunk = first_.load(std::memory_order_acquire); chunk != nullptr; chunk = chunk->next) {
      for (Region& region : chunk->regions) {
        const uintptr_t begin = region.begin.load(std::memory_order_acquire);
        if (begin == 0 || address < begin || address >= region.end.load(std::memory_order_acquire)) continue;
        // Given back and taken anew in between, the two would be of different mappings.
        if (region.begin.load(std::memory_order_acquire) == begin) return &region;
      }
    }
    return nullptr;
  }

 private:
  struct Chunk {
    std::array<Region, 256> regions;
    Chunk* next = nullptr;  // constant once the chunk can be found
  };

  void Grow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    auto* chunk = new Chunk;  // for good
    chunk->next = first_.load(std::memory_order_relaxed);
    for (Region& region : chunk->regions) free_.push_back(&region);
    first_.store(chunk, std::memory_order_release);
  }

  std::atomic<Chunk*> first_{nullptr};
  Mutex mu_;
  std::vector<Region*> free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHTS_MAPPING_TABLE_H_
