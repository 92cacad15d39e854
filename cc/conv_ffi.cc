#include "conv_ffi.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "conv_spec.h"
#include "cudnn_handle.h"
#include "error.h"
#include "libraries.h"
#include "plan_cache.h"
#include "status.h"
#include "timing.h"
#include "warnings.h"
#include "xla/ffi/api/ffi.h"

namespace jqconv {
namespace {

namespace ffi = xla::ffi;

// ---- State ----

// What to time and how, where the call is to time plans instead of to run one.
struct Timing {
  std::vector<Algorithm> candidates;
  int64_t sets;   // How often operands and result are repeated.
  int64_t runs;   // Rounds over the sets in one graph.
  bool overlaps;  // Whether kernels may, as neighbours on a stream.
};

// Lives with the executable: what its attributes say, and the plans on each device it ran on.
struct PlanState {
  static ffi::TypeId id;

  struct Slot {
    std::vector<PlanPtr> plans;  // One, or those of the candidates; null where there is none.
    HandlePool* handles = nullptr;
  };

  ConvSpec spec;
  std::vector<Operand> operands;       // The result is last.
  std::optional<Algorithm> algorithm;  // None: the one chosen earlier, or the heuristic's.
  bool pinned = false;                 // The user named the algorithm: no other will do.
  std::optional<Timing> timing;

  size_t InputCount() const { return operands.size() - 1; }
  size_t SetCount() const { return timing ? timing->sets : 1; }

  Slot At(int32_t device) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto slot = slots_.find(device);
    return slot == slots_.end() ? Slot() : slot->second;
  }

