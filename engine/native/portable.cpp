#define KVFERRY_LANES 4
#define KVFERRY_SET kPortable
#define KVFERRY_SET_NAME "portable"
#include "kernel_set.h"
