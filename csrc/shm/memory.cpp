#include "shm/memory.h"

#include <time.h>

#include "shm/hub.h"

namespace onesided::shm {
namespace {

std::shared_ptr<Segment> control_segment(std::uint32_t slots, std::uint32_t signals) {
  if (signals > Control::kMostSignals) {
    fail(ErrorKind::Bounds, signals, " signals are too many for one memory: ", Control::kMostSignals, " at most");
  }
  if (slots > Control::kMostSlots) {
    fail(ErrorKind::Bounds, slots, " peers are too many for one memory: ", Control::kMostSlots, " at most");
  }
  return Segment::create(Control::size_for(slots, signals), "onesided-control");
}

}  // namespace

ShmMemory::ShmMemory(std::shared_ptr<Hub> hub, std::uint64_t id, void* data, std::uint64_t nbytes, Access access,
                     std::uint32_t signals, std::uint32_t slots, std::shared_ptr<Segment> segment, Keepalive keep)
    : hub_(std::move(hub)),
      id_(id),
      key_(random_token()),
      data_(data),
      nbytes_(nbytes),
      access_(access),
      segment_(std::move(segment)),
      control_segment_(onesided::shm::control_segment(slots, signals)),
      control_(control_segment_->base(), slots, signals),
      holders_(slots, kFree),
      permissions_(access),
      keep_(std::move(keep)) {
  ControlHeader& header = control_.header();
  header.magic = ControlHeader::kMagic;
  header.slots = slots;
  header.signals = signals;
}

// Nobody may still reach the bytes once this object is gone. If a stopped peer is in the middle of an operation, whatever
// keeps the bytes alive is kept for good: a leak is better than a write into memory that has become something else.
ShmMemory::~ShmMemory() {
  if (hub_->forked()) return;
  try {
    close(Deadline::after(1));
  } catch (const std::exception&) {
    hub_->withdraw(id_);
    new Keepalive(std::move(keep_));
  }
}

RemoteMemory ShmMemory::remote() const {
  return {TransportKind::Shm, access_, hub_->token(), id_, 0, nbytes_, control_.signals(), key_};
}

void ShmMemory::check_usable(const char* what) const {
  check_not_forked(hub_->made_in(), what);
}

void ShmMemory::close(const Deadline& deadline) {
  if (hub_->forked()) return;  // it is the parent's, and stays open there
  control_.header().closed.fetch_or(ControlHeader::kClosed, std::memory_order_seq_cst);
  control_.event().notify();
  wait_until_quiet(nullptr, "close", deadline);
  // Only now: while it is listed, the hub frees the slots of peers that end in the middle of an operation.
  hub_->withdraw(id_);
  Keepalive kept;
  std::lock_guard lock(hub_->mutex());
  kept.swap(keep_);
}

void ShmMemory::permit(const std::string& peer, Access access) {
  check_usable("this memory");
  permissions_.check(access);
  if (closed()) fail(ErrorKind::StaleHandle, "permit: this memory is closed");
  std::lock_guard lock(hub_->mutex());
  permissions_.set(peer, access);
}

void ShmMemory::revoke(const std::string& peer, const Deadline& deadline) {
  check_usable("this memory");
  if (closed()) fail(ErrorKind::StaleHandle, "revoke: this memory is closed");
  {
    std::lock_guard lock(hub_->mutex());
    permissions_.set(peer, Access::None);
    for (std::uint32_t slot = 0; slot < holders_.size(); ++slot) {
      if (hub_->is_held_by(holders_[slot], peer)) control_.header().set_revoked(slot, true);
    }
  }
  control_.header().closed.fetch_or(ControlHeader::kRevoked, std::memory_order_seq_cst);
  wait_until_quiet(&peer, "revoke", deadline);
}

void ShmMemory::wait_until_quiet(const std::string* of, const char* operation, const Deadline& deadline) {
  const auto spin_until = Deadline::after(50e-6);
  for (;;) {
    const std::string stuck = stuck_peers(of);
    if (stuck.empty()) return;
    if (deadline.passed()) {
      fail(ErrorKind::DeadlineExceeded, operation, ": ", stuck,
           " in the middle of an operation on this memory and may be stopped; the memory stays registered, ", operation,
           " it again");
    }
    check_interrupt();
    if (spin_until.passed()) {
      const timespec nap{0, 100'000};
      ::nanosleep(&nap, nullptr);
    }
  }
}

// Names who has operations under way, of all or of one peer; empty if nobody has.
std::string ShmMemory::stuck_peers(const std::string* of) {
  std::string names;
  std::lock_guard lock(hub_->mutex());
  for (std::uint32_t slot = 0; slot < holders_.size(); ++slot) {
    if (holders_[slot] == kFree || !control_.slot(slot).busy()) continue;
    if (of != nullptr && !hub_->is_held_by(holders_[slot], *of)) continue;
    names += names.empty() ? "" : ", ";
    names += holders_[slot] == kOwner ? "this process" : hub_->name_of_holder(holders_[slot]);
  }
  return names.empty() ? names : names + " is";
}

std::uint32_t ShmMemory::take_slot(int holder) {
  for (std::uint32_t slot = 0; slot < holders_.size(); ++slot) {
    if (holders_[slot] != kFree) continue;
    holders_[slot] = holder;
    control_.slot(slot).clear();
    control_.header().set_revoked(slot, false);
    return slot;
  }
  fail(ErrorKind::Unsupported, "all ", holders_.size(),
       " places of this memory, for peers and for its owner itself, are taken");
}

void ShmMemory::free_slot(std::uint32_t slot, int holder) {
  if (slot < holders_.size() && holders_[slot] == holder) holders_[slot] = kFree;
}

void ShmMemory::free_slots_of(int holder) {
  for (auto& held_by : holders_) {
    if (held_by == holder) held_by = kFree;
  }
}

Description ShmMemory::describe() const {
  return {
      {"nbytes", std::to_string(nbytes_)},
      {"access", name_of(access_)},
      {"signals", std::to_string(control_.signals())},
      {"memory",
       segment_ ? "shared (memfd): peers map it" : "private: peers go through cross-memory attach, no atomics"},
  };
}

}  // namespace onesided::shm
