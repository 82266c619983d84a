// The shm transport with both sides in one process.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support.h"

namespace onesided::tests {
namespace {

constexpr std::uint64_t kTop = UINT64_MAX;

// Memory of `b` and how `a` reaches it. Private memory is gone through by the kernel, shared memory is mapped.
struct Reach : Pair {
  std::vector<char> own;
  std::shared_ptr<Memory> memory;
  std::shared_ptr<Target> target;

  explicit Reach(std::uint64_t nbytes, bool shared = true, Access access = Access::ReadWrite, std::uint32_t signals = 4,
                 std::uint32_t slots = 4) {
    if (shared) {
      memory = b->allocate(nbytes, access, signals, slots);
    } else {
      own.resize(nbytes + 64);
      memory = b->register_memory(own.data(), nbytes, access, signals, slots, nullptr);
    }
    target = to_b->attach(memory->remote(), patience());
  }
  char* bytes() const { return static_cast<char*>(memory->data()); }
  std::uint64_t count(std::uint32_t i) const { return memory->control().signal(i).load(); }
};

void put(Target& target, const void* source, std::uint64_t nbytes, std::uint64_t offset,
         std::optional<Signal> signal = {}) {
  CHECK(target.write(source, nbytes, offset, signal, How{}) == nullptr);
}

std::string describes(const Description& rows, const std::string& key) {
  for (const auto& [name, value] : rows) {
    if (name == key) return value;
  }
  return "";
}

TEST_CASE("shm: put, get, signal and bounds, in shared and in private memory") {
  constexpr std::uint64_t kBytes = (1 << 20) + 4099;
  const auto model = random_bytes(kBytes, 3);
  for (const bool shared : {true, false}) {
    CAPTURE(shared);
    Reach reach(kBytes, shared);
    Target& target = *reach.target;
    CHECK(target.nbytes() == kBytes);
    CHECK(contains(describes(target.describe(), "path"), shared ? "mapped" : "cross-memory"));

    // In pieces of many sizes, each with a signal of its own.
    std::uint64_t at = 0, step = 0;
    while (at < kBytes) {
      const std::uint64_t nbytes = std::min(kBytes - at, step * step * 7 + step % 3);
      put(target, model.data() + at, nbytes, at, Signal{1, 1});
      at += nbytes, ++step;
    }
    CHECK(reach.count(1) == step);
    CHECK(std::memcmp(reach.bytes(), model.data(), kBytes) == 0);
    std::vector<char> back(kBytes + 1, '#');
    CHECK(target.read(back.data(), kBytes, 0, How{}) == nullptr);
    CHECK(std::memcmp(back.data(), model.data(), kBytes) == 0);
    CHECK(back[kBytes] == '#');
    target.read(back.data(), 5, kBytes - 5, How{});
    CHECK(std::memcmp(back.data(), model.data() + kBytes - 5, 5) == 0);

    CHECK(target.signal(Signal{3, 40}, How{}) == nullptr);
    target.signal(Signal{3, kTop}, How{});  // minus one
    CHECK(reach.count(3) == 39);
    put(target, nullptr, 0, 0, Signal{0, 2});
    put(target, nullptr, 0, kBytes, Signal{0, 2});
    target.read(nullptr, 0, kBytes, How{});
    CHECK(reach.count(0) == 4);

    char byte = '!';
    const std::pair<std::uint64_t, std::uint64_t> outside[] = {
        {kBytes, 1}, {kBytes + 1, 0}, {0, kBytes + 1}, {kTop, 1}, {kTop, kTop}, {1, kTop}, {kTop - kBytes, kBytes + 9}};
    for (const auto& [offset, nbytes] : outside) {
      CHECK(raised([&, offset = offset, nbytes = nbytes] {
              target.write(&byte, nbytes, offset, Signal{0, 1}, How{});
            }) == "Bounds");
      CHECK(raised([&, offset = offset, nbytes = nbytes] { target.read(&byte, nbytes, offset, How{}); }) == "Bounds");
      How async;
      async.async = true;
      CHECK(raised([&, offset = offset, nbytes = nbytes] { target.write(&byte, nbytes, offset, {}, async); }) ==
            "Bounds");
    }
    CHECK(raised([&] { target.write(&byte, 1, 0, Signal{4, 1}, How{}); }) == "Bounds");
    CHECK(raised([&] { target.signal(Signal{4, 1}, How{}); }) == "Bounds");
    CHECK(reach.count(0) == 4);
    CHECK(byte == '!');
    CHECK(std::memcmp(reach.bytes(), model.data(), kBytes) == 0);
    How late;
    late.deadline = Deadline::after(0);
    CHECK(raised([&] { target.write(&byte, 1, 0, Signal{0, 1}, late); }) == "DeadlineExceeded");
    CHECK(reach.bytes()[0] == model[0]);
    target.flush(patience());
    CHECK_FALSE(target.unflushed());
  }
}

TEST_CASE("shm: asynchronous operations keep their order, and a flush waits for them") {
  for (const bool shared : {true, false}) {
    Reach reach(4 << 20, shared);
    How how;
    how.async = true;
    std::vector<std::vector<char>> sources;
    std::vector<std::shared_ptr<Work>> works;
    for (unsigned i = 0; i < 40; ++i) sources.emplace_back(i % 5 == 0 ? 4 << 20 : 100, static_cast<char>(i));
    for (const auto& source : sources)
      works.push_back(reach.target->write(source.data(), source.size(), 0, Signal{0, 1}, how));
    std::vector<char> back(4 << 20);
    const auto got = reach.target->read(back.data(), back.size(), 0, how);
    reach.target->flush(patience());
    CHECK_FALSE(reach.target->busy());
    CHECK(reach.count(0) == 40);
    CHECK(got->done());
    for (const auto& work : works) CHECK((work->done() && !work->error()));
    CHECK(all_are(reach.bytes(), 100, 39));
    CHECK(all_are(reach.bytes() + 100, (4 << 20) - 100, 35));
    CHECK(std::memcmp(back.data(), reach.bytes(), back.size()) == 0);
  }
}

TEST_CASE("shm: a signal is not sent when an operation before it failed and nobody was told") {
  // Private memory, part of which is taken away: a put there fails in the kernel.
  constexpr std::size_t kBytes = 8 * 4096;
  char* const bytes =
      static_cast<char*>(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  Pair pair;
  const auto memory = pair.b->register_memory(bytes, kBytes, Access::ReadWrite, 1, 4, nullptr);
  const auto target = pair.to_b->attach(memory->remote(), patience());
  ::munmap(bytes + 4096, 4096);
  const auto count = [&] { return memory->control().signal(0).load(); };
  const std::vector<char> source(4096, 's');
  How how;
  how.async = true;
  const auto bad = [&] { return target->write(source.data(), source.size(), 4096, std::nullopt, how); };

  CHECK(raised([&] { target->write(source.data(), source.size(), 4096, Signal{0, 1}, How{}); }) == "RemoteAccess");
  CHECK(count() == 0);
  bad();
  CHECK(raised([&] { target->signal(Signal{0, 1}, How{}); }) == "RemoteAccess");  // tells of the put
  CHECK(count() == 0);
  target->signal(Signal{0, 1}, How{});
  CHECK(count() == 1);

  const auto failing = bad();
  const auto behind = target->write(source.data(), source.size(), 0, Signal{0, 10}, how);
  const auto alone = target->signal(Signal{0, 10}, how);
  CHECK(raised([&] { failing->wait(patience()); }) == "RemoteAccess");
  CHECK(raised([&] { behind->wait(patience()); }) == "ConnectionLost");
  CHECK(raised([&] { alone->wait(patience()); }) == "ConnectionLost");
  CHECK(count() == 1);
  const auto after = target->write(source.data(), source.size(), 0, Signal{0, 100}, how);  // everybody was told
  after->wait(patience());
  CHECK(count() == 101);
  CHECK(raised([&] { target->flush(patience()); }) == "");
  pair.a->close(patience());
  pair.b->close(patience());
  ::munmap(bytes, kBytes);
}

TEST_CASE("shm: a deadline is a fence, in shared and in private memory") {
  constexpr std::uint64_t kBytes = 96 << 20;
  for (const bool shared : {true, false}) {
    Reach reach(kBytes, shared);
    std::vector<char> source(kBytes);
    for (unsigned round = 0; round < 6; ++round) {
      std::memset(source.data(), 'o', kBytes);
      How how;
      how.async = round % 2 == 0;
      if (!how.async) how.deadline = Deadline::after(0.002 * round);
      const std::string outcome = raised([&] {
        if (const auto work = reach.target->write(source.data(), kBytes, 0, Signal{0, 1}, how))
          work->wait(Deadline::after(0.002 * round));
      });
      std::memset(source.data(), 'n', kBytes);
      const std::uint64_t before = reach.count(0);
      raised([&] { reach.target->flush(patience()); });
      CHECK((outcome == "" || outcome == "DeadlineExceeded"));
      CHECK(reach.count(0) == before);
      CHECK(std::memchr(reach.bytes(), 'n', kBytes) == nullptr);
      std::memset(reach.bytes(), '-', kBytes);
    }
  }
}

TEST_CASE("shm: the deadline of an asynchronous operation is its own, and its source is let go before it is over") {
  constexpr std::uint64_t kBytes = 16 << 20;
  for (const bool shared : {true, false}) {
    Reach reach(kBytes, shared);
    How how;
    how.async = true;
    how.keep = std::make_shared<std::vector<char>>(kBytes);
    const std::weak_ptr<void> alive = how.keep;
    const auto put_by = [&](const Deadline& deadline) {
      how.deadline = deadline;
      return reach.target->write(static_cast<std::vector<char>*>(how.keep.get())->data(), kBytes, 0, Signal{0, 1}, how);
    };
    const auto in_time = put_by(patience());
    const auto late = put_by(Deadline::after(0));
    CHECK(raised([&] { late->wait(patience()); }) == "DeadlineExceeded");
    CHECK(contains(said([&] { late->wait(patience()); }), "the deadline passed"));
    CHECK(raised([&] { in_time->wait(patience()); }) == "");
    CHECK(reach.count(0) == 1);
    const auto last = put_by(patience());
    how.keep = nullptr;
    last->wait(patience());
    CHECK(alive.expired());
  }
}

TEST_CASE("shm: atomics are exact over threads, targets and the owner's own") {
  Reach reach(4096);
  const auto second = reach.to_b->attach(reach.memory->remote(), patience());
  const auto own = reach.b->loop_back(reach.memory, "b itself");
  const std::vector<Target*> targets{reach.target.get(), second.get(), own.get(), reach.target.get()};
  const unsigned n = rounds(4000);
  std::vector<std::vector<std::uint64_t>> seen(targets.size());
  side_by_side(static_cast<unsigned>(targets.size()), [&](unsigned i) {
    for (unsigned k = 0; k < n; ++k) seen[i].push_back(targets[i]->fetch_add(4088, 1));
  });
  std::vector<std::uint64_t> all;
  for (const auto& part : seen) all.insert(all.end(), part.begin(), part.end());
  std::sort(all.begin(), all.end());
  CHECK(all.size() == 4 * n);
  CHECK(std::adjacent_find(all.begin(), all.end()) == all.end());
  CHECK(all.back() == 4 * n - 1);

  // A lock of compare_swap excludes.
  std::uint64_t guarded = 0;
  side_by_side(static_cast<unsigned>(targets.size()), [&](unsigned i) {
    for (unsigned k = 0; k < n / 8; ++k) {
      while (targets[i]->compare_swap(0, 0, i + 1) != 0) std::this_thread::yield();
      std::atomic_ref(guarded).store(std::atomic_ref(guarded).load() + 1);
      if (targets[i]->compare_swap(0, i + 1, 0) != i + 1) throw std::runtime_error("somebody else unlocked");
    }
  });
  CHECK(guarded == std::uint64_t{4} * (n / 8));
  CHECK(reach.target->compare_swap(8, 1, 5) == 0);  // not what was expected: unchanged
  CHECK(reach.target->fetch_add(8, kTop) == 0);
  CHECK(reach.target->fetch_add(8, 3) == kTop);
  CHECK(reach.target->fetch_add(8, 0) == 2);

  for (const std::uint64_t offset : {1u, 4u, 7u}) {
    CHECK(raised([&] { reach.target->fetch_add(offset, 1); }) == "Bounds");
    CHECK(raised([&] { reach.target->compare_swap(offset, 0, 1); }) == "Bounds");
  }
  for (const std::uint64_t offset : {std::uint64_t{4089}, std::uint64_t{4096}, kTop - 7, kTop}) {
    CHECK(raised([&] { reach.target->fetch_add(offset, 1); }) == "Bounds");
  }
  Reach hidden(4096, false);
  CHECK(raised([&] { hidden.target->fetch_add(0, 1); }) == "Unsupported");
  CHECK(raised([&] { hidden.target->compare_swap(0, 0, 1); }) == "Unsupported");
  const auto own_hidden = hidden.b->loop_back(hidden.memory, "b itself");
  CHECK(raised([&] { own_hidden->fetch_add(0, 1); }) == "Unsupported");
  CHECK(contains(describes(own_hidden->describe(), "path"), "own memory"));
}

TEST_CASE("shm: access is kept to") {
  for (const bool shared : {true, false}) {
    for (const Access access : {Access::Read, Access::Write, Access::ReadWrite}) {
      CAPTURE(onesided::name_of(access));
      Reach reach(4096, shared, access);
      char bytes[8] = {};
      const bool may_read = permits(access, Access::Read), may_write = permits(access, Access::Write);
      CHECK(raised([&] { reach.target->read(bytes, 8, 0, How{}); }) == (may_read ? "" : "RemoteAccess"));
      CHECK(raised([&] { reach.target->write("12345678", 8, 0, {}, How{}); }) == (may_write ? "" : "RemoteAccess"));
      CHECK(std::string(reach.bytes(), 8) == (may_write ? "12345678" : std::string(8, '\0')));
      CHECK(raised([&] { reach.target->signal(Signal{0, 1}, How{}); }) == "");
      const std::string atomic = raised([&] { reach.target->fetch_add(8, 1); });
      CHECK(atomic == (access != Access::ReadWrite ? "RemoteAccess" : shared ? "" : "Unsupported"));
      // A handle that claims more than the memory permits gains nothing.
      RemoteMemory forged = reach.memory->remote();
      forged.access = Access::ReadWrite;
      const auto more = reach.to_b->attach(forged, patience());
      CHECK(raised([&] { more->write("12345678", 8, 0, {}, How{}); }) == (may_write ? "" : "RemoteAccess"));
      // One that claims less is held to that.
      forged.access = Access::Read;
      const auto less = reach.to_b->attach(forged, patience());
      CHECK(raised([&] { less->write("12345678", 8, 0, {}, How{}); }) == "RemoteAccess");
    }
  }
}

TEST_CASE("shm: what may only be read is mapped so, and its descriptor cannot write") {
  const auto segment = Segment::create(4096, "onesided-test");
  segment->base()[0] = 'x';
  Fd reading = segment->read_only_fd();
  CHECK(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, reading.get(), 0) == MAP_FAILED);
  CHECK(::write(reading.get(), "y", 1) < 0);
  CHECK(::ftruncate(reading.get(), 0) != 0);
  const auto mapped = Segment::map(std::move(reading), 4096, false);
  CHECK(mapped->base()[0] == 'x');
  CHECK(raised([&] { Segment::map(segment->read_only_fd(), 4096, true); }) == "Registration");
  // The control block's first page belongs to its owner, even for who may write.
  const auto control = Segment::map(Fd(::dup(segment->fd())), 4096, true);
  control->protect_front(4096);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they report a signal themselves
  for (char* const at : {mapped->base(), control->base()}) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::signal(SIGSEGV, SIG_DFL);
      *const_cast<volatile char*>(at) = 'z';
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == SIGSEGV);
  }
#endif
  CHECK(segment->base()[0] == 'x');
}

