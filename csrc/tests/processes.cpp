// The shm transport with the peer in a process of its own, which is killed, stopped and resumed.
#include "tests/support.h"

namespace onesided::tests {
namespace {

// A peer process that is connected with this one both ways.
struct Remote {
  std::shared_ptr<shm::ShmTransport> transport = std::make_shared<shm::ShmTransport>();
  Process process{"peer"};
  std::shared_ptr<Connection> to_peer =
      transport->connect(Endpoint::from_bytes(from_hex(process.ask("bind"))), "the peer", patience());

  Remote() { process.ask("connect " + to_hex(transport->bind(false).to_bytes())); }
  ~Remote() { transport->close(patience()); }

  std::shared_ptr<Target> open(const std::string& made) {
    return to_peer->attach(RemoteMemory::from_bytes(from_hex(process.ask(made))), patience());
  }
  void give(const Memory& memory) { process.ask("attach 0 " + to_hex(memory.remote().to_bytes())); }
};

std::string wait_for(const Memory& memory, const Target& target, double seconds = kPatience) {
  return raised([&] {
    wait_signal(memory, target.counters(), 0, 1, Deadline::after(seconds), kSpin, "a peer", [&] {
      if (target.peer().lost()) target.peer().fail_lost("wait_signal");
    });
  });
}

// Stops the peer in the middle of an operation on `memory`.
void stop_in_the_middle(Process& process, const Memory& memory) {
  eventually("the peer is stopped in the middle of a put", [&] {
    process.stop();
    if (memory.control().slot(0).busy()) return true;
    process.go_on();
    return false;
  });
}

TEST_CASE("processes: put, get, signals and atomics both ways, in shared and in private memory") {
  Remote remote;
  for (const std::string made : {"allocate", "register"}) {
    CAPTURE(made);
    const std::string number = made == "allocate" ? "0" : "1";
    const auto target = remote.open(made + " 3000000 rw 2 4");
    CHECK(remote.process.ask("uniform " + number) == "0");
    for (const char byte : {'a', 'b'}) {
      const std::vector<char> source(3000000, byte);
      target->write(source.data(), source.size(), 0, Signal{0, 1}, How{});
      CHECK(remote.process.ask("uniform " + number) == std::to_string(byte));
    }
    CHECK(remote.process.ask("wait " + number + " 2") == "2");
    remote.process.ask("fill " + number + " 77");
    std::vector<char> back(3000000);
    target->read(back.data(), back.size(), 0, How{});
    CHECK(all_are(back.data(), back.size(), 77));
    CHECK(raised([&] { target->fetch_add(0, 1); }) == (made == "allocate" ? "" : "Unsupported"));
  }
  std::vector<char> own(1 << 20);
  const auto shared = remote.transport->allocate(1 << 20, Access::ReadWrite, 1, 4);
  const auto hidden = remote.transport->register_memory(own.data(), own.size(), Access::ReadWrite, 1, 4, nullptr);
  remote.give(*shared);
  remote.give(*hidden);
  remote.process.ask("put 0 5 1048571 65");
  remote.process.ask("put 1 5 1048571 66");
  remote.process.ask("signal 0");
  CHECK(all_are(static_cast<char*>(shared->data()) + 5, (1 << 20) - 5, 65));
  CHECK(all_are(own.data() + 5, own.size() - 5, 66));
  CHECK(wait_signal(*shared, *counters_for("shm", ""), 0, 1, patience(), kSpin, "a peer", [] {}) == 1);
  remote.process.tell("exit");
  CHECK(remote.process.ended() == 0);
}

TEST_CASE("processes: a waiter in another process is woken") {
  Remote remote;
  const auto target = remote.open("allocate 64 rw 1 4");
  for (unsigned i = 1; i <= 50; ++i) {
    remote.process.tell("wait 0 " + std::to_string(i));
    target->signal(Signal{0, 1}, How{});
    CHECK(remote.process.hear() == "ok " + std::to_string(i));
  }
}

TEST_CASE("processes: a peer killed while idle is lost to operations and waiters within a second") {
  for (const std::string made : {"allocate", "register"}) {
    Remote remote;
    const auto target = remote.open(made + " 4096 rw 1 4");
    const auto mine = remote.transport->allocate(64, Access::ReadWrite, 1, 1);
    remote.give(*mine);
    std::string outcome;
    std::jthread waiter([&] { outcome = wait_for(*mine, *target); });
    const Stopwatch watch;
    remote.process.kill();
    waiter.join();
    CHECK(outcome == "ConnectionLost");
    eventually("the put fails",
               [&] { return raised([&] { target->write("x", 1, 0, {}, How{}); }) == "ConnectionLost"; });
    CHECK(watch.seconds() < 1);
    CHECK(raised([&] { target->read(&outcome[0], 1, 0, How{}); }) == "ConnectionLost");
    CHECK(raised([&] { target->signal(Signal{0, 1}, How{}); }) == "ConnectionLost");
    CHECK(raised([&] { target->fetch_add(0, 1); }) != "");
    CHECK(raised([&] { target->flush(patience()); }) == "ConnectionLost");
    CHECK(raised([&] { remote.to_peer->attach(mine->remote(), patience()); }) != "");
    CHECK(contains(said([&] { target->write("x", 1, 0, {}, How{}); }), "the peer"));
    // The only slot of this memory was the peer's.
    std::shared_ptr<Target> own;
    eventually(
        "its slot is free", [&] { return raised([&] { own = remote.transport->loop_back(mine, "own"); }).empty(); }, 1);
    CHECK(raised([&] { own->write("x", 1, 0, {}, How{}); }) == "");
  }
}

TEST_CASE("processes: a peer killed in the middle of its put is lost, its slot is free, and the memory closes") {
  for (const bool already_closing : {false, true}) {
    Remote remote;
    const auto target = remote.open("allocate 64 rw 1 4");
    const auto mine = remote.transport->allocate(64 << 20, Access::ReadWrite, 1, 1);
    remote.give(*mine);
    std::string outcome;
    std::jthread waiter([&] { outcome = wait_for(*mine, *target); });
    remote.process.ask("keep-putting 0");
    stop_in_the_middle(remote.process, *mine);
    std::jthread closer;
    if (already_closing) {
      closer = std::jthread([&] { CHECK(raised([&] { mine->close(patience()); }) == ""); });
      eventually("the close has begun", [&] { return mine->closed(); });
    }
    const Stopwatch watch;
    remote.process.kill();
    waiter.join();
    CHECK(outcome == (already_closing ? "StaleHandle" : "ConnectionLost"));
    eventually("the put fails",
               [&] { return raised([&] { target->write("x", 1, 0, {}, How{}); }) == "ConnectionLost"; });
    CHECK(watch.seconds() < 1);
    if (already_closing) {
      closer.join();
      continue;
    }
    std::shared_ptr<Target> own;
    eventually(
        "its slot is free", [&] { return raised([&] { own = remote.transport->loop_back(mine, "own"); }).empty(); }, 1);
    own->write("x", 1, 0, {}, How{});
    CHECK(raised([&] { mine->close(patience()); }) == "");
    CHECK(raised([&] { own->write("x", 1, 0, {}, How{}); }) == "StaleHandle");
  }
}

TEST_CASE("processes: a peer killed in the middle of our put to it is lost") {
  for (const std::string made : {"allocate", "register"}) {
    Remote remote;
    const auto target = remote.open(made + " 33554432 rw 1 4");
    const std::vector<char> source(16777216, 's');  // each thread has its half of the target
    std::string sync, async, flushed;
    std::atomic<unsigned> puts{0};
    std::jthread putting([&] {
      sync = raised([&] {
        for (;; ++puts) target->write(source.data(), source.size(), 0, std::nullopt, How{});
      });
    });
    How how;
    how.async = true;
    std::vector<std::shared_ptr<Work>> works;
    for (unsigned i = 0; i < 200; ++i)
      works.push_back(target->write(source.data(), source.size(), 16777216, std::nullopt, how));
    eventually("puts are under way", [&] { return puts > 1; });
    remote.process.kill();
    putting.join();
    CHECK(sync == "ConnectionLost");
    CHECK(raised([&] { works.back()->wait(patience()); }) == "ConnectionLost");
    CHECK(raised([&] { target->flush(patience()); }) == "ConnectionLost");
  }
}

TEST_CASE("processes: a stopped peer is still written to; a question to it ends at its deadline") {
  Remote remote;
  const auto target = remote.open("allocate 4096 rw 1 1");
  const std::string second = remote.process.ask("allocate 4096 rw 1 1");
  const RemoteMemory closed_to_us = RemoteMemory::from_bytes(from_hex(second));
  remote.process.stop();
  const std::vector<char> source(4096, 's');
  target->write(source.data(), source.size(), 0, Signal{0, 1}, How{});
  target->flush(patience());

  const auto attach = [&](double seconds) {
    return raised([&] { remote.to_peer->attach(closed_to_us, Deadline::after(seconds)); });
  };
  const Stopwatch watch;
  CHECK(attach(0.05) == "DeadlineExceeded");
  // One that asks for longer does not hold up another's deadline.
  std::string patient;
  std::jthread asking([&] { patient = attach(kPatience); });
  CHECK(attach(0.05) == "DeadlineExceeded");
  CHECK(attach(0) == "DeadlineExceeded");
  CHECK(watch.seconds() < 10);
  // Nor does it hold up a new connection's deadline.
  CHECK(raised([&] { remote.transport->connect(Endpoint::from_bytes(from_hex("00")), "x", Deadline::after(0)); }) ==
        "Handle");

  remote.process.go_on();
  asking.join();
  CHECK(patient == "");
  CHECK(remote.process.ask("uniform 0") == std::to_string('s'));
  // Those that were given up did not keep the one slot.
  eventually("the slot is free", [&] { return attach(kPatience).empty(); });

  // A question that is never answered ends when the connection is closed.
  remote.process.stop();
  std::atomic<bool> begun{false};
  std::jthread unanswered([&] {
    begun = true;
    patient = attach(kPatience);
  });
  eventually("it asks", [&] { return begun.load(); });
  remote.to_peer->close(patience());
  unanswered.join();
  CHECK(patient == "StaleHandle");
}

TEST_CASE("processes: connecting to a stopped peer ends at the deadline") {
  Remote remote;
  const auto rows = remote.transport->describe();
  CHECK(std::count(rows.begin(), rows.end(), std::pair<std::string, std::string>("connections", "1")) == 1);
  const Endpoint endpoint = Endpoint::from_bytes(from_hex(remote.process.ask("bind")));
  remote.process.stop();
  CHECK(raised([&] { remote.transport->connect(endpoint, "the peer", Deadline::after(0.05)); }) == "DeadlineExceeded");
  remote.process.go_on();
  CHECK(raised([&] { remote.transport->connect(endpoint, "the peer", patience()); }) == "");
}

TEST_CASE("processes: memory whose peer is stopped in the middle of a put closes when the peer goes on") {
  for (const bool transport : {false, true}) {
    Remote remote;
    const auto mine = remote.transport->allocate(64 << 20, Access::ReadWrite, 1, 2);
    remote.give(*mine);
    remote.process.ask("keep-putting 0");
    stop_in_the_middle(remote.process, *mine);
    const std::string message = said([&] { mine->close(Deadline::after(0.05)); });
    CHECK(contains(message, std::to_string(remote.process.pid())));
    CHECK(contains(message, "stopped"));
    CHECK(raised([&] { mine->close(Deadline::after(0)); }) == "DeadlineExceeded");
    CHECK(mine->closed());  // nothing new begins
    CHECK(raised([&] { remote.transport->loop_back(mine, "own")->write("x", 1, 0, {}, How{}); }) == "StaleHandle");
    remote.process.go_on();
    CHECK(raised([&] { transport ? remote.transport->close(patience()) : mine->close(patience()); }) == "");
    const std::vector<char> then(static_cast<char*>(mine->data()), static_cast<char*>(mine->data()) + mine->nbytes());
    remote.process.ask("put-ended");
    CHECK(std::memcmp(then.data(), mine->data(), mine->nbytes()) == 0);
    CHECK(remote.process.refused("put 0 0 10 1") == "StaleHandle");
  }
}

TEST_CASE("processes: what a killed peer had stuck closes, however often it was tried before") {
  Remote remote;
  const auto mine = remote.transport->allocate(64 << 20, Access::ReadWrite, 1, 2);
  remote.give(*mine);
  remote.process.ask("keep-putting 0");
  stop_in_the_middle(remote.process, *mine);
  CHECK(raised([&] { mine->close(Deadline::after(0.01)); }) == "DeadlineExceeded");
  CHECK(raised([&] { mine->close(Deadline::after(0.01)); }) == "DeadlineExceeded");
  remote.process.kill();
  CHECK(raised([&] { mine->close(patience()); }) == "");
}

TEST_CASE("processes: one of three peers dies, the others go on") {
  const auto transport = std::make_shared<shm::ShmTransport>();
  const auto mine = transport->allocate(4096, Access::ReadWrite, 1, 3);
  std::vector<std::unique_ptr<Process>> peers;
  std::vector<std::shared_ptr<Connection>> connections;
  std::vector<std::shared_ptr<Target>> targets;
  for (unsigned i = 0; i < 3; ++i) {
    peers.push_back(std::make_unique<Process>("peer"));
    connections.push_back(
        transport->connect(Endpoint::from_bytes(from_hex(peers[i]->ask("bind"))), text("peer ", i), patience()));
    targets.push_back(
        connections[i]->attach(RemoteMemory::from_bytes(from_hex(peers[i]->ask("allocate 4096 rw 1 4"))), patience()));
    peers[i]->ask("connect " + to_hex(transport->bind(false).to_bytes()));
    peers[i]->ask("attach 0 " + to_hex(mine->remote().to_bytes()));
  }
  peers[1]->kill();
  eventually("its loss is seen", [&] { return targets[1]->peer().lost(); }, 1);
  for (const unsigned i : {0u, 2u}) {
    CHECK(raised([&] { targets[i]->write("x", 1, 0, Signal{0, 1}, How{}); }) == "");
    CHECK(peers[i]->ask("wait 0 1") == "1");
    CHECK(peers[i]->refused("signal 0") == "");
  }
  CHECK(mine->control().signal(0) == 2);
  // Who goes in good order is lost, too, and frees what it held.
  peers[2]->tell("exit");
  CHECK(peers[2]->ended() == 0);
  eventually("its loss is seen", [&] { return targets[2]->peer().lost(); }, 1);
  eventually("both slots are free", [&] {
    return raised([&] {
             const auto first = transport->loop_back(mine, "own"), second = transport->loop_back(mine, "own");
           })
        .empty();
  });
  connections.clear(), targets.clear();
  transport->close(patience());
}

TEST_CASE("processes: the peer closes a memory, a connection, its transport") {
  Remote remote;
  const auto first = remote.open("allocate 4096 rw 1 4"), second = remote.open("allocate 4096 rw 1 4");
  remote.process.ask("close-memory 0");
  CHECK(raised([&] { first->write("x", 1, 0, {}, How{}); }) == "StaleHandle");
  CHECK(raised([&] { first->signal(Signal{0, 1}, How{}); }) == "StaleHandle");
  CHECK(raised([&] { second->write("x", 1, 0, {}, How{}); }) == "");
  remote.process.ask("close-connection 0");  // the way from there to here; ours stays
  CHECK(raised([&] { second->write("x", 1, 0, {}, How{}); }) == "");
  remote.process.ask("close");
  eventually("the loss is seen", [&] { return second->peer().lost(); }, 1);
  CHECK(raised([&] { second->flush(patience()); }) == "ConnectionLost");
}

}  // namespace
}  // namespace onesided::tests
