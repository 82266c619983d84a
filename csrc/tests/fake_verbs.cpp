#include "tests/fake_verbs.h"

#if ONESIDED_HAS_VERBS
#include <arpa/inet.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <thread>
#include <unordered_map>

namespace onesided::tests::fake {
namespace {

// ---- The objects ---------------------------------------------------------------------------------------------------
// Locks are taken in this order: the world, the send queue of one queue pair, the receive queue of one, a completion queue,
// a completion channel, the events. What changes which objects there are, and how they are connected, holds the world alone;
// what posts and executes shares it, so that the threads of a user are not ordered by the fake more than by an adapter.

// std::shared_mutex lets readers starve a writer; threads that post without a pause would keep all others out.
class WorldLock {
 public:
  WorldLock() {
    pthread_rwlockattr_t attributes;
    ::pthread_rwlockattr_init(&attributes);
    ::pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    ::pthread_rwlock_init(&lock_, &attributes);
    ::pthread_rwlockattr_destroy(&attributes);
  }
  void lock() { ::pthread_rwlock_wrlock(&lock_); }
  void unlock() { ::pthread_rwlock_unlock(&lock_); }
  void lock_shared() { ::pthread_rwlock_rdlock(&lock_); }
  void unlock_shared() { ::pthread_rwlock_unlock(&lock_); }

 private:
  pthread_rwlock_t lock_;
};
using Alone = std::lock_guard<WorldLock>;
using Shared = std::shared_lock<WorldLock>;

// A descriptor that is readable once for each token; reading honours the user's O_NONBLOCK, taking back never waits.
class Tokens {
 public:
  Tokens() {
    int ends[2] = {-1, -1};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
    user_ = ends[0], own_ = ends[1];
  }
  ~Tokens() {
    ::close(user_);
    ::close(own_);
  }
  Tokens(const Tokens&) = delete;
  int fd() const { return user_; }
  void put() {
    const char token = 0;
    if (::send(own_, &token, 1, MSG_DONTWAIT | MSG_NOSIGNAL) != 1) std::abort();
  }
  bool take() {
    char token;
    return ::read(user_, &token, 1) == 1;
  }
  void take_back() {
    char token;
    [[maybe_unused]] const ssize_t n = ::recv(user_, &token, 1, MSG_DONTWAIT);
  }

 private:
  int user_ = -1, own_ = -1;
};

struct Context;

struct DeviceState {
  Device config;
  std::string path;
  bool listed = false;
  std::atomic<bool> fatal{false};
  std::vector<Context*> contexts;
  int mrs = 0, qps = 0, cqs = 0;
  std::uint64_t registered = 0;
  std::mutex atomics;  // see Limits::torn_atomics
  std::atomic<std::uint64_t> wrs{0}, written{0}, read{0}, atomic_ops{0};
};

// Lives as long as a list holds it or a context is open on it, as libibverbs' own.
struct Listed : ibv_device {
  std::shared_ptr<DeviceState> state;
  unsigned users = 0;
};

struct Context : ibv_context {
  std::shared_ptr<DeviceState> state;
  Tokens tokens;
  std::deque<ibv_async_event> events;
  int objects = 0;
};

struct Pd : ibv_pd {
  DeviceState* device = nullptr;
  int users = 0;
};

struct Region : ibv_mr {
  DeviceState* state = nullptr;
  std::uint64_t iova = 0;
  unsigned access = 0;
  char* memory = nullptr;
  void* mapped = nullptr;  // of a dmabuf
  std::size_t mapped_nbytes = 0;
};

struct Cq;

struct Channel : ibv_comp_channel {
  Tokens tokens;
  std::mutex mutex;
  std::vector<Cq*> cqs;
};

struct Qp;

struct Cqe {
  ibv_wc wc;
  Qp* qp;
  bool is_receive;
  std::uint64_t upto;  // polling it gives the queue's entries before this one back
};

enum : int { kUnarmed, kArmedSolicited, kArmed };

struct Cq : ibv_cq {
  DeviceState* state = nullptr;
  std::mutex lock;
  std::vector<Cqe> ring;
  std::uint64_t head = 0, tail = 0;
  int armed = kUnarmed;
  bool broken = false;
  int users = 0;
  // Under the channel's lock.
  std::uint64_t undelivered = 0, delivered = 0, acknowledged = 0;
  // Under the events' lock.
  std::uint64_t async_delivered = 0, async_acknowledged = 0;
};

enum class Mode { Immediate, Thread, Held };

struct Send {
  std::uint64_t wr_id, number;  // number: its place among all that were posted anywhere
  ibv_wr_opcode opcode;
  bool signaled, solicited, is_inline;
  __be32 imm;
  int num_sge;
  std::uint32_t length, rkey;
  std::uint64_t remote_addr, compare_add, swap;
};

struct Receive {
  std::uint64_t wr_id;
  int num_sge;
};

struct Qp : ibv_qp {
  DeviceState* device = nullptr;
  ibv_qp_init_attr init{};
  ibv_qp_attr attr{};
  ibv_gid sgid{};
  std::uint32_t sgid_type = 0;
  std::atomic<int> now{IBV_QPS_RESET};
  std::atomic<Mode> mode{Mode::Immediate};
  bool deaf = false;  // see peer_gone()
  // Asked for by whoever cannot take this one's lock; settle() does it.
  std::atomic<bool> must_fail{false}, must_run{false};
  std::atomic<bool> stalled{false};  // its oldest is being retried

  std::mutex send_lock;
  std::vector<Send> sends;
  std::vector<ibv_sge> send_sges;
  std::vector<char> inlines;
  std::atomic<std::uint64_t> sends_head{0}, sends_done{0}, sends_freed{0};
  std::uint64_t reads_upto = 0;  // one past the last read or atomic
  std::uint64_t route_made = 0;
  Qp* route = nullptr;

  std::mutex receive_lock;
  std::vector<Receive> receives;
  std::vector<ibv_sge> receive_sges;
  std::uint64_t receives_head = 0, receives_done = 0;
  std::atomic<std::uint64_t> receives_freed{0};

  // Under the events' lock.
  std::uint64_t async_delivered = 0, async_acknowledged = 0;

  Send& send(std::uint64_t i) { return sends[i % sends.size()]; }
  ibv_sge* sges_of_send(std::uint64_t i) { return send_sges.data() + i % sends.size() * init.cap.max_send_sge; }
  char* inline_of(std::uint64_t i) { return inlines.data() + i % sends.size() * init.cap.max_inline_data; }
  Receive& receive(std::uint64_t i) { return receives[i % receives.size()]; }
  ibv_sge* sges_of_receive(std::uint64_t i) {
    return receive_sges.data() + i % receives.size() * init.cap.max_recv_sge;
  }
  bool has_pending() const { return sends_done.load() != sends_head.load(); }
};

struct FailingCall {
  std::uint64_t skip = 0, times = 0;
  int error = 0;
};

struct FailingCompletion {
  std::uint64_t skip = 0;
  std::uint32_t qp_num = 0;
  ibv_wc_status status = IBV_WC_SUCCESS;
  bool executed = false;
};

using Count = std::atomic<std::uint64_t>;

struct World {
  WorldLock lock;
  std::vector<std::shared_ptr<DeviceState>> devices;
  std::vector<verbs::NetworkInterface> interfaces;
  std::filesystem::path folder;
  std::string folder_layout;
  pid_t folder_of = 0;
  std::unordered_map<std::uint32_t, Region*> regions;
  std::vector<Qp*> qps;
  std::uint32_t next_key = 0x100, next_qp = 1;
  std::uint64_t generation = 1;  // of what routes are made of
  Live live;
  Mode mode = Mode::Immediate;
  std::atomic<bool> unsettled{false};
  std::atomic<std::uint64_t> posted{0};

  std::atomic<bool> aborts{true};
  std::atomic<OnPost> on_post{nullptr};

  std::mutex plans;
  std::array<FailingCall, kCalls> failing_calls;
  std::vector<FailingCompletion> failing_completions;
  std::atomic<std::uint32_t> calls_fail{0};
  std::atomic<bool> completions_fail{false};

  std::mutex events;

  std::mutex worker_lock;
  std::condition_variable worker_wake;
  std::thread worker;
  bool worker_called = false, worker_ends = false;
  std::atomic<unsigned> delay_us{20};

