// Memory that starts at a cache line and only grows; what was in it is lost when it does.
#pragma once

#include <cstddef>
#include <new>

#include "kvist/common.h"

namespace kvist {

template <typename T>
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  AlignedBuffer(AlignedBuffer&& other) noexcept : data_(other.data_), size_(other.size_) {
    other.data_ = nullptr;
    other.size_ = 0;
  }
  ~AlignedBuffer() { release(); }

  // Throws std::bad_alloc, and then holds nothing.
  T* at_least(std::size_t size) {
    if (size > size_) {
      release();
      data_ = static_cast<T*>(::operator new(round_up(size * sizeof(T), kAlignment), std::align_val_t(kAlignment)));
      size_ = size;
    }
    return data_;
  }

  T* data() const { return data_; }

 private:
  void release() {
    ::operator delete(data_, std::align_val_t(kAlignment));
    data_ = nullptr;
    size_ = 0;
  }

  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace kvist
