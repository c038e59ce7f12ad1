// Random promises, loads, pins, cancels and caps of owners that wait for each other, against a model that
// knows what is possible: nobody is refused who could be served by what others let go of, nobody waits who
// could not, and nobody waits who could go ahead without delaying the first.
//
// One operation at a time: each owner has a thread, which a request may keep; after each operation the test
// waits until nobody can do anything any more, and looks. There is no clock in it: deadlines are far away,
// and their coming is a cancel.
//
// LATENTD_WAIT_SEED and LATENTD_WAIT_OPERATIONS change what is run.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "cache/base/error.h"
#include "cache/cache_test_util.h"
#include "cache/model_cache.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

constexpr int kOwners = 6;
constexpr int kKeys = 8;
constexpr int kRam = 0, kDevice = 1;

// A thread that does one thing after the other.
class Worker {
 public:
  Worker() : thread_([this] { Run(); }) {}
  ~Worker() {
    {
      MutexLock lock(&mu_);
      stop_ = true;
      changed_.Signal();
    }
    thread_.join();
  }
  void Do(std::function<void()> what) {
    MutexLock lock(&mu_);
    what_ = std::move(what);
    busy_ = true;
    changed_.Signal();
  }
  bool busy() const { return busy_; }

 private:
  void Run() {
    while (true) {
      std::function<void()> what;
      {
        MutexLock lock(&mu_);
        while (!busy_ && !stop_) changed_.Wait(&mu_);
        if (!busy_) return;
        what = std::move(what_);
      }
      what();
      what = nullptr;
      MutexLock lock(&mu_);
      busy_ = false;
    }
  }
  Mutex mu_;
  CondVar changed_;
  std::function<void()> what_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::atomic<bool> busy_ = false;
  std::thread thread_;
};

class MemoryWaitTest : public ::testing::Test {
 protected:
  // What somebody holds, and what the model knows of it.
  struct Held {
    int budget = kRam;
    int64_t bytes = 0;
    int key = -1;  // of a record; -1: a promise
    bool lasting = false;
    int64_t ahead_of = 0;  // a promise: the wait, first at the time, that it went ahead of
    bool sure = true;      // and whether that is known
  };
  struct Holding : Held {
    Reservation promise = {};
    LockHandle handle = {};
  };
  struct Wait {
    int owner = 0, budget = kRam;
    int64_t bytes = 0;  // that it needs, or that the load needs which it has joined
    std::set<int> keys = {};
    bool joined = false;  // somebody else's load
    int64_t turn = 0;     // larger is newer
  };
  struct Load {
    int64_t ahead_of = 0;  // as of Held
    bool sure = true;
  };
  // What the model knows at one moment.
  struct State {
    std::vector<std::vector<Held>> held = std::vector<std::vector<Held>>(kOwners);
    std::vector<std::vector<int>> taken = std::vector<std::vector<int>>(kOwners);  // as of Owner
    std::vector<Wait> waits = {};
    std::map<int, Load> loads = {};  // by key
    int64_t turns = 0;
    int anew = 0;  // waits that began anew for themselves, in one operation
  };
  // The end of a request.
  struct End {
    int owner = 0;
    absl::Status status = {};
    std::vector<Held> got = {};
  };
  struct Owner {
    std::string name;
    std::vector<Holding> holdings;
    std::vector<int> taken;  // keys that a request has already, while it waits for the rest
    std::stop_source stop;
    bool asks = false;
    bool cancelled = false;
    std::vector<Holding> got;
    absl::Status status;
    std::unique_ptr<Worker> worker = std::make_unique<Worker>();
  };

  MemoryWaitTest() {
    device.ShareWaits(ram);
    for (int i = 0; i < kOwners; ++i) {
      owners.emplace_back();
      owners.back().name = absl::StrCat("owner-", i);
    }
  }

