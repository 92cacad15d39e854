// The Python module jqconv._ext: what jqconv registers with JAX, and the controls of the plan
// cache.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "conv_ffi.h"
#include "conv_graph.h"
#include "conv_spec.h"
#include "cudnn_handle.h"
#include "error.h"
#include "libraries.h"
#include "plan_cache.h"
#include "warnings.h"

namespace nb = nanobind;

namespace jqconv {
namespace {

// What jax.ffi.register_ffi_type and register_ffi_target take, by name.
nb::dict Registrations() {
  const FfiStateType state = FfiState();
  nb::dict type, types, targets, registrations;
  type["type_id"] = nb::capsule(state.type_id);
  type["type_info"] = nb::capsule(state.type_info);
  types[state.name] = type;
  for (const FfiTarget& target : FfiTargets()) {
    nb::dict stages;
    stages["instantiate"] = nb::capsule(target.instantiate);
    stages["initialize"] = nb::capsule(target.initialize);
    stages["execute"] = nb::capsule(target.execute);
    targets[target.name] = stages;
  }
  registrations["types"] = types;
  registrations["targets"] = targets;
  return registrations;
}

nb::dict Versions() {
  const Libraries& libraries = LoadedLibraries();
  nb::dict versions;
  versions["cudnn"] = libraries.cudnn_version;
  versions["cudnn_path"] = libraries.cudnn_path;
  versions["cudart_path"] = libraries.cuda_path;
  versions["frontend"] = FrontendVersion();
  versions["ffi"] = FfiVersion();
  return versions;
}

PlanPtr FindPlan(const ConvSpec& spec, const std::string& algorithm_text, int device,
                 int64_t workspace_limit, bool deterministic) {
  PlanCache& cache = PlanCache::Get();
  if (algorithm_text.empty()) return cache.Heuristic(device, spec, workspace_limit, deterministic);
  const Algorithm algorithm = ParseAlgorithm(algorithm_text);
  CheckLegal(algorithm, spec);
  return cache.Named(device, spec, algorithm, workspace_limit);
}

// The full text of the algorithm that runs the spec, and nothing; or nothing, and why there is
// none.
std::pair<std::string, std::string> Resolve(const std::string& spec, const std::string& algorithm,
                                            int device, int64_t workspace_limit,
                                            bool deterministic) {
  try {
    const PlanPtr plan =
        FindPlan(ParseConvSpec(spec), algorithm, device, workspace_limit, deterministic);
    return {ToString(plan->algorithm()), ""};
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) throw;
    return {"", error.what()};
  }
}

std::vector<std::string> Texts(const std::vector<Algorithm>& algorithms) {
  std::vector<std::string> texts;
  for (const Algorithm& algorithm : algorithms) texts.push_back(ToString(algorithm));
  return texts;
}

// The algorithms that cuDNN proposes; none where it refuses the convolution itself.
std::vector<std::string> Propose(const std::string& spec_text, int device) {
  const ConvSpec spec = ParseConvSpec(spec_text);
  const DeviceScope scope(device);
  return Texts(ProposeAlgorithms(HandlePool::ForDevice(device).Borrow().get(), spec));
}

std::vector<std::string> Vary(const std::string& spec_text, const std::string& algorithm_text,
                              int device) {
  const ConvSpec spec = ParseConvSpec(spec_text);
  const Algorithm algorithm = ParseAlgorithm(algorithm_text);
  CheckLegal(algorithm, spec);
  const DeviceScope scope(device);
  return Texts(VaryKnobs(HandlePool::ForDevice(device).Borrow().get(), spec, algorithm));
}

nb::bytes Serialize(const std::string& spec, const std::string& algorithm, int device) {
  std::vector<uint8_t> serialized;
  {
    const nb::gil_scoped_release release;
    const Algorithm parsed = ParseAlgorithm(algorithm);
    serialized =
        PlanCache::Get().Named(device, ParseConvSpec(spec), parsed, parsed.workspace)->Serialize();
  }
  return nb::bytes(serialized.data(), serialized.size());
}

// Calls into Python from whatever thread XLA initializes a call on. What goes wrong there must not
// stop the run: it is a warning.
template <typename Ask>
auto AskPython(const Ask& ask) -> decltype(ask()) {
  if (!nb::is_alive()) return {};
  const nb::gil_scoped_acquire acquire;
  try {
    return ask();
  } catch (const std::exception& error) {
    Warnings::Get().Add(std::string("jqconv's store failed: ") + error.what());
    return {};
  }
}

// `choice(device, spec)` returns what is stored, or None, and whether another must be
// deterministic; `plan(device, spec, algorithm)` what is stored, or None.
void SetStore(nb::object choice, nb::object plan) {
  // Never destroyed: threads of XLA's may ask when the interpreter is on its way out.
  const auto& ask = *new std::pair<nb::object, nb::object>(std::move(choice), std::move(plan));
  using Bytes = std::optional<std::vector<uint8_t>>;
  PlanStore store;
  store.choice = [&ask](int device, const std::string& spec) {
    return AskPython([&] {
      using Pair = std::pair<std::optional<std::string>, bool>;
      auto [algorithm, deterministic] = nb::cast<Pair>(ask.first(device, spec));
      return PlanStore::Choice{std::move(algorithm), deterministic};
    });
  };
  store.plan = [&ask](int device, const std::string& spec, const std::string& algorithm) {
    return AskPython([&]() -> Bytes {
      const nb::object found = ask.second(device, spec, algorithm);
      if (found.is_none()) return std::nullopt;
      const auto bytes = nb::cast<nb::bytes>(found);
      const auto* data = static_cast<const uint8_t*>(bytes.data());
      return std::vector<uint8_t>(data, data + bytes.size());
    });
  };
  PlanCache::Get().SetStore(std::move(store));
}

nb::dict CacheInfo() {
  const PlanCache::Info info = PlanCache::Get().GetInfo();
  nb::dict result;
  result["entries"] = info.entries;
  result["capacity"] = info.capacity;
  result["hits"] = info.hits;
  result["misses"] = info.misses;
  result["evictions"] = info.evictions;
  return result;
}

// Other errors than this arrive as RuntimeError by themselves.
void TranslateInvalidArgument(const std::exception_ptr& exception, void*) {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) throw;
    PyErr_SetString(PyExc_ValueError, error.what());
  }
}

}  // namespace

