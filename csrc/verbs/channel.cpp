#include "verbs/channel.h"

#if ONESIDED_HAS_VERBS
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "core/process.h"

namespace onesided::verbs {
namespace {

std::uint32_t random_packet_number() {
  static thread_local std::random_device source;
  return source() & 0xFFFFFF;
}

ibv_mtu to_mtu(unsigned bytes) {
  switch (bytes) {
    case 256: return IBV_MTU_256;
    case 512: return IBV_MTU_512;
    case 1024: return IBV_MTU_1024;
    case 2048: return IBV_MTU_2048;
    case 4096: return IBV_MTU_4096;
    default:
      fail(ErrorKind::Bounds, "mtu must be 256, 512, 1024, 2048, 4096, or 0 for what the ports have, not ", bytes);
  }
}

std::uint8_t offered_mtu(const Rail& rail, const Tuning& tuning) {
  const ibv_mtu active = rail.port.active_mtu;
  return static_cast<std::uint8_t>(tuning.mtu == 0 ? active : std::min(active, to_mtu(tuning.mtu)));
}

void modify(ibv_qp* pair, ibv_qp_attr& attr, int mask, const char* step, const std::string& port) {
  if (const int error = api().modify_qp(pair, &attr, mask); error != 0) {
    fail_errno(ErrorKind::Onesided, error, "queue pair of ", port, " to ", step);
  }
}

void to_init(ibv_qp* pair, const Rail& rail, unsigned access) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = rail.port.number;
  attr.qp_access_flags = access;
  modify(pair, attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT", rail.port.name());
}

// The most remote reads and atomics under way that a device takes as target and as origin.
std::uint8_t reads_answered(const Device& device) {
  return static_cast<std::uint8_t>(std::clamp(device.limits().max_qp_rd_atom, 1, 16));
}
std::uint8_t reads_asked(const Device& device) {
  return static_cast<std::uint8_t>(std::clamp(device.limits().max_qp_init_rd_atom, 1, 16));
}

void to_receive(ibv_qp* pair, const Device& device, const Rail& rail, const Tuning& tuning, const QueueAddress& peer) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = static_cast<ibv_mtu>(std::min(offered_mtu(rail, tuning), peer.mtu));
  attr.dest_qp_num = peer.number;
  attr.rq_psn = peer.first_packet;
  attr.max_dest_rd_atomic = reads_answered(device);
  attr.min_rnr_timer = 12;
  attr.ah_attr.port_num = rail.port.number;
  attr.ah_attr.sl = static_cast<std::uint8_t>(tuning.service_level);
  attr.ah_attr.dlid = peer.lid;
  const bool ethernet = rail.port.link_layer == "Ethernet";
  // On InfiniBand the route through a router needs a global header, within a subnet the LID is enough.
  if (ethernet || peer.gid.global.subnet_prefix != rail.gid.value.global.subnet_prefix) {
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.dgid = peer.gid;
    attr.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(rail.gid.index);
    attr.ah_attr.grh.hop_limit = 64;
    attr.ah_attr.grh.traffic_class = static_cast<std::uint8_t>(tuning.traffic_class);
  }
  modify(pair, attr,
         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
             IBV_QP_MIN_RNR_TIMER,
         "RTR", rail.port.name());
}

QueueAddress address_of(const ibv_qp* pair, const Device& device, const Rail& rail, const Tuning& tuning) {
  return {rail.gid.value, rail.port.lid,          offered_mtu(rail, tuning),
          pair->qp_num,   random_packet_number(), reads_answered(device)};
}

[[noreturn]] void fail_queue(const char* what, const std::string& device, const ibv_device_attr& limits) {
  if (errno == EMFILE || errno == ENFILE) {
    fail_errno(ErrorKind::Onesided, errno, what, " cannot be made on ", device,
               ": no descriptors are left (RLIMIT_NOFILE: raise it with ulimit -n)");
  }
  fail_errno(ErrorKind::Onesided, errno, what, " cannot be made on ", device, " (max_qp ", limits.max_qp,
             ", max_qp_wr ", limits.max_qp_wr, ", max_cqe ", limits.max_cqe, "; RLIMIT_MEMLOCK counts, too)");
}

// What a completion with an error means to the user of this library.
ErrorKind kind_of(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_OP_ERR: return ErrorKind::RemoteAccess;
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_LEN_ERR: return ErrorKind::Registration;
    default: return ErrorKind::ConnectionLost;
  }
}

