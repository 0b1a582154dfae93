// Which of the two AVX2 kernels runs an item.

#include "attention_avx2.h"

namespace kvist {
namespace {

// Measured: 3 rows stream at twice the speed of a tile, 8 are at least as fast in a tile, whose packing is paid by
// then.
constexpr int kMaxStreamed = 6;

bool streams(const AttentionShape& shape, int num_rows) {
  const int group = shape.num_heads / shape.layout.num_kv_heads;
  return num_rows * group <= kMaxStreamed && shape.layout.head_dim % 16 == 0;
}

int heads_together(const AttentionShape& shape, int num_rows) {
  return streams(shape, num_rows) ? attention_stream_heads_avx2(shape, num_rows) : 1;
}

std::size_t scratch_bytes(const AttentionShape& shape, int num_rows) {
  const std::size_t tile = attention_tile_scratch_avx2(shape, num_rows);
  const std::size_t stream = attention_stream_scratch_avx2(shape);
  return tile > stream ? tile : stream;
}

void run(const AttentionShape& shape, const AttentionItem& item, const KvLayer& layer, const AttentionRows& rows,
         std::uint8_t* scratch) {
  if (streams(shape, item.num_rows)) {
    attention_stream_avx2(shape, item, layer, rows, scratch);
  } else {
    attention_tile_avx2(shape, item, layer, rows, scratch);
  }
}

}  // namespace

const AttentionKernels kAttentionAvx2 = {heads_together, scratch_bytes, run};

}  // namespace kvist