  void Set(int32_t device, Slot slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    slots_[device] = std::move(slot);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int32_t, Slot> slots_;
};

ffi::TypeId PlanState::id = {};

std::unique_ptr<PlanState> MakeState(std::string_view spec) {
  auto state = std::make_unique<PlanState>();
  state->spec = ParseConvSpec(spec);
  state->operands = Operands(state->spec);
  return state;
}

Algorithm ParseLegal(std::string_view text, const ConvSpec& spec) {
  Algorithm algorithm = ParseAlgorithm(text);
  CheckLegal(algorithm, spec);
  return algorithm;
}

// The words that end every message about a call.
std::string Where(const PlanState& state, int32_t device) {
  const auto version = LoadedCudnnVersion();
  return "convolution spec '" + ToString(state.spec) + "', CUDA device " + std::to_string(device) +
         ", cuDNN " + (version ? std::to_string(*version) : "not loaded");
}

// ---- Buffers ----

ffi::DataType FfiType(DataType dtype) {
  switch (dtype) {
    case DataType::kInt8:
      return ffi::S8;
    case DataType::kUint8:
      return ffi::U8;
    case DataType::kInt32:
      return ffi::S32;
    case DataType::kBFloat16:
      return ffi::BF16;
    case DataType::kFloat16:
      return ffi::F16;
    case DataType::kFloat32:
      return ffi::F32;
  }
  return ffi::DataType::INVALID;
}

ffi::AnyBuffer Argument(const ffi::RemainingArgs& args, size_t index) {
  const auto buffer = args.get<ffi::AnyBuffer>(index);
  if (buffer.has_error()) throw Error(ErrorCode::kInvalidArgument, buffer.error().message());
  return *buffer;
}

ffi::AnyBuffer Result(const ffi::RemainingRets& results, size_t index) {
  auto buffer = results.get<ffi::AnyBuffer>(index);
  if (buffer.has_error()) throw Error(ErrorCode::kInvalidArgument, buffer.error().message());
  return **buffer;
}

// After the results of all sets.
ffi::AnyBuffer Workspace(const PlanState& state, const ffi::RemainingRets& results) {
  return Result(results, state.SetCount());
}

ffi::AnyBuffer Times(const PlanState& state, const ffi::RemainingRets& results) {
  return Result(results, state.SetCount() + 1);
}

std::string Describe(ffi::DataType dtype, ffi::Span<const int64_t> dims) {
  std::ostringstream text;
  text << dtype << "[";
  for (size_t i = 0; i < dims.size(); ++i) text << (i > 0 ? "," : "") << dims[i];
  text << "]";
  return text.str();
}

void CheckCount(const char* what, size_t given, size_t expected) {
  if (given == expected) return;
  throw Error(ErrorCode::kInvalidArgument, "the call has " + std::to_string(given) + " " + what +
                                               ", expected " + std::to_string(expected));
}

void CheckOperand(const ffi::AnyBuffer& buffer, const Operand& operand) {
  const ffi::Span<const int64_t> dims(operand.dims);
  if (buffer.element_type() == FfiType(operand.dtype) && buffer.dimensions() == dims) return;
  throw Error(ErrorCode::kInvalidArgument,
              std::string(Name(operand.role)) + " is " +
                  Describe(buffer.element_type(), buffer.dimensions()) + ", expected " +
                  Describe(FfiType(operand.dtype), dims));
}

// A result of free length.
void CheckVector(const ffi::AnyBuffer& buffer, const char* name, ffi::DataType dtype) {
  if (buffer.element_type() == dtype && buffer.dimensions().size() == 1 &&
      buffer.dimensions()[0] >= 1) {
    return;
  }
  std::ostringstream expected;
  expected << dtype;
  throw Error(ErrorCode::kInvalidArgument,
              std::string(name) + " is " + Describe(buffer.element_type(), buffer.dimensions()) +
                  ", expected " + expected.str() + "[n] with n >= 1");
}

// Everything that cuDNN will take on trust: a wrong shape ends in reads out of bounds, which cost
// the process its CUDA context.
void CheckBuffers(const PlanState& state, const ffi::RemainingArgs& args,
                  const ffi::RemainingRets& results) {
  const size_t inputs = state.InputCount();
  const size_t sets = state.SetCount();
  CheckCount("operands", args.size(), inputs * sets);
  CheckCount("results", results.size(), sets + (state.timing ? 2 : 1));
  for (size_t set = 0; set < sets; ++set) {
    for (size_t i = 0; i < inputs; ++i) {
      CheckOperand(Argument(args, set * inputs + i), state.operands[i]);
    }
    CheckOperand(Result(results, set), state.operands.back());
  }
  CheckVector(Workspace(state, results), "workspace", ffi::U8);
  if (!state.timing) return;
  const ffi::AnyBuffer times = Times(state, results);
  CheckVector(times, "times", ffi::F32);
  if (times.element_count() % state.timing->candidates.size() != 0) {
    throw Error(ErrorCode::kInvalidArgument, "times has " + std::to_string(times.element_count()) +
                                                 " elements, expected as many for each of the " +
                                                 std::to_string(state.timing->candidates.size()) +
                                                 " candidates");
  }
}

using Pointers = std::array<void*, kMaxOperands>;

Pointers PointersOfSet(const PlanState& state, size_t set, const ffi::RemainingArgs& args,
                       const ffi::RemainingRets& results) {
  const size_t inputs = state.InputCount();
  Pointers pointers;
  for (size_t i = 0; i < inputs; ++i) {
    pointers[i] = Argument(args, set * inputs + i).untyped_data();
  }
  pointers[inputs] = Result(results, set).untyped_data();
  return pointers;
}

// ---- Stages ----

PlanPtr ChoosePlan(const PlanState& state, int32_t device, int64_t workspace) {
  PlanCache& cache = PlanCache::Get();
  if (!state.algorithm) return cache.Chosen(device, state.spec, workspace);
  try {
    return cache.Named(device, state.spec, *state.algorithm, workspace);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) throw;
    const std::string problem =
        "algorithm '" + ToString(*state.algorithm) + "' is not available: " + error.what();
    if (state.pinned) {
      throw Error(ErrorCode::kInvalidArgument,
                  problem + ". It was named explicitly; name another one or none");
    }
    PlanPtr plan = cache.Chosen(device, state.spec, workspace);
    Warnings::Get().Add(problem + ". Running '" + ToString(plan->algorithm()) + "' instead (" +
                        Where(state, device) + ")");
    return plan;
  }
}

std::vector<PlanPtr> CandidatePlans(const PlanState& state, int32_t device, int64_t workspace) {
  std::vector<PlanPtr> plans;
  for (const Algorithm& candidate : state.timing->candidates) {
    try {
      plans.push_back(PlanCache::Get().Named(device, state.spec, candidate, workspace));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kNotFound) throw;
      plans.push_back(nullptr);  // Its times will say so.
    }
  }
  return plans;
}

