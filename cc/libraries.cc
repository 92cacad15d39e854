#include "libraries.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "error.h"

// Declared by cudnn_frontend, which looks every cuDNN function up in it.
namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace jqconv {
namespace {

struct Paths {
  std::mutex mutex;
  std::string cudnn;
  std::string cuda;
};

Paths& ConfiguredPaths() {
  static Paths paths;
  return paths;
}

struct Library {
  void* handle;
  std::string path;
};

// Tries the ways to a library in order and remembers what came of each.
class Loader {
 public:
  void Try(const std::string& name, int extra_flags, const std::string& how) {
    if (handle_ != nullptr || name.empty()) return;
    handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | extra_flags);
    if (handle_ != nullptr) return;
    const char* reason = (extra_flags & RTLD_NOLOAD) != 0 ? nullptr : dlerror();
    tried_ += "\n  " + how + " " + name + (reason != nullptr ? std::string(": ") + reason : "");
  }

  Library Result(const std::string& what) const {
    if (handle_ == nullptr) {
      throw Error(ErrorCode::kUnavailable,
                  what + " could not be loaded. Tried:" + tried_ +
                      "\nInstall JAX with its CUDA plugin, or jqconv with the extra cuda13 or "
                      "cuda12, which bring the library.");
    }
    link_map* map = nullptr;
    const bool known = dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr;
    return {handle_, known ? map->l_name : ""};
  }

 private:
  void* handle_ = nullptr;
  std::string tried_;
};

// The library that the process already has, else the configured one, else the loader's.
Library Load(const std::string& what, const std::vector<std::string>& sonames,
             const std::string& configured) {
  Loader loader;
  for (const auto& name : sonames) loader.Try(name, RTLD_NOLOAD, "already in the process:");
  loader.Try(configured, 0, "configured:");
  for (const auto& name : sonames) loader.Try(name, 0, "on the loader's path:");
  return loader.Result(what);
}

template <typename Function>
void Bind(Function*& slot, const Library& library, const char* symbol) {
  slot = reinterpret_cast<Function*>(dlsym(library.handle, symbol));
  if (slot == nullptr) {
    throw Error(ErrorCode::kUnavailable,
                library.path + " has no " + symbol + ": it is too old or another library");
  }
}

CudaApi BindCuda(const Library& library) {
  CudaApi api;
  Bind(api.GetErrorString, library, "cudaGetErrorString");
  Bind(api.GetDevice, library, "cudaGetDevice");
  Bind(api.SetDevice, library, "cudaSetDevice");
  Bind(api.StreamCreateWithFlags, library, "cudaStreamCreateWithFlags");
  Bind(api.StreamDestroy, library, "cudaStreamDestroy");
  Bind(api.StreamIsCapturing, library, "cudaStreamIsCapturing");
  Bind(api.StreamBeginCapture, library, "cudaStreamBeginCapture");
  Bind(api.StreamEndCapture, library, "cudaStreamEndCapture");
  Bind(api.StreamSynchronize, library, "cudaStreamSynchronize");
  Bind(api.GraphInstantiateWithFlags, library, "cudaGraphInstantiateWithFlags");
  Bind(api.GraphCreate, library, "cudaGraphCreate");
  Bind(api.GraphAddChildGraphNode, library, "cudaGraphAddChildGraphNode");
  Bind(api.GraphLaunch, library, "cudaGraphLaunch");
  Bind(api.GraphDestroy, library, "cudaGraphDestroy");
  Bind(api.GraphExecDestroy, library, "cudaGraphExecDestroy");
  Bind(api.EventCreateWithFlags, library, "cudaEventCreateWithFlags");
  Bind(api.EventDestroy, library, "cudaEventDestroy");
  Bind(api.EventRecord, library, "cudaEventRecord");
  Bind(api.EventElapsedTime, library, "cudaEventElapsedTime");
  Bind(api.MemcpyAsync, library, "cudaMemcpyAsync");
  return api;
}

CudnnApi BindCudnn(const Library& library) {
  CudnnApi api;
  Bind(api.GetVersion, library, "cudnnGetVersion");
  Bind(api.GetErrorString, library, "cudnnGetErrorString");
  Bind(api.Create, library, "cudnnCreate");
  Bind(api.SetStream, library, "cudnnSetStream");
  return api;
}

Libraries LoadLibraries() {
  std::string cudnn_path, cuda_path;
  {
    Paths& configured = ConfiguredPaths();
    std::lock_guard<std::mutex> lock(configured.mutex);
    cudnn_path = configured.cudnn;
    cuda_path = configured.cuda;
  }
  // The runtime first: cuDNN needs one itself, and then finds this.
  const Library cuda = Load("The CUDA runtime", {"libcudart.so.13", "libcudart.so.12"}, cuda_path);
  const Library cudnn = Load("cuDNN", {"libcudnn.so.9"}, cudnn_path);
  Libraries libraries{BindCuda(cuda), BindCudnn(cudnn), cuda.path, cudnn.path, 0};
  libraries.cudnn_version = static_cast<int64_t>(libraries.cudnn.GetVersion());
  if (libraries.cudnn_version / 10000 != 9) {
    throw Error(ErrorCode::kUnavailable, cudnn.path + " is cuDNN " +
                                             std::to_string(libraries.cudnn_version) +
                                             ", expected version 9");
  }
  // The frontend loads a runtime of its own accord, and says so on stderr where it finds two.
  setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", cuda.path.c_str(), /*overwrite=*/0);
  cudnn_frontend::cudnn_dlhandle = cudnn.handle;
  return libraries;
}

std::atomic<const Libraries*> loaded_libraries{nullptr};

}  // namespace

void ConfigureLibraries(const std::string& cudnn_path, const std::string& cuda_path) {
  Paths& configured = ConfiguredPaths();
  std::lock_guard<std::mutex> lock(configured.mutex);
  configured.cudnn = cudnn_path;
  configured.cuda = cuda_path;
}

const Libraries& LoadedLibraries() {
  static std::once_flag once;  // Stays unset where loading throws.
  std::call_once(once, [] { loaded_libraries = new Libraries(LoadLibraries()); });
  return *loaded_libraries;
}

std::optional<int64_t> LoadedCudnnVersion() {
  const Libraries* libraries = loaded_libraries;
  if (libraries == nullptr) return std::nullopt;
  return libraries->cudnn_version;
}

void CheckCuda(cudaError_t status, std::string_view call) {
  if (status == cudaSuccess) return;
  throw Error(ErrorCode::kInternal,
              std::string(call) + " failed: " + LoadedLibraries().cuda.GetErrorString(status));
}

void CheckCudnn(cudnnStatus_t status, std::string_view call) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw Error(ErrorCode::kInternal,
              std::string(call) + " failed: " + LoadedLibraries().cudnn.GetErrorString(status));
}

DeviceScope::DeviceScope(int device) : device_(device) {
  const CudaApi& cuda = LoadedLibraries().cuda;
  cudaError_t status = cuda.GetDevice(&previous_);
  // Even where the device is current already: this gives a fresh thread its context.
  if (status == cudaSuccess) status = cuda.SetDevice(device);
  if (status != cudaSuccess) {
    throw Error(ErrorCode::kUnavailable, "CUDA device " + std::to_string(device) +
                                             " cannot be used: " + cuda.GetErrorString(status));
  }
}

DeviceScope::~DeviceScope() {
  if (previous_ != device_) LoadedLibraries().cuda.SetDevice(previous_);
}

}  // namespace jqconv
