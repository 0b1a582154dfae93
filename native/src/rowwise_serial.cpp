#define KVIST_ROWWISE_TABLE rowwise_serial
#include "rowwise_impl.h"
