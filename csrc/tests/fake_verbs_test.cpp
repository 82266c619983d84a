#include "verbs/api.h"

#if ONESIDED_HAS_VERBS
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <set>

#include "tests/fake_verbs.h"
#include "tests/support.h"

namespace onesided::tests {
namespace {

using fake::Call;

constexpr int kAllAccess =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
constexpr int kToInit = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
constexpr int kToRtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
constexpr int kToRts =
    IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;

const verbs::Api& api() {
  return fake::table();
}

struct EndOptions {
  const char* device = "fake0";
  unsigned max_send_wr = 16;
  unsigned max_recv_wr = 8;
  int cqe = 64;
  int sq_sig_all = 0;
  unsigned max_inline = 64;
};

// One side of a connection, with all that it needs.
struct End {
  explicit End(const EndOptions& options = {}) {
    int n = 0;
    ibv_device** const list = api().get_device_list(&n);
    for (int i = 0; i < n; ++i) {
      if (std::string(api().get_device_name(list[i])) == options.device) context = api().open_device(list[i]);
    }
    api().free_device_list(list);
    REQUIRE(context != nullptr);
    pd = api().alloc_pd(context);
    channel = api().create_comp_channel(context);
    cq = api().create_cq(context, options.cqe, this, channel, 0);
    REQUIRE(cq != nullptr);
    make_qp(options);
    mr = api().reg_mr(pd, memory, sizeof memory, reinterpret_cast<std::uint64_t>(memory), kAllAccess);
    REQUIRE(mr != nullptr);
    gid = fake::gid_of(std::string(options.device) == "fake0" ? "10.77.0.1" : "10.77.1.1");
  }
  ~End() {
    if (qp != nullptr) CHECK(api().destroy_qp(qp) == 0);
    if (mr != nullptr) CHECK(api().dereg_mr(mr) == 0);
    if (cq != nullptr) CHECK(api().destroy_cq(cq) == 0);
    CHECK(api().destroy_comp_channel(channel) == 0);
    CHECK(api().dealloc_pd(pd) == 0);
    CHECK(api().close_device(context) == 0);
  }
  End(const End&) = delete;

  void make_qp(const EndOptions& options) {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq;
    init.qp_type = IBV_QPT_RC;
    init.sq_sig_all = options.sq_sig_all;
    init.cap = {options.max_send_wr, options.max_recv_wr, 4, 4, options.max_inline};
    qp = api().create_qp(pd, &init);
    REQUIRE(qp != nullptr);
  }

  int to_init() {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    attr.qp_access_flags = kAllAccess;
    return api().modify_qp(qp, &attr, kToInit);
  }
  ibv_qp_attr rtr_to(const End& peer) const {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_4096;
    attr.dest_qp_num = peer.qp->qp_num;
    attr.rq_psn = peer.psn;
    attr.max_dest_rd_atomic = 16;
    attr.min_rnr_timer = 12;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.dgid = peer.gid;
    attr.ah_attr.grh.sgid_index = 3;
    attr.ah_attr.grh.hop_limit = 64;
    return attr;
  }
  int to_rtr(const End& peer) {
    ibv_qp_attr attr = rtr_to(peer);
    return api().modify_qp(qp, &attr, kToRtr);
  }
  int to_rts(std::uint8_t retry_cnt = 3, std::uint8_t rnr_retry = 3) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = 14;
    attr.retry_cnt = retry_cnt;
    attr.rnr_retry = rnr_retry;
    attr.sq_psn = psn;
    attr.max_rd_atomic = 16;
    return api().modify_qp(qp, &attr, kToRts);
  }
  int to(ibv_qp_state state) {
    ibv_qp_attr attr{};
    attr.qp_state = state;
    return api().modify_qp(qp, &attr, IBV_QP_STATE);
  }

  ibv_sge sge(std::size_t offset, std::uint32_t nbytes) const {
    return {reinterpret_cast<std::uint64_t>(memory) + offset, nbytes, mr->lkey};
  }
  std::uint64_t address(std::size_t offset = 0) const { return reinterpret_cast<std::uint64_t>(memory) + offset; }

  int post(ibv_wr_opcode opcode, const End& peer, const ibv_sge& local, std::size_t remote, std::uint64_t wr_id,
           unsigned flags = IBV_SEND_SIGNALED) {
    ibv_sge list = local;
    ibv_send_wr wr{}, *bad = nullptr;
    wr.wr_id = wr_id;
    wr.opcode = opcode;
    wr.sg_list = &list;
    wr.num_sge = 1;
    wr.send_flags = flags;
    wr.imm_data = 0x11223344;
    wr.wr.rdma.remote_addr = peer.address(remote);
    wr.wr.rdma.rkey = peer.mr->rkey;
    const int error = ibv_post_send(qp, &wr, &bad);
    CHECK((error == 0) == (bad == nullptr));
    return error;
  }
  int write(const End& peer, std::uint64_t wr_id, unsigned flags = IBV_SEND_SIGNALED) {
    return post(IBV_WR_RDMA_WRITE, peer, sge(0, 8), 64, wr_id, flags);
  }
  int atomic(ibv_wr_opcode opcode, const End& peer, std::size_t remote, std::uint64_t first, std::uint64_t second,
             std::uint64_t wr_id = 1) {
    ibv_sge list = sge(0, 8);
    ibv_send_wr wr{}, *bad = nullptr;
    wr.wr_id = wr_id;
    wr.opcode = opcode;
    wr.sg_list = &list;
    wr.num_sge = 1;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.atomic.remote_addr = peer.address(remote);
    wr.wr.atomic.rkey = peer.mr->rkey;
    wr.wr.atomic.compare_add = first;
    wr.wr.atomic.swap = second;
    return ibv_post_send(qp, &wr, &bad);
  }
  int receive(std::size_t offset, std::uint32_t nbytes, std::uint64_t wr_id) {
    ibv_sge list = sge(offset, nbytes);
    ibv_recv_wr wr{}, *bad = nullptr;
    wr.wr_id = wr_id;
    wr.sg_list = &list;
    wr.num_sge = 1;
    return ibv_post_recv(qp, &wr, &bad);
  }
  std::vector<ibv_wc> poll() {
    std::vector<ibv_wc> wcs(128);
    wcs.resize(std::size_t(ibv_poll_cq(cq, int(wcs.size()), wcs.data())));
    return wcs;
  }
  // The status of the one completion that there is.
  std::string status() {
    const auto wcs = poll();
    if (wcs.size() != 1) return std::to_string(wcs.size()) + " completions";
    CHECK(wcs[0].qp_num == qp->qp_num);
    return api().wc_status_str(wcs[0].status);
  }
  bool has_event(int fd) const {
    pollfd look{fd, POLLIN, 0};
    return ::poll(&look, 1, 0) == 1;
  }
  bool has_async_event() const { return has_event(context->async_fd); }
  ibv_async_event async_event() {
    ibv_async_event event{};
    REQUIRE(has_async_event());
    REQUIRE(api().get_async_event(context, &event) == 0);
    api().ack_async_event(&event);
    return event;
  }
  std::uint64_t& word(std::size_t offset) { return *reinterpret_cast<std::uint64_t*>(memory + offset); }

  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_comp_channel* channel = nullptr;
  ibv_cq* cq = nullptr;
  ibv_qp* qp = nullptr;
  ibv_mr* mr = nullptr;
  ibv_gid gid{};
  std::uint32_t psn = 0x123456;
  alignas(64) char memory[8192] = {};
};

struct Connected {
  explicit Connected(const EndOptions& options = {}, std::uint8_t retry_cnt = 3, std::uint8_t rnr_retry = 3,
                     const fake::Machine& machine = fake::default_machine())
      : fake(machine), a(options), b({.device = "fake1"}) {
    REQUIRE(a.to_init() == 0);
    REQUIRE(b.to_init() == 0);
    REQUIRE(a.to_rtr(b) == 0);
    REQUIRE(b.to_rtr(a) == 0);
    REQUIRE(a.to_rts(retry_cnt, rnr_retry) == 0);
    REQUIRE(b.to_rts(retry_cnt, rnr_retry) == 0);
  }
  fake::InUse fake;
  End a, b;
};

TEST_CASE("fake verbs: write, read and atomics between two devices") {
  Connected pair;
  auto& [_, a, b] = pair;
  std::memcpy(a.memory, "one two three", 13);
  CHECK(a.post(IBV_WR_RDMA_WRITE, b, a.sge(0, 13), 100, 7) == 0);
  CHECK(std::memcmp(b.memory + 100, "one two three", 13) == 0);
  auto wcs = a.poll();
  REQUIRE(wcs.size() == 1);
  CHECK(wcs[0].wr_id == 7);
  CHECK(wcs[0].status == IBV_WC_SUCCESS);
  CHECK(wcs[0].opcode == IBV_WC_RDMA_WRITE);

  CHECK(b.post(IBV_WR_RDMA_READ, a, b.sge(200, 7), 4, 8) == 0);
  CHECK(std::memcmp(b.memory + 200, "two thr", 7) == 0);
  wcs = b.poll();
  REQUIRE(wcs.size() == 1);
  CHECK(wcs[0].opcode == IBV_WC_RDMA_READ);
  CHECK(wcs[0].byte_len == 7);

  b.word(1024) = 40;
  CHECK(a.atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, b, 1024, 2, 0) == 0);
  CHECK(a.status() == "success");
  CHECK(a.word(0) == 40);
  CHECK(b.word(1024) == 42);
  CHECK(a.atomic(IBV_WR_ATOMIC_CMP_AND_SWP, b, 1024, 41, 9) == 0);
  CHECK(a.word(0) == 42);
  CHECK(b.word(1024) == 42);
  CHECK(a.atomic(IBV_WR_ATOMIC_CMP_AND_SWP, b, 1024, 42, 9) == 0);
  CHECK(b.word(1024) == 9);
  CHECK(a.poll().size() == 2);
  CHECK(fake::traffic("fake0").written == 13);
  CHECK(fake::traffic("fake1").read == 7);
  CHECK(fake::traffic("fake0").atomics == 3);
}

