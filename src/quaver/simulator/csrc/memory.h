// Memory: CPU memory, counted by device, each block known with the device that it stands for.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "device.h"

namespace sim {

constexpr size_t kDeviceBytes = size_t(8) << 30;  // what a device claims to have; not enforced

struct Block {
  size_t bytes;
  DeviceIndex device;
};
// Never destroyed: tensors may outlive static destruction at exit.
inline auto& memory_mutex = *new std::mutex;
inline auto& blocks = *new std::map<uintptr_t, Block>;  // by first address
inline c10::CachingDeviceAllocator::DeviceStats stats[kMaxDevices];

inline auto& allocated(DeviceIndex d) {
  return stats[d].allocated_bytes[size_t(c10::CachingAllocator::StatType::AGGREGATE)];
}

inline void note_block(void* p, size_t bytes, DeviceIndex d) {
  std::lock_guard lock(memory_mutex);
  blocks[reinterpret_cast<uintptr_t>(p)] = {bytes, d};
  allocated(d).increase(bytes);
}

inline void forget_block(void* p) {
  std::lock_guard lock(memory_mutex);
  const auto it = blocks.find(reinterpret_cast<uintptr_t>(p));
  if (it == blocks.end()) return;
  allocated(it->second.device).decrease(it->second.bytes);
  blocks.erase(it);
}

// The device whose block holds this address; -1: no simulated device's.
inline int64_t device_of_pointer(int64_t pointer) {
  const auto address = static_cast<uintptr_t>(pointer);
  std::lock_guard lock(memory_mutex);
  auto it = blocks.upper_bound(address);
  if (it == blocks.begin()) return -1;
  const auto& [first, block] = *--it;
  return address < first + std::max<size_t>(block.bytes, 1) ? block.device : -1;
}

// A simulated device's pointer to memory that a CPU storage owns; it keeps that storage alive.
inline c10::DataPtr adopt(c10::Storage cpu, DeviceIndex d) {
  struct Owner {
    c10::Storage cpu;
    void* p;
  };
  void* p = cpu.mutable_data();
  if (p) note_block(p, cpu.nbytes(), d);
  const auto release = [](void* context) {
    auto* owner = static_cast<Owner*>(context);
    if (owner->p) forget_block(owner->p);
    delete owner;
  };
  return {p, new Owner{std::move(cpu), p}, release, Device(kSim, d)};
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    const auto bytes = static_cast<int64_t>(n);
    c10::Storage cpu({}, bytes, c10::GetAllocator(c10::kCPU), /*resizable=*/false);
    return adopt(std::move(cpu), current_device);
  }
  void copy_data(void* dst, const void* src, size_t n) const override {
    default_copy_data(dst, src, n);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    std::lock_guard lock(memory_mutex);
    check_index(d);
    return stats[d];
  }
  void resetAccumulatedStats(DeviceIndex d) override {
    std::lock_guard lock(memory_mutex);
    check_index(d);
    allocated(d).reset_accumulated();
  }
  void resetPeakStats(DeviceIndex d) override {
    std::lock_guard lock(memory_mutex);
    check_index(d);
    allocated(d).reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {  // free, total
    std::lock_guard lock(memory_mutex);
    check_index(d);
    const auto used = std::min(size_t(allocated(d).current), kDeviceBytes);
    return {kDeviceBytes - used, kDeviceBytes};
  }
};
inline Allocator allocator;
REGISTER_ALLOCATOR(kSim, &allocator);

}  // namespace sim
