// The epoll set's events carry a connection's id and which of its two descriptors it is. A descriptor is
// asked for input while what came from it before is gone, and for output while something waits to go there.
#include "server/rpc/relay.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"

namespace latentd {
namespace {

constexpr size_t kPiece = 64 * 1024;
constexpr int kTickMs = 500;
constexpr int kWaitMs = 20;  // between looks at clients that have to wait
constexpr absl::Duration kLogInterval = absl::Seconds(1);
constexpr absl::Duration kUnusedAge = absl::Seconds(1);
constexpr absl::Duration kLastWords = absl::Seconds(2);
// A buffer that a burst has grown is not kept.
constexpr size_t kKeepCapacity = 16 * 1024;

std::string Nonce() {
  std::random_device device;
  return absl::StrCat(absl::Hex(device(), absl::kZeroPad8), absl::Hex(device(), absl::kZeroPad8));
}

// Names one end of a pair, so that the other one's owner sees who is behind it.
bool NameSocket(int fd, const std::string& name) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof(address.sun_path)) return false;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // behind a NUL: no file
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return bind(fd, reinterpret_cast<const sockaddr*>(&address), size) == 0;
}

// Sends what it can off the front. False when the other side is gone.
bool Flush(int fd, std::string& bytes) {
  size_t at = 0;
  bool alive = true;
  while (at < bytes.size()) {
    const ssize_t sent = send(fd, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) {
      alive = errno == EAGAIN || errno == EWOULDBLOCK;
      break;
    }
    at += static_cast<size_t>(sent);
  }
  bytes.erase(0, at);
  if (bytes.empty() && bytes.capacity() > kKeepCapacity) std::string().swap(bytes);
  return alive;
}

}  // namespace

struct Relay::Connection {
  Connection(uint64_t id, Fd client, Fd pair, const Http2Limits& limits, RequestMemory* memory,
             SharedLimits* shared, const std::string& owner)
      : id(id),
        client(std::move(client)),
        pair(std::move(pair)),
        guard(limits, memory, shared, owner, absl::Now()) {}

  const uint64_t id;
  Fd client, pair;
  Http2Guard guard;
  std::string from_client;  // not let through yet
  std::string to_server, to_client;
  bool client_done = false;  // it sends no more
  bool told_server = false;  // and gRPC knows
  bool server_deaf = false;  // gRPC takes no more
  bool server_done = false;  // gRPC has closed: what is left goes to the client, then all ends
  bool waits = false;
  bool gone = false;
  bool spoken = false, used = false;            // as the entry has it
  uint32_t client_events = 0, pair_events = 0;  // asked for
};

Relay::Relay(const RelayLimits& limits, RequestMemory* memory)
    : limits_(limits),
      memory_(memory),
      nonce_(Nonce()),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      scratch_(kPiece) {
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = 0;
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
  thread_ = std::thread([this] { Run(); });
}

Relay::~Relay() {
  stopping_ = true;
  eventfd_write(wake_.get(), 1);
  thread_.join();
  MutexLock lock(&mu_);
  fresh_.clear();  // their guards count in shared_, which goes before them otherwise
}

Relay::Stats Relay::stats() const {
  MutexLock lock(&mu_);
  Stats stats = stats_;
  stats.open = static_cast<int64_t>(entries_.size());
  return stats;
}

// ---------------------------------------------------------------------------------------------- connections

Fd Relay::Add(Fd client, int listener) {
  const SocketPeer peer = PeerOfSocket(client.get());
  int ends[2] = {-1, -1};
  const bool paired = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0;
  Fd ours(ends[0]), grpcs(ends[1]);
  {
    MutexLock lock(&mu_);
    const uint64_t id = next_++;
    if (!paired || !NameSocket(ours.get(), PairName(peer.peer, absl::StrCat(nonce_, "-", id))) ||
        !MakeRoom(listener, peer.group)) {
      if (stats_.refused++ == 0) {
        spdlog::warn("a connection from {} was refused: {}", peer.group,
                     paired ? "there are too many" : "there are no descriptors");
      }
      return Fd();
    }
    entries_[id] = {.listener = listener, .group = peer.group, .born = absl::Now()};
    ++by_listener_[listener];
    ++by_group_[peer.group];
    ++stats_.accepted;
    fresh_.push_back(std::make_unique<Connection>(id, std::move(client), std::move(ours), limits_.http2,
                                                  memory_, &shared_, absl::StrCat("client ", peer.group)));
  }
  eventfd_write(wake_.get(), 1);
  return grpcs;
}

