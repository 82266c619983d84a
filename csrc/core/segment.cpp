#include "core/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <map>
#include <mutex>
#include <string>

#include "core/error.h"
#include "core/process.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace onesided {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kStep = std::uint64_t{256}
                                << 20;  // pages are made present in steps, so that Ctrl-C gets through

// Segments made by this process, by address.
struct Listing {
  std::mutex mutex;
  std::map<const char*, std::weak_ptr<Segment>> by_base;

  Listing() { hold_over_fork(mutex); }
};
Listing& listing() {
  static auto* const instance = new Listing;
  return *instance;
}

// From the start: a fork while another thread makes it would leave a child that waits for that thread.
[[maybe_unused]] const auto& from_the_start = listing();

// The number behind `name` in a file of such lines, or `otherwise`.
std::uint64_t number_in(const char* path, const std::string& name, std::uint64_t otherwise) {
  std::ifstream file(path);
  for (std::string word; file >> word;) {
    if (std::uint64_t number = 0; word == name && file >> number) return number;
    file.ignore(256, '\n');
  }
  return otherwise;
}

// What the kernel can still give, in bytes: memory that is available, and what the control group allows. Asking first
// matters: a memfd that grows beyond it does not fail, it calls the out-of-memory killer.
std::uint64_t available_memory() {
  std::uint64_t available = number_in("/proc/meminfo", "MemAvailable:", INT64_MAX / 1024) * 1024;
  std::uint64_t limit = 0, used = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit && std::ifstream("/sys/fs/cgroup/memory.current") >> used) {
    // The group is charged for the cache of files, too, which is given back when memory runs short.
    used -= std::min(used, number_in("/sys/fs/cgroup/memory.stat", "inactive_file", 0));
    available = std::min(available, limit > used ? limit - used : 0);
  }
  return available;
}

// Makes all pages present. Before Linux 5.14 the file's pages are allocated and the page tables filled on first touch.
int populate(int fd, char* base, std::uint64_t nbytes, bool writable) {
  for (std::uint64_t done = 0; done < nbytes; done += kStep) {
    const std::uint64_t step = std::min(kStep, nbytes - done);
    while (::madvise(base + done, step, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) != 0) {
      if (errno == EINVAL) return fd >= 0 && ::fallocate(fd, 0, 0, static_cast<off_t>(nbytes)) != 0 ? errno : 0;
      if (errno != EINTR && errno != EAGAIN) return errno;
      check_interrupt();
    }
    check_interrupt();
  }
  return 0;
}

std::uint64_t whole_pages(std::uint64_t nbytes) {
  return std::max(kPage, (nbytes + kPage - 1) / kPage * kPage);
}

}  // namespace

std::shared_ptr<Segment> Segment::create(std::uint64_t nbytes, const char* name) {
  const std::uint64_t available = available_memory();
  if (nbytes > available) {
    fail(ErrorKind::Registration, "cannot allocate ", nbytes, " bytes of shared memory: ", available,
         " bytes are available");
  }
  const std::uint64_t length = whole_pages(nbytes);
  Fd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) {
    fail_errno(ErrorKind::Registration, errno, "memfd_create failed",
               errno == EMFILE ? " (RLIMIT_NOFILE: raise it with ulimit -n)" : "");
  }
  if (::ftruncate(fd.get(), static_cast<off_t>(length)) != 0) {
    fail_errno(ErrorKind::Registration, errno, "cannot size shared memory to ", length, " bytes");
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    fail_errno(ErrorKind::Registration, errno, "cannot seal shared memory");
  }
  void* base = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) {
    fail_errno(ErrorKind::Registration, errno, "cannot map ", length, " bytes of shared memory",
               errno == ENOMEM ? " (RLIMIT_AS or vm.max_map_count)" : "");
  }
  std::shared_ptr<Segment> segment(new Segment(std::move(fd), static_cast<char*>(base), length, true));
  {
    std::lock_guard lock(listing().mutex);
    listing().by_base[segment->base_] = segment;
  }
  ::madvise(base, length, MADV_HUGEPAGE);  // advice: where the system has no huge pages for this, ordinary ones serve
  if (const int error = populate(segment->fd(), segment->base_, length, true)) {
    fail_errno(ErrorKind::Registration, error, "cannot back ", length, " bytes of shared memory with pages");
  }
  return segment;
}

std::shared_ptr<Segment> Segment::map(Fd fd, std::uint64_t nbytes, bool writable) {
  struct stat status{};
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK) || ::fstat(fd.get(), &status) != 0 ||
      static_cast<std::uint64_t>(status.st_size) < nbytes) {
    fail(ErrorKind::Handle, "the peer offered memory that is not a sealed memfd of ", nbytes, " bytes");
  }
  const std::uint64_t length = static_cast<std::uint64_t>(status.st_size);
  void* base = ::mmap(nullptr, length, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) {
    fail_errno(ErrorKind::Registration, errno, "cannot map ", length, " bytes of a peer's memory",
               errno == ENOMEM ? " (RLIMIT_AS or vm.max_map_count)" : "");
  }
  std::shared_ptr<Segment> segment(new Segment(std::move(fd), static_cast<char*>(base), length, false));
  ::madvise(base, length, MADV_HUGEPAGE);
  if (const int error = populate(-1, segment->base_, length, writable)) {
    fail_errno(ErrorKind::Registration, error, "cannot fill the page tables for ", length, " bytes of a peer's memory");
  }
  segment->fd_.reset();  // the mapping keeps the file; a descriptor a window would soon run into RLIMIT_NOFILE
  return segment;
}

std::shared_ptr<Segment> Segment::containing(const void* begin, std::uint64_t nbytes) {
  const auto* at = static_cast<const char*>(begin);
  std::shared_ptr<Segment> segment;  // outlives the lock: if it is the last to let go, ~Segment takes the lock again
  std::lock_guard lock(listing().mutex);
  auto after = listing().by_base.upper_bound(at);
  if (after == listing().by_base.begin()) return nullptr;
  segment = std::prev(after)->second.lock();
  if (segment == nullptr) return nullptr;
  const auto offset = static_cast<std::uint64_t>(at - segment->base_);
  return offset <= segment->nbytes_ && nbytes <= segment->nbytes_ - offset ? segment : nullptr;
}

Segment::~Segment() {
  if (listed_) {
    std::lock_guard lock(listing().mutex);
    listing().by_base.erase(base_);
  }
  ::munmap(base_, nbytes_);
}

Fd Segment::read_only_fd() const {
  Fd reopened(::open(text("/proc/self/fd/", fd()).c_str(), O_RDONLY | O_CLOEXEC));
  if (!reopened) fail_errno(ErrorKind::Registration, errno, "cannot open shared memory for reading only");
  return reopened;
}

void Segment::protect_front(std::size_t nbytes) {
  if (::mprotect(base_, nbytes, PROT_READ) != 0) fail_errno(ErrorKind::Registration, errno, "mprotect failed");
}

}  // namespace onesided
