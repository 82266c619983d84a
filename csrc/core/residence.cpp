#include "core/residence.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace onesided {
namespace {

std::size_t page_nbytes() {
  static const auto nbytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return nbytes;
}

bool locked(char* page) {
  return ::msync(page, page_nbytes(), MS_INVALIDATE) != 0 && errno == EBUSY;
}

// Straight to the system: sanitizers have an mlock() that does nothing.
bool lock(char* first, std::size_t nbytes) {
  return ::syscall(SYS_mlock, first, nbytes) == 0;
}
void unlock(char* first, std::size_t nbytes) {
  ::syscall(SYS_munlock, first, nbytes);
}

// Then a mark says nothing.
bool all_new_memory_is_locked() {
  void* const page = ::mmap(nullptr, page_nbytes(), PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return true;
  const bool is = locked(static_cast<char*>(page));
  ::munmap(page, page_nbytes());
  return is;
}

}  // namespace

std::unique_ptr<Residence> Residence::claim(void* data, std::size_t nbytes) {
  if (nbytes == 0 || all_new_memory_is_locked()) return nullptr;
  const std::uintptr_t mask = page_nbytes() - 1, begin = reinterpret_cast<std::uintptr_t>(data);
  char* const first = reinterpret_cast<char*>(begin & ~mask);
  char* const last = reinterpret_cast<char*>((begin + nbytes - 1) & ~mask);
  const bool before = locked(first) || locked(last);  // by the program itself, or with a neighbour
  if (const std::size_t all = static_cast<std::size_t>(last - first) + page_nbytes(); !lock(first, all)) {
    if (!before) unlock(first, all);  // a part of it may be
    return nullptr;
  }
  std::unique_ptr<Residence> residence(new Residence(first, last, !before));
  return residence->intact() ? std::move(residence) : nullptr;  // a system that does not tell
}

Residence::~Residence() {
  if (release_ && intact()) unlock(first_, static_cast<std::size_t>(last_ - first_) + page_nbytes());
}

bool Residence::intact() const {
  return locked(first_) && locked(last_);
}

}  // namespace onesided
