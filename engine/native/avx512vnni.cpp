// Only what multiplies bytes differs from the AVX-512 set.
#define KVFERRY_LANES 16
#include "int8_kernel.h"

namespace kvferry::native {

const Int8Kernels kInt8Avx512Vnni{kInt8TileRows, ::quantised_nbytes, ::quantise_row, ::linear_int8};

}  // namespace kvferry::native