const char* likely_cause(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_REM_ACCESS_ERR: return "the memory was closed there, or does not permit this";
    case IBV_WC_REM_INV_REQ_ERR: return "the peer's device does not do this operation, or not at this address";
    case IBV_WC_REM_OP_ERR: return "the peer's device could not finish it";
    case IBV_WC_LOC_PROT_ERR: return "the buffer here was freed or changed while it was in use";
    case IBV_WC_RETRY_EXC_ERR: return "no answer: the peer, its port or the network between is down";
    case IBV_WC_WR_FLUSH_ERR: return "the queue pair had failed before";
    default: return "see the device's documentation";
  }
}

}  // namespace

// ---- Responder ------------------------------------------------------------------------------------------------------

Responder::Responder(std::shared_ptr<Device> device, const Rail& rail, const Tuning& tuning)
    : device_(std::move(device)), rail_(rail), tuning_(tuning) {
  queue_ = api().create_cq(device_->context(), 1, nullptr, nullptr, 0);
  if (queue_ == nullptr) fail_queue("a completion queue", device_->name(), device_->limits());
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = queue_;
  init.qp_type = IBV_QPT_RC;
  init.cap.max_send_wr = init.cap.max_recv_wr = init.cap.max_send_sge = init.cap.max_recv_sge = 1;
  pair_ = api().create_qp(device_->pd(), &init);
  if (pair_ == nullptr) {
    const int error = errno;
    api().destroy_cq(queue_);
    errno = error;
    fail_queue("a queue pair", device_->name(), device_->limits());
  }
  address_ = address_of(pair_, *device_, rail_, tuning_);
}

Responder::~Responder() {
  api().destroy_qp(pair_);
  api().destroy_cq(queue_);
}

