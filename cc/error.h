// What the native side throws. Nothing crosses a border as an exception: status.h turns these into
// ffi::Error for XLA, module.cc into Python exceptions.
#ifndef JQCONV_ERROR_H_
#define JQCONV_ERROR_H_

#include <stdexcept>
#include <string>

namespace jqconv {

enum class ErrorCode {
  kInvalidArgument,     // The caller's text or buffers are wrong.
  kNotFound,            // cuDNN has no plan for what was asked.
  kFailedPrecondition,  // Right in itself, but not now.
  kUnavailable,         // A library or the device cannot be used.
  kInternal,            // CUDA or cuDNN failed.
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace jqconv

#endif  // JQCONV_ERROR_H_
