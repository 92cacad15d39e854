// What a user should hear of although nothing failed. Python fetches and raises it as warnings.
#ifndef JQCONV_WARNINGS_H_
#define JQCONV_WARNINGS_H_

#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace jqconv {

class Warnings {
 public:
  static Warnings& Get() {
    static auto& warnings = *new Warnings;  // Never destroyed: threads of XLA's outlive us.
    return warnings;
  }

  void Add(std::string text) {
    std::lock_guard<std::mutex> lock(mutex_);
    texts_.push_back(std::move(text));
  }

  // Those since the last call.
  std::vector<std::string> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(texts_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> texts_;
};

}  // namespace jqconv

#endif  // JQCONV_WARNINGS_H_
