// The XLA FFI handlers. What XLA and Python need of them leaves here as plain pointers.
#ifndef JQCONV_CONV_FFI_H_
#define JQCONV_CONV_FFI_H_

#include <string>
#include <vector>

namespace jqconv {

// One custom call target and the function of each of its stages.
struct FfiTarget {
  const char* name;
  void* instantiate;
  void* initialize;
  void* execute;
};
std::vector<FfiTarget> FfiTargets();

// The type of the handlers' state, which XLA has to know before it sees a target.
struct FfiStateType {
  const char* name;
  void* type_id;
  void* type_info;
};
FfiStateType FfiState();

// The version of XLA's FFI that the handlers are compiled for, such as "0.3".
std::string FfiVersion();

}  // namespace jqconv

#endif  // JQCONV_CONV_FFI_H_
