// A client that does not keep to the protocol must not hurt those who do.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shm/socket.h"
#include "tests/support.h"

namespace onesided::tests {
namespace {

using shm::Reply;
using shm::Request;

struct Honest : Pair {
  std::shared_ptr<Memory> memory = b->allocate(4096, Access::ReadWrite, 1, 8);
  std::shared_ptr<Target> target = to_b->attach(memory->remote(), patience());
  Endpoint endpoint = b->bind(true);

  Fd dial() const { return shm::connect_to(endpoint.address, patience()); }
  Fd greeted() const {
    Fd socket = dial();
    Reply reply;
    REQUIRE(ask(socket, hello(), reply));
    REQUIRE(reply.error == 0);
    return socket;
  }
  Request hello() const {
    Request request;
    request.type = Request::Type::Hello;
    request.request_id = 1;
    request.id = endpoint.endpoint_id;
    request.token = endpoint.secret;
    return request;
  }
  Request attach() const {
    Request request;
    request.type = Request::Type::Attach;
    request.request_id = 2;
    request.id = memory->remote().memory_id;
    request.token = memory->remote().key;
    return request;
  }
  // False if the connection was ended instead.
  static bool ask(const Fd& socket, const Request& request, Reply& reply) {
    if (!shm::send_message(socket.get(), request)) return false;
    if (!shm::wait_readable(socket.get(), patience())) throw std::runtime_error("no answer");
    try {
      return shm::receive_message(socket.get(), reply);
    } catch (const Error&) {
      return false;
    }
  }
  static std::string answered(const Fd& socket, const Request& request) {
    Reply reply;
    if (!ask(socket, request, reply)) return "ended";
    return reply.error == 0 ? "" : name_of(static_cast<ErrorKind>(reply.error));
  }
  // What it is sent, sent raw; the connection must be ended for it.
  static bool ends(const Fd& socket, const void* bytes, std::size_t nbytes) {
    if (::send(socket.get(), bytes, nbytes, MSG_NOSIGNAL) < 0) return true;
    if (!shm::wait_readable(socket.get(), patience())) return false;
    char answer[1024];
    return ::recv(socket.get(), answer, sizeof answer, 0) <= 0;
  }
  void check_unhurt() {
    const std::uint64_t before = memory->control().signal(0);
    CHECK(raised([&] { target->write("x", 1, 0, Signal{0, 1}, How{}); }) == "");
    CHECK(raised([&] { to_b->attach(memory->remote(), patience())->signal(Signal{0, 1}, How{}); }) == "");
    CHECK(raised([&] { a->connect(b->bind(false), "b", patience()); }) == "");
    CHECK(memory->control().signal(0) == before + 2);
    CHECK_FALSE(target->peer().lost());
  }
};

TEST_CASE("rogue: messages of the wrong form end their connection and nothing else") {
  Honest honest;
  const Request good = honest.hello();
  const auto altered = [&](const std::function<void(Request&)>& change) {
    Request request = good;
    change(request);
    return request;
  };
  const Request wrong_magic = altered([](Request& request) { request.magic ^= 1; });
  CHECK(Honest::ends(honest.dial(), &wrong_magic, sizeof wrong_magic));
  for (const std::size_t nbytes : {std::size_t{1}, std::size_t{4}, sizeof good - 1})
    CHECK(Honest::ends(honest.dial(), &good, nbytes));
  for (const std::size_t nbytes : {sizeof good + 1, 2 * sizeof good, std::size_t{100000}}) {
    std::vector<char> huge(nbytes);
    std::memcpy(huge.data(), &good, sizeof good);
    CHECK(Honest::ends(honest.dial(), huge.data(), huge.size()));
  }
  CHECK(Honest::ends(honest.dial(), "", 0));
  for (unsigned i = 0; i < 50; ++i) {
    const auto noise = random_bytes(sizeof good, i + 1);
    CHECK(Honest::ends(honest.dial(), noise.data(), noise.size()));
  }
  honest.check_unhurt();
}

TEST_CASE("rogue: requests that are not granted") {
  Honest honest;
  const auto with = [](Request request, const std::function<void(Request&)>& change) {
    change(request);
    return request;
  };
  const Fd stranger = honest.dial();
  CHECK(Honest::answered(stranger, honest.attach()) == "RemoteAccess");  // hello is missing
  for (const std::uint32_t type : {0u, 5u, 77u, UINT32_MAX}) {
    CHECK(Honest::answered(stranger, with(honest.hello(), [&](Request& request) {
                             request.type = static_cast<Request::Type>(type);
                           })) == "Unsupported");
  }
  CHECK(Honest::answered(stranger, with(honest.hello(), [](Request& request) { request.token[0] ^= 1; })) == "Handle");
  CHECK(Honest::answered(stranger, with(honest.hello(), [](Request& request) { request.id = UINT64_MAX; })) ==
        "StaleHandle");
  CHECK(Honest::answered(stranger, honest.attach()) == "RemoteAccess");

  const Fd known = honest.greeted();
  CHECK(Honest::answered(known, with(honest.attach(), [](Request& request) { request.id = 999; })) == "StaleHandle");
  CHECK(Honest::answered(known, with(honest.attach(), [](Request& request) { request.token[15] ^= 128; })) == "Handle");
  CHECK(Honest::answered(known, with(honest.attach(), [](Request& request) { request.token = {}; })) == "Handle");
  CHECK(Honest::answered(known, honest.attach()) == "");
  // A slot of somebody else, of nobody, and of no memory is not given back for it.
  for (const Request::Type type : {Request::Type::Detach, Request::Type::GiveUp}) {
    for (const std::uint32_t slot : {0u, 1u, 5u, 8u, UINT32_MAX}) {
      for (const std::uint64_t id : {honest.memory->remote().memory_id, std::uint64_t{999}}) {
        Request request;
        request.type = type;
        request.id = id;
        request.slot = slot;
        request.request_id = id == 999 ? 2 : 77;
        CHECK(shm::send_message(known.get(), request));
      }
    }
  }
  CHECK(Honest::answered(known, honest.hello()) == "");  // all of these were read
  std::vector<std::shared_ptr<Target>> others;
  raised([&] {
    for (;;) others.push_back(honest.to_b->attach(honest.memory->remote(), patience()));
  });
  CHECK(others.size() == 7);  // the honest target has the eighth
  others.clear();
  honest.check_unhurt();
}

TEST_CASE("rogue: descriptors that nobody asked for are closed") {
  Honest honest;
  const Fd known = honest.greeted();
  const Fd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const std::size_t before = open_fds();
  for (unsigned i = 0; i < 100; ++i) {
    Reply reply;
    Request request = honest.hello();
    CHECK(shm::send_message(known.get(), request, {null.get(), null.get()}));
    CHECK(shm::wait_readable(known.get(), patience()));
    CHECK(shm::receive_message(known.get(), reply));
  }
  CHECK(open_fds() == before);
  honest.check_unhurt();
}

TEST_CASE("rogue: 200 connections that say nothing, and some that never read") {
  Honest honest;
  const std::size_t before = open_fds();
  {
    std::vector<Fd> silent;
    for (unsigned i = 0; i < 200; ++i) silent.push_back(honest.dial());
    honest.check_unhurt();
    const Fd deaf = honest.greeted();
    unsigned sent = 0;
    eventually("who never reads its answers is cut off", [&] {
      pollfd watched{deaf.get(), POLLHUP, 0};
      for (unsigned i = 0; i < 20; ++i) sent += shm::send_message(deaf.get(), honest.attach());
      return ::poll(&watched, 1, 0) > 0 && (watched.revents & POLLHUP) != 0;
    });
    CHECK(sent > 0);
    honest.check_unhurt();
  }
  eventually("their descriptors are closed", [&] { return open_fds() <= before; });
  honest.check_unhurt();
}

// An owner that lies: it answers as it is told.
class Liar {
 public:
  Liar() : listener_(shm::listen_on(address_)) {
    thread_ = std::thread([this] {
      while (!stop_) {
        if (!shm::wait_readable(listener_.get(), Deadline::after(0.01))) continue;
        Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        while (!stop_ && socket) {
          if (!shm::wait_readable(socket.get(), Deadline::after(0.01))) continue;
          Request request;
          try {
            shm::receive_message(socket.get(), request);
          } catch (const Error&) {
            break;
          }
          if (request.type == Request::Type::Hello) {
            Reply reply;
            reply.request_id = request.request_id;
            shm::send_message(socket.get(), reply);
          } else if (request.type == Request::Type::Attach) {
            std::lock_guard lock(mutex_);
            Reply reply = reply_;
            reply.request_id = request.request_id;
            shm::send_message(socket.get(), reply, fds_);
          }
        }
      }
    });
  }
  ~Liar() {
    stop_ = true;
    thread_.join();
  }
  Endpoint endpoint() const { return {TransportKind::Shm, true, token_, shm::host_token(), 1, {}, 1, address_}; }
  RemoteMemory handle(std::uint64_t nbytes) const {
    return {TransportKind::Shm, Access::ReadWrite, token_, 1, 0, nbytes, 1, {}};
  }
  void answer(const Reply& reply, std::vector<int> fds) {
    std::lock_guard lock(mutex_);
    reply_ = reply;
    fds_ = std::move(fds);
  }

