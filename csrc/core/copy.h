// Copying memory on the calling thread, large copies by whichever method this machine has shown to be fastest.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace onesided {

// Passed between the pieces of a long copy; it throws to stop the copy there, after which the source is not read again.
class Checkpoint {
 public:
  virtual void pass() = 0;

 protected:
  ~Checkpoint() = default;
};

// Copies `nbytes`; the ranges may overlap as with memmove. Under kLargeCopy it is one plain copy; from there on the
// methods are tried on pieces of the real copies and the fastest is kept (see the .cpp file).
void copy_memory(void* target, const void* source, std::size_t nbytes, Checkpoint* between_pieces = nullptr);

inline constexpr std::size_t kLargeCopy = std::size_t{1} << 20;
// A long copy comes up for breath (deadline, cancel, Ctrl-C) after each piece of this size: 1 to 2 ms.
inline constexpr std::size_t kPiece = std::size_t{16} << 20;

// What has been measured so far: one row for each size class and method that was tried.
struct CopyMeasurement {
  std::string sizes;   // "1-4 MiB", "4-16 MiB", "16 MiB"
  std::string method;  // "plain", "non-temporal", "plain on two threads", "non-temporal on two threads"
  double gigabytes_per_second;
  bool chosen;
};
std::vector<CopyMeasurement> copy_measurements();

// The names of the methods that this machine has, and one copy by one of them, whatever its size and speed. For tests; the
// ranges must not overlap.
std::vector<std::string> copy_methods();
void copy_memory_by(const std::string& method, void* target, const void* source, std::size_t nbytes);

}  // namespace onesided