TEST_CASE("fake verbs: a list of requests with several pieces, in order") {
  Connected pair;
  auto& [_, a, b] = pair;
  std::memcpy(a.memory, "abcdefgh", 8);
  ibv_sge pieces[3] = {a.sge(0, 3), a.sge(4, 0), a.sge(5, 2)};
  ibv_sge one = a.sge(6, 2);
  ibv_send_wr wrs[2] = {}, *bad = nullptr;
  wrs[0].opcode = wrs[1].opcode = IBV_WR_RDMA_WRITE;
  wrs[0].sg_list = pieces, wrs[0].num_sge = 3, wrs[0].next = &wrs[1];
  wrs[1].sg_list = &one, wrs[1].num_sge = 1, wrs[1].send_flags = IBV_SEND_SIGNALED, wrs[1].wr_id = 2;
  wrs[0].wr.rdma = {b.address(), b.mr->rkey};
  wrs[1].wr.rdma = {b.address(3), b.mr->rkey};
  CHECK(ibv_post_send(a.qp, wrs, &bad) == 0);
  CHECK(std::string(b.memory) == "abcgh");
  CHECK(a.status() == "success");
  CHECK(fake::counts().post_sends == 1);
  CHECK(fake::counts().wrs == 2);
  CHECK(fake::counts().signaled == 1);
  CHECK(fake::counts().cqes == 1);

  // A read into pieces, and a request of no bytes with no key.
  wrs[0].opcode = IBV_WR_RDMA_READ;
  wrs[0].wr.rdma.remote_addr = b.address();
  pieces[0] = a.sge(100, 2), pieces[2] = a.sge(200, 3);
  wrs[1].num_sge = 0, wrs[1].wr.rdma = {0, 0};
  CHECK(ibv_post_send(a.qp, wrs, &bad) == 0);
  CHECK(std::string(a.memory + 100) == "ab");
  CHECK(std::string(a.memory + 200) == "cgh");
  CHECK(a.status() == "success");
}

TEST_CASE("fake verbs: what cannot be posted is said at once, with the request that failed") {
  Connected pair({.max_send_wr = 8, .max_inline = 32});
  auto& [_, a, b] = pair;
  CHECK(a.post(IBV_WR_RDMA_WRITE, b, a.sge(0, 33), 0, 1, IBV_SEND_INLINE) == EINVAL);
  CHECK(a.post(IBV_WR_RDMA_READ, b, a.sge(0, 8), 0, 1, IBV_SEND_INLINE) == EINVAL);
  CHECK(a.post(IBV_WR_RDMA_WRITE, b, a.sge(0, (1u << 30) + 1), 0, 1) == EINVAL);
  CHECK(a.post(IBV_WR_LOCAL_INV, b, a.sge(0, 8), 0, 1) == EINVAL);
  CHECK(a.post(IBV_WR_RDMA_WRITE, b, a.sge(0, 8), 0, 1, 1u << 20) == EINVAL);

  ibv_sge pieces[5] = {a.sge(0, 1), a.sge(1, 1), a.sge(2, 1), a.sge(3, 1), a.sge(4, 1)};
  ibv_send_wr wrs[3] = {}, *bad = nullptr;
  for (int i = 0; i < 3; ++i) {
    wrs[i].opcode = IBV_WR_RDMA_WRITE;
    wrs[i].sg_list = pieces, wrs[i].num_sge = i == 1 ? 5 : 1;
    wrs[i].next = i < 2 ? &wrs[i + 1] : nullptr;
    wrs[i].send_flags = IBV_SEND_SIGNALED;
    wrs[i].wr.rdma = {b.address(), b.mr->rkey};
  }
  CHECK(ibv_post_send(a.qp, wrs, &bad) == EINVAL);
  CHECK(bad == &wrs[1]);
  CHECK(a.status() == "success");  // the first one went

  End idle;
  CHECK(idle.write(b, 1) == EINVAL);
  CHECK(idle.receive(0, 8, 1) == EINVAL);
  CHECK(idle.to_init() == 0);
  CHECK(idle.write(b, 1) == EINVAL);
  CHECK(idle.receive(0, 8, 1) == 0);
}

TEST_CASE("fake verbs: inline data is taken when it is posted, other data when it is sent") {
  Connected pair;
  auto& [_, a, b] = pair;
  fake::hold();
  std::memset(a.memory, 'x', 16);
  ibv_sge unregistered = a.sge(0, 8);
  unregistered.lkey = 0;
  CHECK(a.post(IBV_WR_RDMA_WRITE, b, unregistered, 0, 1, IBV_SEND_INLINE) == 0);
  CHECK(a.post(IBV_WR_RDMA_WRITE, b, a.sge(8, 8), 8, 2, IBV_SEND_SIGNALED) == 0);
  std::memset(a.memory, 'y', 16);
  CHECK(b.memory[0] == 0);
  CHECK(fake::pending() == 2);
  CHECK(fake::release_all() == 2);
  CHECK(all_are(b.memory, 8, 'x'));
  CHECK(all_are(b.memory + 8, 8, 'y'));
  CHECK(a.status() == "success");
  CHECK(fake::counts().inlined == 1);
}

