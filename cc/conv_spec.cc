#include "conv_spec.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "error.h"

namespace jqconv {
namespace {

using std::string_view_literals::operator""sv;

// ---- Names ----

template <typename Enum>
using Names = std::pair<Enum, std::string_view>;

constexpr Names<Direction> kDirections[] = {
    {Direction::kFprop, "fprop"}, {Direction::kDgrad, "dgrad"}, {Direction::kWgrad, "wgrad"}};

constexpr Names<DataType> kDataTypes[] = {
    {DataType::kInt8, "int8"},       {DataType::kUint8, "uint8"},
    {DataType::kInt32, "int32"},     {DataType::kBFloat16, "bfloat16"},
    {DataType::kFloat16, "float16"}, {DataType::kFloat32, "float32"}};

constexpr Names<Multiplier> kMultipliers[] = {{Multiplier::kScalar, "scalar"},
                                              {Multiplier::kChannel, "channel"}};

constexpr Names<ActivationKind> kActivations[] = {{ActivationKind::kRelu, "relu"},
                                                  {ActivationKind::kRelu6, "relu6"},
                                                  {ActivationKind::kSilu, "silu"},
                                                  {ActivationKind::kGelu, "gelu"},
                                                  {ActivationKind::kHardSwish, "hard_swish"},
                                                  {ActivationKind::kLeakyRelu, "leaky_relu"}};

constexpr Names<Role> kRoles[] = {{Role::kX, "x"},
                                  {Role::kW, "w"},
                                  {Role::kY, "y"},
                                  {Role::kMultiplier, "multiplier"},
                                  {Role::kBias, "bias"},
                                  {Role::kResidual, "residual"},
                                  {Role::kResidualScale, "residual_scale"},
                                  {Role::kOutMultiplier, "out_multiplier"}};

template <typename Enum, size_t N>
std::string_view NameOf(const Names<Enum> (&names)[N], Enum value) {
  for (const auto& [candidate, name] : names) {
    if (candidate == value) return name;
  }
  std::abort();  // Every value has a name.
}

template <typename Enum, size_t N>
std::optional<Enum> ValueOf(const Names<Enum> (&names)[N], std::string_view name) {
  for (const auto& [value, candidate] : names) {
    if (candidate == name) return value;
  }
  return std::nullopt;
}

template <typename Enum, size_t N>
std::string Choices(const Names<Enum> (&names)[N]) {
  std::string text;
  for (const auto& [value, name] : names) {
    if (!text.empty()) text += ", ";
    text += name;
  }
  return text;
}

// ---- Numbers and pieces of text ----

std::string Quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

[[noreturn]] void Invalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

// Decimal, in the one spelling that std::to_string gives.
std::optional<int64_t> ParseInt(std::string_view text) {
  int64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (std::to_string(value) != text) return std::nullopt;
  return value;
}

std::optional<double> ParseDouble(std::string_view text) {
  double value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (!std::isfinite(value)) return std::nullopt;
  return value;
}

// As Python's repr prints it, so that a spec made there comes back the same.
std::string PrintDouble(double value) {
  const double magnitude = std::abs(value);
  const bool fixed = value == 0 || (magnitude >= 1e-4 && magnitude < 1e16);
  char buffer[64];
  const auto result =
      std::to_chars(buffer, buffer + sizeof(buffer), value,
                    fixed ? std::chars_format::fixed : std::chars_format::scientific);
  std::string text(buffer, result.ptr);
  if (fixed && text.find('.') == std::string::npos) text += ".0";
  return text;
}

// Cuts `text` at the first `separator`: the part before it is returned, the part after it remains.
// Without one, all of `text` is returned and `found` is false.
std::string_view CutAt(std::string_view& text, char separator, bool* found = nullptr) {
  const size_t position = text.find(separator);
  if (found != nullptr) *found = position != std::string_view::npos;
  const std::string_view head = text.substr(0, position);
  text = position == std::string_view::npos ? std::string_view() : text.substr(position + 1);
  return head;
}

template <size_t N>
std::string Join(const std::array<int64_t, N>& values) {
  std::string text;
  for (int64_t value : values) {
    if (!text.empty()) text += ',';
    text += std::to_string(value);
  }
  return text;
}

// ---- Parsing a spec ----

// Reads key=value tokens, which have one order.
class SpecReader {
 public:
  explicit SpecReader(std::string_view text) : text_(text), rest_(text) {}

