#include "verbs/transport.h"

#if ONESIDED_HAS_VERBS
#include <numeric>

#include "tests/fake_verbs.h"
#include "tests/support.h"
#include "verbs/target.h"

namespace onesided::tests {
namespace {

using verbs::RdmaTransport;

verbs::RdmaOptions local_options() {
  verbs::RdmaOptions options;
  options.address = "127.0.0.1";  // the fake's devices have addresses that this host has not
  return options;
}

// Two transports of this process over the fake, and a memory of b's with its target at a.
struct Rig {
  fake::InUse in_use;
  std::shared_ptr<RdmaTransport> a, b;
  std::shared_ptr<Connection> to_b;
  std::shared_ptr<Memory> memory;
  std::shared_ptr<Target> target;

  explicit Rig(unsigned rails = 1, std::uint64_t nbytes = 1 << 20, verbs::RdmaOptions options = local_options(),
               const fake::Machine* machine = nullptr)
      : in_use(machine != nullptr ? *machine : fake::default_machine(rails)),
        a(std::make_shared<RdmaTransport>(options)),
        b(std::make_shared<RdmaTransport>(options)),
        to_b(a->connect(b->bind(false), "b", patience())),
        memory(b->allocate(nbytes, Access::ReadWrite, 4, 8)),
        target(to_b->attach(memory->remote(), patience())) {}
  ~Rig() {
    target = nullptr;
    memory = nullptr;
    to_b = nullptr;
    a = b = nullptr;
    const auto left = fake::live();
    CHECK(left.qps == 0);
    CHECK(left.mrs == 0);
    CHECK(left.total() == 0);
  }