TEST_CASE("fake verbs: a place in the send queue comes back with a polled completion that covers it") {
  Connected pair({.max_send_wr = 4});
  auto& [_, a, b] = pair;
  for (int i = 0; i < 4; ++i) CHECK(a.write(b, 1, 0) == 0);
  CHECK(a.write(b, 1, 0) == ENOMEM);  // all are executed, none is known to be
  CHECK(a.poll().empty());
  CHECK(a.write(b, 1) == ENOMEM);
}

TEST_CASE("fake verbs: a completion covers the unsignaled requests before it") {
  Connected pair({.max_send_wr = 4});
  auto& [_, a, b] = pair;
  for (unsigned round = 0; round < 100; ++round) {
    for (int i = 0; i < 3; ++i) REQUIRE(a.write(b, 1, 0) == 0);
    REQUIRE(a.write(b, round) == 0);
    REQUIRE(a.write(b, 1, 0) == ENOMEM);
    const auto wcs = a.poll();
    REQUIRE(wcs.size() == 1);
    REQUIRE(wcs[0].wr_id == round);
  }
}

TEST_CASE("fake verbs: sq_sig_all") {
  Connected pair({.sq_sig_all = 1});
  auto& [_, a, b] = pair;
  CHECK(a.write(b, 1, 0) == 0);
  CHECK(a.status() == "success");
}

TEST_CASE("fake verbs: wrong remote memory is an access error that ends both sides, and flushes in order") {
  for (const std::string wrong : {"key", "local key", "bounds", "access", "domain", "gone"}) {
    CAPTURE(wrong);
    Connected pair;
    auto& [_, a, b] = pair;
    CHECK(b.receive(0, 8, 50) == 0);
    ibv_pd* const other_pd = api().alloc_pd(b.context);
    ibv_mr* const other = api().reg_mr(wrong == "domain" ? other_pd : b.pd, b.memory, 64, b.address(),
                                       wrong == "access" ? unsigned(IBV_ACCESS_REMOTE_READ) : unsigned(kAllAccess));
    fake::hold();
    CHECK(a.write(b, 1) == 0);
    ibv_sge list = a.sge(0, 8);
    ibv_send_wr wr{}, *bad = nullptr;
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.wr_id = 2;
    wr.sg_list = &list, wr.num_sge = 1;
    wr.wr.rdma = {b.address(wrong == "bounds" ? 60 : 0), wrong == "key"         ? 12345u
                                                         : wrong == "local key" ? other->lkey
                                                                                : other->rkey};
    CHECK(ibv_post_send(a.qp, &wr, &bad) == 0);
    CHECK(a.write(b, 3) == 0);
    CHECK(a.write(b, 4, 0) == 0);
    if (wrong == "gone") CHECK(api().dereg_mr(other) == 0);
    std::memset(a.memory, 'z', 8);
    fake::release_all();
    const auto wcs = a.poll();
    REQUIRE(wcs.size() == 4);  // the unsignaled ones too
    for (unsigned i = 0; i < 4; ++i) {
      CHECK(wcs[i].wr_id == i + 1);
      CHECK(wcs[i].status == (i == 0 ? IBV_WC_SUCCESS : i == 1 ? IBV_WC_REM_ACCESS_ERR : IBV_WC_WR_FLUSH_ERR));
    }
    CHECK(b.memory[0] == 0);
    CHECK(fake::state_of(a.qp->qp_num) == IBV_QPS_ERR);
    CHECK(a.qp->state == IBV_QPS_RTS);  // nobody tells the structure
    ibv_qp_attr attr{};
    ibv_qp_init_attr init{};
    CHECK(api().query_qp(a.qp, &attr, IBV_QP_STATE, &init) == 0);
    CHECK(attr.qp_state == IBV_QPS_ERR);
    CHECK(a.qp->state == IBV_QPS_ERR);
    CHECK(b.status() == "Work Request Flushed Error");
    const ibv_async_event event = b.async_event();
    CHECK(event.event_type == IBV_EVENT_QP_ACCESS_ERR);
    CHECK(event.element.qp == b.qp);
    // Both can still post, and get it back.
    CHECK(b.write(a, 9) == 0);
    CHECK(b.status() == "Work Request Flushed Error");
    CHECK(a.receive(0, 8, 9) == 0);
    CHECK(a.status() == "Work Request Flushed Error");
    if (wrong != "gone") CHECK(api().dereg_mr(other) == 0);
    CHECK(api().dealloc_pd(other_pd) == 0);
  }
}

TEST_CASE("fake verbs: wrong local memory ends this side only") {
  Connected pair;
  auto& [_, a, b] = pair;
  SUBCASE("unknown key") {
    ibv_sge wrong = a.sge(0, 8);
    wrong.lkey = a.mr->rkey;
    CHECK(a.post(IBV_WR_RDMA_WRITE, b, wrong, 0, 1) == 0);
  }
  SUBCASE("bounds") {
    CHECK(a.post(IBV_WR_RDMA_WRITE, b, a.sge(sizeof a.memory - 4, 8), 0, 1) == 0);
  }
  SUBCASE("a read into what may not be written") {
    ibv_mr* const constant = api().reg_mr(a.pd, a.memory, 64, a.address(), 0);
    ibv_sge wrong = a.sge(0, 8);
    wrong.lkey = constant->lkey;
    CHECK(a.post(IBV_WR_RDMA_WRITE, b, wrong, 0, 1) == 0);
    CHECK(a.status() == "success");
    CHECK(a.post(IBV_WR_RDMA_READ, b, wrong, 0, 1) == 0);
    CHECK(api().dereg_mr(constant) == 0);
  }
  const auto wcs = a.poll();
  REQUIRE(wcs.size() == 1);
  CHECK(wcs[0].status == IBV_WC_LOC_PROT_ERR);
  CHECK(wcs[0].opcode != IBV_WC_RDMA_WRITE);  // not valid of a failure, and shows it
  CHECK(fake::state_of(b.qp->qp_num) == IBV_QPS_RTS);
  CHECK_FALSE(b.has_async_event());
}

TEST_CASE("fake verbs: atomics need alignment, eight bytes, and a device that has them") {
  SUBCASE("misaligned") {
    Connected pair;
    auto& [_, a, b] = pair;
    CHECK(a.atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, b, 4, 1, 0) == 0);
    CHECK(a.status() == "remote invalid request error");
    CHECK(b.async_event().event_type == IBV_EVENT_QP_REQ_ERR);
    CHECK(fake::state_of(b.qp->qp_num) == IBV_QPS_ERR);
  }
  SUBCASE("of four bytes") {
    Connected pair;
    auto& [_, a, b] = pair;
    CHECK(a.post(IBV_WR_ATOMIC_FETCH_AND_ADD, b, a.sge(0, 4), 0, 1) == 0);
    CHECK(a.status() == "local length error");
  }
  SUBCASE("none") {
    fake::Machine machine = fake::default_machine();
    machine.devices[1].limits.atomic_cap = IBV_ATOMIC_NONE;
    Connected pair({}, 3, 3, machine);
    auto& [_, a, b] = pair;
    CHECK(b.atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, a, 0, 1, 0) == EINVAL);
    CHECK(a.atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, b, 0, 1, 0) == 0);
    CHECK(a.status() == "remote invalid request error");
  }
}

