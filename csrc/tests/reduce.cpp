#include "collectives/reduce.h"

#include <bit>
#include <cmath>
#include <limits>

#include "tests/support.h"

namespace onesided::tests {
namespace {

constexpr unsigned kElementCount = static_cast<unsigned>(Element::UInt64) + 1;
constexpr unsigned kReductionCount = static_cast<unsigned>(Reduction::BitXor) + 1;

// ---- An oracle that knows no vectors: 16-bit floats by arithmetic, integers in 128 bits ----------------------------------

// The value of a float with `exponent_bits` and `fraction_bits`.
double value_of(std::uint16_t bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1);
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return fraction != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

// The nearest one, of two equally near the even one.
std::uint16_t nearest(double value, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const auto special = static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << fraction_bits);
  if (std::isnan(value)) return static_cast<std::uint16_t>(special | 1 << (fraction_bits - 1));
  double size = std::fabs(value);
  if (std::isinf(size)) return sign | special;
  int exponent = size == 0 ? 1 - bias : std::max(std::ilogb(size), 1 - bias);
  const double steps = std::nearbyint(std::ldexp(size, fraction_bits - exponent));
  // Steps of a normal number include its leading one, which adds one to the exponent.
  const long bits = static_cast<long>(exponent + bias - 1) * (1L << fraction_bits) + static_cast<long>(steps);
  return bits >= special ? sign | special : static_cast<std::uint16_t>(sign | bits);
}

int exponent_bits(Element element) {
  return element == Element::Float16 ? 5 : 8;
}

template <class T>
T combined(T a, T b, Reduction reduction) {
  if (reduction == Reduction::Sum) return a + b;
  if (reduction == Reduction::Product) return a * b;
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
  const bool left_less = a < b || (a == b && std::signbit(a) && !std::signbit(b));
  return (reduction == Reduction::Min) == left_less ? a : b;
}

template <class T>
T read(const std::vector<char>& from, std::size_t at) {
  T value;
  std::memcpy(&value, from.data() + at, sizeof value);
  return value;
}

template <class T>
std::uint64_t integer(T a, T b, Reduction reduction) {
  using Wide = __int128;
  const Wide x = a, y = b;
  switch (reduction) {
    case Reduction::Sum:
      return static_cast<std::uint64_t>(
          static_cast<T>(static_cast<unsigned __int128>(x) + static_cast<unsigned __int128>(y)));
    case Reduction::Product:
      return static_cast<std::uint64_t>(
          static_cast<T>(static_cast<unsigned __int128>(x) * static_cast<unsigned __int128>(y)));
    case Reduction::Min: return static_cast<std::uint64_t>(x < y ? a : b);
    case Reduction::Max: return static_cast<std::uint64_t>(x > y ? a : b);
    case Reduction::BitAnd: return static_cast<std::uint64_t>(static_cast<T>(x & y));
    case Reduction::BitOr: return static_cast<std::uint64_t>(static_cast<T>(x | y));
    case Reduction::BitXor: return static_cast<std::uint64_t>(static_cast<T>(x ^ y));
  }
  return 0;
}

// The bits of element `i` of the result, the low ones of 64; NaN are all the same.
std::uint64_t expected(const std::vector<char>& left, const std::vector<char>& right, std::size_t i, Element element,
                       Reduction reduction) {
  const std::size_t at = i * element_nbytes(element);
  const auto whole = [&]<class T>(T) { return integer(read<T>(left, at), read<T>(right, at), reduction); };
  switch (element) {
    case Element::Float32:
      return std::bit_cast<std::uint32_t>(combined(read<float>(left, at), read<float>(right, at), reduction));
    case Element::Float64:
      return std::bit_cast<std::uint64_t>(combined(read<double>(left, at), read<double>(right, at), reduction));
    case Element::Float16:
    case Element::BFloat16: {
      const int wide = exponent_bits(element);
      const auto a = static_cast<float>(value_of(read<std::uint16_t>(left, at), wide, 15 - wide));
      const auto b = static_cast<float>(value_of(read<std::uint16_t>(right, at), wide, 15 - wide));
      return nearest(combined(a, b, reduction), wide, 15 - wide);
    }
    case Element::Int8: return whole(std::int8_t{});
    case Element::UInt8: return whole(std::uint8_t{});
    case Element::Int16: return whole(std::int16_t{});
    case Element::UInt16: return whole(std::uint16_t{});
    case Element::Int32: return whole(std::int32_t{});
    case Element::UInt32: return whole(std::uint32_t{});
    case Element::Int64: return whole(std::int64_t{});
    case Element::UInt64: return whole(std::uint64_t{});
  }
  return 0;
}

bool is_nan(std::uint64_t bits, Element element) {
  switch (element) {
    case Element::Float32: return std::isnan(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    case Element::Float64: return std::isnan(std::bit_cast<double>(bits));
    case Element::Float16:
    case Element::BFloat16:
      return std::isnan(
          value_of(static_cast<std::uint16_t>(bits), exponent_bits(element), 15 - exponent_bits(element)));
    default: return false;
  }
}

bool agree(const std::vector<char>& result, const std::vector<char>& left, const std::vector<char>& right,
           std::size_t count, Element element, Reduction reduction) {
  const std::size_t size = element_nbytes(element);
  const std::uint64_t mask = size == 8 ? ~std::uint64_t{0} : (std::uint64_t{1} << 8 * size) - 1;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, result.data() + i * size, size);
    const std::uint64_t wanted = expected(left, right, i, element, reduction) & mask;
    if (bits == wanted || (is_nan(bits, element) && is_nan(wanted, element))) continue;
    MESSAGE(name_of(element), " ", name_of(reduction), " element ", i, ": ", bits, " instead of ", wanted);
    return false;
  }
  return true;
}

