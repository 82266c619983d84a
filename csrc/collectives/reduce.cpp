#include "collectives/reduce.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/error.h"

namespace onesided {
namespace {

constexpr std::array<const char*, 12> kElements{"float32", "float64", "float16", "bfloat16", "int8",  "uint8",
                                                "int16",   "uint16",  "int32",   "uint32",   "int64", "uint64"};
constexpr std::array<std::size_t, 12> kSizes{4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8};
constexpr std::array<const char*, 7> kReductions{"sum", "product", "min", "max", "band", "bor", "bxor"};
static_assert(kElements.size() == static_cast<unsigned>(Element::UInt64) + 1);
static_assert(kReductions.size() == static_cast<unsigned>(Reduction::BitXor) + 1);

#define ALWAYS_INLINE [[gnu::always_inline]] inline

// ---- 16-bit floats, without branches, so that loops over them become vector code --------------------------------------

struct Half {
  std::uint16_t bits;

  ALWAYS_INLINE static float widen(Half half) {
    const std::uint32_t sign = (half.bits & 0x8000u) << 16, moved = (half.bits & 0x7fffu) << 13;
    // Scaling puts the exponent right, of subnormal numbers too; infinities and NaN have all bits of the exponent.
    const std::uint32_t scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(moved) * 0x1p112f);
    const std::uint32_t special = moved | 0x7f800000u;
    return std::bit_cast<float>(sign | ((half.bits & 0x7c00u) == 0x7c00u ? special : scaled));
  }
  ALWAYS_INLINE static Half narrow(float value) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value), size = bits & 0x7fffffffu;
    const std::uint32_t normal = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
    // Next to 0.5 the last bit of a float stands for 2^-24, as that of a subnormal half does: the addition rounds.
    const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(size) + 0.5f) - 0x3f000000u;
    const std::uint32_t large = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const std::uint32_t held = size >= 0x47800000u ? large : size >= 0x38800000u ? normal : subnormal;
    return {static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | held)};
  }
};

struct Brain {
  std::uint16_t bits;

  ALWAYS_INLINE static float widen(Brain brain) { return std::bit_cast<float>(std::uint32_t{brain.bits} << 16); }
  ALWAYS_INLINE static Brain narrow(float value) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    // Rounding could carry a NaN over to infinity or zero.
    const std::uint32_t nan = (bits >> 16) | 0x40u;
    return {static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
  }
};

template <class T>
constexpr bool kNarrow = std::is_same_v<T, Half> || std::is_same_v<T, Brain>;

// ---- The operations on one pair -----------------------------------------------------------------------------------------

template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

template <Reduction kReduction, class T>
ALWAYS_INLINE T apply(T a, T b) {
  if constexpr (kNarrow<T>) {
    return T::narrow(apply<kReduction>(T::widen(a), T::widen(b)));
  } else if constexpr (std::is_floating_point_v<T>) {
    using Bits = BitsOf<T>;
    if constexpr (kReduction == Reduction::Sum) return a + b;
    if constexpr (kReduction == Reduction::Product) return a * b;
    const Bits left = std::bit_cast<Bits>(a), right = std::bit_cast<Bits>(b);
    const Bits nan = std::bit_cast<Bits>(std::numeric_limits<T>::quiet_NaN());
    constexpr bool kMin = kReduction == Reduction::Min;
    // Equal numbers have equal bits, but for zeros: those are told apart by their sign.
    const Bits equal = kMin ? left | right : left & right;
    const Bits ordered = a < b ? (kMin ? left : right) : b < a ? (kMin ? right : left) : equal;
    return std::bit_cast<T>(a != a || b != b ? nan : ordered);
  } else {
    using Unsigned = std::make_unsigned_t<T>;
    using Wide = std::conditional_t<sizeof(T) < 4, std::uint32_t, Unsigned>;  // small ones would become signed
    if constexpr (kReduction == Reduction::Sum) return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
    if constexpr (kReduction == Reduction::Product) return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
    if constexpr (kReduction == Reduction::Min) return a < b ? a : b;
    if constexpr (kReduction == Reduction::Max) return a < b ? b : a;
    if constexpr (kReduction == Reduction::BitAnd) return static_cast<T>(a & b);
    if constexpr (kReduction == Reduction::BitOr) return static_cast<T>(a | b);
    return static_cast<T>(a ^ b);
  }
}