TEST_CASE("fake verbs: nobody at the other end") {
  SUBCASE("not ready yet, destroyed, gone silent") {
    Connected pair;
    auto& [_, a, b] = pair;
    SUBCASE("reset") {
      CHECK(b.to(IBV_QPS_RESET) == 0);
    }
    SUBCASE("error") {
      CHECK(b.to(IBV_QPS_ERR) == 0);
    }
    SUBCASE("silent") {
      fake::peer_gone(b.qp->qp_num);
    }
    SUBCASE("destroyed") {
      CHECK(api().destroy_qp(b.qp) == 0);
      b.qp = nullptr;
    }
    SUBCASE("port") {
      fake::port_down("fake1");
    }
    CHECK(a.write(b, 1) == 0);
    CHECK(a.write(b, 2) == 0);
    const auto wcs = a.poll();
    REQUIRE(wcs.size() == 2);
    CHECK(wcs[0].status == IBV_WC_RETRY_EXC_ERR);
    CHECK(wcs[1].status == IBV_WC_WR_FLUSH_ERR);
    CHECK(fake::counts().retries == 3);
  }
  SUBCASE("retry_cnt 7 goes on for ever") {
    Connected pair({}, 7);
    auto& [_, a, b] = pair;
    fake::port_down("fake1");
    CHECK(b.async_event().event_type == IBV_EVENT_PORT_ERR);
    a.word(0) = 77;
    CHECK(a.write(b, 1) == 0);
    CHECK(a.poll().empty());
    CHECK(fake::pending() == 1);
    fake::port_up("fake1");
    CHECK(b.async_event().event_type == IBV_EVENT_PORT_ACTIVE);
    CHECK(a.status() == "success");
    CHECK(b.word(64) == 77);
    fake::peer_gone(b.qp->qp_num);
    CHECK(a.write(b, 2) == 0);
    CHECK(a.write(b, 3, 0) == 0);
    CHECK(a.poll().empty());
    CHECK(a.to(IBV_QPS_ERR) == 0);
    const auto wcs = a.poll();
    REQUIRE(wcs.size() == 2);
    CHECK(wcs[0].status == IBV_WC_WR_FLUSH_ERR);
  }
}

TEST_CASE("fake verbs: both ends must agree on number, sequence, address and MTU") {
  for (const std::string wrong : {"", "number", "psn", "gid", "gid type", "mtu", "reads"}) {
    CAPTURE(wrong);
    fake::InUse in_use;
    End a, b({.device = "fake1"});
    REQUIRE(a.to_init() == 0);
    REQUIRE(b.to_init() == 0);
    ibv_qp_attr attr = b.rtr_to(a);
    if (wrong == "number") attr.dest_qp_num ^= 1;
    if (wrong == "psn") attr.rq_psn ^= 1;
    if (wrong == "gid") attr.ah_attr.grh.dgid = b.gid;
    if (wrong == "gid type") attr.ah_attr.grh.sgid_index = 2;
    if (wrong == "mtu") attr.path_mtu = IBV_MTU_1024;
    if (wrong == "reads") attr.max_dest_rd_atomic = 15;
    REQUIRE(api().modify_qp(b.qp, &attr, kToRtr) == 0);
    REQUIRE(a.to_rtr(b) == 0);
    REQUIRE(a.to_rts() == 0);
    CHECK(a.post(IBV_WR_RDMA_READ, b, a.sge(0, 8), 0, 1) == 0);  // the other side is only ready to receive
    CHECK(a.status() == (wrong == ""        ? "success"
                         : wrong == "reads" ? "remote invalid request error"
                                            : "transport retry counter exceeded"));
  }
}

TEST_CASE("fake verbs: a queue pair changes its state only with all that the step needs") {
  fake::InUse in_use;
  End a, b;
  const auto refused = [&](int mask, ibv_qp_attr attr) { return api().modify_qp(a.qp, &attr, mask) == EINVAL; };
  ibv_qp_attr init{};
  init.qp_state = IBV_QPS_INIT;
  init.port_num = 1;
  CHECK(refused(kToInit & ~IBV_QP_PORT, init));
  CHECK(refused(kToInit | IBV_QP_TIMEOUT, init));
  init.port_num = 2;
  CHECK(refused(kToInit, init));
  CHECK(a.to(IBV_QPS_ERR) == EINVAL);
  CHECK(a.to_rtr(b) == EINVAL);
  REQUIRE(a.to_init() == 0);

  for (int bit = 0; bit < 21; ++bit) {
    const int mask = kToRtr ^ (1 << bit);
    if ((1 << bit) & (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS)) continue;
    CAPTURE(bit);
    CHECK(refused(mask, a.rtr_to(b)));
  }
  const auto wrong = [&](auto&& change) {
    ibv_qp_attr attr = a.rtr_to(b);
    change(attr);
    return api().modify_qp(a.qp, &attr, kToRtr);
  };
  CHECK(wrong([](ibv_qp_attr& attr) { attr.rq_psn = 1 << 24; }) == EINVAL);
  CHECK(wrong([](ibv_qp_attr& attr) { attr.max_dest_rd_atomic = 17; }) == EINVAL);
  CHECK(wrong([](ibv_qp_attr& attr) { attr.ah_attr.is_global = 0; }) == EINVAL);
  CHECK(wrong([](ibv_qp_attr& attr) { attr.ah_attr.grh.sgid_index = 4; }) == EINVAL);
  CHECK(wrong([](ibv_qp_attr& attr) { attr.ah_attr.grh.dgid = {}; }) == EINVAL);
  CHECK(wrong([](ibv_qp_attr& attr) { attr.ah_attr.grh.sgid_index = 1; }) == ENETUNREACH);  // link-local to global
  CHECK(wrong([](ibv_qp_attr& attr) { attr.path_mtu = ibv_mtu(6); }) == EINVAL);
  CHECK(a.qp->state == IBV_QPS_INIT);
  REQUIRE(a.to_rtr(b) == 0);
  CHECK(a.to_rts(8) == EINVAL);
  CHECK(a.to_rts(7, 7) == 0);
  CHECK(a.to_rtr(b) == EINVAL);
  CHECK(a.to(IBV_QPS_ERR) == 0);
  CHECK(a.to_init() == EINVAL);
  CHECK(a.to(IBV_QPS_RESET) == 0);
  CHECK(a.to_init() == 0);
}

TEST_CASE("fake verbs: sends and immediates take receives in order") {
  Connected pair;
  auto& [_, a, b] = pair;
  CHECK(b.receive(0, 16, 10) == 0);
  CHECK(b.receive(16, 0, 11) == 0);
  std::memcpy(a.memory, "hello", 5);
  CHECK(a.post(IBV_WR_SEND_WITH_IMM, b, a.sge(0, 5), 0, 1) == 0);
  CHECK(a.post(IBV_WR_RDMA_WRITE_WITH_IMM, b, a.sge(0, 5), 512, 2) == 0);
  CHECK(a.poll().size() == 2);
  const auto wcs = b.poll();
  REQUIRE(wcs.size() == 2);
  CHECK(wcs[0].wr_id == 10);
  CHECK(wcs[0].opcode == IBV_WC_RECV);
  CHECK(wcs[0].byte_len == 5);
  CHECK(wcs[0].imm_data == 0x11223344);
  CHECK(wcs[0].wc_flags == IBV_WC_WITH_IMM);
  CHECK(wcs[1].wr_id == 11);
  CHECK(wcs[1].opcode == IBV_WC_RECV_RDMA_WITH_IMM);
  CHECK(std::string(b.memory) == "hello");
  CHECK(std::string(b.memory + 512) == "hello");

  CHECK(b.receive(0, 2, 12) == 0);
  CHECK(a.post(IBV_WR_SEND, b, a.sge(0, 5), 0, 3) == 0);
  CHECK(a.status() == "remote invalid request error");
  CHECK(b.status() == "local length error");
  CHECK(fake::state_of(b.qp->qp_num) == IBV_QPS_ERR);
}