template <class Body>
void for_each_pair(Body&& body) {
  for (unsigned e = 0; e < kElementCount; ++e) {
    for (unsigned r = 0; r < kReductionCount; ++r) {
      const auto element = static_cast<Element>(e);
      const auto reduction = static_cast<Reduction>(r);
      if (raised([&] { check_reducible(element, reduction); }).empty()) body(element, reduction);
    }
  }
}

TEST_CASE("reduce: every type and reduction, by every set of instructions, at any length and alignment") {
  for_each_pair([](Element element, Reduction reduction) {
    const std::size_t size = element_nbytes(element);
    for (const std::size_t count : {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 1000}) {
      // Random bits are all kinds of numbers, infinities and NaN among them.
      const std::vector<char> left = random_bytes(count * size, count + 1),
                              right = random_bytes(count * size, count + 1000);
      for (const std::string& method : reduce_methods()) {
        const std::size_t shift = (count + method.size()) % (size + 1);
        std::vector<char> a(count * size + shift), b(count * size + shift), target(count * size + shift + 1, 'x');
        if (count != 0) std::memcpy(a.data() + shift, left.data(), left.size());
        if (count != 0) std::memcpy(b.data() + shift, right.data(), right.size());
        reduce_by(method, target.data() + shift, a.data() + shift, b.data() + shift, count, element, reduction);
        CHECK(all_are(target.data(), shift, 'x'));
        CHECK(target.back() == 'x');
        CHECK(agree({target.begin() + static_cast<std::ptrdiff_t>(shift), target.end()}, left, right, count, element,
                    reduction));
        reduce_by(method, a.data() + shift, a.data() + shift, b.data() + shift, count, element, reduction);  // in place
        CHECK(agree({a.begin() + static_cast<std::ptrdiff_t>(shift), a.end()}, left, right, count, element, reduction));
        reduce_by(method, b.data() + shift, left.data(), b.data() + shift, count, element, reduction);
        CHECK(agree({b.begin() + static_cast<std::ptrdiff_t>(shift), b.end()}, left, right, count, element, reduction));
      }
    }
  });
}

