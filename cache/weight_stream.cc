#include "cache/weight_stream.h"

#include "absl/strings/str_cat.h"
#include "cache/error.h"

namespace latentd {

absl::StatusOr<std::unique_ptr<WeightStream>> WeightStream::Create(const WeightSet& host, Source source,
                                                                   const ResidencyPlan& plan, Device& device) {
  auto stream = std::unique_ptr<WeightStream>(new WeightStream(host, std::move(source), device));
  const auto slots = static_cast<int32_t>(host.layout().tensors().size());
  stream->position_of_.assign(plan.resident.size(), -1);
  for (size_t block = 0; block < plan.resident.size(); ++block) {
    if (plan.resident[block]) continue;
    stream->position_of_[block] = static_cast<int32_t>(stream->blocks_.size());
    stream->blocks_.push_back({static_cast<int32_t>(block), {}});
  }
  std::vector<int64_t> filled(stream->blocks_.size(), 0);
  for (int32_t i = 0; i < slots; ++i) {
    const int32_t position = stream->position_of_[static_cast<size_t>(host.device_block(Slot{i}))];
    if (position < 0 || !host.has(Slot{i})) continue;
    int64_t& offset = filled[static_cast<size_t>(position)];
    stream->blocks_[static_cast<size_t>(position)].members.push_back({Slot{i}, offset});
    offset += PaddedBytes(static_cast<int64_t>(host[Slot{i}].data.nbytes()));
  }
  for (int64_t bytes : filled) {
    if (bytes > plan.slot_bytes) return absl::InternalError("a block is larger than the ring's buffers");
  }
  for (int32_t i = 0; i < plan.ring_slots; ++i) {
    ASSIGN_OR_RETURN(std::shared_ptr<void> memory, device.Allocate(plan.slot_bytes));
    stream->ring_.push_back(std::move(memory));
  }
  stream->copies_.assign(stream->ring_.size(), 0);
  ASSIGN_OR_RETURN(stream->stream_, device.NewCopyStream());
  for (uint64_t p = 0; p < stream->ring_.size(); ++p) RETURN_IF_ERROR(stream->Begin(p));
  return stream;
}

absl::Status WeightStream::Begin(uint64_t position) {
  const Block& block = blocks_[BlockAt(position)];
  const size_t buffer = static_cast<size_t>(position % ring_.size());
  std::vector<CopyStream::Piece> pieces;
  pieces.reserve(block.members.size());
  for (const Member& member : block.members) {
    const at::Tensor& from = source_(member.slot);
    if (!from.is_contiguous()) return absl::InternalError("a streamed weight is not contiguous");
    pieces.push_back({static_cast<char*>(ring_[buffer].get()) + member.offset, from.const_data_ptr(),
                      static_cast<int64_t>(from.nbytes())});
  }
  ASSIGN_OR_RETURN(copies_[buffer], stream_->Begin(std::move(pieces)));
  begun_ = position + 1;
  return absl::OkStatus();
}

absl::Status WeightStream::MoveTo(size_t block) {
  for (const at::Tensor& tensor : tensors_) {
    if (tensor.defined() && tensor.use_count() > 1) {
      return absl::InternalError(absl::StrCat("a weight of block ",
                                              host_.layout().blocks()[static_cast<size_t>(
                                                  blocks_[BlockAt(current_)].index)].name,
                                              " is held while the next block is asked for"));
    }
  }
  uint64_t position = current_;
  if (!tensors_.empty()) ++position;
  if (BlockAt(position) != block) {
    // Out of order: go on from there. The buffers of what was begun in vain are written again, after it.
    position += (block + blocks_.size() - BlockAt(position)) % blocks_.size();
  }
  tensors_.clear();
  // What was begun stays where it is when it is still ahead; the rest of the ring is filled up.
  for (uint64_t p = std::max(begun_, position); p < position + ring_.size(); ++p) RETURN_IF_ERROR(Begin(p));
  current_ = position;
  const size_t buffer = static_cast<size_t>(position % ring_.size());
  RETURN_IF_ERROR(stream_->Await(copies_[buffer]));
  tensors_.resize(host_.layout().tensors().size());
  for (const Member& member : blocks_[block].members) {
    const at::Tensor& from = source_(member.slot);
    tensors_[static_cast<size_t>(member.slot.index)] =
        TensorOn(device_, ring_[buffer], member.offset, from.sizes(), from.scalar_type());
  }
  return absl::OkStatus();
}

const at::Tensor& WeightStream::Get(Slot slot) {
  const int32_t block = position_of_[static_cast<size_t>(host_.device_block(slot))];
  if (block < 0) throw StatusError(absl::InternalError("a weight is neither resident nor streamed"));
  if (tensors_.empty() || BlockAt(current_) != static_cast<size_t>(block)) {
    const absl::Status status = MoveTo(static_cast<size_t>(block));
    if (!status.ok()) throw StatusError(status);
  }
  return tensors_[static_cast<size_t>(slot.index)];
}

}  // namespace latentd
