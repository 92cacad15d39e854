// cuDNN and the CUDA runtime, loaded when first needed: nothing here is linked, so that one module
// serves machines with and without a GPU, and uses the very libraries that JAX loaded.
#ifndef JQCONV_LIBRARIES_H_
#define JQCONV_LIBRARIES_H_

#include <cuda_runtime_api.h>
#include <cudnn.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace jqconv {

struct CudaApi {
  decltype(&::cudaGetErrorString) GetErrorString;
  decltype(&::cudaGetDevice) GetDevice;
  decltype(&::cudaSetDevice) SetDevice;
  decltype(&::cudaStreamCreateWithFlags) StreamCreateWithFlags;
  decltype(&::cudaStreamDestroy) StreamDestroy;
  decltype(&::cudaStreamIsCapturing) StreamIsCapturing;
  decltype(&::cudaStreamBeginCapture) StreamBeginCapture;
  decltype(&::cudaStreamEndCapture) StreamEndCapture;
  decltype(&::cudaStreamSynchronize) StreamSynchronize;
  decltype(&::cudaGraphInstantiateWithFlags) GraphInstantiateWithFlags;
  decltype(&::cudaGraphLaunch) GraphLaunch;
  decltype(&::cudaGraphCreate) GraphCreate;
  decltype(&::cudaGraphAddChildGraphNode) GraphAddChildGraphNode;
  decltype(&::cudaGraphDestroy) GraphDestroy;
  decltype(&::cudaGraphExecDestroy) GraphExecDestroy;
  decltype(&::cudaEventCreateWithFlags) EventCreateWithFlags;
  decltype(&::cudaEventDestroy) EventDestroy;
  decltype(&::cudaEventRecord) EventRecord;
  decltype(&::cudaEventElapsedTime) EventElapsedTime;
  // Of the overloads that C++ sees, the one that is a symbol.
  cudaError_t (*MemcpyAsync)(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t);
};

struct CudnnApi {
  decltype(&::cudnnGetVersion) GetVersion;
  decltype(&::cudnnGetErrorString) GetErrorString;
  decltype(&::cudnnCreate) Create;
  decltype(&::cudnnSetStream) SetStream;
};

struct Libraries {
  CudaApi cuda;
  CudnnApi cudnn;
  std::string cuda_path;
  std::string cudnn_path;
  int64_t cudnn_version;
};

// Full paths to fall back to where the process has not loaded the libraries; "" for none.
void ConfigureLibraries(const std::string& cudnn_path, const std::string& cuda_path);

// Loads the libraries the first time. Throws Error(kUnavailable) that says what was tried; the next
// call then tries again.
const Libraries& LoadedLibraries();

// cuDNN's version where it is loaded already.
std::optional<int64_t> LoadedCudnnVersion();

// Throw Error(kInternal) unless the call named `call` succeeded.
void CheckCuda(cudaError_t status, std::string_view call);
void CheckCudnn(cudnnStatus_t status, std::string_view call);

// Makes a device current for the scope.
class DeviceScope {
 public:
  // Throws Error(kUnavailable) where there is no such device.
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int device_;
  int previous_;
};

}  // namespace jqconv

#endif  // JQCONV_LIBRARIES_H_
