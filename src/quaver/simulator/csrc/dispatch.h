// Dispatch: every aten op runs on CPU aliases of its arguments, under its arguments' device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "alias.h"
#include "random.h"

namespace sim {

using c10::IValue, c10::OperatorHandle;
using torch::jit::Stack;

template <class T, class F>
c10::List<T> map_list(const std::vector<T>& values, F f) {
  c10::List<T> mapped;
  mapped.reserve(values.size());
  for (const auto& v : values) mapped.push_back(f(v));
  return mapped;
}

// Replaces one argument by its CPU alias.
inline void to_cpu(IValue& v, Aliases& aliases, CpuOperand allowed) {
  if (v.isTensor()) {
    v = aliases.to_cpu(v.toTensor(), allowed);
  } else if (v.isTensorList()) {
    v = map_list(v.toTensorVector(), [&](const Tensor& t) { return aliases.to_cpu(t, allowed); });
  } else if (v.isOptionalTensorList()) {
    using Optional = std::optional<Tensor>;
    v = map_list(v.toOptionalTensorVector(), [&](const Optional& t) {
      return t ? Optional(aliases.to_cpu(*t, allowed)) : t;
    });
  } else if (v.isStorage() && v.toStorage().device_type() == kSim) {
    aliases.see_device(v.toStorage().device());
    v = aliases.to_cpu(v.toStorage());
  } else if (v.isDevice() && v.toDevice().type() == kSim) {
    aliases.see_device(with_index(v.toDevice()));
    v = Device(c10::kCPU);
  }
}

inline void to_sim(IValue& v, Aliases& aliases) {
  if (v.isTensor()) {
    v = aliases.to_sim(v.toTensor());
  } else if (v.isTensorList()) {
    v = map_list(v.toTensorVector(), [&](const Tensor& t) { return aliases.to_sim(t); });
  }
}

// Replaces a generator argument (none: the current device's) by the CPU generator behind it.
inline void to_cpu_generator(IValue& v) {
  const auto g = v.isNone() ? default_generator(-1) : v.toGenerator();
  TORCH_CHECK(g.device().type() == kSim,
              "Expected a 'sim' device type for generator but found '", g.device(), "'");
  v = static_cast<Generator*>(g.unsafeGetGeneratorImpl())->cpu;
}

inline bool is_written(const c10::Argument& p) {
  return p.alias_info() && p.alias_info()->isWrite();
}

inline CpuOperand allowed_cpu_operand(const c10::FunctionSchema& op, const c10::Argument& p) {
  if (is_written(p)) return CpuOperand::kRefused;
  const bool is_index = p.name() == "indices" && op.name().find("index") != std::string::npos;
  return is_index ? CpuOperand::kAny : CpuOperand::kScalar;
}

inline void run_on_cpu(const OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto& parameters = schema.arguments();
  const size_t first = stack->size() - parameters.size();
  Aliases aliases(schema.name().c_str());
  std::vector<size_t> generators;
  bool writes = false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& p = parameters[i];
    IValue& v = (*stack)[first + i];
    writes |= is_written(p);
    if (v.isGenerator() || (v.isNone() && p.name() == "generator")) generators.push_back(first + i);
    to_cpu(v, aliases, allowed_cpu_operand(schema, p));
  }
  aliases.check_devices();
  // The caller's current device comes back when this goes, also after an error.
  c10::OptionalDeviceGuard guard(aliases.device());
  if (aliases.device()) {
    for (const auto i : generators) to_cpu_generator((*stack)[i]);
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  if (writes) aliases.write_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    to_sim((*stack)[i], aliases);
  }
}

// As on CUDA, an op that somebody registered for the CPU only does not run on the accelerator.
inline void fallback(const OperatorHandle& op, Stack* stack) {
  const auto& name = op.schema().name();
  TORCH_CHECK_NOT_IMPLEMENTED(
      name.rfind("aten::", 0) == 0 || name.rfind("prims::", 0) == 0, "Could not run '",
      op.operator_name(), "' with arguments from the 'sim' backend: it has no kernel for it");
  run_on_cpu(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace sim
