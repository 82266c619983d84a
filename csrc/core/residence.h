// Notices that memory was given back to the system and other memory mapped at its address.
//
// Whoever frees memory that somebody else may free and allocate again (torch: `storage.resize_(0)` and back, as FSDP does) often
// gets the same address, and other pages: what a device knows of the old ones is wrong then. No library call tells of it, and
// hooks on malloc and munmap are famous for what they miss. But pages can be marked: locked ones (mlock) stay what they are, as
// even MADV_DONTNEED and MADV_FREE are refused on them; a new mapping is not locked; and msync(MS_INVALIDATE) says whether a page is,
// in 0.2 us (mm/msync.c and mm/madvise.c of Linux; msync(2): EBUSY).
#pragma once

#include <cstddef>
#include <memory>

namespace onesided {

class Residence {
 public:
  // Marks [data, data + nbytes), in whole pages. Null where that cannot be: RLIMIT_MEMLOCK, or a process that locks all its future
  // memory (mlockall).
  static std::unique_ptr<Residence> claim(void* data, std::size_t nbytes);
  ~Residence();
  Residence(const Residence&) = delete;
  Residence& operator=(const Residence&) = delete;

  // Whether it is still the same memory.
  bool intact() const;

 private:
  Residence(char* first, char* last, bool release) : first_(first), last_(last), release_(release) {}

  char* const first_;  // its first and last page
  char* const last_;
  const bool release_;
};

}  // namespace onesided
