// latentctl top: what the view shows, without the terminal and without the connection (ctl_top_live.h).
#ifndef LATENTD_SERVER_CTL_TOP_H_
#define LATENTD_SERVER_CTL_TOP_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "latentd/v1/cache.pb.h"
#include "latentd/v1/server.pb.h"
#include "server/ctl/terminal.h"

namespace latentd::ctl {

// What a server said of itself.
struct TopSnapshot {
  v1::GetServerInfoResponse info;
  v1::GetCacheStatsResponse cache;
  v1::ListSessionsResponse sessions;
  absl::Time time;
};

struct TopState {
  std::optional<TopSnapshot> now;
  // The one before it, of the same run of the server; rates are from both.
  std::optional<TopSnapshot> before;
  // Of the last try, after which `now` is what was known before.
  absl::Status error;
};

// Per second.
struct TopRates {
  double loads = 0;
  double evictions = 0;  // of any reason
  double hits = 0;
  double bytes_loaded = 0;
};
std::optional<TopRates> Rates(const TopState& state);

// The view in at most size.columns × size.rows characters. 0 columns: as wide as it needs to be; 0 rows: all
// of it, with an empty line between the parts. What has no room is left out, and a line says how much.
std::vector<StyledLine> DrawTop(const TopState& state, TerminalSize size, absl::Time now);

// All of it in one object.
std::string TopJson(const TopState& state);

}  // namespace latentd::ctl

#endif  // LATENTD_SERVER_CTL_TOP_H_
