// Aliases: the memory of a sim tensor seen as a CPU tensor, and a CPU result seen as a sim tensor.
//
// One Aliases object serves one op call. It copies nothing, so views stay views, and an in-place op
// writes into the sim tensor's own memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "device.h"
#include "memory.h"

namespace sim {

using at::Tensor;
using c10::DispatchKey, c10::DispatchKeySet, c10::Storage;

inline void copy_metadata(const Tensor& from, const Tensor& to) {
  auto* impl = to.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  if (from.is_conj() != to.is_conj()) to._set_conj(from.is_conj());
  if (from.is_neg() != to.is_neg()) to._set_neg(from.is_neg());
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
}

inline Tensor tensor_over(Storage storage, DispatchKey key, const Tensor& like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), DispatchKeySet(key), like.dtype());
  copy_metadata(like, t);
  return t;
}

inline Storage storage_over(size_t bytes, c10::DataPtr p, c10::Allocator* a) {
  return Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, std::move(p), a, /*resizable=*/true));
}

// Which CPU tensors may take part in an op on a simulated device, as on CUDA.
enum class CpuOperand { kRefused, kScalar, kAny };

class Aliases {
 public:
  explicit Aliases(const char* op) : op_(op) {}

  // The one simulated device of the call, if any took part.
  const std::optional<Device>& device() const { return device_; }

  void see_device(Device d) {
    if (device_ && *device_ != d) mismatch(*device_, d);
    device_ = d;
  }

  Storage to_cpu(const Storage& s) {
    auto& cpu = cpu_of_[s.unsafeGetStorageImpl()];
    if (!cpu) {
      const auto release = [](void* context) { delete static_cast<Storage*>(context); };
      c10::DataPtr p(s.mutable_data(), new Storage(s), release, c10::kCPU);
      cpu = storage_over(s.nbytes(), std::move(p), c10::GetAllocator(c10::kCPU));
      sim_of_.emplace(cpu.unsafeGetStorageImpl(), s);
    }
    return cpu;
  }

  // The alias of an argument; a CPU tensor passes as it is, and check_devices() judges it.
  Tensor to_cpu(const Tensor& t, CpuOperand allowed) {
    if (!t.defined()) return t;
    if (t.device().type() != kSim) {
      TORCH_CHECK(t.is_cpu(), "sim: ", op_, " got a tensor on ", t.device());
      const auto is = t.dim() == 0 ? CpuOperand::kScalar : CpuOperand::kAny;
      refused_cpu_ |= is > allowed;
      return t;
    }
    TORCH_CHECK(t.layout() == c10::kStrided,
                "sim: ", op_, ": only strided tensors, got ", t.layout());
    see_device(t.device());
    auto alias = tensor_over(to_cpu(t.storage()), DispatchKey::CPU, t);
    base_of_.emplace(alias.storage().unsafeGetStorageImpl(), t);
    original_.emplace(alias.unsafeGetTensorImpl(), t);
    arguments_.emplace_back(alias, t);
    return alias;
  }

  void check_devices() const {
    if (refused_cpu_ && device_) mismatch(*device_, c10::kCPU);
  }

  // A result: an in-place op's is its argument, a view's lies over its argument's storage, and any
  // other is new memory of the call's device.
  Tensor to_sim(const Tensor& cpu) {
    if (!cpu.defined() || !device_) return cpu;
    const auto it = original_.find(cpu.unsafeGetTensorImpl());
    if (it != original_.end()) return it->second;
    const auto base = base_of_.find(cpu.storage().unsafeGetStorageImpl());
    if (base == base_of_.end()) {
      return tensor_over(to_sim(cpu.storage()), DispatchKey::PrivateUse1, cpu);
    }
    // In inference mode a view of an ordinary tensor is an ordinary one: it gets its base's keys.
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, to_sim(cpu.storage()), base->second.key_set(), cpu.dtype());
    copy_metadata(cpu, view);
    return view;
  }

  // Carries over what resize_, set_ or a resized out= did to the aliases.
  void write_back() {
    for (const auto& [alias, t] : arguments_) write_back(alias, t);
  }

 private:
  [[noreturn]] void mismatch(Device a, Device b) const {
    TORCH_CHECK(false,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                a, " and ", b, "! (sim, in ", op_, ")");
  }

  Storage to_sim(const Storage& cpu) {
    auto& s = sim_of_[cpu.unsafeGetStorageImpl()];
    if (!s) s = storage_over(cpu.nbytes(), adopt(cpu, device_->index()), &allocator);
    return s;
  }

  void write_back(const Tensor& alias, const Tensor& t) {
    const auto& now = alias.storage();
    const auto& was = t.storage();
    const auto& given = cpu_of_.at(was.unsafeGetStorageImpl());
    if (now.unsafeGetStorageImpl() != given.unsafeGetStorageImpl()) {
      t.unsafeGetTensorImpl()->set_storage_keep_dtype(to_sim(now));
    } else if (now.data() != was.data() || now.nbytes() != was.nbytes()) {
      was.set_data_ptr_noswap(adopt(now, t.device().index()));
      was.set_nbytes(now.nbytes());
    }
    if (alias.sizes() != t.sizes() || alias.strides() != t.strides() ||
        alias.storage_offset() != t.storage_offset()) {
      copy_metadata(alias, t);
    }
  }

  const char* op_;
  std::optional<Device> device_;
  bool refused_cpu_ = false;  // a CPU tensor took part that may not
  std::unordered_map<c10::StorageImpl*, Storage> cpu_of_, sim_of_;
  std::unordered_map<c10::TensorImpl*, Tensor> original_;  // argument by its alias
  std::unordered_map<c10::StorageImpl*, Tensor> base_of_;  // a sim argument by its alias's storage
  std::vector<std::pair<Tensor, Tensor>> arguments_;       // alias, sim tensor
};

}  // namespace sim
