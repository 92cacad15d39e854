#include "conv_graph.h"

// The one unit that includes the frontend: compiling it takes a minute and 2 GB.
#ifndef NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#endif
#ifndef NV_CUDNN_FRONTEND_DISABLE_LOGGING
#define NV_CUDNN_FRONTEND_DISABLE_LOGGING
#endif
#include <cudnn_frontend.h>

#include <algorithm>
#include <array>
#include <exception>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "error.h"
#include "libraries.h"

namespace jqconv {

namespace fe = cudnn_frontend;
using fe::graph::Graph;

struct Plan::Impl {
  std::unique_ptr<Graph> graph;
  int64_t index;  // Of the plan among the graph's candidates; no other one is built.
  std::vector<Operand> operands;
  std::vector<size_t> order;  // The operands in the order that the frontend takes pointers in.
};

namespace {

using FeTensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// ---- Vocabulary ----

constexpr fe::DataType_t kFloat = fe::DataType_t::FLOAT;
constexpr fe::DataType_t kInt32 = fe::DataType_t::INT32;

fe::DataType_t FeType(DataType dtype) {
  switch (dtype) {
    case DataType::kInt8:
      return fe::DataType_t::INT8;
    case DataType::kUint8:
      return fe::DataType_t::UINT8;
    case DataType::kInt32:
      return fe::DataType_t::INT32;
    case DataType::kBFloat16:
      return fe::DataType_t::BFLOAT16;
    case DataType::kFloat16:
      return fe::DataType_t::HALF;
    case DataType::kFloat32:
      return fe::DataType_t::FLOAT;
  }
  return fe::DataType_t::NOT_SET;
}

// Fixed for every role, so that a residual and a result at one address stay two tensors. The
// frontend numbers its own tensors around these.
int64_t Uid(Role role) { return static_cast<int64_t>(role) + 1; }

// cuDNN appends pages about every engine that it considered.
std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

// Whether a failure says something about the process rather than about the graph.
bool IsFatal(const fe::error_t& status) {
  return status.code == fe::error_code_t::CUDA_API_FAILED ||
         status.code == fe::error_code_t::INVALID_CUDA_DEVICE ||
         status.code == fe::error_code_t::HANDLE_ERROR;
}

void Check(const fe::error_t& status, const std::string& step) {
  if (status.is_good()) return;
  throw Error(IsFatal(status) ? ErrorCode::kInternal : ErrorCode::kNotFound,
              "cuDNN refuses to " + step + ": " + FirstLine(status.err_msg));
}

// ---- Tensors ----

// cuDNN names dimensions N, C, H, W whatever their order in memory, which the strides tell.
void Describe(const FeTensor& tensor, const Operand& operand) {
  const auto& dims = operand.dims;
  if (dims.size() == 4) {
    tensor->set_dim({dims[0], dims[3], dims[1], dims[2]})
        .set_stride({dims[1] * dims[2] * dims[3], 1, dims[2] * dims[3], dims[3]});
  } else {
    const int64_t channels = dims.empty() ? 1 : dims[0];
    tensor->set_dim({1, channels, 1, 1}).set_stride({channels, 1, channels, channels});
  }
  tensor->set_name(std::string(Name(operand.role)))
      .set_uid(Uid(operand.role))
      .set_data_type(FeType(operand.dtype));
}

FeTensor AddScalar(Graph& graph, float value) {
  return graph.tensor(
      fe::graph::Tensor_attributes(value).set_dim({1, 1, 1, 1}).set_stride({1, 1, 1, 1}));
}

// ---- The graph ----

// Builds a spec's graph node by node.
class GraphBuilder {
 public:
  GraphBuilder(const ConvSpec& spec, const std::string& formulation)
      : spec_(spec),
        formulation_(formulation),
        operands_(Operands(spec)),
        graph_(std::make_unique<Graph>()) {
    const fe::DataType_t intermediate = IsRaw() ? kInt32 : kFloat;
    graph_->set_io_data_type(fe::DataType_t::INT8)
        .set_intermediate_data_type(intermediate)
        .set_compute_data_type(intermediate);
  }

  std::unique_ptr<Graph> Build() && {
    const FeTensor result = Result();
    Describe(result, operands_.back());
    result->set_output(true);
    return std::move(graph_);
  }

