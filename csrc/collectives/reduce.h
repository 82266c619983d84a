// Reductions of arrays, element by element: what collectives compute.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace onesided {

enum class Element : std::uint8_t {
  Float32,
  Float64,
  Float16,
  BFloat16,
  Int8,
  UInt8,
  Int16,
  UInt16,
  Int32,
  UInt32,
  Int64,
  UInt64
};
enum class Reduction : std::uint8_t { Sum, Product, Min, Max, BitAnd, BitOr, BitXor };

// As torch and numpy name types: "float32", "bfloat16", "int8"; and "sum", "product", "min", "max", "band", "bor", "bxor".
const char* name_of(Element element);
const char* name_of(Reduction reduction);
std::optional<Element> element_named(std::string_view name);
std::optional<Reduction> reduction_named(std::string_view name);
std::size_t element_nbytes(Element element);

// Unsupported for bit operations on floating point.
void check_reducible(Element element, Reduction reduction);

// target[i] = left[i] op right[i], at any alignment. `target` may be `left` or `right`; otherwise they do not overlap.
//
// Integers wrap. Of 16-bit floats each pair is computed in float32 and rounded once, to nearest even. Min and Max give NaN if
// either is one, and take -0 to be less than +0. Left and right may change places without changing a bit of the result, but for
// which NaN a sum or product of two is.
void reduce(void* target, const void* left, const void* right, std::size_t count, Element element, Reduction reduction);

// target[i] = source[i] / divisor, the last step of an average: integers are truncated toward zero. They may be the same.
void divide(void* target, const void* source, std::size_t count, Element element, std::uint64_t divisor);

// The instruction sets that this machine can do it with, the portable one first, and a reduction by one of them. For tests.
std::vector<std::string> reduce_methods();
void reduce_by(const std::string& method, void* target, const void* left, const void* right, std::size_t count,
               Element element, Reduction reduction);

}  // namespace onesided