void Responder::accept(const QueueAddress& peer) {
  to_init(pair_, rail_, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
  to_receive(pair_, *device_, rail_, tuning_, peer);
}

// ---- Making and connecting ------------------------------------------------------------------------------------------

Channel::Channel(std::vector<LanePlan> plans, const Tuning& tuning, std::string peer, std::uint32_t generation)
    : peer_(std::move(peer)), generation_(generation), tuning_(tuning) {
  longest_message_ = kLongestPart;
  depth_ = std::max(tuning.depth, 8u);
  for (const LanePlan& plan : plans) {
    // Two more than are counted, for the marker that end() posts behind everything.
    const int most = std::min(plan.device->limits().max_qp_wr, plan.device->limits().max_cqe - 1) - 2;
    depth_ = std::min(depth_, static_cast<std::uint32_t>(std::max(most, 8)));
  }
  try {
    for (LanePlan& plan : plans) {
      lanes_.push_back(std::make_unique<Lane>());
      lanes_.back()->plan = std::move(plan);
      make(*lanes_.back());
    }
    const std::size_t nbytes = std::size_t{kRing + kSlots} * kStaged;
    void* const staging = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (staging == MAP_FAILED) fail_errno(ErrorKind::Registration, errno, "no memory for the staging buffers");
    staging_ = static_cast<char*>(staging);
    std::vector<std::shared_ptr<Device>> rails;
    for (const auto& lane : lanes_) {
      rails.resize(std::max(rails.size(), lane->plan.local_rail + 1));
      rails[lane->plan.local_rail] = lane->plan.device;
    }
    for (auto& rail : rails) rail = rail == nullptr ? lanes_[0]->plan.device : rail;
    HostMemory memory(staging_);
    staging_keys_ = std::make_unique<Registration>(rails, memory, reinterpret_cast<std::uint64_t>(staging_), nbytes,
                                                   IBV_ACCESS_LOCAL_WRITE);
  } catch (...) {
    destroy_queues();
    if (staging_ != nullptr) ::munmap(staging_, std::size_t{kRing + kSlots} * kStaged);
    throw;
  }
  for (unsigned slot = 1; slot < kSlots; ++slot) free_slots_.push_back(slot);
}

void Channel::make(Lane& lane) {
  const Device& device = *lane.plan.device;
  lane.events = api().create_comp_channel(device.context());
  if (lane.events == nullptr) fail_queue("a completion channel", device.name(), device.limits());
  ::fcntl(lane.events->fd, F_SETFL, ::fcntl(lane.events->fd, F_GETFL) | O_NONBLOCK);
  // All that can complete at once: every request that is under way, if it fails.
  lane.queue = api().create_cq(device.context(), static_cast<int>(depth_ + 2), nullptr, lane.events, 0);
  if (lane.queue == nullptr) fail_queue("a completion queue", device.name(), device.limits());
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = lane.queue;
  init.qp_type = IBV_QPT_RC;
  init.cap.max_send_wr = depth_ + 2;
  init.cap.max_recv_wr = init.cap.max_send_sge = init.cap.max_recv_sge = 1;
  init.cap.max_inline_data = 512;
  // There is no way to ask for the most: fewer bytes are tried until the device takes it.
  for (; (lane.pair = api().create_qp(device.pd(), &init)) == nullptr; init.cap.max_inline_data /= 2) {
    if (init.cap.max_inline_data == 0) fail_queue("a queue pair", device.name(), device.limits());
    if (init.cap.max_inline_data < 32) init.cap.max_inline_data = 0;
    init.cap.max_send_wr = depth_ + 2;
  }
  lane.inline_nbytes = std::min<unsigned>(init.cap.max_inline_data, kStaged);
  ibv_port_attr port{};
  if (api().query_port(device.context(), lane.plan.rail.port.number, &port) == 0 && port.max_msg_sz != 0) {
    longest_message_ = std::min(longest_message_, port.max_msg_sz);
  }
  lane.made_pair = lane.pair;
  lane.made_queue = lane.queue;
  lane.address = address_of(lane.pair, device, lane.plan.rail, tuning_);
  to_init(lane.pair, lane.plan.rail, 0);
}

std::vector<QueueAddress> Channel::addresses() const {
  std::vector<QueueAddress> addresses;
  for (const auto& lane : lanes_) addresses.push_back(lane->address);
  return addresses;
}

void Channel::connect(const std::vector<QueueAddress>& peers) {
  if (peers.size() != lanes_.size()) {
    fail(ErrorKind::ConnectionLost, "connect: ", peer_, " answered with ", peers.size(), " queue pairs for ",
         lanes_.size());
  }
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    Lane& lane = *lanes_[i];
    to_receive(lane.pair, *lane.plan.device, lane.plan.rail, tuning_, peers[i]);
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = static_cast<std::uint8_t>(tuning_.timeout);
    attr.retry_cnt = static_cast<std::uint8_t>(tuning_.retries);
    attr.rnr_retry = 6;
    attr.sq_psn = lane.address.first_packet;
    attr.max_rd_atomic = std::min(reads_asked(*lane.plan.device), std::max<std::uint8_t>(peers[i].reads, 1));
    modify(
        lane.pair, attr,
        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
        "RTS", lane.plan.rail.port.name());
  }
}

void Channel::destroy_queues() {
  for (const auto& lane : lanes_) {
    if (lane->pair != nullptr) api().destroy_qp(lane->pair);
    if (lane->queue != nullptr) {
      if (lane->unacknowledged != 0) api().ack_cq_events(lane->queue, lane->unacknowledged);
      api().destroy_cq(lane->queue);
    }
    if (lane->events != nullptr) api().destroy_comp_channel(lane->events);
    lane->pair = nullptr;
    lane->queue = nullptr;
    lane->events = nullptr;
  }
}

Channel::~Channel() {
  end(ErrorKind::StaleHandle, "the connection was closed here");
  staging_keys_ = nullptr;
  ::munmap(staging_, std::size_t{kRing + kSlots} * kStaged);
}

// ---- Posting --------------------------------------------------------------------------------------------------------

// With post_lock_ held, and held again when it returns or throws. This and post() are on the path of every put: what is
// rare is apart.
[[gnu::always_inline]] inline void Channel::make_room(Lane& lane, unsigned requests, const Deadline& deadline) {
  // Looked now and then, so that an error shows before the queue is full.
  if (lane.posted % 16 == 0 || failed_.load(std::memory_order_relaxed) ||
      lane.posted + requests - lane.completed.load(std::memory_order_acquire) > depth_) [[unlikely]] {
    wait_for_room(lane, requests, deadline);
  }
}