  Count post_sends{0}, wrs{0}, signaled{0}, inlined{0}, post_recvs{0}, cqes{0}, polls{0}, arms{0}, comp_events{0},
      reg_mrs{0}, retries{0}, unfenced{0}, misuses{0};
};

// Never destroyed: threads of a test may outlive main().
World& world() {
  static World* const the_world = new World;
  return *the_world;
}

void count(Count& counter, std::uint64_t n = 1) {
  counter.fetch_add(n, std::memory_order_relaxed);
}

void misuse(const char* what) {
  count(world().misuses);
  if (!world().aborts) return;
  std::fprintf(stderr, "fake verbs: %s\n", what);
  std::abort();
}

// The errno that this call is to fail with, or 0.
int planned(Call call) {
  World& w = world();
  const std::uint32_t bit = 1u << unsigned(call);
  if ((w.calls_fail.load(std::memory_order_relaxed) & bit) == 0) return 0;
  std::lock_guard lock(w.plans);
  FailingCall& plan = w.failing_calls[unsigned(call)];
  if (plan.times == 0) return 0;
  if (plan.skip > 0) return --plan.skip, 0;
  if (--plan.times == 0) w.calls_fail &= ~bit;
  return plan.error;
}

std::optional<FailingCompletion> planned_completion(std::uint32_t qp_num) {
  World& w = world();
  if (!w.completions_fail.load(std::memory_order_relaxed)) return {};
  std::lock_guard lock(w.plans);
  std::optional<FailingCompletion> found;
  std::erase_if(w.failing_completions, [&](FailingCompletion& plan) {
    if (plan.qp_num != 0 && plan.qp_num != qp_num) return false;
    if (plan.skip > 0) return --plan.skip, false;
    if (found) return false;
    found = plan;
    return true;
  });
  w.completions_fail = !w.failing_completions.empty();
  return found;
}

template <class Object>
Object* failed(int error) {
  errno = error;
  return nullptr;
}

Qp* qp_of(std::uint32_t qp_num) {
  const auto& qps = world().qps;
  const auto at = std::find_if(qps.begin(), qps.end(), [&](Qp* qp) { return qp->qp_num == qp_num; });
  return at == qps.end() ? nullptr : *at;
}

// ---- Completions and events ----------------------------------------------------------------------------------------

void raise(Context& context, const ibv_async_event& event) {
  std::lock_guard lock(world().events);
  context.events.push_back(event);
  context.tokens.put();
}

void raise(Qp& qp, ibv_event_type type) {
  ibv_async_event event{};
  event.element.qp = &qp;
  event.event_type = type;
  raise(*static_cast<Context*>(qp.context), event);
}

// Forgets those about an object that goes.
template <class IsAbout>
void forget_events(ibv_context* base, IsAbout&& is_about) {
  Context& context = *static_cast<Context*>(base);
  std::lock_guard lock(world().events);
  std::erase_if(context.events, [&](const ibv_async_event& event) {
    if (!is_about(event)) return false;
    context.tokens.take_back();
    return true;
  });
}
bool is_about_qp(ibv_event_type type) {
  return type == IBV_EVENT_QP_FATAL || type == IBV_EVENT_QP_REQ_ERR || type == IBV_EVENT_QP_ACCESS_ERR;
}

// With the completion queue's lock.
void break_cq(Cq& cq) {
  if (cq.broken) return;
  cq.broken = true;
  ibv_async_event event{};
  event.element.cq = &cq;
  event.event_type = IBV_EVENT_CQ_ERR;
  raise(*static_cast<Context*>(cq.context), event);
  for (Qp* const qp : world().qps) {
    if (qp->send_cq == &cq || qp->recv_cq == &cq) qp->must_fail = true;
  }
  world().unsettled = true;
}

void complete(ibv_cq* base, const Cqe& cqe, bool solicited) {
  Cq& cq = *static_cast<Cq*>(base);
  std::lock_guard lock(cq.lock);
  if (cq.broken) return;
  if (cq.head - cq.tail == cq.ring.size()) return break_cq(cq);
  cq.ring[cq.head++ % cq.ring.size()] = cqe;
  count(world().cqes);
  if (cq.armed == kUnarmed || (cq.armed == kArmedSolicited && !solicited && cqe.wc.status == IBV_WC_SUCCESS)) return;
  cq.armed = kUnarmed;
  Channel& channel = *static_cast<Channel*>(cq.channel);
  std::lock_guard channel_lock(channel.mutex);
  ++cq.undelivered;
  channel.tokens.put();
  count(world().comp_events);
}

// What ConnectX says.
std::uint32_t vendor_err(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS: return 0;
    case IBV_WC_LOC_PROT_ERR: return 0x51;
    case IBV_WC_WR_FLUSH_ERR: return 0xf9;
    case IBV_WC_RETRY_EXC_ERR: return 0x81;
    case IBV_WC_RNR_RETRY_EXC_ERR: return 0x87;
    case IBV_WC_REM_ACCESS_ERR: return 0x88;
    case IBV_WC_REM_INV_REQ_ERR: return 0x89;
    default: return 0x32;
  }
}

// Of a failed one only these four fields are valid; the others show it.
constexpr auto kInvalidOpcode = static_cast<ibv_wc_opcode>(0x5A);
constexpr std::uint32_t kInvalid = 0xABABABAB;

ibv_wc completion(const Qp& qp, std::uint64_t wr_id, ibv_wc_status status) {
  ibv_wc wc{};
  wc.wr_id = wr_id;
  wc.status = status;
  wc.vendor_err = vendor_err(status);
  wc.qp_num = qp.qp_num;
  wc.opcode = kInvalidOpcode;
  wc.byte_len = kInvalid;
  wc.imm_data = kInvalid;
  return wc;
}

// ---- Execution -----------------------------------------------------------------------------------------------------

void flush_sends(Qp& qp) {
  for (; qp.has_pending(); ++qp.sends_done) {
    const Send& send = qp.send(qp.sends_done);
    complete(qp.send_cq, {completion(qp, send.wr_id, IBV_WC_WR_FLUSH_ERR), &qp, false, qp.sends_done + 1}, true);
  }
  qp.stalled = false;
}

void flush_receives(Qp& qp) {
  std::lock_guard lock(qp.receive_lock);
  for (; qp.receives_done != qp.receives_head; ++qp.receives_done) {
    const Receive& receive = qp.receive(qp.receives_done);
    complete(qp.recv_cq, {completion(qp, receive.wr_id, IBV_WC_WR_FLUSH_ERR), &qp, true, qp.receives_done + 1}, true);
  }
}

// With its send lock.
void to_error(Qp& qp) {
  if (qp.device->fatal) return;
  qp.now = IBV_QPS_ERR;
  flush_sends(qp);
  flush_receives(qp);
}

// The responder's error state; its send lock must not be waited for here.
void fail_later(Qp& qp) {
  qp.now = IBV_QPS_ERR;
  qp.must_fail = true;
  world().unsettled = true;
}

// Memory that both sides may look at with atomics meanwhile: small aligned pieces are moved by whole words, each of which
// is published as a processor's store would be. Nothing is promised of larger ones.
constexpr std::size_t kByWords = 256;

bool goes_by_words(const void* at, std::size_t nbytes) {
  const std::size_t alignment = nbytes >= 8 ? 8 : nbytes == 4 ? 4 : 1;
  return nbytes <= kByWords && reinterpret_cast<std::uintptr_t>(at) % alignment == 0;
}

void write_remote(char* to, const char* from, std::size_t nbytes) {
  if (!goes_by_words(to, nbytes)) {
    std::memmove(to, from, nbytes);
    return;
  }
  // The local side is read plainly: nobody may change it before the completion.
  std::size_t i = 0;
  for (; i + 8 <= nbytes; i += 8) {
    std::uint64_t word;
    std::memcpy(&word, from + i, 8);
    std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(to + i)).store(word, std::memory_order_release);
  }
  if (nbytes - i == 4) {
    std::uint32_t word;
    std::memcpy(&word, from + i, 4);
    std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(to + i)).store(word, std::memory_order_release);
    return;
  }
  for (; i < nbytes; ++i) std::atomic_ref<char>(to[i]).store(from[i], std::memory_order_release);
}

void read_remote(char* to, const char* from, std::size_t nbytes) {
  if (!goes_by_words(from, nbytes)) {
    std::memmove(to, from, nbytes);
    return;
  }
  std::size_t i = 0;
  for (; i + 8 <= nbytes; i += 8) {
    auto& source = *reinterpret_cast<std::uint64_t*>(const_cast<char*>(from + i));
    const std::uint64_t word = std::atomic_ref<std::uint64_t>(source).load(std::memory_order_acquire);
    std::memcpy(to + i, &word, 8);
  }
  if (nbytes - i == 4) {
    auto& source = *reinterpret_cast<std::uint32_t*>(const_cast<char*>(from + i));
    const std::uint32_t word = std::atomic_ref<std::uint32_t>(source).load(std::memory_order_acquire);
    std::memcpy(to + i, &word, 4);
    return;
  }
  for (; i < nbytes; ++i) to[i] = std::atomic_ref<char>(const_cast<char&>(from[i])).load(std::memory_order_acquire);
}

// The memory behind a key, or null if this use of it is not allowed. Keys for local and remote use differ in their last
// bit, so that taking one for the other shows.
char* resolve(std::uint32_t key, bool remote, std::uint64_t address, std::uint64_t nbytes, unsigned access,
              const ibv_pd* pd) {
  if ((key & 1) != unsigned(remote)) return nullptr;
  const auto found = world().regions.find(key >> 1);
  if (found == world().regions.end()) return nullptr;
  const Region& region = *found->second;
  if (region.pd != pd || (region.access & access) != access) return nullptr;
  if (address < region.iova || nbytes > region.length || address - region.iova > region.length - nbytes) return nullptr;
  return region.memory + (address - region.iova);
}

constexpr int kMostSge = 64;
struct Pieces {
  char* at[kMostSge];
};

bool resolve_local(const Qp& qp, const ibv_sge* sges, int num_sge, bool written, Pieces& pieces) {
  for (int i = 0; i < num_sge; ++i) {
    if (sges[i].length == 0) continue;
    pieces.at[i] = resolve(sges[i].lkey, false, sges[i].addr, sges[i].length,
                           written ? unsigned(IBV_ACCESS_LOCAL_WRITE) : 0u, qp.pd);
    if (pieces.at[i] == nullptr) return false;
  }
  return true;
}

const Port& port_of(const Qp& qp) {
  return qp.device->config.ports[qp.attr.port_num - 1];
}

// Whom the packets of `qp` reach and whose answers come back; whether that one is ready is not said.
Qp* find_route(const Qp& qp) {
  Qp* const peer = qp_of(qp.attr.dest_qp_num);
  if (peer == nullptr || peer->deaf || qp.deaf || peer->now == IBV_QPS_RESET || peer->now == IBV_QPS_INIT)
    return nullptr;
  const Port &here = port_of(qp), &there = port_of(*peer);
  if (here.state != IBV_PORT_ACTIVE || there.state != IBV_PORT_ACTIVE || peer->device->fatal) return nullptr;
  if (here.link_layer != there.link_layer) return nullptr;
  const auto leads_to = [](const Qp& from, const Qp& to) {
    const ibv_ah_attr& av = from.attr.ah_attr;
    if (!av.is_global) return av.dlid == port_of(to).lid;
    return to.attr.ah_attr.is_global && std::memcmp(&av.grh.dgid, &to.sgid, sizeof(ibv_gid)) == 0 &&
           from.sgid_type == to.sgid_type;
  };
  if (!leads_to(qp, *peer) || !leads_to(*peer, qp)) return nullptr;
  if (peer->attr.dest_qp_num != qp.qp_num || peer->attr.rq_psn != qp.attr.sq_psn) return nullptr;
  if (peer->attr.path_mtu != qp.attr.path_mtu) return nullptr;
  return peer;
}

Qp* route_of(Qp& qp) {
  if (qp.route_made != world().generation) {
    qp.route = find_route(qp);
    qp.route_made = world().generation;
  }
  if (qp.route == nullptr) return nullptr;
  const int state = qp.route->now.load(std::memory_order_acquire);
  return state == IBV_QPS_RTR || state == IBV_QPS_RTS ? qp.route : nullptr;
}