  size_t Pick(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); }
  bool Chance(size_t one_in) { return Pick(one_in) == 0; }
  MemoryBudget& Budget(int budget) { return budget == kRam ? static_cast<MemoryBudget&>(ram) : device; }
  static int64_t BytesOf(int key) { return 4 + 5 * key; }
  static ModelKey Key(int key) { return {absl::StrCat("r", key), ""}; }
  static Loader LoaderOf(int key) {
    return {"claim", BytesOf(key),
            [key](const LoadContext&) -> Loaded { return std::make_shared<const Claim>(BytesOf(key)); }};
  }

  // --------------------------------------------------------------------------------------------- the model

  State Now() const {
    State now;
    for (int o = 0; o < kOwners; ++o) {
      now.held[o].assign(owners[o].holdings.begin(), owners[o].holdings.end());
      now.taken[o] = owners[o].taken;
    }
    now.waits = waits;
    now.loads = loads;
    now.turns = turns;
    return now;
  }
  // What is kept of a budget when the owners that `gone` marks have let go of all that is not lasting.
  int64_t Kept(const State& s, int budget, const std::vector<bool>& gone) const {
    int64_t bytes = 0;
    std::set<int> kept_keys;
    for (int o = 0; o < kOwners; ++o) {
      for (const Held& h : s.held[o]) {
        if (gone[o] && !h.lasting) continue;
        if (h.key >= 0) kept_keys.insert(h.key);
        if (h.key < 0 && h.budget == budget) bytes += h.bytes;
      }
      if (!gone[o]) kept_keys.insert(s.taken[o].begin(), s.taken[o].end());
    }
    if (budget == kRam) {
      for (int key : kept_keys) bytes += BytesOf(key);
    }
    return bytes;
  }
  int64_t Free(const State& s, int budget) const {
    return caps[budget] - Kept(s, budget, std::vector<bool>(kOwners, false));
  }
  static bool IsHeld(const State& s, int key) {
    for (int o = 0; o < kOwners; ++o) {
      if (std::any_of(s.held[o].begin(), s.held[o].end(), [&](const Held& h) { return h.key == key; }) ||
          std::count(s.taken[o].begin(), s.taken[o].end(), key) != 0) {
        return true;
      }
    }
    return false;
  }

  // Who loads what a wait has joined; -1 when it has joined none, or it is not known.
  static int LoaderOf(const State& s, const Wait& wait) {
    if (!wait.joined) return -1;
    for (const Wait& w : s.waits) {
      if (!w.joined && w.keys.count(*wait.keys.begin()) != 0) return w.owner;
    }
    return -1;
  }
  // Who gets to an end, when everybody lets go who can; `stays` never does.
  std::vector<bool> GoOn(const State& s, int stays = -1) const {
    std::vector<bool> on(kOwners, true);
    for (const Wait& w : s.waits) on[w.owner] = false;
    if (stays >= 0) on[stays] = false;
    for (bool more = true; more;) {
      more = false;
      for (const Wait& w : s.waits) {
        if (on[w.owner] || w.owner == stays) continue;
        const int loader = LoaderOf(s, w);
        if (loader >= 0 ? !on[loader] : w.bytes > caps[w.budget] - Kept(s, w.budget, on)) continue;
        on[w.owner] = more = true;
      }
    }
    return on;
  }
  bool Hopeless(const State& s, int owner, int budget, int64_t bytes) const {
    std::vector<bool> others(kOwners, true);
    others[owner] = false;
    return bytes > caps[budget] - Kept(s, budget, others);
  }
  // The first that waits for a budget itself; null when there is none.
  static const Wait* First(const State& s, int budget) {
    const Wait* first = nullptr;
    for (const Wait& w : s.waits) {
      if (w.budget == budget && !w.joined && (first == nullptr || w.turn < first->turn)) first = &w;
    }
    return first;
  }
  // Bytes that others got since the first is the first, and have: at least, or at most.
  static int64_t Ahead(const State& s, const Wait& first, bool at_most) {
    auto counts = [&](int64_t ahead_of, bool sure) { return ahead_of == first.turn && (sure || at_most); };
    int64_t bytes = 0;
    std::map<int, bool> keys;  // held ones, and whether they count
    for (int o = 0; o < kOwners; ++o) {
      auto look = [&](int key, bool lasting) {
        const bool not_its_own = o != first.owner && !lasting;
        keys[key] = (keys.count(key) == 0 || keys[key]) && not_its_own;
      };
      for (const Held& h : s.held[o]) {
        if (h.key >= 0) look(h.key, h.lasting);
        if (h.key < 0 && h.budget == first.budget && counts(h.ahead_of, h.sure)) bytes += h.bytes;
      }
      for (int key : s.taken[o]) look(key, false);
    }
    for (const auto& [key, may] : keys) {
      const auto load = s.loads.find(key);
      if (may && first.budget == kRam && load != s.loads.end() &&
          counts(load->second.ahead_of, load->second.sure)) {
        bytes += BytesOf(key);
      }
    }
    return bytes;
  }
  // Whether the first finds room when everybody else has let go, except for those who got ahead of it and for
  // somebody who now gets so many bytes.
  bool LeavesRoom(const State& s, const Wait& first, int64_t bytes, bool at_most) const {
    std::vector<bool> all_but(kOwners, true);
    all_but[first.owner] = false;
    return bytes + first.bytes + Ahead(s, first, at_most) <=
           caps[first.budget] - Kept(s, first.budget, all_but);
  }
  bool Delays(const State& s, const Wait& first, int owner, int64_t bytes, bool at_most) const {
    return !LeavesRoom(s, first, bytes, at_most) && GoOn(s, owner)[first.owner];
  }

  // ----------------------------------------------------------------------- the model: how requests may end

  // Null when it ends well, or has not begun.
  const char* WhyNot(const State& s, const End& end, const Wait& wait) const {
    const std::string reason = ErrorReason(end.status);
    if (end.status.ok()) return WhyNotServed(s, wait);
    if (reason == "CANCELLED") return owners[end.owner].cancelled ? nullptr : "nobody cancelled it";
    if (reason == "MODEL_EXCEEDS_BUDGET") {
      return wait.bytes > caps[wait.budget] ? nullptr : "it does not exceed the budget";
    }
    if (reason == "BUDGET_EXHAUSTED") {
      const int64_t bytes = wait.joined ? BytesOf(*wait.keys.begin()) : wait.bytes;
      return Hopeless(s, end.owner, wait.budget, bytes) ? nullptr : "it was not hopeless";
    }
    if (reason != "BUDGET_CYCLE") return "that is no way to end";
    if (GoOn(s)[end.owner]) return "others would have let go";
    const auto& held = s.held[end.owner];
    const bool holds = !s.taken[end.owner].empty() ||
                       std::any_of(held.begin(), held.end(), [](const Held& h) { return !h.lasting; });
    return holds || !wait.keys.empty() ? nullptr : "it holds nothing that others wait for";
  }
  const char* WhyNotServed(const State& s, const Wait& wait) const {
    int64_t bytes = wait.bytes;
    if (wait.joined) {  // and the load is over; or came to nothing, and it loads
      bytes = 0;
      for (int key : wait.keys) bytes += IsHeld(s, key) ? 0 : BytesOf(key);
    }
    if (bytes == 0) return nullptr;  // it is there
    if (bytes > Free(s, wait.budget)) return "there was no room";
    const Wait* first = First(s, wait.budget);
    const bool ahead = !wait.joined && !unclear && s.anew < 2 && first->owner != wait.owner;
    return ahead && Delays(s, *first, wait.owner, bytes, /*at_most=*/false) ? "it delays the first" : nullptr;
  }

  static Wait& WaitOf(State& s, int owner) {
    return *std::find_if(s.waits.begin(), s.waits.end(), [&](const Wait& w) { return w.owner == owner; });
  }
  void Apply(State& s, const End& end) const {
    const Wait wait = WaitOf(s, end.owner);
    const Wait* first = First(s, wait.budget);
    const int64_t ahead_of = first == nullptr || first->owner == end.owner ? 0 : first->turn;
    std::erase_if(s.waits, [&](const Wait& w) { return w.owner == end.owner; });
    s.taken[end.owner].clear();
    for (Held held : end.got) {
      held.ahead_of = ahead_of;
      held.sure = false;
      s.held[end.owner].push_back(held);
      if (held.key >= 0 && wait.keys.count(held.key) != 0) s.loads[held.key] = {ahead_of, false};
    }
    if (!end.status.ok() && !wait.joined) LoadForThemselves(s, wait.keys);
  }
  // Those who had joined a load that came to nothing. Of several who want the same, it is not known which one
  // loads.
  static void LoadForThemselves(State& s, const std::set<int>& keys) {
    for (int key : keys) {
      std::vector<Wait*> joined;
      for (Wait& w : s.waits) {
        if (w.joined && w.keys.count(key) != 0) joined.push_back(&w);
      }
      for (Wait* w : joined) w->bytes = BytesOf(key);
      s.anew += static_cast<int>(joined.size());
      if (joined.size() != 1) continue;
      joined[0]->joined = false;
      joined[0]->turn = ++s.turns;
    }
  }
  // Whether there is an order in which all of it can have happened; `s` becomes what it was after that.
  bool Explain(State& s, const std::vector<End>& ends) const {
    if (ends.empty()) return true;
    for (size_t i = 0; i < ends.size(); ++i) {
      if (WhyNot(s, ends[i], WaitOf(s, ends[i].owner)) != nullptr) continue;
      State next = s;
      Apply(next, ends[i]);
      std::vector<End> rest = ends;
      rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(i));
      if (!Explain(next, rest)) continue;
      s = std::move(next);
      return true;
    }
    return false;
  }

  // ------------------------------------------------------------------------------------------- operations

  void Wrong(const std::string& what) {
    if (wrong.empty()) wrong = absl::StrCat(what, "\nafter ", doing, "\n", Describe());
  }
  bool Waiting(int o) const {
    return std::any_of(waits.begin(), waits.end(), [&](const Wait& w) { return w.owner == o; });
  }

  // Until everybody who is busy waits, and nobody who waits can go on.
  void Settle() {
    while (true) {
      const uint64_t settled = ram.waits()->Settled();
      const bool all_wait = std::all_of(owners.begin(), owners.end(), [&](const Owner& o) {
        return !o.worker->busy() || (!o.cancelled && ram.waits()->Waits(o.name));
      });
      if (settled != 0 && all_wait && ram.waits()->Settled() == settled) return;
      std::this_thread::yield();
    }
  }

  void Ask(int o, Wait wait, std::function<absl::StatusOr<std::vector<Holding>>()> ask) {
    Owner& owner = owners[o];
    owner.stop = std::stop_source();
    owner.asks = true;
    owner.cancelled = false;
    wait.owner = o;
    wait.turn = ++turns;
    waits.push_back(std::move(wait));
    owner.worker->Do([&owner, ask = std::move(ask)] {
      auto got = ask();
      owner.status = got.status();
      owner.got.clear();
      if (got.ok()) owner.got = *std::move(got);
    });
  }

  void Reserve(int o) {
    const int budget = Chance(3) ? kDevice : kRam;
    const auto bytes = static_cast<int64_t>(1 + Pick(Chance(3) ? 90 : 25));
    doing = absl::StrCat(owners[o].name, " reserves ", bytes, "@", budget);
    const MemoryBudget::Request request = {.bytes = bytes, .owner = owners[o].name, .what = "promise"};
    if (Chance(4)) return Try(o, budget, request);
    Ask(o, {.budget = budget, .bytes = bytes},
        [this, o, budget, request]() -> absl::StatusOr<std::vector<Holding>> {
          MemoryBudget::Request asked = request;
          asked.stop = owners[o].stop.get_token();
          ASSIGN_OR_RETURN(Reservation r, Budget(budget).Reserve(asked));
          std::vector<Holding> got(1);
          got[0].promise = std::move(r);
          got[0].budget = budget;
          got[0].bytes = asked.bytes;
          return got;
        });
  }

  void Try(int o, int budget, const MemoryBudget::Request& request) {
    auto got = Budget(budget).TryReserve(request);
    const State now = Now();
    const Wait* first = First(now, budget);
    const bool fits = request.bytes <= Free(now, budget);
    const bool surely = first == nullptr || !Delays(now, *first, o, request.bytes, /*at_most=*/true);
    const bool never = first != nullptr && Delays(now, *first, o, request.bytes, /*at_most=*/false);
    if (got.ok() ? !fits || (never && !unclear) : fits && surely && !unclear) {
      Wrong(absl::StrCat("TryReserve of ", request.bytes, ": ", got.status().ToString(), "; fits ", fits));
    }
    ++counts[got.ok() ? (first == nullptr ? "tries" : "tries ahead of others") : "tries refused"];
    if (!got.ok()) {
      const bool hopeless = GetErrorDetails(got.status()).count("hopeless") != 0;
      if (request.bytes <= caps[budget] && hopeless != Hopeless(now, o, budget, request.bytes))
        Wrong("hopeless?");
      return;
    }
    Holding held;
    held.promise = *std::move(got);
    held.budget = budget;
    held.bytes = request.bytes;
    held.ahead_of = first == nullptr ? 0 : first->turn;
    owners[o].holdings.push_back(std::move(held));
  }

  void Lock(int o) {
    std::set<int> keys;
    const size_t n = Chance(3) ? 1 + Pick(3) : 1;
    while (keys.size() < n) keys.insert(static_cast<int>(Pick(kKeys)));
    const bool lasting = Chance(8);
    Wait wait;
    std::vector<int> taken;
    for (int key : keys) {
      auto loading =
          std::find_if(waits.begin(), waits.end(), [&](const Wait& w) { return w.keys.count(key) != 0; });
      if (loading != waits.end()) {
        if (n > 1) return;
        wait.joined = true;
        wait.bytes = loading->bytes;
        wait.keys = {key};
      } else if (cache.Find(Key(key))) {
        taken.push_back(key);
      } else {
        wait.bytes += BytesOf(key);
        wait.keys.insert(key);
      }
    }
    doing = absl::StrCat(owners[o].name, " locks ", keys.size(), lasting ? " for good" : "");
    owners[o].taken = std::move(taken);
    Ask(o, std::move(wait), [this, o, keys, lasting]() -> absl::StatusOr<std::vector<Holding>> {
      std::vector<LockRequest> requests;
      for (int key : keys) requests.push_back({Key(key), LoaderOf(key)});
      const LockOptions options = {
          .owner = owners[o].name, .stop = owners[o].stop.get_token(), .lasting = lasting};
      std::vector<LockHandle> handles;
      if (requests.size() == 1) {
        ASSIGN_OR_RETURN(LockHandle handle, cache.Lock(requests[0].key, requests[0].loader, options));
        handles.push_back(std::move(handle));
      } else {
        ASSIGN_OR_RETURN(handles, cache.LockAll(requests, options));
      }
      std::vector<Holding> got(handles.size());
      for (size_t i = 0; i < handles.size(); ++i) {
        got[i].key = handles[i].key().id[1] - '0';
        got[i].bytes = BytesOf(got[i].key);
        got[i].lasting = lasting;
        got[i].handle = std::move(handles[i]);
      }
      return got;
    });
  }

  // One after the other, each an operation of its own: others see what is between them, too.
  void LetGo(int o, bool all) {
    auto& holdings = owners[o].holdings;
    while (true) {
      std::swap(holdings[Pick(holdings.size())], holdings.back());
      doing = absl::StrCat(owners[o].name, " lets go of ", holdings.back().bytes);
      holdings.pop_back();
      if (!all || holdings.empty() || !wrong.empty()) return;
      After();
    }
  }

  void SetCap() {
    const int budget = Chance(2) ? kRam : kDevice;
    caps[budget] = static_cast<int64_t>(Chance(2) ? 100 : 60 + Pick(80));
    doing = absl::StrCat("cap ", budget, " = ", caps[budget]);
    Budget(budget).set_cap(caps[budget]);
  }

  void Step() {
    const int o = static_cast<int>(Pick(kOwners));
    Owner& owner = owners[o];
    if (Chance(60)) return SetCap();
    if (Waiting(o)) {
      if (!Chance(6)) return;
      doing = absl::StrCat("cancel of ", owner.name);
      owner.cancelled = true;
      owner.stop.request_stop();
      return;
    }
    if (!owner.holdings.empty() && (owner.holdings.size() > 4 || Chance(3))) return LetGo(o, Chance(2));
    if (Chance(40)) {
      doing = absl::StrCat(owner.name, " will end");
      cache.WillEnd(owner.name);
      for (Holding& h : owner.holdings) h.lasting = false;
      return;
    }
    Chance(2) ? Reserve(o) : Lock(o);
  }

  // ---------------------------------------------------------------------------------------------- looking

  void After() {
    Settle();
    Harvest();
    Look();
  }

  // Takes what came of requests into the model, if it can have come so.
  void Harvest() {
    std::vector<End> ends;
    for (int o = 0; o < kOwners; ++o) {
      Owner& owner = owners[o];
      if (!owner.asks || owner.worker->busy()) continue;
      ends.push_back({o, owner.status, {owner.got.begin(), owner.got.end()}});
      ++counts[owner.status.ok()
                   ? "served"
                   : ErrorReason(owner.status) +
                         (GetErrorDetails(owner.status).count("hopeless") != 0 ? " hopeless" : "")];
    }
    State state = Now();
    const int64_t first_was[2] = {FirstTurn(state, kRam), FirstTurn(state, kDevice)};
    if (!Explain(state, ends)) return Wrong(DescribeEnds(ends));
    for (const End& end : ends) {
      Owner& owner = owners[end.owner];
      const Wait wait =
          *std::find_if(waits.begin(), waits.end(), [&](const Wait& w) { return w.owner == end.owner; });
      const int64_t first = FirstTurn(state, wait.budget);
      const bool sure = first == 0 || first == first_was[wait.budget];
      if (end.status.ok()) {
        for (int key : wait.keys) loads[key] = {first, sure};
      }
      for (Holding& h : owner.got) {
        h.ahead_of = first;
        h.sure = sure;
        owner.holdings.push_back(std::move(h));
      }
      owner.got.clear();
      owner.asks = owner.cancelled = false;
      owner.taken.clear();
    }
    waits = state.waits;
    turns = state.turns;
    unclear |= state.anew > 1;
  }
  static int64_t FirstTurn(const State& s, int budget) {
    const Wait* first = First(s, budget);
    return first == nullptr ? 0 : first->turn;
  }
  std::string DescribeEnds(const std::vector<End>& ends) const {
    std::string text = "there is no order in which this can have happened:";
    State now = Now();
    for (const End& end : ends) {
      const char* why = WhyNot(now, end, WaitOf(now, end.owner));
      absl::StrAppend(&text, "\n", owners[end.owner].name, ": ", end.status.ToString(), " (",
                      why == nullptr ? "as it should be" : why, ")");
    }
    return text;
  }

  std::string Describe(const Wait& w) const {
    return absl::StrCat(owners[w.owner].name, w.joined ? " joined " : " waits for ", w.bytes, "@", w.budget,
                        " since ", w.turn);
  }
  // What everybody holds and waits for.
  std::string Describe() const {
    std::string text = absl::StrCat("caps ", caps[0], " ", caps[1]);
    for (const Owner& owner : owners) {
      absl::StrAppend(&text, "\n", owner.name, ":");
      for (const Holding& h : owner.holdings) {
        absl::StrAppend(&text, " ", h.key < 0 ? absl::StrCat("promise@", h.budget) : absl::StrCat("r", h.key),
                        "=", h.bytes, h.lasting ? "!" : "", "^", h.ahead_of, h.sure ? "" : "?");
      }
      for (int key : owner.taken) absl::StrAppend(&text, " (r", key, ")");
    }
    for (const Wait& w : waits) absl::StrAppend(&text, "\n", Describe(w));
    for (const auto& [key, load] : loads)
      absl::StrAppend(&text, "\nr", key, "^", load.ahead_of, load.sure ? "" : "?");
    return text;
  }

  void Look() {
    const State now = Now();
    const std::vector<bool> on = GoOn(now);
    for (const Wait& w : waits) {
      const std::string who = absl::StrCat(owners[w.owner].name, " waits for ", w.bytes, " of ", w.budget);
      if (Hopeless(now, w.owner, w.budget, w.bytes)) Wrong(who + ", which is hopeless");
      if (!on[w.owner]) Wrong(who + ", which nobody lets go of");
    }
    for (int budget : {kRam, kDevice}) {
      if (Budget(budget).stats().in_use_bytes + Budget(budget).stats().reserved_bytes <
          Kept(now, budget, std::vector<bool>(kOwners, false))) {
        Wrong("the model holds more than the budget says");
      }
      LookAtOrder(now, budget);
    }
    if (waits.empty()) unclear = false;
  }

  void LookAtOrder(const State& now, int budget) {
    const Wait* first = First(now, budget);
    for (const Wait& w : now.waits) {
      if (w.budget != budget || w.joined || w.bytes > Free(now, budget)) continue;
      if (!unclear && (&w == first || !Delays(now, *first, w.owner, w.bytes, /*at_most=*/true))) {
        Wrong(absl::StrCat(owners[w.owner].name, " waits for ", w.bytes, ", which is there"));
      }
      ++counts["in order behind others"];
    }
  }

  std::mt19937_64 random;
  RamBudget ram{100};
  DeviceBudget device{"device", 100};
  ModelCache cache{&ram, {}};
  int64_t caps[2] = {100, 100};
  std::vector<Owner> owners;
  std::vector<Wait> waits;
  int64_t turns = 0;
  bool unclear = false;       // the order of those who wait
  std::map<int, Load> loads;  // by key
  std::map<std::string, int64_t> counts;
  std::string wrong;
  std::string doing;  // the operation, for messages
};

