// The devices: how many there are, which one is current, and their streams.
//
// Like CUDA's, the current device and the current streams belong to the calling thread. The
// autograd engine reads the guard below to run backward on a thread for each device.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <optional>
#include <utility>

namespace sim {

using c10::Device, c10::DeviceIndex, c10::Stream, c10::StreamId;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;

inline std::atomic<int> device_count{0};  // set once, by start()
inline thread_local DeviceIndex current_device = 0;
inline thread_local StreamId current_streams[kMaxDevices] = {};
inline std::atomic<StreamId> last_stream{0};

inline void start(int64_t count) {
  TORCH_CHECK(count >= 1 && count <= kMaxDevices,
              "sim: 1 to ", kMaxDevices, " devices, got ", count);
  TORCH_CHECK(device_count == 0 || device_count == count,
              "sim: already has ", device_count, " devices");
  device_count = static_cast<int>(count);
}

inline void check_index(DeviceIndex index) {
  TORCH_CHECK(index < device_count, "sim: invalid device ordinal ", int(index), ": there are ",
              device_count, " devices");
}

// Makes a device current and returns the one that was; a negative index changes nothing.
inline DeviceIndex exchange_device(DeviceIndex index) {
  check_index(index);
  return index < 0 ? current_device : std::exchange(current_device, index);
}

// "sim" without an index means the current device.
inline Device with_index(std::optional<Device> device) {
  TORCH_CHECK(device && device->type() == kSim, "sim: not a sim device");
  const Device resolved(kSim, device->has_index() ? device->index() : current_device);
  check_index(resolved.index());
  return resolved;
}

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(device_count.load()); }
  Device getDevice() const override { return {kSim, current_device}; }
  void setDevice(Device d) const override { exchange_device(d.index()); }
  Device exchangeDevice(Device d) const override { return {kSim, exchange_device(d.index())}; }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current_device = d.index();
  }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  void synchronizeDevice(DeviceIndex) const override {}

  // A stream is a number: everything runs at once, in the caller's thread.
  Stream make_stream(Device d, StreamId id) const {
    return Stream(Stream::UNSAFE, with_index(d), id);
  }
  Stream getStream(Device d) const override {
    return make_stream(d, current_streams[with_index(d).index()]);
  }
  Stream getDefaultStream(Device d) const override { return make_stream(d, 0); }
  Stream getNewStream(Device d, int) const override { return make_stream(d, ++last_stream); }
  Stream getStreamFromGlobalPool(Device d, bool) const override {
    return make_stream(d, ++last_stream);
  }
  Stream exchangeStream(Stream s) const override {
    return make_stream(s.device(), std::exchange(current_streams[s.device_index()], s.id()));
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void* getStreamNativeHandle(const Stream s) const override {
    return reinterpret_cast<void*>(s.id());
  }

  // An event remembers its stream, so that a record on another device's stream is an error.
  void record(void** event, const Stream& s, DeviceIndex index, c10::EventFlag) const override {
    TORCH_CHECK(index < 0 || index == s.device_index(), "sim: event of device ", int(index),
                " recorded on a stream of device ", int(s.device_index()));
    if (!*event) *event = new StreamId(s.id());
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void*, void*, DeviceIndex) const override { return 0.0; }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<StreamId*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)

}  // namespace sim
