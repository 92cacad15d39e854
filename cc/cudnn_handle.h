// cuDNN handles, pooled by device and borrowed for one call: a handle carries a stream, so that two
// threads cannot share one.
#ifndef JQCONV_CUDNN_HANDLE_H_
#define JQCONV_CUDNN_HANDLE_H_

#include <cudnn.h>

#include <mutex>
#include <utility>
#include <vector>

namespace jqconv {

class HandlePool {
 public:
  // A handle that goes back to its pool with the scope.
  class Borrowed {
   public:
    Borrowed(Borrowed&& other) noexcept
        : pool_(other.pool_), handle_(std::exchange(other.handle_, nullptr)) {}
    Borrowed& operator=(Borrowed&&) = delete;
    ~Borrowed() {
      if (handle_ != nullptr) pool_->Return(handle_);
    }
    cudnnHandle_t get() const { return handle_; }

   private:
    friend class HandlePool;
    Borrowed(HandlePool* pool, cudnnHandle_t handle) : pool_(pool), handle_(handle) {}

    HandlePool* pool_;
    cudnnHandle_t handle_;
  };

  // The pool of a device, which lives as long as the process.
  static HandlePool& ForDevice(int device);

  // An idle handle, or a new one.
  Borrowed Borrow();

  // Makes sure that a handle is idle, for a later Borrow that must not create one.
  void Reserve() { Borrow(); }

 private:
  explicit HandlePool(int device) : device_(device) {}
  cudnnHandle_t Create();
  void Return(cudnnHandle_t handle);

  const int device_;
  std::mutex mutex_;
  std::vector<cudnnHandle_t> idle_;
  size_t created_ = 0;
};

}  // namespace jqconv

#endif  // JQCONV_CUDNN_HANDLE_H_