 private:
  // The accumulator itself is the result.
  bool IsRaw() const { return spec_.y.dtype == DataType::kInt32; }

  FeTensor Input(Role role) {
    const auto operand = std::find_if(operands_.begin(), operands_.end(),
                                      [role](const Operand& o) { return o.role == role; });
    FeTensor tensor = graph_->tensor(fe::graph::Tensor_attributes());
    Describe(tensor, *operand);
    return tensor;
  }

  FeTensor Pointwise(fe::PointwiseMode_t mode, const FeTensor& a, const FeTensor& b) {
    return graph_->pointwise(a, b, fe::graph::Pointwise_attributes().set_mode(mode));
  }
  FeTensor Multiply(const FeTensor& a, const FeTensor& b) {
    return Pointwise(fe::PointwiseMode_t::MUL, a, b);
  }
  FeTensor Add(const FeTensor& a, const FeTensor& b) {
    return Pointwise(fe::PointwiseMode_t::ADD, a, b);
  }
  FeTensor Apply(const FeTensor& a, fe::graph::Pointwise_attributes attributes) {
    return graph_->pointwise(a, std::move(attributes));
  }

  template <typename Attributes>
  Attributes Window() const {
    const bool integers = spec_.direction == Direction::kFprop && spec_.x.dtype == DataType::kInt8;
    Attributes attributes;
    attributes.set_pre_padding({spec_.padding[0], spec_.padding[2]})
        .set_post_padding({spec_.padding[1], spec_.padding[3]})
        .set_stride({spec_.strides[0], spec_.strides[1]})
        .set_dilation({spec_.dilation[0], spec_.dilation[1]})
        .set_compute_data_type(integers ? kInt32 : kFloat);
    return attributes;
  }

  FeTensor Result() {
    switch (spec_.direction) {
      case Direction::kDgrad:
        return graph_->conv_dgrad(Input(Role::kY), Input(Role::kW),
                                  Window<fe::graph::Conv_dgrad_attributes>());
      case Direction::kWgrad:
        return graph_->conv_wgrad(Input(Role::kY), Input(Role::kX),
                                  Window<fe::graph::Conv_wgrad_attributes>());
      case Direction::kFprop:
        break;
    }
    const FeTensor accumulator = graph_->conv_fprop(Input(Role::kX), Input(Role::kW),
                                                    Window<fe::graph::Conv_fprop_attributes>());
    return IsRaw()
               ? Apply(accumulator,
                       fe::graph::Pointwise_attributes().set_mode(fe::PointwiseMode_t::IDENTITY))
               : Epilogue(accumulator);
  }

  FeTensor Epilogue(FeTensor v) {
    for (char letter : formulation_) v = Step(letter, v);
    return v;
  }

  FeTensor Step(char letter, const FeTensor& v) {
    switch (letter) {
      case 's':
        return Multiply(v, Input(Role::kMultiplier));
      case 'b':
        return Add(v, Input(Role::kBias));
      case 'z':
        return Add(v, Residual());
      case 'r':
        return Activate(v);
      case 'o':
        return Multiply(v, Input(Role::kOutMultiplier));
    }
    throw Error(ErrorCode::kInternal, "no step of an epilogue is '" + std::string(1, letter) + "'");
  }

  FeTensor Residual() {
    const FeTensor residual = Input(Role::kResidual);
    return spec_.residual_scale ? Multiply(residual, Input(Role::kResidualScale)) : residual;
  }

  FeTensor Activate(const FeTensor& v) {
    fe::graph::Pointwise_attributes node;
    switch (spec_.activation.kind) {
      case ActivationKind::kNone:
        return v;
      case ActivationKind::kRelu:
        return Apply(v, node.set_mode(fe::PointwiseMode_t::RELU_FWD));
      case ActivationKind::kRelu6:
        return Apply(v, node.set_mode(fe::PointwiseMode_t::RELU_FWD).set_relu_upper_clip(6.0f));
      case ActivationKind::kLeakyRelu:
        return Apply(v, node.set_mode(fe::PointwiseMode_t::RELU_FWD)
                            .set_relu_lower_clip_slope(static_cast<float>(spec_.activation.slope)));
      case ActivationKind::kSilu:
        return Apply(v, node.set_mode(fe::PointwiseMode_t::SWISH_FWD));
      case ActivationKind::kGelu:
        return Apply(v, node.set_mode(fe::PointwiseMode_t::GELU_APPROX_TANH_FWD));
      case ActivationKind::kHardSwish:
        return HardSwish(v);
    }
    return v;
  }

