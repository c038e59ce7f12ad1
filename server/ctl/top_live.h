// latentctl top: asks the server again and again, and shows the answers in the terminal.
#ifndef LATENTD_SERVER_CTL_TOP_LIVE_H_
#define LATENTD_SERVER_CTL_TOP_LIVE_H_

#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/ctl/client.h"

namespace latentd::ctl {

struct TopOptions {
  // Left out: a second for the live view; a single print asks once, and has no rates.
  std::optional<absl::Duration> interval;
  bool once = false;  // so it is, too, in JSON and where stdout is no terminal
};

// Until q or an interrupt. Errors: those of the first try; later ones are shown and tried again.
absl::Status RunTop(const GlobalOptions& global, const TopOptions& options);

}  // namespace latentd::ctl

#endif  // LATENTD_SERVER_CTL_TOP_LIVE_H_
