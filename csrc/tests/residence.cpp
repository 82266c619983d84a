// Memory that was unmapped and mapped again is noticed, whatever its address.
#include "core/residence.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "tests/support.h"

namespace onesided::tests {
namespace {

constexpr std::size_t kPages = 16, kPage = 4096;

char* map_at(void* address) {
  const int fixed = address == nullptr ? 0 : MAP_FIXED;
  void* const memory =
      ::mmap(address, kPages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0);
  CHECK(memory != MAP_FAILED);
  std::memset(memory, 1, kPages * kPage);
  return static_cast<char*>(memory);
}

}  // namespace

TEST_CASE("residence: memory stays, and a new mapping at its address is another") {
  char* const memory = map_at(nullptr);
  auto residence = Residence::claim(memory + 5, (kPages - 1) * kPage);
  CHECK(residence != nullptr);
  CHECK(residence->intact());
  std::memset(memory, 2, kPages * kPage);
  CHECK(residence->intact());
  // What an allocator does with free pages is refused while they are marked.
  CHECK(::madvise(memory + 2 * kPage, kPage, MADV_DONTNEED) != 0);
  CHECK(memory[2 * kPage] == 2);

  map_at(memory);
  CHECK(!residence->intact());
  residence = nullptr;  // it must not take the marks of the next
  residence = Residence::claim(memory, kPages * kPage);
  CHECK(residence != nullptr);
  CHECK(residence->intact());

  // A part that is new is enough, at either end.
  for (const std::size_t page : {std::size_t{0}, kPages - 1}) {
    residence = nullptr;
    map_at(memory);
    residence = Residence::claim(memory, kPages * kPage);
    ::mmap(memory + page * kPage, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    CHECK(!residence->intact());
  }
  residence = nullptr;
  ::munmap(memory, kPages * kPage);
}

TEST_CASE("residence: the end of one takes the marks back, but not those of the program or of a neighbour") {
  char* const memory = map_at(nullptr);
  const auto marked = [&](std::size_t page) { return ::msync(memory + page * kPage, kPage, MS_INVALIDATE) != 0; };
  auto one = Residence::claim(memory, 4 * kPage + 100);
  auto neighbour = Residence::claim(memory + 4 * kPage + 100, 3 * kPage);
  CHECK(marked(0));
  CHECK(marked(4));
  neighbour = nullptr;  // it shares a page with the other: it leaves its marks
  CHECK(one->intact());
  one = nullptr;
  CHECK(!marked(0));
  CHECK(!marked(4));
  CHECK(::syscall(SYS_mlock, memory + 10 * kPage, kPage) == 0);  // sanitizers have an mlock() that does nothing
  auto locked_before = Residence::claim(memory + 10 * kPage, kPage);
  CHECK(locked_before != nullptr);
  locked_before = nullptr;
  CHECK(marked(10));
  ::munmap(memory, kPages * kPage);
}

TEST_CASE("residence: nothing, and what cannot be marked") {
  CHECK(Residence::claim(nullptr, 0) == nullptr);
  char* const memory = map_at(nullptr);
  ::munmap(memory + 4 * kPage, kPage);
  CHECK(Residence::claim(memory, kPages * kPage) == nullptr);  // a hole
  ::munmap(memory, kPages * kPage);
}

}  // namespace onesided::tests