bool Relay::MakeRoom(int listener, const std::string& group) {
  if (auto it = by_group_.find(group);
      it != by_group_.end() && it->second >= limits_.connections_per_peer && !Displace(listener, &group)) {
    return false;
  }
  const bool full = static_cast<int64_t>(entries_.size()) >= limits_.connections ||
                    by_listener_[listener] >= limits_.connections_per_listener;
  return !full || Displace(listener, nullptr);
}

// Ends the oldest connection of that listener, and peer, that has said nothing, or the oldest without a call.
bool Relay::Displace(int listener, const std::string* group) {
  const absl::Time old = absl::Now() - kUnusedAge;
  auto victim = entries_.end();
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    const Entry& entry = it->second;
    if (entry.listener != listener || entry.used || (group != nullptr && entry.group != *group)) continue;
    if (!entry.spoken) {
      victim = it;
      break;
    }
    if (victim == entries_.end() && entry.born < old) victim = it;
  }
  if (victim == entries_.end()) return false;
  const uint64_t id = victim->first;
  displaced_.push_back(id);
  ++stats_.displaced;
  Forget(id);
  return true;
}

void Relay::Forget(uint64_t id) {
  auto it = entries_.find(id);
  if (it == entries_.end()) return;
  --by_listener_[it->second.listener];
  if (auto group = by_group_.find(it->second.group); --group->second == 0) by_group_.erase(group);
  entries_.erase(it);
}

// ------------------------------------------------------------------------------------------------ the thread

void Relay::Run() {
  constexpr int kEvents = 64;
  epoll_event events[kEvents];
  absl::Time next_tick = absl::Now();
  absl::Time end = absl::InfiniteFuture();
  // The server is gone before its relay, and its last words may still be on their way.
  while (absl::Now() < end && !(stopping_ && connections_.empty())) {
    if (stopping_ && end == absl::InfiniteFuture()) end = absl::Now() + kLastWords;
    const int count =
        epoll_wait(epoll_.get(), events, kEvents, waiting_ > 0 || stopping_ ? kWaitMs : kTickMs);
    for (int i = 0; i < count; ++i) {
      const uint64_t tag = events[i].data.u64;
      if (tag == 0) {
        eventfd_t ignored;
        eventfd_read(wake_.get(), &ignored);
        continue;
      }
      auto it = connections_.find(tag / 2);
      if (it != connections_.end()) OnEvent(*it->second, tag % 2 == 0, events[i].events);
    }
    TakeIn();
    const absl::Time now = absl::Now();
    if (waiting_ > 0) {
      for (auto& [id, connection] : connections_) {
        if (connection->waits) Carry(*connection);
      }
    }
    if (now >= next_tick) {
      Tick();
      next_tick = now + absl::Milliseconds(kTickMs);
    }
    std::erase_if(connections_, [](const auto& item) { return item.second->gone; });
  }
  connections_.clear();
}

void Relay::TakeIn() {
  std::vector<std::unique_ptr<Connection>> fresh;
  std::vector<uint64_t> displaced;
  {
    MutexLock lock(&mu_);
    fresh.swap(fresh_);
    displaced.swap(displaced_);
  }
  for (auto& connection : fresh) {
    Connection& c = *connection;
    connections_[c.id] = std::move(connection);
    epoll_event event = {};
    event.events = c.client_events = c.pair_events = EPOLLIN;
    event.data.u64 = c.id * 2;
    bool watched = epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, c.client.get(), &event) == 0;
    event.data.u64 = c.id * 2 + 1;
    watched = watched && epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, c.pair.get(), &event) == 0;
    if (!watched) End(c);
  }
  for (uint64_t id : displaced) {
    auto it = connections_.find(id);
    if (it != connections_.end()) End(*it->second);
  }
}

void Relay::OnEvent(Connection& c, bool of_client, uint32_t events) {
  if (c.gone) return;
  // A reset, or both directions shut. gRPC's end may close with bytes still in the pair: those are read
  // first.
  if (of_client && (events & (EPOLLERR | EPOLLHUP)) != 0 && (events & EPOLLIN) == 0) return End(c);
  Carry(c);
}

void Relay::Carry(Connection& c) {
  if (c.gone) return;
  const bool alive = CarryToServer(c) && CarryToClient(c);
  if (alive && c.guard.over().ok()) {
    if (c.spoken != c.guard.spoken() || c.used != c.guard.used()) {
      c.spoken = c.guard.spoken();
      c.used = c.guard.used();
      MutexLock lock(&mu_);
      if (auto it = entries_.find(c.id); it != entries_.end()) {
        it->second.spoken = c.spoken;
        it->second.used = c.used;
      }
    }
    return Watch(c);
  }
  End(c);
}