  // The next token's value, where that token has this key.
  std::optional<std::string_view> Optional(std::string_view key) {
    if (rest_.size() <= key.size() || rest_.substr(0, key.size()) != key ||
        rest_[key.size()] != '=') {
      return std::nullopt;
    }
    bool more = false;
    const std::string_view value = CutAt(rest_, ' ', &more).substr(key.size() + 1);
    if (more && rest_.empty()) Fail("ends in a space");
    return value;
  }

  std::string_view Required(std::string_view key) {
    if (auto value = Optional(key)) return *value;
    Fail("expected " + Quoted(std::string(key) + "=...") + " where it has " + Quoted(rest_));
  }

  void End() const {
    if (rest_.empty()) return;
    Fail("does not expect " + Quoted(rest_) +
         " there: keys are known, appear once and keep their order");
  }

  [[noreturn]] void Fail(const std::string& problem) const {
    Invalid("convolution spec " + Quoted(text_) + ": " + problem);
  }

  template <typename Enum, size_t N>
  Enum Choice(std::string_view key, std::string_view value, const Names<Enum> (&names)[N]) const {
    if (auto choice = ValueOf(names, value)) return *choice;
    Fail(std::string(key) + " is " + Quoted(value) + ", expected one of " + Choices(names));
  }

  // At most 2^31 - 1 each, so that arithmetic on a few of them cannot overflow.
  template <size_t N>
  std::array<int64_t, N> Integers(std::string_view key, std::string_view value,
                                  int64_t minimum) const {
    std::array<int64_t, N> result;
    std::string_view rest = value;
    for (size_t i = 0; i < N; ++i) {
      bool more = false;
      const auto number = ParseInt(CutAt(rest, ',', &more));
      if (!number || *number < minimum || *number > std::numeric_limits<int32_t>::max() ||
          more != (i + 1 < N)) {
        Fail(std::string(key) + " is " + Quoted(value) + ", expected " + std::to_string(N) +
             " comma-separated integers of at least " + std::to_string(minimum));
      }
      result[i] = *number;
    }
    return result;
  }

  Tensor RequiredTensor(std::string_view key) {
    std::string_view value = Required(key);
    Tensor tensor;
    tensor.dtype = Choice(key, CutAt(value, ':'), kDataTypes);
    tensor.dims = Integers<4>(key, value, 1);
    return tensor;
  }

  bool Flag(std::string_view key, std::string_view only_value) {
    const auto value = Optional(key);
    if (value && *value != only_value) {
      Fail(std::string(key) + " is " + Quoted(*value) + ", expected " + Quoted(only_value));
    }
    return value.has_value();
  }

  Activation OptionalActivation() {
    constexpr auto key = "activation"sv;
    Activation activation;
    auto value = Optional(key);
    if (!value) return activation;
    const std::string_view whole = *value;
    bool has_parameter = false;
    activation.kind = Choice(key, CutAt(*value, ':', &has_parameter), kActivations);
    if (has_parameter != (activation.kind == ActivationKind::kLeakyRelu)) {
      Fail("activation is " + Quoted(whole) + ": leaky_relu, and nothing else, has a parameter");
    }
    if (has_parameter) {
      const auto slope = ParseDouble(*value);
      // cuDNN takes the larger of v and slope * v: another function where the slope is above 1.
      if (!slope || !(*slope >= 0 && *slope <= 1)) {
        Fail("activation is " + Quoted(whole) + ", expected a slope from 0 to 1");
      }
      activation.slope = *slope;
    }
    return activation;
  }

