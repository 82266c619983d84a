#include "verbs/transport.h"

#if ONESIDED_HAS_VERBS
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <array>
#include <numeric>
#include <random>

#include "tests/fake_verbs.h"
#include "tests/support.h"
#include "verbs/protocol.h"
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

TEST_CASE("rdma: a close does not wait longer than it may for a revocation of another thread") {
  Rig rig;
  std::vector<char> source(1 << 16, 'a');
  fake::hold();
  const auto work = rig.target->write(source.data(), source.size(), 0, std::nullopt, rig.how(true));
  const auto before = fake::live().mrs;
  std::string revoked;
  std::thread other([&] { revoked = raised([&] { rig.memory->revoke("a stranger", patience()); }); });
  eventually("the revocation has begun", [&] { return fake::live().mrs > before; });
  CHECK(raised([&] { rig.memory->close(Deadline::after(0.02)); }) == "DeadlineExceeded");
  CHECK_FALSE(rig.memory->closed());
  fake::release_all();
  work->wait(patience());
  other.join();
  CHECK(revoked == "");
  CHECK(all_are(rig.bytes(), 1 << 16, 'a'));
  rig.memory->close(patience());
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

// ---- Storms ---------------------------------------------------------------------------------------------------------

// What one thread of a storm has of the memory, and knows of it. Its target is its own: what was lost is told once a target.
class Sailor {
 public:
  static constexpr std::uint64_t kShare = 96 << 10;
  static constexpr std::uint64_t kWords = 8 * kShare;  // behind the shares of eight

  Sailor(Rig& rig, unsigned number)
      : rig_(rig), number_(number), target_(rig.to_b->attach(rig.memory->remote(), patience())), numbers_(number + 1) {}

  // One operation. Either it works, or it raises what a user can make something of.
  void operate() {
    const std::uint64_t nbytes = pick(3) == 0 ? 1 + pick(kShare - 1) : 1 + pick(6000);
    const std::uint64_t at = pick(kShare - nbytes + 1);
    const How how = rig_.how(false, pick(8) == 0 ? 0.002 : kPatience);
    bool begun = false;
    try {
      switch (pick(6)) {
        case 0:
        case 1: {
          const char value = next();
          std::fill_n(source_.begin(), nbytes, value);
          unknown(at, nbytes, value);
          target_->write(source_.data(), nbytes, at_all(at), std::nullopt, how);
          break;
        }
        case 2: {
          const char value = next();
          std::fill_n(source_.begin(), nbytes, value);
          unknown(at, nbytes, value);
          How later = how;
          later.async = true;
          const auto work = target_->write(source_.data(), nbytes, at_all(at), std::nullopt, later);
          if (work != nullptr) work->wait(how.deadline);
          break;
        }
        case 3: target_->read(landing_.data(), nbytes, at_all(at), how); break;
        case 4:
          ++most_;
          begun = true;
          last_ = std::max(last_, target_->fetch_add(kWords + 8 * number_, 1, how.deadline) + 1);
          ++least_;
          break;
        default:
          target_->flush(how.deadline);
          settled();
          break;
      }
    } catch (const Error& error) {
      check_sensible(error);
      ++failures_;
      lost();
      if (begun) CHECK(last_ <= most_);
    }
  }

  // When the storm is over: everything that is not known is written again, and all of it compared.
  void arrive() {
    eventually("operations work again", [&] { return raised([&] { target_->flush(patience()); }) == ""; });
    for (std::uint64_t at = 0; at < kShare; ++at) {
      if (known_[at]) continue;
      std::uint64_t end = at;
      while (end < kShare && !known_[end]) ++end;
      const char value = next();
      std::fill_n(source_.begin(), end - at, value);
      unknown(at, end - at, value);
      target_->write(source_.data(), end - at, at_all(at), std::nullopt, rig_.how());
      at = end;
    }
    target_->flush(patience());
    settled();
    CHECK(std::memcmp(rig_.bytes() + at_all(0), expected_.data(), kShare) == 0);
    const std::uint64_t sum = target_->fetch_add(kWords + 8 * number_, 0, patience());
    CHECK(sum >= least_);
    CHECK(sum <= most_);
  }
  unsigned failures() const { return failures_; }

 private:
  std::uint64_t pick(std::uint64_t below) { return numbers_() % below; }
  char next() { return static_cast<char>(numbers_() | 1); }
  std::uint64_t at_all(std::uint64_t at) const { return number_ * kShare + at; }
  // Of what is issued the bytes are known when a flush has succeeded after it, unless something failed meanwhile.
  void unknown(std::uint64_t at, std::uint64_t nbytes, char value) {
    std::fill_n(expected_.begin() + static_cast<long>(at), nbytes, value);
    std::fill_n(known_.begin() + static_cast<long>(at), nbytes, false);
    issued_.emplace_back(at, nbytes);
  }
  void settled() {
    for (const auto& [at, nbytes] : issued_) std::fill_n(known_.begin() + static_cast<long>(at), nbytes, true);
    for (const auto& [at, nbytes] : lost_) {
      std::fill_n(known_.begin() + static_cast<long>(at), nbytes, false);
    }
    // What was written once more in one piece is known again.
    std::erase_if(lost_, [&](const auto& range) {
      return std::any_of(issued_.begin(), issued_.end(), [&](const auto& other) {
        return other.first <= range.first && other.first + other.second >= range.first + range.second;
      });
    });
    issued_.clear();
    for (std::uint64_t at = 0; at < kShare; ++at) known_[at] = true;
    for (const auto& [at, nbytes] : lost_) std::fill_n(known_.begin() + static_cast<long>(at), nbytes, false);
  }
  void lost() {
    lost_.insert(lost_.end(), issued_.begin(), issued_.end());
    for (const auto& [at, nbytes] : lost_) std::fill_n(known_.begin() + static_cast<long>(at), nbytes, false);
    issued_.clear();
  }
  static void check_sensible(const Error& error) {
    CAPTURE(error.what());
    const bool sensible = error.kind() == ErrorKind::ConnectionLost || error.kind() == ErrorKind::DeadlineExceeded ||
                          error.kind() == ErrorKind::RemoteAccess || error.kind() == ErrorKind::Registration ||
                          error.kind() == ErrorKind::Onesided;
    CHECK(sensible);
    CHECK(std::strlen(error.what()) > 10);
  }

  Rig& rig_;
  const unsigned number_;
  const std::shared_ptr<Target> target_;
  std::mt19937_64 numbers_;
  std::vector<char> source_ = std::vector<char>(kShare), landing_ = std::vector<char>(kShare);
  std::vector<char> expected_ = std::vector<char>(kShare);
  std::vector<bool> known_ = std::vector<bool>(kShare, true);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> issued_, lost_;
  std::uint64_t least_ = 0, most_ = 0, last_ = 0;
  unsigned failures_ = 0;
};

void fail_somehow(std::mt19937_64& numbers) {
  const auto pairs = fake::qp_nums();
  const std::uint32_t pair = pairs.empty() ? 0 : pairs[numbers() % pairs.size()];
  switch (numbers() % 8) {
    case 0: fake::fail_completion(IBV_WC_RETRY_EXC_ERR, 1 + numbers() % 20); break;
    case 1: fake::fail_completion(IBV_WC_REM_ACCESS_ERR, 1 + numbers() % 20, 0, numbers() % 2 == 0); break;
    case 2: fake::fail_completion(IBV_WC_RETRY_EXC_ERR, 1 + numbers() % 20, pair, true); break;
    case 3: fake::qp_fatal(pair); break;
    case 4: fake::peer_gone(pair); break;
    case 5: fake::fail(fake::Call::PostSend, ENOMEM, 1 + numbers() % 20); break;
    case 6: fake::fail(fake::Call::CreateQp, ENOMEM, 1 + numbers() % 3); break;
    default:
      fake::port_down("fake1");
      fake::port_up("fake1");
      break;
  }
}

TEST_CASE("rdma: storms of failures and new generations under the operations of eight threads") {
  for (const std::uint64_t seed : {1u, 2u}) {
    CAPTURE(seed);
    verbs::RdmaOptions options = local_options();
    options.tuning.depth = 32;
    Rig rig(2, 1 << 20, options);
    fake::deliver_in_thread(0, 0);
    std::vector<std::unique_ptr<Sailor>> crew;
    for (unsigned i = 0; i < 8; ++i) crew.push_back(std::make_unique<Sailor>(rig, i));
    std::atomic<bool> over{false};
    std::vector<std::function<void()>> bodies;
    for (auto& sailor : crew) {
      bodies.push_back([&] {
        while (!over.load()) sailor->operate();
      });
    }
    bodies.push_back([&] {
      std::mt19937_64 numbers(seed);
      for (unsigned i = 0; i < rounds(8); ++i) {
        const std::uint64_t until = fake::counts().wrs + 200;
        happens([&] { return fake::counts().wrs > until; }, 2);  // or all of them wait for a new generation
        fail_somehow(numbers);
      }
      over = true;
    });
    side_by_side(bodies);
    // What was to fail and has not yet is met by somebody now.
    eventually("nothing fails any more", [&] {
      return raised([&] {
               for (unsigned i = 0; i < 100; ++i) rig.target->fetch_add(Sailor::kWords + 64, 1, patience());
             }) == "";
    });
    side_by_side(8, [&](unsigned i) { crew[i]->arrive(); });
    unsigned failures = 0;
    for (const auto& sailor : crew) failures += sailor->failures();
    CHECK(failures > 0);
    crew.clear();
  }
}

TEST_CASE(
    "rdma: deadlines of eight threads end each other's generations, and nothing of a source lands after its own") {
  Rig rig(2);
  fake::deliver_in_thread(0, 50);
  std::atomic<unsigned> late{0};
  side_by_side(8, [&](unsigned i) {
    const auto target = rig.to_b->attach(rig.memory->remote(), patience());
    std::vector<char> source(100 << 10);
    for (unsigned k = 0; k < rounds(12); ++k) {
      std::fill(source.begin(), source.end(), 'a');
      try {
        target->write(source.data(), source.size(), i * source.size(), std::nullopt, rig.how(false, 0.001 * (k % 3)));
      } catch (const Error& error) {
        const bool sensible = error.kind() == ErrorKind::DeadlineExceeded || error.kind() == ErrorKind::ConnectionLost;
        CHECK(sensible);
        ++late;
      }
      std::fill(source.begin(), source.end(), 'z');
    }
  });
  CHECK(late > 0);
  fake::deliver_immediately();
  for (std::size_t at = 0; at < 8 * (100 << 10); ++at) {
    if (rig.bytes()[at] == 'z') FAIL("byte " << at << " was read after the deadline");
  }
}

// ---- Peers that do not keep to the protocol -------------------------------------------------------------------------

using verbs::Message;
using verbs::Say;

// A client of b's hub that writes its frames itself.
class Stranger {
 public:
  explicit Stranger(const Endpoint& endpoint)
      : endpoint_(endpoint), socket_(net::connect_to(endpoint.address, "b", patience())) {}

  Message hello() const {
    Message message;
    message.say = Say::Hello;
    message.request_id = 1;
    message.id = endpoint_.endpoint_id;
    message.token = endpoint_.secret;
    return message;
  }
  void send_raw(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t count = ::send(socket_.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (count > 0)
        bytes.remove_prefix(static_cast<std::size_t>(count));
      else if (errno != EAGAIN || !wait_for(socket_.fd(), POLLOUT, patience()))
        return;
    }
  }
  // What is answered, "ended" if the connection is, "" for what is not a failure.
  std::string answer() {
    try {
      for (;;) {
        if (const auto bytes = socket_.receive()) {
          const Message message = Message::from_bytes(*bytes);
          last = message;
          return message.say == Say::Failed ? name_of(message.error) : "";
        }
        if (!wait_for(socket_.fd(), POLLIN, patience())) return "no answer";
      }
    } catch (const Error&) {
      return "ended";
    }
  }
  std::string ask(const Message& message) { return ask(message.to_bytes()); }
  std::string ask(const std::string& bytes) {
    socket_.send(bytes);
    return answer();
  }
  bool ends(std::string_view raw) {
    send_raw(raw);
    for (std::string said = answer(); said != "ended"; said = answer()) {
      if (said == "no answer" || said == "") return false;
    }
    return true;
  }

  Message last;

 private:
  const Endpoint endpoint_;
  net::FramedSocket socket_;
};

std::string framed(std::string_view bytes) {
  const auto length = static_cast<std::uint32_t>(bytes.size());
  std::string frame;
  for (unsigned i = 0; i < 4; ++i) frame.push_back(static_cast<char>(length >> (8 * i)));
  return frame.append(bytes);
}

// With the right checksum, so that it is the content that is looked at.
std::string sealed(std::string bytes) {
  const std::uint32_t crc = crc32(bytes);
  for (unsigned i = 0; i < 4; ++i) bytes.push_back(static_cast<char>(crc >> (8 * i)));
  return bytes;
}

void check_unhurt(Rig& rig) {
  const std::uint64_t before = rig.signal(3);
  rig.target->write("x", 1, 0, Signal{3, 1}, rig.how());
  const auto connection = rig.a->connect(rig.b->bind(false), "b", patience());
  connection->attach(rig.memory->remote(), patience())->signal({3, 1}, rig.how());
  rig.target->flush(patience());
  connection->close(patience());
  eventually("both signals", [&] { return rig.signal(3) == before + 2; });
  CHECK_FALSE(rig.target->peer().lost());
}

TEST_CASE("rdma rogue: what is not of the protocol ends its connection and nothing else") {
  Rig rig;
  const Endpoint endpoint = rig.b->bind(true);
  const std::string good = Stranger(endpoint).hello().to_bytes();
  CHECK(Stranger(endpoint).ask(good) == "");
  CHECK(Stranger(endpoint).ends(framed("")));
  CHECK(Stranger(endpoint).ends(framed("GET / HTTP/1.1\r\n\r\n")));
  CHECK(Stranger(endpoint).ends("GET / HTTP/1.1\r\n\r\n"));  // its first letters are too great a length
  CHECK(Stranger(endpoint).ends(std::string(4, '\xFF')));
  for (unsigned i = 0; i < 50; ++i) {
    const auto noise = random_bytes(i * 7 + 4, i + 1);
    CHECK(Stranger(endpoint).ends(framed({noise.data(), noise.size()})));
    CHECK(Stranger(endpoint).ends(framed(sealed({noise.data(), noise.size()}))));
  }
  const std::string open = good.substr(0, good.size() - 4);
  for (std::size_t length = 0; length < open.size(); ++length) {
    CAPTURE(length);
    CHECK(Stranger(endpoint).ends(framed(good.substr(0, length))));
    CHECK(Stranger(endpoint).ends(framed(sealed(open.substr(0, length)))));
  }
  CHECK(Stranger(endpoint).ends(framed(sealed(open + "x"))));
  for (std::size_t at : {0u, 4u, 5u, 6u}) {  // magic, version, kind of message
    std::string other = open;
    other[at] = static_cast<char>(other[at] ^ 0x40);
    CHECK(Stranger(endpoint).ends(framed(sealed(other))));
  }
  // Truncated, and then gone.
  {
    Stranger(endpoint).send_raw(framed(good).substr(0, 20));
  }
  check_unhurt(rig);
}

TEST_CASE("rdma rogue: requests that are not granted") {
  Rig rig;
  const Endpoint endpoint = rig.b->bind(true);
  const RemoteMemory remote = rig.memory->remote();
  const auto with = [](Message message, const std::function<void(Message&)>& change) {
    change(message);
    return message;
  };
  Message attach;
  attach.say = Say::Attach;
  attach.id = remote.memory_id;
  attach.token = remote.key;
  Message open;
  open.say = Say::Open;
  open.generation = 1;
  open.pairs.resize(1);
  open.pairs[0].address.mtu = IBV_MTU_4096;
  open.pairs[0].address.gid = fake::gid_of("10.77.0.1");

  Stranger stranger(endpoint);
  CHECK(stranger.ask(attach) == "RemoteAccess");
  CHECK(stranger.ask(open) == "RemoteAccess");
  CHECK(stranger.ask(with(stranger.hello(), [](Message& message) { message.token[3] ^= 1; })) == "Handle");
  CHECK(stranger.ask(with(stranger.hello(), [](Message& message) { message.id += 99; })) == "StaleHandle");
  CHECK(stranger.ask(attach) == "RemoteAccess");
  CHECK(stranger.ask(stranger.hello()) == "");
  CHECK(stranger.ask(with(attach, [](Message& message) { message.token = {}; })) == "Handle");
  CHECK(stranger.ask(with(attach, [](Message& message) { message.id = UINT64_MAX; })) == "StaleHandle");
  for (const Say say : {Say::Welcome, Say::Opened, Say::Attached, Say::Failed, Say::Ended, Say::Revoke}) {
    CHECK(stranger.ask(with(Message(), [&](Message& message) {
      message.say = say;
      message.reach.piece_nbytes = 1;
    })) == "Unsupported");
  }
  CHECK(stranger.ask(with(open, [](Message& message) { message.pairs[0].remote_rail = 1; })) == "Handle");
  CHECK(stranger.ask(with(open, [](Message& message) { message.pairs[0].remote_rail = 255; })) == "Handle");
  // A queue pair that is nobody's can be answered; nothing comes of it. As many as there may be, again and again.
  const auto qps = fake::live().qps;
  for (unsigned i = 0; i < 50; ++i) {
    CHECK(stranger.ask(with(open, [](Message& message) { message.pairs.resize(8, message.pairs[0]); })) == "");
    CHECK(stranger.last.pairs.size() == 8);
  }
  CHECK(fake::live().qps == qps + 8);
  CHECK(stranger.ask(with(open, [](Message& message) { message.pairs.clear(); })) == "");
  CHECK(fake::live().qps == qps);
  // What it has not, it cannot give back for others.
  for (const Say say : {Say::Detach, Say::Revoked}) {
    for (const std::uint64_t id : {remote.memory_id, std::uint64_t{0}, UINT64_MAX}) {
      stranger.send_raw(framed(with(Message(), [&](Message& message) {
                                 message.say = say;
                                 message.id = id;
                               }).to_bytes()));
      CHECK(stranger.ask(attach) == "");  // the connection goes on
    }
  }
  // One endpoint, one connection.
  const Endpoint single = rig.b->bind(false);
  Stranger first(single), second(single);
  CHECK(first.ask(first.hello()) == "");
  CHECK(second.ask(second.hello()) == "StaleHandle");
  check_unhurt(rig);
}

TEST_CASE("rdma rogue: a thousand strangers that say nothing, and one that never reads") {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  const rlimit before = files;
  files.rlim_cur = std::min<rlim_t>(files.rlim_max, 8192);
  ::setrlimit(RLIMIT_NOFILE, &files);
  const unsigned count = files.rlim_cur >= 3000 ? 1000 : 100;
  {
    Rig rig;
    const Endpoint endpoint = rig.b->bind(true);
    check_unhurt(rig);
    const std::size_t fds = open_fds();
    {
      std::vector<std::unique_ptr<Stranger>> silent;
      for (unsigned i = 0; i < count; ++i) silent.push_back(std::make_unique<Stranger>(endpoint));
      check_unhurt(rig);
      Stranger deaf(endpoint);
      CHECK(deaf.ask(deaf.hello()) == "");
      Message attach;
      attach.say = Say::Attach;
      const std::string bytes = framed(attach.to_bytes());
      for (unsigned i = 0; i < 2000; ++i) deaf.send_raw(bytes);
      check_unhurt(rig);
    }
    eventually("their descriptors are closed", [&] { return open_fds() <= fds; });
    check_unhurt(rig);
  }
  ::setrlimit(RLIMIT_NOFILE, &before);
}

// Stands between a and b, and changes what b answers.
class Between {
 public:
  using Change = std::function<void(Message&)>;

  explicit Between(const Endpoint& real) : endpoint_(real), listener_(net::listen_on("127.0.0.1")) {
    endpoint_.address = listener_.address;
    thread_ = std::thread([this, real] {
      std::vector<std::array<std::unique_ptr<net::FramedSocket>, 2>> ways;
      while (!stop_.load()) {
        std::vector<pollfd> watched{{listener_.socket.get(), POLLIN, 0}};
        for (const auto& way : ways) {
          for (const auto& end : way) watched.push_back({end->fd(), POLLIN, 0});
        }
        ::poll(watched.data(), watched.size(), 5);
        while (Fd client = net::accept_one(listener_.socket.get())) {
          ways.push_back({std::make_unique<net::FramedSocket>(std::move(client)),
                          std::make_unique<net::FramedSocket>(net::connect_to(real.address, "b", patience()))});
        }
        std::erase_if(ways, [this](auto& way) { return !pass(way); });
      }
    });
  }
  ~Between() {
    stop_ = true;
    thread_.join();
  }
  const Endpoint& endpoint() const { return endpoint_; }
  // Of answers of this kind; of those before it, none. Null: they are passed on as they are.
  void change(Say say, Change change) {
    std::lock_guard lock(mutex_);
    say_ = say;
    change_ = std::move(change);
    raw_.clear();
  }
  // In place of such an answer.
  void replace(Say say, std::string frame) {
    std::lock_guard lock(mutex_);
    say_ = say;
    change_ = nullptr;
    raw_ = std::move(frame);
  }

 private:
  bool pass(std::array<std::unique_ptr<net::FramedSocket>, 2>& way) {
    try {
      while (const auto bytes = way[0]->receive()) way[1]->send(*bytes);
      while (const auto bytes = way[1]->receive()) {
        Message message = Message::from_bytes(*bytes);
        std::lock_guard lock(mutex_);
        if (message.say == say_ && !raw_.empty()) {
          ::send(way[0]->fd(), raw_.data(), raw_.size(), MSG_NOSIGNAL);
          continue;
        }
        if (message.say == say_ && change_) change_(message);
        way[0]->send(message.to_bytes());
      }
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  Endpoint endpoint_;
  net::Listener listener_;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  Say say_{};
  Change change_;
  std::string raw_;
  std::thread thread_;
};

TEST_CASE("rdma rogue: an owner that lies is refused, and hurts nobody else") {
  Rig rig;
  Between liar(rig.b->bind(true));
  const RemoteMemory remote = rig.memory->remote();
  const auto use = [&](double seconds = kPatience) {
    return raised([&] {
      const auto connection = rig.a->connect(liar.endpoint(), "a liar", Deadline::after(seconds));
      const auto target = connection->attach(remote, Deadline::after(seconds));
      target->write("x", 1, 1 << 19, std::nullopt, rig.how(true))->wait(patience());
      target->signal(Signal{0, 1}, rig.how(true))->wait(patience());
      target->flush(patience());
      target->fetch_add(0, 0, patience());
    });
  };
  const auto told = [&](Say say, const Between::Change& change, double seconds = kPatience) {
    liar.change(say, change);
    return use(seconds);
  };
  CHECK(use() == "");
  CHECK(told(Say::Welcome, [](Message& m) { m.rails.clear(); }) == "ConnectionLost");
  CHECK(told(Say::Welcome, [](Message& m) { m.say = Say::Attached, m.reach.piece_nbytes = 1; }) == "ConnectionLost");
  CHECK(told(Say::Welcome, [](Message& m) { m.request_id += 1000; }, 0.2) == "DeadlineExceeded");
  CHECK(told(Say::Welcome, [](Message& m) { m.rails.resize(8, m.rails[0]); }) == "Handle");  // b has no such rail
  CHECK(told(Say::Opened, [](Message& m) { m.generation += 1; }) == "ConnectionLost");
  CHECK(told(Say::Opened, [](Message& m) { m.pairs.clear(); }) == "ConnectionLost");
  CHECK(told(Say::Opened, [](Message& m) { m.pairs.resize(2, m.pairs[0]); }) == "ConnectionLost");
  CHECK(told(Say::Opened, [](Message& m) { m.pairs[0].address.number ^= 0x5555; }) == "ConnectionLost");
  CHECK(told(Say::Opened, [](Message& m) { m.pairs[0].address.gid = {}; }) != "");
  CHECK(told(Say::Opened, [](Message& m) { m.pairs[0].address.mtu = 0; }) == "ConnectionLost");
  CHECK(told(Say::Opened, [](Message& m) { m.pairs[0].address.reads = 0; }) == "");
  CHECK(told(Say::Opened, [](Message& m) { m.pairs[0].address.reads = 255; }) == "");
  CHECK(told(Say::Attached, [](Message& m) { m.reach.keys.clear(); }) == "ConnectionLost");
  CHECK(told(Say::Attached, [](Message& m) { m.reach.keys.push_back(1); }) == "ConnectionLost");
  CHECK(told(Say::Attached, [](Message& m) { m.reach.words_keys.clear(); }) == "ConnectionLost");
  CHECK(told(Say::Attached, [](Message& m) { m.reach.piece_nbytes = 0; }) == "ConnectionLost");
  CHECK(told(Say::Attached, [](Message& m) { m.reach.piece_nbytes = 1; }) == "ConnectionLost");
  CHECK(told(Say::Attached, [](Message& m) { m.reach.piece_nbytes = 4096; }) == "ConnectionLost");
  CHECK(told(Say::Attached, [](Message& m) { m.reach.nbytes = UINT64_MAX; }) == "ConnectionLost");
  CHECK(told(Say::Attached, [](Message& m) { m.reach.nbytes = 0, m.reach.keys.clear(); }) == "Handle");
  CHECK(told(Say::Attached, [](Message& m) { m.reach.nbytes /= 2; }) == "Handle");  // less than the handle says
  CHECK(told(Say::Attached, [](Message& m) { m.reach.address += 1ull << 40; }) == "RemoteAccess");
  CHECK(told(Say::Attached, [](Message& m) { m.reach.address = UINT64_MAX - 100; }) == "ConnectionLost");
  CHECK(told(Say::Attached, [](Message& m) { m.reach.words_address = 8; }) == "RemoteAccess");
  CHECK(told(Say::Attached, [](Message& m) { m.reach.keys[0] ^= 0x1234; }) == "RemoteAccess");
  CHECK(told(Say::Attached, [](Message& m) { m.reach.words_keys[0] ^= 0x1234; }) == "RemoteAccess");
  CHECK(told(Say::Attached, [](Message& m) { m.reach.access = Access::Read; }) == "RemoteAccess");
  CHECK(told(Say::Attached, [](Message& m) { m.reach.signals = 0; }) == "Bounds");
  for (const Say say : {Say::Welcome, Say::Opened, Say::Attached}) {
    const auto at = static_cast<unsigned>(say);
    CAPTURE(at);
    CHECK(told(say, [](Message& m) { m.say = Say::Failed, m.error = ErrorKind::Bounds, m.text = "no"; }) == "Bounds");
    CHECK(told(say, [](Message& m) {
            m.say = Say::Failed, m.error = static_cast<ErrorKind>(200), m.text.assign(5000, 'x');
          }) == "Onesided");
    CHECK(told(say, [](Message& m) { m.say = Say::Ended; }, 0.2) == "DeadlineExceeded");
    for (unsigned i = 0; i < 10; ++i) {
      const auto noise = random_bytes(i * 30 + 4, i + 100 * at);
      liar.replace(say, framed({noise.data(), noise.size()}));
      CHECK(use() == "ConnectionLost");
      liar.replace(say, framed(sealed({noise.data(), noise.size()})));
      CHECK(use() == "ConnectionLost");
    }
    liar.replace(say, std::string(4, '\xFF'));
    CHECK(use() == "ConnectionLost");
  }
  liar.change(Say{}, nullptr);
  CHECK(use() == "");
  check_unhurt(rig);
}

// ---- Waiting in the middle --------------------------------------------------------------------------------------------

TEST_CASE("rdma: more reads and atomics than there are slots, from 80 threads") {
  Rig rig;
  fake::hold();
  std::vector<std::function<void()>> bodies;
  for (unsigned i = 0; i < 80; ++i) bodies.push_back([&] { rig.target->fetch_add(0, 1, patience()); });
  bodies.push_back([&] {
    // One is where the results of signals land.
    eventually("63 are under way", [] { return fake::pending() == 63; });
    char byte = 0;
    CHECK(contains(said([&] { rig.target->read(&byte, 1, 8, rig.how(false, 0.02)); }), "reads and atomics"));
    fake::release(1);
    fake::deliver_immediately();
  });
  side_by_side(bodies);
  CHECK(rig.target->fetch_add(0, 0, patience()) == 80);
}

}  // namespace
}  // namespace onesided::tests
#endif
