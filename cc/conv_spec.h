// A plain description of one fused convolution, and of the algorithm that runs it, with the text
// forms that cross the border from Python. Knows neither XLA nor cuDNN.
//
//   direction=fprop x=int8:64,28,28,128 w=int8:128,3,3,128 y=int8:64,28,28,128 strides=1,1
//   padding=1,1,1,1 dilation=1,1 groups=1 multiplier=channel bias=channel activation=relu
//
//   int8/sbr:eng4_k24=0,ws=4096@91900
#ifndef JQCONV_CONV_SPEC_H_
#define JQCONV_CONV_SPEC_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace jqconv {

enum class Direction { kFprop, kDgrad, kWgrad };
enum class DataType { kInt8, kUint8, kInt32, kBFloat16, kFloat16, kFloat32 };
enum class Multiplier { kNone, kScalar, kChannel };
enum class ActivationKind { kNone, kRelu, kRelu6, kLeakyRelu, kSilu, kGelu, kHardSwish };

struct Tensor {
  DataType dtype = DataType::kInt8;
  std::array<int64_t, 4> dims = {};
};

struct Activation {
  ActivationKind kind = ActivationKind::kNone;
  double slope = 0.0;  // Of kLeakyRelu, below zero.
};

// In float32, v = acc * multiplier; v += bias; v += residual * residual_scale; v = activation(v);
// v *= out_multiplier; then v is converted to y's type (rounding half to even and saturating where
// that is an integer). With no multiplier, y is the int32 accumulator.
struct ConvSpec {
  Direction direction = Direction::kFprop;
  Tensor x;  // N, H, W, C; the result of dgrad.
  Tensor w;  // K, R, S, C / groups; the result of wgrad.
  Tensor y;  // N, P, Q, K; the result of fprop.
  std::array<int64_t, 2> strides = {};
  std::array<int64_t, 4> padding = {};  // Top, bottom, left, right.
  std::array<int64_t, 2> dilation = {};
  int64_t groups = 1;
  Multiplier multiplier = Multiplier::kNone;
  bool bias = false;
  std::optional<DataType> residual;  // Of y's shape.
  bool residual_scale = false;
  Activation activation;
  bool out_multiplier = false;
};

// What a buffer means to a convolution.
enum class Role {
  kX,
  kW,
  kY,
  kMultiplier,
  kBias,
  kResidual,
  kResidualScale,
  kOutMultiplier,
};
constexpr size_t kMaxOperands = 8;

struct Operand {
  Role role;
  DataType dtype;
  std::vector<int64_t> dims;  // Of rank 4 (channels last), 1 (K) or 0.
};

// How one convolution is run: the form it is presented in, the pointwise nodes of its epilogue, and
// cuDNN's engine with every knob.
struct Algorithm {
  std::string form;         // "int8", "bf16" or "fp16".
  std::string formulation;  // Letters of the nodes in order, such as "sbr"; "c" with none.
  int64_t engine = 0;
  std::vector<std::pair<int64_t, int64_t>> knobs;  // cuDNN's number of the knob, value.
  int64_t workspace = 0;                           // Bytes.
  int64_t cudnn_version = 0;                       // The cuDNN that the engine was chosen with.
};

// Parsing throws Error(kInvalidArgument) for text that is malformed or contradicts itself; a spec
// that parses has positive dimensions of fewer than 2^31 elements, and shapes that agree.
ConvSpec ParseConvSpec(std::string_view text);
Algorithm ParseAlgorithm(std::string_view text);

std::string ToString(const ConvSpec& spec);
std::string ToString(const Algorithm& algorithm);

// Sets engine and knobs from cuDNN frontend's name of a plan, such as "eng4_k24=0_k5=1".
void ParsePlanTag(std::string_view tag, Algorithm& algorithm);

// The inverse of ParsePlanTag.
std::string PlanTag(const Algorithm& algorithm);

// The part of an algorithm's text that says what runs: neither workspace nor version.
std::string PlanName(const Algorithm& algorithm);

std::string_view Name(Role role);

// The operands in the handlers' order, then the result.
std::vector<Operand> Operands(const ConvSpec& spec);

// The form that `spec` is built in, and the formulations: the orders of its epilogue's steps that
// mean the same. The first one is that of ConvSpec's formula.
std::string_view Form(const ConvSpec& spec);
std::vector<std::string> Formulations(const ConvSpec& spec);

// Throws Error(kInvalidArgument) unless `algorithm` has `spec`'s form and a formulation of it.
void CheckLegal(const Algorithm& algorithm, const ConvSpec& spec);

}  // namespace jqconv

#endif  // JQCONV_CONV_SPEC_H_