TEST_CASE("fake verbs: no receive posted") {
  SUBCASE("counted retries") {
    Connected pair;
    auto& [_, a, b] = pair;
    CHECK(a.post(IBV_WR_SEND, b, a.sge(0, 5), 0, 3) == 0);
    CHECK(a.status() == "RNR retry counter exceeded");
    CHECK(fake::state_of(b.qp->qp_num) == IBV_QPS_RTS);
  }
  SUBCASE("rnr_retry 7 waits for one") {
    Connected pair({}, 3, 7);
    auto& [_, a, b] = pair;
    CHECK(a.post(IBV_WR_SEND, b, a.sge(0, 5), 0, 3) == 0);
    CHECK(a.write(b, 4) == 0);
    CHECK(a.poll().empty());
    CHECK(b.receive(0, 8, 1) == 0);
    CHECK(a.poll().size() == 2);
    CHECK(b.status() == "success");
  }
}

TEST_CASE("fake verbs: a completion queue that overflows is lost, and its queue pairs with it") {
  Connected pair({.max_send_wr = 16, .cqe = 4});
  auto& [_, a, b] = pair;
  for (unsigned i = 0; i < 4; ++i) CHECK(a.write(b, i) == 0);
  CHECK_FALSE(a.has_async_event());
  CHECK(a.write(b, 4) == 0);
  const ibv_async_event event = a.async_event();
  CHECK(event.event_type == IBV_EVENT_CQ_ERR);
  CHECK(event.element.cq == a.cq);
  CHECK(fake::state_of(a.qp->qp_num) == IBV_QPS_ERR);
  CHECK(a.poll().size() == 4);
  CHECK(a.write(b, 5) == 0);
  CHECK(a.poll().empty());  // nothing is ever told any more
}

TEST_CASE("fake verbs: an event comes once for each arming, of what completes after it") {
  Connected pair;
  auto& [_, a, b] = pair;
  ibv_cq* cq = nullptr;
  void* cookie = nullptr;
  CHECK(a.write(b, 1) == 0);
  CHECK_FALSE(a.has_event(a.channel->fd));  // was not armed
  CHECK(ibv_req_notify_cq(a.cq, 0) == 0);
  CHECK_FALSE(a.has_event(a.channel->fd));  // missed: it completed before; whoever does not poll now waits for ever
  CHECK(a.write(b, 2) == 0);
  CHECK(a.write(b, 3) == 0);
  CHECK(a.has_event(a.channel->fd));
  REQUIRE(api().get_cq_event(a.channel, &cq, &cookie) == 0);
  CHECK(cq == a.cq);
  CHECK(cookie == &a);
  CHECK_FALSE(a.has_event(a.channel->fd));
  CHECK(a.poll().size() == 3);

  REQUIRE(::fcntl(a.channel->fd, F_SETFL, O_NONBLOCK) == 0);
  CHECK(api().get_cq_event(a.channel, &cq, &cookie) == -1);
  CHECK(errno == EAGAIN);

  // Solicited only: of successes those that say so, and every failure.
  CHECK(ibv_req_notify_cq(a.cq, 1) == 0);
  CHECK(a.write(b, 4) == 0);
  CHECK_FALSE(a.has_event(a.channel->fd));
  CHECK(a.to(IBV_QPS_ERR) == 0);
  CHECK(a.write(b, 5) == 0);
  CHECK(a.has_event(a.channel->fd));
  REQUIRE(api().get_cq_event(a.channel, &cq, &cookie) == 0);
  api().ack_cq_events(a.cq, 2);
  CHECK(fake::counts().events == 2);
  CHECK(fake::counts().arms == 2);
  a.poll();

  // One that nobody fetched goes with its queue.
  CHECK(ibv_req_notify_cq(a.cq, 0) == 0);
  CHECK(a.write(b, 6) == 0);
  CHECK(a.has_event(a.channel->fd));
  CHECK(api().destroy_qp(a.qp) == 0);
  CHECK(api().destroy_cq(a.cq) == 0);
  a.qp = nullptr, a.cq = nullptr;
  CHECK_FALSE(a.has_event(a.channel->fd));
}

TEST_CASE("fake verbs: a thread that waits for an event is woken by the fake's own thread") {
  Connected pair({.max_send_wr = 64, .cqe = 64});
  auto& [_, a, b] = pair;
  fake::deliver_in_thread(0, 5);
  const unsigned n = rounds(400);
  std::uint64_t next = 0;
  for (unsigned posted = 0; posted < n; posted += 10) {
    for (unsigned i = 0; i < 10; ++i) {
      // The next source word may be written although earlier ones are in flight; no other.
      a.word(8 * i) = posted + i;
      REQUIRE(a.post(IBV_WR_RDMA_WRITE, b, a.sge(8 * i, 8), 8 * i, posted + i) == 0);
    }
    for (const std::uint64_t end = posted + 10; next < end;) {
      REQUIRE(ibv_req_notify_cq(a.cq, 0) == 0);
      auto wcs = a.poll();
      if (wcs.empty()) {
        ibv_cq* cq = nullptr;
        void* cookie = nullptr;
        REQUIRE(api().get_cq_event(a.channel, &cq, &cookie) == 0);
        api().ack_cq_events(cq, 1);
        wcs = a.poll();
      }
      for (const ibv_wc& wc : wcs) {
        REQUIRE(wc.status == IBV_WC_SUCCESS);
        REQUIRE(wc.wr_id == next);
        REQUIRE(b.word(8 * (next % 10)) == next);
        ++next;
      }
    }
  }
  fake::deliver_immediately();
  CHECK(a.write(b, 1) == 0);
  a.poll();
}

TEST_CASE("fake verbs: held requests go one by one, the oldest of all queue pairs first") {
  Connected pair;
  auto& [_, a, b] = pair;
  fake::hold();
  CHECK(a.write(b, 1) == 0);
  CHECK(b.write(a, 2) == 0);
  CHECK(a.write(b, 3) == 0);
  CHECK(fake::pending() == 3);
  CHECK(fake::pending(a.qp->qp_num) == 2);
  CHECK(fake::release(1) == 1);
  CHECK(a.poll().size() == 1);
  CHECK(b.poll().empty());
  CHECK(fake::release(1) == 1);
  CHECK(a.poll().empty());
  CHECK(b.poll().size() == 1);
  CHECK(fake::release(5, b.qp->qp_num) == 0);
  CHECK(fake::release(5) == 1);
  CHECK(a.poll().size() == 1);

  End late({.device = "fake1"});
  fake::release_all();
  CHECK(a.write(b, 4) == 0);
  CHECK(a.status() == "success");
}

