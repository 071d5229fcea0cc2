// Random numbers: each device has a generator, which draws from a CPU generator of its own.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include <vector>

#include "device.h"

namespace sim {

struct Generator final : c10::GeneratorImpl {
  at::Generator cpu = at::detail::createCPUGenerator();

  explicit Generator(DeviceIndex i)
      : GeneratorImpl(Device(kSim, i), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  static c10::DeviceType device_type() { return kSim; }
  void set_current_seed(uint64_t s) override { cpu.set_current_seed(s); }
  void set_offset(uint64_t o) override { cpu.set_offset(o); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& s) override { cpu.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->cpu = cpu.clone();
    return copy;
  }
};

inline at::Generator new_generator(DeviceIndex i) {
  return at::make_generator<Generator>(i < 0 ? current_device : i);
}

// The generator that ops draw from when none is given; a negative index means the current device.
inline const at::Generator& default_generator(DeviceIndex i) {
  static const auto& generators = *[] {
    auto* all = new std::vector<at::Generator>;
    for (int k = 0; k < kMaxDevices; ++k) all->push_back(at::make_generator<Generator>(k));
    return all;
  }();
  check_index(i);
  return generators[i < 0 ? current_device : i];
}

}  // namespace sim
