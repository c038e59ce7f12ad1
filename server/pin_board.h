// Models and LoRAs that are held for nobody in particular: loaded ahead of their first job, or for good.
//
// Thread-safe. Load() blocks: from a worker.
#ifndef LATENTD_SERVER_PIN_BOARD_H_
#define LATENTD_SERVER_PIN_BOARD_H_

#include <map>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "cache/model_cache.h"
#include "cache/mutex.h"

namespace latentd {

struct OpenModel;
struct ServerCore;

class PinBoard {
 public:
  explicit PinBoard(ServerCore* core) : core_(core) {}

  struct Loaded {
    std::vector<ModelKey> keys;
    int64_t bytes = 0;
    int loaded_records = 0;  // those that were not there
  };
  // `components` empty: all. `device` empty: host memory alone. With `pin`, held until Unload, besides what
  // is pinned already. All or nothing.
  // Errors: NOT_FOUND MODEL_NOT_FOUND for what is neither a model nor a LoRA; INVALID_ARGUMENT INVALID_FIELD;
  // those of ModelCache; UNAVAILABLE SERVER_DRAINING after Close().
  absl::StatusOr<Loaded> Load(const std::string& name, const std::vector<std::string>& components,
                              const std::string& device, bool pin);

  // Takes the pin off and evicts what nobody holds. Errors: NOT_FOUND MODEL_NOT_FOUND.
  absl::StatusOr<DropResult> Unload(const std::string& name);

  // For the end of the server: loads that are under way are cancelled, and nothing is pinned any more.
  void Close();

  // Ids under which the cache has records of a model or LoRA of that name, of all generations of its files.
  // Errors: NOT_FOUND MODEL_NOT_FOUND when there is neither a record nor a file.
  absl::StatusOr<std::vector<std::string>> Ids(const std::string& name) const;

 private:
  struct Pin {
    LockHandle handle;
    DeviceLock residency;
    std::string on;                          // the device that was asked for
    std::shared_ptr<const OpenModel> model;  // whose component it is; null: none's
  };

  absl::StatusOr<std::vector<Pin>> Lock(const std::vector<LockRequest>& requests, Device* copy_to,
                                       bool lasting);

  ServerCore* const core_;
  Mutex mu_;
  std::stop_source stop_;
  std::map<std::string, std::vector<Pin>> pins_ ABSL_GUARDED_BY(mu_);
};

}  // namespace latentd

#endif  // LATENTD_SERVER_PIN_BOARD_H_
