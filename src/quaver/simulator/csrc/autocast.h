// Autocast: torch.autocast("sim") picks the dtypes that CUDA's picks, from the same lists of ops.
//
// torch's own wrapper is a template for each op, which took half of the compile time; these boxed
// kernels serve any op.
#pragma once

#include <ATen/autocast_mode.h>

#include <string>

#include "dispatch.h"

namespace sim {

inline void cast_floats(IValue& v, at::ScalarType to) {
  const auto cast = [to](const Tensor& t) { return at::autocast::cached_cast(to, t, kSim); };
  if (v.isTensor()) {
    v = cast(v.toTensor());
  } else if (v.isTensorList()) {
    v = map_list(v.toTensorVector(), cast);
  } else if (v.isOptionalTensorList()) {
    using Optional = std::optional<Tensor>;
    v = map_list(v.toOptionalTensorVector(),
                 [&](const Optional& t) { return t ? Optional(cast(*t)) : t; });
  }
}

// The widest floating dtype among the arguments, at least that of the autocast region.
inline at::ScalarType widest_dtype(c10::ArrayRef<IValue> arguments) {
  auto widest = at::autocast::get_lower_precision_fp_from_device_type(kSim);
  for (const auto& v : arguments) {
    if (v.isTensor()) {
      widest = at::autocast::prioritize(widest, v.toTensor(), kSim);
    } else if (v.isTensorList()) {
      widest = at::autocast::prioritize(widest, at::TensorList(v.toTensorVector()), kSim);
    }
  }
  return widest;
}

// Asks for a float32 result, unless the caller asked for a dtype.
inline void set_float32_result(const c10::FunctionSchema& schema, at::ArrayRef<IValue> arguments,
                               Stack* stack) {
  if (!at::autocast::is_eligible(arguments[0].toTensor(), kSim)) return;
  const auto dtype = schema.argumentIndexWithName("dtype");
  if (!dtype) return;
  auto& v = (*stack)[stack->size() - arguments.size() + *dtype];
  if (v.isNone()) v = at::kFloat;
}

template <at::autocast::CastPolicy policy>
void autocast(const OperatorHandle& op, Stack* stack) {
  using at::autocast::CastPolicy;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(DispatchKey::AutocastPrivateUse1);
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  if constexpr (policy == CastPolicy::fp32_set_opt_dtype) {
    set_float32_result(schema, arguments, stack);
  } else {
    auto dtype = at::kFloat;
    if (policy == CastPolicy::lower_precision_fp) {
      dtype = at::autocast::get_lower_precision_fp_from_device_type(kSim);
    } else if (policy == CastPolicy::promote) {
      dtype = widest_dtype(arguments);
    }
    for (auto i = stack->size() - arguments.size(); i < stack->size(); ++i) {
      cast_floats((*stack)[i], dtype);
    }
  }
  op.callBoxed(stack);
}

template <at::autocast::CastPolicy policy>
void autocast_op(torch::Library& m, std::string name) {  // "softmax, int" means softmax.int
  if (const auto comma = name.find(", "); comma != std::string::npos) name.replace(comma, 2, ".");
  m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&autocast<policy>>());
}

#define QUAVER_LOWER(...) \
  autocast_op<at::autocast::CastPolicy::lower_precision_fp>(m, #__VA_ARGS__);
#define QUAVER_FP32(...) autocast_op<at::autocast::CastPolicy::fp32>(m, #__VA_ARGS__);
#define QUAVER_FP32_RESULT(...) \
  autocast_op<at::autocast::CastPolicy::fp32_set_opt_dtype>(m, #__VA_ARGS__);
#define QUAVER_PROMOTE(...) autocast_op<at::autocast::CastPolicy::promote>(m, #__VA_ARGS__);

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(QUAVER_LOWER)
  AT_FORALL_FP32(QUAVER_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(QUAVER_FP32_RESULT)
  AT_FORALL_PROMOTE(QUAVER_PROMOTE)
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace sim
