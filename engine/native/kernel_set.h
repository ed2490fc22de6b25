// Defines KVFERRY_SET, the kernels built for one instruction set. The includer sets KVFERRY_LANES and the name.
#include "attention_kernel.h"
#include "elementwise_kernel.h"
#include "linear_kernel.h"

namespace kvferry::native {

const KernelSet KVFERRY_SET{
    KVFERRY_SET_NAME, ::linear, ::store_kv, ::attend, ::attend_scratch, ::rms_norm, ::silu_mul,
};

}  // namespace kvferry::native