void Channel::wait_for_room(Lane& lane, unsigned requests, const Deadline& deadline) {
  if (lane.posted % 16 == 0) poll();
  while (lane.posted + requests - lane.completed.load(std::memory_order_acquire) > depth_) {
    Ticket ticket{};
    std::size_t index = 0;
    while (lanes_[index].get() != &lane) ++index;
    // Half of the queue, so that not every request waits for the one before it. What is waited for has asked for a
    // completion: every eighth of the queue does.
    ticket[index] = std::min(lane.asked, lane.completed.load() + depth_ / 2);
    bool in_time;
    {
      const PostLock::Aside aside(post_lock_);
      in_time = await(ticket, deadline);
    }
    if (ended()) fail_ended("put or get");
    if (!in_time) {
      fail(ErrorKind::DeadlineExceeded, "no room for another operation: ", depth_, " are under way to ", peer_);
    }
  }
  if (failed_.load(std::memory_order_relaxed)) {
    if (!ended()) {
      const PostLock::Aside aside(post_lock_);
      end(kind_, cause());
    }
    fail_ended("put or get");
  }
}

void Channel::fail_ended(const char* what) const {
  std::lock_guard lock(cause_mutex_);
  fail(kind_, what, " to ", peer_, ": ", cause_);
}

// With post_lock_ held and room made.
[[gnu::always_inline]] inline std::uint64_t Channel::post(Lane& lane, ibv_send_wr* first, ibv_send_wr* last,
                                                          unsigned requests, std::uint64_t nbytes, bool signaled) {
  const std::uint64_t number = lane.posted + requests;
  last->wr_id = number;
  last->next = nullptr;
  if (signaled || number - lane.asked >= depth_ / 8) {
    last->send_flags |= IBV_SEND_SIGNALED;
    lane.asked = number;
  }
  ibv_send_wr* refused = nullptr;
  const int error = ::ibv_post_send(lane.pair, first, &refused);
  // If it was refused, the first of two may be under way: its number is passed over, and the channel ends.
  lane.posted = number;
  if (error != 0) [[unlikely]]
    fail_refused(lane, error);
  lane.bytes.store(lane.bytes.load(std::memory_order_relaxed) + nbytes, std::memory_order_relaxed);
  return number;
}

void Channel::fail_refused(const Lane& lane, int error) {
  {
    std::lock_guard lock(cause_mutex_);
    if (!failed_.load()) {
      kind_ = ErrorKind::ConnectionLost;
      cause_ = text("the device ", lane.plan.rail.port.name(), " refused a work request: ", std::strerror(error));
    }
  }
  failed_.store(true, std::memory_order_release);
  fail(ErrorKind::ConnectionLost, "the device ", lane.plan.rail.port.name(), " refused a work request to ", peer_, ": ",
       std::strerror(error));
}

namespace {

void write_to(ibv_send_wr& request, ibv_sge& piece, std::uint64_t address, std::uint32_t key) {
  request.next = nullptr;
  request.sg_list = &piece;
  request.num_sge = piece.length == 0 ? 0 : 1;
  request.opcode = IBV_WR_RDMA_WRITE;
  request.send_flags = 0;
  request.wr.rdma.remote_addr = address;
  request.wr.rdma.rkey = key;
}

void add_to(ibv_send_wr& request, ibv_sge& result, const Channel::Word& word) {
  request.next = nullptr;
  request.sg_list = &result;
  request.num_sge = 1;
  request.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
  request.send_flags = 0;
  request.wr.atomic.remote_addr = word.address;
  request.wr.atomic.rkey = word.key;
  request.wr.atomic.compare_add = word.add;
}

}  // namespace

// The results of signals all land in slot 0, which is never given away: nobody looks at them.
std::uint64_t Channel::post_with_signal(std::size_t index, ibv_send_wr& request, const Word& signal,
                                        std::uint64_t nbytes, bool signaled) {
  Lane& lane = *lanes_[index];
  char* const landing = slot_data(0);
  ibv_send_wr then;
  ibv_sge result{reinterpret_cast<std::uint64_t>(landing), sizeof(std::uint64_t), staging_key(index, landing)};
  add_to(then, result, signal);
  request.wr_id = lane.posted + 1;
  request.next = &then;
  return post(lane, &request, &then, 2, nbytes, signaled);
}