// Shapes are those of the program and cannot change from run to run: all that can go wrong with
// them goes wrong the first time.
void Prepare(PlanState& state, int32_t device, const ffi::RemainingArgs& args,
             const ffi::RemainingRets& results) {
  PlanState::Slot slot = state.At(device);
  if (slot.plans.empty()) {
    CheckBuffers(state, args, results);
    const int64_t workspace = Workspace(state, results).size_bytes();
    slot.plans = state.timing ? CandidatePlans(state, device, workspace)
                              : std::vector<PlanPtr>{ChoosePlan(state, device, workspace)};
    slot.handles = &HandlePool::ForDevice(device);
    state.Set(device, slot);
  }
  // The run may be captured, which is no time to create one.
  slot.handles->Reserve();
}

// The call's plans with a handle on its stream.
class Runner {
 public:
  Runner(PlanState& state, int32_t device, cudaStream_t stream, const ffi::RemainingRets& results)
      : slot_(Initialized(state.At(device))),
        handle_(slot_.handles->Borrow()),
        workspace_(Workspace(state, results).untyped_data()),
        stream_(stream) {
    CheckCudnn(LoadedLibraries().cudnn.SetStream(handle_.get(), stream), "cudnnSetStream");
  }

  const std::vector<PlanPtr>& plans() const { return slot_.plans; }
  cudaStream_t stream() const { return stream_; }

  void Run(const Plan& plan, const Pointers& pointers) const {
    plan.Execute(handle_.get(), pointers.data(), workspace_);
  }

 private:
  static PlanState::Slot Initialized(PlanState::Slot slot) {
    if (!slot.plans.empty()) return slot;
    throw Error(ErrorCode::kInternal, "XLA executes the call without having initialized it");
  }

  PlanState::Slot slot_;
  HandlePool::Borrowed handle_;
  void* workspace_;
  cudaStream_t stream_;
};

void CheckNotCapturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CheckCuda(LoadedLibraries().cuda.StreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  if (status == cudaStreamCaptureStatusNone) return;
  throw Error(ErrorCode::kFailedPrecondition,
              "timing waits for the device and cannot run while the stream is being captured into "
              "a CUDA graph");
}

// What a timed replay runs of one plan: every set in turn, as often as was asked. Records on the
// runner's stream, which nobody else may use.
CudaGraph Record(const Runner& runner, const Plan& plan, const std::vector<Pointers>& sets,
                 const Timing& timing) {
  if (timing.overlaps) {
    return Capture(runner.stream(), [&] {
      for (int64_t run = 0; run < timing.runs; ++run) {
        for (const Pointers& pointers : sets) runner.Run(plan, pointers);
      }
    });
  }
  std::vector<CudaGraph> nodes;
  for (const Pointers& pointers : sets) {
    nodes.push_back(Capture(runner.stream(), [&] { runner.Run(plan, pointers); }));
  }
  return Sequence(nodes, timing.runs);
}

// Likewise; null for a plan that the device does not run after all.
CudaGraph TryRecord(const Runner& runner, const Plan& plan, const std::vector<Pointers>& sets,
                    const Timing& timing) {
  try {
    return Record(runner, plan, sets, timing);
  } catch (const Error&) {
    return nullptr;
  }
}

