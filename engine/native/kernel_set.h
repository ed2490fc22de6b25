// Defines KVFERRY_SET, the kernels built for one instruction set. The includer sets KVFERRY_LANES and the name.
#include "attention_kernel.h"
#include "elementwise_kernel.h"
#include "int8_kernel.h"
#include "linear_kernel.h"

namespace kvferry::native {

const KernelSet KVFERRY_SET{
    KVFERRY_SET_NAME,
    ::linear,
    {kInt8TileRows, ::quantised_nbytes, ::quantise_row, ::linear_int8},
    {::store_kv<float>, ::store_kv<BFloat16>, ::store_kv<std::int8_t>},
    {::attend<float>, ::attend<BFloat16>, ::attend<std::int8_t>},
    ::attend_scratch,
    ::rms_norm,
    ::silu_mul,
};

}  // namespace kvferry::native