bool is_atomic(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}
bool is_read(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_RDMA_READ || is_atomic(opcode);
}
bool is_send(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM;
}
bool has_imm(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

unsigned remote_access(ibv_wr_opcode opcode) {
  if (is_atomic(opcode)) return IBV_ACCESS_REMOTE_ATOMIC;
  if (is_send(opcode)) return 0;
  return opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
}

std::uint64_t change_word(Qp& responder, char* at, const Send& send) {
  auto& word = *reinterpret_cast<std::uint64_t*>(at);
  const std::atomic_ref<std::uint64_t> shared(word);
  const bool swaps = send.opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
  if (responder.device->config.limits.torn_atomics) {
    std::lock_guard lock(responder.device->atomics);
    const std::uint64_t before = shared.load(std::memory_order_acquire);
    std::this_thread::yield();
    const std::uint64_t after = !swaps ? before + send.compare_add : before == send.compare_add ? send.swap : before;
    shared.store(after, std::memory_order_release);
    return before;
  }
  if (!swaps) return shared.fetch_add(send.compare_add, std::memory_order_acq_rel);
  std::uint64_t expected = send.compare_add;
  shared.compare_exchange_strong(expected, send.swap, std::memory_order_acq_rel);
  return expected;
}

// The responder's share of a message that takes a receive. Nothing: there is none posted.
std::optional<ibv_wc_status> receive(Qp& peer, const Send& send, const ibv_sge* sges, const Pieces& sources,
                                     const char* inlined, char* written_to) {
  std::lock_guard lock(peer.receive_lock);
  if (peer.receives_done == peer.receives_head) return {};
  const std::uint64_t number = peer.receives_done;
  const Receive& receive = peer.receive(number);
  ibv_wc_status at_responder = IBV_WC_SUCCESS, at_requester = IBV_WC_SUCCESS;
  if (is_send(send.opcode)) {
    const ibv_sge* const into = peer.sges_of_receive(number);
    std::uint64_t room = 0;
    for (int i = 0; i < receive.num_sge; ++i) room += into[i].length;
    Pieces targets;
    if (send.length > room) {
      at_responder = IBV_WC_LOC_LEN_ERR, at_requester = IBV_WC_REM_INV_REQ_ERR;
    } else if (!resolve_local(peer, into, receive.num_sge, true, targets)) {
      at_responder = IBV_WC_LOC_PROT_ERR, at_requester = IBV_WC_REM_OP_ERR;
    } else {
      int target = 0;
      std::size_t filled = 0;
      const auto scatter = [&](const char* from, std::size_t nbytes) {
        while (nbytes > 0) {
          const std::size_t n = std::min<std::size_t>(nbytes, into[target].length - filled);
          if (n > 0) std::memmove(targets.at[target] + filled, from, n);
          from += n, nbytes -= n, filled += n;
          if (filled == into[target].length) ++target, filled = 0;
        }
      };
      if (send.is_inline) scatter(inlined, send.length);
      for (int i = 0; i < send.num_sge && !send.is_inline; ++i) scatter(sources.at[i], sges[i].length);
    }
  } else {
    std::size_t at = 0;
    if (send.is_inline) write_remote(written_to, inlined, send.length);
    for (int i = 0; i < send.num_sge && !send.is_inline; at += sges[i++].length) {
      write_remote(written_to + at, sources.at[i], sges[i].length);
    }
  }
  ibv_wc wc = completion(peer, receive.wr_id, at_responder);
  if (at_responder == IBV_WC_SUCCESS) {
    wc.opcode = is_send(send.opcode) ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM;
    wc.byte_len = send.length;
    if (has_imm(send.opcode)) wc.imm_data = send.imm, wc.wc_flags = IBV_WC_WITH_IMM;
  }
  ++peer.receives_done;
  complete(peer.recv_cq, {wc, &peer, true, number + 1}, send.solicited);
  return at_requester;
}

// How the oldest of the queue ends, or nothing while it is retried.
std::optional<ibv_wc_status> execute(Qp& qp) {
  const Send& send = qp.send(qp.sends_done);
  const ibv_sge* const sges = qp.sges_of_send(qp.sends_done);
  const char* const inlined = qp.inline_of(qp.sends_done);
  Pieces local;
  if (!send.is_inline && !resolve_local(qp, sges, send.num_sge, is_read(send.opcode), local))
    return IBV_WC_LOC_PROT_ERR;
  if (is_atomic(send.opcode) && send.length != 8) return IBV_WC_LOC_LEN_ERR;
  if (is_read(send.opcode) && qp.attr.max_rd_atomic == 0) return IBV_WC_LOC_QP_OP_ERR;

  Qp* const peer = route_of(qp);
  if (peer == nullptr) {
    count(world().retries, std::max<unsigned>(qp.attr.retry_cnt, 1));
    if (qp.attr.retry_cnt == 7) return {};
    return IBV_WC_RETRY_EXC_ERR;
  }
  const auto refuse = [&](ibv_wc_status status) {
    raise(*peer, status == IBV_WC_REM_ACCESS_ERR ? IBV_EVENT_QP_ACCESS_ERR : IBV_EVENT_QP_REQ_ERR);
    if (peer != &qp) fail_later(*peer);
    return status;
  };

  const unsigned access = remote_access(send.opcode);
  if ((peer->attr.qp_access_flags & access) != access) return refuse(IBV_WC_REM_INV_REQ_ERR);
  if (is_read(send.opcode) && qp.attr.max_rd_atomic > peer->attr.max_dest_rd_atomic) {
    return refuse(IBV_WC_REM_INV_REQ_ERR);  // more at once than it has room for
  }
  if (is_atomic(send.opcode) &&
      (send.remote_addr % 8 != 0 || peer->device->config.limits.atomic_cap == IBV_ATOMIC_NONE)) {
    return refuse(IBV_WC_REM_INV_REQ_ERR);
  }
  char* remote = nullptr;
  if (access != 0 && send.length > 0) {  // no key is looked at for nothing
    remote = resolve(send.rkey, true, send.remote_addr, send.length, access, peer->pd);
    if (remote == nullptr) return refuse(IBV_WC_REM_ACCESS_ERR);
  }

  DeviceState& rail = *qp.device;
  if (is_atomic(send.opcode)) {
    const std::uint64_t before = change_word(*peer, remote, send);
    std::size_t at = 0;
    for (int i = 0; i < send.num_sge; at += sges[i++].length) {
      if (sges[i].length > 0) std::memcpy(local.at[i], reinterpret_cast<const char*>(&before) + at, sges[i].length);
    }
    count(rail.atomic_ops);
  } else if (send.opcode == IBV_WR_RDMA_READ) {
    std::size_t at = 0;
    for (int i = 0; i < send.num_sge; at += sges[i++].length) read_remote(local.at[i], remote + at, sges[i].length);
    count(rail.read, send.length);
  } else if (send.opcode == IBV_WR_RDMA_WRITE) {
    std::size_t at = 0;
    if (send.is_inline) write_remote(remote, inlined, send.length);
    for (int i = 0; i < send.num_sge && !send.is_inline; at += sges[i++].length) {
      write_remote(remote + at, local.at[i], sges[i].length);
    }
    count(rail.written, send.length);
  } else {
    const auto status = receive(*peer, send, sges, local, inlined, remote);
    if (!status) {
      count(world().retries, std::max<unsigned>(qp.attr.rnr_retry, 1));
      if (qp.attr.rnr_retry == 7) return {};
      return IBV_WC_RNR_RETRY_EXC_ERR;
    }
    if (*status != IBV_WC_SUCCESS) {
      if (peer != &qp) fail_later(*peer);
      return status;
    }
    count(rail.written, send.length);
  }
  count(rail.wrs);
  return IBV_WC_SUCCESS;
}

ibv_wc success(const Qp& qp, const Send& send) {
  ibv_wc wc = completion(qp, send.wr_id, IBV_WC_SUCCESS);
  switch (send.opcode) {
    case IBV_WR_RDMA_READ: wc.opcode = IBV_WC_RDMA_READ, wc.byte_len = send.length; break;
    case IBV_WR_ATOMIC_CMP_AND_SWP: wc.opcode = IBV_WC_COMP_SWAP, wc.byte_len = 8; break;
    case IBV_WR_ATOMIC_FETCH_AND_ADD: wc.opcode = IBV_WC_FETCH_ADD, wc.byte_len = 8; break;
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM: wc.opcode = IBV_WC_SEND; break;
    default: wc.opcode = IBV_WC_RDMA_WRITE;
  }
  return wc;
}

// Executes up to `most` of what is posted, with the send lock. Returns how many.
std::size_t advance(Qp& qp, std::size_t most = SIZE_MAX) {
  std::size_t executed = 0;
  while (qp.has_pending() && executed < most && !qp.device->fatal) {
    if (qp.now != IBV_QPS_RTS) {  // it cannot be anything but the error state
      to_error(qp);
      break;
    }
    const Send& send = qp.send(qp.sends_done);
    const auto plan = planned_completion(qp.qp_num);
    std::optional<ibv_wc_status> status;
    if (!plan || plan->executed) status = execute(qp);
    if (plan) status = plan->status;
    if (!status) {
      qp.stalled = true;
      break;
    }
    ++executed;
    ++qp.sends_done;
    if (*status != IBV_WC_SUCCESS) {
      qp.now = IBV_QPS_ERR;
      complete(qp.send_cq, {completion(qp, send.wr_id, *status), &qp, false, qp.sends_done}, true);
      to_error(qp);
    } else if (send.signaled) {
      complete(qp.send_cq, {success(qp, send), &qp, false, qp.sends_done}, false);
    }
  }
  return executed;
}

// What could not be done at once since it needs the lock of another queue pair; with none held but a share of the world.
void settle() {
  World& w = world();
  while (w.unsettled.load(std::memory_order_relaxed) && w.unsettled.exchange(false)) {
    for (Qp* const qp : w.qps) {
      if (!qp->must_fail && !qp->must_run) continue;
      std::lock_guard lock(qp->send_lock);
      if (qp->must_fail.exchange(false)) to_error(*qp);
      if (qp->must_run.exchange(false)) {
        qp->stalled = false;
        if (qp->mode != Mode::Held) advance(*qp);
      }
    }
  }
}

// Something changed that what is being retried may have waited for.
void run_stalled() {
  for (Qp* const qp : world().qps) {
    if (!qp->stalled) continue;
    qp->must_run = true;
    world().unsettled = true;
  }
}

void work() {
  World& w = world();
  std::unique_lock lock(w.worker_lock);
  while (!w.worker_ends) {
    w.worker_wake.wait(lock, [&] { return w.worker_called || w.worker_ends; });
    w.worker_called = false;
    lock.unlock();
    for (bool more = true; more;) {
      more = false;
      std::this_thread::sleep_for(std::chrono::microseconds(w.delay_us));
      Shared shared(w.lock);
      for (Qp* const qp : w.qps) {
        if (qp->mode != Mode::Thread || !qp->has_pending()) continue;
        std::lock_guard send_lock(qp->send_lock);
        if (advance(*qp, 1) > 0) more = more || qp->has_pending();
      }
      settle();
    }
    lock.lock();
  }
}

void call_worker() {
  World& w = world();
  {
    std::lock_guard lock(w.worker_lock);
    w.worker_called = true;
  }
  w.worker_wake.notify_one();
}

void end_worker() {
  World& w = world();
  {
    std::lock_guard lock(w.worker_lock);
    w.worker_ends = true;
  }
  w.worker_wake.notify_one();
  if (w.worker.joinable()) w.worker.join();
  w.worker_ends = w.worker_called = false;
}

// ---- Posting and polling -------------------------------------------------------------------------------------------

// True if a read or atomic that is not known to be complete fills some of what `wr` sends.
bool is_being_filled(Qp& qp, const ibv_send_wr& wr) {
  for (std::uint64_t i = qp.sends_freed; i < qp.reads_upto; ++i) {
    if (!is_read(qp.send(i).opcode)) continue;
    for (int j = 0; j < qp.send(i).num_sge; ++j) {
      const ibv_sge& filled = qp.sges_of_send(i)[j];
      for (int k = 0; k < wr.num_sge; ++k) {
        const ibv_sge& sent = wr.sg_list[k];
        if (sent.addr < filled.addr + filled.length && filled.addr < sent.addr + sent.length) return true;
      }
    }
  }
  return false;
}

int enqueue(Qp& qp, const ibv_send_wr& wr) {
  if (const int error = planned(Call::PostSend); error != 0) return error;
  if (qp.device->fatal) return EIO;
  if (qp.now != IBV_QPS_RTS && qp.now != IBV_QPS_ERR) return EINVAL;
  switch (wr.opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
    case IBV_WR_RDMA_READ:
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD: break;
    default: return EINVAL;
  }
  constexpr unsigned known = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE;
  if ((wr.send_flags & ~known) != 0) return EINVAL;
  if (wr.num_sge < 0 || unsigned(wr.num_sge) > qp.init.cap.max_send_sge) return EINVAL;
  std::uint64_t length = 0;
  for (int i = 0; i < wr.num_sge; ++i) length += wr.sg_list[i].length;
  if (length > port_of(qp).max_msg_sz) return EINVAL;
  const bool is_inline = (wr.send_flags & IBV_SEND_INLINE) != 0;
  if (is_inline && (is_read(wr.opcode) || length > qp.init.cap.max_inline_data)) return EINVAL;
  if (is_atomic(wr.opcode) && qp.device->config.limits.atomic_cap == IBV_ATOMIC_NONE) return EINVAL;
  const std::uint64_t number = qp.sends_head;
  if (number - qp.sends_freed.load(std::memory_order_acquire) >= qp.sends.size()) return ENOMEM;

  if (is_read(wr.opcode)) {
    qp.reads_upto = number + 1;
  } else if ((wr.send_flags & IBV_SEND_FENCE) == 0 && is_being_filled(qp, wr)) {
    count(world().unfenced);
  }
  Send& send = qp.send(number);
  send.wr_id = wr.wr_id;
  send.number = world().posted.fetch_add(1, std::memory_order_relaxed);
  send.opcode = wr.opcode;
  send.signaled = qp.init.sq_sig_all != 0 || (wr.send_flags & IBV_SEND_SIGNALED) != 0;
  send.solicited = (wr.send_flags & IBV_SEND_SOLICITED) != 0;
  send.is_inline = is_inline;
  send.imm = has_imm(wr.opcode) ? wr.imm_data : 0;
  send.num_sge = wr.num_sge;
  send.length = std::uint32_t(length);
  if (is_atomic(wr.opcode)) {
    send.remote_addr = wr.wr.atomic.remote_addr;
    send.rkey = wr.wr.atomic.rkey;
    send.compare_add = wr.wr.atomic.compare_add;
    send.swap = wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP ? wr.wr.atomic.swap : 0;
  } else if (!is_send(wr.opcode)) {
    send.remote_addr = wr.wr.rdma.remote_addr;
    send.rkey = wr.wr.rdma.rkey;
  }
  if (is_inline) {
    char* into = qp.inline_of(number);
    for (int i = 0; i < wr.num_sge; into += wr.sg_list[i++].length) {
      if (wr.sg_list[i].length == 0) continue;
      std::memcpy(into, reinterpret_cast<const char*>(wr.sg_list[i].addr), wr.sg_list[i].length);
    }
    count(world().inlined);
  } else {
    if (wr.num_sge > 0) std::copy_n(wr.sg_list, wr.num_sge, qp.sges_of_send(number));
  }
  qp.sends_head = number + 1;
  count(world().wrs);
  if (send.signaled) count(world().signaled);
  return 0;
}

int post_send(ibv_qp* base, ibv_send_wr* wr, ibv_send_wr** bad) {
  World& w = world();
  Qp& qp = *static_cast<Qp*>(base);
  if (const OnPost hook = w.on_post.load(std::memory_order_acquire); hook != nullptr) hook(base, wr);
  count(w.post_sends);
  int error = 0;
  bool call = false;
  {
    Shared shared(w.lock);
    {
      std::lock_guard lock(qp.send_lock);
      for (; wr != nullptr; wr = wr->next) {
        error = enqueue(qp, *wr);
        if (error == 0) continue;
        *bad = wr;
        break;
      }
      const Mode mode = qp.mode.load(std::memory_order_relaxed);
      call = mode == Mode::Thread;
      if (mode == Mode::Immediate || qp.now == IBV_QPS_ERR) advance(qp);
    }
    settle();
  }
  if (call) call_worker();
  return error;
}

int post_recv(ibv_qp* base, ibv_recv_wr* wr, ibv_recv_wr** bad) {
  World& w = world();
  Qp& qp = *static_cast<Qp*>(base);
  count(w.post_recvs);
  Shared shared(w.lock);
  int error = 0;
  {
    std::lock_guard lock(qp.receive_lock);
    for (; wr != nullptr; wr = wr->next) {
      error = planned(Call::PostRecv);
      if (error == 0 && qp.device->fatal) error = EIO;
      if (error == 0 && qp.now == IBV_QPS_RESET) error = EINVAL;
      if (error == 0 && (wr->num_sge < 0 || unsigned(wr->num_sge) > qp.init.cap.max_recv_sge)) error = EINVAL;
      const bool full = qp.receives_head - qp.receives_freed.load(std::memory_order_acquire) >= qp.receives.size();
      if (error == 0 && full) error = ENOMEM;
      if (error != 0) {
        *bad = wr;
        break;
      }
      qp.receive(qp.receives_head) = {wr->wr_id, wr->num_sge};
      if (wr->num_sge > 0) std::copy_n(wr->sg_list, wr->num_sge, qp.sges_of_receive(qp.receives_head));
      ++qp.receives_head;
    }
  }
  if (qp.now == IBV_QPS_ERR && !qp.device->fatal) flush_receives(qp);
  run_stalled();
  settle();
  return error;
}

int poll_cq(ibv_cq* base, int most, ibv_wc* wc) {
  Cq& cq = *static_cast<Cq*>(base);
  count(world().polls);
  if (cq.state->fatal) return 0;
  std::lock_guard lock(cq.lock);
  int n = 0;
  for (; n < most && cq.tail != cq.head; ++n, ++cq.tail) {
    const Cqe& cqe = cq.ring[cq.tail % cq.ring.size()];
    wc[n] = cqe.wc;
    (cqe.is_receive ? cqe.qp->receives_freed : cqe.qp->sends_freed).store(cqe.upto, std::memory_order_release);
  }
  return n;
}

int req_notify_cq(ibv_cq* base, int solicited_only) {
  Cq& cq = *static_cast<Cq*>(base);
  count(world().arms);
  if (const int error = planned(Call::ReqNotifyCq); error != 0) return error;
  if (cq.channel == nullptr) return EINVAL;
  std::lock_guard lock(cq.lock);
  cq.armed = std::max<int>(cq.armed, solicited_only != 0 ? kArmedSolicited : kArmed);
  return 0;
}

// Takes the completions of a queue pair that goes out of a completion queue.
void purge(ibv_cq* base, const Qp& qp) {
  Cq& cq = *static_cast<Cq*>(base);
  std::lock_guard lock(cq.lock);
  std::uint64_t kept = cq.tail;
  for (std::uint64_t i = cq.tail; i != cq.head; ++i) {
    const Cqe cqe = cq.ring[i % cq.ring.size()];
    if (cqe.qp != &qp) cq.ring[kept++ % cq.ring.size()] = cqe;
  }
  cq.head = kept;
}

// ---- Devices -------------------------------------------------------------------------------------------------------

void drop(Listed* device) {
  if (--device->users == 0) delete device;
}

ibv_device** get_device_list(int* n) {
  if (const int error = planned(Call::GetDeviceList); error != 0) return failed<ibv_device*>(error);
  World& w = world();
  Alone alone(w.lock);
  auto** const list = new ibv_device* [w.devices.size() + 1] {};
  int found = 0;
  for (const auto& state : w.devices) {
    if (state->config.vanishes && state->listed) continue;
    state->listed = true;
    auto* const device = new Listed();
    device->state = state;
    device->users = 1;
    device->node_type = IBV_NODE_CA;
    device->transport_type = state->config.transport;
    std::snprintf(device->name, sizeof device->name, "%s", state->config.name.c_str());
    std::snprintf(device->dev_name, sizeof device->dev_name, "uverbs%d", found);
    std::snprintf(device->dev_path, sizeof device->dev_path, "%s/sys/class/infiniband_verbs/uverbs%d", w.folder.c_str(),
                  found);
    std::snprintf(device->ibdev_path, sizeof device->ibdev_path, "%s", state->path.c_str());
    list[found++] = device;
  }
  ++w.live.device_lists;
  if (n != nullptr) *n = found;
  return list;
}

void free_device_list(ibv_device** list) {
  Alone alone(world().lock);
  for (ibv_device** at = list; *at != nullptr; ++at) drop(static_cast<Listed*>(*at));
  --world().live.device_lists;
  delete[] list;
}

const char* get_device_name(ibv_device* device) {
  return device->name;
}

ibv_context* open_device(ibv_device* base) {
  if (const int error = planned(Call::OpenDevice); error != 0) return failed<ibv_context>(error);
  Listed& device = *static_cast<Listed*>(base);
  Alone alone(world().lock);
  if (device.state->config.open_fails != 0) return failed<ibv_context>(device.state->config.open_fails);
  if (device.state->config.vanishes) return failed<ibv_context>(ENODEV);
  if (device.state->fatal) return failed<ibv_context>(EIO);
  auto* const context = new Context();
  context->state = device.state;
  context->device = base;
  context->ops.poll_cq = poll_cq;
  context->ops.req_notify_cq = req_notify_cq;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->cmd_fd = -1;
  context->async_fd = context->tokens.fd();
  context->num_comp_vectors = 4;
  ++device.users;
  device.state->contexts.push_back(context);
  ++world().live.contexts;
  return context;
}

int close_device(ibv_context* base) {
  Context& context = *static_cast<Context*>(base);
  Alone alone(world().lock);
  if (context.objects != 0) {
    misuse("a device is closed while protection domains, queues or channels of it are left");
    return EBUSY;
  }
  std::erase(context.state->contexts, &context);
  drop(static_cast<Listed*>(context.device));
  delete &context;
  --world().live.contexts;
  return 0;
}

DeviceState& state_of(ibv_context* context) {
  return *static_cast<Context*>(context)->state;
}

int query_device(ibv_context* context, ibv_device_attr* attr) {
  if (const int error = planned(Call::QueryDevice); error != 0) return error;
  const DeviceState& state = state_of(context);
  if (state.fatal) return EIO;
  const Limits& limits = state.config.limits;
  *attr = {};
  std::snprintf(attr->fw_ver, sizeof attr->fw_ver, "0.0.fake");
  attr->max_mr_size = limits.max_mr_size;
  attr->page_size_cap = 0xfffffffffffff000;
  attr->vendor_id = 0x02c9;
  attr->max_qp = limits.max_qp;
  attr->max_qp_wr = limits.max_qp_wr;
  attr->max_sge = attr->max_sge_rd = limits.max_sge;
  attr->max_cq = limits.max_cq;
  attr->max_cqe = limits.max_cqe;
  attr->max_mr = limits.max_mr;
  attr->max_pd = 1 << 20;
  attr->max_qp_rd_atom = limits.max_qp_rd_atom;
  attr->max_qp_init_rd_atom = limits.max_qp_init_rd_atom;
  attr->max_res_rd_atom = limits.max_qp_rd_atom * limits.max_qp;
  attr->atomic_cap = limits.atomic_cap;
  attr->max_pkeys = 1;
  attr->local_ca_ack_delay = 16;
  attr->phys_port_cnt = std::uint8_t(state.config.ports.size());
  return 0;
}

std::uint32_t table_length(const Port& port) {
  std::uint32_t length = 1;
  for (const Gid& gid : port.gids) length = std::max(length, gid.index + 1);
  return length;
}

int query_port(ibv_context* context, std::uint8_t number, ibv_port_attr* attr) {
  if (const int error = planned(Call::QueryPort); error != 0) return error;
  const DeviceState& state = state_of(context);
  if (state.fatal) return EIO;
  Shared shared(world().lock);
  if (number == 0 || number > state.config.ports.size()) return EINVAL;
  const Port& port = state.config.ports[number - 1];
  attr->state = port.state;
  attr->max_mtu = IBV_MTU_4096;
  attr->active_mtu = port.active_mtu;
  attr->gid_tbl_len = int(table_length(port));
  attr->port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS;
  attr->max_msg_sz = port.max_msg_sz;
  attr->pkey_tbl_len = 1;
  attr->lid = port.lid;
  attr->max_vl_num = 1;
  attr->active_width = port.active_width;
  attr->active_speed = port.active_speed;
  attr->phys_state = port.state == IBV_PORT_ACTIVE ? 5 : 3;
  attr->link_layer = port.link_layer;
  return 0;
}

ssize_t query_gid_table(ibv_context* context, ibv_gid_entry* entries, std::size_t most, std::uint32_t flags,
                        std::size_t entry_size) {
  if (const int error = planned(Call::QueryGidTable); error != 0) return -error;
  const DeviceState& state = state_of(context);
  if (state.fatal) return -EIO;
  if (flags != 0 || entry_size != sizeof(ibv_gid_entry)) return -EINVAL;
  Shared shared(world().lock);
  std::size_t n = 0;
  for (std::size_t number = 1; number <= state.config.ports.size(); ++number) {
    std::vector<Gid> gids = state.config.ports[number - 1].gids;
    std::sort(gids.begin(), gids.end(), [](const Gid& a, const Gid& b) { return a.index < b.index; });
    for (const Gid& gid : gids) {
      if (n == most) return -EINVAL;  // as the kernel: all or none
      const auto& interfaces = world().interfaces;
      const auto at = std::find_if(interfaces.begin(), interfaces.end(),
                                   [&](const verbs::NetworkInterface& known) { return known.name == gid.interface; });
      const auto index = at == interfaces.end() ? 0u : unsigned(at - interfaces.begin()) + 101;
      entries[n++] = {gid_of(gid.address), gid.index, std::uint32_t(number), gid.type, index};
    }
  }
  return ssize_t(n);
}

verbs::NetworkInterface network_interface(unsigned index) {
  Shared shared(world().lock);
  const auto& interfaces = world().interfaces;
  return index < 101 || index - 101 >= interfaces.size() ? verbs::NetworkInterface() : interfaces[index - 101];
}

// ---- Memory --------------------------------------------------------------------------------------------------------

ibv_pd* alloc_pd(ibv_context* context) {
  if (const int error = planned(Call::AllocPd); error != 0) return failed<ibv_pd>(error);
  if (state_of(context).fatal) return failed<ibv_pd>(EIO);
  Alone alone(world().lock);
  auto* const pd = new Pd();
  pd->context = context;
  pd->device = &state_of(context);
  ++static_cast<Context*>(context)->objects;
  ++world().live.pds;
  return pd;
}

int dealloc_pd(ibv_pd* base) {
  Alone alone(world().lock);
  Pd& pd = *static_cast<Pd*>(base);
  if (pd.users != 0) return EBUSY;
  --static_cast<Context*>(pd.context)->objects;
  --world().live.pds;
  delete &pd;
  return 0;
}

bool is_mapped(const void* address, std::size_t nbytes) {
  const auto page = std::uintptr_t(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  constexpr std::size_t at_once = 1024;
  unsigned char resident[at_once];
  for (std::uintptr_t at = begin / page * page; at < begin + nbytes; at += at_once * page) {
    const std::size_t n = std::min<std::size_t>(at_once * page, (begin + nbytes - at + page - 1) / page * page);
    if (::mincore(reinterpret_cast<void*>(at), n, resident) != 0 && errno == ENOMEM) return false;
  }
  return true;
}

ibv_mr* add_region(ibv_pd* base, char* memory, std::size_t nbytes, std::uint64_t iova, unsigned access, void* mapped,
                   std::size_t mapped_nbytes) {
  World& w = world();
  Pd& pd = *static_cast<Pd*>(base);
  DeviceState& state = *pd.device;
  constexpr unsigned known = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                             IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_RELAXED_ORDERING;
  int error = 0;
  const bool changes = (access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) != 0;
  if (state.fatal) error = EIO;
  if ((access & ~known) != 0 || (changes && (access & IBV_ACCESS_LOCAL_WRITE) == 0)) error = EINVAL;
  if (nbytes == 0 || nbytes > state.config.limits.max_mr_size) error = EINVAL;
  if (error == 0 && mapped == nullptr && !is_mapped(memory, nbytes)) error = EFAULT;

  Alone alone(w.lock);
  if (error == 0 &&
      (state.mrs >= state.config.limits.max_mr || state.registered + nbytes > state.config.limits.max_registered)) {
    error = ENOMEM;
  }
  if (error != 0) return failed<ibv_mr>(error);
  auto* const region = new Region();
  region->context = pd.context;
  region->pd = &pd;
  region->addr = memory;
  region->length = nbytes;
  region->state = &state;
  region->iova = iova;
  region->access = access;
  region->memory = memory;
  region->mapped = mapped;
  region->mapped_nbytes = mapped_nbytes;
  region->handle = w.next_key++;
  region->lkey = region->handle << 1;
  region->rkey = region->lkey | 1;
  w.regions.emplace(region->handle, region);
  ++pd.users, ++state.mrs, state.registered += nbytes;
  ++w.live.mrs, w.live.registered_bytes += nbytes;
  return region;
}

ibv_mr* reg_mr(ibv_pd* pd, void* address, std::size_t nbytes, std::uint64_t iova, unsigned access) {
  count(world().reg_mrs);
  if (const int error = planned(Call::RegMr); error != 0) return failed<ibv_mr>(error);
  return add_region(pd, static_cast<char*>(address), nbytes, iova, access, nullptr, 0);
}

// Any file that can be mapped stands for a dmabuf.
ibv_mr* reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t nbytes, std::uint64_t iova, int fd, int access) {
  count(world().reg_mrs);
  if (const int error = planned(Call::RegDmabufMr); error != 0) return failed<ibv_mr>(error);
  const auto page = std::uint64_t(::sysconf(_SC_PAGESIZE));
  if (iova % page != offset % page) return failed<ibv_mr>(EINVAL);
  const std::uint64_t begin = offset / page * page;
  const std::size_t mapped_nbytes = offset - begin + nbytes;
  void* const mapped = ::mmap(nullptr, mapped_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, off_t(begin));
  if (mapped == MAP_FAILED) return nullptr;
  char* const memory = static_cast<char*>(mapped) + (offset - begin);
  ibv_mr* const region = add_region(pd, memory, nbytes, iova, unsigned(access), mapped, mapped_nbytes);
  if (region == nullptr) {
    const int error = errno;
    ::munmap(mapped, mapped_nbytes);
    errno = error;
  }
  return region;
}

int dereg_mr(ibv_mr* base) {
  World& w = world();
  Alone alone(w.lock);
  Region& region = *static_cast<Region*>(base);
  w.regions.erase(region.handle);
  --static_cast<Pd*>(region.pd)->users;
  --region.state->mrs, region.state->registered -= region.length;
  --w.live.mrs, w.live.registered_bytes -= region.length;
  if (region.mapped != nullptr) ::munmap(region.mapped, region.mapped_nbytes);
  delete &region;
  return 0;
}

// ---- Completion queues ---------------------------------------------------------------------------------------------

ibv_comp_channel* create_comp_channel(ibv_context* context) {
  if (const int error = planned(Call::CreateCompChannel); error != 0) return failed<ibv_comp_channel>(error);
  if (state_of(context).fatal) return failed<ibv_comp_channel>(EIO);
  Alone alone(world().lock);
  auto* const channel = new Channel();
  channel->context = context;
  channel->fd = channel->tokens.fd();
  ++static_cast<Context*>(context)->objects;
  ++world().live.channels;
  return channel;
}

int destroy_comp_channel(ibv_comp_channel* base) {
  Alone alone(world().lock);
  Channel& channel = *static_cast<Channel*>(base);
  if (channel.refcnt != 0) return EBUSY;
  --static_cast<Context*>(channel.context)->objects;
  --world().live.channels;
  delete &channel;
  return 0;
}

ibv_cq* create_cq(ibv_context* context, int entries, void* cookie, ibv_comp_channel* channel, int vector) {
  if (const int error = planned(Call::CreateCq); error != 0) return failed<ibv_cq>(error);
  DeviceState& state = state_of(context);
  if (state.fatal) return failed<ibv_cq>(EIO);
  if (entries < 1 || entries > state.config.limits.max_cqe) return failed<ibv_cq>(EINVAL);
  if (vector < 0 || vector >= context->num_comp_vectors) return failed<ibv_cq>(EINVAL);
  if (channel != nullptr && channel->context != context) return failed<ibv_cq>(EINVAL);
  Alone alone(world().lock);
  if (state.cqs >= state.config.limits.max_cq) return failed<ibv_cq>(ENOMEM);
  auto* const cq = new Cq();
  cq->context = context;
  cq->channel = channel;
  cq->cq_context = cookie;
  cq->cqe = entries;
  cq->state = &state;
  cq->ring.resize(std::size_t(entries));
  if (channel != nullptr) {
    Channel& shared = *static_cast<Channel*>(channel);
    std::lock_guard lock(shared.mutex);
    ++shared.refcnt;
    shared.cqs.push_back(cq);
  }
  ++state.cqs;
  ++static_cast<Context*>(context)->objects;
  ++world().live.cqs;
  return cq;
}

int destroy_cq(ibv_cq* base) {
  Alone alone(world().lock);
  Cq& cq = *static_cast<Cq*>(base);
  if (cq.users != 0) return EBUSY;
  if (cq.channel != nullptr) {
    Channel& channel = *static_cast<Channel*>(cq.channel);
    std::lock_guard lock(channel.mutex);
    if (cq.delivered != cq.acknowledged) {
      misuse("a completion queue is destroyed while events of it are not acknowledged");
      return EBUSY;
    }
    for (; cq.undelivered > 0; --cq.undelivered) channel.tokens.take_back();
    std::erase(channel.cqs, &cq);
    --channel.refcnt;
  }
  forget_events(cq.context, [&](const ibv_async_event& event) {
    return event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == &cq;
  });
  if (cq.async_delivered != cq.async_acknowledged) {
    misuse("a completion queue is destroyed while asynchronous events of it are not acknowledged");
  }
  --cq.state->cqs;
  --static_cast<Context*>(cq.context)->objects;
  --world().live.cqs;
  delete &cq;
  return 0;
}

int get_cq_event(ibv_comp_channel* base, ibv_cq** cq, void** cookie) {
  Channel& channel = *static_cast<Channel*>(base);
  while (channel.tokens.take()) {
    std::lock_guard lock(channel.mutex);
    const auto at = std::find_if(channel.cqs.begin(), channel.cqs.end(), [](Cq* one) { return one->undelivered > 0; });
    if (at == channel.cqs.end()) continue;  // its queue was destroyed in between
    Cq& found = **at;
    --found.undelivered, ++found.delivered;
    std::rotate(at, at + 1, channel.cqs.end());
    *cq = &found;
    *cookie = found.cq_context;
    return 0;
  }
  return -1;
}

void ack_cq_events(ibv_cq* base, unsigned n) {
  Cq& cq = *static_cast<Cq*>(base);
  if (n == 0) return;
  std::lock_guard lock(static_cast<Channel*>(cq.channel)->mutex);
  cq.acknowledged += n;
  if (cq.acknowledged > cq.delivered) misuse("more completion events are acknowledged than there were");
}

// ---- Queue pairs ---------------------------------------------------------------------------------------------------

ibv_qp* create_qp(ibv_pd* base, ibv_qp_init_attr* init) {
  if (const int error = planned(Call::CreateQp); error != 0) return failed<ibv_qp>(error);
  World& w = world();
  Pd& pd = *static_cast<Pd*>(base);
  DeviceState& state = *pd.device;
  const Limits& limits = state.config.limits;
  const ibv_qp_cap& cap = init->cap;
  if (state.fatal) return failed<ibv_qp>(EIO);
  if (init->qp_type != IBV_QPT_RC || init->srq != nullptr) return failed<ibv_qp>(EOPNOTSUPP);
  if (init->send_cq == nullptr || init->recv_cq == nullptr || init->send_cq->context != pd.context ||
      init->recv_cq->context != pd.context) {
    return failed<ibv_qp>(EINVAL);
  }
  const auto most_wr = unsigned(limits.max_qp_wr), most_sge = unsigned(std::min(limits.max_sge, kMostSge));
  if (cap.max_send_wr > most_wr || cap.max_recv_wr > most_wr || cap.max_send_sge > most_sge ||
      cap.max_recv_sge > most_sge || cap.max_inline_data > limits.max_inline) {
    return failed<ibv_qp>(EINVAL);
  }
  Alone alone(w.lock);
  if (state.qps >= limits.max_qp) return failed<ibv_qp>(ENOMEM);
  auto* const qp = new Qp();
  qp->context = pd.context;
  qp->qp_context = init->qp_context;
  qp->pd = &pd;
  qp->send_cq = init->send_cq;
  qp->recv_cq = init->recv_cq;
  qp->state = IBV_QPS_RESET;
  qp->qp_type = IBV_QPT_RC;
  do {  // every number of 24 bits once, in an order that shows whoever keeps fewer
    qp->qp_num = w.next_qp++ * 0x9E3779u & 0xFFFFFFu;
  } while (qp->qp_num < 2 || qp_of(qp->qp_num) != nullptr);
  qp->device = &state;
  qp->init = *init;
  qp->mode = w.mode;
  qp->sends.resize(cap.max_send_wr);
  qp->send_sges.resize(std::size_t{cap.max_send_wr} * cap.max_send_sge);
  qp->inlines.resize(std::size_t{cap.max_send_wr} * cap.max_inline_data);
  qp->receives.resize(cap.max_recv_wr);
  qp->receive_sges.resize(std::size_t{cap.max_recv_wr} * cap.max_recv_sge);
  w.qps.push_back(qp);
  ++w.generation;
  ++state.qps, ++pd.users, ++static_cast<Cq*>(qp->send_cq)->users, ++static_cast<Cq*>(qp->recv_cq)->users;
  ++w.live.qps;
  return qp;
}

struct Transition {
  ibv_qp_state from, to;
  int required, optional;
};
constexpr Transition kTransitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
     IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
};