template <class T>
ALWAYS_INLINE T load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <class T, Reduction kReduction>
ALWAYS_INLINE void loop(char* target, const char* left, const char* right, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count * sizeof(T); i += sizeof(T)) {
    const T value = apply<kReduction>(load<T>(left + i), load<T>(right + i));
    std::memcpy(target + i, &value, sizeof value);
  }
}

// ---- One function for each set of instructions ----------------------------------------------------------------------------

using Function = void (*)(char* target, const char* left, const char* right, std::size_t count);

struct Portable {
  template <class T, Reduction kReduction>
  [[gnu::optimize("O3")]] static void run(char* target, const char* left, const char* right, std::size_t count) {
    loop<T, kReduction>(target, left, right, count);
  }
};
#if defined(__x86_64__)
struct Avx2 {
  template <class T, Reduction kReduction>
  [[gnu::target("avx2"), gnu::optimize("O3")]] static void run(char* target, const char* left, const char* right,
                                                               std::size_t count) {
    loop<T, kReduction>(target, left, right, count);
  }
};
struct Avx512 {
  template <class T, Reduction kReduction>
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl"), gnu::optimize("O3")]] static void run(char* target,
                                                                                             const char* left,
                                                                                             const char* right,
                                                                                             std::size_t count) {
    loop<T, kReduction>(target, left, right, count);
  }
};
#endif

template <class Set, class T>
Function of_type(Reduction reduction) {
  switch (reduction) {
    case Reduction::Sum: return Set::template run<T, Reduction::Sum>;
    case Reduction::Product: return Set::template run<T, Reduction::Product>;
    case Reduction::Min: return Set::template run<T, Reduction::Min>;
    case Reduction::Max: return Set::template run<T, Reduction::Max>;
    default: break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (reduction == Reduction::BitAnd) return Set::template run<T, Reduction::BitAnd>;
    if (reduction == Reduction::BitOr) return Set::template run<T, Reduction::BitOr>;
    return Set::template run<T, Reduction::BitXor>;
  }
  return nullptr;
}

template <class Set>
Function of_set(Element element, Reduction reduction) {
  switch (element) {
    case Element::Float32: return of_type<Set, float>(reduction);
    case Element::Float64: return of_type<Set, double>(reduction);
    case Element::Float16: return of_type<Set, Half>(reduction);
    case Element::BFloat16: return of_type<Set, Brain>(reduction);
    case Element::Int8: return of_type<Set, std::int8_t>(reduction);
    case Element::UInt8: return of_type<Set, std::uint8_t>(reduction);
    case Element::Int16: return of_type<Set, std::int16_t>(reduction);
    case Element::UInt16: return of_type<Set, std::uint16_t>(reduction);
    case Element::Int32: return of_type<Set, std::int32_t>(reduction);
    case Element::UInt32: return of_type<Set, std::uint32_t>(reduction);
    case Element::Int64: return of_type<Set, std::int64_t>(reduction);
    case Element::UInt64: return of_type<Set, std::uint64_t>(reduction);
  }
  return nullptr;
}

using Choose = Function (*)(Element, Reduction);
struct Method {
  const char* name;
  Choose choose;
};

std::vector<Method> methods() {
  std::vector<Method> all{{"portable", of_set<Portable>}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) all.push_back({"avx2", of_set<Avx2>});
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    all.push_back({"avx512", of_set<Avx512>});
  }
#endif
  return all;
}

const Choose best = methods().back().choose;  // before main, so that no fork finds it half made