// Microseconds of one run, the samples of each candidate together; NaN for one that cannot run.
std::vector<float> TimeCandidates(const PlanState& state, const Runner& runner,
                                  const std::vector<Pointers>& sets, size_t samples,
                                  cudaStream_t stream) {
  std::vector<CudaGraph> graphs;
  std::vector<size_t> timed;  // The candidates that the graphs are of.
  for (size_t i = 0; i < runner.plans().size(); ++i) {
    const PlanPtr& plan = runner.plans()[i];
    if (plan == nullptr) continue;
    CudaGraph graph = TryRecord(runner, *plan, sets, *state.timing);
    if (graph == nullptr) continue;
    graphs.push_back(std::move(graph));
    timed.push_back(i);
  }
  std::vector<float> times(runner.plans().size() * samples,
                           std::numeric_limits<float>::quiet_NaN());
  const auto replays = TimeReplays(stream, graphs, samples);
  for (size_t i = 0; i < timed.size(); ++i) {
    for (size_t sample = 0; sample < samples; ++sample) {
      times[timed[i] * samples + sample] =
          replays[i][sample] / static_cast<float>(state.timing->runs * sets.size());
    }
  }
  return times;
}

void TimeOnStream(PlanState& state, int32_t device, cudaStream_t stream,
                  const ffi::RemainingArgs& args, const ffi::RemainingRets& results) {
  CheckNotCapturing(stream);
  const CudaStream recording = MakeStream();
  const Runner runner(state, device, recording.get(), results);
  std::vector<Pointers> sets;
  for (size_t set = 0; set < state.SetCount(); ++set) {
    sets.push_back(PointersOfSet(state, set, args, results));
  }
  const ffi::AnyBuffer times = Times(state, results);
  const size_t samples = times.element_count() / state.timing->candidates.size();
  const std::vector<float> microseconds = TimeCandidates(state, runner, sets, samples, stream);
  const CudaApi& cuda = LoadedLibraries().cuda;
  CheckCuda(cuda.MemcpyAsync(times.untyped_data(), microseconds.data(), times.size_bytes(),
                             cudaMemcpyHostToDevice, stream),
            "cudaMemcpyAsync");
  // The host's copy goes with this function.
  CheckCuda(cuda.StreamSynchronize(stream), "cudaStreamSynchronize");
}

// ---- Handlers ----

using StateOr = ffi::ErrorOr<std::unique_ptr<PlanState>>;

template <typename Make>
StateOr GuardState(const Make& make) {
  std::unique_ptr<PlanState> state;
  ffi::Error error =
      Guard([] { return "while reading a custom call's attributes"; }, [&] { state = make(); });
  if (error.failure()) return ffi::Unexpected(std::move(error));
  return state;
}

template <Direction direction>
StateOr Instantiate(std::string_view spec, std::string_view algorithm, bool pinned) {
  return GuardState([&] {
    auto state = MakeState(spec);
    if (state->spec.direction != direction) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the custom call is of another direction than its convolution spec '" +
                      std::string(spec) + "'");
    }
    state->pinned = pinned;
    if (!algorithm.empty()) state->algorithm = ParseLegal(algorithm, state->spec);
    return state;
  });
}

// Algorithms are separated by spaces.
std::vector<Algorithm> ParseCandidates(std::string_view texts, const ConvSpec& spec) {
  std::vector<Algorithm> candidates;
  while (!texts.empty()) {
    const size_t end = std::min(texts.find(' '), texts.size());
    candidates.push_back(ParseLegal(texts.substr(0, end), spec));
    texts.remove_prefix(std::min(end + 1, texts.size()));
  }
  if (candidates.empty()) throw Error(ErrorCode::kInvalidArgument, "no candidate to time");
  return candidates;
}

StateOr InstantiateTime(std::string_view spec, std::string_view algorithms, int64_t sets,
                        int64_t runs, bool overlaps) {
  return GuardState([&] {
    constexpr int64_t kMost = 4096;  // A graph of more nodes is a mistake.
    if (sets < 1 || runs < 1 || sets > kMost || runs > kMost || sets * runs > kMost) {
      throw Error(ErrorCode::kInvalidArgument,
                  "timing " + std::to_string(runs) + " runs over " + std::to_string(sets) +
                      " sets, expected at least one of each and a product of at most " +
                      std::to_string(kMost));
    }
    auto state = MakeState(spec);
    state->timing = Timing{ParseCandidates(algorithms, state->spec), sets, runs, overlaps};
    return state;
  });
}

