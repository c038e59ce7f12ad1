#include "cache/base/start_thread.h"

#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "cache/base/fault_injection.h"

namespace latentd {

absl::Status NoThread(absl::string_view what, absl::string_view why) {
  return MakeError(absl::StatusCode::kResourceExhausted, "NO_THREADS",
                   absl::StrCat("the system gives no thread for ", what, " (", why,
                                "); raise the limit of processes (ulimit -u, TasksMax, pids.max)"),
                   {{"thread", std::string(what)}, {"retry_ms", "2000"}});
}

absl::StatusOr<std::thread> StartThread(absl::string_view what, std::function<void()> body) {
  RETURN_IF_ERROR(MaybeFail(FaultPoint::kThread, what));
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& e) {
    return NoThread(what, e.code().message());
  }
}

}  // namespace latentd