  // v * relu6(v + 3) / 6; cuDNN has no node for it.
  FeTensor HardSwish(const FeTensor& v) {
    const FeTensor shifted = Add(v, AddScalar(*graph_, 3.0f));
    const FeTensor gate = Apply(shifted, fe::graph::Pointwise_attributes()
                                             .set_mode(fe::PointwiseMode_t::RELU_FWD)
                                             .set_relu_upper_clip(6.0f));
    return Multiply(Multiply(v, gate), AddScalar(*graph_, 1.0f / 6.0f));
  }

  const ConvSpec& spec_;
  const std::string& formulation_;
  const std::vector<Operand> operands_;
  std::unique_ptr<Graph> graph_;
};

std::unique_ptr<Graph> MakeGraph(cudnnHandle_t handle, const ConvSpec& spec,
                                 const std::string& formulation) {
  std::unique_ptr<Graph> graph = GraphBuilder(spec, formulation).Build();
  Check(graph->validate(), "validate the graph");
  Check(graph->build_operation_graph(handle), "build the operation graph");
  return graph;
}

// ---- Plans ----

using Knobs = std::unordered_map<fe::KnobType_t, int64_t>;

// None where the frontend has no name for a knob: one newer than cuDNN's headers here, say.
std::optional<Knobs> FeKnobs(const Algorithm& algorithm) {
  Knobs knobs;
  for (const auto& [number, value] : algorithm.knobs) {
    const auto knob =
        fe::convert_from_backend_knob_type(static_cast<cudnnBackendKnobType_t>(number));
    if (knob == fe::KnobType_t::NOT_SET) return std::nullopt;
    knobs[knob] = value;
  }
  return knobs;
}

void ProposeHeuristicPlans(Graph& graph) {
  Check(graph.create_execution_plans(
            {fe::HeurMode_t::A, fe::HeurMode_t::B, fe::HeurMode_t::FALLBACK}),
        "propose a plan");
}

// Makes the plan that `algorithm` names a candidate of the graph and returns its index.
int64_t ProposeNamedPlan(Graph& graph, const Algorithm& algorithm) {
  const std::string tag = PlanTag(algorithm);
  if (const auto knobs = FeKnobs(algorithm)) {
    Check(graph.create_execution_plan(algorithm.engine, *knobs), "configure plan '" + tag + "'");
    return 0;
  }
  ProposeHeuristicPlans(graph);
  for (int64_t index = 0; index < graph.get_execution_plan_count(); ++index) {
    std::string name;
    Check(graph.get_plan_name_at_index(index, name), "name a plan");
    if (name == tag) return index;
  }
  throw Error(ErrorCode::kNotFound, "plan '" + tag + "' has a knob that cuDNN's frontend " +
                                        FrontendVersion() +
                                        " cannot set, and the heuristic does not propose it");
}

// What the graph's plan of this index is called, without its workspace.
Algorithm NameAlgorithm(const Graph& graph, int64_t index, const ConvSpec& spec,
                        const std::string& formulation) {
  std::string tag;
  Check(graph.get_plan_name_at_index(index, tag), "name a plan");
  Algorithm algorithm;
  algorithm.form = Form(spec);
  algorithm.formulation = formulation;
  algorithm.cudnn_version = LoadedLibraries().cudnn_version;
  ParsePlanTag(tag, algorithm);
  return algorithm;
}

// What cuDNN proposes for one formulation; nothing where it refuses the graph.
std::vector<Algorithm> ProposeFormulation(cudnnHandle_t handle, const ConvSpec& spec,
                                          const std::string& formulation) {
  std::vector<Algorithm> proposed;
  try {
    auto graph = MakeGraph(handle, spec, formulation);
    ProposeHeuristicPlans(*graph);
    for (int64_t index = 0; index < graph->get_execution_plan_count(); ++index) {
      proposed.push_back(NameAlgorithm(*graph, index, spec, formulation));
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) throw;
  }
  return proposed;
}

// Where each of the pointers that the frontend takes stands among the operands.
std::vector<size_t> PointerOrder(const Graph& graph, const std::vector<Operand>& operands) {
  std::vector<size_t> order;
  for (int64_t uid : graph.get_variant_pack_uids_sorted()) {
    const auto operand = std::find_if(operands.begin(), operands.end(),
                                      [uid](const Operand& o) { return Uid(o.role) == uid; });
    if (operand == operands.end()) {
      throw Error(ErrorCode::kInternal,
                  "cuDNN's graph has a tensor that no operand is for: uid " + std::to_string(uid));
    }
    order.push_back(operand - operands.begin());
  }
  return order;
}

int64_t WorkspaceSize(const Graph& graph, int64_t index) {
  int64_t workspace = 0;
  Check(graph.get_workspace_size_plan_at_index(index, workspace), "size the plan's workspace");
  return workspace;
}

std::shared_ptr<const Plan> FinishPlan(std::unique_ptr<Graph> graph, int64_t index,
                                       const ConvSpec& spec, Algorithm algorithm) {
  algorithm.workspace = WorkspaceSize(*graph, index);
  Check(graph->prepare_variant_pack_template(), "prepare the plan's variant pack");
  auto impl = std::make_unique<Plan::Impl>();
  impl->index = index;
  impl->operands = Operands(spec);
  impl->order = PointerOrder(*graph, impl->operands);
  impl->graph = std::move(graph);
  return std::make_shared<const Plan>(std::move(algorithm), std::move(impl));
}

}  // namespace

Plan::Plan(Algorithm algorithm, std::unique_ptr<Impl> impl)
    : algorithm_(std::move(algorithm)), impl_(std::move(impl)) {}

Plan::~Plan() = default;

void Plan::Execute(cudnnHandle_t handle, void* const* buffers, void* workspace) const {
  constexpr uintptr_t kAlignment = 16;  // What the frontend promises cuDNN.
  std::array<void*, kMaxOperands> pointers;
  for (size_t i = 0; i < impl_->order.size(); ++i) {
    const size_t operand = impl_->order[i];
    pointers[i] = buffers[operand];
    if (reinterpret_cast<uintptr_t>(pointers[i]) % kAlignment != 0) {
      throw Error(ErrorCode::kInvalidArgument, std::string(Name(impl_->operands[operand].role)) +
                                                   " does not start at a multiple of " +
                                                   std::to_string(kAlignment) + " bytes");
    }
  }
  const fe::error_t status = impl_->graph->execute_plan_at_index(
      handle, pointers.data(), static_cast<int>(impl_->order.size()), workspace, impl_->index);
  if (status.is_bad()) {
    throw Error(ErrorCode::kInternal, "cuDNN failed to run plan '" + ToString(algorithm_) +
                                          "': " + FirstLine(status.err_msg));
  }
}

std::vector<uint8_t> Plan::Serialize() const {
  std::vector<uint8_t> serialized;
  Check(impl_->graph->serialize(serialized, /*serialize_structure=*/false), "serialize a plan");
  return serialized;
}

std::shared_ptr<const Plan> BuildPlan(cudnnHandle_t handle, const ConvSpec& spec,
                                      const Algorithm& algorithm) {
  auto graph = MakeGraph(handle, spec, algorithm.formulation);
  const int64_t index = ProposeNamedPlan(*graph, algorithm);
  Check(graph->build_plan_at_index(index), "build plan '" + PlanTag(algorithm) + "'");
  Algorithm named = NameAlgorithm(*graph, index, spec, algorithm.formulation);
  return FinishPlan(std::move(graph), index, spec, std::move(named));
}

std::shared_ptr<const Plan> LoadPlan(cudnnHandle_t handle, const ConvSpec& spec,
                                     const Algorithm& algorithm,
                                     const std::vector<uint8_t>& serialized) {
  auto graph = std::make_unique<Graph>();
  try {
    Check(graph->deserialize(handle, serialized, /*enforce_precompiled=*/true,
                             /*run_warmup=*/false),
          "load a serialized plan");
  } catch (const Error&) {
    throw;
  } catch (const std::exception& malformed) {  // Of the JSON library's own.
    throw Error(ErrorCode::kNotFound, std::string("no serialized plan: ") + malformed.what());
  }
  auto plan = FinishPlan(std::move(graph), 0, spec, algorithm);
  if (plan->algorithm().workspace != algorithm.workspace) {
    throw Error(ErrorCode::kNotFound, "the serialized plan is another one than '" +
                                          ToString(algorithm) + "': its workspace is " +
                                          std::to_string(plan->algorithm().workspace) + " bytes");
  }
  return plan;
}

std::vector<Algorithm> ProposeAlgorithms(cudnnHandle_t handle, const ConvSpec& spec) {
  std::vector<Algorithm> proposed;
  std::set<std::string> names;  // Heuristics repeat each other.
  for (const std::string& formulation : Formulations(spec)) {
    for (Algorithm& algorithm : ProposeFormulation(handle, spec, formulation)) {
      if (names.insert(PlanName(algorithm)).second) proposed.push_back(std::move(algorithm));
    }
  }
  return proposed;
}

std::vector<Algorithm> VaryKnobs(cudnnHandle_t handle, const ConvSpec& spec,
                                 const Algorithm& algorithm) {
  constexpr int64_t kMost = 64;  // Values of a knob.
  const auto graph = MakeGraph(handle, spec, algorithm.formulation);
  std::vector<fe::Knob> knobs;
  Check(graph->get_knobs_for_engine(algorithm.engine, knobs), "list an engine's knobs");
  std::vector<Algorithm> variants;
  for (size_t i = 0; i < algorithm.knobs.size(); ++i) {
    const auto& [number, chosen] = algorithm.knobs[i];
    const auto type =
        fe::convert_from_backend_knob_type(static_cast<cudnnBackendKnobType_t>(number));
    const auto knob = std::find_if(knobs.begin(), knobs.end(),
                                   [type](const fe::Knob& other) { return other.type == type; });
    if (type == fe::KnobType_t::NOT_SET || knob == knobs.end()) continue;
    const int64_t step = std::max<int64_t>(knob->stride, 1);
    const int64_t last = std::min(knob->maxValue, knob->minValue + (kMost - 1) * step);
    for (int64_t value = knob->minValue; value <= last; value += step) {
      if (value == chosen) continue;
      variants.push_back(algorithm);
      variants.back().knobs[i].second = value;
      variants.back().workspace = 0;  // Not known before it is built.
    }
  }
  return variants;
}

std::shared_ptr<const Plan> BuildHeuristicPlan(cudnnHandle_t handle, const ConvSpec& spec,
                                               int64_t workspace_limit, bool deterministic) {
  const std::string formulation = Formulations(spec).front();
  auto graph = MakeGraph(handle, spec, formulation);
  ProposeHeuristicPlans(*graph);
  if (deterministic) graph->deselect_numeric_notes({fe::NumericalNote_t::NONDETERMINISTIC});
  graph->deselect_workspace_greater_than(workspace_limit);
  const int64_t count = graph->get_execution_plan_count();
  std::string reason;
  for (int64_t index = 0; index < count; ++index) {
    const fe::error_t status = graph->build_plan_at_index(index);
    if (status.is_good()) {
      Algorithm named = NameAlgorithm(*graph, index, spec, formulation);
      return FinishPlan(std::move(graph), index, spec, std::move(named));
    }
    if (IsFatal(status)) Check(status, "build a plan");
    reason = FirstLine(status.err_msg);
  }
  throw Error(ErrorCode::kNotFound, "none of the " + std::to_string(count) +
                                        " plans that cuDNN proposes builds and runs in a workspace "
                                        "of " +
                                        std::to_string(workspace_limit) +
                                        " bytes; of the last it says: " + reason);
}

std::string FrontendVersion() {
  return std::to_string(CUDNN_FRONTEND_MAJOR_VERSION) + "." +
         std::to_string(CUDNN_FRONTEND_MINOR_VERSION) + "." +
         std::to_string(CUDNN_FRONTEND_PATCH_VERSION);
}

}  // namespace jqconv
