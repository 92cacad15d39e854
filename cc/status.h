// From what the native side throws to what XLA expects.
#ifndef JQCONV_STATUS_H_
#define JQCONV_STATUS_H_

#include <exception>
#include <string>
#include <utility>

#include "error.h"
#include "xla/ffi/api/ffi.h"

namespace jqconv {

inline xla::ffi::ErrorCode FfiCode(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return xla::ffi::ErrorCode::kInvalidArgument;
    case ErrorCode::kNotFound:
      return xla::ffi::ErrorCode::kNotFound;
    case ErrorCode::kFailedPrecondition:
      return xla::ffi::ErrorCode::kFailedPrecondition;
    case ErrorCode::kUnavailable:
      return xla::ffi::ErrorCode::kUnavailable;
    case ErrorCode::kInternal:
      return xla::ffi::ErrorCode::kInternal;
  }
  return xla::ffi::ErrorCode::kUnknown;
}

// Runs the body of a handler, out of which nothing may be thrown. `where` gives the words that tell
// the user which call it was; it is asked only after a failure.
template <typename Body, typename Where>
xla::ffi::Error Guard(const Where& where, const Body& body) noexcept {
  const auto failure = [&where](xla::ffi::ErrorCode code, const char* what) {
    return xla::ffi::Error(code, std::string("jqconv: ") + what + " (" + where() + ")");
  };
  try {
    body();
    return xla::ffi::Error::Success();
  } catch (const Error& error) {
    return failure(FfiCode(error.code()), error.what());
  } catch (const std::exception& error) {
    return failure(xla::ffi::ErrorCode::kInternal, error.what());
  } catch (...) {
    return failure(xla::ffi::ErrorCode::kInternal, "unknown failure");
  }
}

}  // namespace jqconv

#endif  // JQCONV_STATUS_H_
