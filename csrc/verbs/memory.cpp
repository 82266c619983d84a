#include "verbs/memory.h"

#if ONESIDED_HAS_VERBS
#include "verbs/hub.h"

namespace onesided::verbs {
namespace {

// Beside the event that the owner sleeps on there is room in its cache line: 8 bytes that peers read to flush what they
// wrote. The signals come right behind, so that both are one region.
constexpr std::size_t kWordsAt = Control::kOwnersBytes + sizeof(Slot) - sizeof(std::uint64_t);

void check_not_owner(const std::string& peer) {
  if (peer == Hub::kOwner) fail(ErrorKind::Bounds, "'", peer, "' is no name for a peer");
}

std::shared_ptr<Segment> make_control(std::uint32_t signals) {
  if (signals > Control::kMostSignals) {
    fail(ErrorKind::Bounds, signals, " signals are too many for one memory: ", Control::kMostSignals, " at most");
  }
  return Segment::create(Control::size_for(0, signals), "onesided-control");
}

}  // namespace

RdmaMemory::RdmaMemory(std::shared_ptr<Hub> hub, std::uint64_t id, void* data, std::uint64_t nbytes, Access access,
                       std::uint32_t signals, std::uint32_t most_peers, std::shared_ptr<Segment> segment,
                       Keepalive keep)
    : hub_(std::move(hub)),
      id_(id),
      key_(random_token()),
      data_(data),
      nbytes_(nbytes),
      access_(access),
      most_peers_(most_peers),
      segment_(std::move(segment)),
      control_segment_(make_control(signals)),
      control_(control_segment_->base(), 0, signals),
      permissions_(access),
      keep_(std::move(keep)) {
  ControlHeader& header = control_.header();
  header.magic = ControlHeader::kMagic;
  header.signals = signals;
  permissions_.set(Hub::kOwner, access);
  words_ = register_words();
  registration_.store(register_bytes(access_));
}

RdmaMemory::Registered RdmaMemory::register_bytes(Access access) const {
  HostMemory memory(data_);
  return std::make_shared<Registration>(hub_->devices(), memory, reinterpret_cast<std::uint64_t>(data_), nbytes_,
                                        access_flags(access, false));
}

RdmaMemory::Registered RdmaMemory::register_words() const {
  char* const words = control_segment_->base() + kWordsAt;
  HostMemory memory(words);
  return std::make_shared<Registration>(hub_->devices(), memory, reinterpret_cast<std::uint64_t>(words),
                                        sizeof(std::uint64_t) * (std::uint64_t{control_.signals()} + 1),
                                        access_flags(Access::ReadWrite, true));
}

RdmaMemory::~RdmaMemory() {
  if (hub_->forked()) {
    // The parent's: its keys are not this process's to give back.
    new std::map<Access, Registered>(std::move(narrower_));
    new Registered(std::move(words_));
    new Registered(registration_.load());
    return;
  }
  InterruptScope undisturbed(nullptr);
  close(Deadline::after(1));
}

RemoteMemory RdmaMemory::remote() const {
  return {TransportKind::Rdma, access_, hub_->token(), id_, 0, nbytes_, control_.signals(), key_};
}

void RdmaMemory::check_usable(const char* what) const {
  check_not_forked(hub_->made_in(), what);
}

Reach RdmaMemory::reach(Access access) const {
  Reach reach;
  const auto narrower = narrower_.find(access);
  const auto registration = narrower != narrower_.end() ? narrower->second : this->registration();
  if (registration == nullptr) fail(ErrorKind::StaleHandle, "attach: this memory was closed");
  reach.nbytes = nbytes_;
  reach.access = access;
  reach.signals = control_.signals();
  reach.address = registration->address();
  reach.piece_nbytes = registration->piece_nbytes();
  reach.words_address = words_->address();
  for (std::size_t rail = 0; rail < hub_->devices().size(); ++rail) {
    for (std::size_t piece = 0; piece < registration->pieces(); ++piece) {
      reach.keys.push_back(registration->rkey(rail, piece));
    }
    reach.words_keys.push_back(words_->rkey(rail, 0));
  }
  return reach;
}

void RdmaMemory::close(const Deadline& deadline) {
  if (hub_->forked()) return;  // it is the parent's, and stays open there
  const Turn::Hold turn(turn_, "close", deadline);
  if (registration_.load() == nullptr) return;
  control_.header().closed.store(ControlHeader::kClosed, std::memory_order_seq_cst);
  control_.event().notify();
  hub_->revoke(id_, nullptr, deadline);
  hub_->withdraw(id_);
  // From here on the devices refuse every access, whoever still knows the keys.
  words_ = nullptr;
  narrower_.clear();
  registration_.store(nullptr);
  keep_ = nullptr;
}

void RdmaMemory::permit(const std::string& peer, Access access) {
  check_usable("this memory");
  check_not_owner(peer);
  permissions_.check(access);
  const Turn::Hold turn(turn_, "permit", Deadline::after(5));
  if (registration_.load() == nullptr) fail(ErrorKind::StaleHandle, "permit: this memory is closed");
  Registered registered;
  if (access != access_ && access != Access::None && narrower_.count(access) == 0) registered = register_bytes(access);
  std::lock_guard lock(hub_->mutex());
  if (registered != nullptr) narrower_[access] = std::move(registered);
  permissions_.set(peer, access);
}

void RdmaMemory::revoke(const std::string& peer, const Deadline& deadline) {
  check_usable("this memory");
  check_not_owner(peer);
  const Turn::Hold turn(turn_, "revoke", deadline);
  if (registration_.load() == nullptr) fail(ErrorKind::StaleHandle, "revoke: this memory is closed");
  // Made first: if there cannot be so much, nothing has changed.
  Registered words = register_words(), bytes = register_bytes(access_);
  std::map<Access, Registered> narrower;
  for (const auto& [access, registered] : narrower_) narrower[access] = register_bytes(access);
  {
    std::lock_guard lock(hub_->mutex());
    permissions_.set(peer, Access::None);
    words_.swap(words);
    narrower_.swap(narrower);
    bytes = registration_.exchange(std::move(bytes));
  }
  hub_->revoke(id_, &peer, deadline);
  // Operations of this process's own may still use the old keys of its memory.
  Event never;
  while (bytes.use_count() > 1 && !deadline.passed()) {
    never.await([&] { return bytes.use_count() <= 1; }, deadline.at_most(std::chrono::milliseconds(1)));
  }
  if (bytes.use_count() > 1) {
    fail(ErrorKind::DeadlineExceeded,
         "revoke: an operation of this process's own still uses the memory, and so the old keys; ", "they end with it");
  }
}

Description RdmaMemory::describe() const {
  const auto registration = this->registration();
  return {
      {"nbytes", std::to_string(nbytes_)},
      {"access", name_of(access_)},
      {"signals", std::to_string(control_.signals())},
      {"memory", text("registered with ", hub_->devices().size(), hub_->devices().size() == 1 ? " rail" : " rails",
                      registration == nullptr ? ""
                      : registration->pieces() > 1
                          ? text(" in ", registration->pieces(), " regions of ", registration->piece_nbytes(), " bytes")
                          : "")},
  };
}

}  // namespace onesided::verbs
#endif
