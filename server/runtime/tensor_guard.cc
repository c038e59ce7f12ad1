#include "server/runtime/tensor_guard.h"

#include <new>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "c10/util/Exception.h"
#include "cache/base/error.h"
#include "cache/weights/weight_stream.h"
#include "spdlog/spdlog.h"

namespace latentd {
namespace {

absl::Status OutOfMemory() {
  return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                   "the machine ran out of memory; use smaller pictures, fewer at once, or lower the caps");
}

}  // namespace

absl::Status GuardTensorCode(absl::string_view where, const std::function<absl::Status()>& code) {
  std::string text;
  try {
    return code();
  } catch (const StatusError& e) {
    return e.status();
  } catch (const c10::OutOfMemoryError& e) {
    spdlog::error("out of memory in {}: {}", std::string(where), e.what_without_backtrace());
    return OutOfMemory();
  } catch (const std::bad_alloc&) {
    spdlog::error("out of memory in {}", std::string(where));
    return OutOfMemory();
  } catch (const c10::Error& e) {
    text = e.what_without_backtrace();
  } catch (const std::exception& e) {
    text = e.what();
  }
  spdlog::error("exception in {}: {}", std::string(where), text);
  if (absl::StrContains(text, "DefaultCPUAllocator")) return OutOfMemory();
  return MakeError(absl::StatusCode::kInternal, "INFERENCE_FAILED",
                   absl::StrCat("the computation failed in ", where, "; the server's log has the cause"));
}

}  // namespace latentd
