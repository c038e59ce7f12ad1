// What it costs to lock a record that is there and to let it go, and how many locks per second two threads
// get out of one cache.
//
//   lock_bench [LOCKS]
//
// Prints one line per figure, with its limit; exits with 1 when one is missed.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "cache/model_cache.h"

namespace latentd {
namespace {

class Nothing : public Resource {
 public:
  int64_t bytes() const override { return 1; }
  absl::StatusOr<std::shared_ptr<const Resource>> CopyTo(Device&, const std::vector<bool>&, const Resource*,
                                                         std::stop_token) const override {
    return absl::UnimplementedError("");
  }
};

// Names as long as real ones: an id with a fingerprint, a session's name.
ModelKey Key(int i) {
  return {"black-forest-labs/flux-dev@0123456789abcdef-" + std::to_string(i), "transformer"};
}
std::string Owner(int i) { return "session-0123456789abcdef-" + std::to_string(i); }

const Loader& Load() {
  static const Loader loader = {"test", 1,
                                [](const LoadContext&) -> absl::StatusOr<std::shared_ptr<const Resource>> {
                                  return std::make_shared<const Nothing>();
                                }};
  return loader;
}

// Seconds for `locks` locks of `key`.
double Time(ModelCache& cache, const ModelKey& key, const std::string& owner, int64_t locks) {
  const LockOptions options = {.owner = owner};
  const absl::Time start = absl::Now();
  for (int64_t i = 0; i < locks; ++i) {
    auto handle = cache.Lock(key, Load(), options);
    if (!handle.ok()) std::abort();
  }
  return absl::ToDoubleSeconds(absl::Now() - start);
}

bool Report(const char* what, double value, const char* unit, double limit, bool above) {
  const bool good = above ? value >= limit : value <= limit;
  std::printf("%-44s %12.0f %s (limit %.0f): %s\n", what, value, unit, limit, good ? "ok" : "MISSED");
  return good;
}

int Run(int64_t locks) {
  RamBudget ram(1000);
  ModelCache cache(&ram, {});
  std::vector<LockHandle> others;  // a cache has more than one record
  for (int i = 0; i < 32; ++i) others.push_back(*cache.Lock(Key(i), Load(), {.owner = Owner(i)}));

  bool good = true;
  Time(cache, Key(0), Owner(0), locks / 10);
  good &= Report("lock and release, held by another", Time(cache, Key(0), Owner(1), locks) / locks * 1e9,
                 "ns", 2000,
                 /*above=*/false);
  others.clear();
  good &= Report("lock and release, first and last holder",
                 Time(cache, Key(0), Owner(1), locks) / locks * 1e9, "ns", 2000, /*above=*/false);
  for (bool same : {true, false}) {
    const absl::Time start = absl::Now();
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] { Time(cache, Key(same ? 0 : t), Owner(t), locks); });
    }
    for (std::thread& thread : threads) thread.join();
    good &=
        Report(same ? "2 threads, the same key" : "2 threads, two keys",
               2 * static_cast<double>(locks) / absl::ToDoubleSeconds(absl::Now() - start), "locks/s", 1e6,
               /*above=*/true);
  }
  return good ? 0 : 1;
}

}  // namespace
}  // namespace latentd

int main(int argc, char** argv) { return latentd::Run(argc > 1 ? std::atoll(argv[1]) : 2'000'000); }