  char* bytes() const { return static_cast<char*>(memory->data()); }
  std::uint64_t signal(unsigned index) const { return memory->control().signal(index).load(); }
  How how(bool async = false, double seconds = kPatience) const {
    How how;
    how.async = async;
    how.deadline = Deadline::after(seconds);
    return how;
  }
};

TEST_CASE("rdma: every size arrives, with its signal, and comes back") {
  for (const unsigned rails : {1u, 2u}) {
    CAPTURE(rails);
    Rig rig(rails);
    std::uint64_t signals = 0;
    for (const std::size_t nbytes :
         {0u, 1u, 8u, 219u, 220u, 221u, 4095u, 4096u, 4097u, 65536u, 131072u, 200001u, 1048575u}) {
      CAPTURE(nbytes);
      const auto sent = random_bytes(nbytes, nbytes);
      for (const bool async : {false, true}) {
        std::memset(rig.bytes(), 0, 1 << 20);
        const auto work = rig.target->write(sent.data(), nbytes, 1, Signal{2, 3}, rig.how(async));
        if (work != nullptr) work->wait(patience());
        rig.target->flush(patience());
        CHECK(std::memcmp(rig.bytes() + 1, sent.data(), nbytes) == 0);
        CHECK(rig.bytes()[0] == 0);
        if (nbytes + 1 < (1 << 20)) CHECK(rig.bytes()[1 + nbytes] == 0);
        CHECK(rig.signal(2) == (signals += 3));
        std::vector<char> back(nbytes + 1, 'x');
        if (const auto got = rig.target->read(back.data(), nbytes, 1, rig.how(async))) got->wait(patience());
        CHECK(std::memcmp(back.data(), sent.data(), nbytes) == 0);
        CHECK(back[nbytes] == 'x');
      }
    }
  }
}

TEST_CASE("rdma: atomics and bounds") {
  Rig rig;
  CHECK(rig.target->fetch_add(8, 5) == 0);
  CHECK(rig.target->fetch_add(8, UINT64_MAX) == 5);
  CHECK(rig.target->compare_swap(8, 4, 77) == 4);
  CHECK(rig.target->compare_swap(8, 4, 1) == 77);
  std::uint64_t word;
  std::memcpy(&word, rig.bytes() + 8, 8);
  CHECK(word == 77);
  CHECK(raised([&] { rig.target->fetch_add(4, 1); }) == "Bounds");
  CHECK(raised([&] { rig.target->fetch_add(1 << 20, 1); }) == "Bounds");
  const char byte = 1;
  CHECK(raised([&] { rig.target->write(&byte, 1, 1 << 20, std::nullopt, rig.how()); }) == "Bounds");
  CHECK(raised([&] { rig.target->write(&byte, 1, UINT64_MAX, std::nullopt, rig.how()); }) == "Bounds");
  CHECK(raised([&] { rig.target->write(&byte, 1, 0, Signal{4, 1}, rig.how()); }) == "Bounds");
}

TEST_CASE("rdma: small puts ask for few completions, and never overflow the queue") {
  Rig rig;
  fake::reset_counts();
  std::vector<std::uint64_t> values(20000);
  std::iota(values.begin(), values.end(), 1);
  for (std::size_t i = 0; i < values.size(); ++i) {
    rig.target->write(&values[i], 8, i * 8, std::nullopt, rig.how());
  }
  rig.target->flush(patience());
  CHECK(std::memcmp(rig.bytes(), values.data(), values.size() * 8) == 0);
  const auto counts = fake::counts();
  CHECK(counts.post_sends == values.size() + 1);
  CHECK(counts.inlined == values.size());
  CHECK(counts.signaled < values.size() / 32);
}

TEST_CASE("rdma: staged puts wait for their piece of the ring") {
  Rig rig;
  std::vector<char> sent = random_bytes(1 << 20, 7);
  fake::deliver_in_thread();
  for (std::size_t at = 0; at < sent.size(); at += 4096) {
    std::vector<char> source(sent.begin() + static_cast<long>(at), sent.begin() + static_cast<long>(at) + 4096);
    rig.target->write(source.data(), source.size(), at, std::nullopt, rig.how());
    std::fill(source.begin(), source.end(), 'z');  // at once: it was copied
  }
  rig.target->flush(patience());
  CHECK(std::memcmp(rig.bytes(), sent.data(), sent.size()) == 0);
}

TEST_CASE("rdma: large operations are spread over the rails") {
  Rig rig(2);
  fake::reset_counts();
  const auto sent = random_bytes(1 << 20, 3);
  for (unsigned i = 0; i < 8; ++i) rig.target->write(sent.data(), sent.size(), 0, Signal{0, 1}, rig.how());
  CHECK(std::memcmp(rig.bytes(), sent.data(), sent.size()) == 0);
  CHECK(rig.signal(0) == 8);
  const auto first = static_cast<double>(fake::traffic("fake0").written);
  const auto second = static_cast<double>(fake::traffic("fake1").written);
  CHECK(first / second > 0.9);
  CHECK(first / second < 1.1);
}

TEST_CASE("rdma: a deadline is a fence, and the next operation opens a new generation") {
  for (const unsigned rails : {1u, 2u}) {
    for (const bool async : {false, true}) {
      CAPTURE(rails);
      CAPTURE(async);
      Rig rig(rails);
      std::vector<char> source(1 << 20, 'a');
      fake::hold();
      const auto put = [&] {
        const auto work =
            rig.target->write(source.data(), source.size(), 0, std::nullopt, rig.how(async, async ? 30 : 0.02));
        if (work != nullptr) work->wait(Deadline::after(0.02));
      };
      CHECK(raised(put) == "DeadlineExceeded");
      std::fill(source.begin(), source.end(), 'z');
      fake::release_all();
      CHECK(all_are(rig.bytes(), 1 << 20, 0));
      rig.target->write(source.data(), source.size(), 0, Signal{0, 1}, rig.how());
      rig.target->flush(patience());
      CHECK(all_are(rig.bytes(), 1 << 20, 'z'));
      CHECK(rig.signal(0) == 1);
    }
  }
}

TEST_CASE("rdma: an error names its cause; what was flushed with it says so; later operations work") {
  Rig rig;
  const auto sent = random_bytes(1 << 16, 3);
  fake::hold();
  std::vector<std::shared_ptr<Work>> works;
  for (unsigned i = 0; i < 3; ++i)
    works.push_back(rig.target->write(sent.data(), sent.size(), 0, std::nullopt, rig.how(true)));
  fake::fail_completion(IBV_WC_RETRY_EXC_ERR, 2);
  fake::release_all();
  works[0]->wait(patience());
  CHECK(raised([&] { works[1]->wait(patience()); }) == "ConnectionLost");
  CHECK(contains(said([&] { works[1]->wait(patience()); }), "no answer"));
  CHECK(contains(said([&] { works[2]->wait(patience()); }), "flushed"));
  rig.target->write(sent.data(), sent.size(), 0, Signal{0, 1}, rig.how());
  CHECK(rig.signal(0) == 1);
}

TEST_CASE("rdma: a signal behind a put that was lost is not sent, once") {
  Rig rig;
  const char byte = 'x';
  fake::fail_completion(IBV_WC_RETRY_EXC_ERR, 1);
  rig.target->write(&byte, 1, 0, std::nullopt, rig.how());
  CHECK(raised([&] { rig.target->flush(patience()); }) == "ConnectionLost");
  rig.target->write(&byte, 1, 0, std::nullopt, rig.how());  // opens the next generation
  fake::fail_completion(IBV_WC_RETRY_EXC_ERR, 1);
  rig.target->write(&byte, 1, 0, std::nullopt, rig.how());
  eventually("the failure is seen",
             [&] { return raised([&] { rig.target->signal({0, 1}, rig.how()); }) == "ConnectionLost"; });
  CHECK(rig.signal(0) <= 0);
  rig.target->signal({0, 1}, rig.how());
  rig.target->flush(patience());
  CHECK(rig.signal(0) == 1);
}

TEST_CASE("rdma: closing a memory ends access for its peers, and for nothing else") {
  Rig rig;
  const auto other = rig.b->allocate(4096, Access::ReadWrite, 1, 8);
  const auto to_other = rig.to_b->attach(other->remote(), patience());
  const char byte = 'x';
  rig.target->write(&byte, 1, 0, std::nullopt, rig.how());
  rig.memory->close(patience());
  CHECK(rig.bytes()[0] == 'x');
  CHECK(raised([&] { rig.target->write(&byte, 1, 0, std::nullopt, rig.how()); }) == "StaleHandle");
  CHECK(raised([&] { rig.target->fetch_add(0, 1); }) == "StaleHandle");
  CHECK(raised([&] { rig.to_b->attach(rig.memory->remote(), patience()); }) == "StaleHandle");
  to_other->write(&byte, 1, 0, Signal{0, 1}, rig.how());
  to_other->flush(patience());
  CHECK(static_cast<char*>(other->data())[0] == 'x');
}

TEST_CASE("rdma: a peer that is stuck loses its queue pairs when the owner closes") {
  Rig rig;
  std::vector<char> source(1 << 16, 'a');
  fake::hold();
  const auto work = rig.target->write(source.data(), source.size(), 0, std::nullopt, rig.how(true));
  rig.memory->close(Deadline::after(0.05));
  fake::release_all();
  CHECK(raised([&] { work->wait(patience()); }) != "");
  CHECK(all_are(rig.bytes(), 1 << 16, 0));
}

TEST_CASE("rdma: the end of a peer is told, in operations and in waits") {
  Rig rig;
  const auto own = rig.a->allocate(64, Access::ReadWrite, 1, 8);
  rig.b->close(patience());
  eventually("a hears of it", [&] { return rig.to_b->peer().lost(); });
  const char byte = 'x';
  CHECK(raised([&] { rig.target->write(&byte, 1, 0, std::nullopt, rig.how()); }) == "StaleHandle");  // it closed first
  CHECK(raised([&] { rig.target->flush(patience()); }) == "ConnectionLost");
  CHECK(raised([&] { rig.to_b->attach(rig.memory->remote(), patience()); }) == "ConnectionLost");
}

TEST_CASE("rdma: device errors end what uses the device, with their cause") {
  {
    Rig rig;
    fake::port_down("fake0");
    const char byte = 'x';
    std::string why;
    eventually("the port error arrives", [&] {
      why = said([&] {
        rig.target->write(&byte, 1, 0, std::nullopt, rig.how());
        rig.target->flush(patience());
      });
      return why != "";
    });
    CHECK(contains(why, "fake0"));
    fake::port_up("fake0");
  }
  for (const int which : {0, 1}) {
    CAPTURE(which);
    Rig rig;
    std::vector<char> source(1 << 16, 'a');
    fake::hold();
    const auto work = rig.target->write(source.data(), source.size(), 0, std::nullopt, rig.how(true));
    for (const auto pair : fake::qp_nums("fake0")) {
      if (fake::pending(pair) == 0) continue;
      which == 0 ? fake::qp_fatal(pair) : fake::cq_error(pair);
    }
    CHECK(raised([&] { work->wait(patience()); }) == "ConnectionLost");
    fake::release_all();
    rig.target->write(source.data(), source.size(), 0, Signal{0, 1}, rig.how());
    CHECK(all_are(rig.bytes(), 1 << 16, 'a'));
  }
}

TEST_CASE("rdma: regions that the device does not take whole are cut") {
  auto machine = fake::default_machine(2);
  for (auto& device : machine.devices) device.limits.max_mr_size = 128 << 10;
  machine.devices[0].ports[0].max_msg_sz = 48 << 10;
  Rig rig(2, (1 << 20) - 5, local_options(), &machine);
  const auto sent = random_bytes((1 << 20) - 5, 11);
  rig.target->write(sent.data(), sent.size(), 0, Signal{0, 1}, rig.how());
  CHECK(std::memcmp(rig.bytes(), sent.data(), sent.size()) == 0);
  // Across a border, small and large.
  std::vector<char> back(sent.size());
  rig.target->read(back.data(), back.size(), 0, rig.how());
  CHECK(back == sent);
  rig.target->write(sent.data(), 100, (128 << 10) - 50, std::nullopt, rig.how());
  rig.target->flush(patience());
  CHECK(std::memcmp(rig.bytes() + (128 << 10) - 50, sent.data(), 100) == 0);
}

TEST_CASE("rdma: a registration that fails names the limit, and leaves nothing behind") {
  Rig rig;
  const auto before = fake::live().mrs;
  fake::fail(fake::Call::RegMr, ENOMEM, 2);
  CHECK(raised([&] { rig.b->allocate(4096, Access::ReadWrite, 1, 8); }) == "Registration");
  CHECK(fake::live().mrs == before);
  fake::fail(fake::Call::RegMr, EPERM, 1);
  std::vector<char> source(1 << 16, 'a');
  CHECK(contains(said([&] { rig.target->write(source.data(), source.size(), 0, std::nullopt, rig.how()); }),
                 "RLIMIT_MEMLOCK"));
  rig.target->write(source.data(), source.size(), 0, std::nullopt, rig.how());
}

TEST_CASE("rdma: eight threads, many operations, exact sums") {
  Rig rig(2);
  fake::deliver_in_thread(0, 0);
  std::atomic<std::uint64_t> sum{0};
  side_by_side(8, [&](unsigned i) {
    std::vector<char> source(5000 + i * 40000, static_cast<char>('a' + i));
    for (unsigned k = 0; k < rounds(100); ++k) {
      rig.target->write(source.data(), 3000, i * 4096, Signal{i % 4, 1}, rig.how());
      sum += rig.target->fetch_add((1 << 20) - 8, 1) * 0 + 1;
      if (k % 10 == 0)
        rig.target->write(source.data(), source.size(), 131072, std::nullopt, rig.how(true))->wait(patience());
      if (k % 25 == 0) rig.target->flush(patience());
    }
  });
  rig.target->flush(patience());
  for (unsigned i = 0; i < 8; ++i) CHECK(all_are(rig.bytes() + i * 4096, 3000, static_cast<char>('a' + i)));
  CHECK(rig.target->fetch_add((1 << 20) - 8, 0) == sum.load());
  CHECK(rig.signal(0) + rig.signal(1) + rig.signal(2) + rig.signal(3) == sum.load());
}

TEST_CASE("rdma: to oneself") {
  Rig rig;
  const auto loop = rig.b->loop_back(rig.memory, "me");
  const auto sent = random_bytes(100000, 5);
  loop->write(sent.data(), sent.size(), 8, Signal{1, 1}, rig.how());
  CHECK(std::memcmp(rig.bytes() + 8, sent.data(), sent.size()) == 0);
  CHECK(rig.signal(1) == 1);
  CHECK(loop->fetch_add(0, 2) == 0);
  CHECK(rig.target->fetch_add(0, 1) == 2);
}

}  // namespace
}  // namespace onesided::tests
#endif
