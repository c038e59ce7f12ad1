// Invariant: read_[i] is null or a mark behind every copy out of buffer i. Only NextBuffer, which waits for
// it, makes a buffer the one that is filled.
#include "cache/cuda/staged_copies.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"

namespace latentd {

StagedCopies::StagedCopies(std::unique_ptr<CopyEngine> engine, std::vector<void*> buffers,
                           int64_t buffer_bytes)
    : engine_(std::move(engine)),
      buffers_(std::move(buffers)),
      buffer_bytes_(buffer_bytes),
      read_(buffers_.size()),
      thread_([this] { Run(); }) {}

StagedCopies::~StagedCopies() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.SignalAll();
  }
  thread_.join();
  engine_->Drain();
}

absl::StatusOr<uint64_t> StagedCopies::Begin(std::vector<Piece> pieces) {
  absl::StatusOr<CopyEngine::Mark> after = engine_->MarkCompute();
  MutexLock lock(&mu_);
  if (status_.ok()) status_ = after.status();
  if (!status_.ok()) return status_;
  queue_.push_back({std::move(pieces), *std::move(after)});
  changed_.SignalAll();
  return ++begun_;
}

absl::Status StagedCopies::Await(uint64_t copy) {
  CopyEngine::Mark arrived;
  {
    MutexLock lock(&mu_);
    if (copy > begun_) return absl::InternalError(absl::StrCat("copy ", copy, " was never begun"));
    while (status_.ok() && queued_ < copy) changed_.Wait(&mu_);
    if (!status_.ok()) return status_;
    auto it = arrived_.find(copy);
    if (it == arrived_.end()) return absl::OkStatus();  // it, or a later one, was awaited before
    arrived = it->second;
    arrived_.erase(arrived_.begin(), std::next(it));
  }
  absl::Status status = engine_->ComputeAfter(arrived);
  if (status.ok()) return status;
  MutexLock lock(&mu_);
  if (status_.ok()) status_ = status;
  return status_;
}

void StagedCopies::Run() {
  while (true) {
    Batch batch;
    bool failed = false;
    {
      MutexLock lock(&mu_);
      while (queue_.empty() && !stopping_) changed_.Wait(&mu_);
      if (queue_.empty()) return;
      batch = std::move(queue_.front());
      queue_.pop_front();
      failed = !status_.ok();
    }
    absl::StatusOr<CopyEngine::Mark> arrived = CopyEngine::Mark();
    if (!failed) arrived = CopyBatch(batch);
    MutexLock lock(&mu_);
    ++queued_;
    if (!arrived.ok()) {
      if (status_.ok()) status_ = arrived.status();
    } else if (!failed) {
      arrived_[queued_] = *std::move(arrived);
    }
    changed_.SignalAll();
  }
}

// Pieces share buffers: a block of a network has many that are small.
absl::StatusOr<CopyEngine::Mark> StagedCopies::CopyBatch(const Batch& batch) {
  RETURN_IF_ERROR(engine_->CopyAfter(batch.after));
  RETURN_IF_ERROR(NextBuffer());
  for (const Piece& piece : batch.pieces) {
    for (int64_t done = 0; done < piece.bytes;) {
      if (filled_ == buffer_bytes_) {
        ASSIGN_OR_RETURN(read_[buffer_], engine_->MarkCopies());
        buffer_ = (buffer_ + 1) % buffers_.size();
        RETURN_IF_ERROR(NextBuffer());
      }
      const int64_t bytes = std::min(piece.bytes - done, buffer_bytes_ - filled_);
      char* staged = static_cast<char*>(buffers_[buffer_]) + filled_;
      std::memcpy(staged, static_cast<const char*>(piece.from) + done, static_cast<size_t>(bytes));
      RETURN_IF_ERROR(engine_->Copy(static_cast<char*>(piece.to) + done, staged, bytes));
      filled_ = std::min(filled_ + PaddedBytes(bytes), buffer_bytes_);
      done += bytes;
    }
  }
  ASSIGN_OR_RETURN(CopyEngine::Mark arrived, engine_->MarkCopies());
  read_[buffer_] = arrived;
  buffer_ = (buffer_ + 1) % buffers_.size();
  return arrived;
}

absl::Status StagedCopies::NextBuffer() {
  if (read_[buffer_] != nullptr) RETURN_IF_ERROR(engine_->Wait(read_[buffer_]));
  read_[buffer_] = nullptr;
  filled_ = 0;
  return absl::OkStatus();
}

}  // namespace latentd
