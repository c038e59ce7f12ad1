// Brings the weights that are not resident to a device while it computes: a ring of buffers on the device, into
// which the next blocks are copied while the block before them is used.
//
//   compute   | block 0 | block 1 | block 2 | block 3 | …
//   copies    | 1       | 2       | 3       | 4       |        (a ring of two)
//
// Blocks are expected in the order of the layout, over and over; any other order works, and waits for its
// copies. Bytes and alignment are those of a resident copy, so results are the same to the last bit.
//
// One thread at a time, the one that computes. Errors of copies are thrown as StatusError: there is no way to
// return one through a network's formulas; whoever runs a slice catches it (GuardTensorCode).
#ifndef LATENTD_CACHE_WEIGHT_STREAM_H_
#define LATENTD_CACHE_WEIGHT_STREAM_H_

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/component_layout.h"
#include "cache/device.h"
#include "cache/residency_plan.h"
#include "cache/weight_set.h"

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
  struct Member {  // one tensor of a block
    Slot slot;
    int64_t offset;
  };
  struct Block {
    int32_t index;
    std::vector<Member> members;
  };

  WeightStream(const WeightSet& host, Source source, Device& device)
      : host_(host), source_(std::move(source)), device_(device) {}
  absl::Status Begin(uint64_t position);
  absl::Status MoveTo(size_t block);
  size_t BlockAt(uint64_t position) const { return static_cast<size_t>(position % blocks_.size()); }

  const WeightSet& host_;
  const Source source_;
  Device& device_;
  std::vector<Block> blocks_;           // those that stream, in order of use
  std::vector<int32_t> position_of_;    // by device block: its place in blocks_, or −1
  std::vector<std::shared_ptr<void>> ring_;

  // Positions count blocks over all rounds: block p mod n, in the ring's buffer p mod slots.
  uint64_t current_ = 0;                // of tensors_
  uint64_t begun_ = 0;                  // copies of positions below this are begun
  std::vector<uint64_t> copies_;        // by ring slot: the number of the copy that fills it
  std::vector<at::Tensor> tensors_;     // of the current block, by slot of the layout; empty before the first
  std::unique_ptr<CopyStream> stream_;  // last, so that it ends first: it may still write to the ring
};

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHT_STREAM_H_
