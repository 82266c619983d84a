#include "shm/transport.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/process.h"

namespace onesided::shm {

std::string ShmTransport::unsupported_reason() {
  const Fd probe(::memfd_create("onesided-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  return probe ? "" : text("memfd_create: ", std::strerror(errno));
}

ShmTransport::ShmTransport() : hub_(std::make_shared<Hub>()) {
  hub_->start();
}

ShmTransport::~ShmTransport() {
  if (hub_->forked()) {
    new std::shared_ptr<Hub>(
        hub_);  // never destroyed in a child, where its thread does not exist and its lists may be half changed
    return;
  }
  InterruptScope undisturbed(nullptr);
  try {
    close(Deadline::after(5));
  } catch (const std::exception&) {
    // A memory that a stopped peer is writing to: it stays registered until the process ends (see ~ShmMemory).
    hub_->stop();
  }
}

std::shared_ptr<Memory> ShmTransport::allocate(std::uint64_t nbytes, Access access, std::uint32_t signals,
                                               std::uint32_t slots) {
  hub_->check_usable("this transport");
  auto segment = Segment::create(nbytes, "onesided-memory");
  void* data = segment->base();
  return make_memory(data, nbytes, access, signals, slots, std::move(segment), nullptr);
}

std::shared_ptr<Memory> ShmTransport::register_memory(void* data, std::uint64_t nbytes, Access access,
                                                      std::uint32_t signals, std::uint32_t slots, Keepalive keep) {
  hub_->check_usable("this transport");
  // Memory that came from allocate() is recognised, whatever view of it is given.
  return make_memory(data, nbytes, access, signals, slots, Segment::containing(data, nbytes), std::move(keep));
}

std::shared_ptr<Memory> ShmTransport::make_memory(void* data, std::uint64_t nbytes, Access access,
                                                  std::uint32_t signals, std::uint32_t slots,
                                                  std::shared_ptr<Segment> segment, Keepalive keep) {
  auto memory = std::make_shared<ShmMemory>(hub_, hub_->next_memory_id(), data, nbytes, access, signals, slots,
                                            std::move(segment), std::move(keep));
  hub_->list(memory.get());
  hub_->counters()->add(Count::Registrations);
  return memory;
}

std::shared_ptr<Target> ShmTransport::loop_back(const std::shared_ptr<Memory>& memory, const std::string& name) {
  hub_->check_usable("this transport");
  auto own = std::dynamic_pointer_cast<ShmMemory>(memory);
  if (own == nullptr || own->hub() != hub_) fail(ErrorKind::Handle, "this memory belongs to another transport");
  ShmTarget::Parts parts;
  parts.peer = std::make_shared<PeerState>(name);
  parts.counters = counters_for("shm", name);
  parts.made_in = fork_generation();
  parts.access = own->access();
  parts.nbytes = own->nbytes();
  parts.mapped = static_cast<char*>(own->data());
  parts.shareable = own->segment() != nullptr;
  parts.control = own->control();
  {
    std::lock_guard lock(hub_->mutex());
    parts.slot = own->take_slot(ShmMemory::kOwner);
  }
  parts.keep = {own};
  parts.detach = [hub = hub_, memory = own.get(), slot = parts.slot] {
    std::lock_guard lock(hub->mutex());
    memory->free_slot(slot, ShmMemory::kOwner);
  };
  return std::make_shared<ShmTarget>(std::move(parts));
}

Endpoint ShmTransport::bind(bool shared, const std::string& peer) {
  hub_->check_usable("this transport");
  return hub_->bind(shared, peer);
}

std::shared_ptr<Connection> ShmTransport::connect(const Endpoint& peer, const std::string& name,
                                                  const Deadline& deadline) {
  hub_->check_usable("this transport");
  return ShmConnection::open(hub_, peer, name, deadline);
}

void ShmTransport::close(const Deadline& deadline) {
  if (hub_->forked() || hub_->stopped()) return;
  hub_->retire();
  FirstFailure failure;
  for (const auto& connection : hub_->connections()) failure.attempt([&] { connection->close(deadline); });
  bool all_closed = true;
  for (const auto& memory : hub_->memories()) all_closed &= failure.attempt([&] { memory->close(deadline); });
  if (all_closed) hub_->stop();
  failure.rethrow();
}

Description ShmTransport::describe() const {
  check_not_forked(hub_->made_in(), "this transport");
  return {
      {"kind", "shm"},
      {"state", hub_->stopped() ? "closed" : "open"},
      {"memories", std::to_string(hub_->memories().size())},
      {"connections", std::to_string(hub_->connections().size())},
  };
}

}  // namespace onesided::shm
