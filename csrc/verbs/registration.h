// Memory made known to devices: one or more memory regions (ibv_mr) on each rail.
#pragma once

#include "verbs/device.h"

#if ONESIDED_HAS_VERBS
#include <cstdint>
#include <memory>
#include <vector>

#include "core/handle.h"

namespace onesided::verbs {

// Where the keys of a memory come from. Host memory is registered by its address; memory of a GPU will be by a dma-buf.
class KeyProvider {
 public:
  virtual ~KeyProvider() = default;
  // One region over [offset, offset + nbytes) of the memory, or null with errno set.
  virtual ibv_mr* make(const Device& device, std::uint64_t offset, std::uint64_t nbytes, unsigned access) = 0;
  // What to tell when make() failed.
  virtual const char* what() const = 0;
};

class HostMemory final : public KeyProvider {
 public:
  explicit HostMemory(void* data) : data_(static_cast<char*>(data)) {}
  ibv_mr* make(const Device& device, std::uint64_t offset, std::uint64_t nbytes, unsigned access) override;
  const char* what() const override { return "host memory"; }

 private:
  char* const data_;
};

// What peers may do, as verbs spell it. `strict`: never with relaxed ordering, so that what is written there is seen after all
// that was written before.
unsigned access_flags(Access access, bool strict);
// On all rails together: their keys have to fit one message (see protocol.h).
inline constexpr std::size_t kMostRegions = 32000;
inline constexpr unsigned kSourceOnly = 0;
inline constexpr unsigned kDestination = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING;

// The regions of one memory. A device that takes no region of that size (max_mr_size) gets several of `piece_nbytes` each, the
// same on every rail.
class Registration {
 public:
  // Throws RegistrationError that names the limit that was hit.
  Registration(const std::vector<std::shared_ptr<Device>>& rails, KeyProvider& provider, std::uint64_t address,
               std::uint64_t nbytes, unsigned access);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  // The address that work requests and peers use for its first byte.
  std::uint64_t address() const { return address_; }
  std::uint64_t nbytes() const { return nbytes_; }
  std::uint64_t piece_nbytes() const { return piece_nbytes_; }
  std::size_t pieces() const { return pieces_; }
  // That of the piece that `offset` lies in.
  std::uint32_t lkey(std::size_t rail, std::uint64_t offset) const {
    return keys_[pieces_ == 1 ? rail : rail * pieces_ + offset / piece_nbytes_].local;
  }
  std::uint32_t rkey(std::size_t rail, std::size_t piece) const { return keys_[rail * pieces_ + piece].remote; }
  bool contains(const void* data, std::uint64_t nbytes) const {
    const auto begin = reinterpret_cast<std::uint64_t>(data);
    return begin >= address_ && nbytes <= nbytes_ && begin - address_ <= nbytes_ - nbytes;
  }
  // Gives the regions back to the devices. The keys can still be asked for, and are good for nothing.
  void release();

 private:
  struct Keys {
    std::uint32_t local, remote;
  };

  const std::uint32_t made_in_;
  const std::uint64_t address_;
  const std::uint64_t nbytes_;
  std::uint64_t piece_nbytes_ = 0;
  std::size_t pieces_ = 0;
  std::vector<std::shared_ptr<Device>> devices_;
  std::vector<ibv_mr*> regions_;  // by rail, then by piece
  std::vector<Keys> keys_;        // the same
};

}  // namespace onesided::verbs
#endif