const Gid* gid_at(const Port& port, std::uint32_t index) {
  const auto at = std::find_if(port.gids.begin(), port.gids.end(), [&](const Gid& gid) { return gid.index == index; });
  return at == port.gids.end() ? nullptr : &*at;
}

bool is_ipv4(const ibv_gid& gid) {
  static constexpr std::uint8_t prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, prefix, sizeof prefix) == 0;
}

// The errno of a value that is not allowed, or 0.
int check_values(const Qp& qp, const ibv_qp_attr& attr, int mask) {
  const Device& device = qp.device->config;
  const Limits& limits = device.limits;
  if ((mask & IBV_QP_PORT) != 0 && (attr.port_num == 0 || attr.port_num > device.ports.size())) return EINVAL;
  if ((mask & IBV_QP_PKEY_INDEX) != 0 && attr.pkey_index != 0) return EINVAL;
  constexpr unsigned known =
      IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
  if ((mask & IBV_QP_ACCESS_FLAGS) != 0 && (attr.qp_access_flags & ~known) != 0) return EINVAL;
  if ((mask & IBV_QP_DEST_QPN) != 0 && attr.dest_qp_num > 0xFFFFFF) return EINVAL;
  if ((mask & IBV_QP_RQ_PSN) != 0 && attr.rq_psn > 0xFFFFFF) return EINVAL;
  if ((mask & IBV_QP_SQ_PSN) != 0 && attr.sq_psn > 0xFFFFFF) return EINVAL;
  if ((mask & IBV_QP_TIMEOUT) != 0 && attr.timeout > 31) return EINVAL;
  if ((mask & IBV_QP_MIN_RNR_TIMER) != 0 && attr.min_rnr_timer > 31) return EINVAL;
  if ((mask & IBV_QP_RETRY_CNT) != 0 && attr.retry_cnt > 7) return EINVAL;
  if ((mask & IBV_QP_RNR_RETRY) != 0 && attr.rnr_retry > 7) return EINVAL;
  if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) != 0 && attr.max_rd_atomic > limits.max_qp_init_rd_atom) return EINVAL;
  if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) != 0 && attr.max_dest_rd_atomic > limits.max_qp_rd_atom) return EINVAL;
  if ((mask & IBV_QP_PATH_MTU) != 0 && (attr.path_mtu < IBV_MTU_256 || attr.path_mtu > port_of(qp).active_mtu)) {
    return EINVAL;
  }
  if ((mask & IBV_QP_AV) == 0) return 0;
  const ibv_ah_attr& av = attr.ah_attr;
  const Port& port = port_of(qp);
  if (av.port_num != qp.attr.port_num) return EINVAL;
  if (!av.is_global) return port.link_layer == IBV_LINK_LAYER_INFINIBAND && av.dlid != 0 ? 0 : EINVAL;
  const Gid* const gid = gid_at(port, av.grh.sgid_index);
  static constexpr ibv_gid none{};
  if (gid == nullptr || std::memcmp(&av.grh.dgid, &none, sizeof none) == 0) return EINVAL;
  if (gid->type == IBV_GID_TYPE_ROCE_V2 && is_ipv4(gid_of(gid->address)) != is_ipv4(av.grh.dgid)) return ENETUNREACH;
  return 0;
}

