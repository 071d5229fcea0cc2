// The few aten ops that the boxed fallback cannot serve.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/fill_ops.h>
#include <ATen/ops/resize_ops.h>

#include "dispatch.h"

namespace sim {

inline void check_plain(std::optional<at::Layout> layout, std::optional<bool> pinned) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided && !pinned.value_or(false),
              "sim: only strided, unpinned tensors");
}

inline Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                    std::optional<at::Layout> layout, std::optional<Device> device,
                    std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  check_plain(layout, pinned);
  c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_generic(size, &allocator, DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                            std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                            std::optional<Device> device, std::optional<bool> pinned) {
  check_plain(layout, pinned);
  c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           DispatchKeySet(DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

inline Tensor as_cpu(const Tensor& t) {
  return Aliases("as_cpu").to_cpu(t, CpuOperand::kAny);
}

// Any mix of cpu, sim:i and sim:j.
inline Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  auto to = as_cpu(dst);
  at::_ops::copy_::redispatch(DispatchKeySet(DispatchKey::CPU), to, as_cpu(self), non_blocking);
  return dst;
}

inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  at::_ops::resize_::call(dst, c10::fromIntArrayRefSlow(self.sizes()), std::nullopt);
  return copy_from(self, dst, false);
}

// The value may lie anywhere, as on CUDA.
inline Tensor& fill(Tensor& self, const Tensor& value) {
  auto to = as_cpu(self);
  at::_ops::fill__Tensor::redispatch(DispatchKeySet(DispatchKey::CPU), to, as_cpu(value));
  return self;
}

// PrivateUse1 gets these two instead of aten::convolution and aten::convolution_backward.
inline void convolution(const OperatorHandle&, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_on_cpu(op, stack);
}

inline void convolution_backward(const OperatorHandle&, Stack* stack) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  // aten's takes (grad, input, weight, bias_sizes, and 7 more); the overrideable has no bias_sizes
  const std::vector<int64_t> bias_sizes{(*stack)[stack->size() - 10].toTensor().size(1)};
  stack->insert(stack->end() - 7, IValue(bias_sizes));
  run_on_cpu(op, stack);
}

// Without it Module.to makes new Parameters and unties weights. It is on the autograd key too, else
// tensor subclasses meet it in __torch_dispatch__.
inline bool has_compatible_shallow_copy_type(const Tensor&, const Tensor&) { return true; }

// Without a kernel of the backend's own these two run through their out= variants, which warn.
constexpr const char* kRunWhole[] = {"mse_loss", "smooth_l1_loss"};

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("fill_.Tensor", fill);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  m.impl("record_stream", [](Tensor&, Stream) {});
  for (const auto* name : kRunWhole) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}
// Else a conj() or neg() view resolves itself by a copy, endlessly.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace sim