[[gnu::always_inline]] inline std::uint64_t Channel::write_inline(std::size_t index, const void* source,
                                                                  std::uint32_t nbytes, std::uint64_t address,
                                                                  std::uint32_t key, const Word* signal, bool signaled,
                                                                  const Deadline& deadline) {
  Lane& lane = *lanes_[index];
  if (nbytes > lane.inline_nbytes)
    return write_from_ring(index, source, nbytes, address, key, signal, signaled, deadline);
  std::lock_guard lock(post_lock_);
  make_room(lane, signal != nullptr ? 2 : 1, deadline);
  ibv_send_wr request;
  ibv_sge piece{reinterpret_cast<std::uint64_t>(source), nbytes, 0};
  write_to(request, piece, address, key);
  request.send_flags = IBV_SEND_INLINE;
  if (signal != nullptr) return post_with_signal(index, request, *signal, nbytes, signaled);
  return post(lane, &request, &request, 1, nbytes, signaled);
}

std::uint64_t Channel::write_staged(std::size_t lane, const void* source, std::uint32_t nbytes, std::uint64_t address,
                                    std::uint32_t key, const Word* signal, bool signaled, const Deadline& deadline) {
  return write_inline(lane, source, nbytes, address, key, signal, signaled, deadline);
}

std::uint64_t Channel::write_small(const void* source, std::uint32_t nbytes, std::uint64_t address, std::uint32_t key,
                                   const Deadline& deadline) {
  return write_inline(0, source, nbytes, address, key, nullptr, false, deadline);
}

std::uint64_t Channel::write_from_ring(std::size_t index, const void* source, std::uint32_t nbytes,
                                       std::uint64_t address, std::uint32_t key, const Word* signal, bool signaled,
                                       const Deadline& deadline) {
  Lane& lane = *lanes_[index];
  std::unique_lock lock(post_lock_);
  make_room(lane, signal != nullptr ? 2 : 1, deadline);
  const unsigned slot = ring_next_;
  // The write that used this piece before must be over.
  Ticket before{};
  before[ring_lane_[slot]] = ring_used_[slot];
  if (!complete(before)) {
    // What is waited for may not have asked for a completion: a marker behind it does.
    Lane& used = *lanes_[ring_lane_[slot]];
    if (used.asked < ring_used_[slot]) {
      make_room(used, 1, deadline);
      ibv_send_wr nothing;
      ibv_sge none{};
      write_to(nothing, none, 0, 0);
      post(used, &nothing, &nothing, 1, 0, true);
    }
    lock.unlock();
    const bool in_time = await(before, deadline);
    lock.lock();
    if (ended()) fail_ended("put");
    if (!in_time) fail(ErrorKind::DeadlineExceeded, "put to ", peer_, ": the deadline passed before there was room");
    lock.unlock();
    return write_from_ring(index, source, nbytes, address, key, signal, signaled, deadline);
  }
  ring_next_ = (slot + 1) % kRing;
  char* const staged = staging_ + std::size_t{slot} * kStaged;
  std::memcpy(staged, source, nbytes);
  ring_lane_[slot] = static_cast<std::uint8_t>(index);
  ring_used_[slot] = lane.posted + 1;
  ibv_send_wr request;
  ibv_sge piece{reinterpret_cast<std::uint64_t>(staged), nbytes, staging_key(index, staged)};
  write_to(request, piece, address, key);
  if (signal != nullptr) return post_with_signal(index, request, *signal, nbytes, signaled);
  return post(lane, &request, &request, 1, nbytes, signaled);
}

std::uint64_t Channel::write(std::size_t index, const void* source, std::uint32_t nbytes, std::uint32_t lkey,
                             std::uint64_t address, std::uint32_t key, const Word* signal, bool signaled,
                             const Deadline& deadline) {
  Lane& lane = *lanes_[index];
  std::lock_guard lock(post_lock_);
  make_room(lane, signal != nullptr ? 2 : 1, deadline);
  ibv_send_wr request;
  ibv_sge piece{reinterpret_cast<std::uint64_t>(source), nbytes, lkey};
  write_to(request, piece, address, key);
  if (signal != nullptr) return post_with_signal(index, request, *signal, nbytes, signaled);
  return post(lane, &request, &request, 1, nbytes, signaled);
}

std::uint64_t Channel::read(std::size_t index, void* destination, std::uint32_t nbytes, std::uint32_t lkey,
                            std::uint64_t address, std::uint32_t key, bool signaled, const Deadline& deadline) {
  Lane& lane = *lanes_[index];
  std::lock_guard lock(post_lock_);
  make_room(lane, 1, deadline);
  ibv_send_wr request;
  ibv_sge piece{reinterpret_cast<std::uint64_t>(destination), nbytes, lkey};
  write_to(request, piece, address, key);
  request.opcode = IBV_WR_RDMA_READ;
  return post(lane, &request, &request, 1, nbytes, signaled);
}

