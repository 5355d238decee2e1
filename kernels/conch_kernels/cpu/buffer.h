// Memory that grows and starts at a cache line; its content is what was last written, nothing is cleared.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace conch {

template <class T>
class Buffer {
   public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    // Makes room for `size` elements; what was there is lost where it has to grow.
    void fit(size_t size) {
        if (size <= size_) return;
        std::free(data_);
        size_ = 0;
        data_ = static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 127) / 64 * 64));
        if (!data_) throw std::bad_alloc();
        size_ = size;
    }

    T* data() { return data_; }
    const T* data() const { return data_; }

   private:
    T* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace conch