void reset_qp(Qp& qp) {
  purge(qp.send_cq, qp);
  purge(qp.recv_cq, qp);
  qp.sends_head = qp.sends_done = qp.sends_freed = 0;
  qp.receives_head = qp.receives_done = 0;
  qp.receives_freed = 0;
  qp.reads_upto = 0;
  qp.stalled = qp.must_run = qp.must_fail = false;
  qp.attr = {};
}

int modify_qp(ibv_qp* base, ibv_qp_attr* attr, int mask) {
  if (const int error = planned(Call::ModifyQp); error != 0) return error;
  World& w = world();
  Qp& qp = *static_cast<Qp*>(base);
  if (qp.device->fatal) return EIO;
  {
    Alone alone(w.lock);
    const auto now = static_cast<ibv_qp_state>(qp.now.load());
    if ((mask & IBV_QP_CUR_STATE) != 0 && attr->cur_qp_state != now) return EINVAL;
    const ibv_qp_state next = (mask & IBV_QP_STATE) != 0 ? attr->qp_state : now;
    if (next == IBV_QPS_ERR || next == IBV_QPS_RESET) {
      if ((mask & ~(IBV_QP_STATE | IBV_QP_CUR_STATE)) != 0) return EINVAL;
      std::lock_guard lock(qp.send_lock);
      if (next == IBV_QPS_ERR) {
        if (now == IBV_QPS_RESET) return EINVAL;
        to_error(qp);
      } else {
        qp.now = IBV_QPS_RESET;
        reset_qp(qp);
      }
    } else {
      const int given = mask & ~IBV_QP_STATE;
      const auto* const step = std::find_if(std::begin(kTransitions), std::end(kTransitions),
                                            [&](const Transition& one) { return one.from == now && one.to == next; });
      if (step == std::end(kTransitions)) return EINVAL;
      if ((given & step->required) != step->required || (given & ~(step->required | step->optional)) != 0)
        return EINVAL;
      if (const int error = check_values(qp, *attr, mask); error != 0) return error;
      if ((mask & IBV_QP_PORT) != 0) qp.attr.port_num = attr->port_num;
      if ((mask & IBV_QP_PKEY_INDEX) != 0) qp.attr.pkey_index = attr->pkey_index;
      if ((mask & IBV_QP_ACCESS_FLAGS) != 0) qp.attr.qp_access_flags = attr->qp_access_flags;
      if ((mask & IBV_QP_PATH_MTU) != 0) qp.attr.path_mtu = attr->path_mtu;
      if ((mask & IBV_QP_DEST_QPN) != 0) qp.attr.dest_qp_num = attr->dest_qp_num;
      if ((mask & IBV_QP_RQ_PSN) != 0) qp.attr.rq_psn = attr->rq_psn;
      if ((mask & IBV_QP_SQ_PSN) != 0) qp.attr.sq_psn = attr->sq_psn;
      if ((mask & IBV_QP_TIMEOUT) != 0) qp.attr.timeout = attr->timeout;
      if ((mask & IBV_QP_RETRY_CNT) != 0) qp.attr.retry_cnt = attr->retry_cnt;
      if ((mask & IBV_QP_RNR_RETRY) != 0) qp.attr.rnr_retry = attr->rnr_retry;
      if ((mask & IBV_QP_MIN_RNR_TIMER) != 0) qp.attr.min_rnr_timer = attr->min_rnr_timer;
      if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) != 0) qp.attr.max_rd_atomic = attr->max_rd_atomic;
      if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) != 0) qp.attr.max_dest_rd_atomic = attr->max_dest_rd_atomic;
      if ((mask & IBV_QP_AV) != 0) {
        qp.attr.ah_attr = attr->ah_attr;
        if (attr->ah_attr.is_global) {
          const Gid& gid = *gid_at(port_of(qp), attr->ah_attr.grh.sgid_index);
          qp.sgid = gid_of(gid.address);
          qp.sgid_type = gid.type;
        }
      }
      qp.now = next;
    }
    qp.state = next;
    ++w.generation;
    run_stalled();
  }
  Shared shared(w.lock);
  settle();
  return 0;
}

