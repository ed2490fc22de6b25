#define KVFERRY_LANES 16
#define KVFERRY_SET kAvx512
#define KVFERRY_SET_NAME "avx512"
#include "kernel_set.h"
