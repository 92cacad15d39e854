// The Python module jqconv._ext: what jqconv registers with JAX, and the controls of the plan
// cache.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "conv_ffi.h"
#include "conv_graph.h"
#include "conv_spec.h"
#include "error.h"
#include "libraries.h"
#include "plan_cache.h"

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
                 int64_t workspace_limit) {
  PlanCache& cache = PlanCache::Get();
  if (algorithm_text.empty()) return cache.Heuristic(device, spec, workspace_limit);
  const Algorithm algorithm = ParseAlgorithm(algorithm_text);
  CheckLegal(algorithm, spec);
  return cache.Named(device, spec, algorithm, workspace_limit);
}

// The full text of the algorithm that runs the spec, and nothing; or nothing, and why there is
// none.
std::pair<std::string, std::string> Resolve(const std::string& spec, const std::string& algorithm,
                                            int device, int64_t workspace_limit) {
  try {
    const PlanPtr plan = FindPlan(ParseConvSpec(spec), algorithm, device, workspace_limit);
    return {ToString(plan->algorithm()), ""};
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) throw;
    return {"", error.what()};
  }
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
        nb::arg("workspace_limit"), nb::call_guard<nb::gil_scoped_release>());
  m.def("cache_info", &CacheInfo);
  m.def("cache_clear", [] { PlanCache::Get().Clear(); }, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "cache_resize", [](size_t capacity) { PlanCache::Get().Resize(capacity); },
      nb::arg("capacity"), nb::call_guard<nb::gil_scoped_release>());
  m.def("take_warnings", &TakeWarnings);
}

}  // namespace jqconv
