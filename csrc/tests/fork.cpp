// A fork after use: the child gets a clear error at once and can end in good order, and the parent is unharmed.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/copy.h"
#include "core/window.h"
#include "tests/support.h"

namespace onesided::tests {
namespace {

// Runs `body` in a forked child; what it returns, and whether it hung, is in the result.
std::string in_child(const std::function<std::string()>& body) {
  int pipe[2];
  REQUIRE(::pipe(pipe) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(15);
    std::string said;
    try {
      said = body();
    } catch (const std::exception& error) {
      said = text("unexpected: ", error.what());
    }
    const bool told = ::write(pipe[1], said.data(), said.size()) == static_cast<ssize_t>(said.size());
    ::_exit(told ? 0 : 1);
  }
  ::close(pipe[1]);
  std::string answer;
  char bytes[4096];
  for (ssize_t got; (got = ::read(pipe[0], bytes, sizeof bytes)) > 0;)
    answer.append(bytes, static_cast<std::size_t>(got));
  ::close(pipe[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) return WTERMSIG(status) == SIGALRM ? "it hung" : text("signal ", WTERMSIG(status));
  return answer + (status == 0 ? "" : text(" status ", status));
}

struct Everything {
  std::shared_ptr<shm::ShmTransport> a = std::make_shared<shm::ShmTransport>(),
                                     b = std::make_shared<shm::ShmTransport>();
  std::shared_ptr<Connection> to_b = a->connect(b->bind(false), "b", patience());
  std::shared_ptr<Memory> mine = a->allocate(4096, Access::ReadWrite, 2, 8),
                          memory = b->allocate(4096, Access::ReadWrite, 2, 8);
  std::shared_ptr<Target> target = to_b->attach(memory->remote(), patience());
  std::shared_ptr<Target> cached = to_b->target(memory->remote(), patience());
  std::shared_ptr<Target> own = a->loop_back(mine, "a");
  std::unique_ptr<Window> window =
      std::make_unique<Window>("forked", mine, std::vector<std::shared_ptr<Target>>{own, target}, 0);

  void let_go() {
    window = nullptr;
    own = nullptr, cached = nullptr, target = nullptr;
    mine = nullptr, memory = nullptr;
    to_b = nullptr;
    a = nullptr, b = nullptr;
  }
};

TEST_CASE("fork: every use in the child is a clear error at once, and the parent goes on") {
  Everything all;
  How async;
  async.async = true;
  std::atomic<bool> open{false};
  const auto strand = std::make_shared<Strand>();
  const auto pending = strand->submit(
      [&](Checkpoint& between) {
        while (!open) {
          between.pass();
          std::this_thread::yield();
        }
      },
      patience());
  const std::string odd = in_child([&] {
    std::string odd;
    char byte = 0;
    const Endpoint nowhere{TransportKind::Shm, false, {}, shm::host_token(), 1, {}, 1, "onesided-nowhere"};
    const std::pair<const char*, std::function<void()>> uses[] = {
        {"allocate", [&] { all.a->allocate(1, Access::Read, 1, 1); }},
        {"register_memory", [&] { all.a->register_memory(&byte, 1, Access::Read, 1, 1, nullptr); }},
        {"bind", [&] { all.a->bind(true); }},
        {"connect", [&] { all.a->connect(nowhere, "x", Deadline::never()); }},
        {"loop_back", [&] { all.a->loop_back(all.mine, "a"); }},
        {"describe", [&] { all.a->describe(); }},
        {"attach", [&] { all.to_b->attach(all.memory->remote(), Deadline::never()); }},
        {"write", [&] { all.target->write("x", 1, 0, {}, How{}); }},
        {"write async", [&] { all.target->write("x", 1, 0, {}, async); }},
        {"read", [&] { all.target->read(&byte, 1, 0, How{}); }},
        {"signal", [&] { all.target->signal(Signal{0, 1}, How{}); }},
        {"signal async", [&] { all.target->signal(Signal{0, 1}, async); }},
        {"fetch_add", [&] { all.target->fetch_add(0, 1); }},
        {"compare_swap", [&] { all.target->compare_swap(0, 0, 1); }},
        {"flush", [&] { all.target->flush(Deadline::never()); }},
        {"cached write",
         [&] { all.to_b->target(all.memory->remote(), Deadline::never())->write("x", 1, 0, {}, How{}); }},
        {"own write", [&] { all.own->write("x", 1, 0, {}, How{}); }},
        {"window wait", [&] { all.window->wait_signal(0, 1, std::nullopt, Deadline::never(), kSpin); }},
        {"window consume", [&] { all.window->wait_signal(0, std::nullopt, std::nullopt, Deadline::never(), kSpin); }},
        {"window flush_all", [&] { all.window->flush_all(Deadline::never()); }},
        {"memory", [&] { all.mine->check_usable("this memory"); }},
        {"memory wait",
         [&] { wait_signal(*all.mine, all.target->counters(), 0, 1, Deadline::never(), kSpin, "", [] {}); }},
        {"signal_value", [&] { all.window->signal_value(0); }},
        {"work wait", [&] { pending->wait(Deadline::never()); }},
        {"strand submit", [&] { strand->submit([](Checkpoint&) {}, Deadline::never()); }},
        {"strand drain", [&] { strand->drain(Deadline::never()); }},
    };
    for (const auto& [name, use] : uses) {
      const std::string message = said(use);
      if (raised(use) != "Onesided" || !contains(message, "fork")) odd += text(name, ": '", message, "' ");
    }
    // Closing is no use, and changes nothing for the parent.
    all.window->close(Deadline::never());
    all.target->close(patience());
    all.memory->close(Deadline::never());
    all.mine->close(Deadline::never());
    all.to_b->close(patience());
    strand->close(Deadline::never());
    all.a->close(patience());
    all.b->close(patience());
    all.let_go();
    return odd;
  });
  CHECK(odd == "");

  CHECK(raised([&] { all.target->write("parent", 6, 0, Signal{0, 1}, How{}); }) == "");
  CHECK(std::string(static_cast<char*>(all.memory->data()), 6) == "parent");
  CHECK_FALSE(all.mine->closed());
  CHECK(raised([&] { all.own->write("x", 1, 0, Signal{1, 1}, How{}); }) == "");
  CHECK(all.window->wait_signal(1, 1, std::nullopt, patience(), kSpin) == 1);
  CHECK(raised([&] { all.to_b->attach(all.memory->remote(), patience())->write("x", 1, 0, {}, How{}); }) == "");
  CHECK(raised([&] { all.a->connect(all.b->bind(false), "b", patience()); }) == "");
  CHECK_FALSE(all.target->peer().lost());
  open = true;
  CHECK(raised([&] { pending->wait(patience()); }) == "");
  all.b->close(patience());
  eventually("a loss is still noticed", [&] { return all.target->peer().lost(); }, 5);
  all.a->close(patience());
}

TEST_CASE("fork: a child that lives on does not keep connections open") {
  Process peer("peer");
  const auto transport = std::make_shared<shm::ShmTransport>();
  const auto connection = transport->connect(Endpoint::from_bytes(from_hex(peer.ask("bind"))), "the peer", patience());
  const auto mine = transport->allocate(64, Access::ReadWrite, 1, 1);
  peer.ask("connect " + to_hex(transport->bind(false).to_bytes()));
  peer.ask("attach 0 " + to_hex(mine->remote().to_bytes()));
  int pipe[2];
  REQUIRE(::pipe(pipe) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte;
    ::close(pipe[1]);
    ::_exit(::read(pipe[0], &byte, 1) == 0 ? 0 : 1);
  }
  ::close(pipe[0]);
  transport->close(patience());
  eventually("the peer sees the end", [&] { return !peer.refused("signal 0").empty(); });
  peer.ask("close-connection 0");
  ::close(pipe[1]);
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK(status == 0);
}

TEST_CASE("fork: descriptors that the child opens where closed ones were stay its own") {
  Everything all;
  const std::string odd = in_child([&] {
    // The numbers of the sockets that the fork handler closed are taken again first.
    int pipe[2];
    std::vector<int> opened;
    for (unsigned i = 0; i < 10; ++i) {
      if (::pipe(pipe) != 0) return std::string("no pipe");
      opened.insert(opened.end(), {pipe[0], pipe[1]});
    }
    all.let_go();
    for (unsigned i = 0; i < opened.size(); i += 2) {
      char byte = 0;
      if (::write(opened[i + 1], "x", 1) != 1 || ::read(opened[i], &byte, 1) != 1)
        return std::string("a descriptor was closed");
    }
    return std::string();
  });
  CHECK(odd == "");
  CHECK(raised([&] { all.target->write("x", 1, 0, {}, How{}); }) == "");
  all.a->close(patience());
  all.b->close(patience());
}

#if !defined( \
    __SANITIZE_ADDRESS__)  // its allocator is locked for ever in a child that was forked in the middle of an allocation
TEST_CASE("fork: in the middle of anything, the child ends in good order") {
  Everything all;
  std::atomic<bool> stop{false};
  std::vector<std::string> odd;
  std::jthread busy([&] {
    side_by_side(2, [&](unsigned i) {
      std::vector<char> source(2 << 20), target(2 << 20);
      while (!stop) {
        if (i == 0) copy_memory(target.data(), source.data(), source.size());
        all.to_b->attach(all.memory->remote(), patience())->write("x", 1, 0, {}, How{});
        all.a->allocate(4096, Access::ReadWrite, 1, 1);
        counters_for("fork", std::to_string(i));
      }
    });
  });
  for (unsigned round = 0; round < rounds(40); ++round) {
    const std::string outcome = in_child([&] {
      counters_for("fork", "child");
      Segment::containing(&stop, 1);
      copy_measurements();
      // Not `all`: what other threads were changing at that moment is half changed here. What was whole is let go.
      Everything* const leaked = new Everything(std::move(all));
      leaked->window = nullptr;
      leaked->own = nullptr, leaked->mine = nullptr, leaked->target = nullptr;
      return raised([&] { leaked->a->bind(false); });
    });
    if (outcome != "Onesided") odd.push_back(outcome);
  }
  stop = true;
  busy.join();
  for (const std::string& outcome : odd) CHECK(outcome == "Onesided");
  CHECK(raised([&] { all.target->write("x", 1, 0, {}, How{}); }) == "");
  all.a->close(patience());
  all.b->close(patience());
}
#endif

#if !defined(__SANITIZE_THREAD__)  // it allows no new threads in a forked child
TEST_CASE("fork: a new transport in the child works, with its own threads") {
  Everything all;
  {
    std::vector<char> source(2 << 20), target(2 << 20);
    for (unsigned i = 0; i < 8; ++i) copy_memory(target.data(), source.data(), source.size());  // the helper is there
    How how;
    how.async = true;
    all.target->write(source.data(), 100, 0, std::nullopt, how)->wait(patience());  // so is the pool
  }
  const std::string odd = in_child([] {
    Pair pair;
    const auto memory = pair.b->allocate(4 << 20, Access::ReadWrite, 1, 4);
    const auto target = pair.to_b->attach(memory->remote(), patience());
    const auto source = random_bytes(4 << 20, 5);
    How how;
    how.async = true;
    for (unsigned i = 1; i <= 8; ++i) {
      std::memset(memory->data(), 0, source.size());
      target->write(source.data(), source.size(), 0, Signal{0, 1}, how)->wait(patience());
      if (std::memcmp(memory->data(), source.data(), source.size()) != 0) return std::string("wrong bytes");
      if (memory->control().signal(0) != i) return std::string("wrong count");
    }
    return std::string();
  });
  CHECK(odd == "");
  all.a->close(patience());
  all.b->close(patience());
}

TEST_CASE("fork: where no thread can be started, copies go on alone and asynchronous operations say so") {
  const std::string odd = in_child([] {
    const auto stacks_of = [](std::size_t nbytes) {
      pthread_attr_t attributes;
      ::pthread_attr_init(&attributes);
      ::pthread_attr_setstacksize(&attributes, nbytes);
      ::pthread_setattr_default_np(&attributes);
    };
    stacks_of(std::size_t{1} << 47);  // more than there are addresses
    const auto source = random_bytes(4 << 20, 6);
    for (const std::string& method : copy_methods()) {
      std::vector<char> target(source.size());
      copy_memory_by(method, target.data(), source.data(), source.size());
      if (target != source) return "wrong bytes by " + method;
    }
    const auto strand = std::make_shared<Strand>();
    const std::string message = said([&] { strand->submit([](Checkpoint&) {}, patience()); });
    if (!contains(message, "cannot start a thread") || !strand->idle()) return "'" + message + "'";
    stacks_of(1 << 20);
    return raised([&] { strand->submit([](Checkpoint&) {}, patience())->wait(patience()); });
  });
  CHECK(odd == "");
}
#endif

}  // namespace
}  // namespace onesided::tests
