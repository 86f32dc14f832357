// A device of the tests' own for torch: its memory is ours, its arithmetic the CPU's.
//
// Tensors on it are plain torch.Tensors that are not on the CPU, so what works here without a word about the CPU works
// on a GPU.  Every operation without an entry below runs on copies in CPU memory; tensors of two devices in one
// operation fail as they do on a GPU, which lets through CPU scalars and CPU indices.  own_device.py builds and loads it.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

using at::IntArrayRef;
using at::Tensor;
constexpr auto OWN = c10::DeviceType::PrivateUse1;
std::atomic<int64_t> reads{0};    // how often the CPU has waited for this device: what a GPU's users avoid
std::atomic<int64_t> held{0};     // bytes in use
std::atomic<int64_t> highest{0};  // the most bytes in use since `forget`

struct Memory final : c10::Allocator {
    static void release(void *block) {
        if (block != nullptr) {
            int64_t *start = static_cast<int64_t *>(block) - 8;  // the size stands before it, at the distance of a line
            held -= *start;
            std::free(start);
        }
    }
    c10::DataPtr allocate(size_t bytes) override {
        auto *start = static_cast<int64_t *>(std::malloc(bytes + 64));
        TORCH_CHECK(start != nullptr, "out of memory");
        *start = static_cast<int64_t>(bytes);
        int64_t now = held += *start;
        if (now > highest) highest = now;
        return {start + 8, start + 8, &release, c10::Device(OWN, 0)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *to, const void *from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(OWN, &memory)

const c10::Stream STREAM{c10::Stream::DEFAULT, c10::Device(OWN, 0)};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<OWN> {  // of one device, whose number is 0
    c10::Device exchangeDevice(c10::Device) const override { return {OWN, 0}; }
    c10::Device getDevice() const override { return {OWN, 0}; }
    c10::Stream getStream(c10::Device) const noexcept override { return STREAM; }
    c10::Stream getNewStream(c10::Device, int) const override { return STREAM; }
    c10::Stream exchangeStream(c10::Stream) const noexcept override { return STREAM; }
    void recordDataPtrOnStream(const c10::DataPtr &, const c10::Stream &) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {  // the generator is the CPU's
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    void setCurrentDevice(c10::DeviceIndex) const override {}
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex) const override {
        return at::detail::getDefaultCPUGenerator();
    }
    at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
        at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
    }
};
Hooks hooks;
[[maybe_unused]] const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

const c10::DispatchKeySet KEYS{c10::DispatchKey::PrivateUse1};

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(size, stride, &memory, KEYS, c10::dtype_or_default(dtype));
}

Tensor on_cpu(const Tensor &x) {  // the same memory
    return x.is_cpu() ? x : at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU));
}

Tensor copy_from(const Tensor &from, const Tensor &to, bool non_blocking) {
    reads += to.is_cpu() || (from.is_cpu() && !non_blocking);
    on_cpu(to).copy_(on_cpu(from));
    return to;
}

Tensor copy_from_and_resize(const Tensor &from, const Tensor &to) {
    if (to.sizes() != from.sizes()) to.resize_(from.sizes());
    on_cpu(to).copy_(on_cpu(from));
    return to;
}

const Tensor &resize(const Tensor &x, IntArrayRef size, std::optional<at::MemoryFormat>) {
    at::native::resize_impl_cpu_(x.unsafeGetTensorImpl(), size, std::nullopt);
    return x;
}

at::Scalar one_number(const Tensor &x) {
    ++reads;
    return on_cpu(x).item();
}

void by_the_cpu(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    const std::string name = op.schema().name();
    const bool takes_cpu_indices = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0;
    int64_t before = reads;
    auto check = [&](const Tensor &x) {
        before += x.defined() && x.is_cpu() && x.dim() > 0;  // indices, for which a GPU waits
        TORCH_CHECK(!x.defined() || x.device().type() == OWN || x.dim() == 0 || takes_cpu_indices,
                    "Expected all tensors to be on the same device, but found at least two devices, own:0 and ",
                    x.device(), "! (", name, ")");
    };
    for (const auto &value : torch::jit::last(*stack, op.schema().arguments().size())) {
        if (value.isTensor()) check(value.toTensor());
        if (value.isTensorList())
            for (const Tensor &x : value.toTensorVector()) check(x);
    }
    at::native::cpu_fallback(op, stack);
    reads = before;  // its own copies are arithmetic here
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("_local_scalar_dense", &one_number);
    m.impl("as_strided", &at::native::as_strided_tensorimpl);
    m.impl("view", &at::native::view);
    m.impl("_reshape_alias", &at::native::_reshape_alias);
    m.impl("unfold", &at::native::unfold);
    m.impl("resize_", &resize);
    m.impl("set_.source_Storage", &at::native::set_);
    m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the lists of a GPU, as far as attention layers meet them
    KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(softmax, int, fp32_set_opt_dtype)
    KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}

TORCH_LIBRARY(own_device, m) {
    m.def("reads() -> int", [] { return reads.load(); });
    m.def("highest() -> int", [] { return highest.load(); });
    m.def("forget() -> int", [] { return highest = held.load(); });
}

}  // namespace
