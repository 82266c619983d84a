#include "verbs/registration.h"

#if ONESIDED_HAS_VERBS
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "core/process.h"

namespace onesided::verbs {
namespace {

std::string megabytes(std::uint64_t nbytes) {
  return nbytes < (1u << 20) ? text(nbytes >> 10, " KiB") : text(nbytes >> 20, " MiB");
}

// As /proc/self/status has it, "384 kB" for instance.
std::string pinned_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmPin:", 0) == 0) return line.substr(line.find_first_not_of(" \t", 6));
  }
  return "an unknown number";
}

// Which limit a refused registration has met, as far as can be told.
std::string limit_met(int error, const Device& device, std::uint64_t nbytes) {
  rlimit locked{};
  ::getrlimit(RLIMIT_MEMLOCK, &locked);
  const bool privileged = ::geteuid() == 0;
  std::string maps;
  std::ifstream("/proc/sys/vm/max_map_count") >> maps;
  const std::string pinned = text(", of which ", pinned_memory(), " are pinned already (each device pins its own)");
  if (error == ENOMEM && locked.rlim_cur != RLIM_INFINITY && !privileged) {
    return text("RLIMIT_MEMLOCK is ", megabytes(locked.rlim_cur), pinned,
                ": raise it (ulimit -l unlimited, LimitMEMLOCK=infinity in systemd, memlock in limits.conf)");
  }
  if (error == ENOMEM) {
    return text("the system or the device has no room for it: max_mr of ", device.name(), " is ",
                device.limits().max_mr, ", vm.max_map_count ", maps, ", RLIMIT_MEMLOCK ",
                locked.rlim_cur == RLIM_INFINITY ? "unlimited" : text(megabytes(locked.rlim_cur), pinned),
                ", the region ", megabytes(nbytes));
  }
  if (error == EPERM || error == EACCES) return "RLIMIT_MEMLOCK or the permissions of the device forbid it";
  if (error == EFAULT)
    return "the memory is not mapped, or is read-only (if it is shared besides, Linux before 6.2 cannot register it)";
  if (error == EINVAL) {
    return text("the device takes no such region: max_mr_size of ", device.name(), " is ",
                megabytes(device.limits().max_mr_size));
  }
  return "the device refused it";
}

}  // namespace

unsigned access_flags(Access access, bool strict) {
  unsigned flags = strict ? 0 : IBV_ACCESS_RELAXED_ORDERING;
  if (permits(access, Access::Read)) flags |= IBV_ACCESS_REMOTE_READ;
  if (permits(access, Access::Write)) flags |= IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE;
  if (permits(access, Access::ReadWrite)) flags |= IBV_ACCESS_REMOTE_ATOMIC;
  return flags;
}

ibv_mr* HostMemory::make(const Device& device, std::uint64_t offset, std::uint64_t nbytes, unsigned access) {
  char* const begin = data_ + offset;
  return api().reg_mr(device.pd(), begin, nbytes, reinterpret_cast<std::uint64_t>(begin), access);
}

Registration::Registration(const std::vector<std::shared_ptr<Device>>& rails, KeyProvider& provider,
                           std::uint64_t address, std::uint64_t nbytes, unsigned access)
    : made_in_(fork_generation()), address_(address), nbytes_(nbytes), devices_(rails) {
  piece_nbytes_ = std::max<std::uint64_t>(nbytes, 1);
  for (const auto& device : rails) {
    // A multiple of the largest page, so that no two pieces share one; some software devices tell no limit at all.
    const std::uint64_t most = device->limits().max_mr_size;
    if (most == 0 || most >= piece_nbytes_) continue;
    piece_nbytes_ = std::max<std::uint64_t>(most / 65536 * 65536, std::min<std::uint64_t>(most, 4096));
  }
  pieces_ = nbytes == 0 ? 0 : static_cast<std::size_t>((nbytes - 1) / piece_nbytes_ + 1);
  if (pieces_ > kMostRegions / std::max<std::size_t>(rails.size(), 1)) {
    fail(ErrorKind::Registration, nbytes, " bytes would need ", pieces_, " regions of ", piece_nbytes_,
         " bytes (max_mr_size) on each of ", rails.size(), " rails; ", kMostRegions, " are the most");
  }
  regions_.reserve(rails.size() * pieces_);
  keys_.reserve(rails.size() * pieces_);
  for (const auto& device : rails) {
    for (std::uint64_t offset = 0; offset < nbytes; offset += piece_nbytes_) {
      const std::uint64_t piece = std::min(piece_nbytes_, nbytes - offset);
      errno = 0;
      ibv_mr* const region = provider.make(*device, offset, piece, access);
      if (region == nullptr) {
        const int error = errno == 0 ? EIO : errno;
        release();
        fail_errno(ErrorKind::Registration, error, "registering ", nbytes, " bytes of ", provider.what(), " with ",
                   device->name(), " failed: ", limit_met(error, *device, piece));
      }
      regions_.push_back(region);
      keys_.push_back({region->lkey, region->rkey});
    }
  }
}

Registration::~Registration() {
  release();
}

void Registration::release() {
  if (made_in_ != fork_generation()) {  // a child's: the regions, and the device that they are of, are its parent's
    new std::vector<std::shared_ptr<Device>>(std::move(devices_));
    return;
  }
  for (ibv_mr* region : regions_) api().dereg_mr(region);
  regions_.clear();
}

}  // namespace onesided::verbs
#endif