std::uint64_t Channel::signal(std::size_t index, const Word& word, bool signaled, const Deadline& deadline) {
  Lane& lane = *lanes_[index];
  std::lock_guard lock(post_lock_);
  make_room(lane, 1, deadline);
  ibv_send_wr request;
  char* const landing = slot_data(0);
  ibv_sge result{reinterpret_cast<std::uint64_t>(landing), sizeof(std::uint64_t), staging_key(index, landing)};
  add_to(request, result, word);
  return post(lane, &request, &request, 1, 0, signaled);
}

std::uint64_t Channel::fetch_add(std::size_t index, unsigned slot, const Word& word, const Deadline& deadline) {
  Lane& lane = *lanes_[index];
  std::lock_guard lock(post_lock_);
  make_room(lane, 1, deadline);
  ibv_send_wr request;
  char* const landing = slot_data(slot);
  ibv_sge result{reinterpret_cast<std::uint64_t>(landing), sizeof(std::uint64_t), staging_key(index, landing)};
  add_to(request, result, word);
  return post(lane, &request, &request, 1, 0, true);
}

std::uint64_t Channel::compare_swap(std::size_t index, unsigned slot, std::uint64_t address, std::uint32_t key,
                                    std::uint64_t expected, std::uint64_t desired, const Deadline& deadline) {
  Lane& lane = *lanes_[index];
  std::lock_guard lock(post_lock_);
  make_room(lane, 1, deadline);
  ibv_send_wr request;
  char* const landing = slot_data(slot);
  ibv_sge result{reinterpret_cast<std::uint64_t>(landing), sizeof(std::uint64_t), staging_key(index, landing)};
  add_to(request, result, {address, key, expected});
  request.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
  request.wr.atomic.swap = desired;
  return post(lane, &request, &request, 1, 0, true);
}

std::uint64_t Channel::marker(std::size_t index, const Deadline& deadline) {
  Lane& lane = *lanes_[index];
  {
    std::lock_guard lock(post_lock_);
    if (lane.asked == lane.posted) return lane.posted;
  }
  return probe(index, deadline);
}

std::uint64_t Channel::probe(std::size_t index, const Deadline& deadline) {
  Lane& lane = *lanes_[index];
  std::lock_guard lock(post_lock_);
  make_room(lane, 1, deadline);
  ibv_send_wr request;
  ibv_sge none{};
  write_to(request, none, 0, 0);
  return post(lane, &request, &request, 1, 0, true);
}

Channel::Slot::Slot(Channel& channel, const Deadline& deadline) : channel_(channel) {
  const auto take = [&] {
    std::lock_guard lock(channel.slots_mutex_);
    if (channel.free_slots_.empty()) return false;
    index_ = channel.free_slots_.back();
    channel.free_slots_.pop_back();
    return true;
  };
  if (!channel.slot_freed_.await(take, deadline)) {
    fail(ErrorKind::DeadlineExceeded, "the deadline passed: ", kSlots - 1, " reads and atomics are under way to ",
         channel.peer_);
  }
}

Channel::Slot::~Slot() {
  {
    std::lock_guard lock(channel_.slots_mutex_);
    channel_.free_slots_.push_back(index_);
  }
  channel_.slot_freed_.notify();
}

// ---- Completion -----------------------------------------------------------------------------------------------------

bool Channel::await(const Ticket& ticket, const Deadline& deadline) {
  const auto over = [&] { return complete(ticket) || ended(); };
  const auto look = [&] {
    if (complete(ticket)) return true;
    poll();
    end_if_failed();
    return over();
  };
  if (look()) return true;
  BlockingHook::before_waiting();
  if (const auto spin = useful_spin(kSpin); spin.count() > 0) {
    const auto until = Deadline::Clock::now() + deadline.left(spin);
    while (Deadline::Clock::now() < until) {
      for (int round = 0; round < 8; ++round) {
        if (look()) return true;
        pause_cpu();
      }
    }
  }
  for (;;) {
    if (look()) return true;
    if (deadline.passed()) return false;
    const auto nap = deadline.left(kNap);
    if (std::unique_lock sleeper(sleep_mutex_, std::try_to_lock); sleeper) {
      // Armed first, then looked at: what comes between is not missed. An error is only seen here: end() takes this mutex, so
      // that it is for the next look.
      arm();
      poll();
      if (!over() && !failed_.load(std::memory_order_acquire) && sleep(nap)) take_events();
      poll();
      sleeper.unlock();
      progressed_.fetch_add(1);
      progress_.notify();  // another waiter takes over
    } else {
      const std::uint64_t seen = progressed_.load();
      progress_.await([&] { return over() || progressed_.load() != seen; }, Deadline::never().at_most(nap),
                      std::chrono::nanoseconds(0));
    }
    check_interrupt();
  }
}

