#include "patcher/layers/patch_layer.h"

namespace latentd {
namespace {

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <class... F>
Overloaded(F...) -> Overloaded<F...>;

}  // namespace

const LowRank* PatchLayer::low_rank() const { return std::get_if<LowRank>(&math); }

int64_t PatchLayer::rank() const {
  return std::visit(Overloaded{[](const std::monostate&) -> int64_t { return 0; },
                               [](const auto& layer) { return layer.rank(); }},
                    math);
}

bool PatchLayer::has_scale() const {
  return std::visit(Overloaded{[](const auto&) { return false; }, [](const LowRank&) { return true; },
                               [](const SparseLowRank&) { return true; },
                               [](const Hadamard&) { return true; }, [](const Kronecker&) { return true; },
                               [](const Glora&) { return true; }, [](const Dora&) { return true; }},
                    math);
}

bool PatchLayer::is_kronecker() const {
  if (const auto* dora = std::get_if<Dora>(&math)) return std::holds_alternative<Kronecker>(dora->inner);
  return std::holds_alternative<Kronecker>(math);
}

void PatchLayer::SetScale(double scale) {
  const Overloaded set{[](auto&) {},
                       [&](LowRank& m) { m.scale = scale; },
                       [&](SparseLowRank& m) { m.low_rank.scale = scale; },
                       [&](Hadamard& m) { m.scale = scale; },
                       [&](Kronecker& m) { m.scale = scale; },
                       [&](Glora& m) { m.scale = scale; },
                       [&](Dora& m) { std::visit([&](auto& inner) { inner.scale = scale; }, m.inner); }};
  std::visit(set, math);
  if (bias_of_up) bias_scale = scale;
}

bool PatchLayer::depends_on_base() const {
  return std::holds_alternative<Replacement>(math) || std::holds_alternative<Dora>(math) ||
         std::holds_alternative<Ia3>(math) || std::holds_alternative<Glora>(math) ||
         std::holds_alternative<Oft>(math) || std::holds_alternative<Boft>(math);
}

Extent PatchLayer::extent() const {
  return std::visit(Overloaded{[](const std::monostate&) { return Extent{}; },
                               [](const auto& layer) { return layer.extent(); }},
                    math);
}

absl::Status PatchLayer::Check() const {
  if (bias.defined() && (bias.numel() == 0 || bias.size(0) != bias.numel()))
    return BadLayer("bias is no vector");
  return std::visit(Overloaded{[](const std::monostate&) { return absl::OkStatus(); },
                               [](const auto& layer) { return layer.Check(); }},
                    math);
}

void PatchLayer::ForEachTensor(const std::function<void(at::Tensor&)>& visit) {
  std::visit(Overloaded{[](std::monostate&) {}, [&](auto& layer) { layer.ForEachTensor(visit); }}, math);
  if (bias.defined()) visit(bias);
}

int64_t PatchLayer::bytes() const {
  int64_t bytes = 0;
  PatchLayer(*this).ForEachTensor([&](const at::Tensor& t) { bytes += static_cast<int64_t>(t.nbytes()); });
  return bytes;
}

at::Tensor PatchLayer::Delta(at::IntArrayRef shape, const at::Tensor& base) const {
  return std::visit(Overloaded{[](const std::monostate&) { return at::Tensor(); },
                               [&](const auto& layer) { return layer.Delta(shape, base); }},
                    math);
}

}  // namespace latentd