int query_qp(ibv_qp* base, ibv_qp_attr* attr, int, ibv_qp_init_attr* init) {
  Qp& qp = *static_cast<Qp*>(base);
  if (qp.device->fatal) return EIO;
  Shared shared(world().lock);
  *attr = qp.attr;
  attr->qp_state = attr->cur_qp_state = static_cast<ibv_qp_state>(qp.now.load());
  attr->cap = qp.init.cap;
  *init = qp.init;
  qp.state = attr->qp_state;
  return 0;
}

int destroy_qp(ibv_qp* base) {
  World& w = world();
  Alone alone(w.lock);
  Qp& qp = *static_cast<Qp*>(base);
  forget_events(qp.context,
                [&](const ibv_async_event& event) { return is_about_qp(event.event_type) && event.element.qp == &qp; });
  if (qp.async_delivered != qp.async_acknowledged) {
    misuse("a queue pair is destroyed while asynchronous events of it are not acknowledged");
  }
  purge(qp.send_cq, qp);
  purge(qp.recv_cq, qp);
  std::erase(w.qps, &qp);
  ++w.generation;
  --qp.device->qps, --static_cast<Pd*>(qp.pd)->users;
  --static_cast<Cq*>(qp.send_cq)->users, --static_cast<Cq*>(qp.recv_cq)->users;
  --w.live.qps;
  delete &qp;
  return 0;
}

// ---- Asynchronous events -------------------------------------------------------------------------------------------

int get_async_event(ibv_context* base, ibv_async_event* event) {
  Context& context = *static_cast<Context*>(base);
  while (context.tokens.take()) {
    std::lock_guard lock(world().events);
    if (context.events.empty()) continue;  // what it was about was destroyed in between
    *event = context.events.front();
    context.events.pop_front();
    if (is_about_qp(event->event_type)) ++static_cast<Qp*>(event->element.qp)->async_delivered;
    if (event->event_type == IBV_EVENT_CQ_ERR) ++static_cast<Cq*>(event->element.cq)->async_delivered;
    return 0;
  }
  return -1;
}

void ack_async_event(ibv_async_event* event) {
  std::lock_guard lock(world().events);
  if (is_about_qp(event->event_type)) ++static_cast<Qp*>(event->element.qp)->async_acknowledged;
  if (event->event_type == IBV_EVENT_CQ_ERR) ++static_cast<Cq*>(event->element.cq)->async_acknowledged;
}

const char* wc_status_str(ibv_wc_status status) {
  static constexpr const char* texts[] = {"success",
                                          "local length error",
                                          "local QP operation error",
                                          "local EE context operation error",
                                          "local protection error",
                                          "Work Request Flushed Error",
                                          "memory management operation error",
                                          "bad response error",
                                          "local access error",
                                          "remote invalid request error",
                                          "remote access error",
                                          "remote operation error",
                                          "transport retry counter exceeded",
                                          "RNR retry counter exceeded"};
  return std::size_t(status) < std::size(texts) ? texts[status] : "other error";
}

