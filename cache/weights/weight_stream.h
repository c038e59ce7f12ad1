// Brings the weights that are not resident to a device while it computes: a ring of bytes on the device, into
// which the tensors of the blocks ahead are copied as far as there is room, while the current block is used.
//
//   ring   | ····· | current block | next block | the one after, in p|
//                    ▲ freed when the next block is asked for          ▲ copies go on here
//
// The ring is as large as a few of the largest blocks, so it holds more of the smaller ones: copies go on at
// the speed of the bus, whatever the sizes of blocks, as long as they take less time than computing on the
// whole.
//
// Blocks are expected in the order of the layout, over and over; any other order works, and waits for its
// copies. Bytes and alignment are those of a resident copy, so results are the same to the last bit.
//
// One thread at a time, the one that computes. Errors of copies are thrown as StatusError: there is no way to
// return one through a network's formulas; whoever runs a slice catches it (GuardTensorCode).
#ifndef LATENTD_CACHE_WEIGHTS_WEIGHT_STREAM_H_
#define LATENTD_CACHE_WEIGHTS_WEIGHT_STREAM_H_

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/device.h"
#include "cache/residency_plan.h"
#include "cache/weights/component_layout.h"
#include "cache/weights/weight_set.h"

namespace latentd {

// A status on its way out of tensor code.
class StatusError : public std::exception {
 public:
  explicit StatusError(absl::Status status) : status_(std::move(status)), text_(status_.message()) {}
  const absl::Status& status() const { return status_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  absl::Status status_;
  std::string text_;
};

class WeightStream {
 public:
  // The host tensor of a slot: the base's, or one that takes its place (merged with patches). Of the base's
  // shape and type.
  using Source = std::function<const at::Tensor&(Slot)>;

  // Allocates the ring that `plan` asks for and begins the first copies. REQUIRES: plan.streams(), and its
  // ring_bytes() promised. `host` names the blocks; it and what `source` gives must outlive the stream.
  // Errors: those of Device.
  static absl::StatusOr<std::unique_ptr<WeightStream>> Create(const WeightSet& host, Source source,
                                                              const ResidencyPlan& plan, Device& device);

  // The tensor on the device of a slot that is not resident. It stays valid until a slot of another block is
  // asked for; to keep it longer is an error, thrown then.
  const at::Tensor& Get(Slot slot);

 private:
  struct Block {
    int32_t index;            // of the layout
    std::vector<Slot> slots;  // its tensors
    int64_t first = 0;        // its first one in order_
  };
  // A tensor in the ring.
  struct Piece {
    Slot slot;
    int64_t offset = 0, bytes = 0;
    uint64_t copy = 0;
  };

  WeightStream(const WeightSet& host, Source source, Device& device)
      : host_(host), source_(std::move(source)), device_(device) {}
  int64_t BytesOf(Slot slot) const { return PaddedBytes(static_cast<int64_t>(host_[slot].data.nbytes())); }
  // Where the next piece of that size goes; −1 while there is no room.
  int64_t Place(int64_t bytes) const;
  // Begins copies as far as there is room.
  absl::Status Fill();
  absl::Status MoveTo(size_t block);

  const WeightSet& host_;
  const Source source_;
  Device& device_;
  std::vector<Block> blocks_;         // those that stream, in order of use
  std::vector<Slot> order_;           // the tensors of all of them
  std::vector<int32_t> position_of_;  // by device block: its place in blocks_, or −1
  std::shared_ptr<void> ring_;
  int64_t ring_bytes_ = 0;

  // Both count tensors over all rounds: number n is order_[n mod size].
  int64_t oldest_ = 0, next_ = 0;
  std::deque<Piece> pieces_;            // those from oldest_ up to next_, in ring order
  size_t current_ = 0;                  // the block of tensors_
  std::vector<at::Tensor> tensors_;     // of the current block, by slot of the layout; empty before the first
  std::unique_ptr<CopyStream> stream_;  // last, so that it ends first: it may still write to the ring
};

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHTS_WEIGHT_STREAM_H_