// Whether more is wanted from the client.
bool Relay::Listens(const Connection& c) {
  return c.to_server.empty() && !c.client_done && !c.server_deaf && !c.waits && c.from_client.size() < kPiece;
}

// Each of the two takes one piece at most, so that nobody keeps the thread for long. False: it is over.
bool Relay::CarryToServer(Connection& c) {
  const absl::Time now = absl::Now();
  if (Listens(c)) {
    const ssize_t got =
        recv(c.client.get(), scratch_.data(), scratch_.size() - c.from_client.size(), MSG_DONTWAIT);
    if (got > 0) {
      c.from_client.append(scratch_.data(), static_cast<size_t>(got));
    } else if (got == 0) {
      c.client_done = true;
    } else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
      return false;
    }
  }
  if (c.to_server.empty() && !c.server_deaf) {
    const bool waited = c.waits;
    c.waits = c.guard.PassClientBytes(c.from_client, c.to_server, now);
    waiting_ += (c.waits ? 1 : 0) - (waited ? 1 : 0);
    c.guard.TakeRefusals(c.to_server, c.to_client);
  }
  if (c.from_client.empty() && c.from_client.capacity() > kKeepCapacity) std::string().swap(c.from_client);
  if (!c.server_deaf && !Flush(c.pair.get(), c.to_server))
    c.server_deaf = true;  // its last words may be there
  if (c.server_deaf) c.to_server.clear();
  // A client that has gone while it has to wait is not waited for.
  if (c.client_done && c.waits) return false;
  if (c.client_done && c.to_server.empty() && !c.told_server) {
    shutdown(c.pair.get(), SHUT_WR);
    c.told_server = true;
  }
  return true;
}

bool Relay::CarryToClient(Connection& c) {
  if (c.to_client.empty() && !c.server_done) {
    const ssize_t got = recv(c.pair.get(), scratch_.data(), scratch_.size(), MSG_DONTWAIT);
    if (got > 0) {
      c.guard.PassServerBytes({scratch_.data(), static_cast<size_t>(got)}, c.to_client);
      c.guard.TakeRefusals(c.to_server, c.to_client);
    } else if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
      c.server_done = true;
    }
  }
  if (!Flush(c.client.get(), c.to_client)) return false;
  return !c.server_done || !c.to_client.empty();
}

void Relay::Watch(Connection& c) {
  uint32_t client = 0, pair = 0;
  if (Listens(c)) client |= EPOLLIN;
  if (!c.to_client.empty()) client |= EPOLLOUT;
  if (c.to_client.empty() && !c.server_done) pair |= EPOLLIN;
  if (!c.to_server.empty()) pair |= EPOLLOUT;
  epoll_event event = {};
  if (client != c.client_events) {
    event.events = c.client_events = client;
    event.data.u64 = c.id * 2;
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, c.client.get(), &event);
  }
  if (pair != c.pair_events) {
    // A descriptor in the set reports that the other end is closed, asked or not.
    const int change = c.pair_events == 0 ? EPOLL_CTL_ADD : pair == 0 ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;
    event.events = c.pair_events = pair;
    event.data.u64 = c.id * 2 + 1;
    epoll_ctl(epoll_.get(), change, c.pair.get(), &event);
  }
}

void Relay::Tick() {
  const absl::Time now = absl::Now();
  for (auto& [id, connection] : connections_) {
    Connection& c = *connection;
    // While gRPC takes nothing, it is not the client that is slow.
    if (c.gone || !c.to_server.empty()) continue;
    c.guard.Tick(now);
    c.guard.TakeRefusals(c.to_server, c.to_client);
    if (!c.guard.over().ok() || !c.to_client.empty() || !c.to_server.empty()) Carry(c);
  }
}

void Relay::End(Connection& c) {
  if (c.gone) return;
  c.gone = true;
  if (c.waits) --waiting_;
  c.waits = false;
  if (!c.guard.over().ok()) {
    std::string goodbye = c.guard.Goodbye();
    if (c.to_client.empty()) Flush(c.client.get(), goodbye);
  }
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, c.client.get(), nullptr);
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, c.pair.get(), nullptr);
  MutexLock lock(&mu_);
  if (!c.guard.over().ok()) {
    ++stats_.ended;
    const absl::Time now = absl::Now();
    if (auto it = entries_.find(c.id); it != entries_.end() && now - logged_ > kLogInterval) {
      logged_ = now;
      spdlog::warn("a connection from {} was ended, the {}th: it {}", it->second.group, stats_.ended,
                   std::string(c.guard.over().message()));
    }
  }
  Forget(c.id);
}

}  // namespace latentd
