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
using CudaStream = CudaOwner<cudaStream_t, &CudaApi::StreamDestroy>;

// A stream to capture on. The program's own is shared by all threads of the process, whose work
// would be captured too.
inline CudaStream MakeStream() {
  cudaStream_t stream = nullptr;
  CheckCuda(LoadedLibraries().cuda.StreamCreateWithFlags(&stream, cudaStreamNonBlocking),
            "cudaStreamCreateWithFlags");
  return CudaStream(stream);
}

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

// A graph that holds `children` as nodes, `rounds` times over, each to run after the one before. It
// is how XLA records custom calls: kernels of different nodes do not overlap, as neighbours on a
// stream may.
inline CudaGraph Sequence(const std::vector<CudaGraph>& children, int64_t rounds) {
  const CudaApi& cuda = LoadedLibraries().cuda;
  cudaGraph_t graph = nullptr;
  CheckCuda(cuda.GraphCreate(&graph, 0), "cudaGraphCreate");
  CudaGraph owner(graph);
  cudaGraphNode_t last = nullptr;
  for (int64_t round = 0; round < rounds; ++round) {
    for (const CudaGraph& child : children) {
      cudaGraphNode_t node = nullptr;
      CheckCuda(
          cuda.GraphAddChildGraphNode(&node, graph, &last, last == nullptr ? 0 : 1, child.get()),
          "cudaGraphAddChildGraphNode");
      last = node;
    }
  }
  return owner;
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

// Microseconds of `samples` replays of each graph, the graphs in turn, after one replay of each
// that does not count. Waits for the stream.
inline std::vector<std::vector<float>> TimeReplays(cudaStream_t stream,
                                                   const std::vector<CudaGraph>& graphs,
                                                   size_t samples) {
  const CudaApi& cuda = LoadedLibraries().cuda;
  std::vector<CudaGraphExec> executables;
  for (const CudaGraph& graph : graphs) executables.push_back(Instantiate(graph));
  const auto replay = [&](const CudaGraphExec& executable) {
    CheckCuda(cuda.GraphLaunch(executable.get(), stream), "cudaGraphLaunch");
  };
  std::vector<CudaEvent> events;
  const auto record = [&] {
    events.push_back(MakeEvent());
    CheckCuda(cuda.EventRecord(events.back().get(), stream), "cudaEventRecord");
  };

  // All at once, so that the device always has the next replay waiting.
  for (const CudaGraphExec& executable : executables) replay(executable);
  record();
  for (size_t sample = 0; sample < samples; ++sample) {
    for (const CudaGraphExec& executable : executables) {
      replay(executable);
      record();
    }
  }
  CheckCuda(cuda.StreamSynchronize(stream), "cudaStreamSynchronize");

  std::vector<std::vector<float>> microseconds(graphs.size());
  for (size_t i = 0; i + 1 < events.size(); ++i) {
    float milliseconds = 0;
    CheckCuda(cuda.EventElapsedTime(&milliseconds, events[i].get(), events[i + 1].get()),
              "cudaEventElapsedTime");
    microseconds[i % graphs.size()].push_back(1000 * milliseconds);
  }
  return microseconds;
}

}  // namespace jqconv

#endif  // JQCONV_TIMING_H_
