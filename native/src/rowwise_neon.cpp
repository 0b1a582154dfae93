#define KVIST_ROWWISE_TABLE rowwise_neon
#include "rowwise_impl.h"
