#define KVIST_ROWWISE_TABLE rowwise_avx512
#include "rowwise_impl.h"
