#include "plan_cache.h"

#include "cudnn_handle.h"
#include "error.h"
#include "libraries.h"
#include "warnings.h"

namespace jqconv {
namespace {

std::string Key(int device, const ConvSpec& spec, const std::string& choice) {
  return std::to_string(device) + "|" + std::to_string(LoadedLibraries().cudnn_version) + "|" +
         ToString(spec) + "|" + choice;
}

void CheckFits(const Plan& plan, int64_t workspace_limit) {
  const Algorithm& algorithm = plan.algorithm();
  if (algorithm.workspace <= workspace_limit) return;
  throw Error(ErrorCode::kNotFound, "plan '" + ToString(algorithm) + "' needs a workspace of " +
                                        std::to_string(algorithm.workspace) +
                                        " bytes, more than the " + std::to_string(workspace_limit) +
                                        " that there are");
}

}  // namespace

PlanCache& PlanCache::Get() {
  // Never destroyed: when the process ends, CUDA may be gone before this module.
  static auto& cache = *new PlanCache;
  return cache;
}

PlanPtr PlanCache::Named(int device, const ConvSpec& spec, const Algorithm& algorithm,
                         int64_t workspace_limit) {
  const std::string key = Key(device, spec, PlanName(algorithm));
  PlanPtr plan = FindOrBuild(device, key, [&](cudnnHandle_t handle) {
    PlanPtr loaded = Load(device, handle, spec, algorithm);
    return loaded != nullptr ? loaded : BuildPlan(handle, spec, algorithm);
  });
  CheckFits(*plan, workspace_limit);
  return plan;
}

PlanPtr PlanCache::Chosen(int device, const ConvSpec& spec, int64_t workspace_limit) {
  const PlanStore store = Store();
  const auto choice = store.choice ? store.choice(device, ToString(spec)) : PlanStore::Choice();
  if (choice.algorithm) {
    try {
      const Algorithm algorithm = ParseAlgorithm(*choice.algorithm);
      CheckLegal(algorithm, spec);
      return Named(device, spec, algorithm, workspace_limit);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kNotFound && error.code() != ErrorCode::kInvalidArgument) {
        throw;
      }
      // It was chosen for more workspace than this program reserved, or by another version.
    }
  }
  return Heuristic(device, spec, workspace_limit, choice.deterministic);
}

PlanPtr PlanCache::Heuristic(int device, const ConvSpec& spec, int64_t workspace_limit,
                             bool deterministic) {
  const std::string choice = std::string(deterministic ? "deterministic " : "") +
                             "heuristic within " + std::to_string(workspace_limit);
  PlanPtr plan = FindOrBuild(device, Key(device, spec, choice), [&](cudnnHandle_t handle) {
    return BuildHeuristicPlan(handle, spec, workspace_limit, deterministic);
  });
  CheckFits(*plan, workspace_limit);
  // Whoever asks for it by name from now on finds it too.
  const std::string name = Key(device, spec, PlanName(plan->algorithm()));
  std::lock_guard<std::mutex> lock(mutex_);
  InsertLocked(name, plan);
  return plan;
}

PlanPtr PlanCache::FindOrBuild(int device, const std::string& key, const Builder& build) {
  std::promise<PlanPtr> promise;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (PlanPtr plan = FindLocked(key)) {
      ++hits_;
      return plan;
    }
    const auto other = under_construction_.find(key);
    if (other != under_construction_.end()) {
      ++hits_;
      const auto future = other->second;
      lock.unlock();
      return future.get();  // Throws what the builder threw.
    }
    ++misses_;
    under_construction_.emplace(key, promise.get_future().share());
  }
  try {
    const DeviceScope scope(device);
    PlanPtr plan = build(HandlePool::ForDevice(device).Borrow().get());
    std::lock_guard<std::mutex> lock(mutex_);
    InsertLocked(key, plan);
    under_construction_.erase(key);
    promise.set_value(plan);
    return plan;
  } catch (...) {
    // Failures are not kept: another attempt may find more memory, or a repaired library.
    std::lock_guard<std::mutex> lock(mutex_);
    under_construction_.erase(key);
    promise.set_exception(std::current_exception());
    throw;
  }
}

// Null where the store has none that this device can run.
PlanPtr PlanCache::Load(int device, cudnnHandle_t handle, const ConvSpec& spec,
                        const Algorithm& algorithm) {
  const PlanStore store = Store();
  const auto serialized =
      store.plan ? store.plan(device, ToString(spec), ToString(algorithm)) : std::nullopt;
  if (!serialized) return nullptr;
  try {
    return LoadPlan(handle, spec, algorithm, *serialized);
  } catch (const Error& error) {
    Warnings::Get().Add("the stored plan of '" + ToString(algorithm) + "' for convolution spec '" +
                        ToString(spec) + "' cannot be loaded and is built anew: " + error.what());
    return nullptr;
  }
}

void PlanCache::SetStore(PlanStore store) {
  std::lock_guard<std::mutex> lock(mutex_);
  store_ = std::move(store);
}

PlanStore PlanCache::Store() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return store_;
}

PlanPtr PlanCache::FindLocked(const std::string& key) {
  const auto found = index_.find(key);
  if (found == index_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->second;
}

void PlanCache::InsertLocked(const std::string& key, PlanPtr plan) {
  if (FindLocked(key) != nullptr) return;
  entries_.emplace_front(key, std::move(plan));
  index_[key] = entries_.begin();
  EvictLocked();
}

void PlanCache::EvictLocked() {
  while (entries_.size() > capacity_ + reserved_) {
    index_.erase(entries_.back().first);
    entries_.pop_back();
    ++evictions_;
  }
}

PlanCache::Info PlanCache::GetInfo() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {entries_.size(), capacity_, hits_, misses_, evictions_};
}

void PlanCache::Forget(int device, const ConvSpec& spec, const Algorithm& algorithm) {
  const std::string key = Key(device, spec, PlanName(algorithm));
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = index_.find(key);
  if (found == index_.end()) return;
  entries_.erase(found->second);
  index_.erase(found);
}

void PlanCache::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  index_.clear();
  entries_.clear();
}

void PlanCache::Resize(size_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  capacity_ = capacity;
  EvictLocked();
}

void PlanCache::Reserve(int64_t more) {
  std::lock_guard<std::mutex> lock(mutex_);
  reserved_ += more;
  EvictLocked();
}

}  // namespace jqconv