ffi::Error Initialize(int32_t device, PlanState* state, ffi::RemainingArgs args,
                      ffi::RemainingRets results) {
  return Guard([&] { return Where(*state, device); },
               [&] { Prepare(*state, device, args, results); });
}

ffi::Error Execute(cudaStream_t stream, int32_t device, PlanState* state, ffi::RemainingArgs args,
                   ffi::RemainingRets results) {
  return Guard([&] { return Where(*state, device); },
               [&] {
                 const Runner runner(*state, device, stream, results);
                 runner.Run(*runner.plans().front(), PointersOfSet(*state, 0, args, results));
               });
}

ffi::Error ExecuteTime(cudaStream_t stream, int32_t device, PlanState* state,
                       ffi::RemainingArgs args, ffi::RemainingRets results) {
  return Guard([&] { return Where(*state, device); },
               [&] {
                 const DeviceScope scope(device);
                 TimeOnStream(*state, device, stream, args, results);
               });
}

auto BindInstantiate() {
  return ffi::Ffi::BindInstantiate()
      .Attr<std::string_view>("spec")
      .Attr<std::string_view>("algorithm")
      .Attr<bool>("pinned");
}

auto BindInstantiateTime() {
  return ffi::Ffi::BindInstantiate()
      .Attr<std::string_view>("spec")
      .Attr<std::string_view>("algorithms")
      .Attr<int64_t>("sets")
      .Attr<int64_t>("runs")
      .Attr<bool>("overlaps");
}

auto BindInitialize() {
  return ffi::Ffi::BindInitialize()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::State<PlanState>>()
      .RemainingArgs()
      .RemainingRets();
}

auto BindExecute() {
  return ffi::Ffi::BindExecute()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::State<PlanState>>()
      .RemainingArgs()
      .RemainingRets();
}

// XLA records the three convolutions into its command buffers; timing synchronizes and may not be.
XLA_FFI_DEFINE_HANDLER(kInstantiateFprop, Instantiate<Direction::kFprop>, BindInstantiate(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kInstantiateDgrad, Instantiate<Direction::kDgrad>, BindInstantiate(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kInstantiateWgrad, Instantiate<Direction::kWgrad>, BindInstantiate(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize, BindInitialize(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, BindExecute(), {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kInstantiateTime, InstantiateTime, BindInstantiateTime());
XLA_FFI_DEFINE_HANDLER(kInitializeTime, Initialize, BindInitialize());
XLA_FFI_DEFINE_HANDLER(kExecuteTime, ExecuteTime, BindExecute());

void* Pointer(XLA_FFI_Handler* handler) { return reinterpret_cast<void*>(handler); }

}  // namespace

std::vector<FfiTarget> FfiTargets() {
  const auto conv = [](const char* name, XLA_FFI_Handler* instantiate) {
    return FfiTarget{name, Pointer(instantiate), Pointer(kInitialize), Pointer(kExecute)};
  };
  return {conv("jqconv_fprop_v1", kInstantiateFprop),
          conv("jqconv_dgrad_v1", kInstantiateDgrad),
          conv("jqconv_wgrad_v1", kInstantiateWgrad),
          {"jqconv_time_v1", Pointer(kInstantiateTime), Pointer(kInitializeTime),
           Pointer(kExecuteTime)}};
}

FfiStateType FfiState() {
  static ffi::TypeInfo info = ffi::MakeTypeInfo<PlanState>();
  return {"jqconv_plan", &PlanState::id, &info};
}

std::string FfiVersion() {
  return std::to_string(XLA_FFI_API_MAJOR) + "." + std::to_string(XLA_FFI_API_MINOR);
}

}  // namespace jqconv