TEST_CASE("fake verbs: what is held when the queue pair fails is never read") {
  Connected pair;
  auto& [_, a, b] = pair;
  const auto page = std::size_t(::sysconf(_SC_PAGESIZE));
  void* const source = ::mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ibv_mr* const mr = api().reg_mr(a.pd, source, page, reinterpret_cast<std::uint64_t>(source), 0);
  REQUIRE(mr != nullptr);
  fake::hold(a.qp->qp_num);
  CHECK(a.post(IBV_WR_RDMA_WRITE, b, {reinterpret_cast<std::uint64_t>(source), 64, mr->lkey}, 0, 1, 0) == 0);
  ::mprotect(source, page, PROT_NONE);
  CHECK(a.to(IBV_QPS_ERR) == 0);
  CHECK(fake::pending() == 0);
  CHECK(a.status() == "Work Request Flushed Error");
  CHECK(fake::release_all() == 0);
  CHECK(api().dereg_mr(mr) == 0);
  ::munmap(source, page);
}

TEST_CASE("fake verbs: any completion can be made to fail") {
  Connected pair;
  auto& [_, a, b] = pair;
  fake::fail_completion(IBV_WC_FATAL_ERR, 3, a.qp->qp_num);
  a.word(0) = 1;
  CHECK(a.write(b, 1) == 0);
  CHECK(b.write(a, 1) == 0);
  CHECK(a.write(b, 2, 0) == 0);
  CHECK(b.word(64) == 1);
  a.word(0) = 3;
  bool executed = false;
  SUBCASE("before it took effect") {}
  SUBCASE("after it took effect") {
    fake::fail_completion(IBV_WC_RETRY_EXC_ERR, 1, a.qp->qp_num, true);
    executed = true;
  }
  CHECK(a.write(b, 3, 0) == 0);
  CHECK(a.write(b, 4) == 0);
  const auto wcs = a.poll();
  REQUIRE(wcs.size() == 3);
  CHECK(wcs[0].wr_id == 1);
  CHECK(wcs[1].wr_id == 3);
  CHECK(wcs[2].status == IBV_WC_WR_FLUSH_ERR);
  if (!executed) CHECK(wcs[1].status == IBV_WC_FATAL_ERR);
  CHECK(fake::state_of(b.qp->qp_num) == IBV_QPS_RTS);
}

TEST_CASE("fake verbs: any call can be made to fail") {
  Connected pair;
  auto& [_, a, b] = pair;
  fake::fail(Call::PostSend, EIO, 2);
  CHECK(a.write(b, 1) == 0);
  CHECK(a.write(b, 2) == EIO);
  CHECK(a.write(b, 3) == 0);
  fake::fail(Call::RegMr, ENOMEM, 1, 2);
  for (int i = 0; i < 2; ++i) {
    errno = 0;
    CHECK(api().reg_mr(a.pd, a.memory, 8, a.address(), 0) == nullptr);
    CHECK(errno == ENOMEM);
  }
  ibv_mr* const mr = api().reg_mr(a.pd, a.memory, 8, a.address(), 0);
  REQUIRE(mr != nullptr);
  CHECK(api().dereg_mr(mr) == 0);
  fake::fail(Call::CreateCq, ENOSPC);
  CHECK(api().create_cq(a.context, 8, nullptr, a.channel, 0) == nullptr);
  CHECK(errno == ENOSPC);
  fake::fail(Call::CreateCompChannel, EMFILE);
  CHECK(api().create_comp_channel(a.context) == nullptr);
  fake::fail(Call::AllocPd, ENOMEM);
  CHECK(api().alloc_pd(a.context) == nullptr);
  fake::fail(Call::CreateQp, EPERM);
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = a.cq;
  init.qp_type = IBV_QPT_RC;
  CHECK(api().create_qp(a.pd, &init) == nullptr);
  CHECK(errno == EPERM);
  fake::fail(Call::ModifyQp, ETIMEDOUT);
  CHECK(a.to(IBV_QPS_ERR) == ETIMEDOUT);
  fake::fail(Call::ReqNotifyCq, EIO);
  CHECK(ibv_req_notify_cq(a.cq, 0) == EIO);
  fake::fail(Call::PostRecv, EIO);
  CHECK(a.receive(0, 8, 1) == EIO);
  ibv_device_attr device{};
  fake::fail(Call::QueryDevice, EIO);
  CHECK(api().query_device(a.context, &device) == EIO);
  fake::fail(Call::GetDeviceList, ENOSYS);
  CHECK(api().get_device_list(nullptr) == nullptr);
  CHECK(errno == ENOSYS);
  CHECK(a.poll().size() == 2);
}

TEST_CASE("fake verbs: asynchronous events are told by a descriptor, each once") {
  Connected pair;
  auto& [_, a, b] = pair;
  CHECK_FALSE(a.has_async_event());
  fake::qp_fatal(a.qp->qp_num);
  CHECK(a.async_event().event_type == IBV_EVENT_QP_FATAL);
  CHECK_FALSE(a.has_async_event());
  CHECK_FALSE(b.has_async_event());
  REQUIRE(::fcntl(a.context->async_fd, F_SETFL, O_NONBLOCK) == 0);
  ibv_async_event event{};
  CHECK(api().get_async_event(a.context, &event) == -1);
  CHECK(errno == EAGAIN);

  // A thread that waits in the call itself.
  std::thread waiter([&b = b] {
    ibv_async_event found{};
    CHECK(api().get_async_event(b.context, &found) == 0);
    CHECK(found.event_type == IBV_EVENT_CQ_ERR);
    api().ack_async_event(&found);
  });
  fake::cq_error(b.qp->qp_num);
  waiter.join();
  CHECK(fake::state_of(b.qp->qp_num) == IBV_QPS_ERR);
}

TEST_CASE("fake verbs: after a fatal error of the device nothing completes") {
  Connected pair;
  auto& [_, a, b] = pair;
  fake::hold();
  CHECK(a.write(b, 1) == 0);
  CHECK(b.write(a, 1) == 0);
  fake::device_fatal("fake0");
  CHECK(a.async_event().event_type == IBV_EVENT_DEVICE_FATAL);
  CHECK_FALSE(b.has_async_event());
  fake::release_all();
  CHECK(a.poll().empty());
  CHECK(a.write(b, 2) == EIO);
  CHECK(a.to(IBV_QPS_ERR) == EIO);
  ibv_device_attr attr{};
  CHECK(api().query_device(a.context, &attr) == EIO);
  CHECK(api().reg_mr(a.pd, a.memory, 8, a.address(), 0) == nullptr);
  CHECK(errno == EIO);
  CHECK(b.status() == "transport retry counter exceeded");
}

TEST_CASE("fake verbs: misuse that real verbs punish by a hang") {
  Connected pair;
  auto& [_, a, b] = pair;
  fake::abort_on_misuse(false);
  CHECK(api().close_device(a.context) == EBUSY);
  CHECK(fake::counts().misuses == 1);

  ibv_cq* const cq = api().create_cq(a.context, 4, nullptr, a.channel, 0);
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq;
  init.qp_type = IBV_QPT_RC;
  init.cap = {1, 1, 1, 1, 0};
  ibv_qp* const qp = api().create_qp(a.pd, &init);
  REQUIRE(qp != nullptr);
  CHECK(api().destroy_cq(cq) == EBUSY);
  CHECK(api().dealloc_pd(a.pd) == EBUSY);
  CHECK(api().destroy_comp_channel(a.channel) == EBUSY);
  CHECK(fake::counts().misuses == 1);
  CHECK(api().destroy_qp(qp) == 0);
  CHECK(api().destroy_cq(cq) == 0);

  CHECK(ibv_req_notify_cq(a.cq, 0) == 0);
  CHECK(a.write(b, 1) == 0);
  ibv_cq* found = nullptr;
  void* cookie = nullptr;
  CHECK(api().get_cq_event(a.channel, &found, &cookie) == 0);
  CHECK(api().destroy_qp(a.qp) == 0);
  a.qp = nullptr;
  CHECK(api().destroy_cq(a.cq) == EBUSY);
  CHECK(fake::counts().misuses == 2);
  api().ack_cq_events(a.cq, 1);
}

