// Models and LoRAs that are held for nobody in particular: loaded ahead of their first job, or for good.
//
// Thread-safe. Loads wait for memory on threads of their own, and few of them at once: what ends such a wait,
// a session that closes, is the workers' business.
#ifndef LATENTD_SERVER_CATALOG_PIN_BOARD_H_
#define LATENTD_SERVER_CATALOG_PIN_BOARD_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "cache/base/mutex.h"
#include "cache/model_cache.h"
#include "server/runtime/worker_pool.h"

namespace latentd {

struct OpenModel;
struct ServerCore;

class PinBoard {
 public:
  explicit PinBoard(ServerCore* core) : core_(core) {}
  ~PinBoard() { Close(); }

  struct Loaded {
    std::vector<ModelKey> keys;
    int64_t bytes = 0;
    int loaded_records = 0;  // those that were not there
  };
  // `components` empty: all. `device` empty: host memory alone. With `pin`, held until Unload, besides what
  // is pinned already. All or nothing. Blocks.
  // Errors: NOT_FOUND MODEL_NOT_FOUND for what is neither a model nor a LoRA; INVALID_ARGUMENT INVALID_FIELD;
  // those of ModelCache, CANCELLED by `stop`; UNAVAILABLE SERVER_DRAINING after Close().
  absl::StatusOr<Loaded> Load(const std::string& name, const std::vector<std::string>& components,
                              const std::string& device, bool pin, const std::stop_token& stop = {});

  // Calls `load` on a thread that is there for loads. Errors: RESOURCE_EXHAUSTED TOO_MANY_LOADS, NO_THREADS.
  absl::Status Submit(std::function<void()> load);
  static constexpr int kMaxLoads = 16;  // at once

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

  // All of them, for one load, or none.
  absl::StatusOr<std::vector<Pin>> Lock(const std::vector<LockRequest>& requests, Device* copy_to,
                                        const std::stop_token& stop);

  ServerCore* const core_;
  Mutex mu_;
  std::stop_source stop_;
  std::map<std::string, std::vector<Pin>> pins_ ABSL_GUARDED_BY(mu_);
  std::atomic<int> loads_ = 0;
  std::atomic<int64_t> loads_ever_ = 0;
  std::unique_ptr<WorkerPool> threads_;  // made with the first load; last: its tasks use the rest
};

}  // namespace latentd

#endif  // LATENTD_SERVER_CATALOG_PIN_BOARD_H_
