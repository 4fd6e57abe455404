// CUDA devices whose memory is the host's, for a torch that was built without CUDA.
//
// Tensors are true ones: `is_cuda`, with values. Every operation runs at once, by its kernel for
// CPUs, on the same memory. As on a GPU, an operation that is given tensors of a CPU and of a device,
// or of two devices, raises; a copy does not. Fresh memory holds the byte FRESH.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr int FRESH = 0x3D;  // 0.046 in fp32 and in bf16
constexpr int MOST = 16;

thread_local DeviceIndex current = 0;
thread_local std::array<c10::StreamId, MOST> streams{};
std::atomic<c10::StreamId> made{0};
std::atomic<int64_t> held{0}, peak{0};

DeviceIndex count() {
  static const int found = std::getenv("HC_DEVICES") ? std::atoi(std::getenv("HC_DEVICES")) : 1;
  return static_cast<DeviceIndex>(found);
}

void check(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < count(), "CUDA error: invalid device ordinal ", int(index));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device to) const override {
    const Device was(CUDA, current);
    setDevice(to);
    return was;
  }
  Device getDevice() const override { return Device(CUDA, current); }
  void setDevice(Device to) const override { check(to.index()); current = to.index(); }
  void uncheckedSetDevice(Device to) const noexcept override { current = to.index(); }
  Stream getStream(Device of) const override {
    return Stream(Stream::UNSAFE, of, streams[of.index() < 0 ? current : of.index()]);
  }
  Stream getDefaultStream(Device of) const override { return Stream(Stream::DEFAULT, of); }
  Stream getStreamFromGlobalPool(Device of, bool = false) const override { return getNewStream(of); }
  Stream getNewStream(Device of, int = 0) const override {
    return Stream(Stream::UNSAFE, of, ++made);
  }
  Stream exchangeStream(Stream to) const override {
    const Stream was = getStream(to.device());
    streams[to.device_index()] = to.id();
    return was;
  }
  DeviceIndex deviceCount() const noexcept override { return count(); }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Room {
  void* start;
  int64_t nbytes;
};

void give_back(void* context) {
  auto* room = static_cast<Room*>(context);
  held -= room->nbytes;
  std::free(room->start);
  delete room;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const Device on(CUDA, current);
    if (nbytes == 0) return {nullptr, on};
    const size_t whole = (nbytes + 511) / 512 * 512;
    void* start = std::aligned_alloc(512, whole);
    TORCH_CHECK(start != nullptr, "CUDA out of memory");
    std::memset(start, FRESH, whole);
    held += whole;
    int64_t was = peak;
    while (was < held && !peak.compare_exchange_weak(was, held)) {}
    return {start, new Room{start, static_cast<int64_t>(whole)}, &give_back, on};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
};
DeviceMemory memory;
REGISTER_ALLOCATOR(CUDA, &memory)

// pinned memory: the host's, whose addresses are remembered
std::mutex lock;
std::set<std::pair<uintptr_t, uintptr_t>>& pinned() {
  static auto* found = new std::set<std::pair<uintptr_t, uintptr_t>>;
  return *found;
}

struct Pinned {
  void* start;
  size_t nbytes;
};

void unpin(void* context) {
  auto* room = static_cast<Pinned*>(context);
  const auto first = reinterpret_cast<uintptr_t>(room->start);
  {
    const std::lock_guard<std::mutex> guard(lock);
    pinned().erase({first, first + room->nbytes});
  }
  std::free(room->start);
  delete room;
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, c10::kCPU};
    const size_t whole = (nbytes + 511) / 512 * 512;
    void* start = std::aligned_alloc(512, whole);
    std::memset(start, FRESH, whole);
    const auto first = reinterpret_cast<uintptr_t>(start);
    const std::lock_guard<std::mutex> guard(lock);
    pinned().insert({first, first + whole});
    return {start, new Pinned{start, whole}, &unpin, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
};
PinnedMemory pinned_memory;

}  // namespace

namespace at {
struct HostHooks final : CUDAHooksInterface {
  explicit HostHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return count(); }
  int getNumGPUs() const override { return count(); }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex to) const override { check(to); current = to; }
  DeviceIndex exchangeDevice(DeviceIndex to) const override {
    const DeviceIndex was = current;
    setCurrentDevice(to);
    return was;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override {
    return to < 0 ? current : exchangeDevice(to);
  }
  const Generator& getDefaultGenerator(DeviceIndex = -1) const override {
    return globalContext().defaultGenerator(kCPU);
  }
  Generator getNewGenerator(DeviceIndex = -1) const override {
    return globalContext().defaultGenerator(kCPU).clone();
  }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &memory; }
  bool isPinnedPtr(const void* data) const override {
    const auto at = reinterpret_cast<uintptr_t>(data);
    const std::lock_guard<std::mutex> guard(lock);
    auto found = pinned().upper_bound({at, ~uintptr_t{0}});
    return found != pinned().begin() && at < (--found)->second;
  }
  void deviceSynchronize(DeviceIndex) const override {}
};
using CUDAHooks = HostHooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", HostHooks)
}  // namespace at

namespace c10d {
class HostTimer : public Timer {  // of DDP's reducer
 public:
  explicit HostTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const int64_t from = getTimeRef(start), to = getTimeRef(end);
    if (from == kUnsetTime || to == kUnsetTime || to < from) return std::nullopt;
    return to - from;
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, HostTimer);
}  // namespace c10d

