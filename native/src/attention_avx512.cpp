// Which of the two AVX-512 kernels runs an item.

#include "attention_avx512.h"

namespace kvist {
namespace {

// As for AVX2, where it was measured: few rows stream, more pay for packing a tile.
constexpr int kMaxStreamed = 6;

bool streams(const AttentionShape& shape, int num_rows) {
  const int group = shape.num_heads / shape.layout.num_kv_heads;
  return num_rows * group <= kMaxStreamed && shape.layout.head_dim % 32 == 0;
}

std::size_t scratch_bytes(const AttentionShape& shape, int num_rows) {
  const std::size_t tile = avx512::tile_scratch(shape, num_rows);
  const std::size_t stream = avx512::stream_scratch(shape, num_rows);
  return tile > stream ? tile : stream;
}

void run(const AttentionShape& shape, const AttentionItem& item, const KvLayer& layer, const AttentionRows& rows,
         std::uint8_t* scratch) {
  if (streams(shape, item.num_rows)) {
    avx512::run_stream(shape, item, layer, rows, scratch);
  } else {
    avx512::run_tile(shape, item, layer, rows, scratch);
  }
}

}  // namespace

const AttentionKernels kAttentionAvx512 = {nullptr, scratch_bytes, run};

}  // namespace kvist
