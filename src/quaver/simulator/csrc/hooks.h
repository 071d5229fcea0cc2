// What torch asks of an accelerator: torch.accelerator, default generators, storage resizing.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <cstring>

#include "device.h"
#include "memory.h"
#include "random.h"

namespace sim {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }

  DeviceIndex deviceCount() const override { return DeviceIndex(device_count.load()); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex i) const override { exchange_device(i); }
  DeviceIndex exchangeDevice(DeviceIndex i) const override { return exchange_device(i); }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return exchange_device(i); }

  const at::Generator& getDefaultGenerator(DeviceIndex i) const override {
    return default_generator(i);
  }
  at::Generator getNewGenerator(DeviceIndex i) const override { return new_generator(i); }

  Device getDeviceFromPtr(void* p) const override {
    return {kSim, DeviceIndex(device_of_pointer(reinterpret_cast<int64_t>(p)))};
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    c10::DeviceGuard guard(storage.device());
    auto grown = allocator.allocate(n);
    const auto kept = std::min(n, storage.nbytes());
    if (kept) std::memcpy(grown.mutable_get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(n);
  }
};
inline Hooks hooks;
inline const bool hooks_registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

}  // namespace sim
