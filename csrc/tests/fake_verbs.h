// An RDMA provider inside this process, with failures that a test chooses: for what no software device can show.
//
// It is as strict as the strictest adapter: where the specification leaves something open, it does what breaks a careless
// user. A work request that nobody answers fails at once, not after a time of retries. Connections are reliable ones (RC) between any two contexts of this process. Execution is in order.
#pragma once

#include "verbs/api.h"

#if ONESIDED_HAS_VERBS
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace onesided::tests::fake {

// ---- What devices there are ----------------------------------------------------------------------------------------

// "10.77.0.1" (as an IPv4-mapped address) or "fe80::1".
ibv_gid gid_of(const std::string& address);

struct Gid {
  std::string address;
  std::uint32_t index = 0;  // gaps between the indices are holes in the table
  std::uint32_t type = IBV_GID_TYPE_ROCE_V2;
  std::string interface = "eth0";  // empty: none
  bool is_bridge = false;
};

struct Port {
  ibv_port_state state = IBV_PORT_ACTIVE;
  std::uint8_t link_layer = IBV_LINK_LAYER_ETHERNET;
  std::uint16_t lid = 0;
  ibv_mtu active_mtu = IBV_MTU_4096;
  std::uint8_t active_speed = 32;  // 25 Gbit/s a lane
  std::uint8_t active_width = 2;   // 4 lanes
  std::uint32_t max_msg_sz = 1u << 30;
  std::vector<Gid> gids;
};

// As of a ConnectX.
struct Limits {
  int max_mr = 1 << 24;
  std::uint64_t max_mr_size = UINT64_MAX;
  std::uint64_t max_registered = UINT64_MAX;  // bytes of all regions together, as of RLIMIT_MEMLOCK
  int max_qp = 1 << 17;
  int max_qp_wr = 8192;
  int max_cq = 1 << 20;
  int max_cqe = 4194303;
  int max_sge = 30;                // 64 at most
  std::uint32_t max_inline = 220;  // verbs have no query for it
  int max_qp_rd_atom = 16;         // as target
  int max_qp_init_rd_atom = 16;    // as initiator
  ibv_atomic_cap atomic_cap = IBV_ATOMIC_HCA;
  // Takes IBV_ATOMIC_HCA by its word: atomic only among what this device does, not towards processors and other devices.
  bool torn_atomics = false;
};

struct Device {
  std::string name;
  int numa_node = 0;     // -1: none
  std::string pci_path;  // below /sys/devices, "pci0000:00/0000:00:01.0/0000:01:00.0"; empty: a software device
  std::vector<Port> ports;
  Limits limits;
  int open_fails = 0;     // the errno
  bool vanishes = false;  // is listed once, and cannot be opened any more
  ibv_transport_type transport = IBV_TRANSPORT_IB;
};

struct Machine {
  std::vector<Device> devices;
};

// "fakeN" with one active RoCE port, whose table holds link-local entries and RoCE v1 before 10.77.N.1 at index 3.
Device default_device(unsigned n);
Machine default_machine(unsigned devices = 2);

// Forgets all injections and counts. Nothing made from the table may live.
void reset(const Machine& machine = default_machine());

// Answers the whole table of verbs; the same object always.
const verbs::Api& table();

// The fake in place of libibverbs for as long as this object lives.
class InUse {
 public:
  explicit InUse(const Machine& machine = default_machine()) {
    reset(machine);
    verbs::use_api(&table());
  }
  ~InUse() {
    verbs::use_api(nullptr);
    reset(Machine());
  }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;
};

// ---- When work requests are executed -------------------------------------------------------------------------------
// A queue pair is named by its qp_num; 0 is all, also those made later.

// Within ibv_post_send, by the posting thread. The default; what is held is executed now.
void deliver_immediately(std::uint32_t qp_num = 0);
// By a thread of the fake, `delay_us` after the previous one.
void deliver_in_thread(std::uint32_t qp_num = 0, unsigned delay_us = 20);
// Not at all: their sources are not read before release(), nor ever if the queue pair fails first.
void hold(std::uint32_t qp_num = 0);
// Executes the `n` oldest by order of posting, and goes on holding. Returns how many there were.
std::size_t release(std::size_t n, std::uint32_t qp_num = 0);
// Executes all, and ends the holding.
std::size_t release_all(std::uint32_t qp_num = 0);
// Posted, and neither executed nor flushed.
std::size_t pending(std::uint32_t qp_num = 0);

// ---- What fails ----------------------------------------------------------------------------------------------------

enum class Call : unsigned {
  GetDeviceList,
  OpenDevice,
  QueryDevice,
  QueryPort,
  QueryGidTable,
  AllocPd,
  RegMr,
  RegDmabufMr,
  CreateCompChannel,
  CreateCq,
  ReqNotifyCq,
  CreateQp,
  ModifyQp,
  PostSend,
  PostRecv,
};
inline constexpr unsigned kCalls = unsigned(Call::PostRecv) + 1;

// The `nth` call from here on (1 is the next) fails with `error`, an errno, and so do those after it, `times` in all.
// Of PostSend and PostRecv each work request counts, so that one in the middle of a list can fail.
void fail(Call call, int error, std::uint64_t nth = 1, std::uint64_t times = 1);

// The `nth` work request from here on that is executed ends with `status`, and its queue pair in the error state.
// `executed`: it took effect nevertheless, as when the acknowledgement is lost.
void fail_completion(ibv_wc_status status, std::uint64_t nth = 1, std::uint32_t qp_num = 0, bool executed = false);

// Nothing answers at this queue pair any more: work requests to it end with RETRY_EXC, or never with retry_cnt 7.
// Its owner is not told.
void peer_gone(std::uint32_t qp_num, bool gone = true);

// Changes the port's state and raises IBV_EVENT_PORT_ERR or _PORT_ACTIVE. What is posted meanwhile is retried in vain.
void port_down(const std::string& device, std::uint8_t port = 1);
void port_up(const std::string& device, std::uint8_t port = 1);
// IBV_EVENT_DEVICE_FATAL: nothing posted is ever completed, new calls fail with EIO.
void device_fatal(const std::string& device);
// IBV_EVENT_QP_FATAL: to the error state, with a flush.
void qp_fatal(std::uint32_t qp_num);
// IBV_EVENT_CQ_ERR, and every queue pair that uses it to the error state. It is the send queue's.
void cq_error(std::uint32_t qp_num);

// Called at the begin of every ibv_post_send, by its thread and with no lock held. Null for none.
using OnPost = void (*)(ibv_qp* qp, const ibv_send_wr* wr);
void on_post(OnPost hook);

// A use that real verbs punish by a hang or by a leak (destroying what has unacknowledged events, closing a device that is
// in use) aborts with a message; for tests of the fake it can be counted instead.
void abort_on_misuse(bool abort);

// ---- What happened -------------------------------------------------------------------------------------------------

struct Live {
  std::size_t device_lists = 0, contexts = 0, pds = 0, mrs = 0, channels = 0, cqs = 0, qps = 0;
  std::size_t registered_bytes = 0;

  std::size_t total() const { return device_lists + contexts + pds + mrs + channels + cqs + qps; }
};
Live live();

struct Counts {
  std::uint64_t post_sends = 0;  // calls, each one a doorbell
  std::uint64_t wrs = 0;         // work requests taken in by them
  std::uint64_t signaled = 0;    // of these, those with a completion of their own
  std::uint64_t inlined = 0;
  std::uint64_t post_recvs = 0;
  std::uint64_t cqes = 0;    // generated
  std::uint64_t polls = 0;   // calls of ibv_poll_cq
  std::uint64_t arms = 0;    // calls of ibv_req_notify_cq
  std::uint64_t events = 0;  // completion events
  std::uint64_t reg_mrs = 0;
  std::uint64_t retries = 0;  // of work requests nothing answered to
  // Writes and sends of what a read or atomic before them may still be filling: no completion that covers it was polled, and
  // there is no IBV_SEND_FENCE. They are executed in order here, and would not be by an adapter.
  std::uint64_t unfenced = 0;
  std::uint64_t misuses = 0;
};
Counts counts();

struct Traffic {
  std::uint64_t wrs = 0;      // executed with success
  std::uint64_t written = 0;  // bytes that left the device by a write or send
  std::uint64_t read = 0;     // bytes that a read brought
  std::uint64_t atomics = 0;
};
Traffic traffic(const std::string& device);
void reset_counts();

// The queue pairs that live, in order of creation; of one device, or of all.
std::vector<std::uint32_t> qp_nums(const std::string& device = "");
// IBV_QPS_UNKNOWN if there is none such. Unlike ibv_query_qp() it does not tell the owner.
ibv_qp_state state_of(std::uint32_t qp_num);

}  // namespace onesided::tests::fake
#endif