 private:
  std::string_view text_;
  std::string_view rest_;
};

// ---- Validating a spec ----

bool HasEpilogue(const ConvSpec& spec) {
  return spec.multiplier != Multiplier::kNone || spec.bias || spec.residual ||
         spec.residual_scale || spec.activation.kind != ActivationKind::kNone ||
         spec.out_multiplier;
}

bool IsHalf(DataType dtype) { return dtype == DataType::kBFloat16 || dtype == DataType::kFloat16; }

void CheckElementCount(const SpecReader& reader, std::string_view key, const Tensor& tensor) {
  int64_t count = 1;
  for (int64_t dim : tensor.dims) {
    if (dim > std::numeric_limits<int32_t>::max() / count) {
      reader.Fail(std::string(key) + " has more elements than the 2147483647 that cuDNN indexes");
    }
    count *= dim;
  }
}

// The number of windows along one spatial axis; not positive where the kernel does not fit.
int64_t OutputSize(int64_t size, int64_t before, int64_t after, int64_t kernel, int64_t stride,
                   int64_t dilation) {
  const int64_t room = size + before + after - (dilation * (kernel - 1) + 1);
  return room < 0 ? 0 : room / stride + 1;
}

void CheckShapes(const SpecReader& reader, const ConvSpec& spec) {
  const auto& [x, w] = std::pair(spec.x.dims, spec.w.dims);
  if (w[3] * spec.groups != x[3]) {
    reader.Fail("x has " + std::to_string(x[3]) + " channels, but w has " + std::to_string(w[3]) +
                " in each of " + std::to_string(spec.groups) + " groups");
  }
  if (w[0] % spec.groups != 0) {
    reader.Fail("w has " + std::to_string(w[0]) + " output channels, which " +
                std::to_string(spec.groups) + " groups do not divide");
  }
  const std::array<int64_t, 4> expected = {
      x[0],
      OutputSize(x[1], spec.padding[0], spec.padding[1], w[1], spec.strides[0], spec.dilation[0]),
      OutputSize(x[2], spec.padding[2], spec.padding[3], w[2], spec.strides[1], spec.dilation[1]),
      w[0]};
  if (spec.y.dims != expected) {
    reader.Fail("y has dimensions " + Join(spec.y.dims) + ", but x, w, strides, padding and " +
                "dilation give " + Join(expected));
  }
}

void CheckFprop(const SpecReader& reader, const ConvSpec& spec) {
  const bool int8 = spec.x.dtype == DataType::kInt8;
  if (spec.x.dtype != spec.w.dtype || !(int8 || spec.x.dtype == DataType::kBFloat16)) {
    reader.Fail("x and w of fprop are both int8 or both bfloat16");
  }
  if (spec.y.dtype == DataType::kInt32 ? HasEpilogue(spec) || !int8
                                       : spec.multiplier == Multiplier::kNone) {
    reader.Fail(
        "a y of int32 is the accumulator of int8 operands and has no epilogue; every other y has "
        "a multiplier");
  }
  if (spec.residual && *spec.residual != DataType::kInt8 && !IsHalf(*spec.residual) &&
      *spec.residual != DataType::kFloat32) {
    reader.Fail("a residual is int8, bfloat16, float16 or float32");
  }
  if (spec.residual_scale && !spec.residual) reader.Fail("residual_scale needs a residual");
}

void CheckGradient(const SpecReader& reader, const ConvSpec& spec) {
  if (HasEpilogue(spec)) reader.Fail("dgrad and wgrad have no epilogue");
  const DataType dtype = spec.y.dtype;
  const bool wgrad = spec.direction == Direction::kWgrad;
  if (!IsHalf(dtype) || spec.x.dtype != dtype ||
      (spec.w.dtype != dtype && !(wgrad && spec.w.dtype == DataType::kFloat32))) {
    reader.Fail(
        "x, w and y of dgrad and wgrad are all bfloat16 or all float16; only wgrad's w may be "
        "float32");
  }
}

void Validate(const SpecReader& reader, const ConvSpec& spec) {
  CheckElementCount(reader, "x", spec.x);
  CheckElementCount(reader, "w", spec.w);
  CheckElementCount(reader, "y", spec.y);
  CheckShapes(reader, spec);
  spec.direction == Direction::kFprop ? CheckFprop(reader, spec) : CheckGradient(reader, spec);
}

// ---- Algorithms ----

bool HasKnob(const Algorithm& algorithm, int64_t knob) {
  return std::any_of(algorithm.knobs.begin(), algorithm.knobs.end(),
                     [knob](const auto& choice) { return choice.first == knob; });
}

std::optional<int64_t> TakeInt(std::string_view text, std::string_view prefix) {
  if (text.substr(0, prefix.size()) != prefix) return std::nullopt;
  return ParseInt(text.substr(prefix.size()));
}

[[noreturn]] void InvalidAlgorithm(std::string_view text) {
  Invalid("algorithm " + Quoted(text) +
          " is malformed, expected form/formulation:engE_kK=V...,ws=bytes@cudnn-version, such as "
          "'int8/sbr:eng4_k24=0@91900'");
}

}  // namespace

ConvSpec ParseConvSpec(std::string_view text) {
  SpecReader reader(text);
  ConvSpec spec;
  spec.direction = reader.Choice("direction", reader.Required("direction"), kDirections);
  spec.x = reader.RequiredTensor("x");
  spec.w = reader.RequiredTensor("w");
  spec.y = reader.RequiredTensor("y");
  spec.strides = reader.Integers<2>("strides", reader.Required("strides"), 1);
  spec.padding = reader.Integers<4>("padding", reader.Required("padding"), 0);
  spec.dilation = reader.Integers<2>("dilation", reader.Required("dilation"), 1);
  spec.groups = reader.Integers<1>("groups", reader.Required("groups"), 1)[0];
  if (auto value = reader.Optional("multiplier")) {
    spec.multiplier = reader.Choice("multiplier", *value, kMultipliers);
  }
  spec.bias = reader.Flag("bias", "channel");
  if (auto value = reader.Optional("residual")) {
    spec.residual = reader.Choice("residual", *value, kDataTypes);
  }
  spec.residual_scale = reader.Flag("residual_scale", "scalar");
  spec.activation = reader.OptionalActivation();
  spec.out_multiplier = reader.Flag("out_multiplier", "scalar");
  reader.End();
  Validate(reader, spec);
  return spec;
}

std::string ToString(const ConvSpec& spec) {
  std::string text;
  const auto add = [&text](std::string_view key, std::string_view value) {
    if (!text.empty()) text += ' ';
    text.append(key).append("=").append(value);
  };
  const auto add_tensor = [&add](std::string_view key, const Tensor& tensor) {
    add(key, std::string(NameOf(kDataTypes, tensor.dtype)) + ":" + Join(tensor.dims));
  };
  add("direction", NameOf(kDirections, spec.direction));
  add_tensor("x", spec.x);
  add_tensor("w", spec.w);
  add_tensor("y", spec.y);
  add("strides", Join(spec.strides));
  add("padding", Join(spec.padding));
  add("dilation", Join(spec.dilation));
  add("groups", std::to_string(spec.groups));
  if (spec.multiplier != Multiplier::kNone) {
    add("multiplier", NameOf(kMultipliers, spec.multiplier));
  }
  if (spec.bias) add("bias", "channel");
  if (spec.residual) add("residual", NameOf(kDataTypes, *spec.residual));
  if (spec.residual_scale) add("residual_scale", "scalar");
  if (spec.activation.kind != ActivationKind::kNone) {
    std::string value(NameOf(kActivations, spec.activation.kind));
    if (spec.activation.kind == ActivationKind::kLeakyRelu) {
      value += ":" + PrintDouble(spec.activation.slope);
    }
    add("activation", value);
  }
  if (spec.out_multiplier) add("out_multiplier", "scalar");
  return text;
}

std::string_view Name(Role role) { return NameOf(kRoles, role); }

std::vector<Operand> Operands(const ConvSpec& spec) {
  const auto tensor = [](Role role, const Tensor& tensor) {
    return Operand{role, tensor.dtype, {tensor.dims.begin(), tensor.dims.end()}};
  };
  const auto scalar = [](Role role) { return Operand{role, DataType::kFloat32, {}}; };
  const auto channel = [&spec](Role role) {
    return Operand{role, DataType::kFloat32, {spec.w.dims[0]}};
  };
  const Operand x = tensor(Role::kX, spec.x);
  const Operand w = tensor(Role::kW, spec.w);
  const Operand y = tensor(Role::kY, spec.y);
  if (spec.direction == Direction::kDgrad) return {y, w, x};
  if (spec.direction == Direction::kWgrad) return {x, y, w};

  std::vector<Operand> operands = {x, w};
  if (spec.multiplier == Multiplier::kScalar) operands.push_back(scalar(Role::kMultiplier));
  if (spec.multiplier == Multiplier::kChannel) operands.push_back(channel(Role::kMultiplier));
  if (spec.bias) operands.push_back(channel(Role::kBias));
  if (spec.residual) operands.push_back(tensor(Role::kResidual, {*spec.residual, spec.y.dims}));
  if (spec.residual_scale) operands.push_back(scalar(Role::kResidualScale));
  if (spec.out_multiplier) operands.push_back(scalar(Role::kOutMultiplier));
  operands.push_back(y);
  return operands;
}

Algorithm ParseAlgorithm(std::string_view text) {
  Algorithm algorithm;
  std::string_view rest = text;
  bool has_form = false, has_formulation = false, has_version = false, has_workspace = false;
  algorithm.form = CutAt(rest, '/', &has_form);
  algorithm.formulation = CutAt(rest, ':', &has_formulation);
  std::string_view plan = CutAt(rest, '@', &has_version);
  const auto version = ParseInt(rest);
  if (!has_form || !has_formulation || !has_version || algorithm.form.empty() ||
      algorithm.formulation.empty() || !version || *version <= 0) {
    InvalidAlgorithm(text);
  }
  algorithm.cudnn_version = *version;
  const std::string_view tag = CutAt(plan, ',', &has_workspace);
  if (has_workspace) {
    const auto workspace = TakeInt(plan, "ws=");
    if (!workspace || *workspace <= 0) InvalidAlgorithm(text);
    algorithm.workspace = *workspace;
  }
  ParsePlanTag(tag, algorithm);
  return algorithm;
}

void ParsePlanTag(std::string_view tag, Algorithm& algorithm) {
  std::string_view rest = tag;
  bool more = false;
  const auto engine = TakeInt(CutAt(rest, '_', &more), "eng");
  bool good = engine && *engine >= 0;
  algorithm.engine = engine.value_or(0);
  algorithm.knobs.clear();
  while (good && more) {
    std::string_view value = CutAt(rest, '_', &more);
    const auto knob = TakeInt(CutAt(value, '='), "k");
    const auto choice = ParseInt(value);
    good = knob && *knob >= 0 && choice && !HasKnob(algorithm, *knob);
    if (good) algorithm.knobs.emplace_back(*knob, *choice);
  }
  if (!good) {
    Invalid("plan tag " + Quoted(tag) + " is malformed, expected one such as 'eng4_k24=0_k5=1'");
  }
}

std::string PlanTag(const Algorithm& algorithm) {
  std::string tag = "eng" + std::to_string(algorithm.engine);
  for (const auto& [knob, value] : algorithm.knobs) {
    tag += "_k" + std::to_string(knob) + "=" + std::to_string(value);
  }
  return tag;
}

std::string PlanName(const Algorithm& algorithm) {
  return algorithm.form + "/" + algorithm.formulation + ":" + PlanTag(algorithm);
}

std::string ToString(const Algorithm& algorithm) {
  std::string text = PlanName(algorithm);
  if (algorithm.workspace > 0) text += ",ws=" + std::to_string(algorithm.workspace);
  return text + "@" + std::to_string(algorithm.cudnn_version);
}

std::string_view Form(const ConvSpec& spec) {
  // In both gradients y is an operand.
  switch (spec.direction == Direction::kFprop ? spec.x.dtype : spec.y.dtype) {
    case DataType::kInt8:
      return "int8";
    case DataType::kFloat16:
      return "fp16";
    default:
      return "bf16";
  }
}

std::vector<std::string> Formulations(const ConvSpec& spec) {
  const auto letters = [&spec](std::string_view sums) {
    std::string text;
    if (spec.multiplier != Multiplier::kNone) text += 's';
    text += sums;
    if (spec.activation.kind != ActivationKind::kNone) text += 'r';
    if (spec.out_multiplier) text += 'o';
    return text.empty() ? "c" : text;
  };
  if (spec.bias && spec.residual) return {letters("bz"), letters("zb")};
  return {letters(spec.bias ? "b" : spec.residual ? "z" : "")};
}

void CheckLegal(const Algorithm& algorithm, const ConvSpec& spec) {
  const std::vector<std::string> formulations = Formulations(spec);
  const bool known = std::find(formulations.begin(), formulations.end(), algorithm.formulation) !=
                     formulations.end();
  if (algorithm.form == Form(spec) && known) return;
  Invalid("algorithm " + Quoted(ToString(algorithm)) + " does not fit convolution spec " +
          Quoted(ToString(spec)) + ", which is built as " +
          Quoted(std::string(Form(spec)) + "/" + formulations.front()));
}

}  // namespace jqconv
