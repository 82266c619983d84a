#include "verbs/memory.h"

#if ONESIDED_HAS_VERBS
#include "verbs/hub.h"

namespace onesided::verbs {
namespace {

// Beside the event that the owner sleeps on there is room in its cache line: 8 bytes that peers read to flush what they
// wrote. The signals come right behind, so that both are one region.
constexpr std::size_t kWordsAt = Control::kOwnersBytes + sizeof(Slot) - sizeof(std::uint64_t);

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
      keep_(std::move(keep)) {
  ControlHeader& header = control_.header();
  header.magic = ControlHeader::kMagic;
  header.signals = signals;
  char* const words = control_segment_->base() + kWordsAt;
  HostMemory word_memory(words);
  words_ = std::make_unique<Registration>(hub_->devices(), word_memory, reinterpret_cast<std::uint64_t>(words),
                                          sizeof(std::uint64_t) * (std::uint64_t{signals} + 1),
                                          access_flags(Access::ReadWrite, true));
  HostMemory memory(data_);
  registration_.store(std::make_shared<Registration>(hub_->devices(), memory, reinterpret_cast<std::uint64_t>(data_),
                                                     nbytes_, access_flags(access_, false)));
}

RdmaMemory::~RdmaMemory() {
  if (hub_->forked()) {
    new std::unique_ptr<Registration>(std::move(words_));  // the parent's: its keys are not this process's to give back
    new std::shared_ptr<Registration>(registration_.load());
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

Reach RdmaMemory::reach() const {
  Reach reach;
  const auto registration = this->registration();
  if (registration == nullptr) fail(ErrorKind::StaleHandle, "attach: this memory was closed");
  reach.nbytes = nbytes_;
  reach.access = access_;
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
  std::lock_guard lock(close_mutex_);
  if (registration_.load() == nullptr) return;
  control_.header().closed.store(1, std::memory_order_seq_cst);
  control_.event().notify();
  hub_->revoke(id_, deadline);
  hub_->withdraw(id_);
  // From here on the devices refuse every access, whoever still knows the keys.
  words_ = nullptr;
  registration_.store(nullptr);
  keep_ = nullptr;
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
