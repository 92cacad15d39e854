// A convolution as a graph of cuDNN's frontend, and the plans that run it.
#ifndef JQCONV_CONV_GRAPH_H_
#define JQCONV_CONV_GRAPH_H_

#include <cudnn.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "conv_spec.h"

namespace jqconv {

// One built plan of one convolution. Immutable: many threads may run it, each with its own handle.
class Plan {
 public:
  struct Impl;  // Everything of the frontend.

  Plan(Algorithm algorithm, std::unique_ptr<Impl> impl);
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // What runs, with the workspace that it needs and the cuDNN that built it.
  const Algorithm& algorithm() const { return algorithm_; }

  // Enqueues the convolution on the handle's stream. `buffers` are device pointers in the order of
  // Operands(); the residual's may be the result's. Allocates nothing but cuDNN's variant pack.
  void Execute(cudnnHandle_t handle, void* const* buffers, void* workspace) const;

  // Bytes for LoadPlan, compiled kernels included.
  std::vector<uint8_t> Serialize() const;

 private:
  Algorithm algorithm_;
  std::unique_ptr<Impl> impl_;
};

// Builds the plan that `algorithm` names, which is legal for `spec`. Takes seconds: cuDNN compiles
// kernels. The handle's device must be current. Throws Error(kNotFound) with cuDNN's reason where
// the device has no such plan.
std::shared_ptr<const Plan> BuildPlan(cudnnHandle_t handle, const ConvSpec& spec,
                                      const Algorithm& algorithm);

// Likewise the heuristic's first plan, in the first formulation, that builds and needs at most
// `workspace_limit` bytes; with `deterministic` it also returns the same bits every time.
std::shared_ptr<const Plan> BuildHeuristicPlan(cudnnHandle_t handle, const ConvSpec& spec,
                                               int64_t workspace_limit, bool deterministic);

// What Serialize() of the plan that `algorithm` names returned. Takes milliseconds. Throws
// Error(kNotFound) where the bytes are not such a plan, or this device or cuDNN cannot load it.
std::shared_ptr<const Plan> LoadPlan(cudnnHandle_t handle, const ConvSpec& spec,
                                     const Algorithm& algorithm,
                                     const std::vector<uint8_t>& serialized);

// Every algorithm that cuDNN's heuristics propose for `spec`, in every formulation, best guess
// first. Not every one of them builds.
std::vector<Algorithm> ProposeAlgorithms(cudnnHandle_t handle, const ConvSpec& spec);

// The algorithms that differ from `algorithm` in the value of one knob, of which the heuristics
// propose only some. Not every one of them builds.
std::vector<Algorithm> VaryKnobs(cudnnHandle_t handle, const ConvSpec& spec,
                                 const Algorithm& algorithm);

// cuDNN frontend's version, such as "1.28.0".
std::string FrontendVersion();

}  // namespace jqconv

#endif  // JQCONV_CONV_GRAPH_H_