 private:
  const Token token_ = random_token();
  const std::string address_ = "onesided-test-" + hex(random_token());
  const Fd listener_;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  Reply reply_;
  std::vector<int> fds_;
  std::thread thread_;
};

TEST_CASE("rogue: an owner that lies about its memory is refused") {
  shm::ShmTransport transport;
  Liar liar;
  const auto connection = transport.connect(liar.endpoint(), "a liar", patience());
  const auto control = Segment::create(Control::size_for(4, 4), "onesided-test");
  const auto data = Segment::create(4096, "onesided-test");
  const Fd unsealed(::memfd_create("onesided-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(unsealed.get(), 1 << 20) == 0);
  Reply good;
  good.nbytes = 4096, good.segment_nbytes = 4096, good.access = 3, good.slots = 4, good.signals = 4;
  const auto offered = [&](const std::function<void(Reply&)>& change, std::vector<int> fds) {
    Reply reply = good;
    change(reply);
    liar.answer(reply, std::move(fds));
    return raised([&] { connection->attach(liar.handle(4096), patience())->write("x", 1, 0, Signal{0, 1}, How{}); });
  };
  const std::vector<int> right{control->fd(), data->fd()};
  const auto nothing = [](Reply&) {};
  const std::size_t fds = open_fds(), mapped = mappings();
  CHECK(offered(nothing, right) == "");
  CHECK(offered(nothing, {}) == "ConnectionLost");
  CHECK(offered(nothing, {control->fd()}) == "ConnectionLost");
  CHECK(offered(nothing, {control->fd(), unsealed.get()}) == "Handle");
  CHECK(offered(nothing, {unsealed.get(), data->fd()}) == "Handle");
  CHECK(offered(nothing, {2, 2}) == "Handle");
  CHECK(offered([](Reply& reply) { reply.slots = 400; }, right) == "Handle");
  CHECK(offered([](Reply& reply) { reply.signals = 4000; }, right) == "Handle");
  CHECK(offered([](Reply& reply) { reply.slots = UINT32_MAX; }, right) == "ConnectionLost");
  CHECK(offered([](Reply& reply) { reply.signals = UINT32_MAX; }, right) == "ConnectionLost");
  CHECK(offered([](Reply& reply) { reply.slot = 4; }, right) == "ConnectionLost");
  CHECK(offered([](Reply& reply) { reply.nbytes = 4095; }, right) == "Handle");  // less than the handle says
  CHECK(offered([](Reply& reply) { reply.nbytes = 8192; }, right) == "ConnectionLost");
  CHECK(offered([](Reply& reply) { reply.segment_nbytes = 8192; }, right) == "Handle");
  CHECK(offered([](Reply& reply) { reply.segment_offset = 1; }, right) == "ConnectionLost");
  CHECK(offered([](Reply& reply) { reply.segment_offset = UINT64_MAX; }, right) == "ConnectionLost");
  CHECK(offered([](Reply& reply) { reply.access = 1; }, right) == "RemoteAccess");
  CHECK(offered([](Reply& reply) { reply.access = 0; }, right) == "RemoteAccess");
  CHECK(offered([](Reply& reply) { reply.error = 4; }, right) == "Bounds");
  CHECK(offered([](Reply& reply) { reply.error = 4000000; }, right) == "Onesided");
  CHECK(offered([](Reply& reply) { reply.segment_nbytes = 0, reply.probe_address = 0; }, {control->fd()}) ==
        "Unsupported");
  CHECK(offered([](Reply& reply) { reply.error = 4, reply.message.fill('x'); }, right) == "Bounds");
  CHECK(offered(nothing, right) == "");
  CHECK(open_fds() == fds);
  CHECK(mappings() == mapped);
  // One that does not speak the protocol is left.
  CHECK(offered([](Reply& reply) { reply.magic = 0; }, right) == "ConnectionLost");
}

}  // namespace
}  // namespace onesided::tests