int fork_init() {
  return 0;
}

// ---- The machine ---------------------------------------------------------------------------------------------------

void remove_folder() {
  World& w = world();
  std::error_code ignored;
  // A forked child leaves it to its parent.
  if (!w.folder.empty() && w.folder_of == ::getpid()) std::filesystem::remove_all(w.folder, ignored);
  w.folder.clear();
}

// What sysfs says of the devices, as far as users of verbs read it. It stays for the next test that has the same ones.
void make_folder(const Machine& machine) {
  World& w = world();
  std::string layout;
  for (const Device& device : machine.devices) {
    layout += device.name + ' ' + device.pci_path + ' ' + std::to_string(device.numa_node) + '\n';
  }
  if (layout.empty() || (layout == w.folder_layout && !w.folder.empty())) return;
  remove_folder();
  std::string pattern = (std::filesystem::temp_directory_path() / "fake-verbs-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) std::abort();
  w.folder = pattern;
  w.folder_layout = layout;
  w.folder_of = ::getpid();
  static const bool at_exit = std::atexit(remove_folder) == 0;
  if (!at_exit) std::abort();
  for (const Device& device : machine.devices) {
    const auto path = w.folder / "sys/class/infiniband" / device.name;
    std::filesystem::create_directories(path);
    if (device.pci_path.empty()) continue;
    const auto pci = w.folder / "sys/devices" / device.pci_path;
    std::filesystem::create_directories(pci);
    std::ofstream(pci / "numa_node") << device.numa_node << '\n';
    std::filesystem::create_directory_symlink(pci, path / "device");
  }
}

DeviceState* device_named(const std::string& name) {
  for (const auto& state : world().devices) {
    if (state->config.name == name) return state.get();
  }
  misuse("there is no device of that name");
  return nullptr;
}

void set_port(const std::string& device, std::uint8_t number, ibv_port_state to, ibv_event_type type) {
  World& w = world();
  {
    Alone alone(w.lock);
    DeviceState* const state = device_named(device);
    if (state == nullptr || number == 0 || number > state->config.ports.size()) return;
    state->config.ports[number - 1].state = to;
    ++w.generation;
    ibv_async_event event{};
    event.element.port_num = number;
    event.event_type = type;
    for (Context* const context : state->contexts) raise(*context, event);
    run_stalled();
  }
  Shared shared(w.lock);
  settle();
}

void set_mode(std::uint32_t qp_num, Mode mode) {
  World& w = world();
  {
    Alone alone(w.lock);
    if (qp_num == 0) w.mode = mode;
    for (Qp* const qp : w.qps) {
      if (qp_num != 0 && qp->qp_num != qp_num) continue;
      qp->mode = mode;
      if (mode == Mode::Immediate) qp->must_run = w.unsettled = true;
    }
  }
  Shared shared(w.lock);
  settle();
}

}  // namespace

ibv_gid gid_of(const std::string& address) {
  ibv_gid gid{};
  if (::inet_pton(AF_INET6, address.c_str(), gid.raw) == 1) return gid;
  gid = {};
  gid.raw[10] = gid.raw[11] = 0xff;
  if (::inet_pton(AF_INET, address.c_str(), gid.raw + 12) != 1) misuse("a GID is neither an IPv4 nor an IPv6 address");
  return gid;
}

Device default_device(unsigned n) {
  const std::string number = std::to_string(n), interface = "eth" + number;
  const std::string local = "fe80::ba59:9fff:fe00:" + number, global = "10.77." + number + ".1";
  Device device;
  device.name = "fake" + number;
  device.numa_node = 0;
  device.pci_path = "pci0000:00/0000:00:0" + std::to_string(n + 1) + ".0/0000:0" + std::to_string(n + 1) + ":00.0";
  device.ports.emplace_back();
  device.ports[0].gids = {{local, 0, IBV_GID_TYPE_ROCE_V1, interface},
                          {local, 1, IBV_GID_TYPE_ROCE_V2, interface},
                          {global, 2, IBV_GID_TYPE_ROCE_V1, interface},
                          {global, 3, IBV_GID_TYPE_ROCE_V2, interface}};
  return device;
}

Machine default_machine(unsigned devices) {
  Machine machine;
  for (unsigned n = 0; n < devices; ++n) machine.devices.push_back(default_device(n));
  return machine;
}

void reset(const Machine& machine) {
  World& w = world();
  end_worker();
  Alone alone(w.lock);
  if (w.live.total() != 0) {
    misuse("what was made from the table outlives the test");
    return;
  }
  make_folder(machine);
  w.devices.clear();
  w.interfaces.clear();
  for (const Device& device : machine.devices) {
    auto state = std::make_shared<DeviceState>();
    state->config = device;
    state->path = (w.folder / "sys/class/infiniband" / device.name).string();
    w.devices.push_back(std::move(state));
    for (const Port& port : device.ports) {
      for (const Gid& gid : port.gids) {
        const bool known = std::any_of(w.interfaces.begin(), w.interfaces.end(),
                                       [&](const verbs::NetworkInterface& one) { return one.name == gid.interface; });
        if (!known && !gid.interface.empty()) w.interfaces.push_back({gid.interface, gid.is_bridge});
      }
    }
  }
  w.mode = Mode::Immediate;
  w.on_post = nullptr;
  w.aborts = true;
  w.delay_us = 20;
  {
    std::lock_guard lock(w.plans);
    w.failing_calls = {};
    w.failing_completions.clear();
    w.calls_fail = 0;
    w.completions_fail = false;
  }
  reset_counts();
}

const verbs::Api& table() {
  static const verbs::Api functions = {
      .get_device_list = get_device_list,
      .free_device_list = free_device_list,
      .get_device_name = get_device_name,
      .open_device = open_device,
      .close_device = close_device,
      .query_device = query_device,
      .query_port = query_port,
      .query_gid_table = query_gid_table,
      .network_interface = network_interface,
      .alloc_pd = alloc_pd,
      .dealloc_pd = dealloc_pd,
      .reg_mr = reg_mr,
      .reg_dmabuf_mr = reg_dmabuf_mr,
      .dereg_mr = dereg_mr,
      .create_comp_channel = create_comp_channel,
      .destroy_comp_channel = destroy_comp_channel,
      .create_cq = create_cq,
      .destroy_cq = destroy_cq,
      .get_cq_event = get_cq_event,
      .ack_cq_events = ack_cq_events,
      .create_qp = create_qp,
      .modify_qp = modify_qp,
      .query_qp = query_qp,
      .destroy_qp = destroy_qp,
      .get_async_event = get_async_event,
      .ack_async_event = ack_async_event,
      .wc_status_str = wc_status_str,
      .fork_init = fork_init,
  };
  return functions;
}

void deliver_immediately(std::uint32_t qp_num) {
  set_mode(qp_num, Mode::Immediate);
}

void deliver_in_thread(std::uint32_t qp_num, unsigned delay_us) {
  World& w = world();
  w.delay_us = delay_us;
  if (!w.worker.joinable()) w.worker = std::thread(work);
  set_mode(qp_num, Mode::Thread);
  call_worker();
}

void hold(std::uint32_t qp_num) {
  set_mode(qp_num, Mode::Held);
}

std::size_t release(std::size_t n, std::uint32_t qp_num) {
  World& w = world();
  Shared shared(w.lock);
  std::size_t released = 0;
  while (released < n) {
    Qp* oldest = nullptr;
    std::uint64_t number = UINT64_MAX;
    for (Qp* const qp : w.qps) {
      if ((qp_num != 0 && qp->qp_num != qp_num) || qp->mode != Mode::Held || qp->stalled) continue;
      if (qp->device->fatal) continue;
      std::lock_guard lock(qp->send_lock);
      if (!qp->has_pending() || qp->send(qp->sends_done).number >= number) continue;
      oldest = qp;
      number = qp->send(qp->sends_done).number;
    }
    if (oldest == nullptr) break;
    {
      std::lock_guard lock(oldest->send_lock);
      released += advance(*oldest, 1);
    }
    settle();
  }
  return released;
}

std::size_t release_all(std::uint32_t qp_num) {
  const std::size_t released = release(SIZE_MAX, qp_num);
  deliver_immediately(qp_num);
  return released;
}

std::size_t pending(std::uint32_t qp_num) {
  Shared shared(world().lock);
  std::size_t n = 0;
  for (Qp* const qp : world().qps) {
    if (qp_num != 0 && qp->qp_num != qp_num) continue;
    std::lock_guard lock(qp->send_lock);
    n += qp->sends_head - qp->sends_done;
  }
  return n;
}

void fail(Call call, int error, std::uint64_t nth, std::uint64_t times) {
  World& w = world();
  std::lock_guard lock(w.plans);
  w.failing_calls[unsigned(call)] = {nth - 1, times, error};
  w.calls_fail |= 1u << unsigned(call);
}

void fail_completion(ibv_wc_status status, std::uint64_t nth, std::uint32_t qp_num, bool executed) {
  World& w = world();
  std::lock_guard lock(w.plans);
  w.failing_completions.push_back({nth - 1, qp_num, status, executed});
  w.completions_fail = true;
}

void peer_gone(std::uint32_t qp_num, bool gone) {
  World& w = world();
  {
    Alone alone(w.lock);
    for (Qp* const qp : w.qps) {
      if (qp_num == 0 || qp->qp_num == qp_num) qp->deaf = gone;
    }
    ++w.generation;
    run_stalled();
  }
  Shared shared(w.lock);
  settle();
}

void port_down(const std::string& device, std::uint8_t port) {
  set_port(device, port, IBV_PORT_DOWN, IBV_EVENT_PORT_ERR);
}

void port_up(const std::string& device, std::uint8_t port) {
  set_port(device, port, IBV_PORT_ACTIVE, IBV_EVENT_PORT_ACTIVE);
}

void device_fatal(const std::string& device) {
  World& w = world();
  Alone alone(w.lock);
  DeviceState* const state = device_named(device);
  if (state == nullptr) return;
  state->fatal = true;
  ++w.generation;
  ibv_async_event event{};
  event.event_type = IBV_EVENT_DEVICE_FATAL;
  for (Context* const context : state->contexts) raise(*context, event);
}

void qp_fatal(std::uint32_t qp_num) {
  World& w = world();
  Shared shared(w.lock);
  for (Qp* const qp : w.qps) {
    if (qp_num != 0 && qp->qp_num != qp_num) continue;
    std::lock_guard lock(qp->send_lock);
    if (qp->now == IBV_QPS_RESET) continue;
    to_error(*qp);
    raise(*qp, IBV_EVENT_QP_FATAL);
  }
  settle();
}

void cq_error(std::uint32_t qp_num) {
  World& w = world();
  Shared shared(w.lock);
  for (Qp* const qp : w.qps) {
    if (qp_num != 0 && qp->qp_num != qp_num) continue;
    Cq& cq = *static_cast<Cq*>(qp->send_cq);
    std::lock_guard lock(cq.lock);
    break_cq(cq);
  }
  settle();
}

void on_post(OnPost hook) {
  world().on_post.store(hook, std::memory_order_release);
}

void abort_on_misuse(bool abort) {
  world().aborts = abort;
}

Live live() {
  Shared shared(world().lock);
  return world().live;
}

Counts counts() {
  const World& w = world();
  return {w.post_sends, w.wrs,         w.signaled, w.inlined, w.post_recvs, w.cqes,   w.polls,
          w.arms,       w.comp_events, w.reg_mrs,  w.retries, w.unfenced,   w.misuses};
}

