// Device time of work that is replayed as a CUDA graph, where launching it does not count.
#ifndef JQCONV_TIMING_H_
#define JQCONV_TIMING_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <type_traits>
#include <vector>

#include "error.h"
#include "libraries.h"

namespace jqconv {

// Owners of CUDA's objects. Failing to destroy one is nothing that a caller could act on.
template <auto CudaApi::* destroy>
struct CudaDeleter {
  template <typename Pointer>
  void operator()(Pointer object) const {
    (LoadedLibraries().cuda.*destroy)(object);
  }
};
template <typename Handle, auto CudaApi::* destroy>
using CudaOwner = std::unique_ptr<std::remove_pointer_t<Handle>, CudaDeleter<destroy>>;
using CudaGraph = CudaOwner<cudaGraph_t, &CudaApi::GraphDestroy>;
using CudaGraphExec = CudaOwner<cudaGraphExec_t, &CudaApi::GraphExecDestroy>;
using CudaEvent = CudaOwner<cudaEvent_t, &CudaApi::EventDestroy>;

// Records what `enqueue` puts on the stream instead of running it. Ends the capture on every path.
template <typename Enqueue>
CudaGraph Capture(cudaStream_t stream, const Enqueue& enqueue) {
  const CudaApi& cuda = LoadedLibraries().cuda;
  cudaGraph_t graph = nullptr;
  // Relaxed: other threads go on allocating.
  CheckCuda(cuda.StreamBeginCapture(stream, cudaStreamCaptureModeRelaxed),
            "cudaStreamBeginCapture");
  try {
    enqueue();
  } catch (...) {
    cuda.StreamEndCapture(stream, &graph);
    const CudaGraph discarded(graph);
    throw;
  }
  CheckCuda(cuda.StreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  return CudaGraph(graph);
}

inline CudaGraphExec Instantiate(const CudaGraph& graph) {
  cudaGraphExec_t executable = nullptr;
  CheckCuda(LoadedLibraries().cuda.GraphInstantiateWithFlags(&executable, graph.get(), 0),
            "cudaGraphInstantiate");
  return CudaGraphExec(executable);
}

inline CudaEvent MakeEvent() {
  cudaEvent_t event = nullptr;
  CheckCuda(LoadedLibraries().cuda.EventCreateWithFlags(&event, cudaEventDefault),
            "cudaEventCreate");
  return CudaEvent(event);
}

// Microseconds of each of `samples` runs of what `enqueue` puts on the stream, after a first run
// that does not count. Waits for the stream.
template <typename Enqueue>
std::vector<float> TimeReplays(cudaStream_t stream, size_t samples, const Enqueue& enqueue) {
  const CudaApi& cuda = LoadedLibraries().cuda;
  const CudaGraph graph = Capture(stream, enqueue);
  const CudaGraphExec executable = Instantiate(graph);
  std::vector<CudaEvent> events;
  for (size_t i = 0; i <= samples; ++i) events.push_back(MakeEvent());

  // All at once, so that the device always has the next replay waiting.
  CheckCuda(cuda.GraphLaunch(executable.get(), stream), "cudaGraphLaunch");
  CheckCuda(cuda.EventRecord(events[0].get(), stream), "cudaEventRecord");
  for (size_t i = 0; i < samples; ++i) {
    CheckCuda(cuda.GraphLaunch(executable.get(), stream), "cudaGraphLaunch");
    CheckCuda(cuda.EventRecord(events[i + 1].get(), stream), "cudaEventRecord");
  }
  CheckCuda(cuda.StreamSynchronize(stream), "cudaStreamSynchronize");

  std::vector<float> microseconds(samples);
  for (size_t i = 0; i < samples; ++i) {
    float milliseconds = 0;
    CheckCuda(cuda.EventElapsedTime(&milliseconds, events[i].get(), events[i + 1].get()),
              "cudaEventElapsedTime");
    microseconds[i] = 1000 * milliseconds;
  }
  return microseconds;
}

}  // namespace jqconv

#endif  // JQCONV_TIMING_H_