NB_MODULE(_ext, m) {
  nb::set_leak_warnings(false);  // They would print when the interpreter ends.
  nb::register_exception_translator(TranslateInvalidArgument);
  m.def("registrations", &Registrations);
  m.def("configure", &ConfigureLibraries, nb::arg("cudnn"), nb::arg("cudart"));
  m.def("versions", &Versions);
  m.def("resolve", &Resolve, nb::arg("spec"), nb::arg("algorithm"), nb::arg("device"),
        nb::arg("workspace_limit"), nb::arg("deterministic"),
        nb::call_guard<nb::gil_scoped_release>());
  m.def("propose", &Propose, nb::arg("spec"), nb::arg("device"),
        nb::call_guard<nb::gil_scoped_release>());
  m.def("vary", &Vary, nb::arg("spec"), nb::arg("algorithm"), nb::arg("device"),
        nb::call_guard<nb::gil_scoped_release>());
  m.def("serialize", &Serialize, nb::arg("spec"), nb::arg("algorithm"), nb::arg("device"));
  m.def("set_store", &SetStore, nb::arg("choice"), nb::arg("plan"));
  m.def("clear_store", [] { PlanCache::Get().SetStore({}); });
  m.def(
      "forget",
      [](const std::string& spec, const std::string& algorithm, int device) {
        PlanCache::Get().Forget(device, ParseConvSpec(spec), ParseAlgorithm(algorithm));
      },
      nb::arg("spec"), nb::arg("algorithm"), nb::arg("device"));
  m.def("cache_info", &CacheInfo);
  m.def("cache_clear", [] { PlanCache::Get().Clear(); }, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "cache_resize", [](size_t capacity) { PlanCache::Get().Resize(capacity); },
      nb::arg("capacity"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "cache_reserve", [](int64_t more) { PlanCache::Get().Reserve(more); }, nb::arg("more"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def("take_warnings", [] { return Warnings::Get().Take(); });
}

}  // namespace jqconv
