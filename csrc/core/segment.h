// Memory that several processes can map: an anonymous file (memfd) that is gone with its last user, however that ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/fd.h"

namespace onesided {

class Segment {
 public:
  // New memory of this process, zeroed, with its pages present, sealed against resizing. Throws RegistrationError that
  // says what there is not enough of. May take 0.3 s a gigabyte; Ctrl-C ends it.
  static std::shared_ptr<Segment> create(std::uint64_t nbytes, const char* name);
  // A peer's memory. Throws RegistrationError if it cannot be mapped, and HandleError if the file is not a sealed memfd of
  // at least `nbytes`: without that, its owner could shrink it and every access would be a SIGBUS.
  static std::shared_ptr<Segment> map(Fd fd, std::uint64_t nbytes, bool writable);
  // The segment of this process that contains the whole range, if there is one.
  static std::shared_ptr<Segment> containing(const void* begin, std::uint64_t nbytes);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  char* base() const { return base_; }
  std::uint64_t nbytes() const { return nbytes_; }
  int fd() const { return fd_.get(); }
  // A descriptor through which the memory can only be read.
  Fd read_only_fd() const;
  // Takes the right to write from a part of this mapping.
  void protect_front(std::size_t nbytes);

 private:
  Segment(Fd fd, char* base, std::uint64_t nbytes, bool listed)
      : fd_(std::move(fd)), base_(base), nbytes_(nbytes), listed_(listed) {}

  Fd fd_;
  char* const base_;
  const std::uint64_t nbytes_;
  const bool listed_;
};

}  // namespace onesided