TEST_CASE("fake verbs: memory is checked when it is registered") {
  fake::Machine machine = fake::default_machine(1);
  machine.devices[0].limits.max_mr = 3;
  machine.devices[0].limits.max_mr_size = 1 << 20;
  machine.devices[0].limits.max_registered = 3 << 13;
  fake::InUse in_use(machine);
  End a;
  const auto error = [&](void* at, std::size_t nbytes, unsigned access) {
    errno = 0;
    CHECK(api().reg_mr(a.pd, at, nbytes, reinterpret_cast<std::uint64_t>(at), access) == nullptr);
    return errno;
  };
  CHECK(error(a.memory, 0, 0) == EINVAL);
  CHECK(error(a.memory, 2 << 20, 0) == EINVAL);
  CHECK(error(a.memory, 64, IBV_ACCESS_REMOTE_WRITE) == EINVAL);
  CHECK(error(a.memory, 64, IBV_ACCESS_ON_DEMAND) == EINVAL);
  const auto page = std::size_t(::sysconf(_SC_PAGESIZE));
  void* const gone = ::mmap(nullptr, page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ::munmap(gone, page);
  CHECK(error(gone, page, 0) == EFAULT);

  std::set<std::uint32_t> keys{a.mr->lkey, a.mr->rkey};
  for (int i = 0; i < 50; ++i) {
    ibv_mr* const mr = api().reg_mr(a.pd, a.memory, 64, 0, 0);
    REQUIRE(mr != nullptr);
    CHECK(keys.insert(mr->lkey).second);
    CHECK(keys.insert(mr->rkey).second);
    CHECK(api().dereg_mr(mr) == 0);
  }
  ibv_mr* const second = api().reg_mr(a.pd, a.memory, 64, 0, 0);
  std::vector<char> large(3 << 13);
  CHECK(error(large.data(), large.size(), 0) == ENOMEM);  // bytes
  ibv_mr* const third = api().reg_mr(a.pd, a.memory, 64, 0, 0);
  CHECK(error(a.memory, 64, 0) == ENOMEM);  // regions
  CHECK(fake::live().mrs == 3);
  CHECK(fake::live().registered_bytes == 8192 + 128);
  CHECK(api().dereg_mr(second) == 0);
  CHECK(api().dereg_mr(third) == 0);
}

TEST_CASE("fake verbs: addresses that the program chose, and a file instead of a dmabuf") {
  Connected pair;
  auto& [_, a, b] = pair;
  const int fd = ::memfd_create("fake-dmabuf", MFD_CLOEXEC);
  REQUIRE(::ftruncate(fd, 8192) == 0);
  ibv_mr* const mr = api().reg_dmabuf_mr(b.pd, 4096 + 64, 128, 64, fd, kAllAccess);
  REQUIRE(mr != nullptr);
  std::memcpy(a.memory, "to the device", 13);
  ibv_sge list = a.sge(0, 13);
  ibv_send_wr wr{}, *bad = nullptr;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.sg_list = &list, wr.num_sge = 1;
  wr.wr.rdma = {64 + 16, mr->rkey};
  CHECK(ibv_post_send(a.qp, &wr, &bad) == 0);
  char found[13] = {};
  CHECK(::pread(fd, found, 13, 4096 + 64 + 16) == 13);
  CHECK(std::memcmp(found, "to the device", 13) == 0);
  CHECK(api().dereg_mr(mr) == 0);
  CHECK(api().reg_dmabuf_mr(b.pd, 0, 128, 0, -1, kAllAccess) == nullptr);
  CHECK(errno == EBADF);
  ::close(fd);
}

TEST_CASE("fake verbs: devices, ports and GIDs are what the test says") {
  fake::Machine machine = fake::default_machine(4);
  machine.devices[0].numa_node = 1;
  machine.devices[0].ports[0].gids[3] = {"10.9.8.7", 9, IBV_GID_TYPE_ROCE_V2, "docker0", true};
  machine.devices[1].open_fails = EACCES;
  machine.devices[1].pci_path = "";
  machine.devices[2].vanishes = true;
  machine.devices[3].ports[0].state = IBV_PORT_DOWN;
  fake::InUse in_use(machine);
  int n = 0;
  ibv_device** list = api().get_device_list(&n);
  REQUIRE(n == 4);
  CHECK(list[4] == nullptr);
  const std::filesystem::path path = list[0]->ibdev_path;
  int numa_node = -1;
  std::ifstream(path / "device/numa_node") >> numa_node;
  CHECK(numa_node == 1);
  CHECK(std::filesystem::canonical(path / "device").string().ends_with("/sys/devices/" + machine.devices[0].pci_path));
  CHECK(std::filesystem::exists(list[1]->ibdev_path));
  CHECK_FALSE(std::filesystem::exists(std::filesystem::path(list[1]->ibdev_path) / "device"));

  CHECK(api().open_device(list[1]) == nullptr);
  CHECK(errno == EACCES);
  CHECK(api().open_device(list[2]) == nullptr);
  CHECK(errno == ENODEV);
  ibv_context* const context = api().open_device(list[0]);
  ibv_context* const down = api().open_device(list[3]);
  api().free_device_list(list);
  list = api().get_device_list(&n);
  CHECK(n == 3);
  api().free_device_list(list);

  CHECK(std::string(api().get_device_name(context->device)) == "fake0");
  ibv_port_attr port{};
  CHECK(api().query_port(context, 1, &port) == 0);
  CHECK(port.state == IBV_PORT_ACTIVE);
  CHECK(port.gid_tbl_len == 10);
  CHECK(api().query_port(context, 2, &port) == EINVAL);
  CHECK(api().query_port(down, 1, &port) == 0);
  CHECK(port.state == IBV_PORT_DOWN);
  ibv_gid_entry entries[8] = {};
  CHECK(api().query_gid_table(context, entries, 3, 0, sizeof *entries) == -EINVAL);
  REQUIRE(api().query_gid_table(context, entries, 8, 0, sizeof *entries) == 4);
  CHECK(entries[3].gid_index == 9);
  const ibv_gid expected = fake::gid_of("10.9.8.7");
  CHECK(std::memcmp(&entries[3].gid, &expected, sizeof expected) == 0);
  CHECK(api().network_interface(entries[3].ndev_ifindex).name == "docker0");
  CHECK(api().network_interface(entries[3].ndev_ifindex).is_bridge);
  CHECK(api().network_interface(entries[0].ndev_ifindex).name == "eth0");
  CHECK(api().network_interface(0).name.empty());
  ibv_device_attr attr{};
  CHECK(api().query_device(context, &attr) == 0);
  CHECK(attr.max_qp_wr == 8192);
  CHECK(attr.phys_port_cnt == 1);
  CHECK(api().close_device(context) == 0);
  CHECK(api().close_device(down) == 0);
  CHECK(fake::live().total() == 0);
}

TEST_CASE("fake verbs: InfiniBand is reached by a LID") {
  fake::Machine machine = fake::default_machine(2);
  for (unsigned i = 0; i < 2; ++i) {
    machine.devices[i].ports[0].link_layer = IBV_LINK_LAYER_INFINIBAND;
    machine.devices[i].ports[0].lid = std::uint16_t(5 + i);
    machine.devices[i].ports[0].gids = {{"fe80::" + std::to_string(i + 1), 0, IBV_GID_TYPE_IB, ""}};
  }
  for (const bool wrong : {false, true}) {
    fake::InUse in_use(machine);
    End a, b({.device = "fake1"});
    const auto connect = [&](End& from, const End& to, std::uint16_t lid) {
      REQUIRE(from.to_init() == 0);
      ibv_qp_attr attr = from.rtr_to(to);
      attr.ah_attr = {};
      attr.ah_attr.port_num = 1;
      attr.ah_attr.dlid = lid;
      REQUIRE(api().modify_qp(from.qp, &attr, kToRtr) == 0);
      REQUIRE(from.to_rts() == 0);
    };
    connect(a, b, wrong ? 7 : 6);
    connect(b, a, 5);
    CHECK(a.write(b, 1) == 0);
    CHECK(a.status() == (wrong ? "transport retry counter exceeded" : "success"));
  }
}

TEST_CASE("fake verbs: sending on what a read may still fill is counted") {
  Connected pair;
  auto& [_, a, b] = pair;
  const auto unfenced = [] { return fake::counts().unfenced; };
  CHECK(a.post(IBV_WR_RDMA_READ, b, a.sge(0, 16), 0, 1) == 0);
  CHECK(a.post(IBV_WR_RDMA_WRITE, b, a.sge(16, 8), 64, 2) == 0);
  CHECK(unfenced() == 0);
  CHECK(a.post(IBV_WR_RDMA_WRITE, b, a.sge(15, 8), 64, 3, IBV_SEND_FENCE) == 0);
  CHECK(unfenced() == 0);
  CHECK(a.post(IBV_WR_RDMA_WRITE, b, a.sge(15, 8), 64, 4, 0) == 0);
  CHECK(unfenced() == 1);
  CHECK(a.poll().size() == 2);
  CHECK(a.post(IBV_WR_RDMA_WRITE, b, a.sge(15, 8), 64, 5) == 0);
  CHECK(unfenced() == 1);
  CHECK(a.atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, b, 0, 1, 0) == 0);
  CHECK(a.post(IBV_WR_RDMA_WRITE, b, a.sge(0, 8), 64, 5, IBV_SEND_INLINE) == 0);
  CHECK(unfenced() == 2);
}

