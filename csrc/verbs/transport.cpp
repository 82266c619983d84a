#include "verbs/transport.h"

#if ONESIDED_HAS_VERBS
#include "verbs/target.h"

namespace onesided::verbs {
namespace {

void check(const Tuning& tuning) {
  const auto within = [](const char* what, unsigned value, unsigned least, unsigned most) {
    if (value < least || value > most) {
      fail(ErrorKind::Bounds, what, " must lie in [", least, ", ", most, "], not ", value);
    }
  };
  within("depth", tuning.depth, 16, 32768);
  within("timeout", tuning.timeout, 1, 31);
  within("retries", tuning.retries, 0, 6);
  within("traffic_class", tuning.traffic_class, 0, 255);
  within("service_level", tuning.service_level, 0, 15);
  if (tuning.mtu != 0 && (tuning.mtu < 256 || tuning.mtu > 4096 || (tuning.mtu & (tuning.mtu - 1)) != 0)) {
    fail(ErrorKind::Bounds, "mtu must be 256, 512, 1024, 2048, 4096, or 0 for what the ports have, not ", tuning.mtu);
  }
}

void check_peers(std::uint32_t slots) {
  if (slots > Control::kMostSlots) {
    fail(ErrorKind::Bounds, slots, " peers are too many for one memory: ", Control::kMostSlots, " at most");
  }
}

std::shared_ptr<Hub> make_hub(const RdmaOptions& options) {
  check(options.tuning);
  return std::make_shared<Hub>(choose_rails(survey(), options.rails), options.tuning, options.address);
}

}  // namespace

std::string RdmaTransport::unsupported_reason(const std::vector<std::string>& nics) {
  if (std::string reason = unavailable(); !reason.empty()) return reason;
  try {
    choose_rails(survey(), {.nics = nics, .numa_node = -1, .pci_path = {}});
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

RdmaTransport::RdmaTransport(const RdmaOptions& options) : hub_(make_hub(options)) {
  hub_->start();
}

RdmaTransport::~RdmaTransport() {
  if (hub_->forked()) {
    new std::shared_ptr<Hub>(hub_);  // its thread does not exist here, and its lists may be half changed
    new std::shared_ptr<RdmaConnection>(std::move(loop_));
    return;
  }
  InterruptScope undisturbed(nullptr);
  try {
    close(Deadline::after(5));
  } catch (const std::exception&) {
    hub_->stop();  // operations were cancelled: each Work carries its own error
  }
}

std::shared_ptr<Memory> RdmaTransport::allocate(std::uint64_t nbytes, Access access, std::uint32_t signals,
                                                std::uint32_t slots) {
  hub_->check_usable("this transport");
  check_peers(slots);
  auto segment = Segment::create(nbytes, "onesided-memory");
  void* const data = segment->base();
  return make_memory(data, nbytes, access, signals, slots, std::move(segment), nullptr);
}

std::shared_ptr<Memory> RdmaTransport::register_memory(void* data, std::uint64_t nbytes, Access access,
                                                       std::uint32_t signals, std::uint32_t slots, Keepalive keep) {
  hub_->check_usable("this transport");
  check_peers(slots);
  return make_memory(data, nbytes, access, signals, slots, Segment::containing(data, nbytes), std::move(keep));
}

std::shared_ptr<Memory> RdmaTransport::make_memory(void* data, std::uint64_t nbytes, Access access,
                                                   std::uint32_t signals, std::uint32_t slots,
                                                   std::shared_ptr<Segment> segment, Keepalive keep) {
  auto memory = std::make_shared<RdmaMemory>(hub_, hub_->next_memory_id(), data, nbytes, access, signals, slots,
                                             std::move(segment), std::move(keep));
  hub_->list(memory.get());
  hub_->counters()->add(Count::Registrations);
  return memory;
}

std::shared_ptr<Target> RdmaTransport::loop_back(const std::shared_ptr<Memory>& memory, const std::string& name) {
  hub_->check_usable("this transport");
  const auto own = std::dynamic_pointer_cast<RdmaMemory>(memory);
  if (own == nullptr || own->hub() != hub_.get()) fail(ErrorKind::Handle, "this memory belongs to another transport");
  std::lock_guard lock(loop_mutex_);
  // Through the device as for everybody else: the CPU's own atomics would not be atomic against the device's.
  if (loop_ == nullptr || loop_->peer().lost()) {
    loop_ = RdmaConnection::open(hub_, hub_->bind(false, Hub::kOwner), name, Deadline::after(30));
  }
  return loop_->attach(own->remote(), Deadline::after(30));
}

Endpoint RdmaTransport::bind(bool shared, const std::string& peer) {
  hub_->check_usable("this transport");
  return hub_->bind(shared, peer);
}

std::shared_ptr<Connection> RdmaTransport::connect(const Endpoint& peer, const std::string& name,
                                                   const Deadline& deadline) {
  hub_->check_usable("this transport");
  return RdmaConnection::open(hub_, peer, name, deadline);
}

void RdmaTransport::close(const Deadline& deadline) {
  if (hub_->forked() || hub_->stopped()) return;
  hub_->retire();
  FirstFailure failure;
  for (const auto& connection : hub_->connections()) failure.attempt([&] { connection->close(deadline); });
  for (const auto& memory : hub_->memories()) failure.attempt([&] { memory->close(deadline); });
  hub_->stop();
  failure.rethrow();
}

Description RdmaTransport::describe() const {
  check_not_forked(hub_->made_in(), "this transport");
  Description rows{
      {"kind", "rdma"},
      {"state", hub_->stopped() ? "closed" : "open"},
      {"address", hub_->address()},
      {"memories", std::to_string(hub_->memories().size())},
      {"connections", std::to_string(hub_->connections().size())},
  };
  for (std::size_t rail = 0; rail < hub_->rails().size(); ++rail) {
    const Rail& chosen = hub_->rails()[rail];
    rows.emplace_back(text("rail ", rail), text(chosen.port.name(), ", GID ", chosen.gid.index, " ",
                                                chosen.gid.address(), " (", chosen.gid.type_name(), "): ", chosen.why));
  }
  return rows;
}

}  // namespace onesided::verbs
#endif
