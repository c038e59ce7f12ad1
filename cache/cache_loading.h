// One load of the cache's, for its own files.
#ifndef LATENTD_CACHE_CACHE_LOADING_H_
#define LATENTD_CACHE_CACHE_LOADING_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cache/base/mutex.h"
#include "cache/cache_record.h"
#include "cache/model_cache.h"

namespace latentd {

// One load in progress, or claimed and not begun; whoever else wants its key waits here.
struct ModelCache::Loading {
  struct Waiter {
    std::string owner;
    bool lasting = false;
    LockHandle handle = {};
  };

  std::atomic<int> wanted{0};   // callers that still want the result
  bool done = false;            // guarded by mu_
  absl::Status status;          // guarded by mu_
  bool others_try = false;      // guarded by mu_: the error is about the caller who loaded, not about the key
  bool drop_when_done = false;  // guarded by mu_: the key, or a source, was dropped meanwhile
  std::vector<std::string> sources;  // constant
  std::string loader;                // constant: the owner who loads
  std::set<std::string> names;       // guarded by mu_: of all who want it
  // Guarded by mu_. They get their locks together with the one who loads, and not when they get to run: until
  // then the record could be evicted.
  std::vector<Waiter*> waiters;
  Waiting waiting;                                                 // guarded by mu_
  std::map<int, std::function<void(int64_t, int64_t)>> listeners;  // guarded by listeners_mu
  Mutex listeners_mu;
  int next_listener = 0;
};

}  // namespace latentd

#endif  // LATENTD_CACHE_CACHE_LOADING_H_
