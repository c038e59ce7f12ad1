// What phases of jobs really took: bytes of activations and seconds, by component and shape. Estimates from
// shapes are corrected by it; kept across restarts where there is a folder for it.
//
// Thread-safe.
#ifndef LATENTD_SERVER_MEASUREMENTS_H_
#define LATENTD_SERVER_MEASUREMENTS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "cache/mutex.h"

namespace latentd {

struct PhaseMeasurement {
  int64_t working_bytes = 0;     // the most that was seen; 0: not measured
  double seconds_per_slice = 0;  // the last
};

class Measurements {
 public:
  // Empty: nothing is kept across restarts. A file that cannot be read, or is not one of ours, counts as
  // empty.
  explicit Measurements(std::string folder);

  // What to promise for activations: the high-water mark of such phases and a margin, else the estimate.
  int64_t WorkingBytes(const std::string& key, int64_t estimate) const;
  std::optional<PhaseMeasurement> Find(const std::string& key) const;

  // `working_bytes` is 0 where it was not measured. Writes the file when something moved by more than noise.
  void Record(const std::string& key, int64_t working_bytes, double seconds_per_slice);

  // Forgets the high-water mark: the promise that was made from it did not hold.
  void Forget(const std::string& key);

 private:
  void Save(const std::map<std::string, PhaseMeasurement>& values);

  const std::string path_;
  mutable Mutex mu_;
  std::map<std::string, PhaseMeasurement> values_ ABSL_GUARDED_BY(mu_);
  Mutex file_mu_;  // of the file; taken alone
};

}  // namespace latentd

#endif  // LATENTD_SERVER_MEASUREMENTS_H_