namespace {

using at::Tensor;

// the same memory as a tensor of another device
Tensor seen_on(const Tensor& tensor, Device device) {
  const auto options = tensor.options().device(device).requires_grad(false).pinned_memory(false);
  if (tensor.numel() == 0 && !tensor.storage().data()) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  auto seen = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                            [tensor](void*) {}, options, device);
  if (tensor.is_conj()) seen._set_conj(true);
  if (tensor.is_neg()) seen._set_neg(true);
  return seen;
}

Tensor host(const Tensor& tensor) { return seen_on(tensor, c10::kCPU); }

Device place(std::optional<Device> device) {
  if (!device || !device->has_index()) return Device(CUDA, current);
  check(device->index());
  return *device;
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(place(device));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(place(device));
  return at::detail::empty_strided_generic(size, stride, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& from, bool) {
  const c10::OptionalDeviceGuard guard;
  const Tensor to = self.is_cuda() ? host(self) : self;
  to.copy_(from.is_cuda() ? host(from) : from);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  Tensor target = to;
  copy_(target, self, false);
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  Tensor target = to;
  target.resize_(self.sizes());
  copy_(target, self, false);
  return to;
}

at::Scalar scalar(const Tensor& self) { return at::_local_scalar_dense(host(self)); }

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size,
                      std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

Tensor& set_(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  const c10::Storage none(c10::Storage::use_byte_size_t(), 0, &memory, true);
  return self.set_(none, 0, {0}, {});
}

Tensor& set_whole_(Tensor& self, c10::Storage source) {
  const int64_t length = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {length}, {});
}

Tensor& set_like_(Tensor& self, const Tensor& source) {
  return at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(),
                                      source.sizes(), source.strides());
}

const std::set<std::string>& mixing() {  // what a GPU lets take tensors of a CPU beside its own
  static const std::set<std::string> names{
      "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
      "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::record_stream"};
  return names;
}

void check_devices(const c10::OperatorHandle& op, const Tensor& tensor, std::optional<Device>& on) {
  if (!tensor.defined()) return;
  if (!tensor.is_cuda() && tensor.dim() == 0) return;  // a scalar of the host
  if (!on) on = tensor.device();
  TORCH_CHECK(*on == tensor.device(), "Expected all tensors to be on the same device, but found ",
              *on, " and ", tensor.device(), " (", op.schema().name(), ")");
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t inputs = schema.arguments().size(), first = stack->size() - inputs;
  const std::string name = schema.name();
  std::optional<Device> on;
  for (size_t place = 0; place < inputs; ++place) {
    auto& value = (*stack)[first + place];
    if (mixing().count(name)) continue;
    if (value.isTensor()) check_devices(op, value.toTensor(), on);
    if (value.isTensorList()) {
      for (const Tensor& one : value.toTensorVector()) check_devices(op, one, on);
    }
    if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& one : value.toOptionalTensorVector()) {
        if (one) check_devices(op, *one, on);
      }
    }
  }
  std::optional<c10::DeviceGuard> guard;
  if (on && on->is_cuda()) guard.emplace(*on);
  at::native::cpu_fallback(op, stack, true);
}

}  // namespace

namespace at::native {
// torch asks a table, not the dispatcher, which kernel attention takes (attention.py has the kernels)
int64_t attention_of_a_gpu(const Tensor& q, const Tensor& k, const Tensor& v,
                           const std::optional<Tensor>& mask, double dropout, bool,
                           std::optional<double>, bool grouped) {
  if (mask || dropout > 0 || grouped || q.size(-1) != v.size(-1) || q.size(1) != k.size(1)) {
    return 0;  // plain matrices
  }
  return q.scalar_type() == kHalf || q.scalar_type() == kBFloat16 ? 1 : 2;  // flash, efficient
}
static RegisterCUDADispatch<struct _fused_sdp_choice_stub_DECLARE_DISPATCH_type> registered(
    _fused_sdp_choice_stub, &attention_of_a_gpu);
}  // namespace at::native

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &scalar);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_);
  m.impl("set_.source_Storage", &set_whole_);
  m.impl("set_.source_Tensor", &set_like_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
}

TORCH_LIBRARY(host_cuda, m) {
  m.def("host(Tensor values) -> Tensor", &host);
  m.def("devices() -> int", []() -> int64_t { return count(); });
  m.def("device() -> int", []() -> int64_t { return current; });
  m.def("set_device(int index) -> ()", [](int64_t index) {
    check(static_cast<DeviceIndex>(index));
    current = static_cast<DeviceIndex>(index);
  });
  m.def("stream(int index) -> int", [](int64_t index) -> int64_t { return streams[index]; });
  m.def("set_stream(int index, int stream) -> ()",
        [](int64_t index, int64_t stream) { streams[index] = stream; });
  m.def("new_stream() -> int", []() -> int64_t { return ++made; });
  m.def("resize(Tensor whole, int nbytes) -> ()", [](const Tensor& whole, int64_t nbytes) {
    at::native::resize_bytes_cpu(whole.storage().unsafeGetStorageImpl(), nbytes);
  });
  m.def("held() -> int[]", []() -> std::vector<int64_t> { return {held, peak}; });
  m.def("reset_peak() -> ()", []() { peak = held.load(); });
}