TEST_F(MemoryWaitTest, NobodyIsRefusedOrWaitsWhoNeedNot) {
  auto from_environment = [](const char* name, int64_t otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::atoll(text);
  };
  const int64_t seed = from_environment("LATENTD_WAIT_SEED", 20261201);
  const int64_t operations = from_environment("LATENTD_WAIT_OPERATIONS", kSanitized ? 25'000 : 100'000);
  random.seed(static_cast<uint64_t>(seed));
  int64_t done = 0;
  for (; done < operations && wrong.empty(); ++done) {
    doing.clear();
    Step();
    After();
  }
  std::printf("seed %lld: %lld operations", static_cast<long long>(seed), static_cast<long long>(done));
  for (const auto& [what, n] : counts) std::printf(", %lld %s", static_cast<long long>(n), what.c_str());
  std::printf("\n");
  for (Owner& owner : owners) owner.stop.request_stop();
  for (Owner& owner : owners) {
    owner.worker = nullptr;
    owner.holdings.clear();
    owner.got.clear();
  }
  ASSERT_EQ(wrong, "") << "at operation " << done << " of seed " << seed;
  cache.Trim(MemoryBudget::kUnlimited);
  for (MemoryBudget* budget : {static_cast<MemoryBudget*>(&ram), static_cast<MemoryBudget*>(&device)}) {
    EXPECT_EQ(budget->stats().in_use_bytes + budget->stats().reserved_bytes, 0);
    EXPECT_EQ(budget->stats().waiting, 0);
  }
  for (const char* what : {"served", "CANCELLED", "BUDGET_CYCLE", "BUDGET_EXHAUSTED hopeless",
                           "tries ahead of others", "in order behind others"}) {
    EXPECT_GT(counts[what], 0) << what;
  }
}

}  // namespace
}  // namespace latentd
