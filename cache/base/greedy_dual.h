// Which record goes first when room is needed: GreedyDual-Size, after Cao and Irani, "Cost-Aware WWW Proxy
// Caching Algorithms" (USITS 1997), with the cost of a record being the time to load it again.
//
// Every use of a record sets its worth to floor + seconds to reload / bytes. The record of the least worth
// goes, and the floor rises to that worth: so what is cheap to reload goes before what is dear, but what is
// not used sinks against everything that is, and goes in the end. With equal costs this is LRU.
#ifndef LATENTD_CACHE_BASE_GREEDY_DUAL_H_
#define LATENTD_CACHE_BASE_GREEDY_DUAL_H_

#include <algorithm>
#include <cstdint>
#include <tuple>

namespace latentd {

class GreedyDual {
 public:
  struct Worth {
    double value = 0;
    uint64_t last_used = 0;  // larger is later; decides between equal values
    friend bool operator<(const Worth& a, const Worth& b) {
      return std::tie(a.value, a.last_used) < std::tie(b.value, b.last_used);
    }
  };

  // Cost of a record, in seconds per byte. Reading is taken to be at least as slow as a good disk: how fast a
  // mapping is made says nothing of how fast its pages come when they are needed.
  static double Cost(double load_seconds, int64_t bytes) {
    constexpr double kDiskSecondsPerByte = 1 / 2e9;
    return std::max(kDiskSecondsPerByte, load_seconds / static_cast<double>(std::max<int64_t>(bytes, 1)));
  }

  void Use(Worth& worth, double cost) { worth = {floor_ + cost, ++uses_}; }
  void Evict(const Worth& worth) { floor_ = std::max(floor_, worth.value); }

 private:
  double floor_ = 0;
  uint64_t uses_ = 0;
};

}  // namespace latentd

#endif  // LATENTD_CACHE_BASE_GREEDY_DUAL_H_
