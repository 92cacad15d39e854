#include "cudnn_handle.h"

#include <map>

#include "libraries.h"

namespace jqconv {

HandlePool& HandlePool::ForDevice(int device) {
  // Never destroyed: when the process ends, CUDA may be gone before this module.
  static auto& mutex = *new std::mutex;
  static auto& pools = *new std::map<int, HandlePool*>;
  std::lock_guard<std::mutex> lock(mutex);
  HandlePool*& pool = pools[device];
  if (pool == nullptr) pool = new HandlePool(device);
  return *pool;
}

HandlePool::Borrowed HandlePool::Borrow() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      const cudnnHandle_t handle = idle_.back();
      idle_.pop_back();
      return Borrowed(this, handle);
    }
    // Room for every handle, so that returning one cannot fail.
    idle_.reserve(++created_);
  }
  return Borrowed(this, Create());
}

cudnnHandle_t HandlePool::Create() {
  const DeviceScope scope(device_);
  cudnnHandle_t handle = nullptr;
  CheckCudnn(LoadedLibraries().cudnn.Create(&handle), "cudnnCreate");
  return handle;
}

void HandlePool::Return(cudnnHandle_t handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  idle_.push_back(handle);
}

}  // namespace jqconv
