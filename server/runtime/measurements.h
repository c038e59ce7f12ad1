// What phases of jobs really took: bytes of activations and seconds, by component and shape. Estimates from
// shapes are corrected by it; kept across restarts where there is a folder for it.
//
// Thread-safe.
#ifndef LATENTD_SERVER_RUNTIME_MEASUREMENTS_H_
#define LATENTD_SERVER_RUNTIME_MEASUREMENTS_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "cache/base/mutex.h"

namespace latentd {

struct PhaseMeasurement {
  int64_t working_bytes = 0;    // the most that was seen; 0: not measured
  double seconds_per_unit = 0;  // the last
  int64_t at_least = 0;         // with less, such a phase has failed; not kept across restarts
};

// What to promise for a phase.
struct WorkingPromise {
  int64_t bytes = 0;
  bool measured = false;  // else a guess: less may do
  int64_t at_least = 0;   // less is known not to do

  // Whether it is worth a try with `room` bytes: where all can be had, or, of a guess, what was not seen to
  // fail and is more than one of so many shares. While others hold memory that they may give back, half is
  // asked for.
  static constexpr int64_t kHalf = 2, kLeastShare = 8;
  bool IsWorthATry(int64_t room, int64_t share) const {
    return room >= bytes || (!measured && room >= std::max(LeastToTry(), bytes / share));
  }
  // Not what is known to fail.
  int64_t LeastToTry() const { return std::max<int64_t>(1, at_least); }
};

class Measurements {
 public:
  // Empty: nothing is kept across restarts. Whatever cannot be read as a file of ours is said in the log and
  // renamed to measurements.json.broken, so that a new one can be written.
  explicit Measurements(std::string folder);

  // What to promise for activations: the high-water mark of such phases and a margin, else the estimate.
  WorkingPromise Promise(const std::string& key, int64_t estimate) const;
  std::optional<PhaseMeasurement> Find(const std::string& key) const;

  // `working_bytes` is 0 where it was not measured. Writes the file when something moved by more than noise.
  void Record(const std::string& key, int64_t working_bytes, double seconds_per_unit);

  // Such a phase took so many bytes at least, and failed because it was not to have them. The high-water mark
  // goes.
  void RecordFailure(const std::string& key, int64_t at_least);

  // Forgets the high-water mark: the promise that was made from it did not hold.
  void Forget(const std::string& key);

 private:
  PhaseMeasurement& At(const std::string& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SetAside();
  void Save(const std::map<std::string, PhaseMeasurement>& values);

  const std::string path_;
  mutable Mutex mu_;
  std::map<std::string, PhaseMeasurement> values_ ABSL_GUARDED_BY(mu_);
  Mutex file_mu_;                                // of the file; taken alone
  bool said_ ABSL_GUARDED_BY(file_mu_) = false;  // that it cannot be written
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RUNTIME_MEASUREMENTS_H_