TEST_CASE("reduce: all 16-bit floats, with themselves, with zeros, with their neighbours") {
  std::vector<char> all(65536 * 2), other(65536 * 2), result(65536 * 2);
  for (unsigned i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    std::memcpy(all.data() + 2 * i, &bits, 2);
  }
  for (const Element element : {Element::Float16, Element::BFloat16}) {
    for (const unsigned step : {0u, 1u, 0x8000u, 0x3c00u, 0x0401u}) {
      for (unsigned i = 0; i < 65536; ++i) {
        const auto bits = static_cast<std::uint16_t>(step == 0 ? 0 : i + step);
        std::memcpy(other.data() + 2 * i, &bits, 2);
      }
      for (const Reduction reduction : {Reduction::Sum, Reduction::Product, Reduction::Min, Reduction::Max}) {
        for (const std::string& method : reduce_methods()) {
          reduce_by(method, result.data(), all.data(), other.data(), 65536, element, reduction);
          CHECK(agree(result, all, other, 65536, element, reduction));
        }
      }
    }
  }
}

TEST_CASE("reduce: left and right may change places") {
  for_each_pair([](Element element, Reduction reduction) {
    constexpr std::size_t kCount = 4096;
    const std::size_t size = element_nbytes(element);
    const std::vector<char> left = random_bytes(kCount * size, 5), right = random_bytes(kCount * size, 6);
    std::vector<char> one(kCount * size), two(kCount * size);
    reduce(one.data(), left.data(), right.data(), kCount, element, reduction);
    reduce(two.data(), right.data(), left.data(), kCount, element, reduction);
    for (std::size_t i = 0; i < kCount; ++i) {
      std::uint64_t a = 0, b = 0;
      std::memcpy(&a, one.data() + i * size, size);
      std::memcpy(&b, two.data() + i * size, size);
      if (a != b) CHECK((is_nan(a, element) && is_nan(b, element)));
    }
  });
}

TEST_CASE("reduce: names, sizes and what cannot be reduced") {
  for (unsigned e = 0; e < kElementCount; ++e) {
    const auto element = static_cast<Element>(e);
    CHECK(element_named(name_of(element)) == element);
  }
  for (unsigned r = 0; r < kReductionCount; ++r) {
    const auto reduction = static_cast<Reduction>(r);
    CHECK(reduction_named(name_of(reduction)) == reduction);
  }
  CHECK(!element_named("bool"));
  CHECK(!reduction_named("avg"));
  CHECK(element_nbytes(Element::BFloat16) == 2);
  for (const Reduction reduction : {Reduction::BitAnd, Reduction::BitOr, Reduction::BitXor}) {
    for (const Element element : {Element::Float32, Element::Float64, Element::Float16, Element::BFloat16}) {
      CHECK(raised([&] { reduce(nullptr, nullptr, nullptr, 0, element, reduction); }) == "Unsupported");
    }
  }
  CHECK(raised([] { reduce_by("none", nullptr, nullptr, nullptr, 0, Element::Int8, Reduction::Sum); }) ==
        "Unsupported");
}

TEST_CASE("divide: truncates integers toward zero, rounds floats once") {
  const std::vector<std::int8_t> small{-128, -7, -1, 0, 1, 7, 127};
  for (const std::uint64_t divisor : {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{3}, std::uint64_t{1} << 40}) {
    std::vector<std::int8_t> result(small.size());
    divide(result.data(), small.data(), small.size(), Element::Int8, divisor);
    for (std::size_t i = 0; i < small.size(); ++i)
      CHECK(result[i] == static_cast<__int128>(small[i]) / static_cast<__int128>(divisor));
  }
  std::int64_t least = INT64_MIN;
  divide(&least, &least, 1, Element::Int64, 3);
  CHECK(least == INT64_MIN / 3);
  std::uint64_t most = UINT64_MAX;
  divide(&most, &most, 1, Element::UInt64, 2);
  CHECK(most == UINT64_MAX / 2);
  float one = 1;
  divide(&one, &one, 1, Element::Float32, 3);
  CHECK(one == 1.0f / 3.0f);
  double two = 2;
  divide(&two, &two, 1, Element::Float64, 3);
  CHECK(two == 2.0 / 3.0);
  const std::uint16_t brain = 0x3f80, half = 0x3c00;  // 1 and 1
  std::uint16_t result = 0;
  divide(&result, &brain, 1, Element::BFloat16, 3);
  CHECK(result == nearest(1.0 / 3.0, 8, 7));
  divide(&result, &half, 1, Element::Float16, 3);
  CHECK(result == nearest(1.0 / 3.0, 5, 10));
}

}  // namespace
}  // namespace onesided::tests
