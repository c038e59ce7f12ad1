#include "server/catalog/pin_board.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "server/server_core.h"

namespace latentd {
namespace {

constexpr char kOwner[] = "pin";

// What to lock, for a model's components, a LoRA or an embedding. Sets `opened` to the model, if it is one.
absl::StatusOr<std::vector<LockRequest>> Requests(Catalog& catalog, const std::string& name,
                                                  const std::vector<std::string>& components,
                                                  std::shared_ptr<const OpenModel>& opened) {
  std::vector<LockRequest> requests;
  auto model = catalog.Model(name);
  if (absl::IsNotFound(model.status())) {
    auto lora = catalog.Lora(name);
    auto embedding = catalog.Embedding(name);
    if (!lora.ok() && !embedding.ok()) return model.status();
    if (!components.empty()) {
      return FieldError("components", absl::StrCat(name, " is ", lora.ok() ? "a LoRA" : "an embedding",
                                                   ", which has none"));
    }
    if (lora.ok()) {
      ASSIGN_OR_RETURN(LockRequest request, lora->Request());
      requests.push_back(std::move(request));
    } else {
      ASSIGN_OR_RETURN(EmbeddingFile::Opened opened, embedding->Open());
      requests.push_back(std::move(opened.request));
    }
    return requests;
  }
  if (!model.ok()) return model.status();
  opened = *model;
  const std::set<std::string> wanted(components.begin(), components.end());
  std::set<std::string> known;
  for (const Component& component : (*model)->pipeline->components()) {
    known.insert(component.name);
    if (wanted.empty() || wanted.count(component.name) != 0) {
      requests.push_back((*model)->ComponentRequest(component.name));
    }
  }
  for (const std::string& component : wanted) {
    if (known.count(component) == 0) {
      return FieldError("components", absl::StrCat("'", component, "' is no component of ", name));
    }
  }
  return requests;
}

}  // namespace

absl::Status PinBoard::Submit(std::function<void()> load) {
  if (loads_.fetch_add(1) >= kMaxLoads) {
    --loads_;
    return MakeError(
        absl::StatusCode::kResourceExhausted, "TOO_MANY_LOADS",
        absl::StrCat(kMaxLoads, " loads ahead of jobs are under way, which is the limit; wait for one"),
        {{"limit", absl::StrCat(kMaxLoads)}, {"retry_ms", "1000"}});
  }
  const absl::Status started = [&]() -> absl::Status {
    MutexLock lock(&mu_);
    if (threads_ != nullptr) return absl::OkStatus();
    ASSIGN_OR_RETURN(threads_, WorkerPool::Create(1, kMaxLoads));
    return absl::OkStatus();
  }();
  if (!started.ok()) {
    --loads_;
    return started;
  }
  threads_->Submit([this, load = std::move(load)] {
    load();
    --loads_;
  });
  return absl::OkStatus();
}

absl::StatusOr<PinBoard::Loaded> PinBoard::Load(const std::string& name,
                                                const std::vector<std::string>& components,
                                                const std::string& device_name, bool pin,
                                                const std::stop_token& stop) {
  Device* device = nullptr;
  for (const auto& d : core_->devices) {
    if (d->name() == device_name) device = d.get();
  }
  if (device == nullptr && !device_name.empty()) {
    return FieldError("device",
                      absl::StrCat("there is no '", device_name,
                                   "'; GetServerInfo lists the devices, and none means host memory alone"));
  }
  std::shared_ptr<const OpenModel> model;
  ASSIGN_OR_RETURN(const std::vector<LockRequest> requests,
                   Requests(*core_->catalog, name, components, model));
  const bool copies = device != nullptr && !device->uses_host_memory();
  if (copies && requests.size() == 1 && requests[0].loader.kind == "embedding") {
    return FieldError("device", absl::StrCat(name, " is an embedding, which is kept in host memory alone"));
  }
  Loaded loaded;
  std::set<ModelKey> there;
  for (const LockRequest& wanted : requests) {
    if (core_->cache->Find(wanted.key)) there.insert(wanted.key);
  }
  std::stop_source either;
  auto end = [&] { either.request_stop(); };
  const std::stop_callback cancelled(stop, end), closed(stop_.get_token(), end);
  auto locked = Lock(requests, copies ? device : nullptr, either.get_token());
  if (stop_.stop_requested()) return core_->CheckAccepting();
  RETURN_IF_ERROR(locked.status());
  std::vector<Pin> pins = *std::move(locked);
  for (Pin& fresh : pins) {
    loaded.keys.push_back(fresh.handle.key());
    loaded.bytes += fresh.handle.resource()->bytes();
    loaded.loaded_records += there.count(fresh.handle.key()) == 0 ? 1 : 0;
    fresh.on = device_name;
    fresh.model = model;
  }
  if (!pin) return loaded;
  if (stop.stop_requested()) {
    return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "cancelled while it was loaded");
  }
  MutexLock lock(&mu_);
  if (stop_.stop_requested()) return core_->CheckAccepting();
  std::vector<Pin>& held = pins_[name];
  for (Pin& fresh : pins) {
    // Once is enough for each record and device; what is pinned already stays so.
    const bool there = std::any_of(held.begin(), held.end(), [&](const Pin& old) {
      return old.handle.key() == fresh.handle.key() && old.on == fresh.on;
    });
    if (there) continue;
    core_->cache->HandOver(fresh.handle, kOwner, /*lasting=*/true);
    if (fresh.residency) core_->cache->HandOver(fresh.residency, kOwner, /*lasting=*/true);
    held.push_back(std::move(fresh));
  }
  return loaded;
}