bool Channel::poll() {
  std::unique_lock lock(poll_mutex_, std::try_to_lock);
  if (!lock) return false;
  bool any = false;
  if (!ended()) {
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) any |= poll_lane(lane);
  }
  lock.unlock();
  if (any) {
    if (kept_count_.load(std::memory_order_relaxed) != 0) {
      std::vector<Kept> over;
      let_go(over);
    }
    progress_.notify();
  }
  return true;
}

// With poll_mutex_ held.
bool Channel::poll_lane(std::size_t index) {
  Lane& lane = *lanes_[index];
  if (lane.queue == nullptr) return false;
  ibv_wc completions[kBatch];
  const int count = ::ibv_poll_cq(lane.queue, kBatch, completions);
  std::uint64_t last = 0;
  for (int i = 0; i < count; ++i) {
    if (completions[i].status == IBV_WC_SUCCESS) {
      last = completions[i].wr_id;
    } else {
      if (last != 0) lane.completed.store(last, std::memory_order_seq_cst);
      last = 0;
      on_error(index, completions[i]);
    }
  }
  if (last != 0 && !lane.flushing) lane.completed.store(last, std::memory_order_seq_cst);
  return count > 0;
}

// With poll_mutex_ held. All before the first that fails on a lane has succeeded, whether it asked for a completion or not.
void Channel::on_error(std::size_t index, const ibv_wc& completion) {
  Lane& lane = *lanes_[index];
  if (completion.wr_id > 0 && completion.wr_id - 1 > lane.completed.load() && !lane.flushing) {
    lane.completed.store(completion.wr_id - 1, std::memory_order_seq_cst);
  }
  lane.flushing = true;
  if (completion.status == IBV_WC_WR_FLUSH_ERR && failed_.load()) return;
  std::lock_guard lock(cause_mutex_);
  if (failed_.load()) return;
  kind_ = kind_of(completion.status);
  cause_ = text(api().wc_status_str(completion.status), " on ", lane.plan.rail.port.name(), " (vendor code ",
                completion.vendor_err, "): ", likely_cause(completion.status));
  failed_lane_ = index;
  failed_number_ = completion.wr_id;
  failed_.store(true, std::memory_order_release);
}

void Channel::arm() {
  for (const auto& lane : lanes_) {
    if (lane->queue != nullptr) ::ibv_req_notify_cq(lane->queue, 0);
  }
}

void Channel::take_events() {
  for (const auto& lane : lanes_) {
    ibv_cq* queue = nullptr;
    void* cookie = nullptr;
    while (lane->events != nullptr && api().get_cq_event(lane->events, &queue, &cookie) == 0) {
      // Acknowledging takes a lock in the library: many at once.
      if (++lane->unacknowledged >= 64) {
        api().ack_cq_events(lane->queue, lane->unacknowledged);
        lane->unacknowledged = 0;
      }
    }
  }
}

