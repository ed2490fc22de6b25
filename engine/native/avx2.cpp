#define KVFERRY_LANES 8
#define KVFERRY_SET kAvx2
#define KVFERRY_SET_NAME "avx2"
#include "kernel_set.h"