absl::StatusOr<std::vector<PinBoard::Pin>> PinBoard::Lock(const std::vector<LockRequest>& requests,
                                                          Device* copy_to, const std::stop_token& stop) {
  // Each load waits for itself: what another one holds is not its own.
  const std::string owner = absl::StrCat("load-", ++loads_ever_);
  const absl::Time deadline = absl::Now() + core_->config.memory_wait_timeout;
  ASSIGN_OR_RETURN(std::vector<LockHandle> handles,
                   core_->cache->LockAll(requests, {.owner = owner, .deadline = deadline, .stop = stop}));
  std::vector<Pin> pins;
  for (LockHandle& handle : handles) {
    Pin fresh;
    if (copy_to != nullptr) {
      ASSIGN_OR_RETURN(
          fresh.residency,
          core_->cache->LockOnDevice(
              handle, *copy_to,
              {.owner = owner, .mode = ResidencyMode::kFull, .deadline = deadline, .stop = stop}));
    }
    fresh.handle = std::move(handle);
    pins.push_back(std::move(fresh));
  }
  return pins;
}

void PinBoard::Close() {
  stop_.request_stop();
  std::map<std::string, std::vector<Pin>> gone;
  MutexLock lock(&mu_);
  gone.swap(pins_);
}

absl::StatusOr<DropResult> PinBoard::Unload(const std::string& name) {
  ASSIGN_OR_RETURN(const std::vector<std::string> ids, Ids(name));
  std::vector<Pin> gone;
  {
    MutexLock lock(&mu_);
    auto it = pins_.find(name);
    if (it != pins_.end()) {
      gone.swap(it->second);
      pins_.erase(it);
    }
  }
  gone.clear();
  DropResult sum;
  for (const std::string& id : ids) {
    const DropResult one = core_->cache->Unload({id, ""});
    sum.evicted_records += one.evicted_records;
    sum.evicted_bytes += one.evicted_bytes;
    sum.busy_records += one.busy_records;
  }
  return sum;
}

absl::StatusOr<std::vector<std::string>> PinBoard::Ids(const std::string& name) const {
  std::set<std::string> ids;
  for (const char* kind : {"", "lora/", "embedding/"}) {
    const std::string begin = absl::StrCat(kind, name, "@");
    for (std::string& id : core_->cache->IdsThatBegin(begin)) {
      // Names may have an @, file identities have none: "a@b@12" is of "a@b", not of "a".
      if (id.find('@', begin.size()) == std::string::npos) ids.insert(std::move(id));
    }
  }
  if (ids.empty() && !core_->catalog->Lora(name).ok() && !core_->catalog->Embedding(name).ok()) {
    auto model = core_->catalog->Model(name);
    if (absl::IsNotFound(model.status())) return model.status();
  }
  return std::vector<std::string>(ids.begin(), ids.end());
}

}  // namespace latentd