bool Channel::sleep(std::chrono::nanoseconds at_most) {
  pollfd watched[kMostLanes];
  nfds_t count = 0;
  for (const auto& lane : lanes_) {
    if (lane->events != nullptr) watched[count++] = {lane->events->fd, POLLIN, 0};
  }
  const timespec time{static_cast<time_t>(at_most.count() / 1'000'000'000),
                      static_cast<long>(at_most.count() % 1'000'000'000)};
  return ::ppoll(watched, count, &time, nullptr) > 0;
}

// ---- The end --------------------------------------------------------------------------------------------------------

void Channel::end(ErrorKind kind, const std::string& cause, bool completions_come) {
  BlockingHook::before_waiting();
  std::lock_guard ending(end_mutex_);
  if (ended()) return;
  {
    std::lock_guard lock(cause_mutex_);
    if (!failed_.load()) {
      kind_ = kind;
      cause_ = cause;
    }
  }
  failed_.store(true, std::memory_order_seq_cst);
  {
    // Nothing is posted from here on, and nobody sleeps on what is taken apart.
    std::scoped_lock all(post_lock_, sleep_mutex_, poll_mutex_);
    for (const auto& lane : lanes_) {
      if (lane->pair == nullptr) continue;
      ibv_qp_attr attr{};
      attr.qp_state = IBV_QPS_ERR;
      api().modify_qp(lane->pair, &attr, IBV_QP_STATE);
    }
    // What was under way is flushed in order. A marker behind it tells when that is over, and so what had succeeded before.
    const Deadline patience = Deadline::after(completions_come ? 2 : 0);
    for (std::size_t index = 0; index < lanes_.size(); ++index) {
      Lane& lane = *lanes_[index];
      if (lane.pair == nullptr || lane.posted == lane.completed.load()) continue;
      ibv_send_wr request;
      ibv_sge none{};
      write_to(request, none, 0, 0);
      request.send_flags = IBV_SEND_SIGNALED;
      request.wr_id = lane.posted + 1;
      ibv_send_wr* refused = nullptr;
      if (::ibv_post_send(lane.pair, &request, &refused) != 0) continue;
      do {
        ibv_wc completions[kBatch];
        const int count = ::ibv_poll_cq(lane.queue, kBatch, completions);
        for (int i = 0; i < count; ++i) {
          if (completions[i].status == IBV_WC_SUCCESS) {
            if (!lane.flushing) lane.completed.store(completions[i].wr_id, std::memory_order_seq_cst);
          } else {
            on_error(index, completions[i]);
          }
          lane.flushed = lane.flushed || completions[i].wr_id > lane.posted;
        }
        if (count < 0) break;
        if (count == 0) yield_cpu();
      } while (!lane.flushed && !patience.passed());
    }
    // A queue pair that is gone reads and writes nothing, whether its flush was seen or not.
    destroy_queues();
    staging_keys_->release();
    ended_.store(true, std::memory_order_seq_cst);
  }
  std::vector<Kept> over;
  let_go(over);
  progressed_.fetch_add(1);
  progress_.notify();
}

std::string Channel::cause() const {
  std::lock_guard lock(cause_mutex_);
  return cause_;
}

Error Channel::error_for(const char* what, const Ticket& first, const Ticket& last) const {
  std::lock_guard lock(cause_mutex_);
  const bool own = !failed_lane_ || (first[*failed_lane_] <= failed_number_ && failed_number_ <= last[*failed_lane_]);
  if (own) return Error(kind_, text(what, " to ", peer_, ": ", cause_));
  return Error(ErrorKind::ConnectionLost,
               text(what, " to ", peer_, " was flushed, because another operation to it had failed: ", cause_));
}

bool Channel::uses(const ibv_qp* pair) const {
  return std::any_of(lanes_.begin(), lanes_.end(), [&](const auto& lane) { return lane->made_pair == pair; });
}

bool Channel::uses(const ibv_cq* queue) const {
  return std::any_of(lanes_.begin(), lanes_.end(), [&](const auto& lane) { return lane->made_queue == queue; });
}

bool Channel::uses(const ibv_context* context, int port) const {
  return std::any_of(lanes_.begin(), lanes_.end(), [&](const auto& lane) {
    return lane->plan.device->context() == context && (port == 0 || lane->plan.rail.port.number == port);
  });
}

void Channel::keep_until(const Ticket& ticket, Keepalive keep, std::shared_ptr<void> registration) {
  if (keep == nullptr && registration == nullptr) return;
  std::vector<Kept> over;
  {
    std::lock_guard lock(kept_mutex_);
    kept_.push_back({ticket, std::move(keep), std::move(registration)});
    kept_count_.fetch_add(1);
  }
  if (ended()) let_go(over);
}

// Takes out what is over; it is destroyed without a lock.
void Channel::let_go(std::vector<Kept>& over) {
  std::lock_guard lock(kept_mutex_);
  const bool all = ended();
  for (auto kept = kept_.begin(); kept != kept_.end();) {
    if (!all && !complete(kept->ticket)) {
      if (lanes_.size() == 1) break;  // nor are those behind it
      ++kept;
      continue;
    }
    over.push_back(std::move(*kept));
    kept = kept_.erase(kept);
    kept_count_.fetch_sub(1);
  }
}

}  // namespace onesided::verbs
#endif
