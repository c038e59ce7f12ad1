// latentctl: the connection to a daemon, and what ends a call early.
#ifndef LATENTD_SERVER_CTL_CLIENT_H_
#define LATENTD_SERVER_CTL_CLIENT_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/rpc/listener.h"

namespace latentd::ctl {

// What every command takes.
struct GlobalOptions {
  std::string address;  // empty: $LATENTD_ADDRESS, else the first default address that answers
  bool json = false;
  std::optional<absl::Duration> timeout;
};

// A channel to the daemon. Errors: UNAVAILABLE NO_SERVER with the addresses that were tried; INVALID_ARGUMENT
// INVALID_ADDRESS.
absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const GlobalOptions& options);

// Turns SIGINT and SIGTERM into the cancellation of the call in progress; a second one ends the process.
// Once, before the first thread starts.
void InstallInterruptHandler();
bool Interrupted();

// While it lives, an interrupt makes fd() readable and leaves it to the owner to end; a second one still ends
// the process, after `before_exit`. One at a time.
class InterruptWatch {
 public:
  explicit InterruptWatch(std::function<void()> before_exit);
  ~InterruptWatch();
  InterruptWatch(const InterruptWatch&) = delete;
  InterruptWatch& operator=(const InterruptWatch&) = delete;

  int fd() const { return fd_.get(); }

 private:
  const Fd fd_;
};

// Cancels the call in progress, if there is one. Any thread.
void CancelCall();

// The context of one call, with the deadline, and cancelled by an interrupt. `limit` is the deadline where
// the user gave none; without it there is none.
class Call {
 public:
  Call(const GlobalOptions& options, std::optional<absl::Duration> limit);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  grpc::ClientContext* context() { return &context_; }

  // The call's status as a typed error; INTERRUPTED when an interrupt ended it.
  absl::Status Result(const grpc::Status& status) const;

 private:
  grpc::ClientContext context_;
};

// Of calls that only ask something.
inline constexpr absl::Duration kUnaryLimit = absl::Seconds(30);

}  // namespace latentd::ctl

#endif  // LATENTD_SERVER_CTL_CLIENT_H_
