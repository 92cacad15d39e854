// Built plans, by device, cuDNN version, convolution and algorithm. Building takes seconds, so
// every plan is built once: threads that want one under construction wait for it, while others
// build. What an earlier process stored is loaded instead, in milliseconds.
#ifndef JQCONV_PLAN_CACHE_H_
#define JQCONV_PLAN_CACHE_H_

#include <cstdint>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "conv_graph.h"
#include "conv_spec.h"

namespace jqconv {

using PlanPtr = std::shared_ptr<const Plan>;

// What was kept from earlier processes. Its functions are called from any thread and must not
// throw.
struct PlanStore {
  // The algorithm chosen for a convolution, as text, and whether another one must return the same
  // bits every time.
  struct Choice {
    std::optional<std::string> algorithm;
    bool deterministic = false;
  };
  std::function<Choice(int device, const std::string& spec)> choice;
  // A plan's serialized form.
  std::function<std::optional<std::vector<uint8_t>>(int device, const std::string& spec,
                                                    const std::string& algorithm)>
      plan;
};

class PlanCache {
 public:
  struct Info {
    size_t entries;
    size_t capacity;
    int64_t hits;
    int64_t misses;  // Builds attempted.
    int64_t evictions;
  };

  // The process's cache.
  static PlanCache& Get();

  // The plan that `algorithm` names, the one chosen earlier for `spec` or else the heuristic's, and
  // the heuristic's. All throw what building throws, and Error(kNotFound) for a plan that needs
  // more workspace than the limit.
  PlanPtr Named(int device, const ConvSpec& spec, const Algorithm& algorithm,
                int64_t workspace_limit);
  PlanPtr Chosen(int device, const ConvSpec& spec, int64_t workspace_limit);
  PlanPtr Heuristic(int device, const ConvSpec& spec, int64_t workspace_limit, bool deterministic);

  void SetStore(PlanStore store);

  Info GetInfo() const;

  // All only forget: whoever holds a plan keeps it.
  void Forget(int device, const ConvSpec& spec, const Algorithm& algorithm);
  void Clear();
  void Resize(size_t capacity);

  // Makes room for `more` plans beyond the capacity, which a search is about to compare; the same
  // number, negative, ends it.
  void Reserve(int64_t more);

 private:
  using Builder = std::function<PlanPtr(cudnnHandle_t)>;
  using Entries = std::list<std::pair<std::string, PlanPtr>>;

  PlanPtr FindOrBuild(int device, const std::string& key, const Builder& build);
  PlanPtr Load(int device, cudnnHandle_t handle, const ConvSpec& spec, const Algorithm& algorithm);
  PlanStore Store() const;
  PlanPtr FindLocked(const std::string& key);
  void InsertLocked(const std::string& key, PlanPtr plan);
  void EvictLocked();

  mutable std::mutex mutex_;
  PlanStore store_;
  size_t capacity_ = 512;
  size_t reserved_ = 0;
  Entries entries_;  // The least recently used is last.
  std::unordered_map<std::string, Entries::iterator> index_;
  std::unordered_map<std::string, std::shared_future<PlanPtr>> under_construction_;
  int64_t hits_ = 0;
  int64_t misses_ = 0;
  int64_t evictions_ = 0;
};

}  // namespace jqconv

#endif  // JQCONV_PLAN_CACHE_H_