Traffic traffic(const std::string& device) {
  Shared shared(world().lock);
  const DeviceState* const state = device_named(device);
  return state == nullptr ? Traffic() : Traffic{state->wrs, state->written, state->read, state->atomic_ops};
}

void reset_counts() {
  World& w = world();
  for (Count* const counter : {&w.post_sends, &w.wrs, &w.signaled, &w.inlined, &w.post_recvs, &w.cqes, &w.polls,
                               &w.arms, &w.comp_events, &w.reg_mrs, &w.retries, &w.unfenced, &w.misuses}) {
    *counter = 0;
  }
  for (const auto& state : w.devices) state->wrs = state->written = state->read = state->atomic_ops = 0;
}

std::vector<std::uint32_t> qp_nums(const std::string& device) {
  Shared shared(world().lock);
  std::vector<std::uint32_t> numbers;
  for (const Qp* const qp : world().qps) {
    if (device.empty() || qp->device->config.name == device) numbers.push_back(qp->qp_num);
  }
  return numbers;
}

ibv_qp_state state_of(std::uint32_t qp_num) {
  Shared shared(world().lock);
  const Qp* const qp = qp_of(qp_num);
  return qp == nullptr ? IBV_QPS_UNKNOWN : static_cast<ibv_qp_state>(qp->now.load());
}

}  // namespace onesided::tests::fake

// ---- For Python's ctypes -------------------------------------------------------------------------------------------
// The same in plain C; what is chosen from a list is chosen by its name. See tests/fake_verbs.py.

namespace {

namespace fake = onesided::tests::fake;

fake::Machine next_machine;

template <class Value>
struct Named {
  const char* name;
  Value value;
};

// The value of that name, or null.
template <class Value, std::size_t n>
const Value* find(const Named<Value> (&all)[n], const char* name) {
  const auto at = std::find_if(std::begin(all), std::end(all),
                               [&](const Named<Value>& one) { return std::strcmp(one.name, name) == 0; });
  return at == std::end(all) ? nullptr : &at->value;
}

constexpr Named<fake::Call> kCallNames[] = {
    {"get_device_list", fake::Call::GetDeviceList},
    {"open_device", fake::Call::OpenDevice},
    {"query_device", fake::Call::QueryDevice},
    {"query_port", fake::Call::QueryPort},
    {"query_gid_table", fake::Call::QueryGidTable},
    {"alloc_pd", fake::Call::AllocPd},
    {"reg_mr", fake::Call::RegMr},
    {"reg_dmabuf_mr", fake::Call::RegDmabufMr},
    {"create_comp_channel", fake::Call::CreateCompChannel},
    {"create_cq", fake::Call::CreateCq},
    {"req_notify_cq", fake::Call::ReqNotifyCq},
    {"create_qp", fake::Call::CreateQp},
    {"modify_qp", fake::Call::ModifyQp},
    {"post_send", fake::Call::PostSend},
    {"post_recv", fake::Call::PostRecv},
};
static_assert(std::size(kCallNames) == fake::kCalls);

constexpr Named<std::uint64_t fake::Counts::*> kCountNames[] = {
    {"post_sends", &fake::Counts::post_sends}, {"wrs", &fake::Counts::wrs},
    {"signaled", &fake::Counts::signaled},     {"inlined", &fake::Counts::inlined},
    {"post_recvs", &fake::Counts::post_recvs}, {"cqes", &fake::Counts::cqes},
    {"polls", &fake::Counts::polls},           {"arms", &fake::Counts::arms},
    {"events", &fake::Counts::events},         {"reg_mrs", &fake::Counts::reg_mrs},
    {"retries", &fake::Counts::retries},       {"unfenced", &fake::Counts::unfenced},
    {"misuses", &fake::Counts::misuses},
};
static_assert(sizeof(fake::Counts) == std::size(kCountNames) * sizeof(std::uint64_t));

constexpr Named<std::size_t fake::Live::*> kLiveNames[] = {
    {"device_lists", &fake::Live::device_lists},
    {"contexts", &fake::Live::contexts},
    {"pds", &fake::Live::pds},
    {"mrs", &fake::Live::mrs},
    {"channels", &fake::Live::channels},
    {"cqs", &fake::Live::cqs},
    {"qps", &fake::Live::qps},
    {"registered_bytes", &fake::Live::registered_bytes},
};
static_assert(sizeof(fake::Live) == std::size(kLiveNames) * sizeof(std::size_t));

constexpr Named<std::uint64_t fake::Traffic::*> kTrafficNames[] = {
    {"wrs", &fake::Traffic::wrs},
    {"written", &fake::Traffic::written},
    {"read", &fake::Traffic::read},
    {"atomics", &fake::Traffic::atomics},
};
static_assert(sizeof(fake::Traffic) == std::size(kTrafficNames) * sizeof(std::uint64_t));

using SetLimit = void (*)(fake::Limits& limits, std::uint64_t value);
constexpr Named<SetLimit> kLimitNames[] = {
    {"max_mr", [](fake::Limits& limits, std::uint64_t value) { limits.max_mr = int(value); }},
    {"max_mr_size", [](fake::Limits& limits, std::uint64_t value) { limits.max_mr_size = value; }},
    {"max_registered", [](fake::Limits& limits, std::uint64_t value) { limits.max_registered = value; }},
    {"max_qp", [](fake::Limits& limits, std::uint64_t value) { limits.max_qp = int(value); }},
    {"max_qp_wr", [](fake::Limits& limits, std::uint64_t value) { limits.max_qp_wr = int(value); }},
    {"max_cq", [](fake::Limits& limits, std::uint64_t value) { limits.max_cq = int(value); }},
    {"max_cqe", [](fake::Limits& limits, std::uint64_t value) { limits.max_cqe = int(value); }},
    {"max_sge", [](fake::Limits& limits, std::uint64_t value) { limits.max_sge = int(value); }},
    {"max_inline", [](fake::Limits& limits, std::uint64_t value) { limits.max_inline = std::uint32_t(value); }},
    {"max_qp_rd_atom", [](fake::Limits& limits, std::uint64_t value) { limits.max_qp_rd_atom = int(value); }},
    {"max_qp_init_rd_atom", [](fake::Limits& limits, std::uint64_t value) { limits.max_qp_init_rd_atom = int(value); }},
    {"atomic_cap", [](fake::Limits& limits, std::uint64_t value) { limits.atomic_cap = ibv_atomic_cap(value); }},
    {"torn_atomics", [](fake::Limits& limits, std::uint64_t value) { limits.torn_atomics = value != 0; }},
};

}  // namespace

// Found by dlsym(), although the rest is hidden.
#pragma GCC visibility push(default)
extern "C" {

const onesided::verbs::Api* fake_verbs_table() {
  return &fake::table();
}

void fake_verbs_reset(unsigned devices) {
  fake::reset(fake::default_machine(devices));
}

// A machine of one's own: begin, then devices, to the last of them limits and ports, to the last of these GIDs, then commit.
void fake_verbs_begin() {
  next_machine = {};
}
void fake_verbs_add_device(const char* name, int numa_node, const char* pci_path, int open_fails, int vanishes) {
  fake::Device& device = next_machine.devices.emplace_back();
  device.name = name;
  device.numa_node = numa_node;
  device.pci_path = pci_path;
  device.open_fails = open_fails;
  device.vanishes = vanishes != 0;
}
// -1: there is no such limit.
int fake_verbs_set_limit(const char* name, std::uint64_t value) {
  const auto* const set = find(kLimitNames, name);
  if (set == nullptr || next_machine.devices.empty()) return -1;
  (*set)(next_machine.devices.back().limits, value);
  return 0;
}
void fake_verbs_add_port(int state, int link_layer, int lid, int active_mtu, int active_speed, int active_width) {
  fake::Port& port = next_machine.devices.back().ports.emplace_back();
  port.state = ibv_port_state(state);
  port.link_layer = std::uint8_t(link_layer);
  port.lid = std::uint16_t(lid);
  port.active_mtu = ibv_mtu(active_mtu);
  port.active_speed = std::uint8_t(active_speed);
  port.active_width = std::uint8_t(active_width);
}
void fake_verbs_add_gid(const char* address, unsigned index, unsigned type, const char* interface, int is_bridge) {
  next_machine.devices.back().ports.back().gids.push_back({address, index, type, interface, is_bridge != 0});
}
void fake_verbs_commit() {
  fake::reset(next_machine);
}

void fake_verbs_deliver_immediately(std::uint32_t qp_num) {
  fake::deliver_immediately(qp_num);
}
void fake_verbs_deliver_in_thread(std::uint32_t qp_num, unsigned delay_us) {
  fake::deliver_in_thread(qp_num, delay_us);
}
void fake_verbs_hold(std::uint32_t qp_num) {
  fake::hold(qp_num);
}
std::size_t fake_verbs_release(std::size_t n, std::uint32_t qp_num) {
  return fake::release(n, qp_num);
}
std::size_t fake_verbs_release_all(std::uint32_t qp_num) {
  return fake::release_all(qp_num);
}
std::size_t fake_verbs_pending(std::uint32_t qp_num) {
  return fake::pending(qp_num);
}

// -1: there is no such call.
int fake_verbs_fail(const char* call, int error, std::uint64_t nth, std::uint64_t times) {
  const fake::Call* const found = find(kCallNames, call);
  if (found == nullptr) return -1;
  fake::fail(*found, error, nth, times);
  return 0;
}
void fake_verbs_fail_completion(int status, std::uint64_t nth, std::uint32_t qp_num, int executed) {
  fake::fail_completion(ibv_wc_status(status), nth, qp_num, executed != 0);
}
void fake_verbs_peer_gone(std::uint32_t qp_num, int gone) {
  fake::peer_gone(qp_num, gone != 0);
}
void fake_verbs_port_down(const char* device, std::uint8_t port) {
  fake::port_down(device, port);
}
void fake_verbs_port_up(const char* device, std::uint8_t port) {
  fake::port_up(device, port);
}
void fake_verbs_device_fatal(const char* device) {
  fake::device_fatal(device);
}
void fake_verbs_qp_fatal(std::uint32_t qp_num) {
  fake::qp_fatal(qp_num);
}
void fake_verbs_cq_error(std::uint32_t qp_num) {
  fake::cq_error(qp_num);
}

// UINT64_MAX: there is nothing of that name.
std::uint64_t fake_verbs_count(const char* name) {
  const auto* const member = find(kCountNames, name);
  return member == nullptr ? UINT64_MAX : fake::counts().**member;
}
std::uint64_t fake_verbs_live(const char* name) {
  const auto* const member = find(kLiveNames, name);
  return member == nullptr ? UINT64_MAX : fake::live().**member;
}
std::uint64_t fake_verbs_traffic(const char* device, const char* name) {
  const auto* const member = find(kTrafficNames, name);
  return member == nullptr ? UINT64_MAX : fake::traffic(device).**member;
}
void fake_verbs_reset_counts() {
  fake::reset_counts();
}
// Writes up to `most` numbers and returns how many there are.
std::size_t fake_verbs_qp_nums(const char* device, std::uint32_t* numbers, std::size_t most) {
  const std::vector<std::uint32_t> found = fake::qp_nums(device);
  std::copy_n(found.begin(), std::min(most, found.size()), numbers);
  return found.size();
}
int fake_verbs_state_of(std::uint32_t qp_num) {
  return fake::state_of(qp_num);
}

}  // extern "C"
#pragma GCC visibility pop
#endif