template <class T>
void divide_all(char* target, const char* source, std::size_t count, std::uint64_t divisor) {
  for (std::size_t i = 0; i < count * sizeof(T); i += sizeof(T)) {
    const T value = load<T>(source + i);
    T result;
    if constexpr (kNarrow<T>) {
      result = T::narrow(T::widen(value) / static_cast<float>(divisor));
    } else if constexpr (std::is_floating_point_v<T>) {
      result = value / static_cast<T>(divisor);
    } else if constexpr (std::is_signed_v<T>) {
      // The most negative number has no opposite among signed ones.
      const std::uint64_t size =
          value < 0 ? 0 - static_cast<std::uint64_t>(std::int64_t{value}) : static_cast<std::uint64_t>(value);
      const std::uint64_t quotient = size / divisor;
      result = static_cast<T>(value < 0 ? 0 - quotient : quotient);
    } else {
      result = static_cast<T>(value / divisor);
    }
    std::memcpy(target + i, &result, sizeof result);
  }
}

template <class Enum, std::size_t kCount>
std::optional<Enum> named(const std::array<const char*, kCount>& names, std::string_view name) {
  for (std::size_t i = 0; i < kCount; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
  }
  return std::nullopt;
}

}  // namespace

const char* name_of(Element element) {
  return kElements[static_cast<unsigned>(element)];
}
const char* name_of(Reduction reduction) {
  return kReductions[static_cast<unsigned>(reduction)];
}
std::optional<Element> element_named(std::string_view name) {
  return named<Element>(kElements, name);
}
std::optional<Reduction> reduction_named(std::string_view name) {
  return named<Reduction>(kReductions, name);
}
std::size_t element_nbytes(Element element) {
  return kSizes[static_cast<unsigned>(element)];
}

void check_reducible(Element element, Reduction reduction) {
  if (reduction >= Reduction::BitAnd && element <= Element::BFloat16) {
    fail(ErrorKind::Unsupported, name_of(reduction), " of ", name_of(element), ": bit operations are for integers");
  }
}

void reduce(void* target, const void* left, const void* right, std::size_t count, Element element,
            Reduction reduction) {
  check_reducible(element, reduction);
  best(element, reduction)(static_cast<char*>(target), static_cast<const char*>(left), static_cast<const char*>(right),
                           count);
}

std::vector<std::string> reduce_methods() {
  std::vector<std::string> names;
  for (const Method& method : methods()) names.emplace_back(method.name);
  return names;
}

void reduce_by(const std::string& method, void* target, const void* left, const void* right, std::size_t count,
               Element element, Reduction reduction) {
  check_reducible(element, reduction);
  for (const Method& one : methods()) {
    if (method != one.name) continue;
    one.choose(element, reduction)(static_cast<char*>(target), static_cast<const char*>(left),
                                   static_cast<const char*>(right), count);
    return;
  }
  fail(ErrorKind::Unsupported, "this machine cannot reduce by ", method);
}

void divide(void* target, const void* source, std::size_t count, Element element, std::uint64_t divisor) {
  auto* const to = static_cast<char*>(target);
  const auto* const from = static_cast<const char*>(source);
  switch (element) {
    case Element::Float32: return divide_all<float>(to, from, count, divisor);
    case Element::Float64: return divide_all<double>(to, from, count, divisor);
    case Element::Float16: return divide_all<Half>(to, from, count, divisor);
    case Element::BFloat16: return divide_all<Brain>(to, from, count, divisor);
    case Element::Int8: return divide_all<std::int8_t>(to, from, count, divisor);
    case Element::UInt8: return divide_all<std::uint8_t>(to, from, count, divisor);
    case Element::Int16: return divide_all<std::int16_t>(to, from, count, divisor);
    case Element::UInt16: return divide_all<std::uint16_t>(to, from, count, divisor);
    case Element::Int32: return divide_all<std::int32_t>(to, from, count, divisor);
    case Element::UInt32: return divide_all<std::uint32_t>(to, from, count, divisor);
    case Element::Int64: return divide_all<std::int64_t>(to, from, count, divisor);
    case Element::UInt64: return divide_all<std::uint64_t>(to, from, count, divisor);
  }
}

}  // namespace onesided