TEST_CASE("shm: only a sealed memfd that is long enough is mapped") {
  const auto offer = [](Fd fd, std::uint64_t nbytes) {
    return raised([&] { Segment::map(std::move(fd), nbytes, true); });
  };
  const auto memfd = [](int seals) {
    Fd fd(::memfd_create("onesided-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    REQUIRE(::ftruncate(fd.get(), 8192) == 0);
    if (seals != 0) REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
    return fd;
  };
  CHECK(offer(memfd(F_SEAL_SHRINK), 8192) == "");
  CHECK(offer(memfd(F_SEAL_SHRINK), 8193) == "Handle");
  CHECK(offer(memfd(F_SEAL_SHRINK), kTop) == "Handle");
  CHECK(offer(memfd(0), 8192) == "Handle");
  CHECK(offer(memfd(F_SEAL_GROW), 8192) == "Handle");
  CHECK(offer(Fd(::dup(2)), 1) == "Handle");
  CHECK(offer(Fd(), 1) == "Handle");
  const auto made = Segment::create(5000, "onesided-test");
  CHECK(::ftruncate(made->fd(), 4096) != 0);
  CHECK(::ftruncate(made->fd(), 1 << 20) != 0);
  CHECK(raised([] { Segment::create(kTop, "onesided-test"); }) == "Registration");
  CHECK(raised([] { Segment::create(std::uint64_t{1} << 60, "onesided-test"); }) == "Registration");
}

TEST_CASE("shm: connections in any order, twice, to oneself; endpoints that are used, unknown or wrong") {
  const auto a = std::make_shared<shm::ShmTransport>(), b = std::make_shared<shm::ShmTransport>();
  const Endpoint once = b->bind(false), shared = b->bind(true);
  const auto connect = [&](const Endpoint& endpoint) { return a->connect(endpoint, "b", patience()); };

  CHECK(b->bind(true).to_bytes() == shared.to_bytes());
  const auto first = connect(once);
  CHECK(raised([&] { connect(once); }) == "StaleHandle");
  CHECK(contains(said([&] { connect(once); }), "used"));
  std::vector<std::shared_ptr<Connection>> many{first};
  for (unsigned i = 0; i < 10; ++i) many.push_back(connect(shared));
  many.push_back(a->connect(a->bind(false), "a itself", patience()));

  const auto altered = [&](const std::function<void(Endpoint&)>& change) {
    Endpoint endpoint = b->bind(false);
    change(endpoint);
    return raised([&] { connect(endpoint); });
  };
  CHECK(altered([](Endpoint& endpoint) { endpoint.secret[3] ^= 1; }) == "Handle");
  CHECK(altered([](Endpoint& endpoint) { endpoint.endpoint_id += 1000; }) == "StaleHandle");
  CHECK(altered([](Endpoint& endpoint) { endpoint.kind = TransportKind::Rdma; }) == "Handle");
  CHECK(altered([](Endpoint& endpoint) { endpoint.host[0] ^= 1; }) == "Unsupported");
  CHECK(altered([](Endpoint& endpoint) { endpoint.address += "-not"; }) == "ConnectionLost");
  CHECK(altered([](Endpoint& endpoint) { endpoint.address.clear(); }) == "Handle");
  CHECK(altered([](Endpoint& endpoint) { endpoint.address.assign(200, 'x'); }) == "Handle");
  // Guessing the secret does not use an endpoint up.
  const Endpoint guessed = b->bind(false);
  Endpoint wrong = guessed;
  wrong.secret = random_token();
  CHECK(raised([&] { connect(wrong); }) == "Handle");
  CHECK(raised([&] { connect(guessed); }) == "");

  const auto memory = b->allocate(64, Access::ReadWrite, 1, 64);
  for (const auto& connection : many) {
    const bool to_itself = connection == many.back();
    const auto handle = (to_itself ? a->allocate(64, Access::ReadWrite, 1, 4) : memory)->remote();
    CHECK(raised([&] { connection->attach(handle, patience())->write("x", 1, 0, Signal{0, 1}, How{}); }) ==
          (to_itself ? "StaleHandle" : ""));  // nobody kept the memory of `a`
  }
  CHECK(memory->control().signal(0) == 11);
  CHECK(raised([&] { first->attach(a->allocate(64, Access::ReadWrite, 1, 4)->remote(), patience()); }) == "Handle");
  CHECK(raised([&] { a->loop_back(memory, "b's"); }) == "Handle");
  a->close(patience());
  b->close(patience());
  CHECK(raised([&] { connect(shared); }) == "StaleHandle");
  CHECK(raised([&] { shm::ShmTransport().connect(shared, "b", patience()); }) == "ConnectionLost");
}

TEST_CASE("shm: handles of views, of memory over a slice, and handles that say too much") {
  Reach reach(8192);
  const auto slice = reach.b->register_memory(reach.bytes() + 1000, 3000, Access::ReadWrite, 1, 8, nullptr);
  CHECK(contains(describes(slice->describe(), "memory"), "shared"));
  const auto whole = reach.to_b->attach(slice->remote(), patience());
  put(*whole, "slice", 5, 10);
  CHECK(std::string(reach.bytes() + 1010, 5) == "slice");
  CHECK(raised([&] { whole->write("x", 1, 3000, {}, How{}); }) == "Bounds");
  CHECK(whole->fetch_add(0, 7) == 0);

  RemoteMemory view = slice->remote();
  view.offset = 100, view.nbytes = 50;
  const auto part = reach.to_b->attach(view, patience());
  put(*part, "view", 4, 0);
  CHECK(std::string(reach.bytes() + 1100, 4) == "view");
  CHECK(raised([&] { part->write("12", 2, 49, {}, How{}); }) == "Bounds");
  CHECK(raised([&] { part->fetch_add(0, 1); }) == "Bounds");  // 1100 is no multiple of 8
  put(*part, "!", 1, 49);
  CHECK(std::string(reach.bytes() + 1149, 2) == std::string("!\0", 2));

  // The bytes before and after in the segment are not the memory's.
  const auto out_of = [&](std::uint64_t offset, std::uint64_t nbytes) {
    view.offset = offset, view.nbytes = nbytes;
    return raised([&] { reach.to_b->attach(view, patience()); });
  };
  CHECK(out_of(0, 3001) == "Handle");
  CHECK(out_of(3000, 1) == "Handle");
  CHECK(out_of(3001, 0) == "Handle");
  CHECK(out_of(kTop - 10, 5) == "Handle");
  CHECK(out_of(3000, 0) == "");
  view = slice->remote();
  view.key[0] ^= 1;
  CHECK(raised([&] { reach.to_b->attach(view, patience()); }) == "Handle");
  view = slice->remote();
  view.memory_id += 100;
  CHECK(raised([&] { reach.to_b->attach(view, patience()); }) == "StaleHandle");

  // A private memory's views, too; and memory of no bytes, which can still be signalled.
  Reach hidden(4096, false);
  view = hidden.memory->remote();
  view.offset = 4000, view.nbytes = 96;
  put(*hidden.to_b->attach(view, patience()), "end", 3, 93);
  CHECK(std::string(hidden.bytes() + 4093, 3) == "end");
  CHECK(hidden.bytes()[4096] == 0);
  for (const bool shared : {true, false}) {
    Reach empty(0, shared);
    put(*empty.target, nullptr, 0, 0, Signal{0, 3});
    CHECK(empty.count(0) == 3);
    CHECK(raised([&] { empty.target->write("x", 1, 0, {}, How{}); }) == "Bounds");
  }
  const auto nothing = reach.b->register_memory(nullptr, 0, Access::ReadWrite, 1, 8, nullptr);
  put(*reach.to_b->attach(nothing->remote(), patience()), nullptr, 0, 0, Signal{0, 1});
  CHECK(nothing->control().signal(0) == 1);
}

TEST_CASE("shm: the second target for a handle is the first; what is closed does not stay mapped") {
  Reach reach(4096);
  const auto hits = counters_for("shm", "b")->get(Count::CacheHits);
  const auto first = reach.to_b->target(reach.memory->remote(), patience());
  for (unsigned i = 0; i < 10; ++i) CHECK(reach.to_b->target(reach.memory->remote(), patience()) == first);
  CHECK(counters_for("shm", "b")->get(Count::CacheHits) == hits + 10);

  std::size_t mapped = 0, fds = 0;
  for (unsigned i = 0; i < 40; ++i) {
    const auto memory = reach.b->allocate(4096, Access::ReadWrite, 1, 2);
    put(*reach.to_b->target(memory->remote(), patience()), "x", 1, 0);
    memory->close(patience());
    if (i == 5) mapped = mappings(), fds = open_fds();
  }
  CHECK(mappings() <= mapped + 2);
  CHECK(open_fds() <= fds + 2);
}

TEST_CASE("shm: slots are used up, given back, and enough for many in turn") {
  Reach reach(4096, true, Access::ReadWrite, 1, 2);  // the target of Reach has one
  const auto attach = [&] { return reach.to_b->attach(reach.memory->remote(), patience()); };
  auto second = attach();
  CHECK(raised([&] { attach(); }) == "Unsupported");
  CHECK(contains(said([&] { attach(); }), "all 2 places"));
  CHECK(raised([&] { reach.b->loop_back(reach.memory, "b"); }) == "Unsupported");
  second = nullptr;  // closed with its last user; the message is on its way before the next question is
  second = attach();
  put(*second, "x", 1, 0);
  second->close(patience());
  CHECK(raised([&] { second->write("y", 1, 0, {}, How{}); }) == "StaleHandle");
  second = nullptr;
  {
    const auto own = [&] {
      std::shared_ptr<Target> target;
      eventually("the slot is free",
                 [&] { return raised([&] { target = reach.b->loop_back(reach.memory, "b"); }).empty(); });
      return target;
    }();
    put(*own, "own", 3, 0);
    CHECK(raised([&] { attach(); }) == "Unsupported");
  }
  for (unsigned i = 0; i < rounds(200); ++i) put(*attach(), "z", 1, i);
  // A handle that is refused after the slot was taken gives it back as well.
  RemoteMemory wrong = reach.memory->remote();
  wrong.nbytes = 5000;
  for (unsigned i = 0; i < 5; ++i) CHECK(raised([&] { reach.to_b->attach(wrong, patience()); }) == "Handle");
  // With a connection all of its slots go.
  second = attach();
  reach.to_b->close(patience());
  CHECK(raised([&] { second->write("y", 1, 0, {}, How{}); }) == "StaleHandle");
  CHECK(raised([&] { attach(); }) == "StaleHandle");
  second = nullptr, reach.target = nullptr, reach.to_b = nullptr;
  const auto again = reach.a->connect(reach.b->bind(false), "b", patience());
  std::vector<std::shared_ptr<Target>> both;
  eventually("both slots are free again", [&] {
    raised([&] { both.push_back(again->attach(reach.memory->remote(), patience())); });
    return both.size() == 2;
  });
  CHECK(raised([&] { reach.b->allocate(1, Access::Read, Control::kMostSignals + 1, 1); }) == "Bounds");
  CHECK(raised([&] { reach.b->allocate(1, Access::Read, 1, Control::kMostSlots + 1); }) == "Bounds");
  CHECK(raised([&] { reach.b->loop_back(reach.b->allocate(1, Access::Read, 1, 0), "b"); }) == "Unsupported");
}

TEST_CASE("shm: nothing is left of what was attached, registered or connected") {
  std::size_t fds = 0, mapped = 0;
  for (unsigned i = 0; i < rounds(60); ++i) {
    if (i == 3) fds = open_fds(), mapped = mappings();
    Reach reach(4096, i % 2 == 0);
    put(*reach.target, "x", 1, 0, Signal{0, 1});
    for (unsigned k = 0; k < 5; ++k) put(*reach.to_b->attach(reach.memory->remote(), patience()), "x", 1, 0);
    switch (i % 4) {  // in every order, and by destructors alone
      case 0: reach.memory->close(patience()); break;
      case 1: reach.target = nullptr, reach.to_b->close(patience()); break;
      case 2: reach.b->close(patience()); break;
      case 3: reach.a->close(patience()), reach.b->close(patience()); break;
    }
  }
  CHECK(open_fds() <= fds);
  CHECK(mappings() <= mapped);
  CHECK_FALSE(std::ifstream("/dev/shm/onesided-memory").good());
}

TEST_CASE("shm: closing in any order, twice, and destructors without a close") {
  {
    const auto transport = std::make_shared<shm::ShmTransport>();
    const auto memory = transport->allocate(4096, Access::ReadWrite, 1, 4);
    const auto own = transport->loop_back(memory, "itself");
    const Endpoint endpoint = transport->bind(true);
    const auto connection = transport->connect(endpoint, "itself", patience());
    const auto target = connection->target(memory->remote(), patience());
    transport->close(patience());
    transport->close(patience());
    CHECK(transport->closed());
    CHECK(memory->closed());
    connection->close(patience());
    memory->close(Deadline::after(0));
    memory->close(Deadline::after(0));
    own->close(patience());
    own->close(patience());
    CHECK(raised([&] { own->write("x", 1, 0, {}, How{}); }) == "StaleHandle");
    CHECK(raised([&] { target->write("x", 1, 0, {}, How{}); }) == "StaleHandle");
    CHECK(raised([&] { target->flush(patience()); }) == "StaleHandle");
    CHECK(raised([&] { connection->target(memory->remote(), patience()); }) == "StaleHandle");
    CHECK(raised([&] { transport->allocate(1, Access::Read, 0, 0); }) == "StaleHandle");
    CHECK(raised([&] { transport->register_memory(nullptr, 0, Access::Read, 0, 0, nullptr); }) == "StaleHandle");
    CHECK(raised([&] { transport->bind(false); }) == "StaleHandle");
    CHECK(raised([&] { transport->connect(endpoint, "itself", patience()); }) == "StaleHandle");
    CHECK(raised([&] { transport->loop_back(memory, "itself"); }) == "StaleHandle");
  }
  for (unsigned order = 0; order < 6; ++order) {
    Pair pair;
    auto memory = pair.b->allocate(4096, Access::ReadWrite, 1, 4);
    auto target = pair.to_b->attach(memory->remote(), patience());
    How how;
    how.async = true;
    std::vector<char> source(4096, 'x');
    auto work = target->write(source.data(), source.size(), 0, std::nullopt, how);
    // Each is let go first in one of the rounds.
    const std::vector<std::function<void()>> steps{
        [&] { target = nullptr; },          [&] { pair.to_b = nullptr; },       [&] { memory = nullptr; },
        [&] { pair.a->close(patience()); }, [&] { pair.b->close(patience()); }, [&] { work = nullptr; }};
    for (unsigned i = 0; i < steps.size(); ++i) steps[(order + i) % steps.size()]();
  }
}

TEST_CASE("shm: a peer that closes is lost to operations and waiters") {
  Reach reach(4096);
  const auto mine = reach.a->allocate(64, Access::ReadWrite, 1, 4);
  const auto wait = [&] {
    return raised([&] {
      wait_signal(*mine, reach.target->counters(), 0, 1, patience(), kSpin, "a peer", [&] {
        if (reach.target->peer().lost()) reach.target->peer().fail_lost("wait_signal");
      });
    });
  };
  std::string outcome;
  std::jthread waiter([&] { outcome = wait(); });
  reach.b->close(patience());
  waiter.join();
  CHECK(outcome == "ConnectionLost");
  CHECK(reach.target->peer().lost());
  CHECK(raised([&] { reach.to_b->attach(reach.memory->remote(), patience()); }) == "ConnectionLost");
  // The memory was closed before the transport: either may be what is seen.
  CHECK(raised([&] { reach.target->write("x", 1, 0, {}, How{}); }) != "");
  CHECK(raised([&] { reach.target->flush(patience()); }) == "ConnectionLost");
  CHECK(describes(reach.target->describe(), "state").rfind("lost", 0) == 0);
  CHECK(wait() == "ConnectionLost");
}

TEST_CASE("shm: what a peer signalled before it was lost counts") {
  Reach reach(64);
  for (const std::uint64_t add : {0, 1}) {
    const auto lost = [&] {
      reach.target->signal(Signal{0, add}, How{});
      fail(ErrorKind::ConnectionLost, "lost");
    };
    std::uint64_t value = 0;
    const auto wait = [&] {
      value = wait_signal(*reach.memory, reach.target->counters(), 0, 1, patience(), kSpin, "a peer", lost);
    };
    CHECK(raised(wait) == (add == 0 ? "ConnectionLost" : ""));
    CHECK(value == add);
  }
}

TEST_CASE("shm: a connection that is interrupted while it closes is closed all the same") {
  struct Pressed {};
  constexpr std::uint64_t kBytes = 16 << 20;
  Reach reach(kBytes);
  const std::vector<char> source(kBytes, 's');
  How how;
  how.async = true;
  for (unsigned i = 0; i < 200; ++i) reach.target->write(source.data(), kBytes, 0, {}, how);
  {
    InterruptScope scope([] { throw Pressed{}; });
    CHECK_THROWS_AS(reach.to_b->close(Deadline::never()), Pressed);
  }
  CHECK(reach.to_b->peer().lost());
  CHECK_FALSE(reach.target->busy());
  CHECK(raised([&] { reach.target->write("x", 1, 0, {}, How{}); }) == "StaleHandle");
  CHECK(raised([&] { reach.to_b->attach(reach.memory->remote(), patience()); }) == "StaleHandle");
  CHECK(describes(reach.a->describe(), "connections") == "0");
}

TEST_CASE("shm: closing the connection here ends a wait for that peer, too") {
  Reach reach(4096);
  const auto mine = reach.a->allocate(64, Access::ReadWrite, 1, 4);
  std::string outcome;
  std::atomic<bool> waiting{false};
  std::jthread waiter([&] {
    outcome = raised([&] {
      wait_signal(*mine, reach.target->counters(), 0, 1, patience(), std::chrono::nanoseconds(0), "a peer", [&] {
        waiting = true;
        if (reach.target->peer().lost()) reach.target->peer().fail_lost("wait_signal");
      });
    });
  });
  eventually("the wait begins", [&] { return waiting.load(); });
  const auto sleeps = reach.target->counters().get(Count::Sleeps);
  reach.to_b->close(patience());
  waiter.join();
  CHECK(outcome == "ConnectionLost");
  CHECK(reach.target->counters().get(Count::Sleeps) <= sleeps + 1);
}

TEST_CASE("shm: close waits for what is under way, and after it no byte changes") {
  for (unsigned round = 0; round < rounds(40); ++round) {
    constexpr std::uint64_t kBytes = 6 << 20;
    Reach reach(kBytes, round % 4 != 3);
    const auto second = reach.to_b->attach(reach.memory->remote(), patience());
    const auto own = reach.b->loop_back(reach.memory, "b");
    std::atomic<unsigned> began{0};
    std::vector<std::string> outcomes(4);
    std::jthread putting([&] {
      side_by_side(4, [&](unsigned i) {
        Target& target = i == 3 ? *own : i == 2 ? *second : *reach.target;
        const std::vector<char> source(i % 2 == 0 ? kBytes / 4 : 64, static_cast<char>('a' + i));
        ++began;
        outcomes[i] = raised([&] {
          for (;;) target.write(source.data(), source.size(), i * kBytes / 4, Signal{0, 1}, How{});
        });
      });
    });
    eventually("all are putting", [&] { return began == 4 && reach.count(0) > round; });
    // In every other round a target is closed first, in the middle of its operations.
    if (round % 2 == 0) second->close(patience());
    reach.memory->close(patience());
    const std::vector<char> then(reach.bytes(), reach.bytes() + kBytes);
    const std::uint64_t count = reach.count(0);
    putting.join();
    CHECK(std::memcmp(then.data(), reach.bytes(), kBytes) == 0);
    CHECK(reach.count(0) == count);
    for (const auto& outcome : outcomes) CHECK(outcome == "StaleHandle");
    CHECK(raised([&] { reach.to_b->attach(reach.memory->remote(), patience()); }) == "StaleHandle");
  }
}

TEST_CASE("shm: attaching, closing and letting go race without harm") {
  Pair pair;
  const auto steady = pair.b->allocate(64, Access::ReadWrite, 1, 4);
  const auto steady_target = pair.to_b->attach(steady->remote(), patience());
  std::mutex mutex;
  RemoteMemory newest = steady->remote();
  std::atomic<bool> stop{false};
  std::vector<std::string> odd;
  std::jthread owner([&] {
    for (unsigned i = 0; i < rounds(400); ++i) {
      const auto memory = pair.b->allocate(4096, Access::ReadWrite, 1, 4);
      {
        std::lock_guard lock(mutex);
        newest = memory->remote();
      }
      if (i % 3 == 0) std::this_thread::yield();
      if (i % 2 == 0) memory->close(patience());
    }
    stop = true;
  });
  side_by_side(2, [&](unsigned) {
    while (!stop) {
      RemoteMemory remote;
      {
        std::lock_guard lock(mutex);
        remote = newest;
      }
      const std::string outcome = raised([&] { pair.to_b->attach(remote, patience())->write("x", 1, 0, {}, How{}); });
      if (outcome == "" || outcome == "StaleHandle") continue;
      std::lock_guard lock(mutex);
      odd.push_back(outcome);
    }
  });
  owner.join();
  CHECK(odd.empty());
  CHECK_FALSE(pair.to_b->peer().lost());
  CHECK(raised([&] { steady_target->write("x", 1, 0, Signal{0, 1}, How{}); }) == "");
  CHECK(steady->control().signal(0) == 1);
}

TEST_CASE("shm: a transport that is closed while others use it ends them with a clear error") {
  for (unsigned round = 0; round < rounds(20); ++round) {
    const auto a = std::make_shared<shm::ShmTransport>(), b = std::make_shared<shm::ShmTransport>();
    const Endpoint endpoint = b->bind(true);
    const auto memory = b->allocate(4096, Access::ReadWrite, 1, 64);
    const RemoteMemory remote = memory->remote();
    std::atomic<unsigned> turns{0};
    std::vector<std::string> outcomes(3);
    std::jthread users([&] {
      side_by_side(3, [&](unsigned i) {
        outcomes[i] = raised([&] {
          for (;; ++turns) {
            if (i == 0) a->allocate(64, Access::Read, 1, 1);
            if (i == 1) a->connect(endpoint, "b", patience())->attach(remote, patience())->write("x", 1, 0, {}, How{});
            if (i == 2) a->loop_back(a->allocate(64, Access::ReadWrite, 1, 1), "a")->write("x", 1, 0, {}, How{});
          }
        });
      });
    });
    eventually("they are at it", [&] { return turns > 5; });
    a->close(patience());
    users.join();
    for (const auto& outcome : outcomes) CHECK((outcome == "StaleHandle" || outcome == "ConnectionLost"));
    b->close(patience());
  }
}

TEST_CASE("shm: what a registered memory keeps is let go when it is closed, once") {
  Pair pair;
  for (unsigned round = 0; round < 20; ++round) {
    auto bytes = std::make_shared<std::vector<char>>(4096);
    const std::weak_ptr<void> alive = bytes;
    auto memory = pair.b->register_memory(bytes->data(), bytes->size(), Access::ReadWrite, 1, 4, bytes);
    bytes = nullptr;
    CHECK_FALSE(alive.expired());
    if (round % 2 == 0) {
      side_by_side(3, [&](unsigned) { memory->close(patience()); });
    } else {
      memory = nullptr;
    }
    CHECK(alive.expired());
  }
}

}  // namespace
}  // namespace onesided::tests
