#define KVIST_ROWWISE_TABLE rowwise_avx2
#include "rowwise_impl.h"
