#include "cache/weights/weight_stream.h"

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"

namespace latentd {

absl::StatusOr<std::unique_ptr<WeightStream>> WeightStream::Create(const WeightSet& host, Source source,
                                                                   const ResidencyPlan& plan,
                                                                   Device& device) {
  auto stream = std::unique_ptr<WeightStream>(new WeightStream(host, std::move(source), device));
  stream->position_of_.assign(plan.resident.size(), -1);
  for (size_t block = 0; block < plan.resident.size(); ++block) {
    if (plan.resident[block]) continue;
    stream->position_of_[block] = static_cast<int32_t>(stream->blocks_.size());
    stream->blocks_.push_back({static_cast<int32_t>(block), {}});
  }
  for (int32_t i = 0; i < static_cast<int32_t>(host.layout().tensors().size()); ++i) {
    const int32_t position = stream->position_of_[static_cast<size_t>(host.device_block(Slot{i}))];
    if (position >= 0 && host.has(Slot{i}))
      stream->blocks_[static_cast<size_t>(position)].slots.push_back(Slot{i});
  }
  for (Block& block : stream->blocks_) {
    block.first = static_cast<int64_t>(stream->order_.size());
    int64_t bytes = 0;
    for (Slot slot : block.slots) {
      stream->order_.push_back(slot);
      bytes += stream->BytesOf(slot);
    }
    if (bytes > plan.slot_bytes) return absl::InternalError("a block is larger than the plan says");
  }
  stream->ring_bytes_ = plan.ring_bytes();
  ASSIGN_OR_RETURN(stream->ring_, device.Allocate(stream->ring_bytes_));
  ASSIGN_OR_RETURN(stream->stream_, device.NewCopyStream());
  RETURN_IF_ERROR(stream->Fill());
  return stream;
}

int64_t WeightStream::Place(int64_t bytes) const {
  if (pieces_.empty()) return bytes <= ring_bytes_ ? 0 : -1;
  const int64_t begin = pieces_.front().offset;
  const int64_t end = pieces_.back().offset + pieces_.back().bytes;
  // A piece is never cut: what is left at the end of the ring stays empty.
  const bool wrapped = pieces_.back().offset < begin;
  if (wrapped) return end + bytes <= begin ? end : -1;
  if (end + bytes <= ring_bytes_) return end;
  return bytes <= begin ? 0 : -1;
}

absl::Status WeightStream::Fill() {
  const auto size = static_cast<int64_t>(order_.size());
  // A tensor is there once: a ring that holds all of them waits for the next round.
  while (next_ - oldest_ < size) {
    const Slot slot = order_[static_cast<size_t>(next_ % size)];
    const int64_t offset = Place(BytesOf(slot));
    if (offset < 0) return absl::OkStatus();
    const at::Tensor& from = source_(slot);
    if (!from.is_contiguous()) return absl::InternalError("a streamed weight is not contiguous");
    Piece piece{slot, offset, BytesOf(slot), 0};
    ASSIGN_OR_RETURN(piece.copy,
                     stream_->Begin({{static_cast<char*>(ring_.get()) + offset, from.const_data_ptr(),
                                      static_cast<int64_t>(from.nbytes())}}));
    pieces_.push_back(piece);
    ++next_;
  }
  return absl::OkStatus();
}

absl::Status WeightStream::MoveTo(size_t block) {
  for (const at::Tensor& tensor : tensors_) {
    if (tensor.defined() && tensor.use_count() > 1) {
      const size_t name = static_cast<size_t>(blocks_[current_].index);
      return absl::InternalError(absl::StrCat("a weight of block ", host_.layout().blocks()[name].name,
                                              " is held while the next block is asked for"));
    }
  }
  tensors_.clear();
  const auto size = static_cast<int64_t>(order_.size());
  // The first tensor of the block, in this round or the next.
  int64_t first = oldest_ / size * size + blocks_[block].first;
  if (first < oldest_) first += size;
  while (oldest_ < first && !pieces_.empty()) {
    pieces_.pop_front();
    ++oldest_;
  }
  if (oldest_ < first) oldest_ = next_ = first;  // far out of order: nothing of it was begun
  RETURN_IF_ERROR(Fill());

  const auto& slots = blocks_[block].slots;
  if (pieces_.size() < slots.size()) return absl::InternalError("a block does not fit the ring");
  RETURN_IF_ERROR(stream_->Await(pieces_[slots.size() - 1].copy));
  tensors_.resize(host_.layout().tensors().size());
  for (size_t i = 0; i < slots.size(); ++i) {
    const at::Tensor& from = source_(slots[i]);
    tensors_[static_cast<size_t>(slots[i].index)] =
        TensorOn(device_, ring_, pieces_[i].offset, from.sizes(), from.scalar_type());
  }
  current_ = block;
  return absl::OkStatus();
}

const at::Tensor& WeightStream::Get(Slot slot) {
  const int32_t block = position_of_[static_cast<size_t>(host_.device_block(slot))];
  if (block < 0) throw StatusError(absl::InternalError("a weight is neither resident nor streamed"));
  if (tensors_.empty() || current_ != static_cast<size_t>(block)) {
    const absl::Status status = MoveTo(static_cast<size_t>(block));
    if (!status.ok()) throw StatusError(status);
  }
  return tensors_[static_cast<size_t>(slot.index)];
}

}  // namespace latentd
