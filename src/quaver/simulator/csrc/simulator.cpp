// A simulated accelerator, "sim": torch's PrivateUse1 backend with several devices whose memory is
// CPU memory. An op runs on CPU aliases of its sim tensors; what this adds is the bookkeeping of
// devices, as CUDA has it: a current device per thread, guards, device checks, autograd's thread
// per device, memory statistics and random generators per device.
//
// One translation unit, because most of the compile time goes into torch's headers.
#include "alias.h"
#include "autocast.h"
#include "device.h"
#include "dispatch.h"
#include "hooks.h"
#include "memory.h"
#include "ops.h"
#include "random.h"

TORCH_LIBRARY(quaver_sim, m) {
  m.def("start(int count) -> ()", sim::start);
  m.def("device_of_pointer(int pointer) -> int", sim::device_of_pointer);
  m.def("default_generator(int index) -> Generator?",
        [](int64_t i) -> std::optional<at::Generator> {
          return sim::default_generator(c10::DeviceIndex(i));
        });
  m.def("as_cpu(Tensor t) -> Tensor", sim::as_cpu);  // zero-copy, not differentiable
}