TEST_CASE("fake verbs: a hook sees every post") {
  Connected pair;
  auto& [_, a, b] = pair;
  static std::atomic<std::uint64_t> seen{0};
  seen = 0;
  fake::on_post([](ibv_qp*, const ibv_send_wr* wr) { seen += wr->wr_id; });
  CHECK(a.write(b, 5) == 0);
  CHECK(b.write(a, 6) == 0);
  CHECK(seen == 11);
  fake::on_post(nullptr);
}

TEST_CASE("fake verbs: torn atomics are atomic among themselves") {
  for (const bool torn : {false, true}) {
    fake::Machine machine = fake::default_machine();
    for (auto& device : machine.devices) device.limits.torn_atomics = torn;
    fake::InUse in_use(machine);
    End target;
    constexpr unsigned kThreads = 3;
    std::vector<std::unique_ptr<End>> ends, targets;
    for (unsigned i = 0; i < kThreads; ++i) {
      ends.push_back(std::make_unique<End>(EndOptions{.device = "fake1"}));
      targets.push_back(std::make_unique<End>());
      REQUIRE(ends[i]->to_init() == 0);
      REQUIRE(targets[i]->to_init() == 0);
      REQUIRE(ends[i]->to_rtr(*targets[i]) == 0);
      REQUIRE(targets[i]->to_rtr(*ends[i]) == 0);
      REQUIRE(ends[i]->to_rts() == 0);
    }
    const unsigned n = rounds(2000);
    std::atomic<unsigned> failures{0};
    // All change one word through three connections; each target has a key of its own for it.
    std::vector<ibv_mr*> keys;
    for (auto& one : targets) keys.push_back(api().reg_mr(one->pd, target.memory, 64, 0, kAllAccess));
    side_by_side(kThreads, [&](unsigned thread) {
      End& from = *ends[thread];
      for (unsigned i = 0; i < n; ++i) {
        ibv_sge list = from.sge(0, 8);
        ibv_send_wr wr{}, *bad = nullptr;
        wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
        wr.sg_list = &list, wr.num_sge = 1;
        wr.send_flags = IBV_SEND_SIGNALED;
        wr.wr.atomic.rkey = keys[thread]->rkey;
        wr.wr.atomic.compare_add = 1;
        ibv_wc wc{};
        failures += ibv_post_send(from.qp, &wr, &bad) != 0 || ibv_poll_cq(from.cq, 1, &wc) != 1 || wc.status != 0;
      }
    });
    CHECK(failures == 0);
    CHECK(target.word(0) == std::uint64_t{n} * kThreads);
    for (ibv_mr* const mr : keys) CHECK(api().dereg_mr(mr) == 0);
  }
}

TEST_CASE("fake verbs: threads post both ways while others register, connect and fail") {
  fake::InUse in_use;
  const unsigned n = rounds(600);
  std::atomic<bool> ends{false};
  std::atomic<unsigned> wrong{0};
  side_by_side({[&] {
                  while (!ends) {
                    End other;
                    for (int i = 0; i < 20; ++i) {
                      ibv_mr* const mr = api().reg_mr(other.pd, other.memory, 64, other.address(), 0);
                      wrong += mr == nullptr || api().dereg_mr(mr) != 0;
                    }
                  }
                },
                [&] {
                  for (unsigned round = 0; round < 20; ++round) {
                    End a, b({.device = "fake1"});
                    wrong += a.to_init() != 0 || b.to_init() != 0 || a.to_rtr(b) != 0 || b.to_rtr(a) != 0 ||
                             a.to_rts() != 0 || b.to_rts() != 0;
                    side_by_side({[&] {
                                    for (unsigned i = 0; i < n / 20; ++i) {
                                      wrong += a.write(b, i) != 0;
                                      a.poll();
                                    }
                                  },
                                  [&] {
                                    for (unsigned i = 0; i < n / 20; ++i) {
                                      // One that is refused ends both sides at once.
                                      const bool bad = i == n / 40;
                                      wrong += b.post(IBV_WR_RDMA_READ, a, b.sge(4096, 8), bad ? 8190 : 2048, i) != 0;
                                      b.poll();
                                    }
                                  }});
                    wrong += fake::state_of(a.qp->qp_num) != IBV_QPS_ERR || fake::pending(a.qp->qp_num) != 0;
                  }
                  ends = true;
                }});
  CHECK(wrong == 0);
  CHECK(fake::live().total() == 0);
}

TEST_CASE("fake verbs: nothing is left behind") {
  const std::size_t fds = open_fds();
  {
    Connected pair;
    auto& [_, a, b] = pair;
    CHECK(fake::qp_nums() == std::vector<std::uint32_t>{a.qp->qp_num, b.qp->qp_num});
    CHECK(fake::qp_nums("fake1") == std::vector<std::uint32_t>{b.qp->qp_num});
    CHECK(a.qp->qp_num < 1u << 24);
    CHECK(fake::live().qps == 2);
    CHECK(fake::live().contexts == 2);
    CHECK(fake::live().device_lists == 0);
    CHECK(verbs::unavailable().empty());
    CHECK(&verbs::api() == &fake::table());
  }
  CHECK(fake::live().total() == 0);
  CHECK(open_fds() == fds);
}

}  // namespace
}  // namespace onesided::tests
#endif
